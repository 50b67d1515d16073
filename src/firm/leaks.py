"""Images that an earlier stage has seen already: a copy of a learnt image scores too low, so results look too good."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from firm.images import resize

THUMB = 16  # side of the shrunken good images that are kept to compare with
SAME = 0.25  # of the usual distance between neighbours: strangers are not so close, a copy saved anew is
BLOCK = 1024  # thumbnails compared at once


def thumbnails(images: UInt8[Tensor, "n c h w"]) -> UInt8[Tensor, "n s s"]:
    """The images in grey and as small as tells their overall look."""
    small = resize(images, THUMB).float().mean(1)
    return small.round().to(torch.uint8)


def copies(images: UInt8[Tensor, "m c h w"], known: UInt8[Tensor, "n s s"]) -> Bool[Tensor, " m"]:
    """Which of the images are known, as far as thumbnails tell: equal, or much nearer than the known are to each other.

    Where all that is known looks alike, such as flat textures, only equal thumbnails tell a copy.
    """
    if not len(known) or not len(images):
        return torch.zeros(len(images), dtype=torch.bool)
    there = known.float().flatten(1)
    usual = float(_nearest(there, there, itself=True).median()) if len(known) > 2 else 0.0
    return _nearest(thumbnails(images).float().flatten(1), there) <= SAME * usual


def _nearest(of: Float[Tensor, "m s"], among: Float[Tensor, "n s"], *, itself: bool = False) -> Float[Tensor, " m"]:
    """The distance to the nearest, or to the nearest but one where each is among them itself."""
    found = [
        torch.cdist(part, among, compute_mode="donot_use_mm_for_euclid_dist")
        .topk(2 if itself else 1, largest=False)
        .values[:, -1]
        for part in of.split(BLOCK)
    ]
    return torch.cat(found)
