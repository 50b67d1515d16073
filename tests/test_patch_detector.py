"""The detector of patches end to end on small drawn parts: it learns, shows where, and survives its file."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import drawings
from firm.data.splits import split_by_part
from firm.decision.calibration import threshold_of
from firm.detector.detector import Detector
from firm.detector.model_folder import read_model, write_model
from firm.detector.prepare import prepare
from firm.detector.read import as_data
from firm.detector.remember import measure
from firm.errors import ModelFileError, SettingError
from firm.metrics.image import auroc
from firm.networks.heads import build
from firm.outliers.registry import PerlinBlend
from firm.recipes.presets import INSPECT, PATCHES
from firm.recipes.recipe import Recipe, change
from firm.runtime.random import stream
from firm.scoring.memory import Memory
from firm.scoring.models import Located
from firm.scoring.patch_grid import Grid

SIDE = 96
SMALL: Recipe = change(
    INSPECT,
    {
        "outliers": PerlinBlend(),
        "views.min_altered": 0.05,
        "encoder.width": 8,
        "encoder.head.hidden": (16,),
        "encoder.head.out": 8,
        "training.epochs": 3,
        "training.batch": 16,
        "training.reuse": 4,
        "size": SIDE,
        "tiling.stride": 16,
        "memory.neighbourhood": 1,
        "conditioning.illumination": "median",
        "conditioning.align": True,
        "conditioning.foreground.method": "otsu",
        "automatic": (),
    },
)
UNTRAINED = change(SMALL, {"training.epochs": 0})
GOOD = drawings.screws(30, turned=True, light=0.2).images
FRESH = drawings.screws(8, turned=True, light=0.2, seed=1)
BAD = drawings.screws(8, turned=True, light=0.2, seed=2, defect=True)
BOTH = torch.cat([FRESH.images, BAD.images])


@pytest.fixture(scope="module")
def detector() -> Detector:
    return Detector.fit(GOOD, recipe=SMALL, seed=0, holdout=0.2, false_calls=0.15)


@pytest.fixture(scope="module")
def located(detector: Detector) -> Located:
    return detector.locate(BOTH)


def test_it_finds_defects_in_any_position_and_illumination(detector: Detector, located: Located) -> None:
    assert auroc(located.scores, torch.arange(16) >= 8) > 0.9
    assert (detector.predict(BAD.images) == -1).float().mean() > 0.8
    away = []
    for heat, place in zip(located.maps[8:], BAD.places, strict=True):  # in the image as it came
        peak = (heat == heat.max()).nonzero().float().mean(0).tolist()
        away.append(math.dist(peak, place))
    assert sorted(away)[6] < 16


def test_the_threshold_is_that_of_the_images_held_out(detector: Detector) -> None:
    learn, held_out = split_by_part(torch.arange(30), 0.2, seed=0)
    assert detector.origin["good_images"] == len(detector.thumbnails) == len(learn) == 24
    scores = measure(detector.model, GOOD[held_out]).scores
    assert detector.limit == threshold_of(scores, 0.15)[0]
    assert detector.decides.scores == tuple(scores.tolist())
    assert detector.decides.images == 6
    assert set(detector.model.scorer.banks["encoder"].image.tolist()) == set(range(24))


def test_two_fits_with_one_seed_are_equal(detector: Detector, located: Located) -> None:
    torch.manual_seed(3)
    again = Detector.fit(GOOD, recipe=SMALL, seed=0, holdout=0.2, false_calls=0.15)
    assert torch.equal(again.locate(BOTH).maps, located.maps)
    assert again.decides == detector.decides
    assert again.id == detector.id


def test_a_file_that_lacks_a_bank_is_refused(detector: Detector, tmp_path: Path) -> None:
    path = tmp_path / "model.firm"
    detector.save(path)
    tensors, card = read_model(path)
    for lost in ("model.scorer.present", "model.scorer.banks.encoder.vectors", "model.scorer.banks.pixels.mean"):
        write_model(path, {name: value for name, value in tensors.items() if name != lost}, card)
        with pytest.raises(ModelFileError, match=lost.rsplit(".", maxsplit=1)[-1]):
            Detector.load(path)


def test_patches_that_cannot_be_cut_are_refused_before_the_training() -> None:
    for images, changes in ((GOOD[:, :, :24, :24], {}), (GOOD, {"tiling.size": 100}), (GOOD[:, :, :80], {})):
        with pytest.raises(SettingError, match=r"tiling\.size|96 x 80|patch"):
            Detector.fit(
                images, recipe=change(SMALL, changes), on_progress=lambda *_: pytest.fail("the training has begun")
            )


def test_no_epochs_leave_the_network_as_it_was_initialised() -> None:
    fitted = Detector.fit(GOOD, recipe=UNTRAINED, seed=5)
    fresh = build(UNTRAINED.encoder, rng=stream(5, "weights")).state_dict()
    assert all(torch.equal(value, fresh[name]) for name, value in fitted.model.network.state_dict().items())
    assert auroc(fitted.score(BOTH), torch.arange(16) >= 8) > 0.8  # the pixels see the spots
    assert not fitted.origin["collapsed"]


@pytest.mark.parametrize(
    "changes",
    [
        {"features": "pixels", "memory.standardise": False, "tiling.min_foreground": 0.0},
        {"features": "encoder", "memory": Memory(sampling_ratio=0.3, sampling="coreset", k=2)},
        {"tiling": Grid(size=32, stride=16, top_patches=3, layers=(2, 3)), "conditioning.align": False},
    ],
    ids=["pixels", "coreset", "stages"],
)
def test_every_way_of_comparing_survives_the_file(changes: dict[str, object], tmp_path: Path) -> None:
    fitted = Detector.fit(GOOD[:14], recipe=change(UNTRAINED, changes), seed=1)
    fitted.save(tmp_path / "model.firm")
    here, there = fitted.locate(BOTH[6:10]), Detector.load(tmp_path / "model.firm").locate(BOTH[6:10])
    assert torch.equal(here.scores, there.scores)
    assert torch.equal(here.maps, there.maps)
    assert float(here.maps.std()) > 0


def test_a_training_on_patches_learns() -> None:
    """The loss falls, on patches of aligned images and outliers that are used again."""
    prepared = prepare(change(SMALL, {"training.epochs": 8}), as_data(GOOD), torch.arange(30), seed=0)
    losses = [float(progress.loss) for progress in prepared.run()]
    assert len(losses) == 8 * (30 * 2 // 16)
    assert sum(losses[-8:]) < 0.95 * sum(losses[:8])


def test_the_recipe_of_the_paper_fits_at_a_small_size() -> None:
    small = {"encoder.width": 8, "encoder.head.hidden": (8,), "training.epochs": 1, "training.batch": 8, "size": 48}
    recipe = change(PATCHES, small | {"outliers": PerlinBlend(), "tiling.register": "resize"})
    fitted = Detector.fit(replace(as_data(GOOD[:10]), name="mvtec:screw"), recipe=recipe)
    assert fitted.recipe.conditioning.foreground.polarity == "dark"  # the published rule of the name
    assert fitted.locate(BOTH[:2]).maps.shape == (2, 48, 48)
