"""A folder of one's own images as a task.

Three layouts: good images directly in the folder; good/ with an optional bad/; MVTec's train/good and test/<kind>.
In the last two, masks of the defects may lie in ground_truth/<kind>/, called <image>_mask.png or as the image.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from firm.images import SUFFIXES, decode, decode_mask, resize, resize_mask, to_tensor, turn_like
from firm.types import FirmError, OneClass, Truth

SIDE = 128  # at which images are kept
SIZE = 64  # at which they are learnt from unless the recipe says otherwise
GOOD = "good"  # the kind of a normal image
NORMAL = (GOOD, "ok")  # what the layouts call the folder of normal images
Skipped = list[tuple[Path, str]]  # the file and why it could not be used


@dataclass(frozen=True)
class Specimen:
    """A test image on disk: its kind, and where its mask is, if it has one."""

    image: Path
    kind: str
    mask: Path | None = None


@dataclass(frozen=True)
class Listing:
    """The files of a task, before any of them is opened."""

    home: Path  # of the images to learn from
    train: list[Path]
    test: list[Specimen]
    marked: bool = False  # defects are marked at all: only then is a missing mask worth a word
    strays: list[Path] = field(default_factory=list)  # masks without an image


@dataclass(frozen=True)
class Tested:
    """Labelled images to test on, the file of each, and the files that could not be used."""

    images: UInt8[Tensor, "m 3 side side"]
    anomalous: Bool[Tensor, " m"]
    truth: Truth
    files: list[Path]
    skipped: Skipped


def load_folder(folder: Path, side: int = SIDE) -> OneClass:
    """The folder's good images to learn from, and the labelled ones to test on, none if it has none.

    A damaged file is warned about by name and left out: it never costs the good ones.
    """
    train, test = read_listing(list_folder(folder), side)
    truth = test.truth if test.files else None
    return OneClass(str(folder), train, test.images, test.anomalous, min(SIZE, side), truth=truth)


def read_listing(listing: Listing, side: int) -> tuple[UInt8[Tensor, "n 3 side side"], Tested]:
    """The images to learn from, of which there must be one, and those to test on."""
    good = _usable(_decoded(listing.train, side), listing.home)
    test = _read_specimens(listing, side)
    for _, reason in good.skipped + test.skipped:
        warnings.warn(f"left out: {reason}", stacklevel=2)
    return good.images, test


def read_folder(folder: Path, side: int = SIDE) -> tuple[UInt8[Tensor, "n 3 side side"], list[Path], Skipped]:
    """The images lying directly in a folder, sorted by name, with their files and those skipped."""
    found = _usable(_decoded(image_files(folder), side), folder)
    return found.images, found.files, found.skipped


def read_test(folder: Path, side: int = SIDE) -> Tested:
    """The images to test on: test/<kind> where there is a test/, else good/ and bad/."""
    kinds = _test_folders(folder) or {name: folder / name for name in (GOOD, "bad") if (folder / name).is_dir()}
    test = _read_specimens(_list_kinds(folder, kinds), side)
    if not test.anomalous.any() or test.anomalous.all():
        raise FirmError(f"{folder} has no test images of both kinds; lay them out as test/good and test/<defect>")
    return test


def read_labelled(folder: Path, side: int = SIDE) -> tuple[UInt8[Tensor, "n 3 side side"], Bool[Tensor, " n"], Skipped]:
    """The images to test on, which are anomalous, and the files skipped: `read_test` without the truth."""
    test = read_test(folder, side)
    return test.images, test.anomalous, test.skipped


def find_files(paths: list[Path]) -> list[Path]:
    """Image files named one by one or by their folder, in the order given; sub-folders are looked into."""
    files = [file for path in paths for file in (_all_files(path) if path.is_dir() else [path])]
    if not files:
        raise FirmError(f"there is no {', '.join(sorted(SUFFIXES))} file in {', '.join(map(str, paths))}")
    return files


def read_files(paths: list[Path], side: int = SIDE) -> tuple[UInt8[Tensor, "n 3 side side"], list[Path], Skipped]:
    """The pixels of files and of all files in folders, those that could be read, and those that could not."""
    found = _decoded(find_files(paths), side)
    return found.images, found.files, found.skipped


# what is where


def list_folder(folder: Path) -> Listing:
    """The files of whichever layout the folder has."""
    if not folder.is_dir():
        raise FirmError(f"{folder} is not a folder; give the folder that holds the good images")
    mvtec = list_mvtec(folder)
    if mvtec is not None:
        return mvtec
    if (folder / GOOD).is_dir():
        bad = {"bad": folder / "bad"} if (folder / "bad").is_dir() else {}
        return _list_kinds(folder, bad, folder / GOOD)
    return Listing(folder, image_files(folder), [])


def list_mvtec(folder: Path) -> Listing | None:
    """The files of MVTec's layout, or of BTAD's, which says ok for good; None if the folder has neither."""
    for normal in NORMAL:
        good = folder / "train" / normal
        if good.is_dir():
            return _list_kinds(folder, _test_folders(folder), good)
    return None


def image_files(folder: Path) -> list[Path]:
    """By suffix, in order of name; hidden files are no images even when they are called so."""
    if not folder.is_dir():
        raise FirmError(f"{folder} is not a folder; give the folder that holds the images")
    return sorted(f for f in folder.iterdir() if f.suffix.lower() in SUFFIXES and f.name[0] != "." and f.is_file())


def _all_files(folder: Path) -> list[Path]:
    folders = [folder, *sorted(inner for inner in folder.rglob("*") if inner.is_dir())]
    return [file for one in folders for file in image_files(one)]


def _test_folders(folder: Path) -> dict[str, Path]:
    """The folders of test/ by kind, in order of name; hidden ones (.ipynb_checkpoints) are no kind of defect."""
    return {kind.name: kind for kind in sorted((folder / "test").glob("[!.]*")) if kind.is_dir()}


def _list_kinds(folder: Path, kinds: dict[str, Path], good: Path | None = None) -> Listing:
    """The images to learn from, every image of every kind with its mask, and the masks that belong to none."""
    truth = folder / "ground_truth"
    masks = {kind.name: _masks(kind) for kind in sorted(truth.glob("[!.]*")) if kind.is_dir()}
    test, claimed = list[Specimen](), set[Path]()
    for name, place in kinds.items():
        for image in image_files(place):
            named = [masks.get(name, {}).get(stem) for stem in (f"{image.stem}_mask", image.stem)]
            found = [mask for mask in named if mask is not None]
            claimed.update(found)
            kind = GOOD if name in NORMAL else name
            test.append(Specimen(image, kind, found[0] if found and kind != GOOD else None))
    strays = [mask for some in masks.values() for mask in some.values() if mask not in claimed]
    return Listing(good or folder, image_files(good) if good else [], test, truth.is_dir(), strays)


def _masks(folder: Path) -> dict[str, Path]:
    return {mask.stem: mask for mask in reversed(image_files(folder))}  # of two files with one stem, the first


# what is in it


@dataclass(frozen=True)
class _Decoded:
    images: UInt8[Tensor, "n 3 side side"]
    files: list[Path]
    shapes: list[tuple[int, int]]  # height and width of each before it was resized
    skipped: Skipped


def _decoded(paths: Sequence[Path], side: int) -> _Decoded:
    """File by file, each brought to `side` at once: the full-size pixels of two are never in memory together."""
    images = torch.empty(len(paths), 3, side, side, dtype=torch.uint8)
    files, shapes, skipped = list[Path](), list[tuple[int, int]](), Skipped()
    for file in paths:
        try:
            pixels = decode(file)
        except FirmError as error:
            skipped.append((file, str(error)))
            continue
        images[len(files)] = resize(to_tensor(pixels), side)[0]
        files.append(file)
        shapes.append((pixels.shape[0], pixels.shape[1]))
    return _Decoded(images[: len(files)], files, shapes, skipped)


def _usable(found: _Decoded, folder: Path) -> _Decoded:
    if not found.files:
        why = found.skipped[0][1] if found.skipped else f"it holds no {', '.join(sorted(SUFFIXES))} file"
        raise FirmError(f"{folder} has no usable image ({why}); put the images directly into it")
    return found


def _read_specimens(listing: Listing, side: int) -> Tested:
    found = _decoded([specimen.image for specimen in listing.test], side)
    read = {specimen.image: specimen for specimen in listing.test}
    specimens = [read[file] for file in found.files]
    anomalous = torch.tensor([specimen.kind != GOOD for specimen in specimens], dtype=torch.bool)
    truth = _truth(listing, specimens, found.shapes, side)
    return Tested(found.images, anomalous, truth, found.files, found.skipped)


DOUBTS = {  # what may be wrong with masks, and what comes of it
    "defective images without a mask": "their pixels count as unknown",
    "masks of defective images that mark no pixel": "the pixels of these images count as unknown",
    "masks that cannot be read": "the pixels of their images count as unknown",
    "masks of another size than their image": "they were scaled to it",
    "masks without an image": "they are ignored",
}
MISSING, EMPTY, UNREADABLE, SCALED, STRAY = DOUBTS


def _truth(listing: Listing, specimens: list[Specimen], shapes: list[tuple[int, int]], side: int) -> Truth:
    """Kind and mask of every image that could be read; each sort of doubt is said once, however many it concerns."""
    masks = torch.zeros(len(specimens), side, side, dtype=torch.bool)
    known = torch.tensor([specimen.kind == GOOD for specimen in specimens], dtype=torch.bool)
    doubts: defaultdict[str, list[str]] = defaultdict(list)
    doubts[STRAY] += [str(mask) for mask in listing.strays]
    for number, (specimen, shape) in enumerate(zip(specimens, shapes, strict=True)):
        if known[number] or not listing.marked:
            continue
        mask = _mask(specimen, shape, doubts)
        if mask is not None:
            masks[number], known[number] = resize_mask(mask, side), True
    for what, examples in doubts.items():
        if examples:
            warnings.warn(f"{what}: {len(examples)}, for example {examples[0]}; {DOUBTS[what]}", stacklevel=2)
    return Truth(tuple(specimen.kind for specimen in specimens), masks, known)


def _mask(
    specimen: Specimen, shape: tuple[int, int], doubts: defaultdict[str, list[str]]
) -> npt.NDArray[np.bool_] | None:
    """The marked pixels of a defective image at the mask's own size, or None with the reason among the doubts."""
    if specimen.mask is None:
        doubts[MISSING].append(str(specimen.image))
        return None
    try:
        mask = decode_mask(specimen.mask)
    except FirmError as error:
        doubts[UNREADABLE].append(str(error))
        return None
    if not mask.any():
        doubts[EMPTY].append(str(specimen.mask))
        return None
    if mask.shape == shape[::-1] != shape:  # drawn on the pixels as stored, before EXIF turned them
        mask = turn_like(mask, specimen.image)
    if mask.shape != shape:
        sizes = f"{mask.shape[1]} x {mask.shape[0]}, the image {shape[1]} x {shape[0]}"
        doubts[SCALED].append(f"{specimen.mask} ({sizes})")
    return mask
