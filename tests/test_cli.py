"""The command line as its users run it: real files, sentences instead of tracebacks; some of it as real processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from commands import Done, run, values
from firm.data.folder import read_files
from firm.data.registry import shows_parts
from firm.decision.calibration import summary_of, warnings_of
from firm.decision.verdict import marked
from firm.detector import tune
from firm.detector.detector import Detector
from firm.detector.prepare import read_side
from firm.drawn.render import draw_dataset, write_folder
from firm.images.decode import decode
from firm.images.foreground import automatic, foreground
from firm.images.preprocess import fingerprint, resize, to_tensor
from firm.outliers.registry import KINDS
from firm.recipes.presets import PRESETS, recipe_of
from firm.report.heatmap import overlay

SMALL = ("--set=encoder.width=8", "--set=encoder.head.hidden=[16]", "--set=training.epochs=1", "--set=training.batch=8")
WHOLE = ("--preset=parts", *SMALL, "--set=size=32")
PATCHES = ("--preset=inspect", *SMALL, "--set=size=96", "--set=tiling.stride=16", "--set=views.min_foreground=0.3")


def process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "firm", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def plates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "plates"
    write_folder(folder, "plate", size=96, train=12, good=4, bad=6)
    return folder


@pytest.fixture(scope="module")
def fitted(plates: Path) -> Done:
    """A detector of patches, by the preset that parts are given; what was printed is kept."""
    return run("fit", plates, "--out", plates.parent / "patches.firm", *PATCHES, "--json", "--verbose")


@pytest.fixture(scope="module")
def patches(plates: Path, fitted: Done) -> Path:
    assert fitted.code == 0, fitted.err
    return plates.parent / "patches.firm"


@pytest.fixture(scope="module")
def whole(plates: Path) -> Path:
    path = plates.parent / "whole.firm"
    assert values("fit", plates, "--out", path, *WHOLE)["model"] == str(path)
    return path


# help


def test_help_names_every_verb() -> None:
    done = process("--help")
    assert done.returncode == 0
    for verb in ("fit", "calibrate", "inspect", "evaluate", "card", "masks", "outliers", "fetch", "bench", "demo"):
        assert f"\n  {verb} " in done.stdout


def test_help_needs_no_torch() -> None:
    code = "import sys, firm.cli.app; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# fit


def test_fit_writes_a_detector_of_patches(fitted: Done, patches: Path) -> None:
    told = json.loads(fitted.out)
    assert told["model"] == str(patches)
    assert told["calibration"]["images"] == 3
    assert told["origin"]["good_images"] == 9
    assert told["recipe"]["features"] == "both"
    assert told["recipe"]["automatic"] == []
    assert told["preprocessing"]["side"] == told["preprocessing"]["size"] == 96  # read at the side patches are cut at
    assert not patches.with_name("patches.firm.run").joinpath("checkpoint.safetensors").exists()


def test_a_fit_prints_at_most_eight_lines_beside_warnings_and_everything_when_verbose(
    fitted: Done, plates: Path, tmp_path: Path
) -> None:
    code, out, err = run("fit", plates, "--out", tmp_path / "x.firm", *PATCHES)
    assert code == 0, err
    lines = [line for line in [*err.splitlines(), *out.splitlines()] if not line.startswith("warning: ")]
    assert 3 <= len(lines) <= 8, lines
    found, chosen, training, check = (line for line in err.splitlines() if not line.startswith("warning: "))
    assert "12 good images of 96 x 96 px, 9 to learn from, 3 held out" in found
    assert Detector.load(tmp_path / "x.firm").recipe.conditioning.illumination in chosen
    assert "1 epochs of 2 steps" in training
    assert "AUROC" in check
    verbose = fitted.err.splitlines()
    assert len(verbose) > len(lines)
    assert sum(line.startswith("tried ") for line in verbose) > 1
    quiet = run("fit", plates, "--out", tmp_path / "y.firm", *WHOLE, "--quiet")
    assert all(line.startswith("warning: ") for line in quiet.err.splitlines())


def test_parts_are_scored_in_patches_and_classes_as_a_whole() -> None:
    for data in ("some/folder", "drawn:plate", "mvtec:screw", "visa:pcb1", "btad:01", "mpdd:tubes"):
        assert shows_parts(data)
    for data in ("cifar10:bird", "cifar100-super:people", "fashion-mnist:sandal", "cats-vs-dogs:cat"):
        assert not shows_parts(data)
    assert recipe_of("inspect", None) == PRESETS["inspect"]


def test_what_is_set_by_hand_is_not_chosen() -> None:
    def left(*settings: str) -> tuple[str, ...]:
        return recipe_of("inspect", list(settings)).automatic

    assert left("training.epochs=3") == ("foreground", "illumination", "align", "neighbourhood")
    assert left("conditioning.foreground.method=otsu") == ("illumination", "align", "neighbourhood")
    assert left("conditioning.illumination=local", "memory.neighbourhood=1") == ("foreground", "align")
    assert left('conditioning={"illumination": "none"}', "memory.k=2") == ("neighbourhood",)
    assert left("conditioning.illumination=local", 'automatic=["illumination"]') == ("illumination",)  # said outright


def test_patches_are_cut_from_the_pixels_that_are_read() -> None:
    assert read_side(PRESETS["inspect"]) == read_side(PRESETS["patches"]) == 256
    assert read_side(recipe_of("inspect", ["size=96"])) == 96
    assert read_side(PRESETS["whole"]) == 512
    assert read_side(PRESETS["fast"]) == read_side(recipe_of("parts", ["size=32"])) == 128


def test_good_images_alone_are_enough_and_a_broken_one_is_named(plates: Path, tmp_path: Path) -> None:
    shutil.copytree(plates / "train" / "good", tmp_path / "good parts")
    (tmp_path / "good parts" / "broken.png").write_bytes(b"no image")
    done = run("fit", tmp_path / "good parts", "-o", tmp_path / "x.firm", *WHOLE)
    assert done.code == 1
    assert "left out: " in done.err
    assert "broken.png" in done.err
    detector = Detector.load(tmp_path / "x.firm")
    assert detector.origin["good_images"] == 9
    assert not detector.model.has_maps


def test_a_rate_that_cannot_be_guaranteed_is_warned_of(plates: Path, tmp_path: Path) -> None:
    done = run("fit", plates, "--out", tmp_path / "x.firm", *WHOLE, "--holdout=0.2")
    assert done.code == 0, done.err
    decides = Detector.load(tmp_path / "x.firm").decides
    assert decides.reviewed.kept == pytest.approx(1 / 3)
    assert [warning for warning in warnings_of(decides) if warning in done.err] == warnings_of(decides) != []
    assert summary_of(decides)[1] in done.out


def test_the_ablation_on_whole_images_can_be_fitted(plates: Path, tmp_path: Path) -> None:
    told = values("fit", plates, "-o", tmp_path / "x.firm", "--preset=whole", *SMALL, "--set=size=64")
    assert told["recipe"]["tiling"] == {"kind": "whole"}
    assert told["preprocessing"]["side"] == 128
    assert told["recipe"]["conditioning"]["foreground"]["method"] != "ones"


# inspect


def inspected(*arguments: str | Path) -> dict:
    """What inspect prints as JSON, whatever the verdicts."""
    done = run("inspect", *arguments, "--json")
    assert done.code in (0, 3, 4), done.err
    return json.loads(done.out)


def test_files_are_read_at_the_side_that_was_learnt_from(patches: Path, whole: Path, plates: Path) -> None:
    """The same pixels give the same score through a file and through Python."""
    file = next((plates / "test" / "good").iterdir())
    for model, side in ((patches, 96), (whole, 128)):
        detector = Detector.load(model)
        assert detector.preprocessing.file_side == side
        pixels = resize(to_tensor(decode(file)), side)
        (image,) = inspected(model, file)["images"]
        assert image["score"] == pytest.approx(float(detector.score(pixels)[0]), abs=1e-5)
        assert "map" not in image


def test_a_broken_file_is_named_and_costs_nothing_else(whole: Path, plates: Path, tmp_path: Path) -> None:
    good = next((plates / "test" / "good").iterdir())
    (tmp_path / "a.png").write_bytes(good.read_bytes())
    (tmp_path / "broken.png").write_bytes(good.read_bytes()[:60])
    done = process("inspect", whole, tmp_path, "--json", "--threads=1")
    assert done.returncode in (1, 4)
    assert "broken.png" in done.stderr
    assert "Traceback" not in done.stderr
    result = json.loads(done.stdout)
    assert [Path(image["image"]).name for image in result["images"]] == ["a.png"]
    assert [Path(left["file"]).name for left in result["left_out"]] == ["broken.png"]


def test_maps_are_written_for_every_image(patches: Path, plates: Path, tmp_path: Path) -> None:
    images = inspected(patches, plates / "test", "--maps", tmp_path / "maps")["images"]
    written = sorted(str(file.relative_to(tmp_path / "maps")) for file in (tmp_path / "maps").rglob("*.*"))
    assert written == sorted(str(file.relative_to(plates / "test")) for file in (plates / "test").rglob("*.png"))
    detector = Detector.load(patches)
    for image in images[:3]:
        file = Path(image["image"])
        assert Path(image["map"]) == tmp_path / "maps" / file.relative_to(plates / "test")
        heat = detector.locate(read_files([file], 96)[0]).maps[0].numpy()
        regions = marked(heat, detector.decides.pixel)
        expected = overlay(decode(file), heat, image["review"], marked=regions)
        np.testing.assert_allclose(decode(image["map"])[:96, :96].astype(int), expected, atol=2)


def test_a_map_lies_over_the_picture_as_it_is_on_disk(patches: Path, plates: Path, tmp_path: Path) -> None:
    """Oblong and larger than the detector's square, beside one that differs by its suffix alone."""
    (tmp_path / "in").mkdir()
    with Image.open(plates / "test" / "dent" / "000.png") as picture:
        picture.resize((300, 150)).save(tmp_path / "in" / "a.png")
        picture.save(tmp_path / "in" / "a.bmp")
    inspected(patches, tmp_path / "in", "--maps", tmp_path / "maps")
    assert sorted(file.name for file in (tmp_path / "maps").iterdir()) == ["a.bmp.png", "a.png.png"]
    assert decode(tmp_path / "maps" / "a.png.png").shape[0] == 150


def test_maps_do_not_mix_with_the_images(patches: Path, plates: Path, tmp_path: Path) -> None:
    shutil.copytree(plates / "test" / "good", tmp_path / "good")
    before = {file: file.read_bytes() for file in (tmp_path / "good").iterdir()}
    for images, maps in (("good", "good"), ("good", "good/maps"), (".", "maps"), ("good/000.png", "good")):
        done = run("inspect", patches, tmp_path / images, "--maps", tmp_path / maps)
        assert done.code == 2
        assert str(tmp_path / maps) in done.err
    assert {file: file.read_bytes() for file in (tmp_path / "good").iterdir()} == before
    inspected(patches, tmp_path / "good" / "000.png", "--maps", tmp_path / "good" / "m")


# masks and outliers


def test_masks_are_drawn_by_the_rule_that_is_found(plates: Path, tmp_path: Path) -> None:
    done = run("masks", plates, "--out", tmp_path / "deep" / "masks.png", "--set=size=96")
    assert done.code == 0, done.err
    good = read_files([plates / "train" / "good"], 96)[0]
    rule = automatic(good)
    assert rule.method != "ones"
    part = float(foreground(good, rule).float().mean())
    assert all(word in done.out for word in (rule.polarity, rule.method, rule.channel))
    assert f"{100 * part:.1f} % of the pixels of 12 good images" in done.out
    assert decode(tmp_path / "deep" / "masks.png").std() > 30


def test_masks_are_those_of_a_fit(plates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is found on the same images, so it is the same rule and gives the same masks."""
    seen, find = list[str](), tune.rule_for
    monkeypatch.setattr(tune, "rule_for", lambda name, images: seen.append(fingerprint(images)) or find(name, images))
    shown = values("masks", plates, "-o", tmp_path / "masks.png", "--set=size=96")
    small = (
        "--set=size=96",
        "--set=training.epochs=0",
        "--set=memory.neighbourhood=1",
        "--set=conditioning.align=false",
    )
    card = values("fit", plates, "-o", tmp_path / "x.firm", *small)
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert shown["rule"] == card["recipe"]["conditioning"]["foreground"]
    fitted = Detector.load(tmp_path / "x.firm")
    good = read_files([plates / "train" / "good"], fitted.preprocessing.file_side)[0]
    assert shown["foreground"] == float(fitted.model.align(good).foreground.float().mean())


def test_masks_by_hand(plates: Path, tmp_path: Path) -> None:
    rule = ("--set=conditioning.foreground.method=otsu", "--set=conditioning.foreground.polarity=dark")
    told = values("masks", plates, "-o", tmp_path / "masks.png", *rule, "--set=size=96")
    assert told["rule"] == {"method": "otsu", "polarity": "dark", "channel": "grey", "close": 6, "open": 6}


def test_outliers_are_drawn_of_every_source(plates: Path, tmp_path: Path) -> None:
    def sheet(name: str, *options: str) -> list[str]:
        return values("outliers", plates, "--out", tmp_path / "new" / name, "--set=size=96", *options)["sources"]

    assert sheet("a.png") == list(KINDS)
    assert sheet("b.png", "--source=nsa") == sheet("c.png", "--source=nsa", "--seed=1") == ["nsa"]
    every, one, other = (decode(tmp_path / "new" / name) for name in ("a.png", "b.png", "c.png"))
    assert every.shape[0] > 2 * one.shape[0]  # a row for every kind
    assert (one != other).any()


# mistakes


MISTAKES = [  # and the culprit that the sentence names
    (["fit", "nowhere/at/all", "-o", "x.firm"], "nowhere/at/all"),
    (["fit", "cifar11:bird", "-o", "x.firm"], "cifar11:bird"),
    (["fit", "PLATES", "-o", "x.firm", "--set", "training.epoch=3"], "training.epoch"),
    (["fit", "PLATES", "-o", "x.firm", "--set", "training.epochs=many"], "many"),
    (["fit", "PLATES", "-o", "x.firm", "--set", "encoder.width=8"], "encoder.width"),
    (["fit", "PLATES", "-o", "x.firm", "--set", "size=48"], "48"),
    (["fit", "PLATES", "-o", "x.firm", "--preset", "slow"], "slow"),
    (["fit", "PLATES", "-o", "x.firm", "--device", "cuda:7"], "cuda:7"),
    (["fit", "PLATES", "-o", "."], "."),
    (["fit", "PLATES", "-o", "x.firm", *WHOLE, "--false-calls", "0"], "false"),
    (["fit", "PLATES", "-o", "x.firm", *WHOLE, "--set", "score.by.k=500"], "500"),
    (["fit", "PLATES", "-o", "file/x.firm", *WHOLE], "file"),
    (["fit", "PLATES", "-o", "x.firm", "--preset=parts"], "batch of 32"),
    (["fit", "PLATES", "-o", "x.firm", "--preset=inspect", *SMALL, "--set=size=16"], "16"),
    (["inspect", "missing.firm", "a.png"], "missing.firm"),
    (["inspect", "x.firm", "a.png", "--threads", "-1"], "--threads"),
    (["evaluate", "missing.firm", "PLATES"], "missing.firm"),
    (["masks", "PLATES", "-o", "masks"], "masks"),
    (["masks", "PLATES", "-o", "m.png", "--set=conditioning.foreground.method=ots"], "'ots'"),
    (["outliers", "PLATES", "-o", "sheet.jpg"], "sheet.jpg"),
    (["outliers", "PLATES", "-o", "s.png", "--source=freckles"], "freckles"),
    (["bench", "run", "everything"], "everything"),
    (["bench", "report", "objectives", "--scale", "huge"], "huge"),
    (["bench", "plan", "objectives", "--class", "unicorn"], "unicorn"),
    (["bench", "run"], "firm bench list"),
    (["bench", "run", "objectives", "--row", "unicorn"], "'pixels, cosine'"),
    (["bench", "list", "--results", __file__], "test_cli.py"),
    (["fetch", "cats-vs-dogs"], "cats-vs-dogs"),
]


def test_mistakes_are_one_sentence_and_exit_2(plates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for number, (arguments, culprit) in enumerate(MISTAKES):
        words = {"PLATES": str(plates), "x.firm": f"{number}.firm"}  # apart from what an earlier one has left
        code, out, err = run(*(words.get(word, word) for word in arguments))
        assert (code, out) == (2, ""), (arguments, err)
        last = err.splitlines()[-1]
        assert culprit in last, (arguments, err)
        assert last.startswith(("firm: ", "Error: ")) or "Invalid value" in err
        assert "Traceback" not in err
        assert not [file for file in tmp_path.rglob("*") if file.suffix in (".firm", ".png", ".jpg")], arguments


def test_a_mistake_ends_the_process_with_2() -> None:
    done = process("fit", "nowhere/at/all", "-o", "x.firm")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("firm: nowhere/at/all")
    assert done.stderr.count("\n") == 1


def test_missing_data_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "FIRM_DATA", str(tmp_path))
    done = run("fit", "cifar10:bird", "-o", tmp_path / "x.firm")
    assert done.code == 2
    assert "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz" in done.err


# the rest


def test_the_card_is_json(patches: Path) -> None:
    assert json.loads(run("card", patches).out)["recipe"]["encoder"]["width"] == 8


def test_the_demo_writes_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firm.drawn.render.draw_dataset", partial(draw_dataset, train=12, good=12, bad=12))
    small = ("size=96", "training.epochs=1", "training.batch=64", "outliers=perlin-blend", "automatic=[]")
    told = values("demo", "--out", tmp_path, "--product=label", *(f"--set={one}" for one in small))
    assert told["report"] == str(tmp_path / "report.html")
    assert Path(told["report"]).read_text().count('<li class="entry') == 24
    assert len(list((tmp_path / "label").glob("*-good.png"))) == 12
    assert (tmp_path / "label.firm" / "card.json").is_file()
