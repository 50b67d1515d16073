"""Marks: thin scratches, and soft spots in which the part is darker or brighter, its texture unchanged.

A scratch is a crack, scratch or hair: no pasted piece is as thin, and a network learns only what it is shown. A spot is
worn coating, moisture or uneven grinding; small ones are pits: pores, dust, inclusions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import cv2
import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Generator, Tensor

from firm.outliers.drawing import Copy, Levels, Mask, Pixels, altered, check, each_image
from firm.types import Outliers, Scene

POINTS = 24  # of a scratch
BRANCH = 0.3  # chance that a second scratch leaves the first
FRACTION_BITS = 4  # of the coordinates given to OpenCV
MIN_AXIS = 2.5  # px of a spot's half axis: less is invisible
VISIBLE = 8  # grey levels from which a change can be seen
MIN_PIXELS = 16  # of a mark that must be visible
TRIES = 10

Points = NDArray[np.float64]
Draw = Callable[[Levels, Mask, np.random.Generator], Levels]  # image, object -> how much each pixel is to change


@dataclass(frozen=True, kw_only=True)
class Scratches:
    """A line that starts on the object and wanders; sizes are fractions of the longer side."""

    length: tuple[float, float] = (0.06, 0.5)
    width: tuple[float, float] = (0.004, 0.014)  # 1 to 3.5 px of 256
    change: tuple[float, float] = (15.0, 90.0)  # grey levels
    bend: float = 0.25  # mean change of direction from point to point in radians
    per_inlier: int = 1

    kinds = 1

    def __post_init__(self) -> None:
        _check(self, "length", "width", "change")

    def __call__(self, inliers: Tensor, *, rng: Generator, copy: Copy = None, scene: Scene | None = None) -> Outliers:
        return altered(inliers, [drawn_on(self._draw, *image) for image in each_image(inliers, scene, rng=rng)])

    def _draw(self, image: Levels, foreground: Mask, rng: np.random.Generator) -> Levels:
        side = max(image.shape[1:])
        lines = [self._line(_random_pixel(foreground, rng), rng.uniform(*self.length) * side, rng)]
        if rng.random() < BRANCH:
            start = lines[0][rng.integers(len(lines[0]))]
            lines.append(self._line(start, rng.uniform(*self.length) * side / 2, rng))
        cover = _covered(image.shape[1:], lines, rng.uniform(*self.width) * side)
        return _with_sign(rng.uniform(*self.change), image, cover > 0, rng) * cover

    def _line(self, start: Points, length: float, rng: np.random.Generator) -> Float[Points, "p 2"]:
        """Points (y, x) of a line that changes its direction a little at each."""
        angles = rng.uniform(0, 2 * math.pi) + np.cumsum(rng.normal(0, self.bend, POINTS))
        steps = np.stack([np.sin(angles), np.cos(angles)], axis=1) * (length / POINTS)
        return np.concatenate([start[None], start + np.cumsum(steps, axis=0)])


@dataclass(frozen=True, kw_only=True)
class Spots:
    """An ellipse, long or round, that fades towards its edge; sizes are fractions of the longer side."""

    size: tuple[float, float] = (0.05, 0.35)  # shorter half axis
    long: tuple[float, float] = (1.0, 6.0)  # ratio of the axes
    change: tuple[float, float] = (15.0, 70.0)  # grey levels
    per_inlier: int = 1

    kinds = 1

    def __post_init__(self) -> None:
        _check(self, "size", "long", "change")

    def __call__(self, inliers: Tensor, *, rng: Generator, copy: Copy = None, scene: Scene | None = None) -> Outliers:
        return altered(inliers, [drawn_on(self._draw, *image) for image in each_image(inliers, scene, rng=rng)])

    def _draw(self, image: Levels, foreground: Mask, rng: np.random.Generator) -> Levels:
        height, width = image.shape[1:]
        across = max(MIN_AXIS, rng.uniform(*self.size) * max(height, width))
        along = across * math.exp(rng.uniform(math.log(self.long[0]), math.log(self.long[1])))
        angle = rng.uniform(0, math.pi)
        middle = _random_pixel(foreground, rng)
        y, x = np.arange(height, dtype=np.float32)[:, None] - middle[0], np.arange(width, dtype=np.float32) - middle[1]
        u = (math.cos(angle) * x + math.sin(angle) * y) / along
        v = (math.cos(angle) * y - math.sin(angle) * x) / across
        soft = np.clip(1 - (u * u + v * v), 0, 1).astype(np.float32) ** rng.uniform(0.3, 1.0)
        return _with_sign(rng.uniform(*self.change), image, soft > 0, rng) * soft


def drawn_on(draw: Draw, image: Pixels, foreground: Mask | None, rng: np.random.Generator) -> Pixels:
    """The image with a change drawn on its object; drawn again if too little of it is visible."""
    if foreground is None or np.count_nonzero(foreground) < MIN_PIXELS:  # unknown, or a failed segmentation
        foreground = np.ones(image.shape[1:], bool)
    before = image.astype(np.float32)
    for _ in range(TRIES):
        change = np.where(foreground, draw(before, foreground, rng), 0)
        after = np.rint(before + change).clip(0, 255)
        visible = (np.abs(after - before) >= VISIBLE).any(0)
        if np.count_nonzero(visible) >= min(MIN_PIXELS, foreground.size):
            return after.astype(np.uint8)
    change = np.where(foreground, np.where(before < 128, VISIBLE, -VISIBLE), 0)  # so small an object changes as a whole
    return (before + change).astype(np.uint8)


def _check(mark: Scratches | Spots, *ranges: str) -> None:
    bounds = {name: getattr(mark, name) for name in ranges}
    check(mark, *((name, 0 < low <= high, "it must rise and start above 0") for name, (low, high) in bounds.items()))


def _covered(shape: tuple[int, ...], lines: list[Points], width: float) -> Float[Levels, "h w"]:
    """The fraction of every pixel under the lines, which are thinner at their ends."""
    cover = np.zeros(shape, np.uint8)
    for line in lines:
        for number, (first, second) in enumerate(pairwise(line)):
            thick = max(1, round(width * math.sin(math.pi * (number + 1) / (len(line) + 1)) ** 0.5))
            start, end = (np.rint(point[::-1] * 2**FRACTION_BITS).astype(int).tolist() for point in (first, second))
            cv2.line(cover, start, end, 255, thick, cv2.LINE_AA, FRACTION_BITS)
    return cover.astype(np.float32) / np.float32(255)


def _random_pixel(foreground: Mask, rng: np.random.Generator) -> Float[Points, " 2"]:
    inside = np.flatnonzero(foreground)
    return np.array(divmod(int(inside[rng.integers(len(inside))]), foreground.shape[1]), float)


def _with_sign(change: float, image: Levels, at: Mask, rng: np.random.Generator) -> float:
    """The change brighter or darker at random, unless grey levels would exceed their range that way."""
    mean = float(image[:, at].mean()) if at.any() else 128.0
    signed = change * (1 - 2 * int(rng.integers(2)))
    return signed if 0 <= mean + signed <= 255 else -signed
