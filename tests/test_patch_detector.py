"""The detector that looks at patches, end to end on small drawn parts: it learns, says where, saves and loads."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import contracts
import drawings
from firm.bank import Memory
from firm.calibration import threshold_of
from firm.detector import Detector
from firm.encoder import build
from firm.fitting import as_data, looker_of, preprocessing_of, task_of
from firm.holdout import split
from firm.images import resize
from firm.metrics import auroc
from firm.model_folder import read_model, write_model
from firm.outliers import Donor
from firm.recipes.presets import FAST, INSPECT, PATCHES
from firm.recipes.recipe import Recipe, change
from firm.streams import stream
from firm.tiling import Grid
from firm.training import start, train
from firm.types import FirmError, Located

SIDE = 96
SMALL: Recipe = change(
    INSPECT,
    {
        "outliers": Donor(),
        "views.altered": 0.05,
        "encoder.width": 8,
        "encoder.head.hidden": (16,),
        "encoder.head.out": 8,
        "training.epochs": 3,
        "training.batch": 16,
        "training.reuse": 4,
        "size": SIDE,
        "tiling.stride": 16,
        "memory.reach": 1,
        "conditioning.light": "median",
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
def found(detector: Detector) -> Located:
    return detector.locate(BOTH)


def test_it_tells_defective_parts_however_they_lie_and_are_lit(detector: Detector, found: Located) -> None:
    anomalous = torch.arange(16) >= 8
    assert auroc(found.scores, anomalous) > 0.9
    assert (detector.predict(BAD.images) == -1).float().mean() > 0.8
    assert set(detector.predict(FRESH.images).tolist()) <= {1, -1}


def test_it_says_where(found: Located) -> None:
    """In the image as it came, although it was looked at upright."""
    assert found.maps.shape == (16, SIDE, SIDE)
    assert found.maps.isfinite().all()
    away = []
    for heat, place in zip(found.maps[8:], BAD.places, strict=True):
        peak = (heat == heat.max()).nonzero().float().mean(0).tolist()
        away.append(math.dist(peak, place))
    assert sorted(away)[6] < 16


def test_scores_are_those_of_the_maps_and_of_each_image_alone(detector: Detector, found: Located) -> None:
    assert torch.equal(detector.score(BOTH), found.scores)
    some = [0, 7, 9, 15]
    for number in some:
        alone = detector.locate(BOTH[number : number + 1])
        torch.testing.assert_close(alone.scores, found.scores[number : number + 1], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(alone.maps[0], found.maps[number], rtol=1e-3, atol=1e-3)


def test_the_threshold_is_that_of_the_images_held_out(detector: Detector) -> None:
    learn, held_out = split(torch.arange(30), 0.2, seed=0)
    assert detector.origin["good_images"] == len(learn) == 24
    scores, _ = detector.measured(GOOD[held_out])
    assert detector.limit == threshold_of(scores, 0.15).value
    assert detector.decides.scores == tuple(scores.tolist())
    assert detector.decides.images == 6
    assert len(detector.thumbnails) == 24
    assert set(detector.localiser.banks["encoder"].image.tolist()) == set(range(24))


def test_progress_is_told_by_the_image(detector: Detector) -> None:
    told: list[int] = []
    detector.score(torch.cat([BOTH, FRESH.images[:1]]), told.append)
    assert told == [16, 1]
    detector.locate(BOTH[:2], told.append)
    assert told == [16, 1, 2]


def test_no_images_have_no_scores(detector: Detector) -> None:
    assert detector.score(BOTH[:0]).shape == (0,)
    assert detector.predict(BOTH[:0]).shape == (0,)
    nothing = detector.locate(BOTH[:0])
    assert nothing.scores.shape == (0,)
    assert nothing.maps.shape == (0, SIDE, SIDE)


def test_images_of_another_size_or_without_colour_are_fine(detector: Detector, found: Located) -> None:
    large = torch.nn.functional.interpolate(BAD.images.float(), size=(150, 130), mode="bilinear").byte()
    there = detector.locate(large)
    assert there.maps.shape == (8, SIDE, SIDE)
    torch.testing.assert_close(detector.score(resize(large, SIDE)), there.scores)
    assert detector.origin["grey"]
    torch.testing.assert_close(detector.score(BOTH[:, :1]), found.scores, rtol=1e-3, atol=1e-3)


def test_two_fits_with_one_seed_are_equal(detector: Detector, found: Located) -> None:
    torch.manual_seed(3)
    again = Detector.fit(GOOD, recipe=SMALL, seed=0, holdout=0.2, false_calls=0.15)
    assert torch.equal(again.locate(BOTH).maps, found.maps)
    assert again.decides == detector.decides


def test_load_gives_the_same_detector(detector: Detector, found: Located, tmp_path: Path) -> None:
    detector.save(tmp_path / "model.firm")
    loaded = Detector.load(tmp_path / "model.firm")
    there = loaded.locate(BOTH)
    assert torch.equal(there.scores, found.scores)
    assert torch.equal(there.maps, found.maps)
    assert torch.equal(loaded.predict(BOTH), detector.predict(BOTH))
    assert torch.equal(loaded.thumbnails, detector.thumbnails)
    assert loaded.card() == detector.card()
    json.dumps(loaded.card())


@pytest.mark.parametrize("lost", ["localiser.present", "localiser.encoder.vectors", "localiser.pixels.mean"])
def test_a_file_that_lacks_a_bank_is_refused(lost: str, detector: Detector, tmp_path: Path) -> None:
    path = tmp_path / "model.firm"
    detector.save(path)
    tensors, card = read_model(path)
    write_model(path, {k: v for k, v in tensors.items() if k != lost}, card)
    with pytest.raises(FirmError, match=f"lacks {lost.split('.')[-1]}|not a complete detector"):
        Detector.load(path)


def test_a_detector_of_whole_images_cannot_say_where() -> None:
    whole = change(FAST, {"encoder.width": 8, "encoder.head.hidden": (8,), "size": 16, "training.epochs": 0})
    fitted = Detector.fit(contracts.images_of(20, 3, 16), recipe=whole)
    assert fitted.localiser is None
    with pytest.raises(FirmError, match="looks at whole images and cannot say where; fit with --preset"):
        fitted.locate(contracts.images_of(2, 3, 16))
    with pytest.raises(FirmError, match="looks at whole images; set tiling=grid"):
        looker_of(whole, fitted.network.encoder, fitted.preprocessing, grey=False)


def test_wrong_images_are_refused_in_a_sentence(detector: Detector) -> None:
    with pytest.raises(FirmError, match="give uint8"):
        detector.locate(torch.rand(2, 3, 16, 16))
    with pytest.raises(FirmError, match="make them square"):
        Detector.fit(GOOD[:, :, :80], recipe=SMALL)
    for epochs in (0, 1):
        with pytest.raises(FirmError, match=r"does not fit|smaller than a 32px tile"):
            Detector.fit(GOOD[:, :, :24, :24], recipe=change(SMALL, {"training.epochs": epochs}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tiling.size": 24, "tiling.stride": 8, "tiling.dense": True},
            "dense features need patches of a multiple of 16",
        ),
        ({"tiling.size": 100}, "smaller than a 100px tile"),
    ],
)
def test_what_would_fail_after_training_is_said_before(changes: dict[str, object], message: str) -> None:
    with pytest.raises(FirmError, match=message):
        Detector.fit(GOOD, recipe=change(SMALL, changes), on_progress=lambda *_: pytest.fail("it has begun"))


def test_a_score_that_is_not_a_number_decides_nothing(detector: Detector, tmp_path: Path) -> None:
    detector.save(tmp_path / "model.firm")
    broken = Detector.load(tmp_path / "model.firm")
    with torch.no_grad():
        broken.network.encoder.conv1.weight.fill_(torch.nan)
    with pytest.raises(FirmError, match="not finite"):
        broken.predict(BOTH[:2])


# --- other recipes ---


def test_no_epochs_leave_the_network_as_it_was_initialised() -> None:
    fitted = Detector.fit(GOOD, recipe=UNTRAINED, seed=5)
    fresh = build(UNTRAINED.encoder, rng=stream(5, "weights")).state_dict()
    assert all(torch.equal(value, fresh[name]) for name, value in fitted.network.state_dict().items())
    assert auroc(fitted.score(BOTH), torch.arange(16) >= 8) > 0.8  # the pixels see the spots
    assert not fitted.origin["collapsed"]


@pytest.mark.parametrize(
    "changes",
    [
        {"features": "pixels", "memory.standardise": False, "tiling.object": 0.0},
        {"features": "encoder", "memory": Memory(keep=0.3, choose="coreset", k=2)},
        {"tiling": Grid(size=32, stride=8, dense=True, worst=3)},
        {"conditioning.light": "local", "conditioning.align": False},
    ],
    ids=["pixels", "coreset", "dense", "local"],
)
def test_every_way_of_looking_survives_the_file(changes: dict[str, object], tmp_path: Path) -> None:
    fitted = Detector.fit(GOOD[:14], recipe=change(UNTRAINED, changes), seed=1)
    fitted.save(tmp_path / "model.firm")
    here, there = fitted.locate(BOTH[6:10]), Detector.load(tmp_path / "model.firm").locate(BOTH[6:10])
    assert torch.equal(here.scores, there.scores)
    assert torch.equal(here.maps, there.maps)
    assert here.maps.shape == (4, SIDE, SIDE)
    assert float(here.maps.std()) > 0


def test_what_is_left_open_is_chosen_and_kept() -> None:
    told: list[str] = []
    recipe = change(UNTRAINED, {"automatic": ("foreground", "light"), "conditioning": INSPECT.conditioning})
    fitted = Detector.fit(GOOD[:20], recipe=recipe, on_choice=told.append)
    assert told[0] == "foreground: the bright side of otsu on grey, so it is taken for a product on a background"
    assert told[-1].startswith("time: about ")
    assert told[-2].startswith(f"chosen: light {fitted.recipe.conditioning.light}, as it lies")
    assert fitted.recipe.automatic == ()
    assert fitted.recipe.conditioning.foreground.method == "otsu"
    assert fitted.card()["recipe"]["conditioning"]["foreground"]["method"] == "otsu"


# --- recipe x images -> task ---


def test_a_task_of_patches_learns_from_conditioned_images() -> None:
    recipe = change(SMALL, {"size": 64})
    task = task_of(recipe, as_data(GOOD[:10]), seed=0)
    ready = recipe.conditioning(resize(GOOD[:10], 64))
    assert task.images.shape == (10, 1, 64, 64)  # no colour, so a third of the work
    assert torch.equal(task.images.expand(-1, 3, -1, -1), ready.images)
    assert torch.equal(task.foreground, ready.foreground)
    assert task.preprocessing.size == 64
    assert task.replay is not None
    tinted = GOOD[:10].clone()
    tinted[0, 0, 40:50, 40:50] = 255
    assert task_of(recipe, as_data(tinted), seed=0).images.shape == (10, 3, 64, 64)


def test_patches_are_never_taken_from_enlarged_images() -> None:
    assert preprocessing_of(change(SMALL, {"size": 200}), as_data(GOOD)).size == SIDE
    task = task_of(change(SMALL, {"size": 200}), as_data(GOOD[:4]), seed=0)
    assert task.images.shape[-1] == SIDE


def test_whole_images_are_conditioned_and_shrunk_with_their_objects() -> None:
    recipe = change(SMALL, {"tiling": "whole", "views": "shift", "size": 48, "conditioning.light": "local"})
    task = task_of(recipe, as_data(GOOD[:6]), seed=0)
    ready = recipe.conditioning(GOOD[:6])
    assert torch.equal(task.images.expand(-1, 3, -1, -1), resize(ready.images, 48))
    assert task.foreground.shape == (6, 48, 48)
    enlarged = task.foreground.repeat_interleave(2, 1).repeat_interleave(2, 2)
    overlap = (enlarged & ready.foreground).sum((1, 2)) / (enlarged | ready.foreground).sum((1, 2))
    assert float(overlap.min()) > 0.85
    fitted = Detector.fit(GOOD[:12], recipe=change(recipe, {"training.epochs": 0}))
    assert fitted.score(BOTH).shape == (16,)


def test_a_training_on_patches_makes_steps_and_learns() -> None:
    """The loss falls, on patches of conditioned images and replayed outliers."""
    recipe = change(SMALL, {"training.epochs": 8})
    task = task_of(recipe, as_data(GOOD), seed=0)
    losses = [float(progress.loss) for progress in train(start(recipe.encoder, recipe.training, seed=0), task)]
    assert len(losses) == task.steps == 8 * (30 * 2 // 16)
    assert sum(losses[-8:]) < 0.95 * sum(losses[:8])


def test_the_papers_own_recipe_fits_at_a_small_size() -> None:
    small = {"encoder.width": 8, "encoder.head.hidden": (8,), "training.epochs": 1, "training.batch": 8, "size": 48}
    recipe = change(PATCHES, small | {"outliers": Donor(), "tiling.register": "resize"})
    fitted = Detector.fit(replace(as_data(GOOD[:10]), name="mvtec:screw"), recipe=recipe)
    assert fitted.recipe.conditioning.foreground.polarity == "dark"  # the published rule of the name
    assert fitted.locate(BOTH[:2]).maps.shape == (2, 48, 48)
