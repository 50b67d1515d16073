"""Foreground-aware patch pairs (section 5): two overlapping windows of the image, unchanged by default."""

import math
from dataclasses import dataclass
from typing import TypeAlias

import cv2
import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from firm.errors import SettingError
from firm.images.colour import Jitter, jittered
from firm.types import Focus

Whole: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]
Room: TypeAlias = tuple[int, int]  # the greatest top and left of a patch


@dataclass(frozen=True)
class Places:
    """Top and left of the two patches of each image, and whether they meet the requirements."""

    first: Int[Tensor, "n 2"]
    second: Int[Tensor, "n 2"]
    size: int
    accepted: Bool[Tensor, " n"]


@dataclass(frozen=True, kw_only=True)
class PatchPairs:
    """The thresholds are the paper's, as fractions of the patch, since no patch holds 0.9 of most objects."""

    sizes: tuple[int, ...] = (32,)  # one of them is drawn per batch
    min_foreground: float = 0.9  # tau_fore: least fraction of a good image's first patch that is object
    min_overlap: float = 0.15  # tau_over: least fraction of a patch that its partner shares
    tries: int = 50  # candidates for a patch; if none meets the thresholds, the best of them is taken
    min_altered: float = 0.0  # least fraction of an outlier's first patch that is altered; 0: one pixel (the paper)
    both_altered: bool = False  # require it of the second patch of an outlier as well
    illumination: float = 0.0  # fraction by which brightness and contrast of every patch vary; the paper has 0

    def __post_init__(self) -> None:
        small = min(self.sizes, default=0)
        most = small * (small - 1)  # pixels shared with the nearest patch that is not the first itself
        overlap = f"patches of {small} pixels need more than 0 and at most {1 - 1 / max(small, 1):.4g}"
        for name, allowed, fix in (
            ("sizes", small >= 2, "give at least one size, each of 2 pixels or more"),
            ("min_foreground", 0 <= self.min_foreground <= 1, "it must lie in 0..1"),
            ("min_altered", 0 <= self.min_altered <= 1, "it must lie in 0..1"),
            ("illumination", 0 <= self.illumination < 1, "use 0 or more, below 1"),
            ("tries", self.tries >= 1, "a patch needs at least 1 candidate"),
            ("min_overlap", self.min_overlap > 0 and _pixels(self.min_overlap, small) <= most, overlap),
        ):
            if not allowed:
                raise SettingError(f"views.{name} is {getattr(self, name)}; {fix}")

    def __call__(
        self, images: UInt8[Tensor, "n c h w"], size: int, *, rng: torch.Generator, focus: Focus | None = None
    ) -> tuple[Float[Tensor, "n c p p"], Float[Tensor, "n c p p"]]:
        shape = (len(images), *images.shape[2:])
        if focus is None:  # the object fills the image and nothing is altered
            focus = Focus(torch.ones(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool))
        if focus.altered.shape != shape:
            raise SettingError(f"masks of shape {tuple(focus.altered.shape)} do not fit images of {shape}")
        places = self.places(focus, rng=rng)
        first, second = cut(images, places.first, places.size), cut(images, places.second, places.size)
        if not self.illumination:
            return first, second
        change = Jitter(brightness=self.illumination, contrast=self.illumination, saturation=0.0, hue=0.0)
        return jittered(first, change, rng=rng), jittered(second, change, rng=rng)

    def places(self, focus: Focus, *, rng: torch.Generator) -> Places:
        """Where the pair of each image is cut: good images by their object, outliers by what was altered."""
        foreground, altered = (np.ascontiguousarray(mask.cpu().numpy()) for mask in (focus.foreground, focus.altered))
        n, height, width = altered.shape
        if max(self.sizes) > min(height, width):
            misfit = f"a patch of {max(self.sizes)} pixels does not fit into images of {height} x {width}"
            raise SettingError(f"{misfit}; use views.sizes of at most {min(height, width)}")
        draw = np.random.default_rng(int(torch.randint(2**62, (1,), generator=rng)))
        size = self.sizes[int(draw.integers(len(self.sizes)))]
        room = (height - size, width - size)
        outlier = np.asarray(altered.any(axis=(1, 2)))
        objects, defects = list(foreground[~outlier]), list(altered[outlier])
        first, accepted = np.empty((n, 2), dtype=np.int64), np.empty(n, dtype=np.bool_)

        anywhere = draw.integers(0, room, (len(objects), self.tries, 2), endpoint=True)
        first[~outlier], accepted[~outlier] = _chosen(anywhere, objects, size, _pixels(self.min_foreground, size))
        least = max(1, _pixels(self.min_altered, size))
        tries = self.tries if least > 1 else 1  # one altered pixel is in every candidate
        touching = _around(defects, room, size, tries, draw)
        first[outlier], accepted[outlier] = _chosen(touching, defects, size, least)
        overlap = _pixels(self.min_overlap, size)
        second = _partners(first, room, size, overlap, 1, draw)[:, 0]
        if self.both_altered:
            partners = _partners(first[outlier], room, size, overlap, self.tries, draw)
            second[outlier], too = _chosen(partners, defects, size, least)
            accepted[outlier] &= too
        return Places(torch.from_numpy(first), torch.from_numpy(second), size, torch.from_numpy(accepted))


def cut(images: UInt8[Tensor, "n c h w"], place: Int[Tensor, "n 2"], size: int) -> Float[Tensor, "n c p p"]:
    """The window of each image whose top and left are given: its very pixels, scaled to 0..1."""
    windows = images.unfold(2, size, 1).unfold(3, size, 1)  # a view: n, c, top, left, p, p
    top, left = place.to(images.device).unbind(1)
    return windows[torch.arange(len(images), device=images.device), :, top, left].float() / 255


def _pixels(fraction: float, size: int) -> int:
    """The least number of pixels that is this fraction of a patch; 0.9 of 100 is 90 despite rounding."""
    return math.ceil(fraction * size**2 - 1e-9)


def _around(altered: list[Mask], room: Room, size: int, count: int, draw: np.random.Generator) -> Whole:
    """Places (n, count, 2), each uniform among those that hold a pixel drawn uniformly from the altered ones."""
    where = [mask.ravel().nonzero()[0] for mask in altered]
    number = draw.integers(0, np.array([[len(pixels)] for pixels in where]).reshape(-1, 1), (len(where), count))
    drawn = np.array([pixels[which] for pixels, which in zip(where, number, strict=True)], dtype=np.int64)
    pixel = np.stack(np.divmod(drawn.reshape(-1, count), room[1] + size), axis=2)
    return draw.integers(np.maximum(pixel - size + 1, 0), np.minimum(pixel, room), endpoint=True)


def _chosen(candidates: Whole, masks: list[Mask], size: int, least: int) -> tuple[Whole, Mask]:
    """For each mask the first candidate that covers enough of it, else the one that covers most; and which do."""
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


def _partners(first: Whole, room: Room, size: int, least: int, count: int, draw: np.random.Generator) -> Whole:
    """Places (n, count, 2), uniform among all but the first that share `least` pixels with it inside the image."""
    # they are counted row by row and taken by number, so no draw is lost; only if there is none, the first returns
    down = np.arange(1 - size, size)  # by how many rows the second patch lies below
    radius = size - -(-least // (size - abs(down)))  # and how far aside at most: (P - |dx|)(P - |dy|) >= least
    left = -np.minimum(radius, first[:, 1:])  # n, rows
    right = np.minimum(radius, room[1] - first[:, 1:])
    top = first[:, :1] + down
    row = np.where((radius >= 0) & (top >= 0) & (top <= room[0]), right - left + 1, 0)
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
