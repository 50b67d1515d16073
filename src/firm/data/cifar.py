"""CIFAR-10 and the 20 superclasses of CIFAR-100, from their official binary files.

The Python archives of the same images are pickles, which run whatever code they carry: they are refused.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from firm.data.download import SOURCES
from firm.types import FirmError, Split

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SUPERCLASSES = {  # name -> the fine labels it gathers; the order is the coarse label
    "aquatic-mammals": (4, 30, 55, 72, 95),
    "fish": (1, 32, 67, 73, 91),
    "flowers": (54, 62, 70, 82, 92),
    "food-containers": (9, 10, 16, 28, 61),
    "fruit-and-vegetables": (0, 51, 53, 57, 83),
    "household-electrical-devices": (22, 39, 40, 86, 87),
    "household-furniture": (5, 20, 25, 84, 94),
    "insects": (6, 7, 14, 18, 24),
    "large-carnivores": (3, 42, 43, 88, 97),
    "large-man-made-outdoor-things": (12, 17, 37, 68, 76),
    "large-natural-outdoor-scenes": (23, 33, 49, 60, 71),
    "large-omnivores-and-herbivores": (15, 19, 21, 31, 38),
    "medium-sized-mammals": (34, 63, 64, 66, 75),
    "non-insect-invertebrates": (26, 45, 77, 79, 99),
    "people": (2, 11, 35, 46, 98),
    "reptiles": (27, 29, 44, 78, 93),
    "small-mammals": (36, 50, 65, 74, 80),
    "trees": (47, 52, 56, 59, 96),
    "vehicles-1": (8, 13, 48, 58, 90),
    "vehicles-2": (41, 69, 81, 85, 89),
}
PIXELS = 3 * 32 * 32


def read_cifar10(places: Sequence[Path]) -> tuple[Split, Split]:
    """The official train and test splits of CIFAR-10."""
    names = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
    files = _read(places, "cifar10", names, pickled=("cifar-10-batches-py", "data_batch_1", "cifar-10-python.tar.gz"))
    *batches, test = (_records(files[name], name, kinds=(10,)) for name in names)
    images, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return (images, labels[:, 0]), (test[0], test[1][:, 0])


def read_cifar100_super(places: Sequence[Path]) -> tuple[Split, Split]:
    """The official train and test splits of CIFAR-100, labelled by superclass."""
    names = ("train.bin", "test.bin")
    files = _read(places, "cifar100-super", names, pickled=("cifar-100-python", "cifar-100-python.tar.gz"))
    train, test = (_superclass(_records(files[name], name, kinds=(20, 100)), name) for name in names)
    return train, test


def _superclass(split: Split, name: str) -> Split:
    """Labelled by the coarse byte, once the fine byte agrees with the table.

    A published superclass list is known to be wrong in 13 of 20 rows; a silent disagreement would change the task.
    """
    images, (coarse, fine) = split[0], split[1].T
    expected = np.empty(100, dtype=np.int64)
    for number, members in enumerate(SUPERCLASSES.values()):
        expected[list(members)] = number
    wrong = np.flatnonzero(expected[fine] != coarse)
    if wrong.size:
        at = int(wrong[0])
        raise FirmError(
            f"record {at} of {name} puts fine label {fine[at]} in superclass {coarse[at]}, not {expected[fine[at]]}; "
            f"this is not the official CIFAR-100: get {SOURCES['cifar100-super'][0].url}"
        )
    return images, coarse


def _records(content: bytes, name: str, *, kinds: tuple[int, ...]) -> Split:
    """Images and labels (n, kinds): a record is a byte per kind of label, then the red, green and blue planes."""
    length = len(kinds) + PIXELS
    if not content or len(content) % length:
        raise FirmError(f"{name} has {len(content)} bytes, not a whole number of {length}-byte records; fetch it again")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, length)
    labels = records[:, : len(kinds)].astype(np.int64)
    if (labels >= np.array(kinds)).any():
        raise FirmError(
            f"{name} holds a label beyond its {kinds[-1]} classes, so it is damaged or another data set; fetch it again"
        )
    return records[:, len(kinds) :].reshape(-1, 3, 32, 32), labels


def _read(places: Sequence[Path], dataset: str, names: Sequence[str], *, pickled: Sequence[str]) -> dict[str, bytes]:
    """The named files from the first place that has them all, loose or in the official archive."""
    remote = SOURCES[dataset][0]
    for place in places:
        if all((place / name).is_file() for name in names):
            return {name: (place / name).read_bytes() for name in names}
        if (place / remote.name).is_file():
            return _read_archive(place / remote.name, names)
    for place in places:
        for name in pickled:
            if (place / name).exists():
                raise FirmError(
                    f"{place / name} is a Python pickle, which can run any code and is not read; "
                    f"put the binary version {remote.url} into {places[0]} instead"
                )
    raise FirmError(
        f"{dataset} is not in {places[0]}; run `firm fetch {dataset}`, or download {remote.url} into that folder"
    )


def _read_archive(archive: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The named members, read in memory: nothing is unpacked, so no member's path can do harm."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = Path(member.name).name
                content = tar.extractfile(member) if name in names else None
                if content is not None:
                    found[name] = content.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise FirmError(f"{archive} is damaged ({error}); fetch it again") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise FirmError(f"{archive} lacks {', '.join(missing)}; fetch it again")
    return found
