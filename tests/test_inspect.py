"""firm inspect as its users run it: a folder of new parts, verdicts, a report, exit codes, a folder that is watched."""

from __future__ import annotations

import csv
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from commands import run
from firm.data.folder import read_files
from firm.decision.calibration import TargetRates, beside, write_calibration
from firm.detector import detector as detector_module
from firm.detector import inspection
from firm.detector.detector import Detector
from firm.detector.inspection import Inspection
from firm.drawn.render import write_folder
from firm.images import preprocess
from firm.images.decode import Source, decode
from firm.recipes.presets import INSPECT, PARTS
from firm.recipes.recipe import change
from firm.types import Depth

SIDE = 48
CHEAP = change(
    INSPECT,
    {"features": "pixels", "training.epochs": 0, "training.batch": 8, "encoder.width": 8, "size": SIDE,
     "encoder.head.hidden": (8,), "automatic": (), "memory.neighbourhood": 1, "tiling.size": 16, "tiling.stride": 8},
)  # fmt: skip


@pytest.fixture(scope="module")
def plates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "plates"
    write_folder(folder, "plate", size=SIDE, train=60, good=12, bad=8)
    return folder


@pytest.fixture(scope="module")
def model(plates: Path) -> Path:
    path = plates.parent / "part.firm"
    images, _, _ = read_files([plates / "train" / "good"], SIDE)
    Detector.fit(images, recipe=CHEAP, holdout=0.4).save(path)
    return path


@pytest.fixture
def mine(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "part.firm"))


def by_hand(model: Path, review: float, fail: float) -> None:
    """Thresholds that lead to the verdicts a test is about."""
    detector = Detector.load(model)
    images = np.stack([np.full((SIDE, SIDE, 3), 9 * level, np.uint8) for level in range(20)])
    good = detector.preprocessing.read(images[0])
    found = detector.calibrate(good, targets=TargetRates(review_at=review, fail_at=fail))
    write_calibration(beside(model), found)


def test_every_image_has_the_verdict_python_gives(model: Path, plates: Path, tmp_path: Path) -> None:
    code, out, err = run("inspect", model, plates / "test", "--report", tmp_path / "out", "--json")
    told, detector = json.loads(out), Detector.load(model)
    files = sorted((plates / "test").rglob("*.png"))
    assert [one["image"] for one in told["images"]] == [str(file) for file in files]
    assert "left out" not in err
    for file, one in zip(files, told["images"], strict=True):
        found = detector.inspect(file)
        assert (one["score"], one["verdict"], one["model"]) == (found.score, found.verdict, detector.id)
        assert [region["box"] for region in one["regions"]] == [list(region.box) for region in found.regions]
    words = [one["verdict"] for one in told["images"]]
    assert told["counts"] == {word: words.count(word) for word in ("FAIL", "REVIEW", "PASS")}
    assert words.count("FAIL") >= 1
    assert code == 4
    assert told["drift"]["images"] == 20


def test_the_report_shows_and_the_tables_tell(model: Path, plates: Path, tmp_path: Path) -> None:
    _, out, _ = run("inspect", model, plates / "test", "--report", tmp_path / "out", "--gallery", "5")
    assert out.splitlines()[-1] == f"see {tmp_path / 'out' / 'report.html'}"
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count('<li class="entry') == 5
    assert page.count("most similar good part</figcaption>") == 5
    assert "thresholds from 24 held-out good images" in page
    assert re.search(r"20 images inspected on \d{4}-\d\d-\d\d at \d\d:\d\d \S+</p>", page)
    with (tmp_path / "out" / "verdicts.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (tmp_path / "out" / "verdicts.jsonl").read_text().splitlines()]
    assert len(rows) == len(lines) == 20
    assert [row["verdict"] for row in rows] == [line["verdict"] for line in lines]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "report.html", "verdicts.csv", "verdicts.jsonl",
    ]  # fmt: skip


def test_the_good_part_has_the_shape_of_the_picture_and_is_found_only_to_explain(model: Path, plates: Path) -> None:
    file = next((plates / "test" / "good").iterdir())
    batch = Inspection(Detector.load(model))
    (explained,) = batch([file])
    assert explained.nearest is not None
    assert explained.nearest.shape == explained.picture.shape
    assert next(batch([file], explain=False)).nearest is None


def test_a_picture_is_decoded_once(model: Path, plates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []

    def counted(source: Source, depth: Depth) -> object:
        decoded.append(source)
        return decode(source, depth)

    monkeypatch.setattr(detector_module, "decode", counted)
    monkeypatch.setattr(preprocess, "decode", counted)
    files = sorted((plates / "test" / "good").iterdir())
    assert len(list(Inspection(Detector.load(model))(files))) == len(files)
    assert decoded == files


def test_what_is_kept_of_an_image_is_no_tensor(model: Path, plates: Path) -> None:
    """Small tensors between the large ones of each image would keep freed memory from being used again."""

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    batch = Inspection(Detector.load(model))
    inspected = batch(sorted((plates / "test" / "good").iterdir()))
    alive = [tensors() for image in inspected if image]
    assert len(alive) == 12
    assert alive[-1] <= alive[1]  # the first image makes what is made once


def test_a_batch_too_long_to_be_compared_is_not_grouped(
    model: Path, plates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "COMPARED", 11)
    files = sorted((plates / "test" / "good").iterdir())
    found = {}
    for count in (11, 12):
        batch = Inspection(Detector.load(model))
        list(batch(files[:count]))
        found[count] = batch.drift()
    assert found[11] is not None
    assert found[12] is not None
    assert (found[11].images, found[12].images) == (11, 12)


def test_exit_codes_tell_the_worst(mine: Path, plates: Path, tmp_path: Path) -> None:
    good = plates / "test" / "good"
    for review, fail, code in ((1e6, 1e6, 0), (-1.0, 1e6, 3), (-2.0, -1.0, 4)):
        by_hand(mine, review, fail)
        assert run("inspect", mine, good)[0] == code
    mixed = Path(shutil.copytree(good, tmp_path / "mixed"))
    (mixed / "broken.png").write_bytes(b"no image")
    assert run("inspect", mine, mixed)[0] == 4  # a FAIL is worse than a file that cannot be read
    by_hand(mine, -1.0, 1e6)
    assert run("inspect", mine, mixed)[0] == 1  # which is worse than a REVIEW
    by_hand(mine, 1e6, 1e6)
    code, out, err = run("inspect", mine, mixed, "--report", tmp_path / "out")
    assert code == 1
    assert f"left out: {mixed / 'broken.png'}" in err
    assert "12 images: 12 PASS" in out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Not inspected" in page
    assert "broken.png" in page
    code, _, err = run("inspect", mine, mixed, "--strict", "--report", tmp_path / "strict")
    assert (code, "broken.png" in err) == (2, True)
    assert not (tmp_path / "strict" / "report.html").exists()


def test_heat_maps_are_written_by_place(model: Path, plates: Path, tmp_path: Path) -> None:
    run("inspect", model, plates / "test", "--maps", tmp_path / "maps")
    maps = sorted(file.relative_to(tmp_path / "maps") for file in (tmp_path / "maps").rglob("*.png"))
    assert maps == sorted(file.relative_to(plates / "test") for file in (plates / "test").rglob("*.png"))


def test_a_batch_that_has_drifted_is_warned_of(model: Path, plates: Path, tmp_path: Path) -> None:
    good = plates / "test" / "good"
    assert "drift" not in run("inspect", model, good)[2]
    assert json.loads(run("inspect", model, good, "--json")[1])["light"]["direction"] == ""
    (tmp_path / "dim").mkdir()
    (tmp_path / "other").mkdir()
    rng = np.random.default_rng(0)
    for file in good.iterdir():
        pixels = np.asarray(Image.open(file).convert("RGB")).astype(float)
        Image.fromarray((0.7 * pixels).astype(np.uint8)).save(tmp_path / "dim" / file.name)
        other = rng.integers(0, 256, (6, 6, 3)).astype(np.uint8)
        Image.fromarray(other).resize((SIDE, SIDE)).save(tmp_path / "other" / file.name)
    code, _, err = run("inspect", model, tmp_path / "dim", "--report", tmp_path / "out")
    assert "score higher than" in err
    assert re.search(r"[23]\d % darker than", err)
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count('class="note"') == 2
    assert " % darker than" in page
    code, out, err = run("inspect", model, tmp_path / "other", "--json")
    assert code == 4
    assert "drift" not in err  # of something else nothing more is reported
    assert "12 of 12" in err
    assert json.loads(out)["drift"]["foreign"]


def test_several_photographs_of_a_part_are_no_crowd(model: Path, plates: Path, tmp_path: Path) -> None:
    (tmp_path / "shots").mkdir()
    rng = np.random.default_rng(1)
    for file in sorted((plates / "test" / "good").iterdir())[:3]:
        pixels = np.asarray(Image.open(file).convert("RGB")).astype(float)
        for shot in range(10):
            again = np.clip(pixels + rng.normal(0, 1, pixels.shape), 0, 255).astype(np.uint8)
            Image.fromarray(again).save(tmp_path / "shots" / f"{shot}-{file.name}")
    told = json.loads(run("inspect", model, tmp_path / "shots", "--json")[1])
    assert len(told["images"]) == 30
    assert told["drift"]["images"] == 3


def test_whole_images_are_judged_without_maps(plates: Path, tmp_path: Path) -> None:
    images, _, _ = read_files([plates / "train" / "good"], SIDE)
    whole = change(PARTS, {"training.epochs": 0, "training.batch": 8, "encoder.width": 8, "size": 32})
    Detector.fit(images, recipe=whole, holdout=0.4).save(tmp_path / "whole.firm")
    code, out, _ = run("inspect", tmp_path / "whole.firm", plates / "test", "--report", tmp_path / "out", "--json")
    assert code in (0, 3, 4)
    assert all(not one["regions"] for one in json.loads(out)["images"])
    assert (tmp_path / "out" / "report.html").read_text().count('<li class="entry') == 20
    code, _, err = run("inspect", tmp_path / "whole.firm", plates / "test", "--maps", tmp_path / "maps")
    assert (code, "--maps" in err) == (2, True)
    assert not (tmp_path / "maps").exists()


def test_mistakes_are_one_sentence(model: Path, plates: Path, tmp_path: Path) -> None:
    good = plates / "test" / "good"
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.png").write_text("no image")
    (tmp_path / "none.png").write_bytes(b"")
    for arguments, why in [
        ((model, tmp_path / "empty"), "empty"),
        ((model, tmp_path / "text"), "none of the images could be read"),
        ((model, tmp_path / "none.png"), "none of the images could be read"),
        ((model, good, "--report", good / "out"), "lies among the images of"),
        ((model, good, "--watch"), "--watch keeps its decisions"),
        ((tmp_path / "nowhere.firm", good), "there is no detector"),
    ]:
        code, _, err = run("inspect", *arguments)
        assert code == 2, arguments
        assert why in err
        assert "Traceback" not in err
        assert err.strip().splitlines()[-1].startswith("firm: ")
    assert not (good / "out").exists()


# watched folders


def lines_of(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240  # of a loaded machine
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_watched_folder_is_decided_once_and_after_a_restart_not_again(
    model: Path, plates: Path, tmp_path: Path
) -> None:
    line, out = tmp_path / "line", tmp_path / "out"
    line.mkdir()
    files = sorted((plates / "test").rglob("*.png"))
    command = [sys.executable, "-m", "firm", "inspect", str(model), str(line), "--watch", "--report", str(out)]

    def started() -> subprocess.Popen[str]:
        return subprocess.Popen([*command, "--threads=1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def deliver(file: Path) -> None:
        shutil.copy(file, tmp_path / "arriving")
        os.replace(tmp_path / "arriving", line / f"{file.parent.name}-{file.name}")

    first = started()
    for file in files[:4]:
        deliver(file)
    wait_for(lambda: len(lines_of(out / "watched.jsonl")) == 4, first)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    for file in files[4:7]:
        deliver(file)
    second = started()
    wait_for(lambda: len(lines_of(out / "watched.jsonl")) == 7, second)
    second.send_signal(signal.SIGTERM)
    printed, said = second.communicate(timeout=240)
    assert second.returncode == 0
    assert "4 so far" in said
    assert "stopped; 7 " in said
    assert len(printed.splitlines()) == 3
    journal, detector = lines_of(out / "watched.jsonl"), Detector.load(model)
    assert len({one["file"] for one in journal}) == 7
    for one in journal:
        found = detector.inspect(line / str(one["file"]))
        assert (one["score"], one["verdict"], one["calibration"]) == (found.score, found.verdict, detector.decides.id)
        assert ("map" in one) == (found.verdict != "PASS")
        assert "map" not in one or Path(str(one["map"])).is_file()
