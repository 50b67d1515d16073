"""Images in: one normal class of a labelled data set, drawn parts, or a folder of one's own.

>>> load("cifar10:bird"), load("cifar100-super:people"), load("fashion-mnist:sandal")   # doctest: +SKIP
>>> load("drawn:plate"), load("my/good/parts")                                          # doctest: +SKIP
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from firm.data import cats_vs_dogs, cifar, fashion_mnist
from firm.data.download import data_root, fetch
from firm.data.folder import SIDE, load_folder, read_folder
from firm.types import FirmError, OneClass, Split, Statistics

__all__ = ["DATASETS", "Dataset", "classes", "data_root", "fetch", "load", "load_folder", "read_folder"]

Sets = tuple[Tensor, Tensor, Tensor]  # the train inliers, the test images, which of those are anomalous
Reader = Callable[[Sequence[Path], int], Sets]


@dataclass(frozen=True)
class Dataset:
    """What is known of a data set, and how one of its classes is read."""

    classes: tuple[str, ...]
    size: int  # the side at which the paper works on it
    statistics: Statistics | None
    read: Reader
    folder: str = ""  # the name its official archive unpacks to


def _one_against_all(read: Callable[[Sequence[Path]], tuple[Split, Split]]) -> Reader:
    """The one-class protocol: learn from one class of the train split, test on the whole test split."""

    def task(places: Sequence[Path], inlier: int) -> Sets:
        (train, train_labels), (test, test_labels) = read(places)
        good = train[train_labels == inlier]
        if not len(good):
            raise FirmError(f"the train split in {places[0]} has no image of class {inlier}; fetch it again")
        return (
            torch.from_numpy(np.array(good)),
            torch.from_numpy(np.array(test)),
            torch.from_numpy(test_labels != inlier),
        )

    return task


def _draw(_: Sequence[Path], number: int) -> Sets:
    """Parts drawn on the spot: nothing to download."""
    from firm.data.drawn import drawn  # late: drawing is a stage of its own, loaded only by those who draw

    task, _parts = drawn(DATASETS["drawn"].classes[number])
    return task.train, task.test, task.anomalous


DATASETS: dict[str, Dataset] = {
    "cifar10": Dataset(
        classes=cifar.CIFAR10,
        size=32,
        statistics=Statistics((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        read=_one_against_all(cifar.read_cifar10),
        folder="cifar-10-batches-bin",
    ),
    "cifar100-super": Dataset(
        classes=tuple(cifar.SUPERCLASSES),
        size=32,
        statistics=Statistics((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
        read=_one_against_all(cifar.read_cifar100_super),
        folder="cifar-100-binary",
    ),
    "fashion-mnist": Dataset(
        classes=fashion_mnist.CLASSES,
        size=32,
        statistics=Statistics((0.2860,) * 3, (0.3204,) * 3),
        read=_one_against_all(fashion_mnist.read_fashion_mnist),
    ),
    "cats-vs-dogs": Dataset(
        classes=cats_vs_dogs.CLASSES,
        size=64,
        statistics=Statistics((0.4899, 0.4546, 0.4161), (0.2204, 0.2158, 0.2156)),
        read=_one_against_all(cats_vs_dogs.read_cats_vs_dogs),
        folder="PetImages",
    ),
    "drawn": Dataset(classes=("plate", "weave", "label"), size=64, statistics=None, read=_draw),
}


def load(name: str, root: Path | None = None, *, side: int = SIDE) -> OneClass:
    """The task "dataset:class" (class by name or number), or a folder of images.

    A data set's name wins over a folder of that name: write ./cifar10 for the folder. `side` is that at which the
    images of a folder are kept.
    """
    dataset, _, wanted = name.partition(":")
    if dataset not in DATASETS and ("/" in name or os.sep in name or Path(name).is_dir()):
        return load_folder(Path(name).expanduser(), side)
    if dataset not in DATASETS:
        raise FirmError(f"{name!r} is neither a folder nor a data set; the data sets are {', '.join(DATASETS)}")
    facts = DATASETS[dataset]
    inlier = _class_number(dataset, wanted)
    train, test, anomalous = facts.read(_places(dataset, data_root(root)), inlier)
    return OneClass(f"{dataset}:{facts.classes[inlier]}", train, test, anomalous, facts.size, facts.statistics)


def classes(dataset: str) -> tuple[str, ...]:
    """The names of a data set's classes, in the order of their numbers."""
    if dataset not in DATASETS:
        raise FirmError(f"no data set is called {dataset!r}; the data sets are {', '.join(DATASETS)}")
    return DATASETS[dataset].classes


def _class_number(dataset: str, wanted: str) -> int:
    names = classes(dataset)
    spelled = wanted.strip().lower().replace(" ", "-").replace("_", "-")
    if spelled in names:
        return names.index(spelled)
    if spelled.isdecimal() and int(spelled) < len(names):
        return int(spelled)
    listed = ", ".join(f"{number} {name}" for number, name in enumerate(names))
    raise FirmError(f"{dataset} has no class {wanted!r}; write {dataset}:CLASS with one of {listed}")


def _places(dataset: str, root: Path) -> list[Path]:
    """The folders that may hold a data set, most expected first."""
    folder = DATASETS[dataset].folder
    return [root / dataset, *([root / dataset / folder, root / folder, root] if folder else [])]
