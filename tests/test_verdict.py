"""Regions of heat maps against a plain flood fill, and how they lie over the image as it came."""

from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from firm.decision.regions import HALO, SHARE, hottest, start
from firm.decision.verdict import Region, Shown, Verdict, marked, regions_of
from firm.errors import ModelFileError, SettingError


def flooded(heat, threshold):
    """Every connected part as the set of its cells, by walking from cell to cell."""
    rows, columns = heat.shape

    def limit(y, x):
        near = [heat[v, u] for v in range(rows) for u in range(columns) if max(abs(v - y), abs(u - x)) <= HALO]
        zero = np.float32(min(threshold, 0.0))
        return zero + np.float32(SHARE) * (max(*near, np.float32(threshold)) - zero)

    left = {(y, x) for y in range(rows) for x in range(columns) if heat[y, x] > limit(y, x)}
    while left:
        part, edge = set(), [left.pop()]
        while edge:
            y, x = edge.pop()
            part.add((y, x))
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            edge += near
        if max(heat[cell] for cell in part) > threshold:
            yield part


def touched(cells, of, pixels):
    return [p for p in range(pixels) if any((p + 1) * of > c * pixels and p * of < (c + 1) * pixels for c in cells)]


def naive(heat, threshold, height, width):
    """A box of every pixel any of whose ground lies under a cell of the part, pixel by pixel."""
    rows, columns = heat.shape
    found = []
    for part in flooded(heat, threshold):
        down = touched({y for y, _ in part}, rows, height)
        across = touched({x for _, x in part}, columns, width)
        box = (down[0], across[0], down[-1] + 1, across[-1] + 1)
        area = max(1, int(np.floor(len(part) * height * width / (rows * columns) + 0.5)))
        found.append(Region(box, area, max(float(heat[cell]) for cell in part)))
    return sorted(found, key=lambda one: (-one.peak, one.box))


@pytest.fixture(params=[0, 2, 40])
def halo(request, monkeypatch):
    """The walk above is slow on maps in which a halo of 32 px ends; the rule is the same for a shorter one."""
    monkeypatch.setattr("firm.decision.regions.HALO", request.param)
    monkeypatch.setitem(globals(), "HALO", request.param)
    return request.param


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    heat=st.tuples(st.integers(1, 9), st.integers(1, 9)).flatmap(
        lambda shape: arrays(np.float32, shape, elements=st.sampled_from([-2, 0, 0, 1, 1.3, 2, 3.5]))
    ),
    height=st.integers(1, 25),
    width=st.integers(1, 25),
    threshold=st.sampled_from([-1.0, 0.0, 1.0, 2.5, 9.0]),
)
def test_regions_are_those_of_a_flood_fill(halo, heat, height, width, threshold):
    found = regions_of(torch.from_numpy(heat), threshold, height, width)
    assert list(found) == naive(heat, threshold, height, width)
    for region in found:
        top, left, bottom, right = region.box
        assert 0 <= top < bottom <= height
        assert 0 <= left < right <= width
        assert 1 <= region.area <= (bottom - top) * (right - left)
        assert region.peak > threshold
    cells = {cell for part in flooded(heat, threshold) for cell in part}
    assert set(zip(*marked(heat, threshold).nonzero(), strict=True)) == cells


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 30), st.integers(0, 9))
def test_the_hottest_near_a_pixel_is_that_of_its_square(rows, columns, reach, seed):
    heat = np.random.default_rng(seed).random((rows, columns), dtype=np.float32)
    for (y, x), most in np.ndenumerate(hottest(heat, reach)):
        assert most == heat[max(0, y - reach) : y + reach + 1, max(0, x - reach) : x + reach + 1].max()


def test_corners_touch_and_the_hottest_comes_first():
    heat = torch.zeros(6, 8)
    heat[0, 0], heat[1, 1], heat[4, 5:7] = 3.2, 3.5, 5.0
    assert regions_of(heat, 1.0, 6, 8) == (Region((4, 5, 5, 7), 2, 5.0), Region((0, 0, 2, 2), 2, 3.5))
    assert regions_of(heat, 1.0, 60, 40)[0] == Region((40, 25, 50, 35), 100, 5.0)
    assert regions_of(heat, 3.2, 6, 8)[1] == Region((0, 0, 2, 2), 2, 3.5)  # it grows below the threshold
    assert regions_of(heat, 3.5, 6, 8) == (Region((4, 5, 5, 7), 2, 5.0),)  # at the threshold is not above it
    assert regions_of(heat, 5.0, 6, 8) == ()


def test_a_halo_is_left_out_and_a_faint_defect_far_away_is_not(monkeypatch):
    monkeypatch.setattr("firm.decision.regions.HALO", 15)
    heat = torch.zeros(60, 60)
    heat[10:21, 10:21], heat[15, 15], heat[50:55, 50:56] = 2.0, 5.0, 2.0
    assert regions_of(heat, 1.0, 60, 60) == (Region((15, 15, 16, 16), 1, 5.0), Region((50, 50, 55, 56), 30, 2.0))


def test_an_image_that_does_not_pass_has_a_region_at_its_hottest_place():
    heat = torch.zeros(6, 8)
    heat[1, 1:3], heat[4, 5] = torch.tensor([0.8, 0.9]), 0.5
    assert start(heat.numpy(), 0.85) == 0.85
    assert start(torch.zeros(2, 2).numpy(), 0.85) == 0.85
    assert regions_of(heat, start(heat.numpy(), 1.0), 6, 8) == (Region((1, 1, 2, 3), 2, float(heat[1, 2])),)


def test_a_ring_does_not_have_the_heat_of_what_it_surrounds():
    heat = torch.full((5, 5), 4.0)
    heat[1:4, 1:4] = 0
    heat[2, 2] = 5.0
    assert regions_of(heat, 1.0, 5, 5) == (Region((2, 2, 3, 3), 1, 5.0), Region((0, 0, 5, 5), 16, 4.0))


def test_map_and_mask_come_in_the_pixels_of_the_image():
    heat = torch.zeros(8, 8)
    heat[2:4, 4:8] = 3.0
    shown = Shown(np.zeros((80, 160, 3), np.uint8), heat, 1.0)
    assert shown.map.shape == shown.mask.shape == (80, 160)
    assert shown.map[30, 120] == 3.0
    assert shown.mask[20:40, 80:].all()
    assert shown.mask.sum() == 20 * 80
    assert not Shown(shown.picture, heat, None).mask.any()
    with pytest.raises(SettingError, match="no heat maps"):
        _ = Shown(shown.picture, None, None).map
    with pytest.raises(SettingError, match=r"17\.png"):
        _ = Verdict("17.png", 1.0, "PASS", (), "m", "c", 1.0, 2.0).map


def test_a_speck_is_kept():
    heat = torch.zeros(100, 100)
    heat[50, 50] = 1
    assert regions_of(heat, 0.5, 10, 10) == (Region((5, 5, 6, 6), 1, 1.0),)


def test_a_map_that_is_not_finite_is_refused():
    with pytest.raises(ModelFileError, match="not finite"):
        regions_of(torch.full((2, 2), float("nan")), 0.0, 4, 4)


def test_what_is_said_is_fixed():
    names = ["image", "score", "verdict", "regions", "model", "calibration", "review", "fail"]
    assert [field.name for field in fields(Verdict)] == names
    assert [field.name for field in fields(Region)] == ["box", "area", "peak"]
    with pytest.raises(FrozenInstanceError):
        Region((0, 0, 1, 1), 1, 2.0).area = 3
