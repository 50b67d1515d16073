"""Images and masks resized: the same everywhere, so that training, scoring and serving see equal pixels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

Size = int | tuple[int, int]  # the side of a square, or height and width


def to_tensor(image: npt.NDArray[np.uint8]) -> UInt8[Tensor, "1 3 h w"]:
    """A decoded image as a batch of one."""
    return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None]


def height_and_width(size: Size) -> tuple[int, int]:
    """The two sides of a size."""
    return (size, size) if isinstance(size, int) else size


def resize(images: UInt8[Tensor, "n c h w"], size: Size) -> UInt8[Tensor, "n c a b"]:
    """Resize, bilinear and antialiased; images of that size are returned unchanged."""
    if images.shape[-2:] == (sides := height_and_width(size)):
        return images
    resized = images.new_empty(*images.shape[:2], *sides)
    for run in runs_of(images):
        part = images[run]
        channels = part[:, :1] if _is_grey(part) else part  # of three equal channels one, which is written to all
        resized[run] = resample(channels.float(), sides).round().clamp(0, 255).to(torch.uint8)
    return resized


def _is_grey(images: UInt8[Tensor, "n c h w"]) -> bool:
    return all(torch.equal(images[:, 0], channel) for channel in images.unbind(1)[1:])


def resize_mask(mask: Bool[np.ndarray, "h w"], size: Size) -> Bool[Tensor, "a b"]:
    """Nearest-neighbour resize; a mark that would vanish is max-pooled instead."""
    sides = height_and_width(size)
    rows, columns = (
        (2 * np.arange(side) + 1) * length // (2 * side) for side, length in zip(sides, mask.shape, strict=True)
    )
    nearest = mask[np.ix_(rows, columns)]
    if nearest.any() or not mask.any():
        return torch.from_numpy(nearest)
    return F.adaptive_max_pool2d(torch.from_numpy(mask)[None].float(), sides)[0] > 0


def runs_of(images: Tensor) -> list[slice]:
    """Slices of about 64 MB as floats."""
    step = max(1, 2**24 // max(1, images[:1].numel()))
    return [slice(start, start + step) for start in range(0, len(images), step)]


def resample(images: Float[Tensor, "n c h w"], sides: tuple[int, int]) -> Float[Tensor, "n c a b"]:
    return F.interpolate(images, size=sides, mode="bilinear", antialias=True, align_corners=False)
