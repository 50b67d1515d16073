"""Patches of good images remembered and compared: every cell against plain loops, and a map that shows where."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import contracts
from firm import plain as module
from firm.bank import Memory, fit_bank
from firm.conditioning import Conditioned, Conditioning
from firm.encoder import Encoder, Head, ResNet18, build
from firm.images import Preprocessing
from firm.localiser import (
    LEARNT,
    Localiser,
    Looker,
    dense_features,
    fit_localiser,
    is_grey,
    kinds_of,
    look_at,
    object_part,
    remembering,
)
from firm.plain import NUMBERS
from firm.tiling import TILINGS, Grid, Whole
from firm.types import FirmError, Statistics, Tiling

SMALL = Grid(size=16, stride=12)  # of 40 x 48 px: the last row of tiles ends at the border, off the stride
HEIGHT, WIDTH = 40, 52
PREPARED = Preprocessing(HEIGHT, statistics=Statistics((0.4, 0.5, 0.6), (0.2, 0.3, 0.25)))


TINY = Encoder(width=8, stem="3x3/2", head=Head(hidden=(8,), out=4))  # of step 16: a place for every 16 pixels


@pytest.fixture(scope="module")
def encoder():
    return build(TINY, rng=contracts.generator(4)).encoder.eval()


def textures(n, height=HEIGHT, width=WIDTH, *, channels=3, seed=0):
    """Images with structure of their own at every place, alike enough to be one product."""
    rng = contracts.generator(seed)
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    plan = 110 + 50 * torch.sin(y / 5) * torch.cos(x / 7)
    tint = torch.tensor([1.0, 0.8, 0.6])[:channels, None, None]
    return (plan * tint + 12 * torch.randn(n, channels, height, width, generator=rng)).round().clamp(0, 255).byte()


def everywhere(images):
    return Conditioned(images, torch.ones(len(images), *images.shape[2:], dtype=torch.bool), None)


def looker(encoder, *, grid=SMALL, kinds=("encoder",), grey=False):
    network = build(TINY, rng=contracts.generator(4))
    network.encoder = encoder
    return Looker(network.eval(), PREPARED, grid, kinds, grey)


# --- plain loops ---


def patches(image, grid):
    """(row, column, patch) of one image, c, h, w."""
    tops, lefts = grid.places(*image.shape[1:])
    for (row, top), (column, left) in product(enumerate(tops), enumerate(lefts)):
        yield row, column, image[:, top : top + grid.size, left : left + grid.size]


def described(patch, kind, encoder):
    """The features of one patch alone."""
    if kind in LEARNT:
        mean, std = (
            torch.tensor(values)[:, None, None] for values in (PREPARED.statistics.mean, PREPARED.statistics.std)
        )
        with torch.no_grad():
            features = encoder(((patch / 255 - mean) / std)[None])
            head = build(TINY, rng=contracts.generator(4)).head.eval()
            return (head(features) if kind == "projection" else features)[0].double()
    means = patch.double().unfold(1, 2, 2).unfold(2, 2, 2).mean((-1, -2))  # 3 x 8 x 8 numbers, no more than 256
    return means.flatten() / math.sqrt(means.numel())


def distance(one, other, kind):
    if kind in LEARNT:
        return 1 - float(F.cosine_similarity(one, other, dim=0))
    return float((one - other).norm())


def naive_cells(good, images, kind, encoder, *, reach, k=1, grid=SMALL):
    known = [(row, column, described(p, kind, encoder)) for image in good for row, column, p in patches(image, grid)]
    cells = torch.zeros(len(images), *grid.shape(*images.shape[2:]))
    for number, image in enumerate(images):
        for row, column, patch in patches(image, grid):
            mine = described(patch, kind, encoder)
            near = [
                distance(mine, theirs, kind)
                for r, c, theirs in known
                if reach < 0 or (abs(r - row) <= reach and abs(c - column) <= reach)
            ]
            cells[number, row, column] = sum(sorted(near)[:k]) / k
    return cells


@pytest.mark.parametrize("kind", ["encoder", "pixels"])
@pytest.mark.parametrize(("reach", "k"), [(-1, 1), (0, 1), (1, 3)])
def test_cells_are_the_distances_of_patches_to_the_nearest_good_ones(kind, reach, k, encoder):
    good, images = textures(4), textures(2, seed=1)
    look = looker(encoder, kinds=(kind,))
    fitted = fit_localiser(look, everywhere(good), Memory(reach=reach, k=k), seed=0)
    found = fitted.cells(look(images), everywhere(images).foreground)
    assert found.shape == (2, *SMALL.shape(HEIGHT, WIDTH)) == (2, 3, 4)
    expected = naive_cells(good, images, kind, encoder, reach=reach, k=k)
    # 2 levels of 100 are what float32 leaves of a square of 10,000
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5 if kind in LEARNT else 1e-2)


def test_behind_the_head_cells_are_one_less_their_cosine_to_the_mean_direction(encoder):
    good, images = textures(4), textures(2, seed=1)
    look = looker(encoder, kinds=("projection",))
    found = fit_localiser(look, everywhere(good), Memory(), seed=0).cells(look(images), everywhere(images).foreground)
    vectors = [described(patch, "projection", encoder) for image in good for _, _, patch in patches(image, SMALL)]
    mean = sum(vector / vector.norm() for vector in vectors)
    for number, image in enumerate(images):
        for row, column, patch in patches(image, SMALL):
            mine = described(patch, "projection", encoder)
            expected = 1 - float(mine @ mean / mine.norm() / mean.norm())
            assert float(found[number, row, column]) == pytest.approx(expected, abs=1e-5)


def test_what_lies_around_a_patch_is_added_as_far_as_the_patch_counts(encoder):
    """A hidden patch stays 0 beside the worst defect; an image is the same with it or without."""
    good, images = textures(4), textures(2, seed=1)
    images[:, :, 8:20, 8:20] = 255
    hidden = torch.zeros(2, HEIGHT, WIDTH, dtype=torch.bool)
    hidden[:, :, WIDTH // 2 :] = True
    alone, wide = (looker(encoder, grid=replace(SMALL, around=around), kinds=("pixels",)) for around in (0.0, 1.0))
    cells = {}
    for look in (alone, wide):
        fitted = fit_localiser(look, everywhere(good), Memory(reach=1), seed=0)
        cells[look.grid.around] = fitted.cells(look(images), everywhere(images).foreground, hidden)
    counting = (object_part(SMALL, ~hidden) > 0).float()
    expected = cells[0.0] + wide.grid.surrounding(cells[0.0]) * counting
    torch.testing.assert_close(cells[1.0], expected)
    assert bool((cells[1.0][counting == 0] == 0).all())
    assert bool((cells[1.0] > cells[0.0])[counting == 1].all())


def test_both_are_the_mean_of_what_each_says_in_deviations(encoder):
    good, images = textures(12), textures(3, seed=1)
    memory = Memory(reach=1, standardise=True)
    cells = []
    for kinds in (("encoder",), ("pixels",), ("encoder", "pixels")):
        look = looker(encoder, kinds=kinds)
        fitted = fit_localiser(look, everywhere(good), memory, seed=0)
        cells.append(fitted.cells(look(images), everywhere(images).foreground))
    torch.testing.assert_close(cells[2], (cells[0] + cells[1]) / 2)
    assert float((cells[0] - cells[1]).abs().max()) > 0.5


# --- plain pixels ---


@pytest.mark.parametrize("size", [4, 16, 20, 32, 50])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_grey_level_everywhere_is_a_distance_of_one(size, channels):
    look = Looker(None, Preprocessing(size), Grid(size=size, stride=size), ("pixels",), grey=channels == 1)
    plain = contracts.images_of(1, 3, size) // 2
    if channels == 1:
        plain = plain[:, :1].expand(-1, 3, -1, -1)
    one, other = (look(images)["pixels"] for images in (plain, plain + 9))
    assert float((one - other).norm()) == pytest.approx(9, rel=1e-4)
    assert one.numel() <= NUMBERS


def test_large_patches_are_averaged_down():
    """32 px of grey become 16 x 16 means of four."""
    image = contracts.images_of(1, 1, 32)
    found = Looker(None, Preprocessing(32), Grid(), ("pixels",), grey=True)(image)["pixels"]
    means = image.float().unfold(2, 2, 2).unfold(3, 2, 2).mean((-1, -2))
    torch.testing.assert_close(found.flatten(), means.flatten() / 16)


def test_colour_counts_unless_there_is_none():
    grey, tinted = contracts.images_of(1, 1, 16).expand(-1, 3, -1, -1), contracts.images_of(1, 3, 16)
    one, three = (Looker(None, Preprocessing(16), SMALL, ("pixels",), grey=grey) for grey in (True, False))
    assert one(grey)["pixels"].shape == (1, 1, 1, 256)
    torch.testing.assert_close(one(tinted)["pixels"].flatten(), tinted.float().mean(1).flatten() / 16)
    assert three(tinted)["pixels"].shape[-1] % 3 == 0
    assert is_grey(grey)
    assert is_grey(grey[:, :1])
    assert not is_grey(torch.cat([grey, tinted]))


@pytest.mark.parametrize("level", [0, 128, 255])
def test_a_remembered_image_is_at_no_distance_but_for_rounding(level):
    image = torch.full((1, 1, 32, 32), level, dtype=torch.uint8)
    image[:, :, 8:20, 8:20] = 255 - level
    look = Looker(None, Preprocessing(32), Grid(size=16, stride=8), ("pixels",), grey=True)
    fitted = fit_localiser(look, everywhere(image), Memory(), seed=0)
    assert float(fitted.cells(look(image), everywhere(image).foreground).max()) < 0.25


def test_features_are_compared_by_direction_and_pixels_as_they_are():
    memory = Memory(keep=0.5, reach=2)
    assert remembering(memory, "encoder") == memory
    assert remembering(memory, "projection") == memory
    assert remembering(memory, "pixels") == replace(memory, metric="l2")
    with pytest.raises(FirmError, match=r"memory\.metric is 'l1'; use one of cosine, l2"):
        Memory(metric="l1")


@settings(max_examples=30)
@given(n=st.integers(1, 6), d=st.integers(1, 40), seed=st.integers(0, 999))
def test_l2_keys_and_queries_are_the_distance(n, d, seed):
    rng = contracts.generator(seed)
    known, asked = torch.randn(n, d, generator=rng), torch.randn(3, d, generator=rng)
    memory = Memory(metric="l2")
    keys, queries = memory.keys(known), memory.queries(asked)
    found = memory.distances(queries, queries @ keys.T)
    torch.testing.assert_close(found, torch.cdist(asked.double(), known.double()).float(), rtol=1e-3, atol=3e-3)
    assert (memory.distances(memory.queries(known), (memory.queries(known) * keys).sum(1, keepdim=True)) < 3e-2).all()


def test_the_scale_of_features_counts_in_l2_and_not_in_cosine():
    features = torch.rand(3, 2, 2, 5, generator=contracts.generator())
    asked = torch.rand(1, 2, 2, 5, generator=contracts.generator(1))
    banks = {name: fit_bank(features, Memory(metric=name), rng=contracts.generator()) for name in ("cosine", "l2")}
    torch.testing.assert_close(banks["cosine"].score(3 * asked), banks["cosine"].score(asked))
    assert (banks["l2"].score(3 * asked) > banks["l2"].score(asked)).any()
    scaled = fit_bank(3 * features, Memory(metric="l2"), rng=contracts.generator())
    torch.testing.assert_close(scaled.score(3 * asked), 3 * banks["l2"].score(asked), rtol=1e-3, atol=1e-4)


# --- the object, and the worst ---


@settings(max_examples=20)
@given(size=st.integers(2, 9), stride=st.integers(1, 9), seed=st.integers(0, 99))
def test_the_object_part_of_a_patch_is_its_share_of_pixels(size, stride, seed):
    grid = Grid(size=size, stride=min(size, stride))
    masks = torch.rand(2, 10, 13, generator=contracts.generator(seed)) < 0.4
    found = object_part(grid, masks)
    for number, mask in enumerate(masks):
        for row, column, patch in patches(mask[None], grid):
            assert float(found[number, row, column]) == float(patch.float().mean())


@pytest.mark.parametrize("images", [0, 1, 40])
def test_the_object_part_is_that_of_tiles_cut_out_whatever_their_number(images):
    grid = Grid(size=12, stride=7)
    masks = torch.rand(images, 64, 50, generator=contracts.generator()) < 0.5
    cut = grid.cut(masks[:, None].float()).mean((1, 2, 3)).view(images, *grid.shape(64, 50))
    assert torch.equal(object_part(grid, masks), cut)


@pytest.mark.parametrize("reach", [-1, 1])
def test_a_patch_counts_as_far_as_it_shows_the_object(reach):
    """Here, or with places compared with their like, in good images at this place: a missing part is seen as well."""
    grid = replace(SMALL, object=0.4)
    look = Looker(None, PREPARED, grid, ("pixels",), grey=False)
    good, images = textures(5), textures(3, seed=2)
    objects, here = (torch.zeros(n, HEIGHT, WIDTH, dtype=torch.bool) for n in (5, 3))
    objects[:, :18, :20] = True
    here[:, :15, 25:38] = True
    memory = Memory(reach=reach, standardise=True)
    fitted = fit_localiser(look, Conditioned(good, objects, None), memory, seed=0)
    plain = replace(fitted, grid=SMALL).cells(look(images), here)
    shown = object_part(grid, here)
    if reach >= 0:
        shown = torch.maximum(shown, object_part(grid, objects).mean(0))
    assert float(shown.max()) > 0.4
    assert 0 < float(shown[shown > 0].min()) < 0.4
    found = fitted.cells(look(images), here)
    torch.testing.assert_close(found, plain.clamp(min=0) * (shown / 0.4).clamp(max=1))
    assert (plain < 0).any()  # good places are below the mean, and must not fall below what shows no object
    assert (found[shown == 0] == 0).all()


@pytest.mark.parametrize("worst", [1, 3, 1000])
def test_an_image_scores_as_its_worst_patches(worst):
    cells = torch.randn(4, 3, 4, generator=contracts.generator())
    fitted = Localiser(replace(SMALL, worst=worst), {}, torch.zeros(3, 4))
    expected = [sum(sorted(image.flatten().tolist())[-worst:]) / min(worst, 12) for image in cells]
    assert fitted.scores(cells).tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("worst", [1, 3])
@pytest.mark.parametrize("part", [0.0, 0.4])
@pytest.mark.parametrize("reach", [-1, 1])
def test_reweighed_the_worst_patches_count_by_the_crowd_around_their_nearest(worst, part, reach, encoder):
    """Patch by patch in loops; the maps stay as they are."""
    grid, memory = replace(SMALL, worst=worst, object=part), Memory(reach=reach, reweight=4)
    look = looker(encoder, grid=grid, kinds=("pixels",))
    good, images = textures(4), textures(3, seed=1)
    foreground = torch.zeros(3, HEIGHT, WIDTH, dtype=torch.bool)
    foreground[:, :20, :30] = True
    fitted = fit_localiser(look, everywhere(good), memory, seed=0)
    seen = look(images)
    cells = fitted.cells(seen, foreground)
    known = [
        (row, column, described(p, "pixels", encoder)) for image in good for row, column, p in patches(image, grid)
    ]

    def weight(image, cell):
        row, column = divmod(cell, 4)
        mine = seen["pixels"][image, row, column].double()
        near = [one for one in known if reach < 0 or max(abs(one[0] - row), abs(one[1] - column)) <= reach]
        nearest = min(near, key=lambda one: distance(mine, one[2], "pixels"))[2]
        crowd = sorted(known, key=lambda one: distance(nearest, one[2], "pixels"))[:4]
        return 1 - math.exp(distance(mine, nearest, "pixels")) / sum(
            math.exp(distance(mine, one[2], "pixels")) for one in crowd
        )

    expected = []
    for image, scores in enumerate(cells.flatten(1)):
        bad = scores.argsort(descending=True)[:worst].tolist()
        expected.append(sum(float(scores[cell]) * weight(image, cell) for cell in bad) / worst)
    assert fitted.scores(cells, seen).tolist() == pytest.approx(expected, rel=1e-3)

    plain = fit_localiser(look, everywhere(good), replace(memory, reweight=0), seed=0)
    ready = Conditioned(images, foreground, None)
    here, there = fitted.locate(seen, ready), plain.locate(seen, ready)
    assert torch.equal(here.maps, there.maps)
    assert torch.equal(here.scores, fitted.scores(cells, seen))
    assert torch.equal(there.scores, plain.scores(cells))
    assert (here.scores < there.scores).all()
    with pytest.raises(FirmError, match=r"memory\.reweight weighs patches by their features; give what was seen"):
        fitted.scores(cells)


def test_a_reweighed_localiser_survives_its_tensors(encoder):
    memory = Memory(keep=0.5, choose="coreset", reweight=5)
    look = looker(encoder)
    fitted = fit_localiser(look, everywhere(textures(6)), memory, seed=3)
    loaded = Localiser.from_tensors(fitted.tensors(), look.grid, memory, ("encoder",))
    seen, ready = look(textures(2, seed=5)), everywhere(textures(2, seed=5))
    assert torch.equal(loaded.locate(seen, ready).scores, fitted.locate(seen, ready).scores)


def test_impossible_tilings_are_named():
    for wrong, message in (
        ({"worst": 0}, r"tiling\.worst is 0"),
        ({"object": 1.5}, r"tiling\.object 1\.5; use 1 or more and 0\.\.1"),
        ({"object": -0.1}, r"tiling\.object -0\.1"),
    ):
        with pytest.raises(FirmError, match=message):
            Grid(**wrong)


def test_whole_images_are_no_patches():
    assert not Whole().patchwise
    assert Grid().patchwise
    assert {"whole": Whole(), "grid": Grid()} == TILINGS
    assert all(isinstance(tiling, Tiling) for tiling in TILINGS.values())


def test_kinds_of_features():
    assert kinds_of("encoder") == ("encoder",)
    assert kinds_of("pixels") == ("pixels",)
    assert kinds_of("both") == ("encoder", "pixels")
    with pytest.raises(
        FirmError, match="features is 'colour'; use both, or one or more of encoder, projection, pixels, b"
    ):
        kinds_of("colour")


# --- features of all patches from a few passes ---


def stage_means(stages, layer, top, left, encoder, grid):
    """Means over the places of one stage that lie in the patch at (top, left); before the last over its fields."""
    fine = encoder.step // 2 ** (4 - layer)
    side = grid.size // fine
    part = stages[layer - 1][0, :, top // fine : top // fine + side, left // fine : left // fine + side]
    fields = min({1: 4, 2: 2, 3: 2, 4: 1}[layer], side)
    return torch.cat([field.mean((1, 2)) for row in part.chunk(fields, 1) for field in row.chunk(fields, 2)])


def naive_dense(encoder, grid, image):
    """Each patch from a pass of its own over the image, shifted so that a place begins where the patch does."""
    tops, lefts = grid.places(*image.shape[2:])
    rows = []
    for top in tops:
        row = []
        for left in lefts:
            down, right = top % encoder.step, left % encoder.step
            with torch.no_grad():
                stages = encoder.stages(image[:, :, down:, right:])
            parts = [stage_means(stages, layer, top - down, left - right, encoder, grid) for layer in grid.layers]
            if grid.layers != (4,):
                parts = [F.normalize(part, dim=0) for part in parts]
            row.append(torch.cat(parts))
        rows.append(torch.stack(row))
    return torch.stack(rows)


@pytest.mark.parametrize(("stride", "height", "width"), [(4, 40, 48), (8, 48, 64), (16, 64, 80), (32, 64, 96)])
@pytest.mark.parametrize("layers", [(4,), (2, 3)])
def test_dense_features_are_means_over_the_places_of_each_patch(stride, height, width, layers, encoder):
    grid = Grid(size=32, stride=stride, dense=True, layers=layers)
    image = PREPARED.normalise(textures(1, height, width).float() / 255)
    with torch.no_grad():
        found = dense_features(encoder, grid, image)
    assert found.shape[:2] == grid.shape(height, width)
    torch.testing.assert_close(found, naive_dense(encoder, grid, image), rtol=1e-4, atol=1e-6)


def test_at_the_encoders_own_step_dense_is_one_pooling(encoder):
    image = PREPARED.normalise(textures(1, 64, 80).float() / 255)
    with torch.no_grad():
        found = dense_features(encoder, Grid(size=32, stride=16, dense=True), image)
        pooled = F.avg_pool2d(encoder.places(image), 2, 1)[0].permute(1, 2, 0)
    torch.testing.assert_close(found, pooled)


@pytest.mark.parametrize("layers", [(4,), (1, 2, 3), (3, 4)])
def test_a_patch_by_itself_is_described_by_the_stages_asked_for(layers, encoder):
    grid = Grid(size=32, stride=16, layers=layers)
    image = textures(1, 48, 64)
    found = looker(encoder, grid=grid)(image)["encoder"][0]
    for row, column, patch in patches(image[0], grid):
        alone = naive_dense(encoder, grid, PREPARED.normalise(patch[None].float() / 255))[0, 0]
        torch.testing.assert_close(found[row, column], alone, rtol=1e-4, atol=1e-5)


def test_what_dense_features_cannot_give_is_said(encoder):
    image = torch.zeros(1, 3, 64, 64)
    for grid, message in (
        (
            Grid(size=24, stride=8),
            r"patches of a multiple of 16 px and a stride .* not 24 and 8; set tiling\.dense=false",
        ),
        (Grid(size=32, stride=12), "not 32 and 12"),
        (Grid(size=32, stride=24), "not 32 and 24"),
    ):
        with pytest.raises(FirmError, match=message):
            dense_features(encoder, grid, image)
    with pytest.raises(FirmError, match="the stride 16 to lead exactly to the border of 72 x 64 px"):
        dense_features(encoder, Grid(size=32, stride=16), torch.zeros(1, 3, 72, 64))


class Means(ResNet18):
    """An encoder that sees nothing beyond each place: the means of its pixels."""

    def stages(self, images):
        return [F.avg_pool2d(images, self.step >> (4 - layer), ceil_mode=True) for layer in (1, 2, 3, 4)]


@pytest.mark.parametrize("stride", [2, 8, 16, 32])
@pytest.mark.parametrize("layers", [(4,), (1, 4), (2, 3)])
def test_without_a_view_beyond_the_patch_dense_features_are_those_of_the_patch(stride, layers):
    encoder, image = Means(TINY), textures(1, 64, 96)
    near, by_tiles = (
        looker(encoder, grid=Grid(size=32, stride=stride, dense=dense, layers=layers)) for dense in (True, False)
    )
    torch.testing.assert_close(near(image)["encoder"], by_tiles(image)["encoder"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("grid", [Grid(), Grid(dense=True), Grid(stride=8, dense=True)], ids=["tiles", "dense", "fine"])
@pytest.mark.parametrize("place", [(64, 72), (40, 88), (84, 52)])
def test_a_map_peaks_where_a_blob_was_planted(grid, place, encoder):
    good, image = textures(10, 128, 128), textures(1, 128, 128, seed=9)
    y, x = place
    image[:, :, y - 8 : y + 8, x - 8 : x + 8] = 255
    look = looker(Means(TINY) if grid.dense else encoder, grid=grid)
    fitted = fit_localiser(look, everywhere(good), Memory(reach=0, standardise=True), seed=0)
    found = fitted.locate(look(image), everywhere(image))
    assert found.maps.shape == (1, 128, 128)
    assert math.dist(divmod(int(found.maps[0].argmax()), 128), place) < 12
    normal = fitted.locate(look(textures(1, 128, 128, seed=10)), everywhere(image)).scores
    assert float(found.scores) > 1.2 * float(normal)


def test_the_map_of_an_aligned_image_lies_over_the_image_as_it_came():
    image = torch.full((1, 1, 64, 64), 20, dtype=torch.uint8)
    image[:, :, 10:54, 27:37] = 120  # upright: aligned, it lies level
    image[:, :, 46:52, 29:35] = 250
    condition = Conditioning(align=True, foreground=replace(Conditioning().foreground, method="otsu"))
    look = Looker(None, Preprocessing(64), Grid(size=8, stride=4, sigma=0), ("pixels",), grey=True)
    plain = torch.full_like(image, 20)
    fitted = fit_localiser(look, everywhere(plain), Memory(), seed=0)
    ready = condition(image)
    found = fitted.locate(look(ready.images), ready).maps[0]
    assert math.dist(divmod(int(found.argmax()), 64), (48.5, 31.5)) < 6


# --- many, large, saved ---


def test_large_images_are_looked_at_in_strips(encoder, monkeypatch):
    look = looker(encoder, grid=Grid(size=32, stride=32), kinds=("encoder", "pixels"))
    image = textures(1, 1024, 1024)
    seen = []
    handle = encoder.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    try:
        strips = look(image)
        assert max(seen) <= module.TILES < sum(seen) == 1024
        monkeypatch.setattr(module, "TILES", 10**6)
        whole = look(image)
        assert seen[-1] == 1024
    finally:
        handle.remove()
    for kind in look.kinds:
        assert strips[kind].shape[:3] == (1, 32, 32)
        torch.testing.assert_close(strips[kind], whole[kind], rtol=1e-4, atol=1e-5)


def test_many_images_are_looked_at_some_at_a_time(encoder):
    images = textures(19)
    look = looker(encoder, kinds=("encoder", "pixels"))
    sizes = []

    class Counted:
        grid, kinds = look.grid, look.kinds

        def __call__(self, some):
            sizes.append(len(some))
            return look(some)

    seen = look_at(Counted(), images)
    assert sizes == [16, 3]
    for number in (0, 15, 16, 18):
        alone = look(images[number : number + 1])
        assert all(torch.equal(alone[kind][0], seen[kind][number]) for kind in look.kinds)


@pytest.mark.parametrize("kinds", [("encoder",), ("pixels",), ("encoder", "pixels")])
def test_what_was_saved_scores_the_same_to_the_bit(kinds, encoder):
    memory = Memory(reach=1, standardise=True, keep=0.5, choose="coreset")
    look = looker(encoder, grid=replace(SMALL, object=0.3), kinds=kinds)
    masks = textures(12)[:, 0] > 110
    fitted = fit_localiser(look, Conditioned(textures(12), masks, None), memory, seed=3)
    named = fitted.tensors()
    loaded = Localiser.from_tensors({name: value.clone() for name, value in named.items()}, look.grid, memory, kinds)
    assert named.keys() == loaded.tensors().keys()
    seen, foreground = look(textures(2, seed=5)), masks[:2]
    assert torch.equal(loaded.cells(seen, foreground), fitted.cells(seen, foreground))
    again = fit_localiser(look, Conditioned(textures(12), masks, None), memory, seed=3)
    assert torch.equal(again.cells(seen, foreground), fitted.cells(seen, foreground))
    with pytest.raises((FirmError, KeyError)):
        Localiser.from_tensors(
            {name: v for name, v in named.items() if "vectors" not in name}, look.grid, memory, kinds
        )
