"""Pixels to ignore, marked once in the camera's frame: clamps, a text field, a rim.

They are overwritten before any network, because neighbouring patches and receptive fields would still see them.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import torch
from jaxtyping import Bool, UInt8
from torch import Tensor
from torch.nn import functional as F

from firm.errors import ImageError, SettingError, named
from firm.images.decode import decode_mask, shape_of

ASPECT = 0.02  # tolerance between the aspect ratios of mask and images
COMPARED = 8  # images whose aspect ratio is checked
SAMPLE = 100  # good images in the median
STRIP = 16  # rows of pixels per median


def read_ignored(file: Path, images: Sequence[Path]) -> Bool[Tensor, "h w"]:
    """The marked pixels of a mask file at its own size; its aspect ratio must match that of `images`."""
    ignored = torch.from_numpy(decode_mask(file))
    check_ignored(ignored, named(file))
    height, width = ignored.shape
    for image in images[:: max(1, len(images) // COMPARED)]:
        try:
            tall, wide = shape_of(image)
        except ImageError:
            continue  # reported when it is read
        if not 1 / (1 + ASPECT) <= (width * tall) / (height * wide) <= 1 + ASPECT:
            sizes = f"{named(file)} has {width} x {height} pixels and {named(image)} {wide} x {tall}"
            raise SettingError(f"{sizes}: the aspect differs; draw the mask on one of the images, without cropping it")
    return ignored


def check_ignored(ignored: Tensor, name: str = "the ignore mask") -> None:
    """Refuse a mask that ignores all pixels or none."""
    if ignored.dtype != torch.bool or ignored.dim() != 2:
        raise SettingError(f"{name} is {ignored.dtype} of shape {tuple(ignored.shape)}; give bool (h, w)")
    if bool(ignored.all()):
        raise SettingError(f"{name} marks every pixel, which leaves nothing to inspect; paint black what counts")
    if not bool(ignored.any()):
        raise SettingError(f"{name} marks no pixel; paint white what to ignore")


def scaled(ignored: Bool[Tensor, "a b"], height: int, width: int) -> Bool[Tensor, "{height} {width}"]:
    """Resize the mask: a pixel is ignored if an ignored one contributes to it when images are resized."""
    if ignored.shape == (height, width):
        return ignored
    times = [-(-wanted // given) for wanted, given in zip((height, width), ignored.shape, strict=True)]
    fine = ignored.repeat_interleave(times[0], 0).repeat_interleave(times[1], 1)  # a coarse mask must not spread
    parts = F.interpolate(fine[None, None].float(), size=(height, width), mode="bilinear", antialias=True)
    if bool((parts > 0).all()):
        raise SettingError(f"the mask leaves no pixel to inspect at {width} x {height}; mark less, or raise size")
    return parts[0, 0] > 0


def fill_ignored(images: UInt8[Tensor, "n c h w"], ignored: Bool[Tensor, "h w"]) -> UInt8[Tensor, "n c h w"]:
    """Replace every ignored pixel by the nearest other one, so the mask leaves no edge."""
    mask, metric = ignored.cpu().numpy(), (cv2.DIST_L2, cv2.DIST_MASK_5)
    _, labels = cv2.distanceTransformWithLabels(mask.astype(np.uint8), *metric, labelType=cv2.DIST_LABEL_PIXEL)
    places = np.zeros(int(labels.max()) + 1, np.int64)
    places[labels[~mask]] = np.flatnonzero(~mask)
    nearest = torch.from_numpy(places[labels].ravel()).to(images.device)
    return images.flatten(2)[:, :, nearest].view_as(images)


def median_image(images: UInt8[Tensor, "n c h w"], hidden: Bool[Tensor, "n h w"]) -> UInt8[Tensor, "c h w"]:
    """The median over the images in which a pixel is visible; a pixel visible in none is filled by the nearest."""
    step = max(1, len(images) // SAMPLE)
    strips = zip(images[::step].split(STRIP, 2), hidden[::step].split(STRIP, 1), strict=True)
    parts = [pixels.float().masked_fill(mask[:, None], math.nan).nanmedian(0).values for pixels, mask in strips]
    median = torch.cat(parts, 1).nan_to_num().to(torch.uint8)
    return fill_ignored(median[None], hidden[::step].all(0))[0]
