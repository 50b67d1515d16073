"""Images cut into tiles, and the scores of tiles interpolated to a heat map (section 5 of the paper).

Interpolation and smoothing are linear and separable, so a map is two matrix products: rows x scores x columns.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from firm.errors import SettingError
from firm.types import Tiling

REGISTERS = ("centred", "resize")
MASKS = 16  # counted at once
SIZES = 8  # sides of images whose matrices are kept: they cost more than a map


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The image is scored as a whole: no map."""

    @property
    def patchwise(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Square tiles at a stride; the last row and column end at the border even where the stride does not lead there.

    `centred` puts the score of a tile at its centre. `resize` enlarges the grid, as the paper does, which moves scores
    towards the border: by 7.5 px for 32 px tiles in an image of 256 px.
    """

    size: int = 32
    stride: int = 16
    register: str = "centred"
    kernel: int = 15  # taps of the Gaussian: the paper's 15, although the method it cites has 33
    sigma: float = 4.0  # px of the Gaussian; 0: no smoothing
    layers: tuple[int, ...] = (4,)  # stages of the encoder that describe a tile; the paper has the last alone
    top_patches: int = 1  # the image score is the mean of so many of its highest tiles
    min_foreground: float = 0.0  # a tile with a smaller part of foreground counts in proportion; 0: all count (paper)
    surroundings: float = 0.0  # side of a window, as part of the grid, whose mean score is added to each tile; 0: none

    def __post_init__(self) -> None:
        for name, allowed, fix in (
            ("size", self.size >= 1, "use 1 px or more"),
            ("stride", 1 <= self.stride <= self.size, f"{self.size} px tiles without gaps need 1..{self.size}"),
            ("register", self.register in REGISTERS, f"use one of {', '.join(REGISTERS)}"),
            ("kernel", self.kernel >= 1 and self.kernel % 2 == 1, "a centred filter needs an odd number of taps"),
            ("layers", bool(self.layers) and set(self.layers) <= {1, 2, 3, 4}, "name stages among 1, 2, 3 and 4"),
            ("top_patches", self.top_patches >= 1, "use 1 or more"),
            ("min_foreground", 0 <= self.min_foreground <= 1, "it is a part, from 0 to 1"),
            ("surroundings", 0 <= self.surroundings <= 1, "it is a part, from 0 to 1"),
            ("sigma", 0 <= self.sigma < math.inf, "use 0 for no smoothing or a number of pixels above it"),
        ):
            if not allowed:
                raise SettingError(f"tiling.{name} is {getattr(self, name)!r}; {fix}")

    @property
    def patchwise(self) -> bool:
        return True

    def places(self, height: int, width: int) -> tuple[list[int], list[int]]:
        """The top of every row of tiles, and the left side of every column of tiles."""
        if min(height, width) < self.size:
            small = f"an image of {height} x {width} px is smaller than a tile of {self.size} px"
            raise SettingError(f"{small}; use larger images or tiling.size <= {min(height, width)}")
        return self._starts(height), self._starts(width)

    def shape(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the grid of tiles."""
        tops, lefts = self.places(height, width)
        return len(tops), len(lefts)

    def cut(self, images: Shaped[Tensor, "n c h w"]) -> Shaped[Tensor, "tiles c s s"]:
        """A copy of every tile of every image, image by image and row by row."""
        tops, lefts = self.places(*images.shape[-2:])
        tiles = [images[:, :, y : y + self.size, x : x + self.size] for y in tops for x in lefts]
        return torch.stack(tiles, dim=1).flatten(0, 1)

    def tiles(self, image: Shaped[Tensor, "1 c h w"], most: int) -> Iterator[Shaped[Tensor, "t c s s"]]:
        """The tiles of an image in order, whole rows of them at a time: at most so many unless one row has more."""
        tops, lefts = self.places(*image.shape[-2:])
        rows = max(1, most // len(lefts))
        for begin in range(0, len(tops), rows):
            part = tops[begin : begin + rows]
            yield self.cut(image[:, :, part[0] : part[-1] + self.size])

    def parts(self, masks: Bool[Tensor, "n h w"]) -> Float[Tensor, "n r c"]:
        """How much of every tile is marked, exactly; a few masks at a time, because pixels are counted as floats."""
        sides = zip(self.places(*masks.shape[-2:]), masks.shape[-2:], strict=True)
        down, across = (_inside(tuple(starts), self.size, length).to(masks.device) for starts, length in sides)
        return torch.cat([down @ part.float() @ across.T / self.size**2 for part in masks.split(MASKS)])

    def surrounding(self, scores: Float[Tensor, "n r c"]) -> Float[Tensor, "n r c"]:
        """The mean score in a window around every tile: it finds a wide defect that is faint in each tile."""
        half = int(self.surroundings * min(scores.shape[1:]) / 2)
        return F.avg_pool2d(scores, 2 * half + 1, stride=1, padding=half, count_include_pad=False)

    def nodes(self, length: int) -> list[float]:
        """Where the score of each tile lies along a side of so many pixels."""
        starts = self._starts(length)
        if self.register == "centred":
            return [start + (self.size - 1) / 2 for start in starts]
        return [(i + 0.5) * length / len(starts) - 0.5 for i in range(len(starts))]

    def maps(self, grid: Float[Tensor, "n r c"], height: int, width: int) -> Float[Tensor, "n {height} {width}"]:
        """A score per pixel: linear between the nodes, constant beyond the outermost, then smoothed."""
        if tuple(grid.shape[1:]) != self.shape(height, width):
            wrong = f"a grid of {tuple(grid.shape[1:])} tiles is not that of an image of {height} x {width} px"
            raise SettingError(f"{wrong}, {self.shape(height, width)}; give the size at which the tiles were cut")
        sides = ((tuple(self.nodes(length)), length) for length in (height, width))
        down, across = (_weights(*side, self.kernel, self.sigma, grid.dtype).to(grid.device) for side in sides)
        return down @ grid @ across.T

    def _starts(self, length: int) -> list[int]:
        starts = list(range(0, length - self.size + 1, self.stride))
        return starts if starts[-1] == length - self.size else [*starts, length - self.size]


TILINGS: dict[str, Tiling] = {"whole": Whole(), "grid": Grid()}


@lru_cache(maxsize=SIZES)
def _inside(starts: tuple[int, ...], size: int, length: int) -> Float[Tensor, "tiles {length}"]:
    """1 where a pixel of a side lies in a tile."""
    after = torch.arange(length) - torch.tensor(starts)[:, None]
    return ((after >= 0) & (after < size)).float()


@lru_cache(maxsize=SIZES)
def _weights(
    nodes: tuple[float, ...], length: int, kernel: int, sigma: float, dtype: torch.dtype
) -> Float[Tensor, "{length} tiles"]:
    """The weight of each tile's score in every pixel of a side; the weights of a pixel sum to one."""
    weights = _interpolated(torch.tensor(nodes, dtype=torch.float64), length)
    return (_smoothed(weights, kernel, sigma) if sigma else weights).to(dtype)


def _interpolated(nodes: Float[Tensor, " tiles"], length: int) -> Float[Tensor, "{length} tiles"]:
    pixels = torch.arange(length, dtype=nodes.dtype).clamp(float(nodes[0]), float(nodes[-1]))
    after = torch.searchsorted(nodes, pixels, right=True).clamp(max=len(nodes) - 1)
    before = (after - 1).clamp(min=0)
    # a single tile is its own neighbour, so the gap is zero
    part = (pixels - nodes[before]) / (nodes[after] - nodes[before]).clamp(min=1e-12)
    weights = torch.zeros(length, len(nodes), dtype=nodes.dtype)
    weights.scatter_add_(1, before[:, None], 1 - part[:, None])
    return weights.scatter_add_(1, after[:, None], part[:, None])


def _smoothed(columns: Float[Tensor, "h t"], kernel: int, sigma: float) -> Float[Tensor, "h t"]:
    """A Gaussian along the first axis, the border repeated."""
    offsets = torch.arange(kernel) - kernel // 2
    taps = torch.exp(-0.5 * (offsets / sigma).double().square())
    pixels = torch.arange(len(columns))
    result = torch.zeros_like(columns)
    for offset, tap in zip(offsets.tolist(), (taps / taps.sum()).tolist(), strict=True):
        result += tap * columns[(pixels + offset).clamp(0, len(columns) - 1)]
    return result
