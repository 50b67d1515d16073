"""The command line as its users run it: real files, sentences instead of tracebacks; some of it as real processes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import firm.data.drawn
from firm.bank import cost
from firm.cli import main
from firm.cli.findings import as_text, as_values
from firm.cli.inputs import preset_for, recipe_of
from firm.data.drawn import drawn, write_folder
from firm.data.folder import read_files, read_test
from firm.detector import Detector
from firm.evaluate import Evaluation, Kind, Trivial, evaluate_detector
from firm.fitting import side_for
from firm.foreground import Rule, automatic, foreground
from firm.foretelling import foretell
from firm.holdout import split
from firm.images import decode, resize, to_tensor
from firm.localisation import Localisation
from firm.metrics import Interval
from firm.outliers import KINDS
from firm.recipes.presets import PRESETS, recipe
from firm.report.heat import overlay
from firm.types import FirmError

SMALL = ("--set=encoder.width=8", "--set=encoder.head.hidden=[16]", "--set=training.epochs=1", "--set=training.batch=8")
WHOLE = ("--preset=parts", *SMALL, "--set=size=32")
PATCHES = ("--preset=inspect", *SMALL, "--set=size=96", "--set=tiling.stride=16", "--set=views.fore=0.3")


@dataclass
class Done:
    """What a command left: its exit code and what it said."""

    returncode: int
    stdout: str
    stderr: str


def run(*arguments: str | Path) -> Done:
    """The command line within this process, for which torch is already there."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    before = sys.argv
    sys.argv = ["firm", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("default")
            main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0
    finally:
        sys.argv = before
    return Done(code, out.getvalue(), err.getvalue())


def process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "firm", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def said(*arguments: str | Path) -> dict:
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # one machine-readable result and nothing else


@pytest.fixture(scope="module")
def plates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "plates"
    write_folder(folder, "plate", size=96, train=12, good=4, bad=6)
    return folder


@pytest.fixture(scope="module")
def fitted(plates: Path) -> Done:
    """A detector of patches, by the preset that parts are given; what was said is kept."""
    return run("fit", plates, "--out", plates.parent / "patches.firm", *PATCHES, "--json")


@pytest.fixture(scope="module")
def patches(plates: Path, fitted: Done) -> Path:
    assert fitted.returncode == 0, fitted.stderr
    return plates.parent / "patches.firm"


@pytest.fixture(scope="module")
def whole(plates: Path) -> Path:
    path = plates.parent / "whole.firm"
    assert said("fit", plates, "--out", path, *WHOLE)["model"] == str(path)
    return path


# help


def test_help_names_every_verb() -> None:
    done = process("--help")
    assert done.returncode == 0
    for verb in (
        "fit",
        "calibrate",
        "inspect",
        "score",
        "evaluate",
        "card",
        "masks",
        "outliers",
        "fetch",
        "bench",
        "demo",
    ):
        assert f"\n  {verb} " in done.stdout


def test_help_needs_no_torch() -> None:
    code = "import sys, firm.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# fit


def test_fit_writes_a_detector_of_patches(fitted: Done, patches: Path) -> None:
    told = json.loads(fitted.stdout)
    assert told["model"] == str(patches)
    assert told["calibration"]["images"] == 3
    assert told["origin"]["good_images"] == 9
    assert told["recipe"]["features"] == "both"
    assert told["recipe"]["automatic"] == []
    assert told["preprocessing"]["side"] == told["preprocessing"]["size"] == 96  # read at the side patches are cut at
    assert not patches.with_name("patches.firm.run").joinpath("checkpoint.safetensors").exists()


def test_cost_and_choices_are_said_before_and_while_fitting(fitted: Done, patches: Path) -> None:
    (few, *lines), detector = fitted.stderr.splitlines(), Detector.load(patches)
    assert few.startswith("warning: 12 good images are few: the 3 held out")
    assert detector.localiser is not None
    assert lines[0] == "training: 9 good images, 1 epochs of 2 steps"
    assert lines[1].startswith("memory: about 0.7 GB")
    taught = "donor, nsa, cutpaste-union, strokes, shades, pits"
    assert lines[2] == f"patches of 32 px every 16 px of 96 px; synthetic defects: {taught}"
    for line, (kind, bank) in zip(lines[3:5], detector.localiser.banks.items(), strict=True):
        assert len(bank.vectors) == 9 * 5 * 5  # images, patches
        assert line == f"{kind} {cost(9, 5, 5, bank.vectors.shape[1], bank.memory)}"
    assert lines[5] == "patches: 100 % of the good images offer one that is 30 % object (views.fore)"
    assert lines[6].startswith("foreground: ")
    assert sum(line.startswith("tried light ") for line in lines) > 1
    assert sum(line.startswith("chosen: light ") for line in lines) == 1


def test_a_part_without_enough_object_is_foretold() -> None:
    """A speck is 1 % of no patch of 32 pixels: no good image offers one that is 90 % object."""
    data, _ = drawn("plate", size=64, train=8, good=0, bad=0)
    specks = torch.zeros_like(data.train)
    specks[:, :, 30:33, 30:33] = 200
    settled = recipe(
        "patches",
        **{"conditioning.foreground": Rule(method="otsu", close=0, open=0), "automatic": [], "training.batch": 8},
    )
    told = foretell(settled, replace(data, train=specks))
    assert told[-1] == "patches: 0 % of the good images offer one that is 90 % object (views.fore)"
    assert [line.split()[0] for line in told] == ["training:", "memory:", "patches", "encoder", "patches:"]
    assert len(foretell(recipe("parts", **{"training.batch": 8}), data)) == 2


@pytest.mark.parametrize(
    ("data", "preset"),
    [
        ("some/folder", "inspect"),
        ("drawn:plate", "inspect"),
        ("mvtec:screw", "inspect"),
        ("visa:pcb1", "inspect"),
        ("btad:01", "inspect"),
        ("mpdd:tubes", "inspect"),
        ("cifar10:bird", "fast"),
        ("cifar100-super:people", "fast"),
        ("fashion-mnist:sandal", "fast"),
        ("cats-vs-dogs:cat", "fast"),
    ],
)
def test_parts_are_looked_at_in_patches_and_classes_as_a_whole(data: str, preset: str) -> None:
    assert preset_for(data) == preset
    assert recipe_of(preset, None) == PRESETS[preset]


def test_what_is_set_by_hand_is_not_chosen() -> None:
    def left(*settings: str) -> tuple[str, ...]:
        return recipe_of("inspect", list(settings)).automatic

    assert left("training.epochs=3") == ("foreground", "light", "align", "reach")
    assert left("conditioning.foreground.method=otsu") == ("light", "align", "reach")
    assert left("conditioning.light=local", "memory.reach=1") == ("foreground", "align")
    assert left('conditioning={"light": "none"}', "memory.k=2") == ("reach",)
    assert left("conditioning.light=local", 'automatic=["light"]') == ("light",)  # said outright


def test_patches_are_cut_from_the_pixels_that_are_read() -> None:
    assert side_for(PRESETS["inspect"]) == side_for(PRESETS["patches"]) == 256
    assert side_for(recipe_of("inspect", ["size=96"])) == 96
    assert side_for(PRESETS["whole"]) == 512
    assert side_for(PRESETS["fast"]) == side_for(recipe_of("parts", ["size=32"])) == 128


def test_good_images_alone_are_enough_and_a_broken_one_is_named(plates: Path, tmp_path: Path) -> None:
    shutil.copytree(plates / "train" / "good", tmp_path / "good parts")
    (tmp_path / "good parts" / "broken.png").write_bytes(b"no image")
    done = run("fit", tmp_path / "good parts", "-o", tmp_path / "x.firm", *WHOLE)
    assert done.returncode == 1
    assert "left out: " in done.stderr
    assert "broken.png" in done.stderr
    assert "learnt 9 good images" in done.stdout
    assert Detector.load(tmp_path / "x.firm").localiser is None


def test_a_promise_that_cannot_be_kept_is_said(plates: Path, tmp_path: Path) -> None:
    done = run("fit", plates, "--out", tmp_path / "x.firm", *WHOLE, "--holdout=0.2")
    assert done.returncode == 0, done.stderr
    few = "2 good images cannot promise 5 % for REVIEW: the lowest honest rate is 33.3 %, and 5 % takes 19"
    assert few in done.stderr
    assert "good parts: at most 33.3 % for REVIEW or FAIL, at most 33.3 % FAIL" in done.stdout


def test_the_ablation_on_whole_images_can_be_fitted(plates: Path, tmp_path: Path) -> None:
    told = said("fit", plates, "-o", tmp_path / "x.firm", "--preset=whole", *SMALL, "--set=size=64")
    assert told["recipe"]["tiling"] == {"kind": "whole"}
    assert told["preprocessing"]["side"] == 128
    assert told["recipe"]["conditioning"]["foreground"]["method"] != "ones"


# score


def test_score_names_each_image_and_its_call(patches: Path, plates: Path) -> None:
    told = said("score", patches, plates / "test")
    assert len(told["images"]) == 10
    for row in told["images"]:
        assert Path(row["image"]).is_file()
        assert row["label"] == (-1 if row["score"] > told["threshold"] else 1)
        assert "map" not in row


@pytest.mark.parametrize(("kind", "side"), [("patches", 96), ("whole", 128)])
def test_files_are_read_at_the_side_that_was_learnt_from(
    request: pytest.FixtureRequest, plates: Path, kind: str, side: int
) -> None:
    """The same pixels give the same score through a file and through Python."""
    model, file = request.getfixturevalue(kind), next((plates / "test" / "good").iterdir())
    detector = Detector.load(model)
    assert detector.preprocessing.file_side == side
    pixels = resize(to_tensor(decode(file)), side)
    (row,) = said("score", model, file)["images"]
    assert row["score"] == pytest.approx(float(detector.score(pixels)[0]), abs=1e-5)


def test_a_broken_file_is_named_and_costs_nothing_else(whole: Path, plates: Path, tmp_path: Path) -> None:
    good = next((plates / "test" / "good").iterdir())
    (tmp_path / "a.png").write_bytes(good.read_bytes())
    (tmp_path / "broken.png").write_bytes(good.read_bytes()[:60])
    done = process("score", whole, tmp_path, "--json", "--threads=1")
    assert done.returncode == 1
    assert "broken.png" in done.stderr
    assert "Traceback" not in done.stderr
    told = json.loads(done.stdout)
    assert [Path(row["image"]).name for row in told["images"]] == ["a.png"]
    assert [Path(name).name for name in told["left_out"]] == ["broken.png"]


@pytest.mark.parametrize("kind", ["patches", "whole"])
def test_nothing_readable_is_a_mistake(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    done = run("score", request.getfixturevalue(kind), tmp_path)
    assert done.returncode == 2
    assert f"none of the images could be read: {tmp_path / 'broken.png'} cannot be decoded" in done.stderr


def test_maps_are_written_for_every_image(patches: Path, plates: Path, tmp_path: Path) -> None:
    told = said("score", patches, plates / "test", "--maps", tmp_path / "maps")
    written = sorted(str(file.relative_to(tmp_path / "maps")) for file in (tmp_path / "maps").rglob("*.*"))
    given = sorted(str(file.relative_to(plates / "test")) for file in (plates / "test").rglob("*.png"))
    assert written == given
    detector, limit = Detector.load(patches), told["threshold"]
    assert [row["score"] for row in told["images"]] == pytest.approx(
        [row["score"] for row in said("score", patches, plates / "test")["images"]], abs=1e-5
    )
    for row in told["images"][:3]:
        file = Path(row["image"])
        assert Path(row["map"]) == tmp_path / "maps" / file.relative_to(plates / "test")
        heat = detector.locate(read_files([file], 96)[0]).maps[0].numpy()
        expected = overlay(decode(file), heat, limit)
        np.testing.assert_allclose(decode(row["map"])[:96, :96].astype(int), expected, atol=2)


def test_a_map_lies_over_the_picture_as_it_is_on_disk(patches: Path, plates: Path, tmp_path: Path) -> None:
    """Oblong and larger than the detector's square, beside one that differs by its suffix alone."""
    (tmp_path / "in").mkdir()
    with Image.open(plates / "test" / "dent" / "000.png") as picture:
        picture.resize((300, 150)).save(tmp_path / "in" / "a.png")
        picture.save(tmp_path / "in" / "a.bmp")
    done = run("score", patches, tmp_path / "in", "--maps", tmp_path / "maps")
    assert done.returncode == 0, done.stderr
    assert f"are in {tmp_path / 'maps'}" in done.stdout
    assert sorted(file.name for file in (tmp_path / "maps").iterdir()) == ["a.bmp.png", "a.png.png"]
    assert decode(tmp_path / "maps" / "a.png.png").shape[0] == 150


def test_tests_of_a_data_set_have_maps_too(
    patches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plates: Path
) -> None:
    monkeypatch.setattr(firm.data.drawn, "drawn", partial(drawn, train=1, good=1, bad=1))
    told = said("score", patches, "drawn:plate", "--maps", tmp_path)
    assert [row["image"] for row in told["images"]] == ["drawn:plate test 0", "drawn:plate test 1"]
    file = plates / "test" / "good" / "000.png"  # the same part
    assert told["images"][0]["score"] == pytest.approx(said("score", patches, file)["images"][0]["score"], abs=1e-5)
    assert decode(tmp_path / "00001.png").shape[0] == 96


def test_whole_images_have_no_maps(whole: Path, plates: Path, tmp_path: Path) -> None:
    done = run("score", whole, plates / "test", "--maps", tmp_path / "maps")
    assert done.returncode == 2
    assert "this detector looks at whole images and cannot say where" in done.stderr
    assert not (tmp_path / "maps").exists()


def test_maps_do_not_mix_with_the_images(patches: Path, plates: Path, tmp_path: Path) -> None:
    shutil.copytree(plates / "test" / "good", tmp_path / "good")
    before = {file: file.read_bytes() for file in (tmp_path / "good").iterdir()}
    for images, maps in (("good", "good"), ("good", "good/maps"), (".", "maps"), ("good/000.png", "good")):
        done = run("score", patches, tmp_path / images, "--maps", tmp_path / maps)
        assert done.returncode == 2
        assert "name a folder apart from them" in done.stderr
    assert {file: file.read_bytes() for file in (tmp_path / "good").iterdir()} == before
    assert run("score", patches, tmp_path / "good" / "000.png", "--maps", tmp_path / "good" / "m").returncode == 0


# evaluate


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


def test_verdicts_by_kind_and_copies_are_told() -> None:
    counts = {"good": {"PASS": 39, "REVIEW": 1, "FAIL": 0}, "dent": {"PASS": 0, "REVIEW": 2, "FAIL": 10}}
    lines = as_text("parts", replace(FOUND, confusion=counts, copies=3), 3.5, 2).splitlines()
    assert lines[-5:-2] == [
        "verdicts  PASS  REVIEW  FAIL  not passed",
        "good      39    1       0     2.5 % (0.1 to 13.2)",
        "dent      0     2       10    100.0 % (73.5 to 100.0)",
    ]
    assert lines[-1] == "warning: 3 of the test images look like copies of learnt ones; results look too good"


def test_an_evaluation_is_told_line_by_line() -> None:
    assert as_text("parts", FOUND, 3.5, 2).splitlines() == [
        "parts: image AUROC 90.0 (89.0 to 91.0) on 30 images, 20 of them defective",
        "pixel AUROC 95.0 (94.0 to 96.0), AUPRO 80.0 (79.0 to 81.0), 33 regions on 28 images, 2 of 20 masks unknown",
        "best F1 of pixels 50.0 at 3.25, chosen on the test set: information, not a result",
        "defect        images  image AUROC          pixel AUROC          AUPRO",
        "dent          12      91.0 (90.0 to 92.0)  96.0 (95.0 to 97.0)  81.0 (80.0 to 82.0)",
        "missing hole  8       92.0 (91.0 to 93.0)  -                    -",
        "at the threshold 3.5: 75.0 % of the anomalies caught, 10.0 % false calls",
        "brightness alone 60.0, nearest whole image 55.0",
    ]


def test_defects_under_ignored_pixels_are_told() -> None:
    for count, sentence in (
        (3, "3 defective images are marked only where pixels are ignored; they are left out of image AUROC"),
        (1, "1 defective image is marked only where pixels are ignored; it is left out of image AUROC"),
    ):
        told = replace(FOUND, ignored=count)
        assert as_text("parts", told, 3.5, 2).splitlines()[1] == f"{sentence} and counted apart"
        assert as_values("parts", told, 3.5, 2)["ignored"] == count


@pytest.mark.parametrize("trivial", [Trivial(0.8, 0.5), Trivial(0.2, 0.5), Trivial(0.5, 0.9)])
def test_a_test_set_that_is_too_easy_is_warned_about(trivial: Trivial) -> None:
    lines = as_text("parts", replace(FOUND, trivial=trivial), 3.5, 2).splitlines()
    assert lines[-2].startswith("brightness alone ")
    assert lines[-1].startswith("warning: these know nothing of defects")
    assert as_values("parts", replace(FOUND, trivial=trivial), 3.5, 2)["trivial"]["suspicious"]
    assert not as_values("parts", FOUND, 3.5, 2)["trivial"]["suspicious"]


def test_classes_of_a_semantic_set_have_neither_kinds_nor_masks() -> None:
    plain = replace(FOUND, kinds={}, overall=replace(FOUND.overall, localisation=None))
    assert [line.split()[0] for line in as_text("cifar10:bird", plain, 3.5, None).splitlines()] == [
        "cifar10:bird:",
        "at",
        "brightness",
    ]
    assert as_values("cifar10:bird", plain, 3.5, None)["masks_unknown"] is None


def test_evaluate_says_what_python_says(patches: Path, plates: Path) -> None:
    told = said("evaluate", patches, plates)
    test, detector = read_test(plates, 96), Detector.load(patches)
    found = evaluate_detector(detector, test.images, test.anomalous, test.truth)
    assert (told["images"], told["defective"], told["masks_unknown"]) == (10, 6, 0)
    assert set(told["kinds"]) == set(found.kinds) == {path.name for path in (plates / "ground_truth").iterdir()}
    where = found.overall.localisation
    assert where is not None
    assert told["auroc"]["value"] == pytest.approx(found.overall.auroc.value)
    assert told["pixel_auroc"]["value"] == pytest.approx(where.pixel_auroc.value, abs=1e-4)
    assert told["aupro"]["value"] == pytest.approx(where.aupro.value, abs=1e-3)
    assert told["aupro"]["low"] <= told["aupro"]["value"] <= told["aupro"]["high"]
    assert told["best_f1_chosen_on_the_test_set"]["value"] == pytest.approx(where.best_f1, abs=1e-3)
    assert told["kinds"]["dent"]["images"] == found.kinds["dent"].images
    assert told["trivial"]["brightness"] == pytest.approx(found.trivial.brightness)
    assert (told["caught"], told["false_calls"]) == (found.caught, found.false_calls)
    assert told["threshold"] == detector.limit


def test_what_was_decided_wrongly_is_drawn(patches: Path, plates: Path, tmp_path: Path) -> None:
    told = said("evaluate", patches, plates, "--report", tmp_path / "out")
    called = {kind: sum(counts.values()) - counts["PASS"] for kind, counts in told["confusion"].items()}
    missed = told["defective"] - sum(count for kind, count in called.items() if kind != "good")
    wrong = missed + called["good"]
    names = ["roc.png"] + ["misses.png"] * bool(missed) + ["false-calls.png"] * bool(called["good"])
    names += ["wrong.csv"] * bool(wrong)
    assert told["pictures"] == [str(tmp_path / "out" / name) for name in names]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted(names)
    assert all(decode(picture).std() > 10 for picture in told["pictures"] if not picture.endswith(".csv"))
    assert sum(told["confusion"]["good"].values()) == told["images"] - told["defective"]


def test_tests_without_masks_and_broken_ones_are_counted(patches: Path, plates: Path, tmp_path: Path) -> None:
    shutil.copytree(plates / "test", tmp_path / "test")
    shutil.copytree(plates / "ground_truth", tmp_path / "ground_truth")
    shutil.rmtree(tmp_path / "ground_truth" / "dent")
    (tmp_path / "test" / "dent" / "broken.png").write_bytes(b"no image")
    dents = len(list((plates / "test" / "dent").iterdir()))
    done = run("evaluate", patches, tmp_path)
    assert done.returncode == 1
    assert "left out: " in done.stderr
    assert "broken.png" in done.stderr
    assert f"defective images without a mask: {dents}" in done.stderr
    assert f", {dents} of 6 masks unknown" in done.stdout
    assert "brightness alone " in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("dent "))
    assert line.split()[-2:] == ["-", "-"]


def test_good_and_bad_are_evaluated_with_a_warning(whole: Path, plates: Path, tmp_path: Path) -> None:
    (tmp_path / "good").symlink_to(plates / "test" / "good")
    (tmp_path / "bad").symlink_to(plates / "test" / "scratch")
    done = run("evaluate", whole, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "false calls look fewer than they are" in done.stderr
    assert "pixel AUROC and AUPRO need heat maps and masks of the defects" in done.stdout


def test_a_folder_in_the_data_root_is_evaluated_by_its_name(
    patches: Path, plates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ours").symlink_to(plates)
    monkeypatch.setitem(os.environ, "FIRM_DATA", str(tmp_path))
    told = said("evaluate", patches, "ours")
    assert told["auroc"] == said("evaluate", patches, plates)["auroc"]


def test_a_drawn_set_is_evaluated_at_the_side_of_the_detector(
    patches: Path, plates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firm.data.drawn, "drawn", partial(drawn, train=1, good=4, bad=6))
    ours, files = said("evaluate", patches, "drawn:plate"), said("evaluate", patches, plates)
    assert ours["auroc"]["value"] == files["auroc"]["value"]  # the order of the images is another, and so the resamples
    assert ours["aupro"]["value"] == pytest.approx(files["aupro"]["value"], abs=1e-3)


# masks and outliers


def test_masks_are_drawn_by_the_rule_that_is_found(plates: Path, tmp_path: Path) -> None:
    done = run("masks", plates, "--out", tmp_path / "deep" / "masks.png", "--set=size=96")
    assert done.returncode == 0, done.stderr
    good = read_files([plates / "train" / "good"], 96)[0]
    rule = automatic(good)
    assert rule.method != "ones"
    part = float(foreground(good, rule).float().mean())
    assert f"the {rule.polarity} side of {rule.method} on {rule.channel}" in done.stdout
    assert f"{100 * part:.1f} % of the pixels of 12 good images" in done.stdout
    assert decode(tmp_path / "deep" / "masks.png").std() > 30


def test_masks_by_hand(plates: Path, tmp_path: Path) -> None:
    rule = ("--set=conditioning.foreground.method=otsu", "--set=conditioning.foreground.polarity=dark")
    told = said("masks", plates, "-o", tmp_path / "masks.png", *rule, "--set=size=96")
    assert told["rule"] == {"method": "otsu", "polarity": "dark", "channel": "grey", "close": 6, "open": 6}


def test_outliers_are_drawn_of_every_source(plates: Path, tmp_path: Path) -> None:
    def sheet(name: str, *options: str) -> list[str]:
        return said("outliers", plates, "--out", tmp_path / "new" / name, "--set=size=48", *options)["sources"]

    assert sheet("a.png") == list(KINDS)
    assert sheet("b.png", "--source=donor") == sheet("c.png", "--source=donor", "--seed=1") == ["donor"]
    every, one, other = (decode(tmp_path / "new" / name) for name in ("a.png", "b.png", "c.png"))
    assert every.shape[0] > 2 * one.shape[0]  # a row for every kind
    assert (one != other).any()


# mistakes


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fit", "nowhere/at/all", "-o", "x.firm"], "nowhere/at/all is not a folder"),
        (["fit", "cifar11:bird", "-o", "x.firm"], "neither a folder nor a data set"),
        (["fit", "PLATES", "-o", "x.firm", "--set", "training.epoch=3"], "no setting 'training.epoch'"),
        (["fit", "PLATES", "-o", "x.firm", "--set", "training.epochs=many"], "must be of type int"),
        (["fit", "PLATES", "-o", "x.firm", "--set", "encoder.width=8"], "fit with --preset inspect"),
        (["fit", "PLATES", "-o", "x.firm", "--preset", "slow"], "no preset 'slow'"),
        (["fit", "PLATES", "-o", "x.firm", "--device", "cuda:7"], "try --device cpu"),
        (["fit", "PLATES", "-o", "."], "is a folder of other things; name a new one"),
        (["fit", "PLATES", "-o", "x.firm", *WHOLE, "--false-calls", "0"], "it must lie between 0 and 1"),
        (["fit", "PLATES", "-o", "x.firm", *WHOLE, "--set", "score.by.k=500"], "use a smaller k"),
        (["fit", "PLATES", "-o", "/dev/null/x.firm", *WHOLE], "Not a directory"),
        (["fit", "PLATES", "-o", "x.firm", "--preset=parts"], "fewer than one batch of 32; add images or set"),
        (["fit", "PLATES", "-o", "x.firm", "--preset=inspect", *SMALL, "--set=size=16"], "is smaller than a 32px tile"),
        (["score", "missing.firm", "a.png"], "there is no detector missing.firm"),
        (["score", "x.firm", "a.png", "--threads", "-1"], "Invalid value for '--threads'"),
        (["evaluate", "missing.firm", "PLATES"], "there is no detector missing.firm"),
        (["masks", "PLATES", "-o", "masks"], "masks is not the name of a picture"),
        (
            ["masks", "PLATES", "-o", "m.png", "--set=conditioning.foreground.method=ots"],
            "a foreground rule has no 'ots'",
        ),
        (["outliers", "PLATES", "-o", "sheet.jpg"], "sheet.jpg is not the name of a picture"),
        (
            ["outliers", "PLATES", "-o", "s.png", "--source=spots"],
            "no source of outliers 'spots'; use one of rotations",
        ),
        (["bench", "everything"], "no such tables; write some of objectives"),
        (["bench", "objectives", "patches"], "no such tables; write some of objectives"),
        (["bench", "objectives", "--only-report", "--scale", "huge"], "no scale 'huge'"),
        (["fetch", "cats-vs-dogs"], "cannot be fetched by itself"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_2(
    arguments: list[str], sentence: str, plates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*(str(plates) if word == "PLATES" else word for word in arguments))
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not [file for file in tmp_path.rglob("*") if file.suffix in (".firm", ".png", ".jpg")]


def test_a_mistake_ends_the_process_with_2() -> None:
    done = process("fit", "nowhere/at/all", "-o", "x.firm")
    assert done.returncode == 2
    assert done.stderr == "firm: nowhere/at/all is not a folder; give the folder that holds the good images\n"
    assert done.stdout == ""


def test_missing_data_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "FIRM_DATA", str(tmp_path))
    done = run("fit", "cifar10:bird", "-o", tmp_path / "x.firm")
    assert done.returncode == 2
    assert "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz" in done.stderr


# the rest


def test_the_card_is_json(patches: Path) -> None:
    assert json.loads(run("card", patches).stdout)["recipe"]["encoder"]["width"] == 8


def test_the_demo_writes_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firm.data.drawn, "drawn", partial(drawn, train=12, good=12, bad=12))
    small = ("size=96", "training.epochs=1", "training.batch=64", "outliers=donor", "automatic=[]")
    told = said("demo", "--out", tmp_path, "--product=label", *(f"--set={one}" for one in small))
    assert told["report"] == str(tmp_path / "report.html")
    assert Path(told["report"]).read_text().count('<li class="entry') == 24
    assert len(list((tmp_path / "label").glob("*-good.png"))) == 12
    assert (tmp_path / "label.firm" / "card.json").is_file()


def test_foretelling_counts_the_images_that_are_learnt_from() -> None:
    data, _ = drawn("plate", size=32, train=9, good=0, bad=0)
    learn, held_out = split(torch.arange(9), 0.5, seed=3)
    told = foretell(recipe("parts", **{"training.batch": 2, "training.epochs": 7}), data, holdout=0.5, seed=3)
    assert told[0] == f"training: {len(learn)} good images, 7 epochs of {len(learn)} steps"
    assert len(learn) + len(held_out) == 9
    with pytest.raises(FirmError, match="fewer than one batch of 64"):
        foretell(recipe("inspect", automatic=[]), data)
