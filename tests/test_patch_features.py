"""Features of patches: by the encoder's stages, a few images and strips at a time, and plain pixels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import contracts
from firm.images.colour import is_grey
from firm.images.preprocess import Preprocessing
from firm.networks.heads import Encoder, Head, build
from firm.scoring import patch_features as module
from firm.scoring.memory import Memory
from firm.scoring.models import PatchScorer
from firm.scoring.patch_bank import fit_bank
from firm.scoring.patch_features import MOST_PIXELS, EncoderFeatures, extract
from firm.scoring.patch_grid import Grid
from test_anomaly_map import PREPARED, extractor, patches, textures, whole

SMALL = Grid(size=16, stride=12)


@pytest.fixture(scope="module")
def network():
    return build(Encoder(width=8, stem="3x3/2", head=Head(hidden=(8,), out=4)), rng=contracts.generator(4)).eval()


def stage_means(stage, layer):
    """Means over the fields of one stage of a patch; the last stage is one field."""
    fields = min({1: 4, 2: 2, 3: 2, 4: 1}[layer], stage.shape[-1])
    return torch.cat([field.mean((1, 2)) for row in stage.chunk(fields, 1) for field in row.chunk(fields, 2)])


@pytest.mark.parametrize("layers", [(4,), (1, 2, 3), (3, 4)])
def test_a_patch_is_described_by_the_stages_asked_for(layers, network):
    grid = Grid(size=32, stride=16, layers=layers)
    image = textures(1, 48, 64)
    features = extractor(network, grid=grid)(image)["encoder"][0]
    for row, column, patch in patches(image[0], grid):
        with torch.no_grad():
            stages = network.encoder.stages(PREPARED.normalise(patch[None].float() / 255))
        parts = [stage_means(stages[layer][0], layer) for layer in layers]
        expected = parts[0] if layers == (4,) else torch.cat([F.normalize(part, dim=0) for part in parts])
        torch.testing.assert_close(features[row, column], expected, rtol=1e-4, atol=1e-5)


def test_large_images_are_described_in_strips_and_many_a_few_at_a_time(network, monkeypatch):
    features = extractor(network, grid=Grid(size=32, stride=32), kinds=("encoder", "pixels"))
    image, sizes = textures(1, 512, 512), []
    handle = network.encoder.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    try:
        monkeypatch.setattr(module, "TILES", 100)
        strips = features(image)
        assert max(sizes) <= 100 < sum(sizes) == 256
        monkeypatch.setattr(module, "TILES", 10**6)
        at_once = features(image)
        assert sizes[-1] == 256
    finally:
        handle.remove()
    for kind in features.kinds:
        torch.testing.assert_close(strips[kind], at_once[kind], rtol=1e-4, atol=1e-5)

    class Counted:
        grid, kinds = SMALL, ("encoder",)

        def __call__(self, images):
            sizes.append(len(images))
            return extractor(network)(images)

    sizes.clear()
    images = textures(19)
    together = extract(Counted(), images)
    assert sizes == [16, 3]
    for number in (0, 16, 18):
        assert torch.equal(extractor(network)(images[number : number + 1])["encoder"][0], together["encoder"][number])


# --- plain pixels ---


def pixels_of(side, grid, *, grey):
    return EncoderFeatures(None, Preprocessing(side), grid, ("pixels",), grey=grey)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_grey_level_everywhere_is_a_distance_of_one(channels):
    for size in (4, 16, 20, 50):
        features = pixels_of(size, Grid(size=size, stride=size), grey=channels == 1)
        plain = contracts.images_of(1, 3, size) // 2
        plain = plain[:, :1].expand(-1, 3, -1, -1) if channels == 1 else plain
        first, other = (features(images)["pixels"] for images in (plain, plain + 9))
        assert float((first - other).norm()) == pytest.approx(9, rel=1e-4)
        assert first.numel() <= MOST_PIXELS


def test_large_patches_are_averaged_and_colour_counts_unless_there_is_none():
    image = contracts.images_of(1, 1, 32)
    means = image.float().unfold(2, 2, 2).unfold(3, 2, 2).mean((-1, -2))  # 32 px of grey become 16 x 16 means of four
    averaged = pixels_of(32, Grid(), grey=True)(image)["pixels"]
    torch.testing.assert_close(averaged.flatten(), means.flatten() / 16)
    grey, tinted = contracts.images_of(1, 1, 16).expand(-1, 3, -1, -1), contracts.images_of(1, 3, 16)
    without, coloured = (pixels_of(16, SMALL, grey=grey) for grey in (True, False))
    assert without(grey)["pixels"].shape == (1, 1, 1, 256)
    torch.testing.assert_close(without(tinted)["pixels"].flatten(), tinted.float().mean(1).flatten() / 16)
    assert coloured(tinted)["pixels"].shape[-1] % 3 == 0
    assert is_grey(grey)
    assert is_grey(grey[:, :1])
    assert not is_grey(torch.cat([grey, tinted]))


def test_a_remembered_image_is_at_no_distance_but_for_rounding():
    features = pixels_of(32, Grid(size=16, stride=8), grey=True)
    for level in (0, 128, 255):
        image = torch.full((1, 1, 32, 32), level, dtype=torch.uint8)
        image[:, :, 8:20, 8:20] = 255 - level
        scorer = PatchScorer.fit(features.grid, features(image), whole(image), Memory(), seed=0)
        assert float(scorer.cells(features(image), whole(image).foreground).max()) < 0.25


@settings(max_examples=30)
@given(n=st.integers(1, 6), d=st.integers(1, 40), seed=st.integers(0, 999))
def test_l2_keys_and_queries_are_the_distance(n, d, seed):
    rng = contracts.generator(seed)
    known, asked = torch.randn(n, d, generator=rng), torch.randn(3, d, generator=rng)
    memory = Memory(metric="l2")
    keys, queries = memory.keys(known), memory.queries(asked)
    distances = memory.distances(queries, queries @ keys.T)
    torch.testing.assert_close(distances, torch.cdist(asked.double(), known.double()).float(), rtol=1e-3, atol=3e-3)
    assert (memory.distances(memory.queries(known), (memory.queries(known) * keys).sum(1, keepdim=True)) < 3e-2).all()


def test_the_scale_of_features_counts_in_l2_and_not_in_cosine():
    features = torch.rand(3, 2, 2, 5, generator=contracts.generator())
    asked = torch.rand(1, 2, 2, 5, generator=contracts.generator(1))
    banks = {name: fit_bank(features, Memory(metric=name), rng=contracts.generator()) for name in ("cosine", "l2")}
    torch.testing.assert_close(banks["cosine"].score(3 * asked), banks["cosine"].score(asked))
    scaled = fit_bank(3 * features, Memory(metric="l2"), rng=contracts.generator())
    torch.testing.assert_close(scaled.score(3 * asked), 3 * banks["l2"].score(asked), rtol=1e-3, atol=1e-4)
