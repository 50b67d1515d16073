"""Which normal patches are remembered, and how a patch is compared with them."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from firm.errors import SettingError
from firm.scoring.coreset import SAMPLERS
from firm.scoring.knn import unit

METRICS = ("cosine", "l2", "angle")
BY_DIRECTION = ("encoder", "projection")  # learnt features are compared by their direction, all others by distance


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Which normal patches the bank keeps, and with which of them a patch is compared."""

    sampling_ratio: float = 1.0  # the part of all normal patches that is kept
    sampling: str = "random"  # or coreset: greedy k-center, of each place where a neighbourhood is set
    neighbourhood: int = -1  # compare only with patches at most so many cells away (position counts); -1: with all
    standardise: bool = False  # scores as deviations from what good images score at the same place
    k: int = 1
    metric: str = "cosine"  # of learnt features; l2: distance of the unscaled features; angle: cosine of every kind
    reweight: int = 0  # PatchCore's image score over so many neighbours (9 there); 0: off. Maps do not change

    def __post_init__(self) -> None:
        for name, allowed, fix in (
            ("sampling_ratio", 0 < self.sampling_ratio <= 1, "use a part above 0 and at most 1"),
            ("sampling", self.sampling in SAMPLERS, f"use one of {', '.join(SAMPLERS)}"),
            ("neighbourhood", self.neighbourhood >= -1, "use -1 for every place or 0 and more cells"),
            ("metric", self.metric in METRICS, f"use one of {', '.join(METRICS)}"),
            ("k", self.k >= 1, "use 1 neighbour or more"),
            ("reweight", self.reweight == 0 or self.reweight >= 2, "use 0 for none or 2 and more, 9 as PatchCore"),
            ("reweight", not (self.reweight and self.standardise), "it needs memory.standardise=false, or use 0"),
        ):
            if not allowed:
                raise SettingError(f"memory.{name} is {getattr(self, name)!r}; {fix}")

    @property
    def by_direction(self) -> bool:
        """Whether patches are compared by the cosine of their features."""
        return self.metric != "l2"

    def keys(self, features: Float[Tensor, "p d"]) -> Float[Tensor, "p e"]:
        """What the bank stores of features, so that the nearest key has the largest product with a query.

        |q - b|^2 = |q|^2 - 2 (q b - |b|^2 / 2), so one number beside b turns the product into the distance.
        """
        if self.by_direction:
            return unit(features)
        return torch.cat([features, -features.square().sum(1, keepdim=True) / 2], dim=1)

    def queries(self, features: Float[Tensor, "p d"]) -> Float[Tensor, "p e"]:
        """What is multiplied with the keys."""
        if self.by_direction:
            return unit(features)
        return torch.cat([features, features.new_ones(len(features), 1)], dim=1)

    def distances(self, queries: Float[Tensor, "p e"], products: Float[Tensor, "p k"]) -> Float[Tensor, "p k"]:
        """The distances behind products with keys."""
        if self.by_direction:
            return 1 - products
        squares = queries[:, :-1].square().sum(1, keepdim=True)
        return (squares - 2 * products).clamp(min=0).sqrt()

    def kept(self, patches: int) -> int:
        """How many of so many patches are kept."""
        return max(1, round(self.sampling_ratio * patches))


def memory_for(memory: Memory, kind: str) -> Memory:
    """Learnt features are compared by cosine; pixels and unadapted features by distance, unless by angle."""
    return memory if kind in BY_DIRECTION or memory.metric == "angle" else replace(memory, metric="l2")
