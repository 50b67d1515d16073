"""Images in: one normal class of a labelled data set, drawn parts, or a folder of one's own.

>>> load("cifar10:bird"), load("cifar100-super:people"), load("fashion-mnist:sandal")   # doctest: +SKIP
>>> load("mvtec:screw"), load("visa:pcb1"), load("drawn:plate"), load("my/good/parts")  # doctest: +SKIP
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from firm.data import cats_vs_dogs, cifar, fashion_mnist, industrial
from firm.data.download import data_root, fetch
from firm.data.folder import SIDE, Reading, list_folder, load_folder, read_folder
from firm.types import FULL_DEPTH, Depth, FirmError, OneClass, Split, Statistics, Truth

__all__ = [
    "DATASETS",
    "Dataset",
    "classes",
    "data_root",
    "fetch",
    "files_to_learn",
    "load",
    "load_folder",
    "read_folder",
]

# train inliers, test images, which are anomalous, what is known, the depth of the files
Sets = tuple[Tensor, Tensor, Tensor, Truth | None, Depth]
Reader = Callable[[int, Sequence[Path], Reading], Sets]  # number of the class, where the files may be, how to read them


@dataclass(frozen=True)
class Dataset:
    """What is known of a data set, and how one of its classes is read."""

    classes: tuple[str, ...]
    size: int  # the side at which the paper works on it
    statistics: Statistics | None
    read: Reader
    folders: tuple[str, ...] = ()  # the names its official archives unpack to
    side: int = 0  # at which its images are read unless another is asked for; 0: always as published


def _one_against_all(read: Callable[[Sequence[Path]], tuple[Split, Split]]) -> Reader:
    """The one-class protocol: learn from one class of the train split, test on the whole test split."""

    def task(inlier: int, places: Sequence[Path], _: Reading) -> Sets:
        (train, train_labels), (test, test_labels) = read(places)
        good = train[train_labels == inlier]
        if not len(good):
            raise FirmError(f"the train split in {places[0]} has no image of class {inlier}; fetch it again")
        return (
            torch.from_numpy(np.array(good)),
            torch.from_numpy(np.array(test)),
            torch.from_numpy(test_labels != inlier),
            None,
            FULL_DEPTH,
        )

    return task


def _draw(number: int, _: Sequence[Path], reading: Reading) -> Sets:
    """Parts drawn on the spot: nothing to download."""
    from firm.data.drawn import drawn  # late: drawing is a stage of its own, loaded only by those who draw

    task, _parts = drawn(DATASETS["drawn"].classes[number], size=reading.side)
    return task.train, task.test, task.anomalous, task.truth, task.depth


DATASETS: dict[str, Dataset] = {
    "cifar10": Dataset(
        classes=cifar.CIFAR10,
        size=32,
        statistics=Statistics((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        read=_one_against_all(cifar.read_cifar10),
        folders=("cifar-10-batches-bin",),
    ),
    "cifar100-super": Dataset(
        classes=tuple(cifar.SUPERCLASSES),
        size=32,
        statistics=Statistics((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
        read=_one_against_all(cifar.read_cifar100_super),
        folders=("cifar-100-binary",),
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
        folders=("PetImages",),
    ),
    **{
        name: Dataset(
            classes=tuple(published.categories),
            size=industrial.SIDE,
            statistics=published.statistics,
            read=partial(industrial.read_category, name),
            folders=published.folders,
            side=industrial.SIDE,
        )
        for name, published in industrial.PUBLISHED.items()
    },
    "drawn": Dataset(classes=("plate", "weave", "label"), size=64, statistics=None, read=_draw, side=128),
}


def shows_parts(name: str) -> bool:
    """Whether a name is of parts, to be looked at patch by patch, and not of a class of a semantic set."""
    facts = DATASETS.get(name.partition(":")[0])
    return facts is None or facts.side > 0


def load(
    name: str,
    root: Path | None = None,
    *,
    side: int | None = None,
    depth: Depth | None = None,
    strict: bool = False,
    most: int = 0,
    tested: bool = True,
) -> OneClass:
    """The task "dataset:class" (class by name or number), or a folder of images, also one in FIRM_DATA by its name.

    A data set's name wins over a folder of that name: write ./cifar10 for the folder. `side` is that at which the
    images of a folder, of an industrial set and of drawn parts are kept; the semantic sets come in one size. `depth`
    says what is white in files of more than 8 bits: a detector's for images it is to score, else found on the good
    ones. `strict` stops at the first file of a folder or an industrial set that cannot be used. Of these, at most
    `most` good files are opened (0: all), drawn evenly, and without `tested` no file to test on.
    """
    dataset, _, wanted = name.partition(":")
    folder = folder_named(name, root)
    if folder is not None:
        found = load_folder(folder, side or SIDE, depth=depth, strict=strict, most=most, tested=tested)
        return found if folder == Path(name).expanduser() else replace(found, name=name)
    if dataset not in DATASETS:
        raise FirmError(f"{name!r} is neither a folder nor a data set; the data sets are {', '.join(DATASETS)}")
    facts = DATASETS[dataset]
    inlier = _class_number(dataset, wanted)
    kept = side or facts.side
    places, reading = _places(dataset, data_root(root)), Reading(kept, depth, strict, most, tested)
    train, test, anomalous, truth, depth = facts.read(inlier, places, reading)
    size = min(facts.size, kept) if facts.side else facts.size
    return OneClass(f"{dataset}:{facts.classes[inlier]}", train, test, anomalous, size, facts.statistics, truth, depth)


def files_to_learn(name: str, root: Path | None = None) -> list[Path]:
    """The files of the good images of a task; none of one that does not come as files of its own."""
    folder = folder_named(name, root)
    if folder is not None:
        return list_folder(folder).train
    dataset, _, wanted = name.partition(":")
    if dataset not in industrial.PUBLISHED:
        return []
    category = list(industrial.PUBLISHED[dataset].categories)[_class_number(dataset, wanted)]
    return industrial.list_category(dataset, category, _places(dataset, data_root(root))).train


def folder_named(name: str, root: Path | None = None) -> Path | None:
    """The folder a name means: itself, or one in FIRM_DATA; None if it is a data set's name or nothing."""
    if name.partition(":")[0] in DATASETS:
        return None
    if "/" in name or os.sep in name or Path(name).is_dir():
        return Path(name).expanduser()
    kept = data_root(root) / name
    return kept if kept.is_dir() else None


def classes(dataset: str) -> tuple[str, ...]:
    """The names of a data set's classes, in the order of their numbers."""
    if dataset not in DATASETS:
        raise FirmError(f"no data set is called {dataset!r}; the data sets are {', '.join(DATASETS)}")
    return DATASETS[dataset].classes


def _class_number(dataset: str, wanted: str) -> int:
    """By name, whatever its case and hyphens, or by number where no name is one: btad:1 could mean 01 or 02."""
    names = classes(dataset)
    spelled = [_spelling(name) for name in names]
    if _spelling(wanted) in spelled:
        return spelled.index(_spelling(wanted))
    numbered = not any(name.isdecimal() for name in names)
    if numbered and wanted.strip().isdecimal() and int(wanted) < len(names):
        return int(wanted)
    listed = ", ".join(f"{number} {name}" if numbered else name for number, name in enumerate(names))
    raise FirmError(f"{dataset} has no class {wanted!r}; write {dataset}:CLASS with one of {listed}")


def _spelling(name: str) -> str:
    return name.strip().lower().replace(" ", "-").replace("_", "-")


def _places(dataset: str, root: Path) -> list[Path]:
    """The folders that may hold a data set, most expected first."""
    folders = DATASETS[dataset].folders
    unpacked = [place / folder for folder in folders for place in (root / dataset, root)]
    return [root / dataset, *unpacked, *([root] if folders else [])]
