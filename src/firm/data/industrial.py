"""Industrial inspection sets as published: MVTec-AD, VisA, BTAD and MPDD, one category at a time.

Only good images to learn from; good and defective ones to test on, the defects marked pixel by pixel. Gigabytes each,
some behind terms to accept, they are not fetched: a missing one is an error that says what to unpack where.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from firm.data.folder import GOOD, Listing, Reading, Specimen, list_mvtec, read_listing
from firm.types import Depth, FirmError, Statistics, Truth

SIDE = 256  # at which the paper works on MVTec-AD
SPLIT = Path("split_csv") / "1cls.csv"  # of VisA: which image is learnt from
COLUMNS = ("object", "split", "label", "image", "mask")


@dataclass(frozen=True)
class Category:
    """How many images a category was published with, and whether it shows an object or a texture."""

    train: int
    good: int  # of the test images
    test: int
    kind: Literal["object", "texture"] | None = "object"  # None: its authors do not say


@dataclass(frozen=True)
class Published:
    """One set: its categories, the folders its archives unpack to, and where they are had."""

    categories: Mapping[str, Category]
    folders: tuple[str, ...]
    home: str
    holds: str = "train/good"  # by which a category's folder is known
    statistics: Statistics | None = None


PUBLISHED: dict[str, Published] = {
    "mvtec": Published(
        categories={
            "bottle": Category(209, 20, 83),
            "cable": Category(224, 58, 150),
            "capsule": Category(219, 23, 132),
            "carpet": Category(280, 28, 117, "texture"),
            "grid": Category(264, 21, 78, "texture"),
            "hazelnut": Category(391, 40, 110),
            "leather": Category(245, 32, 124, "texture"),
            "metal_nut": Category(220, 22, 115),
            "pill": Category(267, 26, 167),
            "screw": Category(320, 41, 160),
            "tile": Category(230, 33, 117, "texture"),
            "toothbrush": Category(60, 12, 42),
            "transistor": Category(213, 60, 100),
            "wood": Category(247, 19, 79, "texture"),
            "zipper": Category(240, 32, 151),
        },
        folders=("mvtec_anomaly_detection",),
        home="https://www.mvtec.com/company/research/datasets/mvtec-ad",
        statistics=Statistics((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # ImageNet's, as the paper
    ),
    "visa": Published(
        categories={
            "candle": Category(900, 100, 200),
            "capsules": Category(542, 60, 160),
            "cashew": Category(450, 50, 150),
            "chewinggum": Category(453, 50, 150),
            "fryum": Category(450, 50, 150),
            "macaroni1": Category(900, 100, 200),
            "macaroni2": Category(900, 100, 200),
            "pcb1": Category(904, 100, 200),
            "pcb2": Category(901, 100, 200),
            "pcb3": Category(905, 101, 201),
            "pcb4": Category(904, 101, 201),
            "pipe_fryum": Category(450, 50, 150),
        },
        folders=("VisA_20220922", "VisA", "VisA_pytorch/1cls"),
        home="https://github.com/amazon-science/spot-diff",
        holds="Data/Images",
    ),
    "btad": Published(
        categories={
            "01": Category(400, 21, 70, None),
            "02": Category(399, 30, 230, None),
            "03": Category(1000, 400, 441, None),
        },
        folders=("BTech_Dataset_transformed",),
        home="https://avires.dimi.uniud.it/papers/btad/btad.zip",
        holds="train/ok",
    ),
    "mpdd": Published(
        categories={
            "bracket_black": Category(289, 32, 79),
            "bracket_brown": Category(185, 26, 77),
            "bracket_white": Category(110, 30, 60),
            "connector": Category(128, 30, 44),
            "metal_plate": Category(54, 26, 97),
            "tubes": Category(122, 32, 101),
        },
        folders=("MPDD",),
        home="https://github.com/stepanje/MPDD",
    ),
}
GET_SPLIT = f"get {SPLIT} from {PUBLISHED['visa'].home}"


def read_category(
    dataset: str, number: int, places: Sequence[Path], reading: Reading
) -> tuple[Tensor, Tensor, Tensor, Truth | None, Depth]:
    """Inliers, test images, which are anomalous, truth and depth of one category; other counts are warned about.

    `places` are the folders that may hold the set, most expected first, the data root last.
    """
    published = PUBLISHED[dataset]
    name = list(published.categories)[number]
    train, _, test, depth = read_listing(list_category(dataset, name, places), reading)
    good = int((~test.anomalous).sum())
    _compare(f"{dataset}:{name}", Category(len(train), good, len(test.files)), published.categories[name])
    return train, test.images, test.anomalous, test.truth if test.files else None, depth


def list_category(dataset: str, name: str, places: Sequence[Path]) -> Listing:
    """The first folder that holds the category in a layout one knows."""
    folders = [places[0] / name, places[-1] / f"{dataset}_{name}", *(place / name for place in places[1:])]
    for folder in folders:
        listing = list_mvtec(folder)
        if listing is None and (folder / "Data" / "Images").is_dir():
            listing = _list_visa(folder, name)
        if listing is not None:
            return listing
    published = PUBLISHED[dataset]
    raise FirmError(
        f"{dataset}:{name} is not in {places[0]}; unpack there the folder {name}, which holds {published.holds}, "
        f"of {published.home}"
    )


def _list_visa(folder: Path, name: str) -> Listing:
    """The files of VisA's own layout, split by the table that stands beside its classes."""
    rows = _split_rows(folder, name)
    wrong = [row["image"] for row in rows if row["split"] == "train" and row["label"] != "normal"]
    if wrong:
        raise FirmError(f"{SPLIT} puts the anomalous {wrong[0]} into train; {GET_SPLIT}")
    train = [_visa_file(folder, row["image"]) for row in rows if row["split"] == "train"]
    test = [_specimen(folder, row) for row in rows if row["split"] == "test"]
    masks = folder / "Data" / "Masks"
    listed = {specimen.mask for specimen in test}
    strays = sorted(mask for mask in (masks / "Anomaly").glob("[!.]*.png") if mask not in listed)
    return Listing(folder / "Data" / "Images", train, test, masks.is_dir(), strays)


def _specimen(folder: Path, row: Mapping[str, str]) -> Specimen:
    kind = GOOD if row["label"] == "normal" else row["label"]
    mask = _visa_file(folder, row["mask"]) if row["mask"] and kind != GOOD else None
    return Specimen(_visa_file(folder, row["image"]), kind, mask if mask is not None and mask.is_file() else None)


def _visa_file(folder: Path, listed: str) -> Path:
    """The table names files from the archive's root, pcb1/Data/...; the class may lie elsewhere."""
    return folder.joinpath(*Path(listed).parts[1:])


def _split_rows(folder: Path, name: str) -> list[dict[str, str]]:
    """What the table says of one class; it stands beside the class or, where that was copied alone, in it."""
    beside, within = folder.parent / SPLIT, folder / SPLIT
    table = within if within.is_file() else beside
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            rows = [{column: row[column] or "" for column in COLUMNS} for row in csv.DictReader(file)]
    except (OSError, KeyError, UnicodeDecodeError, csv.Error) as error:
        raise FirmError(f"{table}, which says what to learn from, cannot be read ({error!r}); {GET_SPLIT}") from error
    ours = [row for row in rows if row["object"] == name]
    if not ours:
        raise FirmError(f"{table} lists no image of {name}; {GET_SPLIT}")
    return ours


def _compare(task: str, found: Category, published: Category) -> None:
    """Another number of images is another task: results on it do not compare with published ones."""
    numbers = {
        "train has {} images": (found.train, published.train),
        "test has {} good images": (found.good, published.good),
        "test has {} defective images": (found.test - found.good, published.test - published.good),
    }
    differ = [
        f"{what.format(ours)}, the published set {theirs}" for what, (ours, theirs) in numbers.items() if ours != theirs
    ]
    if differ:
        warnings.warn(f"{task}: {'; '.join(differ)}", stacklevel=2)
