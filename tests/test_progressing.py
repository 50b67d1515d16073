"""A training watched by held-out good parts and synthetic defects, and made as long as some minutes."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

import firm.progressing as module
from cheap import CHEAP
from commands import run
from firm.cli.inputs import recipe_of
from firm.cli.learning import best_encoder
from firm.data.drawn import drawn, write_folder
from firm.detector import Detector
from firm.foretelling import memory_of
from firm.holdout import split, wanted
from firm.images import decode
from firm.progressing import LEAST, PROBES, Prober, lasting
from firm.recipes.presets import ADAPTED
from firm.recipes.recipe import change
from firm.report.progress import draw_progress
from firm.runs import HISTORY, Run
from firm.timing import Duration


@pytest.fixture(scope="module")
def plates():
    return drawn("plate", size=48, train=40, good=0, bad=0)[0]


def watched(plates, folder, **options):
    prober = Prober(plates, torch.arange(40), holdout=0.25, seed=1)
    seen = []

    def watch(progress, run):
        prober(progress, run)
        seen.append(run)

    detector = Detector.fit(
        plates, recipe=CHEAP, seed=1, holdout=0.25, folder=folder, on_progress=watch, parts=torch.arange(40), **options
    )
    return detector, prober, [line for line in seen[-1].history.lines if "synthetic_auroc" in line], seen[-1]


def test_probes_are_evenly_spaced_and_change_nothing(plates, tmp_path):
    detector, _, probes, run = watched(plates, tmp_path)
    steps = run.task.steps
    assert [line["step"] for line in probes] == [steps * number // PROBES for number in range(1, PROBES + 1)]
    assert all(0 <= line["synthetic_auroc"] <= 1 for line in probes)
    assert [line["seconds"] for line in probes] == sorted(line["seconds"] for line in probes)
    assert '"synthetic_auroc"' in (tmp_path / HISTORY).read_text()
    unwatched = Detector.fit(plates, recipe=CHEAP, seed=1, holdout=0.25, parts=torch.arange(40))
    assert detector.id == unwatched.id
    assert detector.decides == unwatched.decides


def test_only_held_out_images_are_inspected_and_half_have_a_defect(plates):
    prober = Prober(plates, torch.arange(40), holdout=0.25, seed=1)
    _, held_out = split(torch.arange(40), 0.25, seed=1, least=wanted(0.05))
    images, defective = prober.inspected(CHEAP)
    assert torch.equal(images[: len(held_out)], plates.train[held_out])
    assert defective.tolist() == [False] * len(held_out) + [True] * len(held_out)
    assert all((bad != good).any() for good, bad in zip(*images.chunk(2), strict=True))
    again, _ = prober.inspected(CHEAP)
    assert torch.equal(again, images)  # the same at every probe


def test_the_proof_is_of_the_whole_detector(plates, tmp_path):
    detector, prober, _, _ = watched(plates, tmp_path)
    proof = prober.proof(detector)
    images, defective = prober.inspected(CHEAP)
    above = detector.score(images)[defective][:, None] > detector.score(images)[~defective]
    assert proof["synthetic_auroc"]["value"] == pytest.approx(float(above.float().mean()), abs=0.03)
    assert proof["synthetic_auroc"]["low"] <= proof["synthetic_auroc"]["value"] <= proof["synthetic_auroc"]["high"]
    assert proof["good_images"] == 10
    assert proof["synthetic_auroc"]["value"] > 0.7


def lasts(monkeypatch, **seconds):
    took = Duration(**({"choosing": 3.0, "features": 0.0, "epoch": 2.0, "epochs": 9, "memory": 5.0} | seconds))
    monkeypatch.setattr(module, "duration", lambda *_, **__: took)


@pytest.mark.parametrize("minutes", [0.001, 1.0, 30.0])
def test_epochs_are_what_the_minutes_leave_beside_all_else(plates, monkeypatch, minutes):
    lasts(monkeypatch, thresholds=6.0)
    found = lasting(CHEAP, minutes, plates, seed=0)
    probes = PROBES * 120 * 6.0 / 60  # 60 known images and 60 inspected ones are looked at each time
    room = (60 * minutes - 14 - probes) / 2.0
    assert found.training.epochs == max(LEAST, math.floor(room + 1e-9))
    assert replace(found, training=replace(found.training, epochs=4)) == CHEAP


def test_an_adaptor_is_not_trained_for_ever(plates, monkeypatch):
    lasts(monkeypatch, thresholds=0.0)
    asked = change(ADAPTED, {"automatic": (), "pretrained.name": "efficientnet-lite0"})
    assert lasting(asked, 1.0, plates, seed=0).training.epochs == 26
    assert lasting(asked, 60.0, plates, seed=0).training.epochs == 30


def test_the_curve_is_drawn(tmp_path):
    assert not draw_progress([{"step": 1, "loss": 3.0}], tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()
    lines = [{"step": n, "synthetic_auroc": 0.5 + 0.05 * n, "seconds": 6.0 * n} for n in range(1, 9)]
    assert draw_progress(lines, tmp_path / "curve.png")
    assert decode(tmp_path / "curve.png").std() > 5


def test_minutes_on_the_command_line(tmp_path, monkeypatch):
    write_folder(tmp_path / "plates", "plate", size=48, train=24, good=0, bad=0)
    settings = ["training.batch=8", "encoder.width=8", "encoder.head.hidden=[8]", "size=48", "automatic=[]"]
    settings += ["features=pixels", "tiling.size=16", "tiling.stride=16", "views.sizes=[16]", "memory.reach=1"]
    command = ["fit", tmp_path / "plates", "-o", tmp_path / "a.firm", "--preset=inspect", "--minutes=0.1"]
    command += [f"--set={one}" for one in settings]
    monkeypatch.setattr(module, "lasting", lambda recipe, *_, **__: change(recipe, {"training.epochs": 3}))
    code, out, err = run(*command, "--json")
    assert code == 0, err
    assert "0.1 minutes on this machine: 3 epochs" in err
    card = json.loads(out)
    assert card["recipe"]["training"]["epochs"] == 3
    assert 0 <= card["origin"]["metrics"]["synthetic_auroc"]["low"] <= 1
    assert decode(tmp_path / "a.firm" / "curve.png").std() > 5
    monkeypatch.setattr(module, "lasting", None)  # timed once: the same command goes on with the same epochs
    code, out, err = run(*command, "--json")
    assert code == 0, err
    assert json.loads(out)["recipe"]["training"]["epochs"] == 3


def test_installed_weights_are_started_from_and_without_them_wavelets_are(monkeypatch, tmp_path):
    for there, found in ((True, "efficientnet-lite0"), (False, "wavelets")):
        monkeypatch.setattr("firm.recipes.presets.installed", lambda name, there=there: there)
        assert best_encoder(str(tmp_path)) == found


@pytest.mark.parametrize(
    ("options", "encoder"),
    [
        ((), "efficientnet-lite0"),  # nothing is asked for: what serves best is taken
        (("--set=training.epochs=3",), "efficientnet-lite0"),  # and a setting changes nothing but itself
        (("--preset=inspect",), ""),
        (("--preset=inspect", "--minutes=1"), ""),
        (("--minutes=1", "--set=training.epochs=3"), "efficientnet-lite0"),
    ],
)
def test_a_fit_starts_from_installed_weights_unless_told_otherwise(options, encoder, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("firm.recipes.presets.installed", lambda name: True)
    monkeypatch.setattr("firm.cli.learning.made_ready", lambda data, out, asked: seen.append(asked) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("fit", tmp_path, "-o", tmp_path / "a.firm", *options)
    assert recipe_of(seen[0].preset or "inspect", seen[0].settings).pretrained.name == encoder


def test_of_more_images_than_the_memory_holds_some_are_drawn(tmp_path, monkeypatch):
    write_folder(tmp_path / "plates", "plate", size=48, train=24, good=2, bad=2)
    monkeypatch.setattr("firm.foretelling.FEWEST", 4)
    settings = ["training.batch=8", "encoder.width=8", "encoder.head.hidden=[8]", "size=48", "automatic=[]"]
    settings += ["features=pixels", "tiling.size=16", "tiling.stride=16", "views.sizes=[16]", "training.epochs=1"]
    asked = recipe_of("inspect", settings)
    room = memory_of(asked, 48, 10) + 1e-6
    command = ["fit", tmp_path / "plates", "-o", tmp_path / "a.firm", "--preset=inspect"]
    command += [f"--set={one}" for one in settings]
    code, out, err = run(*command, f"--memory={room}", "--json")
    assert code == 0, err
    assert "24 good images: 10 of them, drawn evenly, are read; 0.7" in err
    assert "memory: about 0.7 GB at the most" in err
    assert json.loads(out)["origin"]["good_images"] == 8  # and two were held out
    assert 0 <= json.loads(out)["origin"]["metrics"]["synthetic_auroc"]["low"] <= 1
    with pytest.warns(UserWarning, match="24 good images: 10 of them, drawn evenly, are read"):
        again = Detector.fit(tmp_path / "plates", recipe=asked, memory=room)
    assert again.id == Detector.load(tmp_path / "a.firm").id


def test_a_collapse_is_remembered_behind_a_probe(tmp_path, plates):
    _, _, _, run_seen = watched(plates, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / HISTORY).read_text().splitlines()]
    assert "synthetic_auroc" in lines[-1]
    lines[-2]["collapsed"] = True
    (tmp_path / HISTORY).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Run(run_seen.recipe, run_seen.task, folder=tmp_path).collapsed
