"""What is said of an inspected image: PASS, REVIEW or FAIL, where, and by which model and calibration."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt
from jaxtyping import Float, UInt8
from torch import Tensor

from firm.localiser import Look
from firm.types import FirmError


@dataclass(frozen=True)
class Region:
    """Connected heat above the threshold of pixels, in pixels of the image as it came."""

    box: tuple[int, int, int, int]  # top, left, bottom, right; half-open
    area: int
    peak: float


@dataclass(frozen=True)
class Verdict:
    """All that is needed to defend a decision: the score, both thresholds, and the ids of what set them."""

    image: str
    score: float
    verdict: str  # PASS, REVIEW or FAIL
    regions: tuple[Region, ...]  # hottest first
    model: str
    calibration: str
    review: float
    fail: float


@dataclass(frozen=True)
class Examined:
    """A verdict, the image as it came and how bright, the heat over it and the look at it.

    There is no heat and no look where images are compared as one.
    """

    verdict: Verdict
    picture: UInt8[npt.NDArray[np.uint8], "h w 3"]
    light: float  # its mean grey level, 0 to 1
    heat: Float[Tensor, "r c"] | None
    look: Look | None


def regions_of(heat: Float[Tensor, "r c"], threshold: float, height: int, width: int) -> tuple[Region, ...]:
    """The connected parts (corners touch) of a map that lie above the threshold, the hottest first.

    However small one is, it is kept: the threshold bounds how often a good part has any heat above it, specks
    included, and the map is smooth already. A box covers every pixel of the image that its part touches.
    """
    if not bool(heat.isfinite().all()):
        raise FirmError("a heat map is not finite, so nothing can be located; fit the detector again")
    values = heat.cpu().numpy()
    rows, columns = values.shape
    above = (values > threshold).astype(np.uint8)
    count, labels, facts, _ = cv2.connectedComponentsWithStats(above, connectivity=8)
    found = []
    for number in range(1, count):
        left, top, wide, tall, area = (int(fact) for fact in facts[number])
        inside = labels[top : top + tall, left : left + wide] == number
        peak = float(values[top : top + tall, left : left + wide][inside].max())
        down, across = _spread(top, top + tall, rows, height), _spread(left, left + wide, columns, width)
        scaled = max(1, (2 * area * height * width + rows * columns) // (2 * rows * columns))
        found.append(Region((down[0], across[0], down[1], across[1]), scaled, peak))
    return tuple(sorted(found, key=lambda region: (-region.peak, region.box)))


def _spread(begin: int, end: int, cells: int, pixels: int) -> tuple[int, int]:
    """The pixels that the cells from `begin` to before `end` touch, of as many as lie along all cells."""
    return begin * pixels // cells, -(-end * pixels // cells)
