"""Perlin blend: another good image, distorted, shows through a Perlin mask (section 5; the rule of RealNet's SIA).

The paper blends images of a diffusion model (`firm.outliers.sia`). Here other good images take their place, or those
of a folder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import cv2
import numpy as np
from jaxtyping import Bool, Float, Int, UInt8
from numpy.typing import NDArray
from torch import Generator, Tensor

from firm.errors import SettingError
from firm.outliers.drawing import Copy, Levels, Mask, Pixels, altered, check, each_image
from firm.outliers.generated import generated_donor
from firm.types import Outliers, Scene

Bytes = NDArray[np.uint8]
Places = Int[NDArray[np.intp], " k"]  # of pixels in the flattened image

VISIBLE = 8.0  # grey levels by which a blob must differ on average, without its grain: less is label noise
GRAIN = 1 / 50  # of the side: detail finer than this is grain
BEND = 0.03  # of the side: the elastic warp
KNOTS = 6  # of it along each side
TRIES = 10
STRONGER = 0.3  # by which each try exceeds the one before
SHIFT = 48  # grey levels of the last resort
LINE = 16384  # pixels; OpenCV samples no longer ones
EXPONENTS = 6  # a side of the noise holds 2^0 to 2^5 cells
TURN = 90.0  # degrees by which it is turned, either way
LEVEL = 0.5  # noise above it is mask
MASKS = 50  # drawn before a rectangle takes their place


@dataclass(frozen=True)
class Look:
    """What is done to the tones of a donor: values are drawn within the bounds, shifts of either sign."""

    contrast: tuple[float, float]
    shift: tuple[float, float]  # grey levels, all channels alike
    tint: float = 0.0  # grey levels, each channel on its own
    blur: float = 0.0  # of the side


LOOKS = {
    "misplaced": Look(contrast=(0.8, 1.3), shift=(10, 35)),  # structure where it does not belong
    "stained": Look(contrast=(0.5, 1.1), shift=(35, 80), tint=45),  # oil, rust, discolouring
    "smeared": Look(contrast=(0.4, 0.9), shift=(15, 60), tint=15, blur=0.05),  # rubbed, molten, out of focus
    "inverted": Look(contrast=(-1.3, -0.6), shift=(0, 30)),  # light and shade change places: dents, bumps
    "plain": Look(contrast=(0.0, 0.2), shift=(30, 120), tint=15),  # foreign or missing material, grain is left
}


@dataclass(frozen=True, kw_only=True)
class PerlinBlend:
    """Another good image, moved, bent and recoloured, blended into the object inside a Perlin mask."""

    strength: float = 1.0  # of the distortion; at 0 the donor is only moved
    opacity: tuple[float, float] = (0.5, 1.0)
    folder: str = ""  # of ready-made anomalies of the class, used unchanged, such as sdas/screw of RealNet's SIA
    least: int = 16  # pixels an anomaly must have
    per_inlier: int = 1

    kinds = 1

    def __post_init__(self) -> None:
        check(
            self,
            ("strength", self.strength >= 0, "use 0 for moved donors, 1 to distort them"),
            ("opacity", 0 < self.opacity[0] <= self.opacity[1] <= 1, "it must rise within 0..1, from above 0"),
            ("least", self.least >= 1, "an anomaly has at least 1 pixel"),
        )

    def __call__(self, inliers: Tensor, *, rng: Generator, copy: Copy = None, scene: Scene | None = None) -> Outliers:
        if scene is None or not len(scene.donors):
            pool = _Pool(inliers.cpu().numpy())
        else:
            pool = _Pool(scene.donors.cpu().numpy(), scene.donor_foreground.cpu().numpy())
        return altered(inliers, [self._altered(pool, *image) for image in each_image(inliers, scene, rng=rng)])

    def _altered(self, pool: _Pool, image: Pixels, foreground: Mask | None, rng: np.random.Generator) -> Pixels:
        """The image with a donor blended in; an invisible change is drawn again, stronger."""
        outlier = image.copy()
        for attempt in range(TRIES):
            mask = perlin_mask(*image.shape[1:], rng=rng, foreground=foreground, least=self.least)
            at = np.flatnonzero(mask)
            before = _taken(image, at)
            donor = self._donor(image, at, pool, self.strength + STRONGER * attempt, rng)
            after = np.rint(before + rng.uniform(*self.opacity) * (donor - before))
            changed = _visible(after - before, at, mask) & (after != before).any(0)
            if np.count_nonzero(changed) >= self.least:
                outlier.reshape(len(image), -1)[:, at[changed]] = after[:, changed].astype(np.uint8)
                return outlier
        # no donor differs from such an image, so its brightness changes
        outlier.reshape(len(image), -1)[:, at] = np.where(before < 128, before + SHIFT, before - SHIFT)
        return outlier

    def _donor(
        self, image: Pixels, at: Places, pool: _Pool, strength: float, rng: np.random.Generator
    ) -> Float[Levels, "c k"]:
        """What a donor shows in place of these pixels; only these are computed."""
        if self.folder:
            return _taken(generated_donor(self.folder, image, rng), at)
        number = pool.other_than(image, rng)
        donor = pool.images[number]
        look = list(LOOKS.values())[rng.integers(len(LOOKS))]
        blur = 2 * round(look.blur * strength * max(image.shape[1:]) / 2) + 1
        joined = cv2.merge(list(donor))
        soft = cv2.blur(joined, (blur, blur)) if blur > 1 else joined
        return _toned(_placed(soft, at, pool.place(number, rng), strength, rng), look, strength, rng)


def _taken(image: Pixels | Levels, at: Places) -> Float[Levels, "c k"]:
    return image.reshape(len(image), -1).take(at, axis=1).astype(np.float32)


@dataclass(frozen=True)
class _Pool:
    """Images to take donors from, and where the object is in each if that is known."""

    images: UInt8[Bytes, "m c h w"]
    foreground: Bool[Mask, "m h w"] | None = None

    def other_than(self, image: Pixels, rng: np.random.Generator) -> int:
        """A random image, the next one if it is the very same; a lone image is its own donor."""
        number = int(rng.integers(len(self.images)))
        return (number + 1) % len(self.images) if np.array_equal(self.images[number], image) else number

    def place(self, number: int, rng: np.random.Generator) -> tuple[int, int]:
        """A pixel of the object: a donor of mostly background would hardly show anything else."""
        height, width = self.images.shape[2:]
        inside = np.arange(0) if self.foreground is None else np.flatnonzero(self.foreground[number])
        y, x = divmod(int(inside[rng.integers(len(inside))] if len(inside) else rng.integers(height * width)), width)
        return y, x


def _placed(
    donor: Bytes, at: Places, source: tuple[int, int], strength: float, rng: np.random.Generator
) -> Float[Levels, "c k"]:
    """The donor shifted, turned, flipped and bent such that one of the pixels shows `source`."""
    side = max(donor.shape[:2])
    y, x = (line.astype(np.float32) for line in np.divmod(at, donor.shape[1]))
    pivot, angle, flip = int(rng.integers(len(at))), rng.uniform(0, 2 * math.pi), 1 - 2 * int(rng.integers(2))
    down, right = y - y[pivot], (x - x[pivot]) * flip
    knots = rng.standard_normal((KNOTS, KNOTS, 2), dtype=np.float32) * (strength * BEND * side)
    bend_x, bend_y = _sampled(knots, x * ((KNOTS - 1) / side), y * ((KNOTS - 1) / side))
    cos, sin = math.cos(angle), math.sin(angle)
    return _sampled(donor, source[1] + cos * right - sin * down + bend_x, source[0] + sin * right + cos * down + bend_y)


def _sampled(image: NDArray[Any], x: Levels, y: Levels) -> Float[Levels, "c k"]:
    """The image between its pixels, mirrored beyond its edges; in lines no longer than OpenCV takes."""
    lines = -(-len(x) // LINE)
    shape = lines, -(-len(x) // lines)
    shown = cv2.remap(image, np.resize(x, shape), np.resize(y, shape), cv2.INTER_LINEAR, None, cv2.BORDER_REFLECT_101)
    return shown.reshape(shape[0] * shape[1], -1)[: len(x)].T.astype(np.float32)


def _toned(placed: Float[Levels, "c k"], look: Look, strength: float, rng: np.random.Generator) -> Float[Levels, "c k"]:
    """New contrast about the mean and a new mean; a camera without colour sees no tint."""
    mean = placed.mean(axis=1, keepdims=True)
    tint = look.tint * rng.uniform(-1, 1, mean.shape) * (np.ptp(mean) > 1)
    shift = strength * (rng.choice([-1, 1]) * rng.uniform(*look.shift) + tint)
    shift = np.where((mean + shift < 0) | (mean + shift > 255), -shift, shift)  # to where there is room
    contrast = 1 + strength * (rng.uniform(*look.contrast) - 1)
    return ((mean * (1 - contrast) + shift).astype(np.float32) + contrast * placed).clip(0, 255)


def _visible(change: Float[Levels, "c k"], at: Places, mask: Mask) -> Bool[Mask, " k"]:
    """Which pixels lie in a blob whose change is VISIBLE, grain averaged away in cells of a few pixels."""
    width = max(2, round(GRAIN * max(mask.shape)))
    y, x = np.divmod(at, mask.shape[1])
    cell = y // width * mask.shape[1] + x // width
    total = sum(np.abs(np.bincount(cell, channel)) for channel in change)
    smooth = total / np.maximum(np.bincount(cell), 1) / len(change)
    _, blobs = cv2.connectedComponents(mask.view(np.uint8), connectivity=8)
    blob = blobs.take(at)
    return (np.bincount(blob, smooth[cell]) >= VISIBLE * np.bincount(blob))[blob]


# --- Perlin masks: the ragged outlines (constants of DRAEM and RealNet) ---


def perlin_mask(
    height: int, width: int, *, rng: np.random.Generator, foreground: Bool[Mask, "h w"] | None = None, least: int = 16
) -> Bool[Mask, "h w"]:
    """Thresholded noise on the object, at least `least` pixels of it; one mask in twenty would be empty otherwise."""
    if height * width < least:
        small = f"an image of {width} x {height} pixels"
        raise SettingError(f"{small} has no room for an anomaly of {least}; lower `least`")
    if foreground is None or np.count_nonzero(foreground) < least:  # unknown, or a failed segmentation
        foreground = np.ones((height, width), bool)
    for _ in range(MASKS):
        mask = _turned_noise(height, width, rng) & foreground
        if np.count_nonzero(mask) >= least:
            return mask
    return _rectangle(foreground, least, rng)


def perlin_noise(angles: Float[NDArray[np.float32], "rows columns"], side: int) -> NDArray[np.float32]:
    """One octave of gradient noise of side x side pixels, a unit gradient of the given angle on each cell corner."""
    # both blends are matrices of two entries per row, so the noise of all cells is one product
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
