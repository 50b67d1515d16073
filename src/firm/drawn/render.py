"""Drawn parts: a machined plate, a woven cloth and a printed bottle, good ones and defective ones with exact masks.

They need no download, so the demo and the tests always have data. Every part has its own random stream, named by its
product, split and index: part 7 is the same whether 10 or 1000 are drawn.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import torch
from jaxtyping import UInt8
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from firm.drawn import defects, products
from firm.drawn.defects import Defect
from firm.drawn.scene import Light, Plane, Scene, photograph, record, switch_on
from firm.errors import DataError, SettingError
from firm.runtime.random import numpy_stream
from firm.types import OneClass, Truth

SUPERSAMPLING = 2
CHANGED = 3 / 255  # a pixel changed by less is not part of a defect
VISIBLE = 0.12  # the smallest maximal change that a person sees beside the grain
ATTEMPTS = 24


@dataclass(frozen=True)
class DrawnPart:
    """One photographed part and the pixels its defect altered."""

    image: NDArray[np.uint8]  # (h, w, 3)
    mask: NDArray[np.bool_]  # (h, w)
    defect: str | None


@dataclass(frozen=True)
class Product:
    """How a good part is made, and its possible defects."""

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
    """Part `index` of a split; outside its mask, a defective one equals the good one in pose and grain."""
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
        mask = changed(good, bad, VISIBLE * (1 - attempt / ATTEMPTS))  # later attempts may be fainter
        if mask is not None:
            return DrawnPart(record(np.where(mask[..., None], bad, good), grain), mask, defect)
    raise DataError(f"no visible {defect} fits on {product} {index} at {size} px; use a larger size")


def check(product: str, defect: str | None, size: int) -> None:
    if product not in PRODUCTS:
        raise SettingError(f"unknown product {product!r}; choose one of {', '.join(PRODUCTS)}")
    if defect is not None and defect not in PRODUCTS[product].defects:
        known = ", ".join(PRODUCTS[product].defects)
        raise SettingError(f"a {product} has no defect {defect!r}; choose one of {known}")
    if size < 32:
        raise SettingError(f"size {size} is too small to show a defect; use at least 32")


def changed(good: Plane, bad: Plane, visible: float) -> NDArray[np.bool_] | None:
    """Where two pictures differ, closed and widened by a pixel; None if too few pixels differ visibly."""
    difference = np.abs(bad - good).max(axis=2)
    mask = (difference > CHANGED).astype(np.uint8)
    if (difference > visible).sum() < max(3, mask.size // 1500):
        return None
    near = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (3, 3))
    return cv2.dilate(cv2.morphologyEx(mask, cv2.MORPH_CLOSE, near, iterations=2), near) > 0


def draw_dataset(
    product: str, *, seed: int = 0, size: int = 128, train: int = 200, good: int = 40, bad: int = 60
) -> OneClass:
    """Good parts to train on, good and then defective ones to test on; no count changes another part."""
    check(product, None, size)
    part = partial(draw, product, seed=seed, size=size)
    kinds = list(PRODUCTS[product].defects)
    training = [part(index=i) for i in range(train)]
    test = [part(index=i, split="good") for i in range(good)]
    test += [part(index=i, split="bad", defect=kinds[i % len(kinds)]) for i in range(bad)]
    masks = torch.from_numpy(np.array([part.mask for part in test], bool).reshape(-1, size, size))
    truth = Truth(tuple(part.defect or "good" for part in test), masks, known=torch.ones(len(test), dtype=torch.bool))
    anomalous = torch.arange(good + bad) >= good
    return OneClass(f"drawn:{product}", stack(training, size), stack(test, size), anomalous, size=64, truth=truth)


def stack(parts: list[DrawnPart], size: int) -> UInt8[Tensor, "n 3 size size"]:
    """The images as one tensor, channels first."""
    images = np.array([part.image for part in parts], np.uint8).reshape(-1, size, size, 3)
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


def write_folder(
    folder: Path, product: str, *, seed: int = 0, size: int = 128, train: int = 200, good: int = 40, bad: int = 60
) -> None:
    """The same data set as PNGs in MVTec's layout; the folder must be new or empty, so that two sets never mix."""
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder} is not empty; name a new folder")
    data = draw_dataset(product, seed=seed, size=size, train=train, good=good, bad=bad)
    assert data.truth is not None
    for number, image in enumerate(data.train):
        save_png(folder / "train" / "good" / f"{number:03d}.png", image)
    counts = Counter[str]()
    for image, kind, mask in zip(data.test, data.truth.kinds, data.truth.masks, strict=True):
        name, number = kind.replace(" ", "_"), counts[kind]
        save_png(folder / "test" / name / f"{number:03d}.png", image)
        if kind != "good":
            save_png(folder / "ground_truth" / name / f"{number:03d}_mask.png", mask[None].to(torch.uint8) * 255)
        counts[kind] += 1


def save_png(path: Path, image: UInt8[Tensor, "c h w"]) -> None:
    """Write a PNG of one or three channels, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy()).save(path)
