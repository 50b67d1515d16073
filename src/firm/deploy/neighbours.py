"""Distances of patches to what is normal as modules of a graph: all constants, no Python that depends on the batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firm.scoring.knn import unit
from firm.scoring.memory import Memory
from firm.scoring.patch_bank import Bank, PatchReference, Prototype

CELLS, KEYS = 128, 16_384  # cells, or keys, that are compared at once: their products stay in the cache
NOTHING = -1e30  # product of a query with a key that is not there


def search_of(bank: PatchReference) -> nn.Module:
    """The distance to what is normal, by the kind of reference."""
    if isinstance(bank, Prototype):
        return ToMean(bank)
    assert isinstance(bank, Bank)
    return ToAll(bank) if bank.memory.neighbourhood < 0 else ToNear(bank)


class Standardised(nn.Module):
    """Distances of cells, n, r, c, as deviations from those of good images, where the memory says so."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, bank: PatchReference) -> None:
        super().__init__()
        self.memory: Memory = bank.memory
        self.register_buffer("mean", bank.mean.cpu())
        self.register_buffer("deviation", bank.deviation.cpu())

    def forward(self, features: Tensor) -> Tensor:
        distances = self.distances(features)
        return (distances - self.mean) / self.deviation if self.memory.standardise else distances

    def distances(self, features: Tensor) -> Tensor:
        raise NotImplementedError

    def split(self, bank: Bank) -> tuple[Tensor, Tensor]:
        """Keys, m, d, and what is added to the product with each of them: 0, or minus half its square."""
        if self.memory.by_direction:
            return bank.vectors.cpu(), torch.zeros(len(bank.vectors))
        return bank.vectors[:, :-1].cpu(), bank.vectors[:, -1].cpu()

    def queries(self, features: Tensor) -> Tensor:
        return unit(features) if self.memory.by_direction else features

    def behind(self, queries: Tensor, products: Tensor) -> Tensor:
        """The mean distance behind the largest products, of queries (..., d) and (..., k)."""
        if self.memory.by_direction:
            return (1 - products).mean(-1)
        squares = queries.square().sum(-1, keepdim=True)
        return (squares - 2 * products).clamp(min=0).sqrt().mean(-1)


class ToMean(Standardised):
    """To the mean direction of the good patches."""

    direction: Tensor

    def __init__(self, bank: Prototype) -> None:
        super().__init__(bank)
        self.register_buffer("direction", bank.direction.cpu())

    def distances(self, features: Tensor) -> Tensor:
        return 1 - F.normalize(features, dim=-1, eps=1e-12) @ self.direction


class ToAll(Standardised):
    """To the k nearest of all good patches."""

    keys: Tensor  # d, m
    added: Tensor  # m

    def __init__(self, bank: Bank) -> None:
        super().__init__(bank)
        keys, added = self.split(bank)
        self.register_buffer("keys", keys.T.contiguous())
        self.register_buffer("added", added)

    def distances(self, features: Tensor) -> Tensor:
        queries, k = self.queries(features.flatten(0, 2)), self.memory.k
        blocks = zip(self.keys.split(KEYS, dim=1), self.added.split(KEYS), strict=True)
        found = [largest(queries @ keys + added, k) for keys, added in blocks]
        best = found[0] if len(found) == 1 else largest(torch.cat(found, -1), k)
        return self.behind(queries, best).view(-1, *self.mean.shape)


class ToNear(Standardised):
    """To the k nearest of the good patches around each cell.

    The patches of one cell are a block, padded to the longest. A block is compared with all cells it is near to; then
    each cell gathers what the blocks around it found.
    """

    keys: Tensor  # cells, d, longest
    added: Tensor  # cells, 1, longest
    asked: Tensor  # cells, w: which cells each block is near to, padded with 0
    found: Tensor  # cells, v: where in `asked` each cell is, padded with the number of all places

    def __init__(self, bank: Bank) -> None:
        super().__init__(bank)
        cells, cell = math.prod(bank.shape), bank.cell.cpu()
        count = cell.bincount(minlength=cells)
        vectors, own = (each[cell.argsort(stable=True)] for each in self.split(bank))
        cell = cell.sort().values
        place = torch.arange(len(cell)) - (count.cumsum(0) - count)[cell]
        keys = torch.zeros(cells, int(count.max()), vectors.shape[1])
        added = torch.full(keys.shape[:2], NOTHING)
        keys[cell, place], added[cell, place] = vectors, own
        rows, columns = torch.arange(cells) // bank.shape[1], torch.arange(cells) % bank.shape[1]
        down, across = (rows[:, None] - rows).abs(), (columns[:, None] - columns).abs()
        near = torch.maximum(down, across) <= bank.radii.cpu()  # a block, and the cells it is near to
        self.register_buffer("keys", keys.mT.contiguous())
        self.register_buffer("added", added[:, None])
        self.register_buffer("asked", padded(near, torch.arange(cells).expand(cells, -1), 0))
        width = self.asked.shape[1]
        at = torch.arange(cells)[:, None] * width + near.long().cumsum(1) - 1
        self.register_buffer("found", padded(near.T, at.T, cells * width))

    def distances(self, features: Tensor) -> Tensor:
        memory, cells = self.memory, len(self.keys)
        queries = self.queries(features.flatten(0, 2))
        queries = queries.view(-1, cells, queries.shape[-1])
        by_cell = queries.transpose(0, 1)  # cells, n, d
        parts = []
        for begin in range(0, cells, CELLS):
            asked, keys, added = (each[begin : begin + CELLS] for each in (self.asked, self.keys, self.added))
            block = by_cell.index_select(0, asked.flatten())
            products = block.reshape(len(keys), -1, keys.shape[1]) @ keys + added
            best = largest(products, memory.k)
            parts.append(best.view(len(keys) * asked.shape[1], -1, best.shape[-1]))  # places, n, k
        table = torch.cat([*parts, parts[0][:1] * 0 + NOTHING])  # the last row is for padding
        around = table.index_select(0, self.found.flatten())
        around = around.view(*self.found.shape, -1, around.shape[-1]).permute(2, 0, 1, 3).flatten(2)  # n, cells, v k
        return self.behind(queries, largest(around, memory.k)).view(-1, *self.mean.shape)


def largest(values: Tensor, k: int) -> Tensor:
    """The k largest of the last axis, or all."""
    return values.amax(-1, keepdim=True) if k == 1 else values.topk(min(k, values.shape[-1]), dim=-1).values


def padded(chosen: Tensor, values: Tensor, padding: int) -> Tensor:
    """The chosen values of each row, moved to its begin; rows are cut to the longest."""
    order = (~chosen).long().argsort(dim=1, stable=True)[:, : int(chosen.sum(1).max())]
    return torch.where(chosen.gather(1, order), values.gather(1, order), padding)
