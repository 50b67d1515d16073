"""The largest products of queries with keys, exactly: with all of them, or with those near the query's own place.

Matrix products of blocks that fit in the cache, with the largest products so far beside them. Queries lie cell by cell,
those of all images together, so that a cell near many others is gathered in few and long pieces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

BLOCK, KEYS = 1024, 512  # queries and keys of one matrix product: 2 MB of products

Some = slice | Tensor  # cells: a run of them, or their numbers
Visit = tuple[slice, Some]  # keys, and the cells whose queries are compared with them


@dataclass(frozen=True)
class Places:
    """Where the keys come from: whose each is, and its cell on the grid, row-major and rising."""

    owner: Int[Tensor, " m"]
    cell: Int[Tensor, " m"]
    shape: tuple[int, int]

    def visits(self, reach: int, k: int, *, apart: bool) -> list[Visit]:
        """Every key once, so that it is read once: in blocks for all cells, or cell by cell for those near."""
        if reach < 0:
            return [(rows, slice(None)) for rows in _blocks(0, len(self.cell))]
        ends = self.cell.bincount(minlength=math.prod(self.shape)).cumsum(0).tolist()
        near = _lookers(self.reaches(reach, k, apart=apart).tolist())
        return [
            (rows, torch.tensor(cells))
            for begin, end, cells in zip([0, *ends[:-1]], ends, near, strict=True)
            for rows in _blocks(begin, end)
        ]

    def reaches(self, reach: int, k: int, *, apart: bool) -> Int[Tensor, "r c"]:
        """How far each cell looks: as far as asked, or further until it finds k keys (`apart`: of other owners)."""
        rows, columns = self.shape
        owner = self.owner if apart else torch.zeros_like(self.owner)
        count = (owner * rows * columns + self.cell).bincount(minlength=(int(owner.max()) + 1) * rows * columns)
        here = count.reshape(-1, rows, columns).float()
        found = torch.full((rows, columns), -1)
        side = max(rows, columns)
        for radius in range(min(reach, side - 1), side):
            within = F.avg_pool2d(here, 2 * radius + 1, stride=1, padding=radius, divisor_override=1)  # a sum
            keys = within.sum(0) - within.amax(0) if apart else within[0]
            found[(found < 0) & (keys >= k)] = radius
            if bool((found >= 0).all()):
                break
        return found

    def within(self, cells: Int[Tensor, " p"], reaches: Int[Tensor, " p"]) -> Bool[Tensor, "p m"]:
        """Which keys lie so many cells from each of these."""
        columns = self.shape[1]
        down = (self.cell // columns - cells[:, None] // columns).abs()
        across = (self.cell % columns - cells[:, None] % columns).abs()
        return torch.maximum(down, across) <= reaches[:, None]


@torch.no_grad()
def largest_products(
    keys: Float[Tensor, "m e"],
    visits: list[Visit],
    queries: Float[Tensor, "cells n e"],
    k: int,
    owners: tuple[Int[Tensor, " n"], Int[Tensor, " m"]] | None = None,
) -> Float[Tensor, "cells n k"]:
    """The k largest products of every query with the keys its cell looks at; given whose both are, those of others."""
    cells, images = queries.shape[:2]
    best = queries.new_full((cells, images, k), -math.inf)
    at_once = max(1, BLOCK // max(1, images))
    room = queries.new_empty(min(at_once, cells) * images * KEYS)  # fresh memory for every product is a tenth slower
    for rows, looking in visits:
        some_keys, own = keys[rows].T, None if owners is None else (owners[0][:, None] == owners[1][rows]).nonzero().T
        for some in _portions(looking, cells, at_once):
            # whole cells at a time: indexing would copy number by number
            asked = (queries[some] if isinstance(some, slice) else queries.index_select(0, some)).flatten(0, 1)
            products = room[: len(asked) * some_keys.shape[1]].view(len(asked), -1)
            products = torch.mm(asked, some_keys, out=products).unflatten(0, (-1, images))
            if own is not None:
                products[:, own[0], own[1]] = -math.inf  # few: a mask would be as large as the products
            best[some] = _largest(best[some], products, k)
    return best


def _largest(best: Float[Tensor, "c n k"], products: Float[Tensor, "c n m"], k: int) -> Float[Tensor, "c n k"]:
    if k == 1:  # one maximum is cheaper than a top 1
        return torch.maximum(best, products.amax(2, keepdim=True))
    fresh = products.topk(min(k, products.shape[2]), dim=2).values
    return torch.cat([best, fresh], dim=2).topk(k, dim=2).values


def _blocks(begin: int, end: int) -> Iterator[slice]:
    return (slice(at, min(at + KEYS, end)) for at in range(begin, end, KEYS))


def _portions(looking: Some, cells: int, at_once: int) -> Iterator[Some]:
    if isinstance(looking, slice):
        return (slice(at, at + at_once) for at in range(*looking.indices(cells)[:2], at_once))
    return iter(looking.split(at_once))


def _lookers(reach: list[list[int]]) -> list[list[int]]:
    """For every cell those that look at it, as plain lists: tensors for every cell take longer than the search."""
    rows, columns = len(reach), len(reach[0])
    lookers: list[list[int]] = [[] for _ in range(rows * columns)]
    for row, column in itertools.product(range(rows), range(columns)):
        far = reach[row][column]
        for y in range(max(0, row - far), min(rows, row + far + 1)):
            for x in range(max(0, column - far), min(columns, column + far + 1)):
                lookers[y * columns + x].append(row * columns + column)
    return lookers
