"""The verdict on an image: PASS, REVIEW or FAIL, with its regions, model and calibration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from firm.decision.regions import candidates
from firm.errors import ModelFileError, SettingError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL = 4.5  # inches


@dataclass(frozen=True)
class Region:
    """A connected region around a peak of heat above the pixel threshold, in pixels of the original image."""

    box: tuple[int, int, int, int]  # top, left, bottom, right; half-open
    area: int
    peak: float


@dataclass(frozen=True)
class Shown:
    """An image, and the heat map that its verdict rests on."""

    picture: UInt8[Any, "h w 3"]
    heat: Float[Tensor, "r c"] | None  # over the whole image, at any resolution; None without maps
    pixel: float | None  # the heat above which its regions begin

    @property
    def map(self) -> Float[Any, "h w"]:
        """The heat map in the pixels of the image."""
        if self.heat is None:
            raise SettingError("this detector scores whole images and has no heat maps; fit one of patches")
        return cv2.resize(self.heat.cpu().numpy(), self.picture.shape[1::-1], interpolation=cv2.INTER_LINEAR)

    @property
    def marked(self) -> Bool[Any, "r c"] | None:
        """The regions in the pixels of the heat map; None without maps."""
        if self.heat is None or self.pixel is None:
            return None
        return marked(self.heat.cpu().numpy(), self.pixel)

    @property
    def mask(self) -> Bool[Any, "h w"]:
        """The regions in the pixels of the image."""
        if (found := self.marked) is None:
            return np.zeros(self.picture.shape[:2], bool)
        size = self.picture.shape[1::-1]
        return cv2.resize(found.astype(np.uint8), size, interpolation=cv2.INTER_NEAREST_EXACT) > 0


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

    @property
    def map(self) -> Float[Any, "h w"]:
        """The heat map in the pixels of the image, of a verdict of `Detector.inspect`."""
        return self._shown().map

    @property
    def mask(self) -> Bool[Any, "h w"]:
        """The pixels of its regions, of a verdict of `Detector.inspect`."""
        return self._shown().mask

    def plot(self) -> Figure:
        """The image with its regions, and its heat map, as a matplotlib figure; for a verdict of `Detector.inspect`."""
        return figure_of(self, self._shown())

    def showing(self, show: Callable[[], Shown]) -> Verdict:
        """The verdict, which now knows its image and heat map; these are no part of its value."""
        object.__setattr__(self, "_show", show)
        return self

    def _shown(self) -> Shown:
        show: Callable[[], Shown] | None = getattr(self, "_show", None)
        if show is None:
            raise SettingError(f"this verdict on {self.image} has no image to show; use detector.inspect(image)")
        return show()

    def __getstate__(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


def figure_of(verdict: Verdict, shown: Shown) -> Figure:
    """The image with the boxes of its regions; beside it the heat map, in one scale for all images of a detector."""
    from matplotlib.figure import Figure  # late: it takes long to import
    from matplotlib.patches import Rectangle

    height, width = shown.picture.shape[:2]
    panels = 1 if shown.heat is None else 2
    figure = Figure(figsize=(PANEL * panels, PANEL), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    grey = np.repeat(shown.picture.mean(2, keepdims=True).astype(np.uint8), 3, axis=2)
    for axis, picture in zip(axes, (shown.picture, grey), strict=False):
        axis.imshow(picture)
        axis.axis("off")
    for region in verdict.regions:
        top, left, bottom, right = region.box
        frame = Rectangle((left - 0.5, top - 0.5), right - left, bottom - top, fill=False, edgecolor="red")
        axes[0].add_patch(frame)
    if shown.heat is not None:
        half = verdict.review if verdict.review > 0 else 1.0
        limits = {"vmin": verdict.review - half, "vmax": verdict.review + half}
        extent = (-0.5, width - 0.5, height - 0.5, -0.5)
        heat = axes[1].imshow(shown.heat.cpu().numpy(), cmap="inferno", alpha=0.7, extent=extent, **limits)
        figure.colorbar(heat, ax=axes[1], shrink=0.8)
    figure.suptitle(f"{verdict.verdict}  {verdict.score:.4g}")
    return figure


def marked(heat: Float[Any, "r c"], threshold: float) -> Bool[Any, "r c"]:
    """The pixels of all regions of a map."""
    labels, _, kept = _components(heat, threshold)
    return np.asarray(kept[labels])


def regions_of(heat: Float[Tensor, "r c"], threshold: float, height: int, width: int) -> tuple[Region, ...]:
    """The 8-connected parts of a map with a peak above the threshold, hottest first; a box covers all of its pixels."""
    if not bool(heat.isfinite().all()):
        raise ModelFileError("a heat map is not finite, so nothing can be located; fit the detector again")
    values = heat.cpu().numpy()
    rows, columns = values.shape
    labels, stats, kept = _components(values, threshold)
    regions = []
    for number in np.flatnonzero(kept):
        left, top, wide, tall, area = (int(value) for value in stats[number])
        inside = labels[top : top + tall, left : left + wide] == number
        peak = float(values[top : top + tall, left : left + wide][inside].max())
        down, across = _spread(top, top + tall, rows, height), _spread(left, left + wide, columns, width)
        scaled = max(1, (2 * area * height * width + rows * columns) // (2 * rows * columns))
        regions.append(Region((down[0], across[0], down[1], across[1]), scaled, peak))
    return tuple(sorted(regions, key=lambda region: (-region.peak, region.box)))


def _components(
    heat: Float[Any, "r c"], threshold: float
) -> tuple[Int[Any, "r c"], Int[Any, "parts 5"], Bool[Any, " parts"]]:
    """The connected parts of what is no halo: the number of each pixel's, their extents, and which are regions."""
    hot = heat > threshold
    if not hot.any():  # of most good images
        return np.zeros(heat.shape, np.int32), np.zeros((1, 5), np.int32), np.zeros(1, bool)
    count, labels, stats, _ = cv2.connectedComponentsWithStats(candidates(heat, threshold).astype(np.uint8))
    kept = np.zeros(count, bool)
    kept[labels[hot]] = True
    kept[0] = False  # the halo
    return labels, stats, kept


def _spread(begin: int, end: int, cells: int, pixels: int) -> tuple[int, int]:
    """The range of pixels that a range of cells touches."""
    return begin * pixels // cells, -(-end * pixels // cells)
