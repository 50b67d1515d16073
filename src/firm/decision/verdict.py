"""The verdict on an image: PASS, REVIEW or FAIL, with its regions, model and calibration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from jaxtyping import Float, UInt8
from torch import Tensor

from firm.errors import ModelFileError, SettingError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL = 4.5  # inches


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

    def plot(self) -> Figure:
        """The image with its regions, and its heat map, as a matplotlib figure; for a verdict of `Detector.inspect`."""
        draw: Callable[[], Figure] | None = getattr(self, "_draw", None)
        if draw is None:
            raise SettingError(f"this verdict on {self.image} has no image to plot; use detector.inspect(image).plot()")
        return draw()

    def drawn_by(self, draw: Callable[[], Figure]) -> Verdict:
        """The verdict, which now knows how to plot itself; this is no part of its value."""
        object.__setattr__(self, "_draw", draw)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


def figure_of(verdict: Verdict, picture: UInt8[Any, "h w 3"], heat: Float[Tensor, "r c"] | None) -> Figure:
    """The image with the boxes of its regions; beside it the heat map, in one scale for all images of a detector."""
    from matplotlib.figure import Figure  # late: it takes long to import
    from matplotlib.patches import Rectangle

    height, width = picture.shape[:2]
    panels = 1 if heat is None else 2
    figure = Figure(figsize=(PANEL * panels, PANEL), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for axis in axes:
        axis.imshow(picture)
        axis.axis("off")
    for region in verdict.regions:
        top, left, bottom, right = region.box
        frame = Rectangle((left - 0.5, top - 0.5), right - left, bottom - top, fill=False, edgecolor="red")
        axes[0].add_patch(frame)
    if heat is not None:
        half = verdict.review if verdict.review > 0 else 1.0
        limits = {"vmin": verdict.review - half, "vmax": verdict.review + half}
        extent = (-0.5, width - 0.5, height - 0.5, -0.5)
        shown = axes[1].imshow(heat.cpu().numpy(), cmap="turbo", alpha=0.6, extent=extent, **limits)
        figure.colorbar(shown, ax=axes[1], shrink=0.8)
    figure.suptitle(f"{verdict.verdict}  {verdict.score:.4g}")
    return figure


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
