"""Patches compared with one direction instead of a bank: the mean of all normal ones, s_proto cell by cell.

FIRM draws all normal patches together behind its head, so that their mean says what a neighbour would, and says it more
calmly: on held-out good images it tells synthetic defects better apart, and it costs no search.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from firm.bank import Memory, complete, statistics
from firm.memory import unit
from firm.types import FirmError

TENSORS = ("direction", "mean", "deviation")
IMAGES = 16  # whose patches are turned into directions at once


@dataclass(frozen=True)
class Prototype:
    """The direction of the mean normal patch; tensors only, so that it can be saved."""

    direction: Float[Tensor, " d"]
    memory: Memory
    mean: Float[Tensor, "r c"]  # of the scores of good images; 0 and 1 without standardise
    deviation: Float[Tensor, "r c"]

    def score(self, features: Float[Tensor, "n r c d"]) -> Float[Tensor, "n r c"]:
        """One less the cosine to the prototype for every patch; standardised if asked."""
        if features.shape[1:] != (*self.mean.shape, len(self.direction)):
            raise FirmError(
                f"features {tuple(features.shape[1:])} do not fit a prototype of "
                f"{(*self.mean.shape, len(self.direction))}; use the encoder, image size and tiling it was fitted with"
            )
        away = _away(features, self.direction.expand(len(features), -1))
        return (away - self.mean) / self.deviation if self.memory.standardise else away

    def weights(self, patches: Float[Tensor, "p d"], cells: Int[Tensor, " p"]) -> Float[Tensor, " p"]:
        """As `Bank.weights`: one alone is no crowd, so no patch counts more than another."""
        return torch.ones(len(patches))

    def tensors(self) -> dict[str, Tensor]:
        """Everything but the settings."""
        return {name: getattr(self, name) for name in TENSORS}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], memory: Memory) -> Prototype:
        """The prototype whose `tensors` these are."""
        return cls(**complete("prototype", TENSORS, tensors), memory=memory)


def fit_prototype(
    features: Float[Tensor, "n r c d"],
    memory: Memory,
    *,
    parts: Int[Tensor, " n"] | None = None,
    seen: Bool[Tensor, "n r c"] | None = None,
) -> Prototype:
    """The prototype of good images, given as their features on the grid; `parts` numbers the part each shows.

    Only patches that are `seen` count. What is standardised by is what every image scores without its own part.
    """
    n, rows, columns, _ = features.shape
    if not n or (seen is not None and not bool(seen.any())):
        raise FirmError("there are no good patches to remember; give at least 1 good image")
    owner = torch.arange(n) if parts is None or len(parts.unique()) < 2 else parts
    sums = torch.cat([_summed(features[some], None if seen is None else seen[some]) for some in _some(n)])
    whole = sums.sum(0)
    found = Prototype(_direction(whole[None])[0], memory, torch.zeros(rows, columns), torch.ones(rows, columns))
    if not memory.standardise:
        return found
    if n < 2:
        raise FirmError("1 good image cannot be standardised by others; give 2 or set memory.standardise to False")
    own = torch.zeros(int(owner.max()) + 1, sums.shape[1], dtype=sums.dtype).index_add_(0, owner, sums)
    others = _direction(whole - own[owner])
    scores = torch.cat([_away(features[some], others[some]) for some in _some(n)])
    mean, deviation = statistics(scores, seen)
    return replace(found, mean=mean, deviation=deviation)


def _some(images: int) -> tuple[Int[Tensor, " m"], ...]:
    return torch.arange(images).split(IMAGES)


def _summed(features: Float[Tensor, "n r c d"], seen: Bool[Tensor, "n r c"] | None) -> Float[Tensor, "n d"]:
    """The sum of the directions of the patches of each image; in doubles, for there are many."""
    units = unit(features.flatten(0, 2)).view_as(features).double()
    return (units if seen is None else units * seen[..., None]).sum((1, 2))


def _direction(sums: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    return unit(sums).float()


def _away(features: Float[Tensor, "n r c d"], directions: Float[Tensor, "n d"]) -> Float[Tensor, "n r c"]:
    """One less the cosine of every patch to the direction of its image."""
    units = unit(features.flatten(0, 2)).view_as(features)
    return 1 - (units @ directions[:, None, :, None].to(units)).squeeze(3)
