"""Benchmarks: a plan makes what is missing, once, and the report says what was measured and at what scale."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from firm.bench import FINAL, result_path, results, run_missing
from firm.bench_patches import _settled, conduct_patches, patch_line
from firm.bench_promises import conduct_promise, promise_line
from firm.choosing import choose
from firm.data import load
from firm.data.drawn import drawn
from firm.detector import Detector
from firm.metrics import aulc
from firm.recipes.experiment import Experiment
from firm.recipes.industrial import PATCH_TABLES, PROMISES, TILE, patch_experiment, patch_plan
from firm.recipes.recipe import change, to_json
from firm.recipes.tables import TABLES, experiment, plan
from firm.report.curves import draw_curves
from firm.report.industrial import patch_report, patch_runs
from firm.report.promises import promise_report
from firm.report.tables import published, report
from firm.types import FirmError

SMALL = {"encoder.width": 8, "encoder.head.hidden": (16,), "training.batch": 16}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny Fashion-MNIST: stripes whose direction is the class."""
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for split, n in (("train", 60), ("t10k", 40)):
        labels = np.arange(n) % 10
        phase = rng.uniform(0, 6, n)[:, None, None]
        wave = np.sin(np.arange(28) * 0.6 + phase) * np.ones((n, 28, 28))
        wave = np.where((labels == 5)[:, None, None], wave, wave.transpose(0, 2, 1))
        images = (128 + 100 * wave).astype(np.uint8)
        header = struct.pack(">IIII", 0x803, n, 28, 28)
        (folder / f"{split}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 0x801, n) + labels.astype(np.uint8).tobytes()
        )
    monkeypatch.setenv("FIRM_DATA", str(tmp_path))
    return tmp_path


def tiny_plan() -> list[Experiment]:
    recipe = change(experiment("fashion-mnist:sandal", {}, "smoke", 0).recipe, SMALL | {"training.epochs": 4})
    return [Experiment(data="fashion-mnist:sandal", recipe=recipe, seed=seed, probes=3) for seed in (0, 1)]


def test_a_plan_is_made_once_and_measures_everything(root: Path) -> None:
    todo = tiny_plan()
    lines = list(run_missing(todo, root / "results", root / "work"))
    assert len(lines) == 2
    assert list(run_missing(todo, root / "results", root / "work")) == []
    for one in results(root / "results", todo):
        assert one is not None
        assert set(one["final"]) == set(FINAL)
        assert [probe["step"] for probe in one["probes"]] == [1, 2, 4]
        assert one["probes"][-1]["s_con k=1"] == one["final"]["s_con k=1"]
        for value in one["final"].values():
            assert 0 <= value["low"] <= value["value"] <= value["high"] <= 1
        assert 0 <= aulc([probe["s_con k=1"]["value"] for probe in one["probes"]]) <= 1


def test_a_run_that_another_process_makes_is_left_to_it(root: Path) -> None:
    one = tiny_plan()[0]
    work = root / "work" / one.name
    work.mkdir(parents=True)
    handle = os.open(work / "claim", os.O_CREAT | os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        assert ["another process" in line for line in run_missing([one], root / "results", root / "work")] == [True]
    finally:
        os.close(handle)
    assert len(list(run_missing([one], root / "results", root / "work"))) == 1


def test_names_tell_experiments_apart() -> None:
    one = tiny_plan()[0]
    others = [
        dataclasses.replace(one, seed=1),
        dataclasses.replace(one, probes=4),
        dataclasses.replace(one, data="fashion-mnist:shirt"),
        dataclasses.replace(one, recipe=change(one.recipe, {"training.lr": 0.01})),
    ]
    assert len({other.name for other in [one, *others]}) == 5
    # a score costs no training, so it shares the run
    assert dataclasses.replace(one, recipe=change(one.recipe, {"score": "kde"})).name == one.name


def test_tables_share_trainings() -> None:
    objectives = {one.name for one in plan(TABLES["objectives"], "short", [0])}
    exposure = {one.name for one in plan(TABLES["exposure"], "short", [0])}
    assert len(objectives & exposure) == 2
    with pytest.raises(FirmError, match="no scale 'huge'"):
        plan(TABLES["objectives"], "huge", [0])


def test_the_report_prints_scale_seeds_and_published_numbers(root: Path) -> None:
    table = dataclasses.replace(TABLES["objectives"], data=("fashion-mnist:sandal",))
    stored = root / "stored"
    stored.mkdir()
    made = results(root, tiny_plan())
    assert made == [None, None]
    list(run_missing(tiny_plan()[:1], root / "results", root / "work"))
    one = json.loads(result_path(root / "results", tiny_plan()[0]).read_text())
    for seed in (0, 1):
        for changes in table.rows.values():
            target = experiment("fashion-mnist:sandal", changes, "short", seed)
            result_path(stored, target).write_text(json.dumps(one | {"seed": seed, "recipe": to_json(target.recipe)}))
    text = report({"objectives": table}, "short", [0, 1], stored)
    assert "Reduced scale" in text
    assert "seeds 0, 1" in text
    assert "98.6" in text  # the paper's FIRM on sandal
    assert "FIRM less ntxent: last +0.0" in text
    for name in table.rows:
        assert f"| {name} | 2 |" in text
    assert "3 of 6 pairs" not in text  # equal values are no order
    assert "0 of 6 pairs as in the paper" in text
    assert "FIRM above ntxent: by last s_con k=1 on 0" in text
    draw_curves(table, "short", [0, 1], stored, root / "curves.png")
    with Image.open(root / "curves.png") as picture:
        assert len(picture.convert("RGB").getcolors(2**24) or []) > 100  # lines, not a blank page
    assert "![learning curves](curves.png)" in report(
        {"objectives": table}, "short", [0, 1], stored, {"objectives": "curves.png"}
    )
    empty = report({"objectives": table}, "paper", [0], stored)
    assert "| firm | 0 |" in empty


def test_the_report_does_not_call_shared_what_the_rows_vary(root: Path) -> None:
    todo = tiny_plan()[:1]
    list(run_missing(todo, root / "results", root / "work"))
    one = json.loads(result_path(root / "results", todo[0]).read_text())
    table = TABLES["short-budget"]
    for changes in table.rows.values():
        target = experiment(table.data[0], changes, "smoke", 0)
        stored = one | {"recipe": to_json(target.recipe)}
        result_path(root / "results", target).write_text(json.dumps(stored))
    text = report({"short-budget": table}, "smoke", [0], root / "results")
    assert "lr 0." not in text.split("### ")[0]
    assert "head" not in text.split("### ")[0].split("ResNet")[1]
    assert "Smoke test, not a result" in text


def test_a_result_of_other_settings_is_refused(root: Path) -> None:
    todo = tiny_plan()[:1]
    list(run_missing(todo, root / "results", root / "work"))
    path = result_path(root / "results", todo[0])
    one = json.loads(path.read_text())
    one["recipe"]["training"]["lr"] = 0.3
    path.write_text(json.dumps(one))
    with pytest.raises(FirmError, match="other settings than its name says"):
        results(root / "results", todo)


def test_an_interrupted_experiment_ends_equal(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = tiny_plan()[0]
    list(run_missing([one], root / "whole", root / "work"))

    monkeypatch.setattr("firm.bench.FINAL", {})  # the first attempt dies before its final scores
    with pytest.raises(ValueError, match="empty"):
        list(run_missing([one], root / "parts", root / "again"))
    monkeypatch.undo()
    monkeypatch.setenv("FIRM_DATA", str(root))
    list(run_missing([one], root / "parts", root / "again"))
    first, second = (json.loads(result_path(root / name, one).read_text()) for name in ("whole", "parts"))
    assert second.pop("resumed")
    assert not first.pop("resumed")
    assert first.pop("seconds") >= 0
    assert second.pop("seconds") >= 0
    assert first["diagnostics"].pop("seconds") >= 0
    assert second["diagnostics"].pop("seconds") >= 0
    assert first == second


def test_published_numbers() -> None:
    k, numbers = published("cifar10:bird")
    assert (k, numbers["firm"]) == (1, 91.4)
    assert published("cifar10:dog")[1]["firm + OE"] == 96.2
    assert published("fashion-mnist:sandal") == (
        5,
        {"ntxent": 95.8, "supcon": 97.0, "rot-supcon": 98.1, "firm": 98.6},
    )
    assert published("drawn:plate") == (1, {})


def test_promises_are_kept_beside_what_came_true(tmp_path: Path) -> None:
    one = patch_experiment(PROMISES, "drawn:plate", "from scratch", "smoke", 0)
    cheap = {"features": "pixels", "training.epochs": 0, "automatic": (), "size": 64, "encoder.width": 8}
    tiny = dataclasses.replace(one, recipe=change(one.recipe, cheap), side=64)
    (line,) = run_missing([tiny], tmp_path, tmp_path / "work", by=conduct_promise, line=promise_line)
    assert "of 400 good parts do not PASS, at most" in line
    stored = json.loads(result_path(tmp_path, tiny).read_text())
    assert stored["realised"]["review"]["of"] == 400
    assert stored["promised"]["review"] < stored["surely"]["review"] < 1
    assert stored["realised"]["fail"]["count"] <= stored["realised"]["review"]["count"]
    assert stored["caught"]["of"] == 60
    os.replace(result_path(tmp_path, tiny), result_path(tmp_path, one))
    page = promise_report("smoke", [0], tmp_path)
    (row,) = [text for text in page.splitlines() if text.startswith("| drawn:plate")]
    promised = f"{100 * stored['promised']['review']:.1f} %"
    sure = f"{100 * stored['surely']['review']:.1f} %"
    assert row.split(" | ")[5:8] == [promised, sure, _share(stored["realised"]["review"])]
    assert row.split(" | ")[11] == "no"
    assert f"1 calibrations promised at most {promised} on average" in page


def test_good_parts_kept_back_are_judged_instead_of_those_to_test_on(tmp_path: Path, monkeypatch) -> None:
    cheap = {"features": "pixels", "training.epochs": 0, "automatic": (), "size": 64, "encoder.width": 8}
    given, judged = [], []
    fit, score = Detector.fit.__func__, Detector.score

    def fitting(cls, good, **settings):
        given.append(good.train)
        return fit(cls, good, **settings)

    def scoring(detector, images, *more):
        judged.append(images)
        return score(detector, images, *more)

    monkeypatch.setattr(Detector, "fit", classmethod(fitting))
    monkeypatch.setattr(Detector, "score", scoring)
    every = load("drawn:plate", side=64).train
    for seed in (0, 1):
        one = patch_experiment(PROMISES, "drawn:plate", "from scratch, parts kept back", "smoke", seed)
        tiny = dataclasses.replace(one, recipe=change(one.recipe, cheap), side=64)
        stored = conduct_promise(tiny, tmp_path / str(seed))
        unseen = judged[-1]
        assert stored["realised"]["review"]["of"] == len(unseen)
        assert 30 <= len(unseen) <= 50
        together = torch.cat([given[-1], unseen])
        assert len(together) == len(every)
        assert {one.numpy().tobytes() for one in together} == {one.numpy().tobytes() for one in every}
        assert stored["moved"] == {"scores": "", "light": "", "by": stored["moved"]["by"]}
    assert not torch.equal(given[0], given[1])


def _share(found: dict[str, float]) -> str:
    share, low, high = 100 * found["count"] / found["of"], 100 * found["low"], 100 * found["high"]
    return f"{share:.1f} % ({found['count']} of {found['of']}; {low:.1f} to {high:.1f})"


def test_every_stored_result_is_found_by_a_table() -> None:
    """A setting added later must not rename what was measured before it, or the pages could not be written again."""
    stored = {path.stem for path in Path("docs/results/runs").glob("*.json")}
    seeds = [0, 1, 2]
    named = {one.name for table in TABLES.values() for one in plan(table, "short", seeds)}
    named |= {one.name for table in PATCH_TABLES.values() for one in patch_plan(table, "short", seeds)}
    assert stored
    assert stored <= named, sorted(stored - named)


def test_the_seconds_of_what_was_begun_before_are_not_told(tmp_path: Path) -> None:
    """Features that lay there already cost this run nothing, so its time is not that of a fit."""
    table = PATCH_TABLES["patches"]
    one = patch_experiment(table, "drawn:plate", "pixels", "smoke", 0)
    tiny = dataclasses.replace(one, recipe=change(one.recipe, {"automatic": (), "size": 64}), side=64)
    left = tmp_path / "work" / tiny.name / "features"
    left.mkdir(parents=True)
    list(run_missing([tiny], tmp_path, tmp_path / "work", by=conduct_patches, line=patch_line))
    stored = json.loads(result_path(tmp_path, tiny).read_text())
    assert stored["resumed"]
    told = {}
    for resumed in (True, False):
        result_path(tmp_path, one).write_text(json.dumps(stored | {"resumed": resumed}))
        page = patch_report({"patches": table}, "smoke", [0], tmp_path)
        (row,) = [text for text in page.splitlines() if text.startswith("| pixels | 1 | ") and "[" in text]
        told[resumed] = row.strip("| ").split(" | ")[-2]
    assert told[True] == "-"
    assert float(told[False]) >= 0


def told_after(page: str, begin: str) -> dict[str, list[float]]:
    """Of plates, the line that begins so: row -> the differences seed by seed."""
    block = page.split("### drawn:plate\n")[1].split("\n### ")[0]
    (line,) = [line.partition(": ")[2] for line in block.splitlines() if line.startswith(begin)]
    found = re.findall(r"(\S.*?) [+-][\d.]+ \(([^)]*)\)(?:; |\.$)", line)
    return {row: [float(value) for value in values.split(", ")] for row, values in found}


@pytest.mark.parametrize(
    ("table", "row", "look", "plain"),
    [
        ("patches", "firm", "+ pixels", "pixels"),
        ("wavelets", "firm, evened light", "+ unadapted", "pixels, evened light"),
    ],
)
def test_the_gate_is_the_difference_to_plain_pixels_of_the_same_light(
    table: str, row: str, look: str, plain: str
) -> None:
    folder, seeds = Path("docs/results/runs"), [0, 1, 2]
    page = patch_report({table: PATCH_TABLES[table]}, "short", seeds, folder)
    found = patch_runs(PATCH_TABLES[table], "drawn:plate", "short", seeds, folder)
    below = found[plain][0]["final"][""]["overall"]["auroc"]["value"]
    expected = [100 * (run["final"][look]["overall"]["auroc"]["value"] - below) for run in found[row]]
    told = told_after(page, "The gate, ")
    assert told[f"{row} {look}"] == pytest.approx(expected, abs=0.051)


def test_rows_are_compared_with_firm_of_their_own_sort_and_untaught_ones_with_every_seed() -> None:
    folder, seeds = Path("docs/results/runs"), [0, 1, 2]
    page = patch_report({"wavelets": PATCH_TABLES["wavelets"]}, "short", seeds, folder)
    found = patch_runs(PATCH_TABLES["wavelets"], "drawn:plate", "short", seeds, folder)
    told = told_after(page, "FIRM less, ")

    def value(run: dict[str, Any], look: str) -> float:
        return 100 * float(run["final"][look]["overall"]["auroc"]["value"])

    for name, suffix in (("pixels", ""), ("unadapted", ""), ("pixels", ", evened light")):
        (untaught,) = found[name + suffix]
        expected = [value(run, "+ unadapted") - value(untaught, "") for run in found[f"firm{suffix}"]]
        assert told[name + suffix] == pytest.approx(expected, abs=0.051)


def test_what_takes_hours_is_left_out_where_it_does() -> None:
    looks = {
        data: patch_experiment(PATCH_TABLES["looks"], data, "firm", "short", 0).looks for data in ("drawn:plate", TILE)
    }
    left_out = set(looks["drawn:plate"]) - set(looks[TILE])
    assert left_out == set(PATCH_TABLES["looks"].unlooked[TILE])
    assert len(left_out) == 4


@pytest.mark.parametrize("left_open", [("foreground", "features"), ("foreground", "align", "reach")])
def test_a_table_settles_on_the_recipe_that_a_fit_settles_on(left_open: tuple[str, ...]) -> None:
    """All that is chosen is taken over, or a table would measure what no user gets."""
    one = patch_experiment(PATCH_TABLES["wavelets"], "drawn:plate", "firm", "short", 0)
    data = drawn("plate", size=64, train=24, good=2, bad=2)[0]
    tiny = dataclasses.replace(one, recipe=change(one.recipe, {"size": 64, "automatic": left_open}), side=64)
    settled, _ = _settled(tiny, data, None)
    assert settled == choose(tiny.recipe, data, seed=0)
    assert settled != tiny.recipe
