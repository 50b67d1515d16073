"""Donor outliers: another good image, distorted, shows through a Perlin mask (section 5; the rule of RealNet's SIA).

The paper blends images of a diffusion model; their folder can be named, and without it good images take their place.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor

from firm.images import SUFFIXES, decode
from firm.outliers.perlin import perlin_mask
from firm.types import FirmError, Outliers, Scene

Bytes = NDArray[np.uint8]
Levels = NDArray[np.float32]  # of pixels, 0..255
Mask = NDArray[np.bool_]
Places = Int[NDArray[np.intp], " k"]  # of pixels in the flattened image

VISIBLE = 8.0  # grey levels by which a blob must differ on average, its grain smoothed away: less is label noise
GRAIN = 1 / 50  # of the side: detail finer than this is grain
BEND = 0.03  # of the side: the elastic warp
KNOTS = 6  # of it along each side
TRIES = 10
STRONGER = 0.3  # by which each try exceeds the one before
LIGHT = 48  # grey levels of the last resort
LINE = 16384  # pixels; OpenCV samples no longer ones
KEPT = 512  # images of a folder held in memory, about 100 MB at 256 px


@dataclass(frozen=True)
class Look:
    """What is done to the tones of a donor: levels are drawn within the bounds, shifts go either way."""

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
class Donor:
    """Another good image, moved, bent and recoloured, blended into the object inside a Perlin mask.

    `folder` names ready-made anomalies of the class (such as sdas/screw of RealNet's SIA), used as they are.
    """

    strength: float = 1.0  # of the distortion; at 0 the donor is only moved
    opacity: tuple[float, float] = (0.5, 1.0)
    folder: str = ""
    least: int = 16  # pixels an anomaly must have
    per_inlier: int = 1

    def __post_init__(self) -> None:
        if self.strength < 0:
            raise FirmError(f"outliers.strength is {self.strength}; use 0 for moved donors, 1 for distorted ones")
        if not 0 < self.opacity[0] <= self.opacity[1] <= 1:
            raise FirmError(f"outliers.opacity {self.opacity} must rise within 0..1 and not start at 0")
        if self.least < 1:
            raise FirmError(f"outliers.least is {self.least}; an anomaly must have at least 1 pixel")
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
        pool = self._pool(inliers, scene)
        images = inliers.flatten(2).cpu().numpy().copy()  # n, c, h * w
        where = np.zeros((len(images), images.shape[2]), bool)
        seeds = torch.randint(2**62, (len(images),), generator=rng).tolist()
        for i, seed in enumerate(seeds):  # a stream each, so that redrawing one shifts no other
            foreground = None if scene is None else scene.foreground[i].cpu().numpy()
            at, after = self._altered(inliers[i].cpu().numpy(), pool, foreground, np.random.default_rng(seed))
            images[i][:, at] = after
            where[i, at] = True
        made = torch.from_numpy(images).view_as(inliers), torch.from_numpy(where).view_as(inliers[:, 0])
        group = torch.ones(len(images), dtype=torch.long)
        return Outliers(made[0].to(inliers.device), group.to(inliers.device), made[1].to(inliers.device))

    def _pool(self, inliers: Tensor, scene: Scene | None) -> _Pool:
        if self.folder:
            return _Pool(_folder_images(self.folder, *inliers.shape[1:]))
        if scene is None or not len(scene.donors):
            return _Pool(inliers.cpu().numpy())
        return _Pool(scene.donors.cpu().numpy(), scene.donor_foreground.cpu().numpy())

    def _altered(
        self, image: UInt8[Bytes, "c h w"], pool: _Pool, foreground: Mask | None, rng: np.random.Generator
    ) -> tuple[Places, UInt8[Bytes, "c k"]]:
        """The pixels that change and their new values; what nobody would see is drawn again, stronger."""
        for attempt in range(TRIES):
            mask = perlin_mask(*image.shape[1:], rng=rng, foreground=foreground, least=self.least)
            at = np.flatnonzero(mask)
            before = _taken(image, at)
            donor = self._donor(image, at, pool, self.strength + STRONGER * attempt, rng)
            after = np.rint(before + rng.uniform(*self.opacity) * (donor - before))
            changed = _visible(after - before, at, mask) & (after != before).any(0)
            if np.count_nonzero(changed) >= self.least:
                return at[changed], after[:, changed].astype(np.uint8)
        # nothing differs from such an image: its light must
        return at, np.where(before < 128, before + LIGHT, before - LIGHT).astype(np.uint8)

    def _donor(
        self, image: UInt8[Bytes, "c h w"], at: Places, pool: _Pool, strength: float, rng: np.random.Generator
    ) -> Float[Levels, "c k"]:
        """What a donor shows in place of these pixels; no others of it are ever made."""
        number = pool.other_than(image, rng)
        donor = pool.images[number]
        if self.folder:
            return _taken(donor, at)
        look = list(LOOKS.values())[rng.integers(len(LOOKS))]
        blur = 2 * round(look.blur * strength * max(image.shape[1:]) / 2) + 1
        joined = cv2.merge(list(donor))
        soft = cv2.blur(joined, (blur, blur)) if blur > 1 else joined
        return _toned(_placed(soft, at, pool.place(number, rng), strength, rng), look, strength, rng)


def _taken(image: UInt8[Bytes, "c h w"], at: Places) -> Float[Levels, "c k"]:
    return image.reshape(len(image), -1).take(at, axis=1).astype(np.float32)


@dataclass(frozen=True)
class _Pool:
    """Images to take donors from, and where the object is in each if that is known."""

    images: UInt8[Bytes, "m c h w"]
    foreground: Bool[Mask, "m h w"] | None = None

    def other_than(self, image: UInt8[Bytes, "c h w"], rng: np.random.Generator) -> int:
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
    smooth = sum(np.abs(np.bincount(cell, one)) for one in change) / np.maximum(np.bincount(cell), 1) / len(change)
    _, blobs = cv2.connectedComponents(mask.view(np.uint8), connectivity=8)
    blob = blobs.take(at)
    return (np.bincount(blob, smooth[cell]) >= VISIBLE * np.bincount(blob))[blob]


@lru_cache(maxsize=2)
def _folder_images(folder: str, channels: int, height: int, width: int) -> UInt8[Bytes, "m c h w"]:
    """At most KEPT images of the folder, evenly over their names, at the size of the inliers.

    A damaged file is warned about by name and left out: it never costs the good ones.
    """
    files, images = _files(Path(folder)), []
    for number in np.linspace(0, len(files) - 1, min(KEPT, len(files))).round().astype(int):
        try:
            images.append(_fitted(decode(files[number]), channels, height, width))
        except FirmError as error:
            warnings.warn(f"left out: {error}", stacklevel=2)
    if not images:
        raise FirmError(f"outliers.folder {folder} has no image that can be decoded; put images of anomalies into it")
    return np.stack(images)


def _fitted(image: UInt8[Bytes, "h w 3"], channels: int, height: int, width: int) -> UInt8[Bytes, "c h2 w2"]:
    seen = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY) if channels == 1 else image
    resized = np.asarray(cv2.resize(seen, (width, height), interpolation=cv2.INTER_AREA), np.uint8)
    return resized.reshape(height, width, channels).transpose(2, 0, 1)


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise FirmError(f"outliers.folder {folder} is not a folder; name one that holds images of anomalies")
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in SUFFIXES and f.name[0] != "." and f.is_file())
    if not files:
        inner = sorted(f.name for f in folder.iterdir() if f.is_dir())
        fix = f"name one of its classes, such as {folder / inner[0]}" if inner else "put images of anomalies into it"
        raise FirmError(f"outliers.folder {folder} holds no image; {fix}")
    return files
