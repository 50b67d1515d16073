"""The command line as its users run it: real processes, real files, sentences instead of tracebacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from firm.data.drawn import write_folder
from firm.detector import Detector
from firm.images import decode, resize, to_tensor

TINY = [
    "--set=encoder.width=8",
    "--set=encoder.head.hidden=[16]",
    "--set=training.epochs=2",
    "--set=training.batch=16",
    "--set=size=32",
    "--threads=1",
]


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "firm", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


@pytest.fixture(scope="module")
def plates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "plates"
    write_folder(folder, "plate", size=48, train=24, good=6, bad=6)
    return folder


@pytest.fixture(scope="module")
def model(plates: Path) -> Path:
    path = plates.parent / "plates.firm"
    done = run("fit", plates, "--out", path, *TINY, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)  # one machine-readable result and nothing else
    assert said["model"] == str(path)
    assert said["threshold"]["images"] == 2
    assert said["origin"]["good_images"] == 22
    return path


def test_help_names_every_verb() -> None:
    done = run("--help")
    assert done.returncode == 0
    for verb in ("fit", "score", "evaluate", "bench", "demo"):
        assert verb in done.stdout


def test_help_needs_no_torch() -> None:
    code = "import sys, firm.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_score_names_each_image_and_its_call(model: Path, plates: Path) -> None:
    done = run("score", model, plates / "test", "--json", "--threads=1")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said["images"]) == 12
    for row in said["images"]:
        assert Path(row["image"]).is_file()
        assert row["label"] == (-1 if row["score"] > said["threshold"] else 1)


def test_a_broken_file_is_named_and_costs_nothing_else(model: Path, plates: Path, tmp_path: Path) -> None:
    good = next((plates / "test" / "good").iterdir())
    (tmp_path / "a.png").write_bytes(good.read_bytes())
    (tmp_path / "broken.png").write_bytes(good.read_bytes()[:60])
    done = run("score", model, tmp_path, "--json", "--threads=1")
    assert done.returncode == 1
    assert "broken.png" in done.stderr
    assert "Traceback" not in done.stderr
    said = json.loads(done.stdout)
    assert [Path(row["image"]).name for row in said["images"]] == ["a.png"]
    assert [Path(name).name for name in said["left_out"]] == ["broken.png"]


def test_evaluate_prints_an_interval(model: Path, plates: Path) -> None:
    done = run("evaluate", model, plates, "--json", "--threads=1")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)["auroc"]
    assert 0 <= said["low"] <= said["value"] <= said["high"] <= 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fit", "nowhere/at/all", "-o", "x.firm"], "nowhere/at/all is not a folder"),
        (["fit", "cifar11:bird", "-o", "x.firm"], "neither a folder nor a data set"),
        (["fit", "drawn:plate", "-o", "x.firm", "--set", "training.epoch=3"], "no setting 'training.epoch'"),
        (["fit", "drawn:plate", "-o", "x.firm", "--set", "training.epochs=many"], "must be of type int"),
        (["fit", "drawn:plate", "-o", "x.firm", "--preset", "slow"], "no preset 'slow'"),
        (["fit", "drawn:plate", "-o", "x.firm", "--device", "cuda:7"], "try --device cpu"),
        (["score", "missing.firm", "a.png"], "there is no file missing.firm"),
        (["bench", "everything"], "no table 'everything'"),
        (["bench", "objectives", "--only-report", "--scale", "huge"], "no scale 'huge'"),
        (["fit", "drawn:plate", "-o", "."], "is a folder; name the file to write"),
        (["fit", "drawn:plate", "-o", "x.firm", "--false-calls", "0"], "it must lie between 0 and 1"),
        (["fit", "drawn:plate", "-o", "x.firm", "--set", "score.by.k=500"], "use a smaller k"),
        (["fit", "drawn:plate", "-o", "/dev/null/x.firm"], "Not a directory"),
        (["fetch", "cats-vs-dogs"], "cannot be fetched by itself"),
        (["score", "x.firm", "a.png", "--threads", "-1"], "Invalid value for '--threads'"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_2(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "firm", *arguments], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not list(tmp_path.glob("*.firm"))


def test_missing_data_says_how_to_get_it(tmp_path: Path) -> None:
    done = run("fit", "cifar10:bird", "-o", tmp_path / "x.firm", FIRM_DATA=str(tmp_path))
    assert done.returncode == 2
    assert "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz" in done.stderr


def test_a_folder_with_only_tests_can_be_evaluated(model: Path, plates: Path, tmp_path: Path) -> None:
    (tmp_path / "test").symlink_to(plates / "test")
    done = run("evaluate", model, tmp_path, "--json", "--threads=1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["images"] == 12


def test_good_and_bad_are_evaluated_with_a_warning(model: Path, plates: Path, tmp_path: Path) -> None:
    (tmp_path / "good").symlink_to(plates / "test" / "good")
    (tmp_path / "bad").symlink_to(plates / "test" / "scratch")
    done = run("evaluate", model, tmp_path, "--json", "--threads=1")
    assert done.returncode == 0, done.stderr
    assert "false calls look fewer than they are" in done.stderr


def test_files_are_read_at_the_side_that_was_learnt_from(model: Path, plates: Path) -> None:
    """The same pixels give the same score through a file and through Python."""
    file = next((plates / "test" / "good").iterdir())
    said = json.loads(run("score", model, file, "--json", "--threads=1").stdout)
    detector = Detector.load(model)
    assert detector.preprocessing.file_side == 128
    pixels = resize(to_tensor(decode(file)), 128)
    assert said["images"][0]["score"] == pytest.approx(float(detector.score(pixels)[0]), abs=1e-6)


def test_a_promise_that_cannot_be_kept_is_said(plates: Path, tmp_path: Path) -> None:
    done = run("fit", plates, "--out", tmp_path / "x.firm", *TINY)
    assert done.returncode == 0, done.stderr
    assert "2 held-out images cannot promise 5 %; that takes 19" in done.stderr
    assert "at most 33.3 % false calls expected" in done.stdout


def test_the_card_is_json(model: Path) -> None:
    done = run("card", model)
    assert json.loads(done.stdout)["recipe"]["encoder"]["width"] == 8


def test_the_demo_draws_a_tray(tmp_path: Path) -> None:
    done = run("demo", "--out", tmp_path, "--product=label", "--json", *TINY, "--set=training.epochs=1")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    with Image.open(said["picture"]) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert pixels.shape[0] > 400
    assert pixels.shape[1] > 800
    assert pixels.std() > 30  # parts, not a blank page
