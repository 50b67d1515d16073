"""The small network that FIRM trains behind a frozen backbone, on the features of patches or of whole images."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from firm.errors import SettingError
from firm.networks.backbone import Backbone, Facts, architecture
from firm.networks.heads import Encoder, Head, Network, draw_weights, projection

MOST_NOISE = 10.0
COARSEST = 32  # px: the stride of the deepest stage; images are padded to a multiple of it
PIXELS = "pixels"  # features of whole images without a network
ROWS = 65_536  # features adapted at once


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """Which backbone gives the features, and the adaptor behind it; without a name there is no backbone."""

    name: str = ""  # efficientnet-lite0, resnet18, ..., timm:NAME, or a weights file
    stages: tuple[int, ...] = ()  # counted from 1; none: the default of the backbone
    pool: int = 3  # a patch is so many cells wide and tall, whose features are averaged
    margin: int = 32  # px mirrored around an image; 0 pads with zeros, which look like an edge
    hidden: tuple[int, ...] = (256,)  # of the adaptor
    out: int = 64
    noise: float = 0.0  # deviation of noise added to features in training, in their own; against memorising
    residual: bool = False  # the adaptor adds to the features and starts as the identity; `out` is then their number
    head: bool = True  # without one the loss is computed on the adapted features, and `projection` is the same
    views: int = 4  # augmented views of a whole image that are embedded; of an outlier two

    def __post_init__(self) -> None:
        if self.pool < 1 or self.pool % 2 == 0:
            raise SettingError(f"pretrained.pool is {self.pool}; a patch around a cell is an odd number of cells wide")
        if self.margin < 0 or self.margin % COARSEST:
            raise SettingError(f"pretrained.margin is {self.margin}; use 0 or a multiple of {COARSEST} px")
        if min((*self.hidden, self.out)) < 1:
            raise SettingError("pretrained.hidden and out must be at least 1")
        if self.views < 2:
            raise SettingError(f"pretrained.views is {self.views}; a positive pair needs 2 or more")
        if not 0 <= self.noise <= MOST_NOISE:
            raise SettingError(f"pretrained.noise is {self.noise}; use 0 for none, and at most {MOST_NOISE:g}")

    def stages_of(self, facts: Facts) -> tuple[int, ...]:
        """The stages to take, refused if the backbone does not have them."""
        stages = self.stages or facts.stages
        if not set(stages) <= set(range(1, len(facts.strides) + 1)):
            raise SettingError(f"pretrained.stages is {list(stages)}; {facts.name} has 1..{len(facts.strides)}")
        return stages


class Adaptor(nn.Module):
    """Features -> features in which good ones are alike; the projection exists for the loss.

    Features of patches are first standardised by the mean and deviation of the good ones; those of whole images have
    unit length instead, and mean and deviation are 0 and 1.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, inside: int, settings: Pretrained, head: Head) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(inside))
        self.register_buffer("std", torch.ones(inside))
        self.residual = settings.residual
        self.out = inside if self.residual else settings.out
        self.projected = head.out if settings.head else self.out
        self.adapt = projection(inside, Head(hidden=settings.hidden, out=self.out))
        self.head = projection(self.out, head) if settings.head else nn.Identity()

    @classmethod
    def build(
        cls, statistics: tuple[Tensor, Tensor], settings: Pretrained, encoder: Encoder, *, rng: torch.Generator
    ) -> Self:
        """A new adaptor for features of this mean and deviation, with weights drawn from `rng`."""
        adaptor = cls(len(statistics[0]), settings, encoder.head)
        draw_weights(adaptor, encoder.norm_momentum, rng=rng)
        if settings.residual:
            nn.init.zeros_(adaptor.adapt.get_parameter(f"{len(adaptor.adapt) - 1}.weight"))
        adaptor.mean, adaptor.std = statistics
        return adaptor

    def forward(self, features: Float[Tensor, "b d"]) -> Float[Tensor, "b p"]:
        return self.head(self.adapted(features))

    def adapted(self, features: Float[Tensor, "b d"]) -> Float[Tensor, "b e"]:
        inputs = (features - self.mean) / self.std
        return inputs + self.adapt(inputs) if self.residual else self.adapt(inputs)


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


class AdaptedImages(Adapted):
    """Backbone and adaptor for whole images: one vector for each, of the kind that a recipe's `features` names."""

    def __init__(self, backbone: Backbone, adaptor: Adaptor, settings: Pretrained, kind: str) -> None:
        super().__init__(backbone, adaptor)
        self.stages, self.kind = pooled_stages(settings, backbone), kind
        sizes = {"encoder": adaptor.out, "projection": adaptor.projected, PIXELS: 3 * COARSEST**2}
        self.dim = sizes.get(kind, len(adaptor.mean))

    @property
    def encoder(self) -> Self:
        """What scores are computed with, as of a `Network`."""
        return self

    def forward(self, images: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n d"]:
        """Features of normalised images."""
        if self.kind == PIXELS:
            return small(images)
        return self.from_pooled(pooled_features(self.backbone, self.stages, images))

    def from_pooled(self, pooled: Float[Tensor, "n e"]) -> Float[Tensor, "n d"]:
        """The features of images whose pooled stages are known."""
        if self.kind == "projection":
            return self.adaptor(pooled)
        return self.adaptor.adapted(pooled) if self.kind == "encoder" else pooled

    def describe(self) -> dict[str, Any]:
        """What the card says of the features beside the recipe."""
        return {"backbone": architecture(self.backbone), "licence": self.backbone.facts.licence}


def small(images: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n d"]:
    """Plain pixels, 32 along each side: what features must beat."""
    return F.adaptive_avg_pool2d(images, COARSEST).flatten(1)


ImageNetwork = Network | AdaptedImages  # what embeds a whole image


def image_network(network: Network | Adapted, settings: Pretrained, kind: str) -> ImageNetwork:
    """The network that embeds whole images; of an adaptor, by the features of this kind."""
    if isinstance(network, Network):
        return network
    return AdaptedImages(network.backbone, network.adaptor, settings, kind)


def pooled_stages(settings: Pretrained, backbone: Backbone) -> tuple[int, ...]:
    """The stages that describe a whole image: those asked for, else the last two."""
    stages = settings.stages or tuple(range(1, len(backbone.facts.strides) + 1))[-2:]
    return replace(settings, stages=stages).stages_of(backbone.facts)


@torch.no_grad()
def pooled_features(
    backbone: Backbone, stages: tuple[int, ...], images: Float[Tensor, "n 3 h w"], at_once: int = 0
) -> Float[Tensor, "n d"]:
    """The mean of each stage over the image, scaled to unit length, side by side."""
    outputs = backbone.stages(images, at_once)
    means = [backbone.finished(stage, outputs[stage - 1].mean((2, 3), keepdim=True)).flatten(1) for stage in stages]
    return torch.cat([F.normalize(mean.float(), dim=1) for mean in means], dim=1)
