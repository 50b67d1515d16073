"""A folder of one's own images as a task.

Three layouts: good images directly in the folder; good/ with an optional bad/; MVTec's train/good and test/<kind>.
In the last two, masks of the defects may lie in ground_truth/<kind>/, called <image>_mask.png or as the image.
"""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from firm.errors import named
from firm.images import SUFFIXES, decode, decode_mask, depth_of, resize, resize_mask, to_tensor, turn_like
from firm.streams import stream
from firm.types import FULL_DEPTH, Depth, FirmError, OneClass, Truth

SIDE = 128  # at which images are kept
SIZE = 64  # at which they are learnt from unless the recipe says otherwise
GOOD = "good"  # the kind of a normal image
NORMAL = (GOOD, "ok")  # what the layouts call the folder of normal images
FOREIGN = frozenset({".gif", ".ppm", ".pgm", ".pnm", ".jp2", ".avif", ".heic", ".eps", ".psd", ".tga"})  # never read
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
class Reading:
    """How files become images: the side they are brought to, what is white in deep ones, what a bad one costs."""

    side: int = SIDE
    depth: Depth | None = None  # None: found on the images to learn from
    strict: bool = False  # stop at the first file that cannot be used, instead of listing it and going on
    most: int = 0  # good files that are opened, drawn evenly from all; 0: all of them
    tested: bool = True  # images to test on are read, too


@dataclass(frozen=True)
class Tested:
    """Labelled images to test on, the file of each, and the files that could not be used."""

    images: UInt8[Tensor, "m 3 side side"]
    anomalous: Bool[Tensor, " m"]
    truth: Truth
    files: list[Path]
    skipped: Skipped


def load_folder(
    folder: Path,
    side: int = SIDE,
    *,
    depth: Depth | None = None,
    strict: bool = False,
    most: int = 0,
    tested: bool = True,
) -> OneClass:
    """The folder's good images to learn from, and the labelled ones to test on, none if it has none.

    A damaged file is warned about by name and left out: it never costs the good ones unless `strict` asks for it.
    """
    reading = Reading(side, depth, strict, most, tested)
    train, files, test, depth = read_listing(list_folder(folder), reading)
    truth = test.truth if test.files else None
    size = min(SIZE, side)
    return OneClass(str(folder), train, test.images, test.anomalous, size, truth=truth, depth=depth, files=tuple(files))


def read_listing(
    listing: Listing, reading: Reading
) -> tuple[UInt8[Tensor, "n 3 side side"], list[Path], Tested, Depth]:
    """The images to learn from, of which there must be one, and their files, those to test on, the depth of both."""
    wanted = drawn_evenly(listing.train, reading.most)
    depth = reading.depth or depth_of(wanted)
    reading = replace(reading, depth=depth)
    good = _usable(_decoded(wanted, reading), listing.home)
    test = _read_specimens(listing if reading.tested else Listing(listing.home, [], []), reading)
    for _, reason in good.skipped + test.skipped:
        warnings.warn(f"left out: {reason}", stacklevel=2)
    return good.images, good.files, test, depth


def drawn_evenly(files: list[Path], most: int) -> list[Path]:
    """At most so many of the files (0: all), each as likely as any other, in the order given; always the same ones."""
    if not most or len(files) <= most:
        return files
    chosen = torch.randperm(len(files), generator=stream(0, "drawn files"))[:most]
    return [files[place] for place in chosen.sort().values.tolist()]


def read_folder(
    folder: Path, side: int = SIDE, *, depth: Depth = FULL_DEPTH, strict: bool = False
) -> tuple[UInt8[Tensor, "n 3 side side"], list[Path], Skipped]:
    """The images lying directly in a folder, sorted by name, with their files and those skipped."""
    found = _usable(_decoded(image_files(folder), Reading(side, depth, strict)), folder)
    return found.images, found.files, found.skipped


def read_test(folder: Path, side: int = SIDE, *, depth: Depth = FULL_DEPTH, strict: bool = False) -> Tested:
    """The images to test on: test/<kind> where there is a test/, else good/ and bad/."""
    kinds = _test_folders(folder) or {name: folder / name for name in (GOOD, "bad") if (folder / name).is_dir()}
    test = _read_specimens(_list_kinds(folder, kinds), Reading(side, depth, strict))
    if not test.anomalous.any() or test.anomalous.all():
        raise FirmError(f"{named(folder)} has no test images of both kinds; lay them out as test/good, test/<defect>")
    return test


def read_labelled(folder: Path, side: int = SIDE) -> tuple[UInt8[Tensor, "n 3 side side"], Bool[Tensor, " n"], Skipped]:
    """The images to test on, which are anomalous, and the files skipped: `read_test` without the truth."""
    test = read_test(folder, side)
    return test.images, test.anomalous, test.skipped


def find_files(paths: list[Path]) -> list[Path]:
    """Image files named one by one or by their folder, in the order given; sub-folders are looked into.

    A sub-folder that may not be opened is among the files: reading it says so, and costs the others nothing.
    """
    files = [file for path in paths for file in (all_files(path) if os.path.isdir(path) else [path])]
    if not files:
        where = ", ".join(map(named, paths))
        raise FirmError(f"there is no {', '.join(sorted(SUFFIXES))} file in {where}; give images or a folder of them")
    return files


def read_files(
    paths: list[Path], side: int = SIDE, *, depth: Depth = FULL_DEPTH, strict: bool = False
) -> tuple[UInt8[Tensor, "n 3 side side"], list[Path], Skipped]:
    """The pixels of files and of all files in folders, those that could be read, and those that could not."""
    found = _decoded(find_files(paths), Reading(side, depth, strict))
    return found.images, found.files, found.skipped


# what is where


def list_folder(folder: Path) -> Listing:
    """The files of whichever layout the folder has."""
    if not folder.is_dir():
        raise FirmError(f"{named(folder)} is not a folder; give the folder that holds the good images")
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
    """By suffix, in order of name; hidden files are no images even when they are called so.

    Links that lead nowhere and formats that are not read are among them: they are refused by name, not in silence.
    """
    if not folder.is_dir():
        raise FirmError(f"{named(folder)} is not a folder; give the folder that holds the images")
    return _images(_entries(folder))


def _entries(folder: Path) -> dict[Path, bool]:
    """All that is in a folder and not hidden, in order of name, and whether it is a folder itself."""
    try:
        with os.scandir(folder) as found:
            entries = sorted((entry for entry in found if entry.name[0] != "."), key=lambda entry: entry.name)
            return {folder / entry.name: _is_folder(entry) for entry in entries}
    except OSError as error:
        raise FirmError(f"{named(folder)} cannot be listed ({error.strerror}); check its permissions") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """As the listing itself says it: asking for every file again takes long in a large folder on a network share."""
    try:
        return entry.is_dir()
    except OSError:  # a link that leads in a circle, or where one may not look
        return False


def _images(entries: dict[Path, bool]) -> list[Path]:
    known = SUFFIXES | FOREIGN
    return [file for file, is_folder in entries.items() if not is_folder and file.suffix.lower() in known]


def folders_in(folder: Path) -> dict[str, Path]:
    """The folders in a folder by their names; none of one that is not there."""
    entries = _entries(folder) if folder.is_dir() else {}
    return {inner.name: inner for inner, is_folder in entries.items() if is_folder}


def all_files(folder: Path) -> Iterator[Path]:
    """The images of a folder, then those of the folders in it; links may lead in circles, so each is entered once."""
    waiting, seen = [folder], set[str]()
    while waiting:
        place = waiting.pop(0)
        if os.path.realpath(place) in seen:
            continue
        seen.add(os.path.realpath(place))
        try:
            entries = _entries(place)
        except FirmError:
            if place == folder:
                raise
            yield place  # see find_files
            continue
        yield from _images(entries)
        waiting[:0] = [inner for inner, is_folder in entries.items() if is_folder]


def _test_folders(folder: Path) -> dict[str, Path]:
    """The folders of test/ by kind, in order of name; hidden ones (.ipynb_checkpoints) are no kind of defect."""
    return folders_in(folder / "test")


def _list_kinds(folder: Path, kinds: dict[str, Path], good: Path | None = None) -> Listing:
    """The images to learn from, every image of every kind with its mask, and the masks that belong to none."""
    truth = folder / "ground_truth"
    masks = {name: _masks(kind) for name, kind in folders_in(truth).items()}
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


def _decoded(paths: Sequence[Path], reading: Reading) -> _Decoded:
    """File by file, each brought to its side at once: the full-size pixels of two are never in memory together."""
    side, depth = reading.side, reading.depth or FULL_DEPTH
    images = torch.empty(len(paths), 3, side, side, dtype=torch.uint8)
    files, shapes, skipped = list[Path](), list[tuple[int, int]](), Skipped()
    for file in paths:
        try:
            pixels = decode(file, depth)
        except FirmError as error:
            if reading.strict:
                raise
            skipped.append((file, str(error)))
            continue
        images[len(files)] = resize(to_tensor(pixels), side)[0]
        files.append(file)
        shapes.append((pixels.shape[0], pixels.shape[1]))
    return _Decoded(images[: len(files)], files, shapes, skipped)


def _usable(found: _Decoded, folder: Path) -> _Decoded:
    if not found.files:
        why = found.skipped[0][1] if found.skipped else f"it holds no {', '.join(sorted(SUFFIXES))} file"
        raise FirmError(f"{named(folder)} has no usable image ({why}); put the images directly into it")
    return found


def _read_specimens(listing: Listing, reading: Reading) -> Tested:
    found = _decoded([specimen.image for specimen in listing.test], reading)
    read = {specimen.image: specimen for specimen in listing.test}
    specimens = [read[file] for file in found.files]
    anomalous = torch.tensor([specimen.kind != GOOD for specimen in specimens], dtype=torch.bool)
    truth = _truth(listing, specimens, found.shapes, reading)
    return Tested(found.images, anomalous, truth, found.files, found.skipped)


DOUBTS = {  # what may be wrong with masks, and what comes of it
    "defective images without a mask": "their pixels count as unknown",
    "masks of defective images that mark no pixel": "the pixels of these images count as unknown",
    "masks that cannot be read": "the pixels of their images count as unknown",
    "masks of another size than their image": "they were scaled to it",
    "masks without an image": "they are ignored",
}
MISSING, EMPTY, UNREADABLE, SCALED, STRAY = DOUBTS


def _truth(listing: Listing, specimens: list[Specimen], shapes: list[tuple[int, int]], reading: Reading) -> Truth:
    """Kind and mask of every image that could be read; each sort of doubt is said once, however many it concerns."""
    masks = torch.zeros(len(specimens), reading.side, reading.side, dtype=torch.bool)
    known = torch.tensor([specimen.kind == GOOD for specimen in specimens], dtype=torch.bool)
    doubts: defaultdict[str, list[str]] = defaultdict(list)
    doubts[STRAY] += [named(mask) for mask in listing.strays]
    for number, (specimen, shape) in enumerate(zip(specimens, shapes, strict=True)):
        if known[number] or not listing.marked:
            continue
        mask = _mask(specimen, shape, doubts, strict=reading.strict)
        if mask is not None:
            masks[number], known[number] = resize_mask(mask, reading.side), True
    for what, examples in doubts.items():
        if examples:
            warnings.warn(f"{what}: {len(examples)}, for example {examples[0]}; {DOUBTS[what]}", stacklevel=2)
    files = tuple(str(specimen.image) for specimen in specimens)
    return Truth(tuple(specimen.kind for specimen in specimens), masks, known, files)


def _mask(
    specimen: Specimen, shape: tuple[int, int], doubts: defaultdict[str, list[str]], *, strict: bool
) -> npt.NDArray[np.bool_] | None:
    """The marked pixels of a defective image at the mask's own size, or None with the reason among the doubts."""
    if specimen.mask is None:
        doubts[MISSING].append(named(specimen.image))
        return None
    try:
        mask = decode_mask(specimen.mask)
    except FirmError as error:
        if strict:
            raise
        doubts[UNREADABLE].append(str(error))
        return None
    if not mask.any():
        doubts[EMPTY].append(named(specimen.mask))
        return None
    if mask.shape == shape[::-1] != shape:  # drawn on the pixels as stored, before EXIF turned them
        mask = turn_like(mask, specimen.image)
    if mask.shape != shape:
        sizes = f"{mask.shape[1]} x {mask.shape[0]}, the image {shape[1]} x {shape[0]}"
        doubts[SCALED].append(f"{named(specimen.mask)} ({sizes})")
    return mask
