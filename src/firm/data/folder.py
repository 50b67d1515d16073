"""A folder of one's own images as a task.

Three layouts: good images directly in the folder; good/ with an optional bad/; MVTec's train/good and test/<kind>.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from firm.images import SUFFIXES, decode, resize, to_tensor
from firm.types import FirmError, OneClass

SIDE = 128  # at which images are kept
SIZE = 64  # at which they are learnt from unless the recipe says otherwise
Skipped = list[tuple[Path, str]]  # the file and why it could not be used


def load_folder(folder: Path, side: int = SIDE) -> OneClass:
    """The folder's good images to learn from, and the labelled ones to test on, none if it has none.

    A damaged file is warned about by name and left out: it never costs the good ones.
    """
    good, tests = _layout(folder)
    train, _, skipped = read_folder(good, side)
    images, anomalous = [train[:0]], [torch.zeros(0, dtype=torch.bool)]
    for kind, bad in tests:
        some, _, more = _read(kind, side)
        images.append(some)
        anomalous.append(torch.full((len(some),), bad))
        skipped += more
    for _, reason in skipped:
        warnings.warn(f"left out: {reason}", stacklevel=2)
    return OneClass(str(folder), train, torch.cat(images), torch.cat(anomalous), min(SIZE, side))


def read_folder(folder: Path, side: int = SIDE) -> tuple[UInt8[Tensor, "n 3 side side"], list[Path], Skipped]:
    """The images lying directly in a folder, sorted by name, with their files and those skipped."""
    images, files, skipped = _read(folder, side)
    if not files:
        found = skipped[0][1] if skipped else f"it holds no {', '.join(sorted(SUFFIXES))} file"
        raise FirmError(f"{folder} has no usable image ({found}); put the images directly into it")
    return images, files, skipped


def read_labelled(folder: Path, side: int = SIDE) -> tuple[UInt8[Tensor, "n 3 side side"], Bool[Tensor, " n"], Skipped]:
    """The images to test on and which are anomalous: test/<kind> where there is a test/, else good/ and bad/."""
    tests = _test_folders(folder)
    if not tests:
        tests = [(folder / name, name == "bad") for name in ("good", "bad") if (folder / name).is_dir()]
    parts = [(_read(kind, side), bad) for kind, bad in tests]
    anomalous = [torch.full((len(images),), bad) for (images, _, _), bad in parts]
    if not any(bool(one.any()) for one in anomalous) or all(bool(one.all()) for one in anomalous):
        raise FirmError(f"{folder} has no test images of both kinds; lay them out as test/good and test/<defect>")
    return torch.cat([one[0] for one, _ in parts]), torch.cat(anomalous), [file for one, _ in parts for file in one[2]]


def find_files(paths: list[Path]) -> list[Path]:
    """Image files named one by one or by their folder, in the order given; sub-folders are looked into."""
    files = [file for path in paths for file in (_all_files(path) if path.is_dir() else [path])]
    if not files:
        raise FirmError(f"there is no {', '.join(sorted(SUFFIXES))} file in {', '.join(map(str, paths))}")
    return files


def read_files(paths: list[Path], side: int = SIDE) -> tuple[UInt8[Tensor, "n 3 side side"], list[Path], Skipped]:
    """The pixels of files and of all files in folders, those that could be read, and those that could not."""
    return _decoded(find_files(paths), side)


def _all_files(folder: Path) -> list[Path]:
    folders = [folder, *sorted(inner for inner in folder.rglob("*") if inner.is_dir())]
    return [file for one in folders for file in _image_files(one)]


def _layout(folder: Path) -> tuple[Path, list[tuple[Path, bool]]]:
    """Where the good images are, and each folder to test on with whether it is anomalous."""
    if not folder.is_dir():
        raise FirmError(f"{folder} is not a folder; give the folder that holds the good images")
    if (folder / "train" / "good").is_dir():
        return folder / "train" / "good", _test_folders(folder)
    if (folder / "good").is_dir():
        bad = folder / "bad"
        return folder / "good", [(bad, True)] if bad.is_dir() else []
    return folder, []


def _test_folders(folder: Path) -> list[tuple[Path, bool]]:
    kinds = sorted(kind for kind in (folder / "test").glob("*") if kind.is_dir())
    return [(kind, kind.name != "good") for kind in kinds]


def _read(folder: Path, side: int) -> tuple[UInt8[Tensor, "n 3 side side"], list[Path], Skipped]:
    return _decoded(_image_files(folder), side)


def _decoded(paths: list[Path], side: int) -> tuple[UInt8[Tensor, "n 3 side side"], list[Path], Skipped]:
    images, files, skipped = [torch.empty(0, 3, side, side, dtype=torch.uint8)], list[Path](), Skipped()
    for file in paths:
        try:
            images.append(resize(to_tensor(decode(file)), side))
            files.append(file)
        except FirmError as error:
            skipped.append((file, str(error)))
    return torch.cat(images), files, skipped


def _image_files(folder: Path) -> list[Path]:
    """By suffix, in order of name; hidden files are no images even when they are called so."""
    if not folder.is_dir():
        raise FirmError(f"{folder} is not a folder; give the folder that holds the images")
    return sorted(f for f in folder.iterdir() if f.suffix.lower() in SUFFIXES and f.name[0] != "." and f.is_file())
