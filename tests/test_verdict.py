"""Regions of heat maps against a plain flood fill, and how they lie over the image as it came."""

from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from firm.decision.verdict import Region, Verdict, regions_of
from firm.errors import ModelFileError


def flooded(heat, threshold):
    """Every connected part as the set of its cells, by walking from cell to cell."""
    left = {(y, x) for y in range(heat.shape[0]) for x in range(heat.shape[1]) if heat[y, x] > threshold}
    while left:
        part, edge = set(), [left.pop()]
        while edge:
            y, x = edge.pop()
            part.add((y, x))
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            edge += near
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


@given(
    heat=st.tuples(st.integers(1, 9), st.integers(1, 9)).flatmap(
        lambda shape: arrays(np.float32, shape, elements=st.sampled_from([0, 0, 1, 2, 3.5]))
    ),
    height=st.integers(1, 25),
    width=st.integers(1, 25),
    threshold=st.sampled_from([-1.0, 0.0, 1.0, 2.5, 9.0]),
)
def test_regions_are_those_of_a_flood_fill(heat, height, width, threshold):
    found = regions_of(torch.from_numpy(heat), threshold, height, width)
    assert list(found) == naive(heat, threshold, height, width)
    for region in found:
        top, left, bottom, right = region.box
        assert 0 <= top < bottom <= height
        assert 0 <= left < right <= width
        assert 1 <= region.area <= (bottom - top) * (right - left)
        assert region.peak > threshold


def test_corners_touch_and_the_hottest_comes_first():
    heat = torch.zeros(6, 8)
    heat[0, 0], heat[1, 1], heat[4, 5:7] = 2.0, 3.0, 5.0
    assert regions_of(heat, 1.0, 6, 8) == (Region((4, 5, 5, 7), 2, 5.0), Region((0, 0, 2, 2), 2, 3.0))
    assert regions_of(heat, 1.0, 60, 40)[0] == Region((40, 25, 50, 35), 100, 5.0)
    assert regions_of(heat, 2.0, 6, 8)[1] == Region((1, 1, 2, 2), 1, 3.0)  # at the threshold is not above it
    assert regions_of(heat, 5.0, 6, 8) == ()


def test_a_ring_does_not_have_the_heat_of_what_it_surrounds():
    heat = torch.full((5, 5), 2.0)
    heat[1:4, 1:4] = 0
    heat[2, 2] = 5.0
    assert regions_of(heat, 1.0, 5, 5) == (Region((2, 2, 3, 3), 1, 5.0), Region((0, 0, 5, 5), 16, 2.0))


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
