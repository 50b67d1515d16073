"""Rotations by 90, 180 and 270 degrees: the synthetic outliers of the semantic branch (section 3.4 (a))."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from firm.types import FirmError, Outliers, Scene


@dataclass(frozen=True, kw_only=True)
class Rotations:
    """Each inlier turned by each of the three angles; the angle is the kind of outlier."""

    per_inlier = 3
    kinds = 3

    def __call__(
        self, inliers: Tensor, *, rng: torch.Generator, copy: Tensor | None = None, scene: Scene | None = None
    ) -> Outliers:
        quarter = 1 + (torch.randint(3, (len(inliers),), generator=rng) if copy is None else copy)
        return Outliers(turned(inliers, quarter), quarter)


def turned(images: Shaped[Tensor, "n c h w"], quarters: Int[Tensor, " n"] | int) -> Shaped[Tensor, "n c h w"]:
    """Turn counter-clockwise by quarter turns, exactly: pixels move, none is interpolated."""
    if images.shape[-1] != images.shape[-2]:
        height, width = images.shape[-2:]
        raise FirmError(f"images of {width} x {height} pixels cannot be turned in place; make them square first")
    if isinstance(quarters, int):
        return torch.rot90(images, quarters, dims=(2, 3))
    result = images.clone()
    for quarter in (1, 2, 3):
        chosen = (quarters % 4 == quarter).nonzero().squeeze(1)
        if len(chosen):
            result[chosen] = torch.rot90(images[chosen], quarter, dims=(2, 3))
    return result
