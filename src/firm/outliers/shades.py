"""Shades: a soft-edged spot or band in which the part is darker or lighter, its own texture still there.

Worn coating, moisture, uneven grinding: nothing is added that could be recognised, only the light of a region. Small
ones are pits: pores, dust, inclusions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from firm.outliers.drawing import Levels, Mask, drawn, pixel_of, towards_room
from firm.types import FirmError, Outliers, Scene

FINEST = 2.5  # px of a half axis: less is not seen


@dataclass(frozen=True, kw_only=True)
class Shades:
    """An ellipse, long or round, whose light fades towards its edge; sizes are parts of the longer side."""

    size: tuple[float, float] = (0.05, 0.35)  # half axis across
    long: tuple[float, float] = (1.0, 6.0)  # the other axis in units of it
    change: tuple[float, float] = (15.0, 70.0)  # grey levels
    per_inlier: int = 1

    def __post_init__(self) -> None:
        for name in ("size", "long", "change"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise FirmError(f"outliers.{name} is {low, high}; it must rise and start above 0")
        if self.per_inlier < 1:
            raise FirmError(f"outliers.per_inlier is {self.per_inlier}; there must be at least 1 outlier to an inlier")

    @property
    def kinds(self) -> int:
        return 1

    def __call__(
        self,
        inliers: UInt8[Tensor, "n c h w"],
        *,
        rng: torch.Generator,
        copy: Tensor | None = None,
        scene: Scene | None = None,
    ) -> Outliers:
        return drawn(inliers, self._shade, rng=rng, scene=scene)

    def _shade(self, image: Float[Levels, "c h w"], foreground: Mask, rng: np.random.Generator) -> Levels:
        """How much every pixel is to change."""
        height, width = image.shape[1:]
        across = max(FINEST, rng.uniform(*self.size) * max(height, width))
        along = across * math.exp(rng.uniform(math.log(self.long[0]), math.log(self.long[1])))
        angle = rng.uniform(0, math.pi)
        middle = pixel_of(foreground, rng)
        y, x = np.arange(height, dtype=np.float32)[:, None] - middle[0], np.arange(width, dtype=np.float32) - middle[1]
        u = (math.cos(angle) * x + math.sin(angle) * y) / along
        v = (math.cos(angle) * y - math.sin(angle) * x) / across
        soft = np.clip(1 - (u * u + v * v), 0, 1).astype(np.float32) ** rng.uniform(0.3, 1.0)
        return towards_room(image, soft > 0, rng.uniform(*self.change), rng) * soft
