"""The verdict on an image: PASS, REVIEW or FAIL, with its regions, model and calibration."""

from dataclasses import dataclass

import cv2
import numpy as np
from jaxtyping import Float
from torch import Tensor

from firm.errors import ModelFileError


@dataclass(frozen=True)
class Region:
    """A connected region of heat above the pixel threshold, in pixels of the original image."""

    box: tuple[int, int, int, int]  # top, left, bottom, right; half-open
    area: int
    peak: float


@dataclass(frozen=True)
class Verdict:
    """A decision with its score, thresholds, and the ids of model and calibration."""

    image: str
    score: float
    verdict: str  # PASS, REVIEW or FAIL
    regions: tuple[Region, ...]  # hottest first
    model: str
    calibration: str
    review: float
    fail: float


def regions_of(heat: Float[Tensor, "r c"], threshold: float, height: int, width: int) -> tuple[Region, ...]:
    """The 8-connected regions of a map above the threshold, hottest first; a box covers all pixels of its region."""
    if not bool(heat.isfinite().all()):
        raise ModelFileError("a heat map is not finite, so nothing can be located; fit the detector again")
    values = heat.cpu().numpy()
    rows, columns = values.shape
    above = (values > threshold).astype(np.uint8)
    count, labels, stats, _ = cv2.connectedComponentsWithStats(above, connectivity=8)
    regions = []
    for number in range(1, count):
        left, top, wide, tall, area = (int(value) for value in stats[number])
        inside = labels[top : top + tall, left : left + wide] == number
        peak = float(values[top : top + tall, left : left + wide][inside].max())
        down, across = _spread(top, top + tall, rows, height), _spread(left, left + wide, columns, width)
        scaled = max(1, (2 * area * height * width + rows * columns) // (2 * rows * columns))
        regions.append(Region((down[0], across[0], down[1], across[1]), scaled, peak))
    return tuple(sorted(regions, key=lambda region: (-region.peak, region.box)))


def _spread(begin: int, end: int, cells: int, pixels: int) -> tuple[int, int]:
    """The range of pixels that a range of cells touches."""
    return begin * pixels // cells, -(-end * pixels // cells)
