"""firm evaluate as its users run it: the numbers of Python, warnings where they mislead, and files that show why."""

from __future__ import annotations

import csv
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from commands import run, values
from firm.cli.evaluate import as_text, as_values, warnings_about
from firm.data.folder import read_files, read_test
from firm.detector.detector import Detector
from firm.detector.evaluation import Evaluation, Kind, Labelled, Trivial, evaluate
from firm.drawn.render import draw_dataset, write_folder
from firm.images.decode import decode
from firm.metrics.image import Interval
from firm.metrics.pixel import Localisation
from firm.recipes.presets import INSPECT, PARTS
from firm.recipes.recipe import change

SIDE = 96
TINY = {"training.epochs": 0, "training.batch": 8, "encoder.width": 8, "encoder.head.hidden": (8,)}
PATCHES = {"features": "pixels", "size": SIDE, "automatic": (), "tiling.stride": 16}


@pytest.fixture(scope="module")
def plates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "plates"
    write_folder(folder, "plate", size=SIDE, train=12, good=4, bad=6)
    return folder


@pytest.fixture(scope="module")
def patches(plates: Path) -> Path:
    good, _, _ = read_files([plates / "train" / "good"], SIDE)
    Detector.fit(good, recipe=change(INSPECT, TINY | PATCHES)).save(plates.parent / "patches.firm")
    return plates.parent / "patches.firm"


@pytest.fixture(scope="module")
def whole(plates: Path) -> Path:
    good, _, _ = read_files([plates / "train" / "good"], 128)
    Detector.fit(good, recipe=change(PARTS, TINY | {"size": 32})).save(plates.parent / "whole.firm")
    return plates.parent / "whole.firm"


def interval(value: float) -> Interval:
    return Interval(value, value - 0.01, value + 0.01)


FOUND = Evaluation(
    images=30,
    overall=Kind(20, interval(0.9), Localisation(interval(0.95), interval(0.8), 0.5, 3.25, 28, 33)),
    kinds={
        "dent": Kind(12, interval(0.91), Localisation(interval(0.96), interval(0.81), 0.4, 3, 28, 20)),
        "missing hole": Kind(8, interval(0.92), None),
    },
    caught=0.75,
    false_calls=0.1,
    trivial=Trivial(0.6, 0.55),
)


def test_verdicts_are_counted_by_kind() -> None:
    counts = {"good": {"PASS": 39, "REVIEW": 1, "FAIL": 0}, "dent": {"PASS": 0, "REVIEW": 2, "FAIL": 10}}
    lines = as_text("parts", replace(FOUND, confusion=counts), 3.5, 2).splitlines()
    assert [line.split()[:4] for line in lines[-4:-1]] == [
        ["verdicts", "PASS", "REVIEW", "FAIL"],
        ["good", "39", "1", "0"],
        ["dent", "0", "2", "10"],
    ]
    assert lines[-3].endswith("2.5 (0.1 to 13.2)")
    assert lines[-2].endswith("100.0 (73.5 to 100.0)")


def test_an_evaluation_names_every_number() -> None:
    text = as_text("parts", FOUND, 3.5, 2)
    for number in ("90.0 (89.0 to 91.0)", "95.0 (94.0 to 96.0)", "80.0 (79.0 to 81.0)", "33 regions", "2 of 20 masks"):
        assert number in text
    for number in ("50.0 at 3.25", "75.0 %", "10.0 % false calls", "brightness 60.0", "nearest whole image 55.0"):
        assert number in text
    rows = [line.split() for line in text.splitlines() if line.startswith(("dent", "missing hole"))]
    assert rows[0][1:3] == ["12", "91.0"]
    assert rows[1][-2:] == ["-", "-"]


def test_defects_under_ignored_pixels_are_counted() -> None:
    assert "3 defective images" in as_text("parts", replace(FOUND, ignored=3), 3.5, 2)
    assert as_values("parts", replace(FOUND, ignored=3), 3.5, 2)["ignored"] == 3


def test_a_test_set_that_is_too_easy_or_learnt_from_is_warned_about() -> None:
    assert warnings_about(FOUND) == []
    easy, copied = replace(FOUND, trivial=Trivial(0.2, 0.5)), replace(FOUND, copies=3)
    assert "trivial" in warnings_about(easy)[0]
    assert as_values("parts", easy, 3.5, 2)["suspicious"]
    assert "3 test images" in warnings_about(copied)[0]


def test_classes_of_a_semantic_set_have_neither_kinds_nor_masks() -> None:
    plain = replace(FOUND, kinds={}, overall=replace(FOUND.overall, localisation=None))
    assert [line.split()[0] for line in as_text("cifar10:bird", plain, 3.5, None).splitlines()] == [
        "cifar10:bird:",
        "at",
        "trivial",
    ]
    assert as_values("cifar10:bird", plain, 3.5, None)["masks_unknown"] is None


def test_evaluate_says_what_python_says(patches: Path, plates: Path) -> None:
    told = values("evaluate", patches, plates)
    test, detector = read_test(plates, 96), Detector.load(patches)
    found = evaluate(detector, Labelled(detector.locate(test.images), test.images, test.anomalous, test.truth))
    overall, where = told["overall"], found.overall.localisation
    assert (told["images"], overall["images"], told["masks_unknown"]) == (10, 6, 0)
    assert set(told["kinds"]) == set(found.kinds) == {path.name for path in (plates / "ground_truth").iterdir()}
    assert where is not None
    assert overall["auroc"]["value"] == pytest.approx(found.overall.auroc.value)
    pixels = overall["localisation"]
    assert pixels["pixel_auroc"]["value"] == pytest.approx(where.pixel_auroc.value, abs=1e-4)
    assert pixels["aupro"]["value"] == pytest.approx(where.aupro.value, abs=1e-3)
    assert pixels["aupro"]["low"] <= pixels["aupro"]["value"] <= pixels["aupro"]["high"]
    assert pixels["best_f1"] == pytest.approx(where.best_f1, abs=1e-3)
    assert told["kinds"]["dent"]["images"] == found.kinds["dent"].images
    assert told["trivial"]["brightness"] == pytest.approx(found.trivial.brightness)
    assert (told["caught"], told["false_calls"]) == (found.caught, found.false_calls)
    assert told["threshold"] == detector.limit


def test_what_was_decided_wrongly_is_drawn(patches: Path, plates: Path, tmp_path: Path) -> None:
    told = values("evaluate", patches, plates, "--report", tmp_path / "out")
    called = {kind: sum(counts.values()) - counts["PASS"] for kind, counts in told["confusion"].items()}
    defective = told["overall"]["images"]
    missed = defective - sum(count for kind, count in called.items() if kind != "good")
    wrong = missed + called["good"]
    names = ["roc.png", "scores.csv"] + ["misses.png"] * bool(missed) + ["false-calls.png"] * bool(called["good"])
    names += ["wrong.csv"] * bool(wrong)
    assert told["pictures"] == [str(tmp_path / "out" / name) for name in names]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted(names)
    assert all(decode(picture).std() > 10 for picture in told["pictures"] if not picture.endswith(".csv"))
    assert sum(told["confusion"]["good"].values()) == told["images"] - defective


def test_tests_without_masks_and_broken_ones_are_counted(patches: Path, plates: Path, tmp_path: Path) -> None:
    shutil.copytree(plates / "test", tmp_path / "test")
    shutil.copytree(plates / "ground_truth", tmp_path / "ground_truth")
    shutil.rmtree(tmp_path / "ground_truth" / "dent")
    (tmp_path / "test" / "dent" / "broken.png").write_bytes(b"no image")
    dents = len(list((plates / "test" / "dent").iterdir()))
    done = run("evaluate", patches, tmp_path)
    assert done.code == 1
    assert "left out: " in done.err
    assert "broken.png" in done.err
    assert f"defective images without a mask: {dents}" in done.err
    assert f", {dents} of 6 masks unknown" in done.out
    line = next(line for line in done.out.splitlines() if line.startswith("dent "))
    assert line.split()[-2:] == ["-", "-"]


def test_good_and_bad_are_evaluated_with_a_warning(whole: Path, plates: Path, tmp_path: Path) -> None:
    (tmp_path / "good").symlink_to(plates / "test" / "good")
    (tmp_path / "bad").symlink_to(plates / "test" / "scratch")
    done = run("evaluate", whole, tmp_path)
    assert done.code == 0, done.err
    assert "warning: " in done.err
    assert "good/" in done.err
    assert "need heat maps and masks" in done.out


def test_photographs_of_one_part_count_as_one(patches: Path, plates: Path, tmp_path: Path) -> None:
    """The stated rates speak of parts, and so do the realised ones."""
    for kind in ("good", "dent"):
        (tmp_path / "test" / kind).mkdir(parents=True)
        for number, file in enumerate(sorted((plates / "test" / kind).iterdir())[:4]):
            for shot in range(1 + 2 * number):
                shutil.copy(file, tmp_path / "test" / kind / f"part{number}_{shot}.png")
    shutil.copytree(plates / "train", tmp_path / "train")
    told = values("evaluate", patches, tmp_path, "--group-by", r"(part\d+)_")
    of_images = values("evaluate", patches, tmp_path)["stated"]
    for each, alone in zip(told["stated"], of_images, strict=True):
        assert (each["parts"], each["images"]) == (4, 16)
        assert (4 * each["realised"]["value"]).is_integer()
        assert alone["parts"] == alone["images"] == 16  # too few images to look for photographs of one part
    assert "of 4 good parts (16 images)" in run("evaluate", patches, tmp_path, "--group-by", r"(part\d+)_").out
    assert run("evaluate", patches, tmp_path, "--group-by", "(").code == 2


def test_a_folder_in_the_data_root_is_evaluated_by_its_name(
    patches: Path, plates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ours").symlink_to(plates)
    monkeypatch.setitem(os.environ, "FIRM_DATA", str(tmp_path))
    told = values("evaluate", patches, "ours")
    assert told["overall"]["auroc"] == values("evaluate", patches, plates)["overall"]["auroc"]


def test_a_drawn_set_is_evaluated_at_the_side_of_the_detector(
    patches: Path, plates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firm.data.drawn_parts.draw_dataset", partial(draw_dataset, train=1, good=4, bad=6))
    ours = values("evaluate", patches, "drawn:plate", "--report", tmp_path)["overall"]
    files = values("evaluate", patches, plates)["overall"]
    with (tmp_path / "scores.csv").open(encoding="utf-8-sig", newline="") as table:
        rows = list(csv.DictReader(table))
    assert [row["image"] for row in rows] == [f"drawn:plate {number}" for number in range(10)]
    same = Detector.load(patches).inspect(plates / "test" / "good" / "000.png")  # the same part
    assert float(rows[0]["score"]) == pytest.approx(same.score, rel=1e-5)
    assert ours["auroc"]["value"] == files["auroc"]["value"]  # the order of the images is another, and so the resamples
    located = ours["localisation"]["aupro"]["value"], files["localisation"]["aupro"]["value"]
    assert located[0] == pytest.approx(located[1], abs=1e-3)
