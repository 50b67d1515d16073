"""Rotations to the pixel, exposure from its pool, and the geometry of CutPaste."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import contracts
from firm.errors import DataError
from firm.outliers.registry import OUTLIERS, CutPaste, Exposure, Rotations
from firm.outliers.whole_images import turned

CUTPASTES = [name for name in OUTLIERS if name.startswith("cutpaste")]


@pytest.fixture
def pool(tmp_path):
    """Thirty colour images of 8 x 8, the number of each in its first pixel."""
    images = np.random.default_rng(0).integers(0, 256, (30, 8, 8, 3), dtype=np.uint8)
    images[:, 0, 0, 0] = np.arange(30)
    path = tmp_path / "exposure.npy"
    np.save(path, images)
    return path, torch.from_numpy(images).permute(0, 3, 1, 2)


# --- rotations ---


@given(quarter=st.integers(0, 3), side=st.integers(1, 6), channels=st.sampled_from([1, 3]))
def test_turning_is_exact_and_counter_clockwise(quarter, side, channels):
    images = contracts.images_of(3, channels, side)
    expected = np.rot90(images.numpy(), quarter, axes=(2, 3))
    np.testing.assert_array_equal(turned(images, quarter), expected)
    np.testing.assert_array_equal(turned(images, torch.full((3,), quarter)), expected)


def test_each_image_is_turned_by_its_own_angle():
    images = contracts.images_of(4)
    found = turned(images, torch.tensor([3, 0, 2, 1]))
    for image, result, quarter in zip(images, found, (3, 0, 2, 1), strict=True):
        np.testing.assert_array_equal(result, np.rot90(image, quarter, axes=(1, 2)))


def test_copy_selects_the_angle_and_the_angle_is_the_kind():
    images = contracts.images_of(3)
    made = Rotations()(images, rng=contracts.generator(), copy=torch.tensor([2, 0, 1]))
    assert made.group.tolist() == [3, 1, 2]
    assert made.where is None
    for image, result, quarter in zip(images, made.images, (3, 1, 2), strict=True):
        np.testing.assert_array_equal(result, np.rot90(image, quarter, axes=(1, 2)))


def test_oblong_images_are_refused():
    for quarters in (1, torch.tensor([1, 2])):
        with pytest.raises(DataError, match="images of 24 x 16 pixels"):
            turned(contracts.images_of(2, 3, 16, 24), quarters)


# --- exposure ---


def test_exposure_draws_from_the_pool(pool):
    path, images = pool
    made = Exposure(path=str(path))(contracts.images_of(200, 3, 8), rng=contracts.generator())
    numbers = made.images[:, 0, 0, 0].long()
    assert torch.equal(made.images, images[numbers])
    assert len(set(numbers.tolist())) > 25
    assert made.group.eq(1).all()


def test_rotated_exposure_names_the_angle(pool):
    path, images = pool
    made = Exposure(path=str(path), rotate=True)(contracts.images_of(30, 3, 8), rng=contracts.generator())
    upright = turned(made.images, 4 - made.group)
    assert torch.equal(upright, images[upright[:, 0, 0, 0].long()])


def test_exposure_comes_in_the_size_of_the_inliers(pool):
    made = Exposure(path=str(pool[0]))(contracts.images_of(4, 1, 20), rng=contracts.generator())
    assert made.images.shape == (4, 3, 20, 20)


def test_a_missing_pool_is_named(tmp_path):
    with pytest.raises(DataError, match=r"exposure images are not at .*nowhere\.npy"):
        Exposure(path=str(tmp_path / "nowhere.npy"))(contracts.images_of(2), rng=contracts.generator())


# --- CutPaste ---


@settings(max_examples=15)
@given(name=st.sampled_from(CUTPASTES), level=st.integers(0, 255), seed=st.integers(0, 2**32))
def test_no_image_comes_back_unchanged(name, level, seed):
    """Not even a blank one, of which every piece looks alike."""
    blank = torch.full((4, 3, 12, 12), level, dtype=torch.uint8)
    made = OUTLIERS[name](blank, rng=contracts.generator(seed))
    changed = (made.images != blank).any(1)
    assert changed.flatten(1).any(1).all()
    assert torch.equal(made.where, changed)


def test_a_black_image_becomes_its_negative():
    black = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
    made = CutPaste()(black, rng=contracts.generator())
    assert made.images.eq(255).all()
    assert made.where.all()


def extents(where):
    """Height, width and number of the changed pixels of each image."""
    rows, columns = where.any(2).sum(1), where.any(1).sum(1)
    return rows.float(), columns.float(), where.flatten(1).sum(1).float()


def noise(n, height, width=None):
    """Images in which a moved piece differs in every pixel, or nearly."""
    return contracts.images_of(n, 3, height, width, seed=4)


def test_plain_pieces_are_upright_rectangles_of_the_stated_area():
    side = 64
    made = CutPaste(variant="plain")(noise(300, side), rng=contracts.generator())
    rows, columns, count = extents(made.where)
    assert (count / (rows * columns)).min() > 0.95  # the bounding box is filled
    area = rows * columns / side**2
    assert float(area.min()) > 0.02 * 0.7  # a fraction of a pixel on each side is rounded away
    assert float(area.max()) < 0.15 * 1.3
    assert float(area.mean()) == pytest.approx((0.02 + 0.15) / 2, rel=0.06)
    ratio = (columns / rows).log()
    assert float(ratio.abs().max()) < math.log(1 / 0.3) + 0.25
    assert float(ratio.mean()) == pytest.approx(0, abs=0.12)
    assert float(ratio.std()) == pytest.approx(2 * math.log(1 / 0.3) / math.sqrt(12), rel=0.12)


def test_plain_pieces_are_pieces_of_the_image():
    images = noise(50, 32)
    made = CutPaste(variant="plain", jitter=0.0)(images, rng=contracts.generator())
    for image, result, where in zip(images.numpy(), made.images.numpy(), made.where.numpy(), strict=True):
        rows, columns = np.flatnonzero(where.any(1)), np.flatnonzero(where.any(0))
        piece = result[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        _, tall, wide = piece.shape
        windows = np.lib.stride_tricks.sliding_window_view(image, (3, tall, wide))[0]
        assert (windows == piece).all(axis=(2, 3, 4)).any()
        assert np.array_equal(result[:, ~where], image[:, ~where])


def test_scars_are_thin_and_turned():
    side = 256
    made = CutPaste(variant="scar")(noise(40, side), rng=contracts.generator())
    rows, columns, count = extents(made.where)
    diagonal = math.hypot(16, 25)
    assert float(torch.maximum(rows, columns).max()) <= diagonal + 2
    assert float(count.max()) <= 17 * 26
    assert float(count.mean()) == pytest.approx((2 + 16) / 2 * (10 + 25) / 2, rel=0.15)
    assert float((count / (rows * columns)).mean()) < 0.8  # upright ones would fill their bounding box


def test_scars_scale_with_the_image():
    made = CutPaste(variant="scar")(noise(100, 32), rng=contracts.generator())
    rows, columns, _ = extents(made.where)
    assert float(torch.maximum(rows, columns).max()) <= math.hypot(16, 25) / 8 + 2


def test_union_is_half_and_half_and_says_which():
    made = CutPaste(variant="union")(noise(300, 64), rng=contracts.generator())
    scar = made.group == 2
    assert float(scar.float().mean()) == pytest.approx(0.5, abs=0.1)
    _, _, count = extents(made.where)
    assert float(count[scar].max()) < float(count[~scar].min())


def test_pieces_reach_every_part_of_the_image():
    made = CutPaste(variant="plain")(noise(400, 16), rng=contracts.generator())
    reached = made.where.any(0)
    assert reached.any(0).all()
    assert reached.any(1).all()


def test_kinds_and_variants():
    assert [OUTLIERS[name].kinds for name in CUTPASTES] == [1, 1, 2]
    assert (Rotations().kinds, Exposure().kinds, Exposure(rotate=True).kinds) == (3, 1, 3)
