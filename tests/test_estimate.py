"""Memory and minutes: how many images and epochs they hold. No clock of this machine decides a test."""

from __future__ import annotations

import json

import pytest
import torch

from cheap import CHEAP
from firm.detector import estimate
from firm.detector.detector import Detector
from firm.detector.estimate import LEAST_EPOCHS, MOST_ADAPTOR_EPOCHS, epochs_within
from firm.detector.fit import _within_minutes, fit, split_good
from firm.detector.prepare import LIBRARIES, MEMORY, _image_bytes, feature_sizes, most_images, prepare
from firm.detector.read import Options, read_good
from firm.drawn.render import draw_dataset, write_folder
from firm.errors import MachineError
from firm.networks.weights import WAVELETS, load_backbone
from firm.recipes.presets import ADAPTED, FAST, INSPECT
from firm.recipes.presets import recipe as preset
from firm.recipes.recipe import change
from firm.scoring.patch_features import extract
from firm.training.runs import CHECKPOINT
from listening import Heard

WAVY = preset(
    "wavelets",
    **{"training.epochs": 1, "size": 64, "pretrained.margin": 0, "automatic": (), "memory.neighbourhood": 1,
       "training.batch": 64},
)  # fmt: skip
SMALL = change(CHEAP, {"training.batch": 16, "outliers": "perlin-blend"})


@pytest.fixture(scope="module")
def plates():
    return draw_dataset("plate", size=48, train=24, good=0, bad=0)


@pytest.fixture
def ticking(monkeypatch):
    """A clock that moves on by a second whenever it is read."""
    seconds = iter(range(10_000))
    monkeypatch.setattr(estimate.time, "perf_counter", lambda: float(next(seconds)))


# --- memory ---


def test_as_many_images_as_the_memory_holds():
    for recipe in (INSPECT, ADAPTED, FAST):
        backbone = load_backbone(WAVELETS) if recipe.pretrained.name else None
        counts = [most_images(recipe, 256, gigabytes, backbone) for gigabytes in (1.5, MEMORY, 50.0)]
        assert counts == sorted(set(counts))
        room = (MEMORY * 1e9 - LIBRARIES) / counts[1]
        assert pytest.approx(counts[2] * room, rel=0.01) == 50e9 - LIBRARIES
        assert room > 6 * 3 * 256**2  # copies of the pixels at least
        with pytest.raises(MachineError, match=r"0\.7 GB"):
            most_images(recipe, 256, 0.7, backbone)


def test_sizes_of_features_are_those_of_a_model(plates):
    wavelets = load_backbone(WAVELETS)
    data = draw_dataset("plate", size=64, train=4, good=0, bad=0)
    for recipe, images, backbone in ((CHEAP, plates, None), (WAVY, data, wavelets)):
        recipe = change(recipe, {"features": "encoder+pixels", "training.epochs": 0, "memory.standardise": True})
        detector = Detector.fit(images, recipe=recipe, parts=torch.arange(len(images.train)))
        features = extract(detector.model.extractor, detector.model.align(images.train[:1]).images)
        sizes = feature_sizes(recipe, backbone)
        assert features["encoder"].shape[-1] == sizes["encoder"]
        assert features["pixels"].shape[-1] <= sizes["pixels"]  # grey ones are fewer


def test_of_more_images_than_the_memory_holds_some_are_drawn(tmp_path, monkeypatch):
    write_folder(tmp_path / "plates", "plate", size=48, train=24, good=0, bad=0)
    monkeypatch.setattr("firm.detector.prepare.FEWEST", 4)
    recipe = change(CHEAP, {"training.epochs": 0})
    room = (LIBRARIES + 10.5 * _image_bytes(recipe, 48, None)) / 1e9
    with pytest.warns(UserWarning, match=r"24 good images: .*10.*--memory"):
        detector = Detector.fit(tmp_path / "plates", recipe=recipe, memory=room)
    assert detector.origin["good_images"] + detector.decides.images == 10


# --- minutes ---


def test_epochs_are_what_the_minutes_leave(plates, ticking, monkeypatch):
    prepared = prepare(SMALL, plates, torch.arange(24), seed=0)
    monkeypatch.setattr(estimate, "_search_seconds", lambda *_: 4.0)
    after = 4.0 * (1 + (10 + 60 + 8 * (60 + 60)) / 24)  # of a search among the 24 learnt images
    steps = prepared.task.steps_per_epoch
    for minutes in (0.001, 30.0):
        heard = Heard()
        epochs = epochs_within(minutes, 14.0, prepared, None, held_out=10, device="cpu", listener=heard)
        room = (60 * minutes - 14 - after) / steps  # a second to a step
        assert epochs == max(LEAST_EPOCHS, int(room))
        needed = (14 + after + LEAST_EPOCHS * steps) / 60
        assert [f"{needed:.1f}" in text for text in heard.warnings] == [True] * (room < LEAST_EPOCHS)


def test_an_adaptor_is_not_trained_for_ever(ticking):
    backbone, images = load_backbone(WAVELETS), draw_dataset("plate", size=64, train=6, good=0, bad=0)
    recipe = change(WAVY, {"training.epochs": 5})
    prepared = prepare(recipe, images, torch.arange(6), seed=0, backbone=backbone)
    epochs = [epochs_within(m, 0, prepared, backbone, held_out=2, device="cpu", listener=Heard()) for m in (0.01, 1e6)]
    assert epochs == [LEAST_EPOCHS, MOST_ADAPTOR_EPOCHS]


@pytest.fixture
def counted(monkeypatch):
    """Trainings that were started, by how many steps each of them made."""
    trainings, train = [], estimate.train

    def noted(state, task, method):
        trainings.append([])
        for progress in train(state, task, method):
            trainings[-1].append(progress.step)
            yield progress

    for module in ("firm.detector.estimate", "firm.training.runs"):
        monkeypatch.setattr(f"{module}.train", noted)
    return trainings


@pytest.mark.parametrize("epochs", [0, 1])
def test_nothing_is_trained_for_an_estimate_but_a_few_timed_steps(plates, epochs, counted, monkeypatch):
    """However few steps the recipe itself has."""
    monkeypatch.setattr(
        "firm.detector.fit.epochs_within", lambda *given, **options: min(5, epochs_within(*given, **options))
    )
    recipe = change(SMALL, {"training.epochs": epochs})
    fitted = fit(read_good(plates, recipe, Options(minutes=0.1, holdout=0.25)))
    timed, trained = counted
    assert len(timed) == estimate.TIMED + 1
    assert fitted.recipe.training.epochs == 5
    assert len(trained) == 5 * max(1, len(trained) // 5) > 0


def test_a_resumed_fit_goes_on_with_the_same_number_of_epochs(plates, tmp_path, counted, monkeypatch):
    monkeypatch.setattr("firm.detector.fit.epochs_within", lambda *_, **__: 6)
    good = read_good(plates, SMALL, Options(minutes=0.1, holdout=0.25, folder=tmp_path))

    def stop(progress, run):
        if progress.step == 7:
            run.save()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(good, Heard(), stop)
    assert (tmp_path / CHECKPOINT).is_file()
    monkeypatch.delattr("firm.detector.fit.epochs_within")  # measured once
    resumed = fit(good, Heard())
    assert counted[-1][0] == 8
    whole = fit(read_good(plates, change(SMALL, {"training.epochs": 6}), Options(holdout=0.25)), Heard())
    assert resumed.recipe == whole.recipe
    assert resumed.calibration == whole.calibration
    assert torch.equal(resumed.model.score(plates.train), whole.model.score(plates.train))
    assert [line["step"] for line in resumed.probes] == [counted[-1][-1] * n // 8 for n in range(1, 9)]
    other = read_good(plates, SMALL, Options(minutes=0.2, holdout=0.25, folder=tmp_path / "other"))
    assert other.key != good.key


def test_other_minutes_are_measured_again(plates, tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr("firm.detector.fit.epochs_within", lambda minutes, *_, **__: measured.append(minutes) or 5)
    for minutes in (0.1, 0.1, 0.2):
        good = read_good(plates, SMALL, Options(minutes=minutes, holdout=0.25, folder=tmp_path))
        split = split_good(good)
        prepared = _within_minutes(good, prepare(SMALL, split.learn, split.parts, seed=0), split, 0.0, Heard())
        assert prepared.recipe.training.epochs == prepared.task.training.epochs == 5
    assert measured == [0.1, 0.2]


DAMAGED = (b"", b"{", b"\xff", b"[1]", b"null", b'{"0.1": "x"}', b'{"0.1": -1}', 200_000 * b"[")


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_minutes_are_measured_again(content, plates, tmp_path, monkeypatch):
    monkeypatch.setattr("firm.detector.fit.epochs_within", lambda *_, **__: 7)
    (tmp_path / "minutes.json").write_bytes(content)
    good = read_good(plates, SMALL, Options(minutes=0.1, holdout=0.25, folder=tmp_path))
    split = split_good(good)
    prepared = prepare(SMALL, split.learn, split.parts, seed=0)
    assert _within_minutes(good, prepared, split, 0.0, Heard()).recipe.training.epochs == 7
    assert json.loads((tmp_path / "minutes.json").read_bytes()) == {"0.1": 7}
