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
from firm.data.drawn import write_folder
from image_files import png

CHEAP = (
    "--preset=inspect", "--set=features=pixels", "--set=training.epochs=0", "--set=training.batch=8",
    "--set=encoder.width=8", "--set=size=48", "--set=encoder.head.hidden=[8]", "--set=automatic=[]",
    "--set=memory.reach=1", "--set=tiling.size=16", "--set=tiling.stride=8",
)  # fmt: skip
UNREADABLE = {  # a file that is no image: its content, and what is said of it after its name
    "text": (b"a text that was given another name\n", "it is no PNG, JPEG, TIFF, BMP or WebP file", "save it as one"),
    "nothing": (b"", "it is empty", "replace or remove it"),
    "huge": (png(np.zeros((2, 2, 3), np.uint8), size=(60_000, 60_000)), "has more than 80,000,000 pixels", "scale it"),
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


@pytest.mark.parametrize(
    ("command", "fix"), [(fit, "put the images directly into it"), (inspect, "give images or a folder of them")]
)
def test_an_empty_folder(mine: Path, command: Callable[[Path], Command], fix: str) -> None:
    refused(command(emptied(mine / "parts")), mine / "parts", ".png", fix)
    assert not (mine / "new.firm").exists()


def test_one_image_is_too_few_to_learn_from_and_enough_to_inspect(mine: Path) -> None:
    for file in sorted((mine / "parts").iterdir())[1:]:
        file.unlink()
    refused(fit(mine / "parts"), mine / "parts", "1 good image, which is too few; give at least 2")
    assert run(*inspect(mine / "parts"))[0] in (0, 3, 4)


def test_identical_images_tell_nothing_and_can_be_inspected(mine: Path) -> None:
    content = next((mine / "parts").iterdir()).read_bytes()
    for file in (mine / "parts").iterdir():
        file.write_bytes(content)
    refused(fit(mine / "parts"), "all 12 good images of", mine / "parts", "give photographs of different parts")
    assert run(*inspect(mine / "parts"))[0] in (0, 3, 4)


@pytest.mark.parametrize("command", [fit, inspect])
@pytest.mark.parametrize("what", UNREADABLE)
def test_a_file_that_is_no_image(mine: Path, command: Callable[[Path], Command], what: str) -> None:
    content, reason, fix = UNREADABLE[what]
    file = emptied(mine / "parts") / "odd.png"
    file.write_bytes(content)
    refused(command(mine / "parts"), file, reason, fix)


@pytest.mark.parametrize("command", [fit, inspect])
@pytest.mark.parametrize("what", UNREADABLE)
def test_beside_good_ones_it_is_left_out_by_name(mine: Path, command: Callable[[Path], Command], what: str) -> None:
    content, reason, fix = UNREADABLE[what]
    file = mine / "parts" / "odd.png"
    file.write_bytes(content)
    code, out, err = run(*command(mine / "parts"))
    (told,) = [said for said in err.splitlines() if "left out: " in said]
    assert all(word in told for word in (str(file), reason, fix))
    assert "firm: " not in err
    assert "Traceback" not in err
    assert code == (4 if "\nFAIL " in f"\n{out}" else 1)
    assert (mine / "new.firm").is_dir() == (command is fit)
    refused((*command(mine / "parts"), "--strict"), file, reason, fix)


def denied(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """No permission to list this folder, which a superuser could not be kept from."""
    scan = os.scandir

    def scandir(path: Path | str = ".") -> Iterator[os.DirEntry[str]]:
        if Path(path) == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)


@pytest.mark.parametrize("command", [fit, inspect])
def test_a_folder_that_may_not_be_listed(
    mine: Path, command: Callable[[Path], Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    denied(monkeypatch, mine / "parts")
    refused(command(mine / "parts"), mine / "parts", "cannot be listed (Permission denied); check its permissions")


@pytest.mark.skipif(os.geteuid() == 0, reason="a superuser may list anything")
@pytest.mark.parametrize("command", [fit, inspect])
def test_a_folder_that_really_may_not_be_listed(mine: Path, command: Callable[[Path], Command]) -> None:
    (mine / "parts").chmod(0)
    try:
        refused(command(mine / "parts"), mine / "parts", "cannot be listed (Permission denied); check its permissions")
    finally:
        (mine / "parts").chmod(0o755)


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
    assert (code, told) == (1, f"firm: fresh: {closed} cannot be listed (Permission denied); check its permissions")
    assert out.splitlines()[-1] == "2 products: 1 learnt, 0 kept, 1 failed"


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
        "detector": (20_000, model / "weights-", ("fit", mine / "parts", "-o", model, *CHEAP, "--seed=1")),
        "report": (1_000, out, (*inspect(mine / "parts"), "--report", out)),
        "heat maps": (1_000, out, (*inspect(mine / "parts"), "--maps", out)),
        "calibration": (100, model / "calibration.json", ("calibrate", model, mine / "fresh")),
    }[what]
    before = contents(model) | contents(out)
    with room_for(size):
        refused(command, f"cannot write {file}", "File too large; free some space", "unchanged")
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
        refused(command, mine / "new.firm" / file, "No space left on device; free some space")
    (mine / "new.firm" / ".card.json.x1y2").write_text("what a killed process left")
    assert run(*command)[0] == 0  # it is no folder of other things, and nothing is left of them
    assert contents(mine / "new.firm").keys() == {
        mine / "new.firm" / one.name for one in (mine / "part.firm").iterdir()
    }


# the detector


@pytest.mark.parametrize(
    ("missing", "fix"),
    [
        ("card.json", "give the folder that firm fit has written"),
        ("weights-*", "cannot be read (No such file or directory); copy it again from its source"),
        ("calibration.json", "is missing; copy it again, or run firm calibrate with good images"),
    ],
)
def test_a_detector_with_a_missing_file(mine: Path, missing: str, fix: str) -> None:
    (file,) = (mine / "part.firm").glob(missing)
    file.unlink()
    refused(inspect(mine / "parts"), mine / "part.firm" if missing == "card.json" else file, fix)
