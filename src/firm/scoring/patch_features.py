"""Plain pixels of patches: the floor under every learnt feature. One that tells no more has learnt nothing of use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional as F

from firm.tiling import Grid

PIXELS = "pixels"  # the one kind of feature that no network makes
TILES = 512  # patches looked at together
NUMBERS = 256  # to a patch at the most; larger patches are averaged down to it


def tiles_of(grid: Grid, image: Float[Tensor, "1 k h w"]) -> Iterator[Float[Tensor, "t k s s"]]:
    """The patches of an image, some rows of them at a time."""
    height, width = image.shape[-2:]
    for strip in grid.strips(height, width, TILES):
        yield grid.cut(image[:, :, strip])


def plain_pixels(grid: Grid, image: UInt8[Tensor, "1 k h w"], *, grey: bool) -> Float[Tensor, "r c d"]:
    """The pixels of every patch of an image; of a grey product without their colour."""
    return _averaged(grid, _valued(image, grey=grey))


def plain_cells(grid: Grid, pool: int, image: UInt8[Tensor, "1 k h w"], *, grey: bool) -> Float[Tensor, "r c d"]:
    """The same where a patch is so many cells wide, around each cell.

    Beyond the border the image is mirrored, or where a patch is wider than the image its border repeated.
    """
    margin = pool // 2 * grid.stride
    mode = "reflect" if margin < min(image.shape[-2:]) else "replicate"
    values = F.pad(_valued(image, grey=grey), (margin,) * 4, mode=mode)
    return _averaged(replace(grid, size=pool * grid.stride), values)


def _valued(image: UInt8[Tensor, "1 k h w"], *, grey: bool) -> Float[Tensor, "1 j h w"]:
    values = image.float()
    return values.mean(1, keepdim=True) if grey else values


def _averaged(grid: Grid, values: Float[Tensor, "1 j h w"]) -> Float[Tensor, "r c d"]:
    side = max(1, int((NUMBERS / values.shape[1]) ** 0.5))
    factor = -(-grid.size // side)
    parts = [F.avg_pool2d(tiles, factor, ceil_mode=True).flatten(1) for tiles in tiles_of(grid, values)]
    # one grey level of difference everywhere is a distance of one, whatever the size of the patch
    return (torch.cat(parts) / parts[0].shape[1] ** 0.5).unflatten(0, grid.shape(*values.shape[-2:]))
