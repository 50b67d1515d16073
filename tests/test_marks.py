"""Scratches, spots and pits: what they alter, what they leave, and how much of it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import contracts
from firm.outliers import marks
from firm.outliers.registry import OUTLIERS, Scratches, Spots
from firm.types import Scene

DRAWN = {"scratches": Scratches, "spots": Spots}


def grey(count=20, side=64, level=120):
    return torch.full((count, 1, side, side), level, dtype=torch.uint8)


def disc_of(images):
    side = images.shape[-1]
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    mask = ((y - side / 2) ** 2 + (x - side / 2) ** 2 < (side / 3) ** 2).repeat(len(images), 1, 1)
    return Scene(mask, images, mask)


@pytest.mark.parametrize("name", [*DRAWN, "pits"])
def test_nothing_changes_beyond_the_object(name):
    images = grey()
    scene = disc_of(images)
    made = OUTLIERS[name](images, rng=contracts.generator(), scene=scene)
    assert made.where.flatten(1).any(1).all()
    assert not (made.where & ~scene.foreground).any()
    assert torch.equal(made.where, (made.images != images).any(1))


@settings(max_examples=20)
@given(name=st.sampled_from([*DRAWN, "pits"]), level=st.integers(0, 255), seed=st.integers(0, 2**32))
def test_something_is_seen_whatever_the_light(name, level, seed):
    images = grey(3, 32, level)
    made = OUTLIERS[name](images, rng=contracts.generator(seed))
    seen = (made.images.int() - images.int()).abs() >= marks.VISIBLE
    assert (seen.flatten(1).sum(1) >= marks.MIN_PIXELS).all()


def test_a_scratch_is_thin_and_a_spot_is_not():
    images = grey(60, 128)
    width = {}
    for name in DRAWN:
        where = OUTLIERS[name](images, rng=contracts.generator()).where
        inner = -torch.nn.functional.max_pool2d(-where[:, None].float(), 7, 1)  # 1 where 7 x 7 pixels are altered
        width[name] = inner.flatten(1).amax(1).mean()
    assert width["scratches"] < 0.1
    assert width["spots"] > 0.8


def test_a_pit_is_small_and_round():
    where = OUTLIERS["pits"](grey(60, 256), rng=contracts.generator()).where
    rows, columns = where.any(2).sum(1), where.any(1).sum(1)
    assert int(torch.minimum(rows, columns).min()) >= 4
    assert int(torch.maximum(rows, columns).max()) <= 2 * 2 * 0.03 * 256 + 2
    assert float((where.sum((1, 2)) / (rows * columns)).mean()) > 0.5  # a line would leave most of its box empty


@pytest.mark.parametrize("name", DRAWN)
def test_both_signs_are_drawn_and_the_size_of_the_change_is_kept_to(name):
    images = grey(60)
    made = DRAWN[name](change=(30, 40))(images, rng=contracts.generator())
    change = (made.images.int() - images.int()).flatten(1)
    most = torch.where(change.amax(1) > 0, change.amax(1), change.amin(1))
    assert 20 < (most > 0).sum() < 40
    assert most.abs().max() <= 40
    assert most.abs().median() >= 25


@pytest.mark.parametrize("name", DRAWN)
def test_where_grey_levels_end_the_change_goes_the_other_way(name):
    for level in (5, 250):
        images = grey(30, 64, level)
        made = DRAWN[name](change=(40, 40))(images, rng=contracts.generator())
        change = made.images.int() - images.int()
        assert ((change >= 0) if level < 128 else (change <= 0)).all()


def test_the_texture_under_a_spot_stays():
    """Nearly the same is added to neighbours, so their difference is hardly altered."""
    images = contracts.images_of(20, 1, 64) // 4 + 96
    made = Spots(size=(0.3, 0.35))(images, rng=contracts.generator())
    before, after = images.int().diff(dim=-1), made.images.int().diff(dim=-1)
    inside = made.where[:, None, :, 1:] & made.where[:, None, :, :-1]
    assert (before - after)[inside].abs().float().mean() < 3


def test_one_image_redrawn_shifts_no_other():
    """An image whose object is small needs more tries; the others come out as without it."""
    images = grey(6)
    scene = disc_of(images)
    scene.foreground[2] = False
    scene.foreground[2, :5, :5] = True  # so small that most scratches miss it
    for name in DRAWN:
        whole = OUTLIERS[name](images, rng=contracts.generator(), scene=disc_of(images))
        small = OUTLIERS[name](images, rng=contracts.generator(), scene=scene)
        others = [0, 1, 3, 4, 5]
        assert torch.equal(whole.images[others], small.images[others])
        assert not torch.equal(whole.images[2], small.images[2])


def test_an_object_too_small_to_be_drawn_on_changes_as_a_whole():
    images, tiny = grey(1, 8), torch.zeros(1, 8, 8, dtype=torch.bool)
    tiny[0, :4, :4] = True
    draw = lambda image, foreground, rng: np.zeros_like(image[0])  # noqa: E731
    made = marks.drawn_on(draw, images[0].numpy(), tiny[0].numpy(), np.random.default_rng(0))
    assert np.array_equal(made[0] != 120, tiny[0])
    assert (made[0][tiny[0]] == 128).all()


def test_a_failed_segmentation_is_taken_as_everything():
    images = grey(8, 64)
    nothing = torch.zeros(8, 64, 64, dtype=torch.bool)
    for name in DRAWN:
        found = OUTLIERS[name](images, rng=contracts.generator(), scene=Scene(nothing, images, nothing))
        assert torch.equal(found.images, OUTLIERS[name](images, rng=contracts.generator()).images)
