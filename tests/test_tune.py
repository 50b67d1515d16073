"""Settings chosen on good images: a trial with synthetic defects, what wins it, and features chosen after training."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import contracts
import drawings
from firm.detector import tune
from firm.detector.detector import Detector
from firm.detector.prepare import Prepared
from firm.detector.tune import (
    BEFORE,
    BEHIND,
    CORESET_LEAST,
    CORESET_RATIO,
    EXPOSURE,
    INSPECTED,
    KEPT_AT_PLACE,
    KNOWN,
    SURROUNDINGS,
    Candidate,
    choose,
    choose_features,
    coreset_ratio,
    disjoint_parts,
    make_trial,
)
from firm.errors import DataError
from firm.images.alignment import Conditioning
from firm.images.foreground import Rule, foreground
from firm.images.preprocess import Preprocessing, resize
from firm.networks.adaptor import Adapted, Pretrained
from firm.networks.weights import WAVELETS, load_backbone
from firm.outliers.registry import Mixture, PerlinBlend
from firm.recipes.presets import ADAPTED, FAST, INSPECT
from firm.recipes.presets import recipe as preset
from firm.recipes.recipe import change
from firm.scoring.memory import Memory
from firm.scoring.patch_grid import Grid
from firm.training.loop import Training
from firm.training.patch_batches import CellSampler, PatchSet, PatchTask, ValidationImages
from firm.types import OneClass
from listening import Heard

RECIPE = change(INSPECT, {"size": 0, "tiling.stride": 16, "memory.neighbourhood": 1, "training.batch": 16})
DISC = tuple((20 * np.cos(angle), 20 * np.sin(angle)) for angle in np.arange(40) * np.pi / 20)


class Forbidden:
    """Test images, which nothing may be chosen by."""

    def __getattribute__(self, name):
        raise AssertionError(f"asked the test images for {name}")


def data_of(images, name="images"):
    return OneClass(name, images, Forbidden(), Forbidden(), size=images.shape[-1])


def tried(recipe, images, name="images", seed=0, backbone=None):
    """The recipe with its settings chosen, and every candidate with its AUROC."""
    candidates, best = [], tune._best

    def noted(all_of_them, **options):
        candidates.extend(all_of_them)
        return best(all_of_them, **options)

    with mock.patch.object(tune, "_best", noted):
        parts = torch.arange(len(images))
        return choose(recipe, data_of(images, name), parts, seed=seed, backbone=backbone).recipe, candidates


@cache
def chosen(*, automatic=RECIPE.automatic, changes=(), **drawn):
    """The same for screws, once for all tests that ask for it."""
    return tried(change(RECIPE, {"automatic": automatic, **dict(changes)}), drawings.screws(24, **drawn).images)


def grain(n=12, side=64, seed=0):
    """A texture without an object."""
    rng = torch.Generator().manual_seed(seed)
    return (120 + 20 * torch.randn(n, 1, side, side, generator=rng)).clamp(0, 255).byte().expand(-1, 3, -1, -1)


def settings_of(candidates):
    return [(each.conditioning.illumination, each.conditioning.align, each.radius) for each in candidates]


# --- what wins ---


def test_varying_illumination_is_evened_out():
    recipe, candidates = chosen(light=0.3, automatic=("foreground", "illumination"))
    assert recipe.conditioning.illumination in ("median", "local")
    values = {each.conditioning.illumination: each.auroc for each in candidates}
    assert values["none"] < max(values.values()) - 0.05


def test_a_long_part_in_any_position_is_aligned():
    recipe, candidates = chosen(turned=True)
    assert recipe.conditioning.align
    assert recipe.conditioning.foreground.method == "otsu"
    assert recipe.automatic == ()
    unaligned = max(each.auroc for each in candidates if not each.conditioning.align)
    assert max(each.auroc for each in candidates) > unaligned + 0.1
    assert settings_of(candidates) == [
        (light, align, neighbourhood)
        for neighbourhood in (1, -1)
        for align in (False, True)
        for light in ("none", "median", "local")
    ]  # the simplest first
    winner = next(each for each in candidates if each.conditioning == recipe.conditioning)
    good = [each for each in candidates if each.auroc >= max(other.auroc for other in candidates) - tune.MARGIN]
    assert good[0] == winner


def test_a_texture_is_not_aligned_and_a_round_part_has_no_direction():
    recipe, candidates = tried(RECIPE, grain())
    assert recipe.conditioning.foreground.method == "ones"
    assert len(candidates) == 6
    assert not any(each.conditioning.align for each in candidates)
    recipe, candidates = chosen(outline=DISC, automatic=("foreground", "align", "neighbourhood"))
    assert recipe.conditioning.foreground.method == "otsu"
    assert not any(each.conditioning.align for each in candidates)


def test_many_patches_that_are_compared_anywhere_are_thinned_to_a_coreset(monkeypatch):
    """Twelve images of 3 x 3 patches; within a neighbourhood none is left out, however many there are."""
    monkeypatch.setattr(tune, "CORESET", 27)
    anywhere = change(RECIPE, {"automatic": ("neighbourhood", "foreground")})
    for many, keep, sampling in ((108, 1.0, "random"), (107, 27 / 108, "coreset")):
        monkeypatch.setattr(tune, "MANY", many)
        memory = tried(anywhere, grain())[0].memory
        assert (memory.neighbourhood, memory.sampling_ratio, memory.sampling) == (-1, keep, sampling)
    near = change(RECIPE, {"automatic": ("illumination", "foreground")})
    assert tried(near, grain())[0].memory == RECIPE.memory


def test_backbone_features_of_a_texture_are_compared_anywhere_with_a_coreset(monkeypatch):
    monkeypatch.setattr(tune, "MARGIN", 1.0)  # nothing wins by so much: the simplest is taken
    recipe = preset("wavelets", **{"size": 64, "pretrained.margin": 0, "automatic": ["foreground", "neighbourhood"]})
    settled, _ = tried(recipe, grain(), backbone=load_backbone(WAVELETS))
    assert settled.conditioning.foreground.method == "ones"
    assert settled.memory.neighbourhood == -1
    assert settled.tiling.surroundings == SURROUNDINGS


def test_a_coreset_of_backbone_cells_is_a_hundredth_but_never_tiny():
    recipe = preset("wavelets", **{"size": 64, "pretrained.margin": 0, "memory.neighbourhood": -1})
    cells = recipe.grid.shape(64, 64)
    each = cells[0] * cells[1]
    for images, kept in ((5, 5 * each), (200, CORESET_LEAST), (20_000, 20_000 * each // 100)):
        ratio = coreset_ratio(recipe, torch.empty(1, 3, 64, 64, dtype=torch.uint8).expand(images, -1, -1, -1))
        assert ratio * images * each == pytest.approx(min(kept, images * each))
    many = torch.empty(20_000, 1, 64, 64, dtype=torch.uint8)
    assert coreset_ratio(recipe, many) == CORESET_RATIO
    near = change(recipe, {"memory.neighbourhood": 2})
    assert [coreset_ratio(near, many[:count]) for count in (10, KEPT_AT_PLACE, 96)] == [1, 1, KEPT_AT_PLACE / 96]
    assert coreset_ratio(change(INSPECT, {"size": 64}), many) == 1


def test_what_is_set_stays():
    fixed = ("foreground", "neighbourhood")
    recipe, candidates = chosen(automatic=fixed, changes=(("conditioning.illumination", "median"),))
    assert settings_of(candidates) == [("median", False, 1), ("median", False, -1)]
    assert (recipe.conditioning.illumination, recipe.conditioning.align) == ("median", False)
    rule = Rule(method="triangle")
    changes = (("conditioning.foreground", rule), ("memory.neighbourhood", 5))
    recipe, candidates = chosen(automatic=("illumination",), changes=changes)
    assert (recipe.conditioning.foreground, recipe.memory.neighbourhood) == (rule, 5)
    assert settings_of(candidates) == [(light, False, 5) for light in ("none", "median", "local")]


def test_within_a_neighbourhood_features_are_learnt_without_noise():
    """Unless the features are set: then the noise is that of the recipe."""
    for automatic, cells, noise in ((("features",), 2, 0.0), (("features",), -1, 0.3), (("foreground",), 2, 0.3)):
        recipe = change(RECIPE, {"automatic": automatic, "memory.neighbourhood": cells, "pretrained.noise": 0.3})
        assert tried(recipe, drawings.screws(4).images)[0].pretrained.noise == noise


def test_nothing_to_choose_costs_nothing():
    nothing = OneClass("images", Forbidden(), Forbidden(), Forbidden(), size=32)
    assert choose(FAST, nothing, torch.arange(4), seed=0).recipe is FAST


def test_a_foreground_alone_needs_no_trial():
    recipe = change(RECIPE, {"automatic": ("foreground",), "training.batch": 4})
    found, candidates = tried(recipe, drawings.screws(2).images)
    assert candidates == []
    assert found == change(recipe, {"automatic": (), "conditioning.foreground.method": "otsu"})
    published, _ = tried(recipe, drawings.screws(2).images, "mvtec:screw")
    assert published.conditioning.foreground == Rule(method="otsu", polarity="dark")
    few, _ = tried(change(recipe, {"training.batch": 64}), drawings.screws(3).images)
    assert few.training.batch == 6  # three images and their outliers


def test_the_same_seed_chooses_the_same_on_images_at_the_size_of_the_recipe():
    recipe = change(RECIPE, {"automatic": ("foreground", "neighbourhood"), "size": 48, "tiling.size": 16})
    large = drawings.screws(12).images
    first, again, other = (
        tried(recipe, images, seed=s) for images, s in ((large, 0), (resize(large, 48), 0), (large, 1))
    )
    assert first == again
    assert first[1] != other[1]


def test_a_neighbourhood_must_win_by_more_on_a_texture():
    """An object is compared within it unless anywhere is clearly better; a texture the other way round."""
    for texture, near, radius in ((False, 0.73, 2), (True, 0.74, -1), (True, 0.76, 2)):
        values = {-1: 0.70, 2: near}
        candidates = [Candidate(Conditioning(), place, values[place]) for place in ([-1, 2] if texture else [2, -1])]
        assert tune._best(candidates, texture=texture).radius == radius


def test_the_reason_for_a_simpler_candidate_is_printed(monkeypatch):
    """Only where another has the larger AUROC."""
    lines = {}
    for gain in (0.0, 0.01, 0.05):
        heard = Heard()
        monkeypatch.setattr(
            tune,
            "_tried",
            lambda candidates, *_, gain=gain: [
                replace(each, auroc=0.9 + gain * (number == 1)) for number, each in enumerate(candidates)
            ],
        )
        choose(RECIPE, data_of(drawings.screws(12).images), torch.arange(12), seed=0, listener=heard)
        (lines[gain],) = [line for line in heard.lines if "AUROC" in line]
    assert "91.0" in lines[0.01]
    assert "simpler" in lines[0.01]
    assert not any("simpler" in lines[gain] for gain in (0.0, 0.05))


# --- the trial ---


def trial_of(images, defects, *, rule=None, seed=0):
    masks = foreground(images, rule or Rule())
    return make_trial(images, masks, torch.arange(len(images)), defects, seed=seed)


@given(images=st.integers(4, 500), of_each=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_no_part_is_both_inspected_and_remembered(images, of_each, seed):
    parts = torch.arange(images) // of_each
    inspected, known = disjoint_parts(parts, rng=contracts.generator(seed))
    assert len(inspected) == min(INSPECTED, images // 3)
    assert 1 <= len(known) <= KNOWN
    assert len(set(known.tolist()) | set(inspected.tolist())) == len(known) + len(inspected)
    if images >= 100 * of_each:  # then the inspected ones leave enough parts to be remembered
        assert not set(parts[known].tolist()) & set(parts[inspected].tolist())
    if of_each >= images:  # a single part is shared
        assert len(known) == min(KNOWN, images - images // 3)


def test_a_trial_is_good_images_and_others_with_and_without_defects_in_varied_brightness():
    images = drawings.screws(30).images
    trial = trial_of(images, PerlinBlend(), rule=Rule(method="otsu"))
    assert trial.inspected.shape[0] == 20
    assert trial.defective.tolist() == [False] * 10 + [True] * 10
    names = {image.numpy().tobytes(): number for number, image in enumerate(images)}
    known = {names[image.numpy().tobytes()] for image in trial.known}
    shown = []
    for good in trial.inspected[:10].float():
        ratio = good.mean() / images.float().mean((1, 2, 3))
        difference = (images.float() * ratio[:, None, None, None] - good).abs().mean((1, 2, 3))
        number = int(difference.argmin())
        assert float(difference[number]) < 1
        assert abs(float(ratio[number]) - 1) < EXPOSURE + 0.01
        shown.append((number, float(ratio[number])))
    assert len({number for number, _ in shown}) == 10
    assert not known & {number for number, _ in shown}
    assert len(known) >= 10
    ratios = [ratio for _, ratio in shown]
    assert max(ratios) - min(ratios) > EXPOSURE
    for (number, _), bad in zip(shown, trial.inspected[10:].float(), strict=True):
        original = images[number].float()
        original *= bad.median() / original.median()
        assert float((bad - original).abs().max()) > 10


def test_every_kind_of_defect_has_its_share_of_a_trial():
    """On grey images a scratch alters little, a spot much."""
    images = torch.full((90, 1, 64, 64), 120, dtype=torch.uint8)
    trial = trial_of(images, Mixture(sources=("scratches", "spots"), per_inlier=2))
    bad = trial.inspected[trial.defective].float()
    altered = (bad - bad.flatten(1).median(1).values[:, None, None, None]).abs().gt(5).flatten(1).float().mean(1)
    assert 10 <= int((altered < 0.05).sum()) <= 20


def test_a_trial_is_bounded_and_needs_four_images():
    images = contracts.images_of(300, 1, 16)
    trial = trial_of(images, PerlinBlend())
    assert (len(trial.known), len(trial.inspected)) == (KNOWN, 2 * INSPECTED)
    assert torch.equal(trial_of(images, PerlinBlend()).inspected, trial.inspected)
    assert not torch.equal(trial_of(images, PerlinBlend(), seed=1).inspected, trial.inspected)
    assert len(trial_of(images[:4], PerlinBlend()).inspected) == 2
    with pytest.raises(DataError, match=r"3 good images.*automatic=\[\]"):
        trial_of(images[:3], PerlinBlend())


# --- features, after the training ---


IMAGES, ROWS, PER_INLIER = 24, 6, 2
GRID = Grid(size=8, stride=8, sigma=0)
SETTINGS = Pretrained(name="x", stages=(1,))
OPEN = change(
    ADAPTED,
    {"tiling": GRID, "pretrained": SETTINGS, "memory": Memory(standardise=True), "automatic": ["features"]},
)


class Fixed(Adapted):
    """A network by hand: it enlarges 1 and 2 of the backbone's numbers before the head, 3 and 4 behind it."""

    def __init__(self):
        nn.Module.__init__(self)
        self.backbone = SimpleNamespace(facts=SimpleNamespace(channels=(1,), stages=(1,), strides=(8,), name="x"))

    def adapt(self, features):
        return 1e3 * features[..., 1:3].float()

    def project(self, features):
        return 1e3 * features[..., 3:5].float()


def features_of(images, rng, *, clear=(), altered=None):
    """Every number is the same noise for good and bad; only the `clear` ones move where a cell is altered."""
    features = torch.rand(images, ROWS, ROWS, 5, generator=rng) * 0.1
    features[..., [2, 4]] += 1.0  # a direction for the cosine to turn
    for number in clear:
        features[..., number] += 2.0 * altered
    features[..., 1:] *= 1e-3  # next to nothing for the backbone itself
    return features.half()


def prepared_of(clear, *, recipe=OPEN, validation=True):
    rng = contracts.generator(3)
    altered = torch.zeros(IMAGES * PER_INLIER, ROWS, ROWS)
    altered[:, 2:4, 3] = 1.0
    altered[:, 4, 3] = 0.3  # neither good nor bad
    good, bad = features_of(IMAGES, rng), features_of(IMAGES * PER_INLIER, rng, clear=clear, altered=altered)
    shown = torch.ones(IMAGES, 8 * ROWS, 8 * ROWS, dtype=torch.bool)
    kept_out = ValidationImages(torch.arange(0, IMAGES, 4), shown, None, altered) if validation else None
    cells = PatchSet(good, CellSampler(good[..., 0] > -1), torch.zeros(IMAGES, dtype=torch.long))
    outliers = PatchSet(bad, CellSampler(altered > 0.5), torch.ones(len(bad), dtype=torch.long))
    training = Training(epochs=1, batch=8)
    unused = load_backbone(WAVELETS, deepest=1)
    task = PatchTask(cells, outliers, unused, SETTINGS, Preprocessing(48), 0.15, training, 0, "key", kept_out)
    return Prepared(recipe, data_of(grain(IMAGES)), torch.arange(IMAGES), None, None, task)


def test_features_that_separate_defects_on_validation_images_are_chosen():
    for clear, best in (((3,), BEHIND), ((1,), BEFORE), ((1, 3), BEFORE), ((), BEFORE)):
        recipe = choose_features(prepared_of(clear), Fixed(), seed=0)
        assert recipe == replace(OPEN, features=best, automatic=())


def test_features_that_are_set_or_cannot_be_tried_stay():
    closed = replace(OPEN, automatic=())
    assert choose_features(prepared_of((3,), recipe=closed), Fixed(), seed=0) is closed
    assert choose_features(prepared_of((3,), validation=False), Fixed(), seed=0) == closed
    near = replace(OPEN, memory=replace(OPEN.memory, neighbourhood=1))  # a mean behind the head knows no places
    assert choose_features(prepared_of((3,), recipe=near), Fixed(), seed=0) == replace(near, automatic=())


def test_defects_on_learnt_images_are_no_reason():
    prepared = prepared_of((3,))
    task = prepared.task
    kept_out = torch.isin(torch.arange(IMAGES * PER_INLIER) % IMAGES, task.validation.images)
    task.outliers.features[kept_out] = prepared_of(()).task.outliers.features[kept_out]
    assert choose_features(prepared, Fixed(), seed=0).features == BEFORE


def test_features_are_compared_by_the_mean_auroc_of_images_and_of_cells():
    rng = contracts.generator(5)
    scores, cells = torch.rand(7, generator=rng), torch.rand(7, 3, 3, generator=rng)
    altered = torch.tensor([0.0, 0.3, 0.5, 1.0])[torch.randint(4, (7, 3, 3), generator=rng)]

    def pairs(good, bad):
        return sum((b > g) + 0.5 * (b == g) for g, b in product(good, bad)) / (len(good) * len(bad))

    of_images = pairs(scores[:3].tolist(), scores[3:].tolist())
    of_cells = pairs(cells[altered == 0].tolist(), cells[altered >= 0.5].tolist())
    assert tune._mean_auroc(scores, cells, altered, 3) == pytest.approx((of_images + of_cells) / 2, abs=1e-6)
    thin = altered.clamp(max=0.3)  # scratches that fill no cell
    assert tune._mean_auroc(scores, cells, thin, 3) == pytest.approx(of_images, abs=1e-6)


def test_a_fit_chooses_its_features_and_keeps_them(tmp_path, monkeypatch):
    """By any margin, so that those behind the head are taken, which are not the default."""
    monkeypatch.setattr(tune, "MARGIN", -1.0)
    monkeypatch.setattr("firm.detector.prepare.VALIDATION_FROM", 10)
    small = {
        "size": 64,
        "pretrained.margin": 0,
        "training.epochs": 1,
        "pretrained.hidden": [16],
        "pretrained.out": 8,
        "training.batch": 64,
    }
    small |= {"encoder.head.hidden": [16], "outliers": "perlin-blend", "memory.neighbourhood": -1}
    small |= {"automatic": ["features"]}
    recipe = preset("wavelets", **small)
    fitted = Detector.fit(drawings.screws(16, side=64).images, recipe=recipe, holdout=0.2, false_calls=0.25)
    assert fitted.recipe == change(recipe, {"features": BEHIND, "automatic": []})
    fitted.save(tmp_path / "x.firm")
    bad = drawings.screws(2, side=64, defect=True, seed=3).images
    assert torch.equal(Detector.load(tmp_path / "x.firm").score(bad), fitted.score(bad))
