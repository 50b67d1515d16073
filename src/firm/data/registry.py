"""The data sets by name: one class of a labelled set as normal, drawn parts, or a folder of your own images.

>>> load("cifar10:bird"), load("cifar100-super:people"), load("fashion-mnist:sandal")   # doctest: +SKIP
>>> load("mvtec:screw"), load("visa:pcb1"), load("drawn:plate"), load("my/good/parts")  # doctest: +SKIP
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch

from firm.data.folder import SIDE, Reading, list_folder, load_folder, refuse_others
from firm.errors import DataError
from firm.images.crop import Crop
from firm.images.resize import Size, height_and_width
from firm.types import Depth, OneClass, Split, Statistics


@dataclass(frozen=True)
class Dataset:
    """What is published about a data set (datasets.json), and what reads it: "module:function", imported to load it."""

    classes: Mapping[str, tuple[int, ...]]  # in the order of their labels, with the numbers published about each
    size: int  # px at which the paper works on it
    read: str  # (places) -> labelled train and test splits; of parts (set, class, places, Reading) -> OneClass
    listing: str = ""  # (set, class, places) -> Listing, where images are files
    side: int = 0  # px at which images of parts are read by default; 0: a semantic set, always as published
    statistics: Statistics | None = None
    folders: tuple[str, ...] = ()  # that its official archives unpack to
    files: Mapping[str, str] = field(default_factory=dict)  # address -> checksum, as its authors publish it
    home: str = ""  # where to get a set that is not downloaded
    marker: str = "train/good"  # what the folder of a category holds


def _dataset(*, classes: Any, statistics: Any = None, folders: Any = (), **entry: Any) -> Dataset:
    numbers = classes if isinstance(classes, dict) else dict.fromkeys(classes, ())
    return Dataset(
        classes={name: tuple(values) for name, values in numbers.items()},
        statistics=Statistics(tuple(statistics["mean"]), tuple(statistics["std"])) if statistics else None,
        folders=tuple(folders),
        **entry,
    )


_PUBLISHED = json.loads(files("firm.data").joinpath("datasets.json").read_text(encoding="utf-8"))
DATASETS: dict[str, Dataset] = {name: _dataset(**entry) for name, entry in _PUBLISHED.items()}


def data_roots(root: Path | None = None) -> list[Path]:
    """Where data sets are kept: `root`, else the folders of FIRM_DATA (separated as in PATH), else ~/.cache/firm."""
    named = [str(root)] if root else [part for part in os.environ.get("FIRM_DATA", "").split(os.pathsep) if part]
    return [Path(part).expanduser() for part in named or ["~/.cache/firm"]]


def data_root(root: Path | None = None, *, holding: str = "") -> Path:
    """The first folder of data that has an entry called `holding`; else the first folder, where downloads go."""
    roots = data_roots(root)
    return next((place for place in roots if holding and (place / holding).exists()), roots[0])


def load(
    name: str,
    root: Path | None = None,
    *,
    side: Size | None = None,
    depth: Depth | None = None,
    strict: bool = False,
    max_images: int = 0,
    with_test: bool = True,
    crop: Crop | None = None,
) -> OneClass:
    """The images of "dataset:class", a class by name or number, or of a folder, also one in FIRM_DATA by its name.

    A data set's name has precedence over a folder of that name: write ./cifar10 for the folder. `root` replaces
    FIRM_DATA; the settings, explained by `Reading`, are for folders and sets of parts.
    """
    folder = folder_named(name, root)
    if folder is not None:
        images = load_folder(folder, Reading(side or SIDE, depth, strict, max_images, with_test, crop or Crop()))
        return images if folder == Path(name).expanduser() else replace(images, name=name)
    dataset, chosen = _parse(name)
    facts, places = DATASETS[dataset], _places(dataset, root)
    size, read = facts.size, _function(facts.read)
    if facts.side:
        side = side or facts.side
        size = min(size, *height_and_width(side))
        images = read(dataset, chosen, places, Reading(side, depth, strict, max_images, with_test, crop or Crop()))
    else:
        images = _one_against_all(list(facts.classes).index(chosen), *read(places))
    return replace(images, name=f"{dataset}:{chosen}", size=size, statistics=facts.statistics)


def training_files(name: str, root: Path | None = None) -> list[Path]:
    """The files of the good images of "dataset:class" or of a folder; none where images have no files of their own."""
    folder = folder_named(name, root)
    if folder is not None:
        return list_folder(folder).train
    dataset, chosen = _parse(name)
    listing = DATASETS[dataset].listing
    return _function(listing)(dataset, chosen, _places(dataset, root)).train if listing else []


def shows_parts(name: str) -> bool:
    """Whether the name is of parts, which are inspected patch by patch, rather than a class of a semantic set."""
    facts = DATASETS.get(name.partition(":")[0])
    return facts is None or facts.side > 0


def full_name(name: str) -> str:
    """The name that the images have once they are loaded: "dataset:class" in its own spelling, or the folder."""
    return name if folder_named(name) is not None else ":".join(_parse(name))


def folder_named(name: str, root: Path | None = None) -> Path | None:
    """The folder of that path, or of that name in FIRM_DATA; None if it is a data set's name or there is none."""
    if name.partition(":")[0] in DATASETS:
        return None
    refuse_others(name)
    if "/" in name or os.sep in name or Path(name).is_dir():
        return Path(name).expanduser()
    kept = data_root(root, holding=name) / name
    return kept if kept.is_dir() else None


def _parse(name: str) -> tuple[str, str]:
    """Data set and class, given by name in any spelling, or by number unless classes are named so."""
    dataset, _, given = name.partition(":")
    if dataset not in DATASETS:
        raise DataError(f"{name!r} is neither a folder nor a data set; the data sets are {', '.join(DATASETS)}")
    classes = list(DATASETS[dataset].classes)
    for chosen in classes:
        if _spelling(chosen) == _spelling(given):
            return dataset, chosen
    numbered = not any(name.isdecimal() for name in classes)  # btad:1 could mean 01 or 02
    if numbered and given.strip().isdecimal() and int(given) < len(classes):
        return dataset, classes[int(given)]
    listed = ", ".join(f"{number} {name}" if numbered else name for number, name in enumerate(classes))
    raise DataError(f"{dataset} has no class {given!r}; write {dataset}:CLASS with one of {listed}")


def _spelling(name: str) -> str:
    return name.strip().lower().replace(" ", "-").replace("_", "-")


def _places(dataset: str, root: Path | None) -> list[Path]:
    """The folders that may hold a data set, most likely first."""
    places, folders = list[Path](), DATASETS[dataset].folders
    for top in data_roots(root):
        unpacked = [place / folder for folder in folders for place in (top / dataset, top)]
        places += [top / dataset, *unpacked, *([top] if folders else [])]
    return places


def _function(path: str) -> Any:
    module, _, function = path.partition(":")
    return getattr(import_module(module), function)


def _one_against_all(inlier: int, train: Split, test: Split) -> OneClass:
    """The one-class protocol: train on one class of the train split, test on the whole test split."""
    good = torch.from_numpy(np.array(train[0][train[1] == inlier]))
    if not len(good):
        raise DataError(f"the train split has no image of class {inlier}; fetch the data set again")
    return OneClass("", good, torch.from_numpy(np.array(test[0])), torch.from_numpy(test[1] != inlier), 0)
