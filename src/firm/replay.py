"""Outliers made ahead and used several times, so that synthesis keeps up with training on one core.

A blended defect costs more than the patches cut from it teach at once. A window of ready outliers slides along with
the steps: outlier j is a function of the seed and of j alone, so a resumed run fills the window with the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from firm.outliers.sparing import spared
from firm.streams import stream
from firm.types import Outliers, OutlierSource, Scene

READY = 128  # outliers at hand


@dataclass
class Replay:
    """A window over the endless sequence of outliers of one training."""

    source: OutlierSource
    images: UInt8[Tensor, "n c h w"]
    foreground: Bool[Tensor, "n h w"]
    seed: int
    per_step: float  # new outliers to a step; below what a step uses they are used several times
    hidden: Bool[Tensor, "n h w"] | None = None

    def __post_init__(self) -> None:
        self._made: dict[int, Outliers] = {}

    def take(self, step: int, count: int) -> Outliers:
        """So many different outliers of the window of this step, drawn anew for every step."""
        first = int(step * self.per_step)
        ready = max(READY, count)
        for gone in [number for number in self._made if not first <= number < first + ready]:
            del self._made[gone]
        drawn = first + torch.randperm(ready, generator=stream(self.seed, "replay", step))[:count]
        for number in range(first, first + ready):
            if number not in self._made:
                self._made[number] = self._make(number)
        chosen = [self._made[number] for number in drawn.tolist()]
        return Outliers(
            torch.cat([one.images for one in chosen]),
            torch.cat([one.group for one in chosen]),
            torch.cat([self._where(one) for one in chosen]),
        )

    def _make(self, number: int) -> Outliers:
        """The outlier of this number, from a good image drawn for it."""
        which: Int[Tensor, " 1"] = torch.randint(
            len(self.images), (1,), generator=stream(self.seed, "replay image", number)
        )
        scene = Scene.among(self.images, self.foreground, self.hidden, which)
        return spared(self.source, self.images[which], rng=stream(self.seed, "replay outlier", number), scene=scene)

    def _where(self, made: Outliers) -> Bool[Tensor, "1 h w"]:
        return made.where if made.where is not None else torch.ones_like(made.images[:, 0], dtype=torch.bool)
