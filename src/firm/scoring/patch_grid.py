"""Images cut into tiles, and scores of tiles spread into a heat map (section 5 of the paper).

Interpolating between the tiles and smoothing are both linear and work on rows and columns apart, so a map is two matrix
products: rows x scores x columns. Nothing larger than the map itself is ever held.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from firm.types import FirmError, Tiling

REGISTERS = ("centred", "resize")


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The image as one: a score, and no map."""

    @property
    def patchwise(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Square tiles at a stride; the last ones end at the border even where the stride does not lead there.

    `centred` puts the score of a tile at the centre of the tile. `resize` is the paper's plain enlarging of the grid,
    which moves scores towards the border: by 7.5 px for 32 px tiles in an image of 256 px.
    """

    size: int = 32
    stride: int = 16
    register: str = "centred"
    kernel: int = 15  # taps of the Gaussian; 15 as the paper has it, although the one it cites has 33
    sigma: float = 4.0  # 0: no smoothing
    dense: bool = False  # features of all tiles from one pass over the image instead of a pass per tile
    layers: tuple[int, ...] = (4,)  # stages of the encoder that describe a tile; the paper has the last alone
    worst: int = 1  # the image scores as the mean of so many worst tiles
    object: float = 0.0  # a tile counts in full if so much of it is object, else in proportion; 0: always, as the paper
    around: float = 0.0  # part of a side: the mean score of so much around a tile is added to its own; 0: alone

    def __post_init__(self) -> None:
        if self.size < 1 or self.stride < 1:
            raise FirmError(f"tiles of {self.size}px at stride {self.stride} cannot be cut; use 1 px or more for both")
        if self.stride > self.size:
            raise FirmError(f"stride {self.stride} leaves gaps between {self.size}px tiles; use stride <= size")
        if self.register not in REGISTERS:
            raise FirmError(f"no register {self.register!r}; use one of {', '.join(REGISTERS)}")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise FirmError(f"tiling.kernel is {self.kernel}; a centred filter needs an odd number of taps")
        if not self.layers or not set(self.layers) <= {1, 2, 3, 4}:
            raise FirmError(f"tiling.layers is {list(self.layers)}; name one or more of the stages 1, 2, 3 and 4")
        if self.worst < 1 or not 0 <= self.object <= 1:
            raise FirmError(f"tiling.worst is {self.worst} and tiling.object {self.object}; use 1 or more and 0..1")
        if not 0 <= self.around <= 1:
            raise FirmError(f"tiling.around is {self.around}; use 0 for each tile alone, or a part of a side up to 1")
        if not 0 <= self.sigma < math.inf:
            raise FirmError(f"tiling.sigma is {self.sigma}; use 0 for no smoothing or a number of pixels above it")

    @property
    def patchwise(self) -> bool:
        return True

    def places(self, height: int, width: int) -> tuple[list[int], list[int]]:
        """The first row of every row of tiles, and the first column of every column of tiles."""
        if min(height, width) < self.size:
            raise FirmError(
                f"an image of {height} x {width} px is smaller than a {self.size}px tile; "
                f"use larger images or tiling.size <= {min(height, width)}"
            )
        return self._starts(height), self._starts(width)

    def shape(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the grid of tiles."""
        tops, lefts = self.places(height, width)
        return len(tops), len(lefts)

    def cut(self, images: Shaped[Tensor, "n c h w"]) -> Shaped[Tensor, "tiles c s s"]:
        """Every tile of every image, image by image and row by row: a copy, about (size / stride)^2 as large."""
        tops, lefts = self.places(*images.shape[-2:])
        tiles = [images[:, :, y : y + self.size, x : x + self.size] for y in tops for x in lefts]
        return torch.stack(tiles, dim=1).flatten(0, 1)

    def strips(self, height: int, width: int, budget: int) -> Iterator[slice]:
        """Ranges of pixel rows whose tiles, cut one range after the other, are the tiles of the whole image in order.

        Each holds whole rows of tiles, at most `budget` tiles unless one row has more: large images fit in memory.
        """
        if budget < 1:
            raise FirmError(f"a budget of {budget} tiles holds none; use 1 or more")
        tops, lefts = self.places(height, width)
        rows = max(1, budget // len(lefts))
        for begin in range(0, len(tops), rows):
            part = tops[begin : begin + rows]
            yield slice(part[0], part[-1] + self.size)

    def parts(self, masks: Bool[Tensor, "n h w"]) -> Float[Tensor, "n r c"]:
        """How much of every tile is marked: pixels counted along columns, then along rows, so exactly."""
        tops, lefts = self.places(*masks.shape[-2:])
        down, across = self._within(tops, masks.shape[-2]), self._within(lefts, masks.shape[-1])
        return down @ masks.float() @ across.T / self.size**2

    def surrounding(self, scores: Float[Tensor, "n r c"]) -> Float[Tensor, "n r c"]:
        """The mean score around every tile: a wide defect may be slight at each place and yet nowhere absent."""
        half = int(self.around * min(scores.shape[1:]) / 2)
        return F.avg_pool2d(scores, 2 * half + 1, stride=1, padding=half, count_include_pad=False)

    def nodes(self, length: int) -> list[float]:
        """Where along a side of so many pixels the score of each tile sits in the map."""
        starts = self._starts(length)
        if self.register == "centred":
            return [start + (self.size - 1) / 2 for start in starts]
        return [(i + 0.5) * length / len(starts) - 0.5 for i in range(len(starts))]

    def maps(self, grid: Float[Tensor, "n r c"], height: int, width: int) -> Float[Tensor, "n {height} {width}"]:
        """A score per pixel: linear between the nodes, the outermost repeated beyond them, then smoothed."""
        if tuple(grid.shape[1:]) != self.shape(height, width):
            raise FirmError(
                f"a grid of {tuple(grid.shape[1:])} tiles is not that of an image of {height} x {width} px, "
                f"which is {self.shape(height, width)}; give the size at which the tiles were cut"
            )
        down, across = self._spread(height).to(grid), self._spread(width).to(grid)
        return down @ grid @ across.T

    def _starts(self, length: int) -> list[int]:
        starts = list(range(0, length - self.size + 1, self.stride))
        return starts if starts[-1] == length - self.size else [*starts, length - self.size]

    def _within(self, starts: list[int], length: int) -> Float[Tensor, "tiles {length}"]:
        """One where a pixel of a side lies in a tile."""
        after = torch.arange(length) - torch.tensor(starts)[:, None]
        return ((after >= 0) & (after < self.size)).float()

    def _spread(self, length: int) -> Float[Tensor, "{length} tiles"]:
        """How much of the score of each tile every pixel of a side receives; a pixel's parts sum to one."""
        between = _interpolated(torch.tensor(self.nodes(length), dtype=torch.float64), length)
        return _smoothed(between, self.kernel, self.sigma) if self.sigma else between


TILINGS: dict[str, Tiling] = {"whole": Whole(), "grid": Grid()}


def _interpolated(nodes: Float[Tensor, " tiles"], length: int) -> Float[Tensor, "{length} tiles"]:
    pixels = torch.arange(length, dtype=nodes.dtype).clamp(float(nodes[0]), float(nodes[-1]))
    after = torch.searchsorted(nodes, pixels, right=True).clamp(max=len(nodes) - 1)
    before = (after - 1).clamp(min=0)
    # a lone tile is its own neighbour: the gap is zero, and so is the way along it
    part = (pixels - nodes[before]) / (nodes[after] - nodes[before]).clamp(min=1e-12)
    weights = torch.zeros(length, len(nodes), dtype=nodes.dtype)
    weights.scatter_add_(1, before[:, None], 1 - part[:, None])
    return weights.scatter_add_(1, after[:, None], part[:, None])


def _smoothed(columns: Float[Tensor, "h t"], kernel: int, sigma: float) -> Float[Tensor, "h t"]:
    """A Gaussian along the first axis, the border repeated: a constant stays what it is."""
    offsets = torch.arange(kernel) - kernel // 2
    taps = torch.exp(-0.5 * (offsets / sigma).double().square())
    pixels = torch.arange(len(columns))
    result = torch.zeros_like(columns)
    for offset, tap in zip(offsets.tolist(), (taps / taps.sum()).tolist(), strict=True):
        result += tap * columns[(pixels + offset).clamp(0, len(columns) - 1)]
    return result
