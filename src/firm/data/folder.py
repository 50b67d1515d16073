"""A folder of your own images as a data set.

Three layouts: good images directly in the folder; good/ with an optional bad/; MVTec's train/good and test/<kind>.
In the last two, masks of the defects may be in ground_truth/<kind>/, named <image>_mask.png or like the image.
"""

import os
import re
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

from firm.errors import DataError, ImageError, SettingError, named
from firm.images.crop import Crop, Window, like_window, part_of
from firm.images.decode import SUFFIXES, decode, decode_mask, depth_of, turn_like
from firm.images.resize import Size, height_and_width, resize_mask
from firm.runtime.files import check_writable
from firm.runtime.random import stream
from firm.types import FULL_DEPTH, Depth, OneClass, Truth

SIDE = 128  # px at which images are kept
SIZE = 64  # px at which they are trained on unless the recipe sets another
GOOD = "good"  # the kind of a normal image
NORMAL = (GOOD, "ok")  # what the layouts call the folder of normal images
FOREIGN = frozenset({".gif", ".ppm", ".pgm", ".pnm", ".jp2", ".avif", ".heic", ".eps", ".psd", ".tga"})  # never read
VIDEOS = frozenset({".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv"})
MASKS = "ground_truth"  # the folder of masks
Skipped = list[tuple[Path, str]]  # a file and why it cannot be used
MASK_PROBLEMS = {  # what is wrong with a mask, and the consequence
    "defective images without a mask": "their pixels count as unknown",
    "masks of defective images that mark no pixel": "the pixels of these images count as unknown",
    "masks that cannot be read": "the pixels of their images count as unknown",
    "masks of another size than their image": "they were scaled to it",
    "masks without an image": "they are ignored",
}
MISSING, EMPTY, UNREADABLE, SCALED, STRAY = MASK_PROBLEMS
Problems = defaultdict[str, list[str]]


@dataclass(frozen=True)
class Labelled:
    """A test image on disk: its kind, and its mask if it has one."""

    image: Path
    kind: str
    mask: Path | None = None


@dataclass(frozen=True)
class Listing:
    """The files of a data set, before any is opened."""

    home: Path  # of the training images
    train: list[Path]
    test: list[Labelled] = field(default_factory=list)
    has_masks: bool = False  # without any masks, a missing one is not worth a warning
    strays: list[Path] = field(default_factory=list)  # masks without an image


@dataclass(frozen=True)
class Reading:
    """How files become images."""

    side: Size = SIDE  # px
    depth: Depth | None = None  # which sample is white; None: found on the training images
    strict: bool = False  # raise at the first file that cannot be used, instead of skipping it
    max_images: int = 0  # training files that are opened, sampled uniformly; 0: all
    with_test: bool = True
    crop: Crop = field(default_factory=Crop)


@dataclass(frozen=True)
class Images:
    """Decoded images and their files, with the files that could not be used."""

    pixels: UInt8[Tensor, "n 3 h w"]
    files: list[Path]
    shapes: list[tuple[int, int]]  # height and width before resizing
    windows: list[Window]  # what of them was read
    skipped: Skipped


@dataclass(frozen=True)
class Tested:
    """Labelled test images, their files, and the files that could not be used."""

    images: UInt8[Tensor, "m 3 h w"]
    anomalous: Bool[Tensor, " m"]
    truth: Truth
    files: list[Path]
    skipped: Skipped


def load_folder(folder: Path, reading: Reading | None = None) -> OneClass:
    """The folder's good images to train on and its labelled images to test on, if it has any."""
    return read_listing(str(folder), list_folder(folder), reading or Reading())


def load_files(files: list[Path], reading: Reading) -> OneClass:
    """Good images by their files; they are named after their folder if they share one."""
    homes = {file.parent for file in files}
    return read_listing(str(files[0].parent) if len(homes) == 1 else "images", Listing(files[0].parent, files), reading)


def read_listing(name: str, listing: Listing, reading: Reading) -> OneClass:
    """The training images, at least one, and the test images, all at one depth."""
    files = sample_files(listing.train, reading.max_images)
    depth = reading.depth or depth_of(files)
    reading = replace(reading, depth=depth)
    train = _decode_files(files, reading)
    if not train.files:
        why = train.skipped[0][1] if train.skipped else f"it holds no {', '.join(sorted(SUFFIXES))} file"
        if any(file.suffix.lower() in VIDEOS for file in listing.home.glob("*")):
            why = "it holds videos; save their frames as PNG files"
        raise DataError(f"{named(listing.home)} has no usable image ({why}); put the images directly into it")
    test = _read_labelled(listing if reading.with_test else Listing(listing.home, []), reading)
    for _, reason in train.skipped + test.skipped:
        warnings.warn(f"left out: {reason}", stacklevel=2)
    truth = test.truth if test.files else None
    size, names = min(SIZE, *train.pixels.shape[-2:]), tuple(train.files)
    return OneClass(name, train.pixels, test.images, test.anomalous, size, truth=truth, depth=depth, files=names)


def sample_files(files: list[Path], count: int) -> list[Path]:
    """`count` of the files (0: all), sampled uniformly and always the same, in the order given."""
    if not count or len(files) <= count:
        return files
    chosen = torch.randperm(len(files), generator=stream(0, "drawn files"))[:count]
    return [files[place] for place in chosen.sort().values.tolist()]


def read_test(
    folder: Path, side: Size = SIDE, *, depth: Depth = FULL_DEPTH, strict: bool = False, crop: Crop | None = None
) -> Tested:
    """The test images: test/<kind> where there is a test/, else good/ and bad/."""
    kinds = folders_in(folder / "test") or {name: folder / name for name in (GOOD, "bad") if (folder / name).is_dir()}
    test = _read_labelled(_list_kinds(folder, kinds), Reading(side, depth, strict, crop=crop or Crop()))
    if not test.anomalous.any() or test.anomalous.all():
        raise DataError(f"{named(folder)} has no test images of both kinds; lay them out as test/good, test/<defect>")
    return test


def read_files(
    paths: list[Path], side: Size = SIDE, *, depth: Depth = FULL_DEPTH, strict: bool = False, crop: Crop | None = None
) -> tuple[UInt8[Tensor, "n 3 h w"], list[Path], Skipped]:
    """The pixels of files and of all files in folders, those that could be read, and those that could not."""
    images = _decode_files(find_files(paths), Reading(side, depth, strict, crop=crop or Crop()))
    return images.pixels, images.files, images.skipped


def refuse_others(given: Path | str) -> None:
    """A sentence of its own for an address, a video and masks, which people give in the place of images."""
    path = Path(given)
    if address := re.match(r"([a-z][a-z0-9+.-]+):/+", path.as_posix(), re.IGNORECASE):  # a drive has one letter
        whole = f"{address[1]}://{path.as_posix()[address.end() :]}"  # a path has no double slashes
        raise DataError(f"{named(whole)} is an address; download what is there and give the local path")
    if path.suffix.lower() in VIDEOS and not path.is_dir():
        raise DataError(f"{named(given)} is a video; save its frames as PNG files and give their folder")
    if MASKS in (path.name, path.parent.name):
        raise DataError(f"{named(given)} holds masks of defects, not images; give the folder above")


def find_files(paths: list[Path]) -> list[Path]:
    """Image files, and those in folders at any depth; a folder that cannot be opened is listed: reading reports it."""
    if len(paths) == 1:
        refuse_others(paths[0])
    files = [file for path in paths for file in (all_files(path) if os.path.isdir(path) else [path])]
    if not files:
        where = ", ".join(map(named, paths))
        raise DataError(f"there is no {', '.join(sorted(SUFFIXES))} file in {where}; give images or a folder of them")
    return files


def refuse_mixing(folder: Path, paths: list[Path]) -> None:
    """Refuse to write where nothing can be, or among images: it would replace them, or be taken for one next time."""
    check_writable(folder)
    home = folder.resolve()
    for path in paths:
        if path.resolve() in (home, *home.parents) if path.is_dir() else path.resolve().parent == home:
            raise SettingError(f"{named(folder)} lies among the images of {named(path)}; name another folder")


def list_folder(folder: Path) -> Listing:
    """The files of whichever layout the folder has."""
    if not folder.is_dir():
        what = "one file" if folder.is_file() else "not a folder"
        raise DataError(f"{named(folder)} is {what}; give the folder that holds the good images")
    if (mvtec := list_mvtec(folder)) is not None:
        return mvtec
    if (folder / GOOD).is_dir():
        bad = {"bad": folder / "bad"} if (folder / "bad").is_dir() else {}
        return _list_kinds(folder, bad, folder / GOOD)
    return Listing(folder, image_files(folder))


def list_mvtec(folder: Path) -> Listing | None:
    """The files of MVTec's layout, or of BTAD's, which has ok for good; None if the folder has neither."""
    good = next((folder / "train" / name for name in NORMAL if (folder / "train" / name).is_dir()), None)
    return None if good is None else _list_kinds(folder, folders_in(folder / "test"), good)


def image_files(folder: Path) -> list[Path]:
    """The images in a folder, sorted by name; broken links and foreign formats too, so that reading reports them."""
    if not folder.is_dir():
        raise DataError(f"{named(folder)} is not a folder; give the folder that holds the images")
    return _images(folder, _contents(folder)[1])


def folders_in(folder: Path) -> dict[str, Path]:
    """The visible folders in a folder by name; none if it does not exist."""
    return {name: folder / name for name in _contents(folder)[0]} if folder.is_dir() else {}


def all_files(folder: Path) -> Iterator[Path]:
    """The images of a folder, then those of its sub-folders; each folder once, since links may form circles."""
    visited, unreadable = set[str](), list[Path]()

    def note(error: OSError) -> None:
        unreadable.append(Path(error.filename))
        if unreadable[-1] == folder:
            raise _cannot_list(folder, error) from error

    for place, folders, files in os.walk(folder, followlinks=True, onerror=note):
        yield from unreadable  # see find_files
        unreadable.clear()
        real = os.path.realpath(place)
        folders[:] = [] if real in visited else sorted(name for name in folders if name[0] != ".")
        yield from [] if real in visited else _images(Path(place), files)
        visited.add(real)
    yield from unreadable


def _contents(folder: Path) -> tuple[list[str], list[str]]:
    """The names of the visible folders and of all files in a folder, sorted; one scan, for slow network shares."""

    def refuse(error: OSError) -> None:
        raise _cannot_list(folder, error) from error

    _, folders, files = next(os.walk(folder, onerror=refuse))
    return sorted(name for name in folders if name[0] != "."), files


def _cannot_list(folder: Path, error: OSError) -> DataError:
    return DataError(f"{named(folder)} cannot be listed ({error.strerror}); check its permissions")


def _images(folder: Path, names: Sequence[str]) -> list[Path]:
    known = SUFFIXES | FOREIGN
    return [folder / name for name in sorted(names) if name[0] != "." and Path(name).suffix.lower() in known]


def _list_kinds(folder: Path, kinds: dict[str, Path], good: Path | None = None) -> Listing:
    """The training images, every image of every kind with its mask, and the masks that belong to none."""
    truth = folder / MASKS
    masks = {  # of two files with one stem, the first
        name: {mask.stem: mask for mask in reversed(image_files(place))} for name, place in folders_in(truth).items()
    }
    test, used = list[Labelled](), set[Path]()
    for name, place in kinds.items():
        kind = GOOD if name in NORMAL else name
        of_kind = masks.get(name, {})
        for image in image_files(place):
            own = [of_kind[stem] for stem in (f"{image.stem}_mask", image.stem) if stem in of_kind]
            used.update(own)
            test.append(Labelled(image, kind, own[0] if own and kind != GOOD else None))
    strays = [mask for of_kind in masks.values() for mask in of_kind.values() if mask not in used]
    return Listing(good or folder, image_files(good) if good else [], test, truth.is_dir(), strays)


def _decode_files(paths: Sequence[Path], reading: Reading) -> Images:
    """File by file, each resized at once: the full-size pixels of two are never in memory together."""
    pixels = torch.empty(len(paths), 3, *height_and_width(reading.side), dtype=torch.uint8)
    files, shapes, windows, skipped = list[Path](), list[tuple[int, int]](), list[Window](), Skipped()
    for file in paths:
        try:
            image = decode(file, reading.depth or FULL_DEPTH)
            part, window = part_of(image, reading.crop, reading.side, named(file))
        except ImageError as error:
            if reading.strict:
                raise
            skipped.append((file, str(error)))
            continue
        pixels[len(files)] = part[0]
        windows.append(window)
        files.append(file)
        shapes.append((image.shape[0], image.shape[1]))
    return Images(pixels[: len(files)], files, shapes, windows, skipped)


def _read_labelled(listing: Listing, reading: Reading) -> Tested:
    """Every image that can be read with its kind and mask; one warning for each sort of problem with masks."""
    by_file = {labelled.image: labelled for labelled in listing.test}
    images = _decode_files([labelled.image for labelled in listing.test], reading)
    test = [by_file[file] for file in images.files]
    anomalous = torch.tensor([labelled.kind != GOOD for labelled in test], dtype=torch.bool)
    masks, known = torch.zeros(len(test), *images.pixels.shape[-2:], dtype=torch.bool), ~anomalous
    problems: Problems = defaultdict(list, {STRAY: [named(mask) for mask in listing.strays]})
    for number, labelled in enumerate(test if listing.has_masks else []):
        if anomalous[number]:
            mask = _read_mask(labelled, images.shapes[number], problems, strict=reading.strict)
            if mask is not None:
                of_image = like_window(mask, images.windows[number], images.shapes[number])
                masks[number], known[number] = resize_mask(of_image, reading.side), True
    for problem, examples in problems.items():
        if examples:
            consequence = MASK_PROBLEMS[problem]
            warnings.warn(f"{problem}: {len(examples)}, for example {examples[0]}; {consequence}", stacklevel=2)
    truth = Truth(tuple(labelled.kind for labelled in test), masks, known, tuple(map(str, images.files)))
    return Tested(images.pixels, anomalous, truth, images.files, images.skipped)


def _read_mask(
    labelled: Labelled, shape: tuple[int, int], problems: Problems, *, strict: bool
) -> npt.NDArray[np.bool_] | None:
    """The marked pixels of a defective image at the mask's own size, or None and an entry in `problems`."""
    if labelled.mask is None:
        problems[MISSING].append(named(labelled.image))
        return None
    try:
        mask = decode_mask(labelled.mask)
    except ImageError as error:
        if strict:
            raise
        problems[UNREADABLE].append(str(error))
        return None
    if not mask.any():
        problems[EMPTY].append(named(labelled.mask))
        return None
    if mask.shape == shape[::-1] != shape:  # drawn on the stored pixels, before EXIF turned them
        mask = turn_like(mask, labelled.image)
    if mask.shape != shape:
        sizes = f"{mask.shape[1]} x {mask.shape[0]}, the image {shape[1]} x {shape[0]}"
        problems[SCALED].append(f"{named(labelled.mask)} ({sizes})")
    return mask
