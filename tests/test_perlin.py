"""Perlin masks: the noise against plain loops, its coverage against measured values, and never an empty one."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firm.errors import FirmError
from firm.outliers import perlin_blend as perlin
from firm.outliers.perlin_blend import perlin_mask, perlin_noise


def fade(t):
    return 6 * t**5 - 15 * t**4 + 10 * t**3


def noise_at(angles, side, row, column):
    """One pixel of gradient noise, corner by corner."""
    y, x = row * (angles.shape[0] - 1) / side, column * (angles.shape[1] - 1) / side
    top, left = math.floor(y), math.floor(x)
    total = 0.0
    for down in (0, 1):
        for right in (0, 1):
            angle = float(angles[top + down, left + right])
            along = math.cos(angle) * (x - left - right) + math.sin(angle) * (y - top - down)
            weight_y = fade(y - top) if down else 1 - fade(y - top)
            weight_x = fade(x - left) if right else 1 - fade(x - left)
            total += weight_y * weight_x * along
    return math.sqrt(2) * total


@settings(max_examples=20)
@given(rows=st.sampled_from([1, 2, 4, 8]), columns=st.sampled_from([1, 2, 4, 8]), seed=st.integers(0, 2**32))
def test_the_noise_is_that_of_plain_loops(rows, columns, seed):
    angles = np.random.default_rng(seed).uniform(0, 2 * math.pi, (rows + 1, columns + 1)).astype(np.float32)
    expected = [[noise_at(angles, 16, row, column) for column in range(16)] for row in range(16)]
    np.testing.assert_allclose(perlin_noise(angles, 16), expected, atol=2e-6)


def test_the_noise_stays_within_one():
    """sqrt(2) scales the extreme of a cell, 1 / sqrt(2), to 1; it is reached where four gradients point inwards."""
    inwards = np.float32([[math.pi / 4, 3 * math.pi / 4], [-math.pi / 4, -3 * math.pi / 4]])
    assert perlin_noise(inwards, 64).max() == pytest.approx(1, abs=1e-6)


def plain_draws(count, height, width, seed):
    """Masks as drawn, before any is drawn again."""
    rng = np.random.default_rng(seed)
    return np.array([perlin_mask(height, width, rng=rng, least=0) for _ in range(count)])


def test_coverage_is_the_measured_one():
    """Values measured on 400 draws; over twenty such sets they vary within these bounds."""
    coverage = plain_draws(400, 256, 256, seed=1).mean((1, 2))
    assert coverage.mean() == pytest.approx(0.049, abs=0.005)
    assert np.median(coverage) == pytest.approx(0.046, abs=0.003)
    low, high = np.quantile(coverage, [0.1, 0.9])
    assert low == pytest.approx(0.019, abs=0.01)
    assert high == pytest.approx(0.066, abs=0.02)
    assert (coverage == 0).mean() == pytest.approx(0.05, abs=0.03)


def test_cells_are_turned_and_the_canvas_keeps_its_size():
    """A turned square leaves its corners empty, and its middle is as likely as the rest."""
    often = plain_draws(2000, 64, 64, seed=2).mean(0)
    assert often[:6, :6].mean() < 0.7 * often[16:48, 16:48].mean()
    assert often[29:35, :4].mean() > 0.5 * often[16:48, 16:48].mean()


def test_the_middle_of_the_canvas_is_kept():
    """A crop of 40 of 64 pixels never shows the empty corners of the turned canvas."""
    often = plain_draws(2000, 40, 40, seed=2).mean(0)
    for corner in (often[:10, :10], often[:10, -10:], often[-10:, :10], often[-10:, -10:]):
        assert corner.mean() > 0.75 * often.mean()


def test_angles_reach_a_quarter_turn_either_way(monkeypatch):
    turns = []
    matrix = perlin.cv2.getRotationMatrix2D
    monkeypatch.setattr(
        perlin.cv2, "getRotationMatrix2D", lambda at, turn, by: turns.append(turn) or matrix(at, turn, by)
    )
    plain_draws(300, 16, 16, seed=3)
    assert -90 <= min(turns) < -85
    assert 85 < max(turns) <= 90


def test_both_exponents_go_from_0_to_5(monkeypatch):
    shapes, noise = [], perlin.perlin_noise
    monkeypatch.setattr(perlin, "perlin_noise", lambda angles, side: shapes.append(angles.shape) or noise(angles, side))
    plain_draws(400, 64, 64, seed=4)
    cells = np.array(shapes) - 1
    assert {tuple(pair) for pair in cells.tolist()} == {(2**i, 2**j) for i in range(6) for j in range(6)}
    counts = [(cells == 2**i).sum() for i in range(6)]
    assert min(counts) > 0.75 * len(cells) * 2 / 6


@pytest.mark.parametrize(("height", "width"), [(256, 256), (300, 200), (64, 48), (17, 90), (16, 16)])
def test_any_size_is_covered_alike(height, width):
    masks = plain_draws(300, height, width, seed=5)
    assert masks.dtype == bool
    assert masks.shape[1:] == (height, width)
    assert 0.02 < masks.mean() < 0.08
    reached = masks[:, 2:-2, 2:-2].any(0) if min(height, width) > 16 else masks.any(0)
    assert reached.mean() > 0.9


@settings(max_examples=30)
@given(
    height=st.integers(16, 70), width=st.integers(16, 70), share=st.floats(0, 1), seed=st.integers(0, 2**32),
    least=st.integers(1, 60),
)  # fmt: skip
def test_a_mask_lies_on_the_object_and_is_large_enough(height, width, share, seed, least):
    rng = np.random.default_rng(seed)
    foreground = rng.random((height, width)) < share
    mask = perlin_mask(height, width, rng=rng, foreground=foreground, least=least)
    assert mask.sum() >= least
    if foreground.sum() >= least:
        assert not (mask & ~foreground).any()


def test_one_seed_gives_one_mask():
    first, again, other = (perlin_mask(64, 64, rng=np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_too_small_an_object_is_taken_to_be_everywhere():
    foreground = np.zeros((64, 64), bool)
    foreground[3, :15] = True
    for seed in range(5):
        mask = perlin_mask(64, 64, rng=np.random.default_rng(seed), foreground=foreground, least=16)
        assert 16 <= mask.sum() < 64 * 64 / 2
    assert not foreground[4:].any()


def test_a_rectangle_stands_in_where_noise_never_falls(monkeypatch):
    monkeypatch.setattr(perlin, "LEVEL", 2.0)  # above any noise
    calls, noise = [], perlin.perlin_noise
    monkeypatch.setattr(perlin, "perlin_noise", lambda *given: calls.append(1) or noise(*given))
    foreground = np.zeros((64, 64), bool)
    foreground[10:40, 20:60] = True
    masks = [perlin_mask(64, 64, rng=np.random.default_rng(seed), foreground=foreground) for seed in range(40)]
    assert len(calls) == 40 * 50
    for mask in masks:
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        box = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert box.all()
        assert box.size >= 16
        assert not (mask & ~foreground).any()
    assert len({mask.tobytes() for mask in masks}) > 30
    assert np.any(masks, axis=0)[foreground].mean() > 0.9


def test_an_image_without_room_is_refused():
    with pytest.raises(FirmError, match="an image of 4 x 3 pixels has no room for an anomaly of 16; lower `least`"):
        perlin_mask(3, 4, rng=np.random.default_rng(0))
