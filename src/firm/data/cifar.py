"""CIFAR-10 and the 20 superclasses of CIFAR-100, from their official binary files.

The Python archives of the same images are pickles, which can run any code, so they are not read.
"""

import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from firm.data.registry import DATASETS
from firm.errors import DataError
from firm.types import Split

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
    """Labelled by the coarse byte, if the fine byte agrees with our table: a published list has 13 wrong rows of 20."""
    images, (coarse, fine) = split[0], split[1].T
    expected = np.empty(100, dtype=np.int64)
    for number, members in enumerate(DATASETS["cifar100-super"].classes.values()):
        expected[list(members)] = number
    wrong = np.flatnonzero(expected[fine] != coarse)
    if wrong.size:
        at = int(wrong[0])
        puts = f"puts fine label {fine[at]} in superclass {coarse[at]}, not {expected[fine[at]]}"
        official = f"this is not the official CIFAR-100: get {', '.join(DATASETS['cifar100-super'].files)}"
        raise DataError(f"record {at} of {name} {puts}; {official}")
    return images, coarse


def _records(content: bytes, name: str, *, kinds: tuple[int, ...]) -> Split:
    """Images and labels (n, kinds): a record is a byte per kind of label, then the red, green and blue planes."""
    length = len(kinds) + PIXELS
    if not content or len(content) % length:
        raise DataError(f"{name} has {len(content)} bytes, not a whole number of {length}-byte records; fetch it again")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, length)
    labels = records[:, : len(kinds)].astype(np.int64)
    if (labels >= np.array(kinds)).any():
        raise DataError(f"{name} has a label beyond its {kinds[-1]} classes: damaged or another set; fetch it again")
    return records[:, len(kinds) :].reshape(-1, 3, 32, 32), labels


def _read(places: Sequence[Path], dataset: str, names: Sequence[str], *, pickled: Sequence[str]) -> dict[str, bytes]:
    """The named files from the first place that has them all, loose or in the official archive."""
    url = next(iter(DATASETS[dataset].files))
    for place in places:
        if all((place / name).is_file() for name in names):
            return {name: (place / name).read_bytes() for name in names}
        if (place / Path(url).name).is_file():
            return _read_archive(place / Path(url).name, names)
    pickles = [place / name for place in places for name in pickled if (place / name).exists()]
    if pickles:
        instead = f"put the binary version {url} into {places[0]} instead"
        raise DataError(f"{pickles[0]} is a Python pickle, which can run any code and is not read; {instead}")
    raise DataError(f"{dataset} is not in {places[0]}; run `firm fetch {dataset}`, or download {url} into that folder")


def _read_archive(archive: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The named members, read in memory: nothing is unpacked, so no member's path can do harm."""
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = Path(member.name).name
                content = tar.extractfile(member) if name in names else None
                if content is not None:
                    contents[name] = content.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{archive} is damaged ({error}); fetch it again") from error
    missing = [name for name in names if name not in contents]
    if missing:
        raise DataError(f"{archive} lacks {', '.join(missing)}; fetch it again")
    return contents
