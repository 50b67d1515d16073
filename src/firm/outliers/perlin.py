"""Perlin masks: the ragged outlines of synthetic defects (section 5; constants of DRAEM and RealNet)."""

from __future__ import annotations

import math
from functools import lru_cache

import cv2
import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import NDArray

from firm.types import FirmError

EXPONENTS = 6  # a side holds 2^0 to 2^5 cells
TURN = 90.0  # degrees, either way
LEVEL = 0.5  # noise above it is mask
TRIES = 50


def perlin_mask(
    height: int,
    width: int,
    *,
    rng: np.random.Generator,
    foreground: Bool[NDArray[np.bool_], "height width"] | None = None,
    least: int = 16,
) -> Bool[NDArray[np.bool_], "height width"]:
    """Thresholded noise on the object, at least `least` pixels of it: one mask in twenty would be empty otherwise.

    A foreground of fewer pixels than that is a failed segmentation: the object is then taken to be everywhere.
    """
    if height * width < least:
        raise FirmError(f"an image of {width} x {height} pixels has no room for an anomaly of {least}; lower `least`")
    if foreground is None or np.count_nonzero(foreground) < least:
        foreground = np.ones((height, width), bool)
    for _ in range(TRIES):
        mask = _turned_noise(height, width, rng) & foreground
        if np.count_nonzero(mask) >= least:
            return mask
    return _rectangle(foreground, least, rng)


def perlin_noise(angles: Float[NDArray[np.float32], "rows columns"], side: int) -> NDArray[np.float32]:
    """One octave of gradient noise of side x side pixels, a unit gradient of the given angle on each cell corner.

    Both blends are matrices of two entries per row, so the noise of all cells is one product.
    """
    blend_y, slope_y = _corners(side, angles.shape[0] - 1)
    blend_x, slope_x = _corners(side, angles.shape[1] - 1)
    left = np.hstack([blend_y @ np.cos(angles), slope_y @ np.sin(angles)])  # side, 2 * columns
    return np.float32(math.sqrt(2)) * (left @ np.vstack([slope_x.T, blend_x.T]))


@lru_cache(maxsize=64)
def _corners(side: int, cells: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Along one axis: the weight of each corner at each pixel, and that weight times the distance to the corner."""
    position = np.arange(side) * cells / side
    offset = position[:, None] - np.arange(cells + 1)  # side, cells + 1
    far = np.minimum(np.abs(offset), 1)
    blend = 1 - far**3 * (6 * far**2 - 15 * far + 10)  # quintic; 0 for the corners of other cells
    return blend.astype(np.float32), (blend * offset).astype(np.float32)


def _turned_noise(height: int, width: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Noise on the next power of two, which any grid divides, turned about its centre and cropped to its middle."""
    side = 1 << (max(height, width) - 1).bit_length()
    finest = max(1, min(EXPONENTS, side.bit_length() - 1))  # cells of one pixel would hold no noise
    rows, columns = 2 ** rng.integers(finest, size=2)
    angles = (2 * math.pi) * rng.random((rows + 1, columns + 1), dtype=np.float32)
    turn = cv2.getRotationMatrix2D(((side - 1) / 2, (side - 1) / 2), rng.uniform(-TURN, TURN), 1.0)
    turn[:, 2] -= (side - width) // 2, (side - height) // 2
    return cv2.warpAffine(perlin_noise(angles, side), turn, (width, height), flags=cv2.INTER_LINEAR) > LEVEL


def _rectangle(foreground: NDArray[np.bool_], least: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """The part of the object in a rectangle about one of its pixels, grown until large enough."""
    height, width = foreground.shape
    y, x = divmod(int(rng.choice(np.flatnonzero(foreground))), width)
    tall, wide = (int(half) for half in rng.integers(2, 3 + max(height, width) // 8, size=2))
    mask = np.zeros_like(foreground)
    while np.count_nonzero(mask) < least:
        box = slice(max(0, y - tall), y + tall + 1), slice(max(0, x - wide), x + wide + 1)
        mask[box] = foreground[box]
        tall, wide = 2 * tall, 2 * wide
    return mask
