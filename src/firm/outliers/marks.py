"""Strokes: thin bent lines, darker or lighter than the part: cracks, scratches, hairs.

No pasted piece and no ragged mask is as thin as a crack, and what training never shows it does not learn to see.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import cv2
import numpy as np
import torch
from jaxtyping import Float, UInt8
from numpy.typing import NDArray
from torch import Tensor

from firm.outliers.drawing import Levels, Mask, drawn, pixel_of, towards_room
from firm.types import FirmError, Outliers, Scene

POINTS = 24  # of the line
BRANCH = 0.3  # chance that a second line leaves the first


@dataclass(frozen=True, kw_only=True)
class Strokes:
    """A line that begins on the object and wanders; sizes are parts of the longer side."""

    length: tuple[float, float] = (0.06, 0.5)
    width: tuple[float, float] = (0.004, 0.014)  # 1 to 3.5 px of 256
    change: tuple[float, float] = (15.0, 90.0)  # grey levels
    bend: float = 0.25  # radians by which the direction changes from point to point, on average
    per_inlier: int = 1

    def __post_init__(self) -> None:
        for name in ("length", "width", "change"):
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
        return drawn(inliers, self._stroke, rng=rng, scene=scene)

    def _stroke(self, image: Float[Levels, "c h w"], foreground: Mask, rng: np.random.Generator) -> Levels:
        """How much every pixel is to change."""
        side = max(image.shape[1:])
        begin = pixel_of(foreground, rng)
        line = self._line(begin, rng.uniform(*self.length) * side, rng.uniform(0, 2 * math.pi), rng)
        lines = [line]
        if rng.random() < BRANCH:
            middle = line[rng.integers(len(line))]
            lines.append(self._line(middle, rng.uniform(*self.length) * side / 2, rng.uniform(0, 2 * math.pi), rng))
        width = rng.uniform(*self.width) * side
        cover = _covered(image.shape[1:], lines, width)
        return towards_room(image, cover > 0, rng.uniform(*self.change), rng) * cover

    def _line(
        self, begin: NDArray[np.float64], length: float, angle: float, rng: np.random.Generator
    ) -> Float[NDArray[np.float64], "p 2"]:
        """Points (y, x) of a line that changes its direction a little at each."""
        angles = angle + np.cumsum(rng.normal(0, self.bend, POINTS))
        steps = np.stack([np.sin(angles), np.cos(angles)], axis=1) * (length / POINTS)
        return np.concatenate([begin[None], begin + np.cumsum(steps, axis=0)])


def _covered(shape: tuple[int, ...], lines: list[NDArray[np.float64]], width: float) -> Float[Levels, "h w"]:
    """The part of every pixel that lies under the lines, their ends thinner than their middle."""
    cover = np.zeros(shape, np.uint8)
    shift = 4  # bits behind the point
    for line in lines:
        for number, (first, second) in enumerate(pairwise(line)):
            thick = max(1, round(width * math.sin(math.pi * (number + 1) / (len(line) + 1)) ** 0.5))
            begin, end = (np.rint(point[::-1] * 2**shift).astype(int).tolist() for point in (first, second))
            cv2.line(cover, begin, end, 255, thick, cv2.LINE_AA, shift)
    return cover.astype(np.float32) / np.float32(255)
