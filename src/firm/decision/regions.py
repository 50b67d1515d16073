"""Which pixels of a heat map a defect covers: hysteresis around peaks, without the halo.

A patch is hot as soon as it touches a defect, and the map is interpolated and smoothed, so all that is above a
threshold is several times as large as the defect. Of NumPy alone: exports decide by this very text.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

HALO = 32  # px of the map that a halo reaches from its peak
SHARE = 0.6  # of the hottest heat so near, and of the threshold: a defect has more


def candidates(heat: Array, threshold: float) -> Array:
    """The pixels that are no halo; a connected part of them is a region if its peak is above the threshold."""
    zero = np.float32(min(threshold, 0.0))
    around = np.maximum(hottest(heat, HALO), np.float32(threshold))
    return np.asarray(heat - zero > np.float32(SHARE) * (around - zero))


def start(heat: Array, threshold: float) -> float:
    """The heat above which regions of an image that does not PASS begin: it has one at least, at its hottest place."""
    peak = heat.max()
    return float(np.nextafter(peak, np.float32(-np.inf))) if 0 < peak <= threshold else threshold


def hottest(heat: Array, reach: int) -> Array:
    """The maximum in the square of so many pixels to every side of each pixel."""
    for _ in range(2):
        length, width, span = len(heat), 2 * reach + 1, 1
        heat = np.pad(heat, ((reach, reach), (0, 0)), mode="edge")
        while 2 * span <= width:
            heat, span = np.maximum(heat[:-span], heat[span:]), 2 * span
        heat = np.maximum(heat[:length], heat[width - span :][:length]).T
    return heat
