"""Exact nearest neighbours by matrix products: among all keys, or among those near the query's own grid cell."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from firm.errors import SettingError

CHUNK = 2**22  # similarities held at once: 16 MB; fewer cost speed in the product, more in the top k
BLOCK, KEYS = 1024, 512  # queries and keys of one matrix product of `largest_products`: 2 MB of products

SearchStep = tuple[slice, Tensor | None]  # rows of keys, and the cells whose queries are compared with them; None: all


def unit(embeddings: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Embeddings scaled to length one; a zero vector stays zero."""
    return F.normalize(embeddings.float(), dim=1, eps=1e-12)


@torch.no_grad()
def nearest(queries: Float[Tensor, "n d"], bank: Float[Tensor, "m d"], k: int) -> Float[Tensor, "n k"]:
    """The k largest cosines of each query to the bank, both given as unit vectors, largest first."""
    if not 1 <= k <= len(bank):
        raise SettingError(f"k = {k} neighbours cannot be found among {len(bank)} reference images; use a smaller k")
    if not len(queries):
        return queries.new_empty(0, k)
    rows = min(len(queries), max(1, CHUNK // len(bank)))
    buffer = queries.new_empty(rows, len(bank))  # allocating it for every product is a tenth slower
    parts = []
    for chunk in queries.split(rows):
        cosines = torch.mm(chunk, bank.T, out=buffer[: len(chunk)])
        # one maximum is cheaper than a top 1
        parts.append(cosines.amax(1, keepdim=True) if k == 1 else cosines.topk(k, dim=1).values)
    return torch.cat(parts)


def search_plan(
    cell: Int[Tensor, " m"], shape: tuple[int, int], radius: int, k: int, owner: Int[Tensor, " m"] | None = None
) -> list[SearchStep]:
    """Every key once: in blocks for all cells (radius -1), or cell by cell for the cells around it.

    `cell` is the grid cell of each key, row-major and ascending; `radius`, `k` and `owner` as in `search_radii`.
    """
    if radius < 0:
        return [(rows, None) for rows in _blocks(0, len(cell))]
    ends = cell.bincount(minlength=math.prod(shape)).cumsum(0).tolist()
    radii = search_radii(cell, shape, radius, k, owner).numpy()
    row, column = np.indices(shape)
    steps: list[SearchStep] = []
    for (at_row, at_column), begin, end in zip(np.ndindex(shape), [0, *ends], ends, strict=False):
        near = np.maximum(abs(row - at_row), abs(column - at_column)) <= radii
        steps += [(rows, torch.from_numpy(np.flatnonzero(near))) for rows in _blocks(begin, end)]
    return steps


def search_radii(
    cell: Int[Tensor, " m"], shape: tuple[int, int], radius: int, k: int, owner: Int[Tensor, " m"] | None = None
) -> Int[Tensor, "r c"]:
    """How many cells around itself each cell searches: `radius`, or more until it has k keys.

    With the owner of each key (its image or part) it has k keys whichever owner is left out.
    """
    rows, columns = shape
    owners = torch.zeros_like(cell) if owner is None else owner
    count = (owners * rows * columns + cell).bincount(minlength=(int(owners.max()) + 1) * rows * columns)
    here = count.reshape(-1, rows, columns).float()
    radii = torch.full(shape, -1)
    side = max(shape)
    for wider in range(min(radius, side - 1), side):
        within = F.avg_pool2d(here, 2 * wider + 1, stride=1, padding=wider, divisor_override=1)  # a sum
        keys = within[0] if owner is None else within.sum(0) - within.amax(0)
        radii[(radii < 0) & (keys >= k)] = wider
        if bool((radii >= 0).all()):
            break
    return radii


@torch.no_grad()
def largest_products(
    keys: Float[Tensor, "m e"],
    plan: list[SearchStep],
    queries: Float[Tensor, "cells n e"],
    k: int,
    owners: tuple[Int[Tensor, " n"], Int[Tensor, " m"]] | None = None,
) -> Float[Tensor, "cells n k"]:
    """The k largest products of every query with the keys its cell is compared with.

    With `owners` (of the images, of the keys) an image is compared only with keys of other owners. Queries are ordered
    by cell, so that what a key is compared with is gathered in few, long pieces.
    """
    cells, images = queries.shape[:2]
    best = queries.new_full((cells, images, k), -math.inf)
    at_once = max(1, BLOCK // max(1, images))
    buffer = queries.new_empty(min(at_once, cells) * images * KEYS)  # allocating it every time is a tenth slower
    for rows, near in plan:
        key_block = keys[rows].T
        own = None if owners is None else (owners[0][:, None] == owners[1][rows]).nonzero().T
        runs = [slice(at, at + at_once) for at in range(0, cells, at_once)]
        for part in runs if near is None else near.to(queries.device).split(at_once):
            # whole cells at a time: indexing would copy number by number
            asked = (queries[part] if isinstance(part, slice) else queries.index_select(0, part)).flatten(0, 1)
            products = buffer[: len(asked) * key_block.shape[1]].view(len(asked), -1)
            products = torch.mm(asked, key_block, out=products).unflatten(0, (-1, images))
            if own is not None:
                products[:, own[0], own[1]] = -math.inf  # few: a mask would be as large as the products
            best[part] = _merged(best[part], products, k)
    return best


def _merged(best: Float[Tensor, "c n k"], products: Float[Tensor, "c n m"], k: int) -> Float[Tensor, "c n k"]:
    if k == 1:  # one maximum is cheaper than a top 1
        return torch.maximum(best, products.amax(2, keepdim=True))
    largest = products.topk(min(k, products.shape[2]), dim=2).values
    return torch.cat([best, largest], dim=2).topk(k, dim=2).values


def _blocks(begin: int, end: int) -> Iterator[slice]:
    return (slice(at, min(at + KEYS, end)) for at in range(begin, end, KEYS))
