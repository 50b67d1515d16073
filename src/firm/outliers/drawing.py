"""Defects that are drawn: what a stroke and a shade have in common."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from numpy.typing import NDArray
from torch import Tensor

from firm.types import Outliers, Scene

Levels = NDArray[np.float32]  # of pixels, 0..255
Mask = NDArray[np.bool_]
Draw = Callable[[Levels, Mask, np.random.Generator], Levels]  # image, object -> how much each pixel is to change

VISIBLE = 8  # grey levels from which a change can be seen
LEAST = 16  # pixels of a defect that must be seen
TRIES = 10


def drawn(inliers: UInt8[Tensor, "n c h w"], draw: Draw, *, rng: torch.Generator, scene: Scene | None) -> Outliers:
    """Every image with a change drawn for it on its object; one of which too little is seen is drawn again."""
    images, where = [], []
    seeds = torch.randint(2**62, (len(inliers),), generator=rng).tolist()
    for i, seed in enumerate(seeds):  # a stream each, so that redrawing one shifts no other
        image = inliers[i].cpu().numpy()
        known = None if scene is None else scene.foreground[i].cpu().numpy()
        after, altered = _altered(image, draw, _object(image, known), np.random.default_rng(seed))
        images.append(torch.from_numpy(after))
        where.append(torch.from_numpy(altered))
    device = inliers.device
    made = torch.stack(images).to(device) if images else inliers.clone()
    at = torch.stack(where).to(device) if where else torch.zeros_like(inliers[:, 0], dtype=torch.bool)
    return Outliers(made, torch.ones(len(inliers), dtype=torch.long, device=device), at)


def pixel_of(foreground: Mask, rng: np.random.Generator) -> Float[NDArray[np.float64], " 2"]:
    """A pixel (y, x) of the object."""
    inside = np.flatnonzero(foreground)
    return np.array(divmod(int(inside[rng.integers(len(inside))]), foreground.shape[1]), float)


def towards_room(image: Levels, at: Mask, change: float, rng: np.random.Generator) -> float:
    """The change with a sign: either, or where grey levels would end too soon, the other."""
    mean = float(image[:, at].mean()) if at.any() else 128.0
    signed = change * (1 - 2 * int(rng.integers(2)))
    return signed if 0 <= mean + signed <= 255 else -signed


def _object(image: UInt8[NDArray[np.uint8], "c h w"], known: Mask | None) -> Bool[Mask, "h w"]:
    """Where the object is; everywhere if that is not known or nearly nowhere, which is a failed segmentation."""
    return known if known is not None and np.count_nonzero(known) >= LEAST else np.ones(image.shape[1:], bool)


def _altered(
    image: UInt8[NDArray[np.uint8], "c h w"], draw: Draw, foreground: Mask, rng: np.random.Generator
) -> tuple[UInt8[NDArray[np.uint8], "c h w"], Bool[Mask, "h w"]]:
    """The image with a visible change, and where; beyond the object nothing changes."""
    before = image.astype(np.float32)
    least = min(LEAST, foreground.size)
    for _ in range(TRIES):
        change = np.where(foreground, draw(before, foreground, rng), 0)
        after = np.rint(before + change).clip(0, 255)
        seen = (np.abs(after - before) >= VISIBLE).any(0)
        if np.count_nonzero(seen) >= least:
            return after.astype(np.uint8), (after != before).any(0)
    change = np.where(foreground, np.where(before < 128, VISIBLE, -VISIBLE), 0)  # so small an object changes as a whole
    return (before + change).astype(np.uint8), foreground.copy()
