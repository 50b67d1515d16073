"""Cats-vs-Dogs from either published folder of JPEGs, split as DROC splits it.

The competition's 25,000 files give exactly the published split; other counts give a proportional one and a warning.
"""

import contextlib
import hashlib
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track

from firm.errors import DataError, ImageError
from firm.images.decode import decode
from firm.runtime.files import cache_folder, replace_file
from firm.types import Split

Records = npt.NDArray[Any]  # one RECORD per file
Files = tuple[list[Path], list[Path]]  # cats and dogs

SIDE = 64
PER_CLASS = 12_500
RECORD = np.dtype([("usable", "?"), ("label", "u1"), ("image", "u1", (3, SIDE, SIDE))])
KAGGLE = "https://www.kaggle.com/c/dogs-vs-cats/data"
MICROSOFT = "https://www.microsoft.com/en-us/download/details.aspx?id=54765"


def read_cats_vs_dogs(places: Sequence[Path]) -> tuple[Split, Split]:
    """10,000 of each class to train on and 2,500 to test on, at 64 x 64."""
    for place in places:
        files = _files(place)
        if all(files):
            records = _cached(files)
            usable = records["usable"]
            if not usable.all():
                damaged = f"{(~usable).sum()} of {len(records)} files"
                warnings.warn(f"{damaged} in {place} cannot be decoded and are left out", stacklevel=2)
            return _split(records[usable])
    choices = f"the train folder (cat.0.jpg, dog.0.jpg, ...) of {KAGGLE}, or the PetImages folder of {MICROSOFT}"
    raise DataError(f"cats-vs-dogs is not in {places[0]}; unpack there {choices}")


def shrink(image: npt.NDArray[np.uint8], side: int) -> npt.NDArray[np.uint8]:
    """The shorter side scaled to `side` by area, then the centre square."""
    height, width = image.shape[:2]
    scale = side / min(height, width)
    shape = max(side, round(height * scale)), max(side, round(width * scale))
    resized = cv2.resize(image, shape[::-1], interpolation=cv2.INTER_AREA)
    top, left = (shape[0] - side) // 2, (shape[1] - side) // 2
    return np.ascontiguousarray(resized[top : top + side, left : left + side], dtype=np.uint8)


def _files(place: Path) -> Files:
    """The cats and the dogs, sorted by name, of the competition's layout or of Microsoft's."""
    for train in (place / "train", place):
        if any(train.glob("cat.*.jpg")):
            return _by_name(train, "cat.*.jpg"), _by_name(train, "dog.*.jpg")
    pets = place / "PetImages" if (place / "PetImages").is_dir() else place
    return _by_name(pets / "Cat", "*.jpg"), _by_name(pets / "Dog", "*.jpg")


def _by_name(folder: Path, pattern: str) -> list[Path]:
    """In one order on every system: Windows compares paths without their case."""
    return sorted(folder.glob(pattern), key=lambda file: file.name)


def _cached(files: Files) -> Records:
    """Every file as a record. Decoding takes minutes, so the records are cached for these files and lengths."""
    listed = [f"{file.name} {file.stat().st_size}" for group in files for file in group]
    text = "\n".join([str(files[0][0].parent.resolve()), *listed])
    home = cache_folder()
    cache = home / f"cats-vs-dogs-{SIDE}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):  # absent or damaged: decode again
        kept = np.load(cache, mmap_mode="r", allow_pickle=False)
        if kept.dtype == RECORD and len(kept) == sum(map(len, files)):
            return kept
    records = _decode(files)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as folder:  # renamed when complete: a cache is never partial
            np.save(Path(folder) / cache.name, records, allow_pickle=False)
            replace_file(Path(folder) / cache.name, cache)
    except OSError as error:
        warnings.warn(f"the decoded images could not be cached in {home} ({error})", stacklevel=2)
    return records


def _decode(files: Files) -> Records:
    labelled = [(file, label) for label, group in enumerate(files) for file in group]
    records = np.zeros(len(labelled), dtype=RECORD)
    quiet = not sys.stderr.isatty()
    bar = track(labelled, "decoding cats and dogs", console=Console(stderr=True), transient=True, disable=quiet)
    for record, (file, label) in zip(records, bar, strict=True):
        record["label"] = label
        with contextlib.suppress(ImageError):  # Microsoft's folder has a few damaged files, which are counted
            record["image"] = shrink(decode(file), SIDE).transpose(2, 0, 1)
            record["usable"] = True
    return records


def _split(records: Records) -> tuple[Split, Split]:
    """Four fifths of each class to train on: the first of a permutation by NumPy's legacy generator with seed 0."""
    labels = records["label"].astype(np.int64)
    members = [np.flatnonzero(labels == number) for number in (0, 1)]
    counts = [len(indices) for indices in members]
    if counts != [PER_CLASS] * 2:
        found = f"{counts} cats and dogs, not {PER_CLASS} each"
        warnings.warn(f"{found}: split 80/20, not the published split", stacklevel=2)
    rng = np.random.RandomState(0)  # legacy on purpose: it defines the published split
    shuffled = [rng.permutation(indices) for indices in members]
    train = np.concatenate([order[: len(order) * 4 // 5] for order in shuffled])
    test = np.concatenate([order[len(order) * 4 // 5 :] for order in shuffled])
    return (records["image"][train], labels[train]), (records["image"][test], labels[test])
