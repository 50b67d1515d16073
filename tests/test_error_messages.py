"""What goes wrong is one sentence that names the culprit and the fix, and an exit code; never a traceback."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from commands import run
from firm.drawn.render import write_folder
from image_files import png

CHEAP = (
    "--preset=inspect", "--set=features=pixels", "--set=training.epochs=0", "--set=training.batch=8",
    "--set=encoder.width=8", "--set=size=48", "--set=encoder.head.hidden=[8]", "--set=automatic=[]",
    "--set=memory.neighbourhood=1", "--set=tiling.size=16", "--set=tiling.stride=8",
)  # fmt: skip
UNREADABLE = {  # contents of a file that is no image, and the word for what is wrong
    "PNG": b"a text that was given another name\n",
    "empty": b"",
    "80,000,000": png(np.zeros((2, 2, 3), np.uint8), size=(60_000, 60_000)),
}
Command = tuple[str | Path, ...]


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with good images in parts/ and a detector of them in part.firm/."""
    home = tmp_path_factory.mktemp("line")
    write_folder(home / "drawn", "plate", size=48, train=12, good=4, bad=1)
    (home / "drawn" / "train" / "good").rename(home / "parts")
    (home / "drawn" / "test" / "good").rename(home / "fresh")
    assert run("fit", home / "parts", "-o", home / "part.firm", *CHEAP)[0] == 0
    return home


@pytest.fixture
def mine(line: Path, tmp_path: Path) -> Path:
    """The same to be spoilt."""
    return Path(shutil.copytree(line, tmp_path / "line"))


def fit(folder: Path) -> Command:
    return ("fit", folder, "-o", folder.parent / "new.firm", *CHEAP)


def inspect(folder: Path) -> Command:
    return ("inspect", folder.parent / "part.firm", folder)


def refused(command: Command, *words: str | Path, code: int = 2) -> None:
    """The command ends with the code and one sentence that holds all the words."""
    found, out, err = run(*command)
    told = [said for said in err.splitlines() if said.startswith("firm: ")]
    assert (found, len(told), out) == (code, 1, ""), err
    assert told[0] == err.splitlines()[-1]
    assert "Traceback" not in err
    for word in words:
        assert str(word) in told[0], told[0]
    assert not told[0].endswith((" ", ":", "None"))


# images


def emptied(folder: Path) -> Path:
    for file in folder.iterdir():
        file.unlink()
    return folder


def test_an_empty_folder(mine: Path) -> None:
    emptied(mine / "parts")
    for command in (fit, inspect):
        refused(command(mine / "parts"), mine / "parts", ".png")
    assert not (mine / "new.firm").exists()


def test_one_image_is_too_few_to_learn_from_and_enough_to_inspect(mine: Path) -> None:
    for file in sorted((mine / "parts").iterdir())[1:]:
        file.unlink()
    refused(fit(mine / "parts"), mine / "parts", "1 good image")
    assert run(*inspect(mine / "parts"))[0] in (0, 3, 4)


def test_identical_images_tell_nothing_and_can_be_inspected(mine: Path) -> None:
    content = next((mine / "parts").iterdir()).read_bytes()
    for file in (mine / "parts").iterdir():
        file.write_bytes(content)
    refused(fit(mine / "parts"), "12 good images", mine / "parts")
    assert run(*inspect(mine / "parts"))[0] in (0, 3, 4)


@pytest.mark.parametrize("reason", UNREADABLE)
def test_a_file_that_is_no_image(mine: Path, reason: str) -> None:
    file = emptied(mine / "parts") / "odd.png"
    file.write_bytes(UNREADABLE[reason])
    for command in (fit, inspect):
        refused(command(mine / "parts"), file, reason)


@pytest.mark.parametrize("command", [fit, inspect])
def test_beside_good_ones_it_is_left_out_by_name(mine: Path, command: Callable[[Path], Command]) -> None:
    file = mine / "parts" / "odd.png"
    file.write_bytes(b"")
    code, out, err = run(*command(mine / "parts"))
    (line,) = [line for line in err.splitlines() if "left out: " in line]
    assert str(file) in line
    assert "firm: " not in err
    assert "Traceback" not in err
    assert code == (4 if "\nFAIL " in f"\n{out}" else 1)
    assert (mine / "new.firm").is_dir() == (command is fit)
    refused((*command(mine / "parts"), "--strict"), file, "empty")


def denied(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """No permission to list this folder, which a superuser could not be kept from."""
    scan = os.scandir

    def scandir(path: Path | str = ".") -> Iterator[os.DirEntry[str]]:
        if Path(path) == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)


def test_a_folder_that_may_not_be_listed(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    denied(monkeypatch, mine / "parts")
    for command in (fit, inspect):
        refused(command(mine / "parts"), mine / "parts", "Permission denied")


def test_a_folder_that_may_not_be_listed_beside_others(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (mine / "tree").mkdir()
    for name in ("fresh", "parts"):
        (mine / name).rename(mine / "tree" / name)
    closed = mine / "tree" / "fresh"
    denied(monkeypatch, closed)
    code, out, err = run("inspect", mine / "part.firm", mine / "tree")
    assert (code in (1, 4), out.count(".png")) == (True, 12)
    assert f"left out: {closed} is a folder" in err
    code, out, err = run("fit", mine / "tree", "--per-folder", "-o", mine / "models", *CHEAP)
    (told,) = [said for said in err.splitlines() if said.startswith("firm: ")]
    assert (code, str(closed) in told, "Permission denied" in told) == (1, True, True)


# something else than images, than a detector, than a place to write


def test_what_is_no_folder_of_images_gets_a_sentence_of_its_own(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mine)
    (mine / "clip.mp4").write_bytes(b"\0\0\0\x20ftypisom")
    (mine / "parts").rename(mine / "ground_truth")
    shutil.copytree(mine / "ground_truth", mine / "part" / "ground_truth" / "scratch")
    for given, word in (
        ("http://example.com/parts", "address"),
        ("s3://bucket/parts", "address"),
        ("clip.mp4", "video"),
        ("./clip.MOV", "video"),
        ("ground_truth", "masks"),
        ("part/ground_truth/scratch", "masks"),
    ):
        name = given if "://" in given else str(Path(given))
        refused(("fit", given, "-o", "new.firm", *CHEAP), given, word)
        refused(("fit", given, "-o", "new.firm"), given, word)  # with the default recipe
        refused(("inspect", "part.firm", given), name, word)
        refused(("calibrate", "part.firm", given), given, word)
        refused(("evaluate", "part.firm", given), given, word)
        assert run("inspect", "part.firm", given)[2].count("\n") == 1
    assert not (mine / "new.firm").exists()


def test_an_image_that_cannot_be_read_is_reported_once(mine: Path) -> None:
    file = emptied(mine / "parts") / "odd.png"
    file.write_bytes(b"")
    assert run(*inspect(mine / "parts"))[2].count(str(file)) == 1


def test_an_image_is_no_detector(mine: Path) -> None:
    photo = mine / "photo.jpg"
    (next((mine / "parts").iterdir())).rename(photo)
    for command in (("inspect", photo, mine / "parts"), ("calibrate", photo, mine / "fresh"), ("card", photo)):
        refused(command, photo, "image", "firm fit")


def test_addresses_videos_and_masks_are_no_detectors_either(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mine)
    (mine / "ground_truth").mkdir()
    for given, word in (("rtsp://cam/1", "address"), ("line.mp4", "video"), ("ground_truth", "masks")):
        refused(("inspect", given, mine / "parts"), given, word)


def test_a_folder_of_videos_and_a_single_file_are_named_as_such(mine: Path) -> None:
    (mine / "films").mkdir()
    (mine / "films" / "line.mp4").touch()
    refused(("fit", mine / "films", "-o", mine / "x.firm", *CHEAP), "films", "videos")
    photo = next((mine / "parts").iterdir())
    refused(("fit", photo, "-o", mine / "x.firm", *CHEAP), photo, "one file")


def test_outputs_rates_and_weights_are_checked_before_any_work(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before an image is decoded or a detector is loaded."""
    (mine / "file").touch()
    monkeypatch.setenv("FIRM_DATA", str(mine))  # no weights there
    below, model, fresh = mine / "file" / "below", mine / "part.firm", mine / "fresh"
    for home in ("firm.data.folder.decode", "firm.detector.detector.read_fitted", "firm.data.folder.depth_of"):
        monkeypatch.setattr(home, lambda *_, **__: pytest.fail("work has begun"))
    refused(("demo", "--out", mine / "file"), "file")
    for command in (("calibrate", model, fresh), ("audit", fresh), ("fit", fresh, "-o", mine / "new.firm")):
        refused((*command, "--group-by=("), "--group-by")
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda place, mode: Path(place) != model or mode != os.W_OK)
        refused(("calibrate", model, fresh), model)
    for output in (below, mine / "file"):
        refused(("inspect", model, fresh, "--report", output), output)
        refused(("inspect", model, fresh, "--maps", output), output)
        refused(("evaluate", model, mine, "--report", output), output)
    refused(("calibrate", model, fresh, "--out", below / "c.json"), below)
    refused(("calibrate", model, fresh, "--false-calls=2"), "false_calls")
    refused(("calibrate", model, fresh, "--fail=0"), "fail")
    refused(("masks", mine / "parts", "--out", below / "masks.png"), below)
    refused(("audit", mine / "parts", "--out", below / "audit.png"), below)
    refused(("fit", mine / "parts", "-o", below / "x.firm", *CHEAP), below)
    for option, culprit in (
        ("--false-calls=0", "false_calls"),
        ("--fail=1", "fail"),
        ("--holdout=1.5", "holdout"),
        ("--encoder=efficientnet-lite9", "efficientnet-lite9"),
        ("--encoder=nowhere.pth", "nowhere.pth"),
        ("--encoder=dinov2-small", "--weights FILE"),
        ("--weights=nowhere.pth", "--encoder"),
    ):
        refused(("fit", mine / "parts", "-o", mine / "new.firm", option), culprit)
    assert not (mine / "new.firm").exists()


def test_a_detector_of_another_product_is_replaced_only_by_force(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mine)
    before = (mine / "part.firm" / "card.json").read_bytes()
    shutil.copytree("parts", "others")
    refused(("fit", "others", "-o", "part.firm", *CHEAP), "part.firm", "others", "--force")
    assert (mine / "part.firm" / "card.json").read_bytes() == before
    assert run("fit", "others", "-o", "part.firm", *CHEAP, "--force")[0] == 0
    for same in ("others", "./others", mine / "others"):  # the same data, however it is written
        assert run("fit", same, "-o", "part.firm", *CHEAP)[0] == 0
    for same in ("drawn:plate", "drawn: Plate", "drawn:0"):
        assert run("fit", same, "-o", "plate.firm", *CHEAP)[0] == 0


# the disk


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file may grow beyond this: the real write fails half-way."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("what", ["detector", "report", "heat maps", "calibration"])
def test_a_full_disk(mine: Path, what: str) -> None:
    model, out = mine / "part.firm", mine / "out"
    assert run("inspect", model, mine / "fresh", "--report", out, "--maps", out)[0] in (0, 3, 4)
    size, file, command = {
        "detector": (20_000, model / "weights-", ("fit", mine / "parts", "-o", model, *CHEAP, "--seed=1", "--force")),
        "report": (1_000, out, (*inspect(mine / "parts"), "--report", out)),
        "heat maps": (1_000, out, (*inspect(mine / "parts"), "--maps", out)),
        "calibration": (100, model / "calibration.json", ("calibrate", model, mine / "fresh")),
    }[what]
    before = contents(model) | contents(out)
    with room_for(size):
        refused(command, file, "File too large")
    assert contents(model) | contents(out) == before


@pytest.mark.parametrize("file", ["card.json", "calibration.json"])
def test_a_disk_that_is_full_at_the_last_file_costs_no_training(
    mine: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def full(source: str, target: Path) -> None:
        if Path(target).name == file:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    command = fit(mine / "parts")
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        refused(command, mine / "new.firm" / file, "No space left on device")
    (mine / "new.firm" / ".card.json.x1y2").write_text("what a killed process left")
    assert run(*command)[0] == 0  # it is no folder of other things, and nothing is left of them
    assert contents(mine / "new.firm").keys() == {
        mine / "new.firm" / one.name for one in (mine / "part.firm").iterdir()
    }


# the detector


@pytest.mark.parametrize("missing", ["card.json", "weights-*", "calibration.json"])
def test_a_detector_with_a_missing_file(mine: Path, missing: str) -> None:
    (file,) = (mine / "part.firm").glob(missing)
    file.unlink()
    refused(inspect(mine / "parts"), mine / "part.firm" if missing == "card.json" else file)
