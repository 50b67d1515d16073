"""Drawn parts: a machined plate, a woven cloth and a printed bottle, good ones and defective ones with exact masks.

They need no download, so the demonstration and the tests always have something to look at. Every part has its
own random stream, named by its product, split and index: part 7 is the same whether 10 or 1000 are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from firm.data import drawn_defects as defects
from firm.data import drawn_products as products
from firm.data.drawn_defects import Defect
from firm.data.drawn_scene import Light, Plane, Scene, photograph, record, switch_on
from firm.streams import numpy_stream
from firm.types import FirmError, OneClass, Truth

SUPERSAMPLING = 2
CHANGED = 3 / 255  # a pixel changed by less is not part of a defect
VISIBLE = 0.12  # the least change, at its strongest, that a person sees beside the grain
ATTEMPTS = 24


@dataclass(frozen=True)
class DrawnPart:
    """One photographed part and the pixels its defect altered."""

    image: NDArray[np.uint8]  # (h, w, 3)
    mask: NDArray[np.bool_]  # (h, w)
    defect: str | None


@dataclass(frozen=True)
class Product:
    """How a good part is made, and what can go wrong with it."""

    build: Callable[[Generator, int, Light], Scene]
    defects: Mapping[str, Defect]


PRODUCTS: dict[str, Product] = {
    "plate": Product(products.build_plate, defects.PLATE),
    "weave": Product(products.build_weave, defects.WEAVE),
    "label": Product(products.build_label, defects.LABEL),
}


def draw(
    product: str, *, index: int, seed: int = 0, size: int = 128, split: str = "train", defect: str | None = None
) -> DrawnPart:
    """Part `index` of a split; a defective one equals its good twin, pose and grain included, outside the mask."""
    check(product, defect, size)
    names = ("drawn", product, split, index)
    rng = numpy_stream(seed, *names)
    light = switch_on(rng)
    scene = PRODUCTS[product].build(rng, size * SUPERSAMPLING, light)
    grain = numpy_stream(seed, *names, "grain").standard_normal((size, size, 3), dtype=np.float32)
    good = photograph(scene, light, size)
    if defect is None:
        return DrawnPart(record(good, grain), np.zeros((size, size), bool), None)
    for attempt in range(ATTEMPTS):
        damage = numpy_stream(seed, *names, defect, attempt)
        bad = photograph(PRODUCTS[product].defects[defect](scene, light, damage), light, size)
        mask = changed(good, bad, VISIBLE * (1 - attempt / ATTEMPTS))  # tired of trying, content with less
        if mask is not None:
            return DrawnPart(record(np.where(mask[..., None], bad, good), grain), mask, defect)
    raise FirmError(f"no visible {defect} fits on {product} {index} at {size} px; use a larger size")


def check(product: str, defect: str | None, size: int) -> None:
    """Refuse what cannot be drawn, naming what can."""
    if product not in PRODUCTS:
        raise FirmError(f"unknown product {product!r}; choose one of {', '.join(PRODUCTS)}")
    if defect is not None and defect not in PRODUCTS[product].defects:
        raise FirmError(f"a {product} has no defect {defect!r}; choose one of {', '.join(PRODUCTS[product].defects)}")
    if size < 32:
        raise FirmError(f"size {size} is too small to show a defect; use at least 32")


def changed(good: Plane, bad: Plane, visible: float) -> NDArray[np.bool_] | None:
    """Where two pictures differ, closed and widened by a pixel; None if too few pixels differ visibly."""
    difference = np.abs(bad - good).max(axis=2)
    mask = (difference > CHANGED).astype(np.uint8)
    if (difference > visible).sum() < max(3, mask.size // 1500):
        return None
    near = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (3, 3))
    return cv2.dilate(cv2.morphologyEx(mask, cv2.MORPH_CLOSE, near, iterations=2), near) > 0


@dataclass(frozen=True)
class Parts:
    """A drawn data set: inliers to learn from, and good then bad parts to be tested on."""

    train: list[DrawnPart]
    test: list[DrawnPart]


def draw_all(product: str, *, seed: int, size: int, train: int, good: int, bad: int) -> Parts:
    """Good and bad test parts are splits of their own, so no count shifts another part."""
    check(product, None, size)
    kinds = list(PRODUCTS[product].defects)
    return Parts(
        train=[draw(product, index=i, seed=seed, size=size) for i in range(train)],
        test=[draw(product, index=i, seed=seed, size=size, split="good") for i in range(good)]
        + [draw(product, index=i, seed=seed, size=size, split="bad", defect=kinds[i % len(kinds)]) for i in range(bad)],
    )


def drawn(
    product: str, *, seed: int = 0, size: int = 128, train: int = 200, good: int = 40, bad: int = 60
) -> tuple[OneClass, list[DrawnPart]]:
    """The data set of one product, and its test parts with their masks."""
    parts = draw_all(product, seed=seed, size=size, train=train, good=good, bad=bad)
    data = OneClass(
        name=f"drawn:{product}",
        train=stack(parts.train, size),
        test=stack(parts.test, size),
        anomalous=torch.tensor([part.defect is not None for part in parts.test], dtype=torch.bool),
        size=64,
        truth=Truth(
            kinds=tuple(part.defect or "good" for part in parts.test),
            masks=torch.from_numpy(np.array([part.mask for part in parts.test], bool).reshape(-1, size, size)),
            known=torch.ones(len(parts.test), dtype=torch.bool),
        ),
    )
    return data, parts.test


def stack(parts: list[DrawnPart], size: int) -> Tensor:
    """The images as one uint8 tensor, channels first."""
    images = np.zeros((len(parts), 3, size, size), np.uint8)
    for image, part in zip(images, parts, strict=True):
        image[:] = part.image.transpose(2, 0, 1)
    return torch.from_numpy(images)


def write_folder(
    folder: Path, product: str, *, seed: int = 0, size: int = 128, train: int = 200, good: int = 40, bad: int = 60
) -> None:
    """The same data set as PNGs in MVTec's layout; a folder with files in it is refused, lest two sets mix."""
    if folder.exists() and any(folder.iterdir()):
        raise FirmError(f"{folder} is not empty; name a new folder")
    parts = draw_all(product, seed=seed, size=size, train=train, good=good, bad=bad)
    for number, part in enumerate(parts.train):
        save(folder / "train" / "good" / f"{number:03d}.png", part.image)
    for kind in (None, *PRODUCTS[product].defects):
        write_kind(folder, kind, [part for part in parts.test if part.defect == kind])


def write_kind(folder: Path, kind: str | None, parts: list[DrawnPart]) -> None:
    """The test parts with one defect, and their masks; good parts have none."""
    name = (kind or "good").replace(" ", "_")
    for number, part in enumerate(parts):
        save(folder / "test" / name / f"{number:03d}.png", part.image)
        if kind is not None:
            save(folder / "ground_truth" / name / f"{number:03d}_mask.png", part.mask.astype(np.uint8) * 255)


def save(path: Path, pixels: NDArray[np.uint8]) -> None:
    """Write a PNG, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
