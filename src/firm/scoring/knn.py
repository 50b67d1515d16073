"""Exact nearest neighbours by matrix products: among all keys, or among those near the query's own grid cell."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from firm.errors import SettingError

CHUNK = 2**22  # similarities held at once: 16 MB; fewer cost speed in the product, more in the top k
BLOCK, KEYS = 1024, 512  # queries and keys of one matrix product of `largest_products`: 2 MB of products
MOST = 0.8  # of the blocks of a step, above which to leave some out costs more than it saves
BLOCKS, LONGER = 128, 1.5  # blocks of one step of a plan, and how many times as long as the first the last may be


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


@dataclass(frozen=True)
class SearchStep:
    """Blocks of about equally many keys, and the cells whose queries are compared with each of them: equal products."""

    rows: Int[Tensor, "blocks l"]  # the keys of each block; a shorter one repeats its last
    repeated: Bool[Tensor, "blocks l"]
    near: Int[Tensor, "blocks w"]  # padded with cell 0


@dataclass(frozen=True)
class SearchPlan:
    """Every key once, in the steps."""

    steps: list[SearchStep]
    found: Int[Tensor, "cells v"]  # where in `near` of all steps each cell is, padded with the number of all places

    @property
    def width(self) -> int:
        """The most cells that are compared with one block."""
        return max(step.near.shape[1] for step in self.steps)

    def packed(self, keys: Float[Tensor, "m e"]) -> list[Float[Tensor, "_ e _"]]:
        """The keys of every step as its products want them: a copy that searches of single images repay."""
        return [_blocks_of(keys, step.rows).contiguous() for step in self.steps]


def search_plan(
    cell: Int[Tensor, " m"], shape: tuple[int, int], radius: int, k: int, owner: Int[Tensor, " m"] | None = None
) -> SearchPlan | None:
    """Which keys each cell is compared with: those of the cells around it, or all (radius -1: None).

    `cell` is the grid cell of each key; keys of one cell are in a row. `radius`, `k` and `owner` as in `search_radii`.
    """
    if radius < 0:
        return None
    count = math.prod(shape)
    cells, each = cell.unique_consecutive(return_counts=True)
    ends = each.cumsum(0).tolist()
    radii = search_radii(cell, shape, radius, k, owner).numpy()
    blocks: list[tuple[int, int, Tensor]] = []  # keys, the first of them, cells
    for at, begin, end in zip(cells.tolist(), [0, *ends], ends, strict=False):
        near = _cells_near(at, radii)
        blocks += [(rows.stop - rows.start, rows.start, near) for rows in _blocks(begin, end)]
    steps = [_step(alike) for alike in _alike(sorted(blocks, key=lambda block: block[:2]))]
    places = torch.cat([step.near.flatten() for step in steps])
    found = places.argsort(stable=True)[int((places < 0).sum()) :]
    views = places.clamp(min=-1).add(1).bincount(minlength=count + 1)[1:].tolist()
    steps = [replace(step, near=step.near.clamp(min=0)) for step in steps]
    return SearchPlan(steps, pad_sequence(found.split(views), True, len(places)))


def _cells_near(at: int, radii: npt.NDArray[np.int64]) -> Int[Tensor, " w"]:
    """The cells that are compared with the keys of this one."""
    row, column = divmod(at, radii.shape[1])
    most = int(radii.max())
    top, left = max(0, row - most), max(0, column - most)
    part = radii[top : row + most + 1, left : column + most + 1]
    down, across = np.indices(part.shape)
    near = np.maximum(abs(down + top - row), abs(across + left - column)) <= part
    return torch.from_numpy(((down + top) * radii.shape[1] + across + left)[near])


def _alike(blocks: list[tuple[int, int, Tensor]]) -> Iterator[list[tuple[int, int, Tensor]]]:
    """Runs of blocks, given in the order of their lengths, that differ little in length."""
    begin = 0
    for at, (length, _, _) in enumerate(blocks):
        if at - begin >= BLOCKS or length > LONGER * blocks[begin][0] + LONGER:
            yield blocks[begin:at]
            begin = at
    yield blocks[begin:]


def _step(blocks: list[tuple[int, int, Tensor]]) -> SearchStep:
    lengths, starts = (torch.tensor(values)[:, None] for values in list(zip(*blocks, strict=True))[:2])
    order = torch.arange(int(lengths.max()))
    near = pad_sequence([near for _, _, near in blocks], True, -1)
    return SearchStep(starts + order.minimum(lengths - 1), order >= lengths, near)


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
    plan: SearchPlan | None,
    queries: Float[Tensor, "cells n e"],
    k: int,
    owners: tuple[Int[Tensor, " n"], Int[Tensor, " m"]] | None = None,
    needed: Bool[Tensor, " cells"] | None = None,
    packed: list[Float[Tensor, "_ e _"]] | None = None,
) -> Float[Tensor, "cells n k"]:
    """The k largest products of every query with the keys its cell is compared with.

    With `owners` (of the images, of the keys) an image is compared only with keys of other owners. Of cells that are
    not `needed` the products may be minus infinity. Queries are ordered by cell, so that what a key is compared with is
    gathered in few, long pieces. `packed` are the keys as the plan packs them.
    """
    if plan is None:
        return _of_all(keys, queries, k, owners)
    (cells, images, dim), at = queries.shape, 0
    places = sum(step.near.numel() for step in plan.steps)
    table = queries.new_full((places + 1, images, k), -math.inf)
    for number, step in enumerate(plan.steps):
        section = table[at : at + step.near.numel()].unflatten(0, step.near.shape)
        at += step.near.numel()
        length, asked_each = step.rows.shape[1], step.near.shape[1] * images
        at_once = max(1, BLOCK * KEYS // (asked_each * max(length, dim)))
        buffer = queries.new_empty(min(at_once, len(step.rows)), asked_each, length)
        for part in _parts(step, at_once, needed):
            near, rows, repeated = (each[part].to(queries.device) for each in (step.near, step.rows, step.repeated))
            # whole cells at a time: indexing would copy number by number
            asked = queries.index_select(0, near.flatten()).view(len(near), asked_each, dim)
            block = _blocks_of(keys, rows) if packed is None else packed[number][part]
            products = torch.bmm(asked, block, out=buffer[: len(near)]).view(*near.shape, images, length)
            if k > 1:
                products.masked_fill_(repeated[:, None, None], -math.inf)
            if owners is not None:
                own = owners[0][:, None] == owners[1][rows][:, None]
                block_at, image, key = own.nonzero().T
                products[block_at, :, image, key] = -math.inf  # few: a mask would be as large as the products
            section[part, ..., : min(k, length)] = _largest(products.flatten(0, 1), k).unflatten(0, near.shape)
    found = table.index_select(0, plan.found.flatten().to(table.device)).unflatten(0, (cells, -1))
    return found.amax(1) if k == 1 else found.transpose(1, 2).flatten(2).topk(k, dim=2).values


def _parts(
    step: SearchStep, at_once: int, needed: Bool[Tensor, " cells"] | None
) -> list[slice] | tuple[Int[Tensor, " blocks"], ...]:
    """The blocks of a step, some at once: those with cells that are needed, or all if these are most of them."""
    blocks = None if needed is None else needed[step.near].any(1).nonzero().squeeze(1)
    if blocks is None or len(blocks) > MOST * len(step.near):
        return [slice(begin, begin + at_once) for begin in range(0, len(step.near), at_once)]
    return blocks.split(at_once) if len(blocks) else ()


def _of_all(
    keys: Float[Tensor, "m e"],
    queries: Float[Tensor, "cells n e"],
    k: int,
    owners: tuple[Int[Tensor, " n"], Int[Tensor, " m"]] | None,
) -> Float[Tensor, "cells n k"]:
    """`largest_products` with every key, a block of keys and of queries at a time."""
    cells, images = queries.shape[:2]
    best = queries.new_full((cells, images, k), -math.inf)
    at_once = max(1, BLOCK // max(1, images))
    buffer = queries.new_empty(min(at_once, cells) * images * KEYS)  # allocating it every time is a tenth slower
    for rows in _blocks(0, len(keys)):
        own = None if owners is None else (owners[0][:, None] == owners[1][rows]).nonzero().T
        for begin in range(0, cells, at_once):
            part = slice(begin, begin + at_once)
            asked, key_block = queries[part].flatten(0, 1), keys[rows].T
            products = buffer[: len(asked) * key_block.shape[1]].view(len(asked), -1)
            products = torch.mm(asked, key_block, out=products).unflatten(0, (-1, images))
            if own is not None:
                products[:, own[0], own[1]] = -math.inf
            best[part] = _largest(torch.cat([best[part], _largest(products, k)], dim=2), k)
    return best


def _largest(products: Float[Tensor, "c n m"], k: int) -> Float[Tensor, "c n j"]:
    """The k largest, or all if there are fewer; one maximum is cheaper than a top 1."""
    return products.amax(2, keepdim=True) if k == 1 else products.topk(min(k, products.shape[2]), dim=2).values


def _blocks_of(keys: Float[Tensor, "m e"], rows: Int[Tensor, "blocks l"]) -> Float[Tensor, "blocks e l"]:
    """These rows of keys, side by side: a view where they are equally far apart, else a copy."""
    starts, length = rows[:, 0], rows.shape[1]
    gap = int(starts[1] - starts[0]) if len(starts) > 1 else length
    if bool((starts.diff() == gap).all()) and bool((rows[:, -1] - starts == length - 1).all()):
        step, across = keys.stride()
        return keys[int(starts[0]) :].as_strided((len(rows), keys.shape[1], length), (gap * step, across, step))
    return keys.index_select(0, rows.flatten().to(keys.device)).unflatten(0, rows.shape).mT


def _blocks(begin: int, end: int) -> Iterator[slice]:
    return (slice(at, min(at + KEYS, end)) for at in range(begin, end, KEYS))
