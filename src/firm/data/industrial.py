"""Industrial inspection sets as published: MVTec-AD, VisA, BTAD and MPDD, one category at a time.

Good images to train on, good and defective ones with masks to test on. The sets have gigabytes, some under terms to
accept, so they are not fetched: the error about a missing one tells what to unpack where.
"""

import csv
import warnings
from collections.abc import Sequence
from pathlib import Path

from firm.data.folder import GOOD, Labelled, Listing, Reading, list_mvtec, read_listing
from firm.data.registry import DATASETS
from firm.errors import DataError
from firm.types import OneClass

SPLIT = Path("split_csv") / "1cls.csv"  # of VisA: which images are trained on
COLUMNS = ("object", "split", "label", "image", "mask")
GET_SPLIT = f"get {SPLIT} from {DATASETS['visa'].home}"


def read_category(dataset: str, name: str, places: Sequence[Path], reading: Reading) -> OneClass:
    """One category from the first of `places` that has it; warns if it has other numbers of images than published."""
    images = read_listing(name, list_category(dataset, name, places), reading)
    defective = int(images.anomalous.sum())
    found = len(images.train), len(images.test) - defective, defective
    published = DATASETS[dataset].classes[name]
    if found != published:
        here, there = ("{} training, {} good and {} defective test images".format(*n) for n in (found, published))
        warnings.warn(f"{dataset}:{name} has {here}, the published set {there}: results do not compare", stacklevel=2)
    return images


def list_category(dataset: str, name: str, places: Sequence[Path]) -> Listing:
    """The files of a category in the first folder that has a known layout."""
    folders = [places[0] / name, places[-1] / f"{dataset}_{name}", *(place / name for place in places[1:])]
    for folder in folders:
        listing = list_mvtec(folder)
        if listing is None and (folder / "Data" / "Images").is_dir():
            listing = _list_visa(folder, name)
        if listing is not None:
            return listing
    facts = DATASETS[dataset]
    unpack = f"unpack there the folder {name}, which holds {facts.marker}, of {facts.home}"
    raise DataError(f"{dataset}:{name} is not in {places[0]}; {unpack}")


def _list_visa(folder: Path, name: str) -> Listing:
    """The files of VisA's own layout, split by its table, which names files from the archive's root: pcb1/Data/..."""
    train, test = list[Path](), list[Labelled]()
    for row in _split_rows(folder, name):
        image, mask = (folder.joinpath(*Path(row[column]).parts[1:]) for column in ("image", "mask"))
        if row["split"] == "train" and row["label"] != "normal":
            raise DataError(f"{SPLIT} puts the anomalous {row['image']} into train; {GET_SPLIT}")
        if row["split"] == "train":
            train.append(image)
        elif row["split"] == "test":
            marked = row["label"] != "normal" and row["mask"] and mask.is_file()
            test.append(Labelled(image, GOOD if row["label"] == "normal" else row["label"], mask if marked else None))
    masks, listed = folder / "Data" / "Masks", {labelled.mask for labelled in test}
    strays = sorted(mask for mask in (masks / "Anomaly").glob("[!.]*.png") if mask not in listed)
    return Listing(folder / "Data" / "Images", train, test, masks.is_dir(), strays)


def _split_rows(folder: Path, name: str) -> list[dict[str, str]]:
    """The table's rows for one class; it is beside the class or, where that was copied alone, in it."""
    table = (folder if (folder / SPLIT).is_file() else folder.parent) / SPLIT
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            rows = [{column: row[column] or "" for column in COLUMNS} for row in csv.DictReader(file)]
    except (OSError, KeyError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{table}, which splits the images, cannot be read ({error!r}); {GET_SPLIT}") from error
    of_class = [row for row in rows if row["object"] == name]
    if not of_class:
        raise DataError(f"{table} lists no image of {name}; {GET_SPLIT}")
    return of_class
