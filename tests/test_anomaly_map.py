"""Patches compared with those of good images: every cell against plain loops, and a map that shows where."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import contracts
from firm.errors import FirmError, SettingError
from firm.images.alignment import Conditioned, Conditioning
from firm.images.foreground import Rule
from firm.images.preprocess import Preprocessing
from firm.networks.heads import Encoder, Head, build
from firm.scoring.memory import BY_DIRECTION, Memory, memory_for
from firm.scoring.models import PatchScorer
from firm.scoring.patch_features import EncoderFeatures, extract
from firm.scoring.patch_grid import TILINGS, Grid, Whole
from firm.types import Statistics, Tiling

SMALL = Grid(size=16, stride=12)  # of 40 x 52 px: the last row of tiles ends at the border, off the stride
HEIGHT, WIDTH = 40, 52
PREPARED = Preprocessing(HEIGHT, statistics=Statistics((0.4, 0.5, 0.6), (0.2, 0.3, 0.25)))
TINY = Encoder(width=8, stem="3x3/2", head=Head(hidden=(8,), out=4))


@pytest.fixture(scope="module")
def network():
    return build(TINY, rng=contracts.generator(4)).eval()


def textures(n, height=HEIGHT, width=WIDTH, *, seed=0):
    """Images with structure of their own at every place, alike enough to be one product."""
    rng = contracts.generator(seed)
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    plan = 110 + 50 * torch.sin(y / 5) * torch.cos(x / 7)
    tint = torch.tensor([1.0, 0.8, 0.6])[:, None, None]
    return (plan * tint + 12 * torch.randn(n, 3, height, width, generator=rng)).round().clamp(0, 255).byte()


def whole(images):
    """Images that are all object."""
    return Conditioned(images, torch.ones(len(images), *images.shape[2:], dtype=torch.bool), None)


def extractor(network, *, grid=SMALL, kinds=("encoder",)):
    return EncoderFeatures(network, PREPARED, grid, kinds, grey=False)


def fitted(extractor, aligned, memory, seed=0):
    return PatchScorer.fit(extractor.grid, extract(extractor, aligned.images), aligned, memory, seed=seed)


# --- plain loops ---


def patches(image, grid):
    """(row, column, patch) of one image, c, h, w."""
    tops, lefts = grid.places(*image.shape[1:])
    for (row, top), (column, left) in product(enumerate(tops), enumerate(lefts)):
        yield row, column, image[:, top : top + grid.size, left : left + grid.size]


def described(patch, kind, network):
    """The features of one patch alone."""
    if kind in BY_DIRECTION:
        mean, std = (
            torch.tensor(values)[:, None, None] for values in (PREPARED.statistics.mean, PREPARED.statistics.std)
        )
        with torch.no_grad():
            features = network.encoder(((patch / 255 - mean) / std)[None])
            return (network.head(features) if kind == "projection" else features)[0].double()
    means = patch.double().unfold(1, 2, 2).unfold(2, 2, 2).mean((-1, -2))  # 3 x 8 x 8 numbers, no more than 256
    return means.flatten() / math.sqrt(means.numel())


def distance(one, other, kind):
    if kind in BY_DIRECTION:
        return 1 - float(F.cosine_similarity(one, other, dim=0))
    return float((one - other).norm())


def naive_cells(good, images, kind, network, *, radius, k, grid=SMALL):
    known = [(row, column, described(p, kind, network)) for image in good for row, column, p in patches(image, grid)]
    cells = torch.zeros(len(images), *grid.shape(*images.shape[2:]))
    for number, image in enumerate(images):
        for row, column, patch in patches(image, grid):
            mine = described(patch, kind, network)
            near = [
                distance(mine, theirs, kind)
                for r, c, theirs in known
                if radius < 0 or (abs(r - row) <= radius and abs(c - column) <= radius)
            ]
            cells[number, row, column] = sum(sorted(near)[:k]) / k
    return cells


@pytest.mark.parametrize(("kind", "radius", "k"), [("encoder", 1, 3), ("pixels", -1, 1), ("pixels", 0, 1)])
def test_cells_are_the_distances_of_patches_to_the_nearest_good_ones(kind, radius, k, network):
    good, images = textures(4), textures(2, seed=1)
    features = extractor(network, kinds=(kind,))
    scorer = fitted(features, whole(good), Memory(neighbourhood=radius, k=k))
    cells = scorer.cells(features(images), whole(images).foreground)
    assert cells.shape == (2, *SMALL.shape(HEIGHT, WIDTH)) == (2, 3, 4)
    expected = naive_cells(good, images, kind, network, radius=radius, k=k)
    # 2 levels of 100 are what float32 leaves of a square of 10,000
    torch.testing.assert_close(cells, expected, rtol=1e-3, atol=1e-5 if kind in BY_DIRECTION else 1e-2)


def test_behind_the_head_cells_are_one_less_their_cosine_to_the_mean_direction(network):
    good, images = textures(4), textures(2, seed=1)
    features = extractor(network, kinds=("projection",))
    cells = fitted(features, whole(good), Memory()).cells(features(images), whole(images).foreground)
    vectors = [described(patch, "projection", network) for image in good for _, _, patch in patches(image, SMALL)]
    mean = sum(vector / vector.norm() for vector in vectors)
    for number, image in enumerate(images):
        for row, column, patch in patches(image, SMALL):
            mine = described(patch, "projection", network)
            expected = 1 - float(mine @ mean / mine.norm() / mean.norm())
            assert float(cells[number, row, column]) == pytest.approx(expected, abs=1e-5)


def test_the_surroundings_of_a_patch_are_added_as_far_as_the_patch_counts(network):
    """A hidden patch stays 0 beside the worst defect; an image is the same with it or without."""
    good, images = textures(4), textures(2, seed=1)
    images[:, :, 8:20, 8:20] = 255
    hidden = torch.zeros(2, HEIGHT, WIDTH, dtype=torch.bool)
    hidden[:, :, WIDTH // 2 :] = True
    features = extractor(network, kinds=("pixels",))
    alone = fitted(features, whole(good), Memory(neighbourhood=1))
    wide = alone.of(alone.kinds, replace(SMALL, surroundings=1.0))
    here, there = (scorer.cells(features(images), whole(images).foreground, hidden) for scorer in (alone, wide))
    counting = (SMALL.parts(~hidden) > 0).float()
    torch.testing.assert_close(there, here + wide.grid.surrounding(here) * counting)
    assert bool((there[counting == 0] == 0).all())
    assert bool((there > here)[counting == 1].all())


def test_several_kinds_are_the_mean_of_each_in_deviations(network):
    good, images = textures(12), textures(3, seed=1)
    cells = []
    for kinds in (("encoder",), ("pixels",), ("encoder", "pixels")):
        features = extractor(network, kinds=kinds)
        scorer = fitted(features, whole(good), Memory(neighbourhood=1, standardise=True))
        cells.append(scorer.cells(features(images), whole(images).foreground))
    torch.testing.assert_close(cells[2], (cells[0] + cells[1]) / 2)
    assert float((cells[0] - cells[1]).abs().max()) > 0.5
    both = scorer.of(("encoder",))  # some of its kinds alone
    assert torch.equal(both.cells(features(images), whole(images).foreground), cells[0])


def test_learnt_features_are_compared_by_direction_and_pixels_by_distance():
    memory = Memory(sampling_ratio=0.5, neighbourhood=2)
    assert memory_for(memory, "encoder") == memory_for(memory, "projection") == memory
    assert memory_for(memory, "pixels") == memory_for(memory, "backbone") == replace(memory, metric="l2")
    by_angle = Memory(metric="angle")
    assert [memory_for(by_angle, kind) for kind in ("pixels", "backbone", "encoder")] == [by_angle] * 3
    with pytest.raises(SettingError, match=r"memory\.metric.*'l1'"):
        Memory(metric="l1")


# --- the object, and the worst ---


@settings(max_examples=20)
@given(size=st.integers(2, 9), stride=st.integers(1, 9), images=st.sampled_from([0, 1, 40]), seed=st.integers(0, 99))
def test_the_object_part_of_a_patch_is_its_share_of_pixels(size, stride, images, seed):
    grid = Grid(size=size, stride=min(size, stride))
    masks = torch.rand(images, 10, 13, generator=contracts.generator(seed)) < 0.4
    shares = grid.parts(masks)
    assert shares.shape == (images, *grid.shape(10, 13))
    for number, mask in enumerate(masks[:2]):
        for row, column, patch in patches(mask[None], grid):
            assert float(shares[number, row, column]) == float(patch.float().mean())
    assert torch.equal(shares[1:], grid.parts(masks[1:]))


@pytest.mark.parametrize("radius", [-1, 1])
def test_a_patch_counts_as_far_as_it_shows_the_object(radius):
    """Here, or within a neighbourhood, in good images at this place: a missing part is seen as well."""
    grid = replace(SMALL, min_foreground=0.4)
    features = EncoderFeatures(None, PREPARED, grid, ("pixels",), grey=False)
    good, images = textures(5), textures(3, seed=2)
    objects, here = (torch.zeros(n, HEIGHT, WIDTH, dtype=torch.bool) for n in (5, 3))
    objects[:, :18, :20] = True
    here[:, :15, 25:38] = True
    memory = Memory(neighbourhood=radius, standardise=True)
    scorer = fitted(features, Conditioned(good, objects, None), memory)
    plain = scorer.of(("pixels",), SMALL).cells(features(images), here)
    shown = grid.parts(here)
    if radius >= 0:
        shown = torch.maximum(shown, grid.parts(objects).mean(0))
    assert float(shown.max()) > 0.4
    assert 0 < float(shown[shown > 0].min()) < 0.4
    cells = scorer.cells(features(images), here)
    torch.testing.assert_close(cells, plain.clamp(min=0) * (shown / 0.4).clamp(max=1))
    assert (plain < 0).any()  # good places are below the mean, and must not fall below what shows no object
    assert (cells[shown == 0] == 0).all()


def test_an_image_scores_as_its_worst_patches():
    cells = torch.randn(4, 3, 4, generator=contracts.generator())
    for worst in (1, 3, 1000):
        scorer = PatchScorer(replace(SMALL, top_patches=worst), {}, torch.zeros(3, 4))
        expected = [sum(sorted(image.flatten().tolist())[-worst:]) / min(worst, 12) for image in cells]
        assert scorer.scores(cells).tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("worst", "least", "radius"), [(1, 0.0, -1), (3, 0.4, 1)])
def test_reweighted_patches_count_by_the_patches_around_their_nearest(worst, least, radius, network):
    """Patch by patch in loops; the maps stay as they are."""
    grid, memory = replace(SMALL, top_patches=worst, min_foreground=least), Memory(neighbourhood=radius, reweight=4)
    features = extractor(network, grid=grid, kinds=("pixels",))
    good, images = textures(4), textures(3, seed=1)
    foreground = torch.zeros(3, HEIGHT, WIDTH, dtype=torch.bool)
    foreground[:, :20, :30] = True
    scorer = fitted(features, whole(good), memory)
    described_patches = features(images)
    cells = scorer.cells(described_patches, foreground)
    known = [
        (row, column, described(p, "pixels", network)) for image in good for row, column, p in patches(image, grid)
    ]

    def weight(image, cell):
        row, column = divmod(cell, 4)
        mine = described_patches["pixels"][image, row, column].double()
        near = [each for each in known if radius < 0 or max(abs(each[0] - row), abs(each[1] - column)) <= radius]
        nearest = min(near, key=lambda each: distance(mine, each[2], "pixels"))[2]
        around = sorted(known, key=lambda each: distance(nearest, each[2], "pixels"))[:4]
        total = sum(math.exp(distance(mine, each[2], "pixels")) for each in around)
        return 1 - math.exp(distance(mine, nearest, "pixels")) / total

    expected = []
    for image, scores in enumerate(cells.flatten(1)):
        bad = scores.argsort(descending=True)[:worst].tolist()
        expected.append(sum(float(scores[cell]) * weight(image, cell) for cell in bad) / worst)
    assert scorer.scores(cells, described_patches).tolist() == pytest.approx(expected, rel=1e-3)
    plain = fitted(features, whole(good), replace(memory, reweight=0))
    assert torch.equal(plain.cells(described_patches, foreground), cells)
    assert (scorer.scores(cells, described_patches) < plain.scores(cells)).all()
    with pytest.raises(SettingError, match=r"memory\.reweight"):
        scorer.scores(cells)


# --- maps ---


def test_a_map_peaks_where_a_blob_was_planted(network):
    good, image = textures(10, 128, 128), textures(1, 128, 128, seed=9)
    y, x = place = (84, 52)
    image[:, :, y - 8 : y + 8, x - 8 : x + 8] = 255
    features = extractor(network, grid=Grid())
    scorer = fitted(features, whole(good), Memory(neighbourhood=0, standardise=True))
    cells = scorer.cells(features(image), whole(image).foreground)
    heat = scorer.maps(cells, whole(image))
    assert heat.shape == (1, 128, 128)
    assert math.dist(divmod(int(heat[0].argmax()), 128), place) < 12
    normal = scorer.cells(features(textures(1, 128, 128, seed=10)), whole(image).foreground)
    assert float(scorer.scores(cells)) > 1.2 * float(scorer.scores(normal))


def test_the_map_of_an_aligned_image_lies_over_the_image_as_it_came():
    image = torch.full((1, 1, 64, 64), 20, dtype=torch.uint8)
    image[:, :, 10:54, 27:37] = 120  # upright: aligned, it lies level
    image[:, :, 46:52, 29:35] = 250
    features = EncoderFeatures(None, Preprocessing(64), Grid(size=8, stride=4, sigma=0), ("pixels",), grey=True)
    scorer = fitted(features, whole(torch.full_like(image, 20)), Memory())
    aligned = Conditioning(align=True, foreground=Rule(method="otsu"))(image)
    heat = scorer.maps(scorer.cells(features(aligned.images), aligned.foreground), aligned)[0]
    assert math.dist(divmod(int(heat.argmax()), 64), (48.5, 31.5)) < 6


# --- saved ---


@pytest.mark.parametrize(
    ("kinds", "changes"),
    [(("encoder", "pixels"), {"standardise": True, "neighbourhood": 1}), (("projection", "pixels"), {"reweight": 5})],
)
def test_what_was_saved_scores_the_same_to_the_bit(kinds, changes, network):
    memory = Memory(sampling_ratio=0.5, sampling="coreset", **changes)
    features = extractor(network, grid=replace(SMALL, min_foreground=0.3), kinds=kinds)
    masks = textures(12)[:, 0] > 110
    good = Conditioned(textures(12), masks, None)
    scorer, again = fitted(features, good, memory, seed=3), fitted(features, good, memory, seed=3)
    stored = {name: value.clone() for name, value in scorer.state_dict().items()}
    loaded = PatchScorer.from_tensors(stored, features.grid, memory, kinds)
    assert stored.keys() == loaded.state_dict().keys()
    described_patches = features(textures(2, seed=5))
    cells = scorer.cells(described_patches, masks[:2])
    for other in (loaded, again):
        assert torch.equal(other.cells(described_patches, masks[:2]), cells)
        assert torch.equal(other.scores(cells, described_patches), scorer.scores(cells, described_patches))
    for lost in ("banks.pixels.vectors", "present"):
        with pytest.raises((FirmError, KeyError), match=lost.rsplit(".", 1)[-1]):
            PatchScorer.from_tensors({k: v for k, v in stored.items() if k != lost}, features.grid, memory, kinds)


def test_whole_images_are_no_patches():
    assert not Whole().patchwise
    assert Grid().patchwise
    assert {"whole": Whole(), "grid": Grid()} == TILINGS
    assert all(isinstance(tiling, Tiling) for tiling in TILINGS.values())
