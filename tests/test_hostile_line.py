"""What a line may bring: whatever its names and files, a batch and a watch go on, and an exit code means one thing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from commands import run
from firm.deploy.journal import Journal
from firm.deploy.watch import decide_by, watch
from firm.detector.detector import Detector
from firm.drawn.render import write_folder
from firm.report.live_page import LivePage
from image_files import encoded, png

FIT = (
    "--preset=inspect", "--set=features=pixels", "--set=training.epochs=0", "--set=training.batch=8",
    "--set=encoder.width=8", "--set=size=48", "--set=encoder.head.hidden=[8]", "--set=automatic=[]",
    "--set=memory.neighbourhood=1", "--set=tiling.size=16", "--set=tiling.stride=8",
)  # fmt: skip
THIN = png(np.zeros((1, 1, 1), np.uint8), 1, size=(1, 20_000_000))
NOISE = encoded(np.random.default_rng(0).integers(0, 256, (48, 48, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a detector, part.firm/, and good images, fresh/."""
    home = tmp_path_factory.mktemp("line")
    write_folder(home / "drawn", "plate", size=48, train=12, good=4, bad=1)
    (home / "drawn" / "test" / "good").rename(home / "fresh")
    assert run("fit", home / "drawn" / "train" / "good", "-o", home / "part.firm", *FIT).code == 0
    return home


@pytest.fixture
def arrived(line: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(line / "fresh", tmp_path / "arrived"))


def watched(line: Path, folder: Path, out: Path) -> list[dict[str, object]]:
    """The lines of a watch over all files that are there, and its page, as `firm inspect --watch` makes them."""
    detector, left = Detector.load(line / "part.firm"), len(list(folder.iterdir()))
    page = LivePage(out / "watched.html", "", detector.decides.scores, (detector.decides.review, detector.decides.fail))
    with Journal(out / "watched.jsonl") as journal:
        decide = decide_by(detector, [folder], out / "heat")
        for found in watch(
            [folder],
            decide,
            journal,
            stop=lambda: len(journal.lines) == left,
            settle=0,
            patience=0,
            sleep=lambda _: None,
        ):
            page.add([found])
            page.write()
        return journal.lines


# --- files ---


def test_a_thin_image_is_left_out_of_a_batch_and_of_a_watch(line: Path, arrived: Path, tmp_path: Path) -> None:
    (arrived / "thin.png").write_bytes(THIN)
    done = run("inspect", line / "part.firm", arrived, "--json")
    assert done.code in (1, 4), done.err
    assert [Path(one["file"]).name for one in json.loads(done.out)["left_out"]] == ["thin.png"]
    found = {one["file"]: "unreadable" in one for one in watched(line, arrived, tmp_path / "out")}
    assert found == {file.name: file.name == "thin.png" for file in arrived.iterdir()}


@pytest.mark.parametrize("shape", [(65_535, 1), (1, 65_535), (1, 1)])
def test_extreme_shapes_are_decided_and_shown(line: Path, tmp_path: Path, shape: tuple[int, int]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(encoded(np.zeros(shape, np.uint8)))
    outputs = ("--report", tmp_path / "out", "--maps", tmp_path / "maps")
    done = run("inspect", line / "part.firm", tmp_path / "in", *outputs)
    assert done.code in (0, 3, 4), done.err
    assert (tmp_path / "maps" / "a.png").is_file()


@pytest.mark.skipif(sys.platform != "linux", reason="names of any bytes are Linux's")
@pytest.mark.parametrize(
    "name", [b"\xff\xfe.png", b"n" * 238 + b".png", b"n" * 251 + b".png", "ö".encode() * 125 + b".png"]
)
def test_a_name_of_any_bytes_and_length_does_not_end_a_watch(line: Path, tmp_path: Path, name: bytes) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for each in (name, b"plain.png"):
        Path(folder, os.fsdecode(each)).write_bytes(NOISE)
    found = watched(line, folder, tmp_path / "out")
    assert sorted(os.fsencode(str(one["file"])) for one in found) == sorted([name, b"plain.png"])
    assert all(one["verdict"] != "PASS" and Path(str(one["map"])).is_file() for one in found)
    assert len({one["map"] for one in found}) == 2
    for outputs in (("--maps", tmp_path / "maps"), ("--report", tmp_path / "report")):
        assert run("inspect", line / "part.firm", folder, *outputs).code in (3, 4)


# --- exit codes ---


def broken(_: object, **__: object) -> None:
    raise ZeroDivisionError("by\nzero")


def test_a_bug_has_an_exit_code_and_a_sentence_of_its_own(line: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("inspect", line / "part.firm", line / "fresh")
    monkeypatch.setattr(Detector, "load", broken)
    code, out, err = run(*command)
    assert (code, out, len(err.splitlines())) == (70, "", 1)
    assert err.startswith("firm: ")
    assert "ZeroDivisionError" in err
    code, _, err = run("--debug", *command)
    assert code == 70
    assert "Traceback" in err
    assert "in broken" in err
    assert "Traceback" not in run(*command).err  # it is not remembered


def test_debug_shows_where_a_mistake_was_noticed(tmp_path: Path) -> None:
    assert "Traceback" not in run("inspect", tmp_path / "none.firm", tmp_path).err
    done = run("--debug", "inspect", tmp_path / "none.firm", tmp_path)
    assert (done.code, "Traceback" in done.err, done.err.splitlines()[-1][:6]) == (2, True, "firm: ")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")])
def test_a_lack_of_memory_is_no_bug(line: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def short(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Detector, "examine", short)
    code, _, err = run("inspect", line / "part.firm", line / "fresh")
    assert (code, len(err.splitlines()), "memory" in err) == (2, 1, True)


# --- signals ---


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
def test_a_stopped_inspection_leaves_no_scratch_folder(line: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3_000):
        os.link(next((line / "fresh").iterdir()), tmp_path / "in" / f"{number}.png")
    out = tmp_path / "out"
    command = ["inspect", str(line / "part.firm"), str(tmp_path / "in"), "--report", str(out), "--threads=1"]
    with subprocess.Popen([sys.executable, "-m", "firm", *command], stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 240
        while not list(out.glob(".report.*/*.html")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in err
    assert list(out.iterdir()) == []


def test_a_command_gives_the_signal_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    run("--version")
    assert signal.getsignal(signal.SIGTERM) is before
