"""The small network that FIRM trains behind a frozen backbone, on the features of one product."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from firm.errors import SettingError
from firm.networks.backbone import Backbone, Facts
from firm.networks.heads import Encoder, Head, draw_weights, projection

MOST_NOISE = 10.0
COARSEST = 32  # px: the stride of the deepest stage; images are padded to a multiple of it
ROWS = 65_536  # features adapted at once


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """Which backbone gives the features of patches, and the adaptor behind it; without a name there is no backbone."""

    name: str = ""  # efficientnet-lite0, resnet18, ..., timm:NAME, or a weights file
    stages: tuple[int, ...] = ()  # counted from 1; none: the default of the backbone
    pool: int = 3  # a patch is so many cells wide and tall, whose features are averaged
    margin: int = 32  # px mirrored around an image; 0 pads with zeros, which look like an edge
    hidden: tuple[int, ...] = (256,)  # of the adaptor
    out: int = 64
    noise: float = 0.0  # deviation of noise added to features in training, in their own; against memorising

    def __post_init__(self) -> None:
        if self.pool < 1 or self.pool % 2 == 0:
            raise SettingError(f"pretrained.pool is {self.pool}; a patch around a cell is an odd number of cells wide")
        if self.margin < 0 or self.margin % COARSEST:
            raise SettingError(f"pretrained.margin is {self.margin}; use 0 or a multiple of {COARSEST} px")
        if min((*self.hidden, self.out)) < 1:
            raise SettingError("pretrained.hidden and out must be at least 1")
        if not 0 <= self.noise <= MOST_NOISE:
            raise SettingError(f"pretrained.noise is {self.noise}; use 0 for none, and at most {MOST_NOISE:g}")

    def stages_of(self, facts: Facts) -> tuple[int, ...]:
        """The stages to take, refused if the backbone does not have them."""
        stages = self.stages or facts.stages
        if not set(stages) <= set(range(1, len(facts.strides) + 1)):
            raise SettingError(f"pretrained.stages is {list(stages)}; {facts.name} has 1..{len(facts.strides)}")
        return stages


class Adaptor(nn.Module):
    """Features of a patch -> features in which good patches are alike; the projection exists for the loss.

    Features are first standardised by the mean and deviation of the good patches.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, inside: int, settings: Pretrained, head: Head) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(inside))
        self.register_buffer("std", torch.ones(inside))
        self.adapt = projection(inside, Head(hidden=settings.hidden, out=settings.out))
        self.head = projection(settings.out, head)

    @classmethod
    def build(
        cls, statistics: tuple[Tensor, Tensor], settings: Pretrained, encoder: Encoder, *, rng: torch.Generator
    ) -> Self:
        """A new adaptor for features of this mean and deviation, with weights drawn from `rng`."""
        adaptor = cls(len(statistics[0]), settings, encoder.head)
        draw_weights(adaptor, encoder.norm_momentum, rng=rng)
        adaptor.mean, adaptor.std = statistics
        return adaptor

    def forward(self, features: Float[Tensor, "b d"]) -> Float[Tensor, "b p"]:
        return self.head(self.adapted(features))

    def adapted(self, features: Float[Tensor, "b d"]) -> Float[Tensor, "b e"]:
        return self.adapt((features - self.mean) / self.std)


class Adapted(nn.Module):
    """Backbone and adaptor together: what a detector holds."""

    def __init__(self, backbone: Backbone, adaptor: Adaptor) -> None:
        super().__init__()
        self.backbone = backbone
        self.adaptor = adaptor

    def adapt(self, features: Float[Tensor, "n r c d"]) -> Float[Tensor, "n r c e"]:
        """The adapted features of every cell."""
        return self._apply_in_chunks(self.adaptor.adapted, features)

    def project(self, features: Float[Tensor, "n r c d"]) -> Float[Tensor, "n r c p"]:
        """The projection of every cell, where the loss has pulled good patches together."""
        return self._apply_in_chunks(self.adaptor, features)

    @torch.no_grad()
    def _apply_in_chunks(self, layers: Callable[[Tensor], Tensor], features: Float[Tensor, "n r c d"]) -> Tensor:
        """Chunk by chunk, gathered on the CPU."""
        self.adaptor.eval()
        device = self.adaptor.mean.device
        parts = [layers(part.float().to(device)).cpu() for part in features.flatten(0, 2).split(ROWS)]
        return torch.cat(parts).unflatten(0, features.shape[:3])
