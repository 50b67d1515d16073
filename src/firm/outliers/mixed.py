"""Mixed outliers: the defects of several local sources beside each other in one training.

What a network learns to see depends on what it was shown; several sources share fewer habits than one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from firm.outliers.local import LOCAL
from firm.streams import stream
from firm.types import FirmError, Outliers, Scene


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """The sources take turns at the outliers of an inlier; a kind of one source is no kind of another.

    With fewer outliers to an inlier than sources, each is of a source drawn at random, whatever its number. Each source
    draws from a stream of its own name, so that what one draws shifts no other.
    """

    sources: tuple[str, ...] = ("donor", "nsa", "cutpaste-union")
    per_inlier: int = 3  # where it exceeds the number of sources, the first of them are used more often

    def __post_init__(self) -> None:
        if not self.sources:
            raise FirmError(f"outliers.sources is empty; name some of {', '.join(LOCAL)}")
        for name in self.sources:
            if name not in LOCAL:
                raise FirmError(f"outliers.sources names {name!r}, no local source; use some of {', '.join(LOCAL)}")
            if self.sources.count(name) > 1:
                raise FirmError(f"outliers.sources names {name!r} more than once; name each source once")
        if self.per_inlier < 1:
            raise FirmError(f"outliers.per_inlier is {self.per_inlier}; use 1 or more outliers to an inlier")

    @property
    def kinds(self) -> int:
        return sum(LOCAL[name].kinds for name in self.sources)

    def __call__(
        self,
        inliers: UInt8[Tensor, "n c h w"],
        *,
        rng: torch.Generator,
        copy: Int[Tensor, " n"] | None = None,
        scene: Scene | None = None,
    ) -> Outliers:
        seed = int(torch.randint(2**62, (1,), generator=rng))  # before the copies: the same whoever draws those
        number = copy
        if number is None or self.per_inlier < len(self.sources):
            number = torch.randint(max(self.per_inlier, len(self.sources)), (len(inliers),), generator=rng)
        known = _open_scene(inliers) if scene is None else scene
        images, group = inliers.clone(), torch.ones(len(inliers), dtype=torch.long)
        kinds = 0
        for turn, name in enumerate(self.sources):
            at = (number % len(self.sources) == turn).nonzero().squeeze(1)
            if len(at):
                # no copy: the few numbers that come here would leave out variants, and a source draws among its own
                made = LOCAL[name](inliers[at], rng=stream(seed, name), scene=known.some(at))
                images[at], group[at] = made.images, kinds + made.group
            kinds += LOCAL[name].kinds
        return Outliers(images, group, (images != inliers).any(1))


def _open_scene(inliers: UInt8[Tensor, "n c h w"]) -> Scene:
    """The object everywhere, the inliers each other's donors: all of them, not only those of one source."""
    everywhere = torch.ones_like(inliers[:, 0], dtype=torch.bool)
    return Scene(everywhere, inliers, everywhere)
