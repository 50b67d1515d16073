"""Tiles against slices, maps against loops over pixels, scipy and torch's own resizing."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import contracts
from firm.errors import SettingError
from firm.scoring.patch_grid import Grid

PAPER = Grid(register="resize")


@st.composite
def layouts(draw):
    """Size and stride of tiles and an image they fit, whether or not the stride leads to the border."""
    size = draw(st.integers(1, 9))
    return size, draw(st.integers(1, size)), draw(st.integers(size, 30)), draw(st.integers(size, 30))


def laid_out(layout, **settings):
    """The grid of a layout, without smoothing unless asked, and the size of its image."""
    size, stride, height, width = layout
    return Grid(size=size, stride=stride, **{"sigma": 0, **settings}), height, width


def scores(n, rows, columns, seed=0):
    return torch.rand(n, rows, columns, generator=contracts.generator(seed))


# --- places and tiles ---


def test_the_grid_of_the_paper():
    tops, lefts = Grid().places(256, 256)
    assert tops == lefts == [16 * i for i in range(15)]
    assert Grid().shape(256, 256) == (15, 15)


def test_the_last_tile_ends_at_the_border():
    assert Grid(size=10, stride=8).places(30, 26) == ([0, 8, 16, 20], [0, 8, 16])
    assert Grid(size=10, stride=10).places(10, 11) == ([0], [0, 1])


@settings(max_examples=60)
@given(layout=layouts())
def test_tiles_cover_every_pixel_and_stay_inside(layout):
    grid, height, width = laid_out(layout)
    for starts, length in zip(grid.places(height, width), (height, width), strict=True):
        assert {pixel for start in starts for pixel in range(start, start + grid.size)} == set(range(length))
        steps = np.diff(starts)
        assert (steps[:-1] == grid.stride).all()
        assert ((steps >= 1) & (steps <= grid.stride)).all()


@settings(max_examples=40)
@given(layout=layouts(), dtype=st.sampled_from([torch.uint8, torch.float32, torch.float16, torch.bool]))
def test_tiles_are_slices_image_by_image_and_row_by_row(layout, dtype):
    grid, height, width = laid_out(layout)
    images = contracts.images_of(2, height=height, width=width).to(dtype)
    tiles = grid.cut(images)
    assert tiles.dtype == dtype
    tops, lefts = grid.places(height, width)
    expected = [image[:, y : y + grid.size, x : x + grid.size] for image in images for y in tops for x in lefts]
    assert len(tiles) == len(expected) == 2 * math.prod(grid.shape(height, width))
    assert all(torch.equal(*pair) for pair in zip(tiles, expected, strict=True))


def test_tiles_are_copies():
    images = contracts.images_of(1, height=8)
    Grid(size=8, stride=8).cut(images).zero_()
    assert images.any()


@settings(max_examples=60)
@given(layout=layouts(), budget=st.integers(1, 200))
def test_strips_are_the_image_in_pieces_within_the_budget(layout, budget):
    grid, height, width = laid_out(layout)
    image = contracts.images_of(1, height=height, width=width)
    columns = grid.shape(height, width)[1]
    pieces = list(grid.tiles(image, budget))
    assert torch.equal(torch.cat(pieces), grid.cut(image))
    assert all(len(piece) <= max(budget, columns) for piece in pieces)
    assert all(len(piece) + columns > budget for piece in pieces[:-1])  # no smaller than need be


# --- maps ---


def loops(grid, values, height, width):
    """The centred map pixel by pixel: linear between the centres of the tiles around it, the edge repeated."""
    tops, lefts = grid.places(height, width)
    result = np.empty((height, width))
    for y, x in np.ndindex(height, width):
        result[y, x] = 0
        for i, row_part in around([top + (grid.size - 1) / 2 for top in tops], y):
            for j, column_part in around([left + (grid.size - 1) / 2 for left in lefts], x):
                result[y, x] += row_part * column_part * float(values[i, j])
    return result


def around(centres, pixel):
    """The one or two tiles whose centres enclose the pixel, with their parts."""
    if pixel <= centres[0]:
        return [(0, 1.0)]
    if pixel >= centres[-1]:
        return [(len(centres) - 1, 1.0)]
    after = next(i for i, centre in enumerate(centres) if centre > pixel)
    part = (pixel - centres[after - 1]) / (centres[after] - centres[after - 1])
    return [(after - 1, 1 - part), (after, part)]


@settings(max_examples=40)
@given(layout=layouts())
def test_a_centred_map_is_that_of_loops(layout):
    grid, height, width = laid_out(layout)
    values = scores(2, *grid.shape(height, width))
    maps = grid.maps(values, height, width)
    for one, value in zip(maps, values, strict=True):
        np.testing.assert_allclose(one, loops(grid, value, height, width), atol=1e-6)


@settings(max_examples=40)
@given(layout=layouts())
def test_the_papers_register_is_plain_resizing(layout):
    grid, height, width = laid_out(layout, register="resize")
    values = scores(2, *grid.shape(height, width))
    expected = F.interpolate(values[:, None], (height, width), mode="bilinear", align_corners=False)[:, 0]
    torch.testing.assert_close(grid.maps(values, height, width), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("register", "height", "width"), [("centred", 64, 50), ("centred", 32, 32), ("resize", 40, 97)]
)
def test_smoothing_is_that_of_scipy(register, height, width):
    values = scores(2, *Grid().shape(height, width))
    plain = Grid(register=register, sigma=0).maps(values, height, width).double().numpy()
    smooth = Grid(register=register).maps(values, height, width)
    for one, before in zip(smooth, plain, strict=True):
        np.testing.assert_allclose(one, gaussian_filter(before, sigma=4, truncate=1.75, mode="nearest"), atol=1e-6)


def test_a_kernel_wider_than_the_image():
    grid = Grid(size=4, stride=2, kernel=33)  # 33 taps at sigma 4: what the paper cites
    values = scores(1, *grid.shape(9, 6))
    plain = Grid(size=4, stride=2, sigma=0).maps(values, 9, 6)[0].double().numpy()
    expected = gaussian_filter(plain, sigma=4, truncate=4, mode="nearest")
    np.testing.assert_allclose(grid.maps(values, 9, 6)[0], expected, atol=1e-6)


def test_one_tap_smooths_nothing():
    values = scores(1, 3, 3)
    assert torch.equal(Grid(kernel=1).maps(values, 64, 64), Grid(sigma=0).maps(values, 64, 64))


def test_where_the_scores_sit():
    centred, resized = Grid().nodes(256), PAPER.nodes(256)
    np.testing.assert_allclose(centred, [16 * i + 15.5 for i in range(15)])
    np.testing.assert_allclose(resized, [17.0667 * i + 8.0333 for i in range(15)], atol=1e-3)
    away = np.abs(np.subtract(centred, resized))
    assert away.argmin() == 7
    assert away[7] < 1e-9
    assert away[0] == pytest.approx(away[14]) == pytest.approx(7.4667, abs=1e-3)


def test_a_lone_high_tile_is_highest_at_its_centre_and_off_it_in_the_paper():
    values = torch.zeros(1, 15, 15)
    values[0, 2, 12] = 1

    def middle(grid):
        heat = grid.maps(values, 256, 256)[0]
        pixels = torch.arange(256.0)
        return float((heat.sum(1) * pixels).sum() / heat.sum()), float((heat.sum(0) * pixels).sum() / heat.sum())

    assert middle(Grid()) == pytest.approx((47.5, 207.5), abs=1e-3)
    assert middle(PAPER) == pytest.approx((42.167, 212.833), abs=1e-2)


@pytest.mark.parametrize(("around", "half"), [(0.4, 1), (0.2, 0), (0.9, 3)])
def test_the_surrounding_is_the_mean_of_the_tiles_around(around, half):
    """Half of so much of the shorter side to each side of a tile, as far as there are tiles."""
    scores = torch.rand(2, 7, 9, generator=torch.Generator().manual_seed(1))
    found = Grid(surroundings=around).surrounding(scores)
    for n, row, column in product(range(2), range(7), range(9)):
        near = scores[n, max(0, row - half) : row + half + 1, max(0, column - half) : column + half + 1]
        assert float(found[n, row, column]) == pytest.approx(float(near.mean()), rel=1e-5)


@pytest.mark.parametrize("register", ["centred", "resize"])
def test_an_image_of_one_tile_is_flat(register):
    heat = Grid(register=register).maps(torch.full((1, 1, 1), 0.7), 32, 32)
    torch.testing.assert_close(heat, torch.full((1, 32, 32), 0.7))


@settings(max_examples=30)
@given(layout=layouts(), register=st.sampled_from(["centred", "resize"]), seed=st.integers(0, 9))
def test_a_map_stays_within_its_scores_and_turns_with_them(layout, register, seed):
    grid, height, width = laid_out(layout, register=register, kernel=5, sigma=1.5)
    values = scores(2, *grid.shape(height, width), seed) * 9 - 4
    heat = grid.maps(values, height, width)
    assert (heat.flatten(1).amax(1) <= values.flatten(1).amax(1) + 1e-5).all()
    assert (heat.flatten(1).amin(1) >= values.flatten(1).amin(1) - 1e-5).all()
    torch.testing.assert_close(grid.maps(values.mT.contiguous(), width, height), heat.mT, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grid.maps(values[1:], height, width), heat[1:], atol=1e-5, rtol=1e-5)  # no company


class Sizes(TorchDispatchMode):
    """Notes the storage of everything that is computed, as address and bytes."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.seen.add((result.untyped_storage().data_ptr(), result.untyped_storage().nbytes()))
        return result


def test_the_map_of_a_large_image_is_the_only_large_thing():
    grid = Grid()
    values = scores(1, *grid.shape(4096, 4096))
    with Sizes() as sizes:
        heat = grid.maps(values, 4096, 4096)
    assert [size for _, size in sizes.seen if size > 2**24] == [heat.nbytes]
    corner = grid.maps(values[:, :31, :31], 512, 512)  # a map depends on nothing far away
    torch.testing.assert_close(heat[:, :460, :460], corner[:, :460, :460], atol=1e-5, rtol=1e-5)


class Calls(TorchDispatchMode):
    """Counts what is computed."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_what_depends_on_the_size_alone_is_computed_once():
    grid, values, masks = Grid(sigma=3.5), scores(1, 15, 15), torch.ones(1, 256, 256, dtype=torch.bool)
    counts, maps, shares = [], [], []
    for _ in range(2):
        with Calls() as calls:
            maps.append(grid.maps(values, 256, 256))
            shares.append(grid.parts(masks))
        counts.append(calls.count)
    assert counts[1] < 40 < counts[0]
    assert torch.equal(*maps)
    assert torch.equal(*shares)
    blurred = Grid(sigma=9.0).maps(values, 256, 256)  # by other settings, another map
    assert not torch.equal(blurred, maps[0])
    assert grid.maps(values.double(), 256, 256).dtype == torch.float64


# --- settings ---


def test_wrong_settings_are_refused_by_name():
    for name, values in {
        "stride": [48, 0],
        "size": [0],
        "register": ["center"],
        "kernel": [14, -1],
        "sigma": [-1.0, math.nan],
        "layers": [(), (0, 4)],
        "top_patches": [0],
        "min_foreground": [1.5],
        "surroundings": [1.1],
    }.items():
        for value in values:
            with pytest.raises(SettingError, match=rf"tiling\.{name} "):
                Grid(**{name: value})


def test_images_that_do_not_fit_are_refused():
    with pytest.raises(SettingError, match=r"31 x 99 px.* tiling.size <= 31"):
        Grid().cut(contracts.images_of(1, height=31, width=99))
    with pytest.raises(SettingError, match=r"\(15, 14\) tiles .* 256 x 256 px"):
        Grid().maps(torch.zeros(1, 15, 14), 256, 256)
