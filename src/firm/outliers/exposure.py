"""Outlier Exposure: images of anything else stand in for the outliers (section 3.4 (c))."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from firm.data.exposure import Pool, exposure
from firm.outliers.rotations import turned
from firm.types import FirmError, Outliers, Scene


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """Every outlier slot is filled with a random image of the pool: still three outliers to an inlier.

    `path` names an .npy array or a folder of images; empty means the exposure set under the data root.
    `rotate` turns each drawn image by one of the three angles, which then is its kind ("OE (rot.)").
    """

    path: str = ""
    rotate: bool = False
    per_inlier = 3

    @property
    def kinds(self) -> int:
        return 3 if self.rotate else 1

    def __call__(
        self, inliers: Tensor, *, rng: torch.Generator, copy: Tensor | None = None, scene: Scene | None = None
    ) -> Outliers:
        n, _, height, width = inliers.shape
        if height != width:
            raise FirmError(
                f"images of {width} x {height} pixels cannot stand beside exposure images; make them square"
            )
        pool = _open(self.path)
        images = pool.take(torch.randint(len(pool), (n,), generator=rng), width)
        if not self.rotate:
            return Outliers(images, torch.ones(n, dtype=torch.long))
        quarter = torch.randint(1, 4, (n,), generator=rng)
        return Outliers(turned(images, quarter), quarter)


@lru_cache(maxsize=4)
def _open(path: str) -> Pool:
    return exposure(Path(path) if path else None)
