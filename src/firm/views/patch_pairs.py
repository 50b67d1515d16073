"""Foreground-aware patch pairs (section 5): two overlapping windows of the image itself, unchanged unless asked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import cv2
import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from firm.colour import Jitter, jittered
from firm.types import FirmError, Focus

Whole: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Places:
    """Top and left of the two patches of each image, and whether what was asked of them could be had."""

    first: Int[Tensor, "n 2"]
    second: Int[Tensor, "n 2"]
    size: int
    accepted: Bool[Tensor, " n"]


@dataclass(frozen=True, kw_only=True)
class PatchPairs:
    """The thresholds are the paper's; a fraction is of the patch, since no patch holds 0.9 of most objects."""

    sizes: tuple[int, ...] = (32,)  # one of them is drawn per batch
    fore: float = 0.9  # tau_fore: least part of a good image's first patch that is object
    over: float = 0.15  # tau_over: least part of a patch that its partner shares
    tries: int = 50  # candidates for a patch; if none will do, the best of them is taken
    altered: float = 0.0  # least part of an outlier's first patch that is altered; 0: one pixel, as in the paper
    both: bool = False  # demand it of the second patch of an outlier too
    light: float = 0.0  # part by which brightness and contrast of every patch vary; the paper changes nothing

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 2:
            raise FirmError(f"views.sizes is {list(self.sizes)}; give at least one size, each of 2 pixels or more")
        if not 0 <= self.fore <= 1 or not 0 <= self.altered <= 1:
            raise FirmError(f"views.fore {self.fore} and views.altered {self.altered} must lie in 0..1")
        if not 0 <= self.light < 1:
            raise FirmError(f"views.light is {self.light}; it is a part of the brightness, 0 or more and below 1")
        if self.tries < 1:
            raise FirmError(f"views.tries is {self.tries}; a patch needs at least 1 candidate")
        small = min(self.sizes)
        if not self.over > 0 or _pixels(self.over, small) > small * (small - 1):
            raise FirmError(
                f"views.over is {self.over}; above 0 patches overlap, and up to {1 - 1 / small:.4g} "
                f"there is a second one of {small} pixels that is not the first"
            )

    def __call__(
        self, images: UInt8[Tensor, "n c h w"], size: int, *, rng: torch.Generator, focus: Focus | None = None
    ) -> tuple[Float[Tensor, "n c p p"], Float[Tensor, "n c p p"]]:
        if focus is None:
            focus = _everywhere(images)
        if focus.altered.shape != (len(images), *images.shape[2:]):
            given, wanted = tuple(focus.altered.shape), (len(images), *images.shape[2:])
            raise FirmError(f"the masks have the shape {given} and the images {wanted}; make masks for these images")
        places = self.places(focus, rng=rng)
        first, second = cut(images, places.first, places.size), cut(images, places.second, places.size)
        if not self.light:
            return first, second
        change = Jitter(brightness=self.light, contrast=self.light, saturation=0.0, hue=0.0)
        return jittered(first, change, rng=rng), jittered(second, change, rng=rng)

    def places(self, focus: Focus, *, rng: torch.Generator) -> Places:
        """Where the pair of each image is cut: good images by their object, outliers by what was altered."""
        foreground, altered = _array(focus.foreground), _array(focus.altered)
        n, height, width = altered.shape
        draw = np.random.default_rng(int(torch.randint(2**62, (1,), generator=rng)))
        size = self._size(height, width, draw)
        room = (height - size, width - size)  # the greatest top and left
        outlier = np.asarray(altered.any(axis=(1, 2)))
        objects = [foreground[item] for item in (~outlier).nonzero()[0]]
        defects = [altered[item] for item in outlier.nonzero()[0]]
        first, accepted = np.empty((n, 2), dtype=np.int64), np.empty(n, dtype=np.bool_)

        anywhere = draw.integers(0, room, (len(objects), self.tries, 2), endpoint=True)
        first[~outlier], accepted[~outlier] = _chosen(anywhere, objects, size, _pixels(self.fore, size))
        first[outlier], accepted[outlier] = self._touching(defects, room, size, draw)
        overlap = _pixels(self.over, size)
        second = _partners(first, room, size, overlap, 1, draw)[:, 0]
        if self.both:
            partners = _partners(first[outlier], room, size, overlap, self.tries, draw)
            second[outlier], too = _chosen(partners, defects, size, self._altered(size))
            accepted[outlier] &= too
        return Places(torch.from_numpy(first), torch.from_numpy(second), size, torch.from_numpy(accepted))

    def _touching(
        self, altered: list[Mask], room: tuple[int, int], size: int, draw: np.random.Generator
    ) -> tuple[Whole, Mask]:
        """The first patches of outliers; one pixel is in every candidate, so there the first of them will do."""
        least = self._altered(size)
        candidates = _around(altered, room, size, self.tries if least > 1 else 1, draw)
        if least == 1:
            return candidates[:, 0], np.ones(len(altered), dtype=np.bool_)
        return _chosen(candidates, altered, size, least)

    def _altered(self, size: int) -> int:
        return max(1, _pixels(self.altered, size))

    def acceptance(self, focus: Focus, *, rng: torch.Generator) -> float:
        """Part of the images whose patches reach the thresholds; the others get the best that was found.

        Ask for good images and for outliers apart: their thresholds differ.
        """
        return float(self.places(focus, rng=rng).accepted.float().mean())

    def _size(self, height: int, width: int, draw: np.random.Generator) -> int:
        if max(self.sizes) > min(height, width):
            raise FirmError(
                f"a patch of {max(self.sizes)} pixels does not fit into images of {height} x {width}; "
                f"use views.sizes of at most {min(height, width)}"
            )
        return self.sizes[int(draw.integers(len(self.sizes)))]


def cut(images: UInt8[Tensor, "n c h w"], place: Int[Tensor, "n 2"], size: int) -> Float[Tensor, "n c p p"]:
    """The window of each image whose top and left are given: its very pixels, scaled to 0..1."""
    windows = images.unfold(2, size, 1).unfold(3, size, 1)  # a view: n, c, top, left, p, p
    top, left = place.to(images.device).unbind(1)
    return windows[torch.arange(len(images), device=images.device), :, top, left].float() / 255


def _everywhere(images: Tensor) -> Focus:
    """The object fills the image and nothing was altered."""
    shape = (len(images), *images.shape[2:])
    return Focus(torch.ones(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool))


def _array(mask: Bool[Tensor, "n h w"]) -> Mask:
    return np.ascontiguousarray(mask.cpu().numpy())


def _pixels(part: float, size: int) -> int:
    """The least whole number of pixels that is this part of a patch; 0.9 of 100 is 90 for all its rounding."""
    return math.ceil(part * size**2 - 1e-9)


def _around(altered: list[Mask], room: tuple[int, int], size: int, count: int, draw: np.random.Generator) -> Whole:
    """Places (n, count, 2), each uniform among those that hold a pixel drawn uniformly from the altered ones."""
    where = [mask.ravel().nonzero()[0] for mask in altered]
    number = draw.integers(0, np.array([[len(one)] for one in where]).reshape(-1, 1), (len(where), count))
    drawn = np.array([one[which] for one, which in zip(where, number, strict=True)], dtype=np.int64)
    pixel = np.stack(np.divmod(drawn.reshape(-1, count), room[1] + size), axis=2)
    return draw.integers(np.maximum(pixel - size + 1, 0), np.minimum(pixel, room), endpoint=True)


def _chosen(candidates: Whole, masks: list[Mask], size: int, least: int) -> tuple[Whole, Mask]:
    """For each mask the first candidate that covers enough of it, else the one that covers most; and which it was."""
    covered = _covered(candidates, masks, size)
    enough = covered >= least
    accepted = np.asarray(enough.any(axis=1))
    which = np.where(accepted, enough.argmax(axis=1), covered.argmax(axis=1))
    return candidates[np.arange(len(candidates)), which], accepted


def _covered(places: Whole, masks: list[Mask], size: int) -> Whole:
    """How many pixels of its mask each place (n, count, 2) holds, from the sums of all rectangles at the origin."""
    counts = np.full(places.shape[:2], size**2)
    sums: npt.NDArray[np.int32] | None = None  # one for all images: memory new to the process costs more than the sums
    for item, mask in enumerate(masks):
        if mask.all():
            continue
        sums = np.asarray(cv2.integral(mask.view(np.uint8), sums, cv2.CV_32S))
        top, left = places[item].T
        low, right = top + size, left + size
        counts[item] = sums[low, right] - sums[top, right] - sums[low, left] + sums[top, left]
    return counts


def _partners(
    first: Whole, room: tuple[int, int], size: int, least: int, count: int, draw: np.random.Generator
) -> Whole:
    """Places (n, count, 2), uniform among all but the first that share `least` pixels with it inside the image.

    They are counted row by row and taken by number, so no draw is lost; only if there is none, the first returns.
    """
    down = np.arange(1 - size, size)  # by how many rows the second patch lies below
    reach = size - -(-least // (size - abs(down)))  # and how far aside at most: (P - |dx|)(P - |dy|) >= least
    left = -np.minimum(reach, first[:, 1:])  # n, rows
    right = np.minimum(reach, room[1] - first[:, 1:])
    top = first[:, :1] + down
    row = np.where((reach >= 0) & (top >= 0) & (top <= room[0]), right - left + 1, 0)
    row[:, size - 1] -= 1  # not the first itself
    before = row.cumsum(axis=1)
    number = draw.integers(0, np.maximum(before[:, -1:], 1), (len(first), count))
    which = (before[:, None] <= number[:, :, None]).sum(axis=2)
    alone = which == len(down)
    which[alone] = size - 1
    here = np.arange(len(first))[:, None]
    aside = left[here, which] + number - (before - row)[here, which]
    aside += (which == size - 1) & (aside >= 0)
    aside[alone] = 0
    return first[:, None] + np.stack([down[which], aside], axis=2)
