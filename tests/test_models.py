"""One contract of all models: whole images, patches of an encoder, patches of a backbone under a mask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest
import torch
from torch import Tensor, nn

import drawings
from cheap import CHEAP
from firm.detector.detector import Detector
from firm.errors import DataError, ModelFileError
from firm.recipes.presets import PARTS
from firm.recipes.presets import recipe as preset
from firm.recipes.recipe import change
from firm.scoring.models import ImageModel, Model, PatchModel

SIDE = 64
GOOD = drawings.screws(20, turned=True, side=SIDE).images
NEW = torch.cat(
    [drawings.screws(2, side=SIDE, seed=1).images, drawings.screws(2, side=SIDE, seed=2, defect=True).images]
)
CORNER = torch.zeros(SIDE, SIDE, dtype=torch.bool)
CORNER[:20, :22] = True
ALIGNED = {"conditioning.align": True, "conditioning.foreground.method": "otsu"}
SMALL = {"training.epochs": 0, "encoder.width": 8, "encoder.head.hidden": (8,), "encoder.head.out": 4}
RECIPES = {
    "image": change(PARTS, SMALL | {"size": 16, "training.batch": 8}),
    "patch": change(CHEAP, SMALL | ALIGNED | {"features": "encoder+pixels", "size": SIDE}),
    "masked": preset("wavelets", **SMALL | ALIGNED | {"automatic": (), "size": SIDE, "pretrained.margin": 0}),
}


@pytest.fixture(scope="module", params=RECIPES)
def detector(request) -> Detector:
    ignored = CORNER if request.param == "masked" else None
    return Detector.fit(GOOD, recipe=RECIPES[request.param], holdout=0.2, false_calls=0.2, ignored=ignored)


def as_model(model: Model) -> Model:
    """What mypy would check: both kinds fit the protocol."""
    return model


def test_every_way_to_ask_gives_the_same_scores(detector):
    model = as_model(detector.model)
    scores, located, examination = model.score(NEW), model.locate(NEW), model.examine(NEW)
    assert scores.shape == (4,)
    assert torch.equal(scores, located.scores)
    assert torch.equal(scores, examination.scores)
    assert torch.equal(located.maps, examination.maps)
    assert model.has_maps == bool(located.maps.numel())
    assert located.maps.shape == ((4, SIDE, SIDE) if model.has_maps else (4, 0, 0))
    assert (model.nearest(examination) is not None) == model.has_maps
    assert torch.equal(detector.score(NEW), scores)
    assert torch.equal(detector.predict(NEW) == -1, scores > detector.limit)
    assert (model.ignored is None) == ("ignore_mask" not in model.state_dict())


def test_an_image_scores_the_same_alone_and_none_has_none(detector):
    located = detector.locate(NEW)
    for number, image in enumerate(NEW):
        alone = detector.locate(image[None])
        torch.testing.assert_close(alone.scores[0], located.scores[number], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(alone.maps[0], located.maps[number], rtol=1e-3, atol=1e-3)
    none = detector.locate(NEW[:0])
    assert none.scores.shape == detector.score(NEW[:0]).shape == detector.predict(NEW[:0]).shape == (0,)
    assert none.maps.shape == (0, *located.maps.shape[1:])


def test_every_image_is_counted_once(detector):
    counts = []
    detector.score(GOOD, counts.append)
    assert (sum(counts), len(counts) > 1) == (20, detector.model.has_maps)
    detector.locate(NEW, counts.append)
    assert sum(counts) == 24


def test_images_of_another_size_or_without_colour_are_fine(detector):
    large = torch.nn.functional.interpolate(NEW.float(), size=(90, 80), mode="bilinear").byte()
    assert detector.locate(large).maps.shape == detector.locate(NEW).maps.shape
    torch.testing.assert_close(detector.score(NEW[:, :1]), detector.score(NEW), rtol=1e-3, atol=1e-3)
    for wrong in (torch.rand(2, 3, 16, 16), NEW[:, :2], NEW[0]):
        with pytest.raises(DataError, match="uint8"):
            detector.score(wrong)


def test_a_saved_one_is_the_same_to_the_bit(detector, tmp_path):
    detector.save(tmp_path / "part.firm")
    loaded = Detector.load(tmp_path / "part.firm")
    assert type(loaded.model) is type(detector.model)
    ours, theirs = detector.model.state_dict(), loaded.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    here, there = detector.locate(NEW), loaded.locate(NEW)
    assert torch.equal(here.scores, there.scores)
    assert torch.equal(here.maps, there.maps)
    assert (loaded.id, loaded.decides, loaded.recipe) == (detector.id, detector.decides, detector.recipe)
    assert json.loads(json.dumps(loaded.card())) == json.loads(json.dumps(detector.card()))
    assert torch.equal(loaded.thumbnails, detector.thumbnails)


def test_all_it_knows_of_good_images_is_in_its_state(detector):
    model = detector.model
    assert isinstance(model, nn.Module)
    names = set(model.state_dict())
    assert any(name.startswith("network.") for name in names)
    if isinstance(model, ImageModel):
        assert "references_0" in names
    else:
        for kind, bank in model.scorer.banks.items():
            assert {f"scorer.banks.{kind}.{name}" for name, _ in bank.named_buffers()} <= names
            assert len(bank.state_dict()) >= 3
        assert "scorer.present" in names
    assert model.to("cpu") is model


def test_scores_follow_the_state(detector, tmp_path):
    """Loading another state gives other scores, and loading the first one again gives the first ones to the bit."""
    detector.save(tmp_path / "part.firm")
    model = Detector.load(tmp_path / "part.firm").model
    scores, state = model.score(NEW), {name: value.clone() for name, value in model.state_dict().items()}
    remembered = [name for name in state if name.startswith("references_") or name.endswith((".vectors", ".mean"))]
    model.load_state_dict(state | {name: 2 * state[name].flip(0) + 1 for name in remembered})
    assert not torch.equal(model.score(NEW), scores)
    model.load_state_dict(state)
    assert torch.equal(model.score(NEW), scores)


def test_a_model_is_a_module_to_call_and_all_scores_come_from_its_call(detector):
    model = detector.model
    aligned = model.align(NEW)
    inputs = (aligned.images, aligned.foreground, aligned.hidden()) if model.has_maps else (aligned.images,)
    outputs = model(*inputs)
    scores = outputs.scores if model.has_maps else outputs
    assert torch.equal(scores, model.score(NEW))
    if model.has_maps:
        assert torch.equal(model.scorer.maps(outputs.cells, aligned), model.locate(NEW).maps)
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    ways = (model.score, model.locate, model.examine, lambda images: model.score_aligned(model.align(images)))
    for number, way in enumerate(ways, 1):
        way(NEW)
        assert len(calls) == number
    handle.remove()


def test_a_model_answers_for_itself_what_is_kept_and_compared(detector):
    """No caller asks which model it has: one without maps keeps no pictures and has no baseline."""
    model, aligned = detector.model, detector.model.align(GOOD)
    assert len(model.pictures(GOOD, aligned)) == (len(GOOD) if model.has_maps else 0)
    baseline = model.baseline(detector.recipe.memory, aligned, torch.arange(len(GOOD)), seed=0)
    assert (baseline is None) == (not model.has_maps)
    if baseline is not None:
        assert baseline.scorer.kinds == ("pixels",)
        assert baseline.baseline(detector.recipe.memory, aligned, torch.arange(len(GOOD)), seed=0) is None
    assert model.describe().items() <= detector.origin.items()
    assert bool(model.describe()) == model.has_maps


def tensors_in(value: object, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that can be reached from a value."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each, seen)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from tensors_in(each, seen)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name), seen)
    if isinstance(value, nn.Module):
        yield from tensors_in(vars(value), seen)


def test_a_model_moves_to_a_device_as_a_whole(detector, tmp_path):
    """Of patches nothing stays behind, neither in the feature extractor nor in the banks."""
    detector.save(tmp_path / "part.firm")
    moved = Detector.load(tmp_path / "part.firm").model.to(torch.device("meta"))
    assert all(tensor.is_meta for tensor in moved.state_dict().values())
    if isinstance(moved, PatchModel):
        assert all(tensor.is_meta for tensor in tensors_in(moved, set()))


def test_a_score_that_is_not_a_number_decides_nothing(detector, tmp_path):
    detector.save(tmp_path / "part.firm")
    broken = Detector.load(tmp_path / "part.firm")
    with torch.no_grad():
        for tensor in broken.model.network.parameters():
            tensor.fill_(torch.nan)
    with pytest.raises(ModelFileError, match="finite"):
        broken.predict(NEW[:2])
