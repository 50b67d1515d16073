"""Cats-vs-Dogs from either published folder of JPEGs, split as DROC splits it.

The competition's 25,000 files give exactly the published split; other counts give a proportional one, and say so.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
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

from firm.images import decode
from firm.types import FirmError, Split

Decoded = npt.NDArray[Any]  # one RECORD per file

CLASSES = ("cat", "dog")
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
            return _split(_usable(_decoded(place, files), place))
    raise FirmError(
        f"cats-vs-dogs is not in {places[0]}; unpack there the train folder (cat.0.jpg, dog.0.jpg, ...) of {KAGGLE}, "
        f"or the PetImages folder of {MICROSOFT}"
    )


def _files(place: Path) -> tuple[list[Path], list[Path]]:
    """The cats and the dogs, sorted by name, of the competition's layout or of Microsoft's."""
    for train in (place / "train", place):
        if any(train.glob("cat.*.jpg")):
            return sorted(train.glob("cat.*.jpg")), sorted(train.glob("dog.*.jpg"))
    pets = place / "PetImages" if (place / "PetImages").is_dir() else place
    return sorted((pets / "Cat").glob("*.jpg")), sorted((pets / "Dog").glob("*.jpg"))


def _decoded(place: Path, files: tuple[list[Path], list[Path]]) -> Decoded:
    """Every file as a record; decoding takes minutes, so it is done once and kept beside the files."""
    cache = place / f"decoded-{SIDE}-{_digest(files)}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):  # absent or damaged: decode again
        kept = np.load(cache, mmap_mode="r", allow_pickle=False)
        if kept.dtype == RECORD and len(kept) == sum(map(len, files)):
            return kept
    records = _decode(files)
    _keep(records, cache)
    return records


def _digest(files: tuple[list[Path], list[Path]]) -> str:
    """A name for exactly these files: other names or lengths are another cache."""
    text = "\n".join(f"{file.name} {file.stat().st_size}" for group in files for file in group)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _decode(files: tuple[list[Path], list[Path]]) -> Decoded:
    labelled = [(file, label) for label, group in enumerate(files) for file in group]
    records = np.zeros(len(labelled), dtype=RECORD)
    quiet = not sys.stderr.isatty()
    bar = track(labelled, "decoding cats and dogs", console=Console(stderr=True), transient=True, disable=quiet)
    for record, (file, label) in zip(records, bar, strict=True):
        record["label"] = label
        try:
            record["image"] = shrink(decode(file), SIDE).transpose(2, 0, 1)
            record["usable"] = True
        except FirmError:
            continue  # Microsoft's folder holds a few damaged files; _usable counts them
    return records


def shrink(image: npt.NDArray[np.uint8], side: int) -> npt.NDArray[np.uint8]:
    """The shorter side scaled to `side` by area, then the centre square."""
    height, width = image.shape[:2]
    scale = side / min(height, width)
    shape = max(side, round(height * scale)), max(side, round(width * scale))
    resized = cv2.resize(image, shape[::-1], interpolation=cv2.INTER_AREA)
    top, left = (shape[0] - side) // 2, (shape[1] - side) // 2
    return np.ascontiguousarray(resized[top : top + side, left : left + side], dtype=np.uint8)


def _keep(records: Decoded, cache: Path) -> None:
    """Written aside and renamed, so a cache is whole or absent; a read-only folder only costs the time."""
    try:
        handle, name = tempfile.mkstemp(dir=cache.parent, prefix=cache.stem, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                np.save(file, records, allow_pickle=False)
            os.replace(name, cache)
        except BaseException:
            Path(name).unlink()
            raise
    except OSError as error:
        warnings.warn(f"the decoded images could not be kept in {cache.parent} ({error})", stacklevel=2)


def _usable(records: Decoded, place: Path) -> Decoded:
    damaged = int((~records["usable"]).sum())
    if damaged:
        warnings.warn(f"{damaged} of {len(records)} files in {place} cannot be decoded and are left out", stacklevel=2)
    return records[records["usable"]]


def _split(records: Decoded) -> tuple[Split, Split]:
    """Four fifths of each class to train on: the first of a permutation by NumPy's legacy generator with seed 0."""
    labels = records["label"].astype(np.int64)
    counts = [int((labels == number).sum()) for number in range(len(CLASSES))]
    if counts != [PER_CLASS] * 2:
        warnings.warn(
            f"{counts} cats and dogs, not {PER_CLASS} each: split 80/20, not the published split", stacklevel=2
        )
    rng = np.random.RandomState(0)  # legacy on purpose: it defines the published split
    shuffled = [rng.permutation(np.flatnonzero(labels == number)) for number in range(len(CLASSES))]
    train = np.concatenate([order[: len(order) * 4 // 5] for order in shuffled])
    test = np.concatenate([order[len(order) * 4 // 5 :] for order in shuffled])
    return (records["image"][train], labels[train]), (records["image"][test], labels[test])
