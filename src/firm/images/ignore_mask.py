"""Pixels that must never decide, marked once in the frame of the camera: clamps, a text field, a rim.

An ignored pixel is overwritten before anything is seen of it. To leave out its patch alone would not do: the patches
beside it show it too, and a pretrained network sees beyond its patch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import torch
from jaxtyping import Bool, UInt8
from torch import Tensor
from torch.nn import functional as F

from firm.errors import UnreadableImage, named
from firm.images import decode_mask, shape_of
from firm.types import FirmError

ASPECT = 0.02  # by which the mask may be wider or narrower than the images
ASKED = 8  # images that tell how wide they are
SOME = 100  # good images, evenly over all, that tell what is usual
STRIP = 16  # rows of pixels of which that is found at once


def read_ignored(file: Path, images: Sequence[Path]) -> Bool[Tensor, "h w"]:
    """The marked pixels of a mask file, at its own size; `images` are those it is to lie over."""
    ignored = torch.from_numpy(decode_mask(file))
    check_ignored(ignored, named(file))
    height, width = ignored.shape
    for image in images[:: max(1, len(images) // ASKED)]:
        try:
            tall, wide = shape_of(image)
        except UnreadableImage:
            continue  # whoever reads it says why
        if not 1 / (1 + ASPECT) <= (width * tall) / (height * wide) <= 1 + ASPECT:
            raise FirmError(
                f"{named(file)} has {width} x {height} pixels and {named(image)} {wide} x {tall}: another aspect; "
                "draw what is to be ignored on one of the images, without cropping it"
            )
    return ignored


def check_ignored(ignored: Tensor, name: str = "the mask of what to ignore") -> None:
    """A mask that ignores all leaves nothing to inspect, and one that ignores nothing is not what was meant."""
    if ignored.dtype != torch.bool or ignored.dim() != 2:
        raise FirmError(f"{name} is {ignored.dtype} of shape {tuple(ignored.shape)}; give bool (h, w)")
    if bool(ignored.all()):
        raise FirmError(f"{name} marks every pixel, which leaves nothing to inspect; leave black what counts")
    if not bool(ignored.any()):
        raise FirmError(f"{name} marks no pixel; paint white what is to be ignored")


def scaled(ignored: Bool[Tensor, "a b"], height: int, width: int) -> Bool[Tensor, "{height} {width}"]:
    """The mask over images of another size: all pixels that an ignored one has any part in when images are resized."""
    if ignored.shape == (height, width):
        return ignored
    times = [-(-wanted // given) for wanted, given in zip((height, width), ignored.shape, strict=True)]
    fine = ignored.repeat_interleave(times[0], 0).repeat_interleave(times[1], 1)  # a coarse mask must not spread
    parts = F.interpolate(fine[None, None].float(), size=(height, width), mode="bilinear", antialias=True)
    if bool((parts > 0).all()):
        raise FirmError(f"the mask leaves no pixel to inspect at {width} x {height}; mark less, or raise size")
    return parts[0, 0] > 0


def filled(images: UInt8[Tensor, "n c h w"], ignored: Bool[Tensor, "h w"]) -> UInt8[Tensor, "n c h w"]:
    """Every ignored pixel as the nearest one that is not: no edge where the mask ends, and nothing of what it hides."""
    where = ignored.cpu().numpy()
    labels = cv2.distanceTransformWithLabels(
        where.astype(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_5, labelType=cv2.DIST_LABEL_PIXEL
    )[1]
    places = np.zeros(int(labels.max()) + 1, np.int64)
    places[labels[~where]] = np.flatnonzero(~where)
    nearest = torch.from_numpy(places[labels].ravel()).to(images.device)
    return images.flatten(2)[:, :, nearest].view_as(images)


def usual_look(images: UInt8[Tensor, "n c h w"], hidden: Bool[Tensor, "n h w"]) -> UInt8[Tensor, "c h w"]:
    """The median of the images that show a pixel; one that none of them shows is as the nearest that some do."""
    step = max(1, len(images) // SOME)
    strips = zip(images[::step].split(STRIP, 2), hidden[::step].split(STRIP, 1), strict=True)
    parts = [shown.float().masked_fill(away[:, None], math.nan).nanmedian(0).values for shown, away in strips]
    usual = torch.cat(parts, 1).nan_to_num().to(torch.uint8)
    return filled(usual[None], hidden[::step].all(0))[0]
