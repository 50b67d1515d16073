"""What every frozen network must give: images in, the output of each stage out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from firm.errors import ImageError
from firm.runtime.files import Card

TIMM = "timm:"  # how the name of a model of timm begins
PIXELS_AT_ONCE = 2 * 256 * 256  # on a CPU: more leave its cache, and each image takes longer


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a backbone. Stages are numbered from 1; none is finer than the one before."""

    name: str
    package: str = ""  # the PyPI distribution that holds the weights; "": a weights file is needed
    module: str = ""  # its import name
    file: str = ""  # the weights in it; without a package, a pattern of files in FIRM_DATA/weights
    digest: str = ""  # of that file; a package is not trusted to bring another
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    licence: str  # of the weights
    strides: tuple[int, ...] = (2, 4, 8, 16, 32)
    channels: tuple[int, ...]
    stages: tuple[int, ...] = (3, 4)  # used by default: fine enough to locate a defect, deep enough to know texture


class Trunk(nn.Module):
    """A network without its classifier."""

    def stages(self, images: Float[Tensor, "n 3 h w"]) -> list[Tensor]:
        """The output of each stage, n, c, r, s, for normalised images."""
        raise NotImplementedError

    def finished(self, stage: int, averaged: Float[Tensor, "n c r s"]) -> Float[Tensor, "n c r s"]:
        """The features of a stage, counted from 1, once it is averaged over patches."""
        return averaged


class Backbone(nn.Module):
    """A trunk with what is known of it; always in evaluation mode and without gradients."""

    mean: Tensor
    std: Tensor

    def __init__(self, trunk: Trunk, facts: Facts, *, deepest: int, digest: str, folded: bool) -> None:
        super().__init__()
        self.trunk = trunk
        self.facts = facts
        self.deepest = deepest  # the last of its stages, counted from 1
        self.digest = digest  # of the weights file
        self.folded = folded  # batch norms are part of the convolutions
        self.register_buffer("mean", torch.tensor(facts.mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(facts.std).view(1, 3, 1, 1), persistent=False)
        self.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Backbone:
        """Stays in evaluation mode, also as part of something that trains."""
        return super().train(False)

    def normalise(self, images: Float[Tensor, "n c h w"]) -> Float[Tensor, "n 3 h w"]:
        """Images in 0..1 as the network was trained to see them; a grey image becomes three equal channels."""
        if images.shape[1] not in (1, 3):
            raise ImageError(f"{self.facts.name} takes images of 1 or 3 channels, not {images.shape[1]}; convert them")
        return (images - self.mean) / self.std

    @torch.no_grad()
    def stages(self, images: Float[Tensor, "n 3 h w"], at_once: int = 0) -> list[Tensor]:
        """The output of each stage, n, c, r, s, for normalised images, up to the deepest that was loaded.

        With few at once, as by default on a CPU, an image's outputs are the same to the bit in any company.
        """
        if images.device.type != "cpu":
            return self.trunk.stages(images)
        at_once = at_once or max(1, PIXELS_AT_ONCE // max(1, images.shape[-2] * images.shape[-1]))
        images = images.contiguous(memory_format=torch.channels_last)
        portions = [self.trunk.stages(portion) for portion in images.split(at_once)]
        return [torch.cat(stage) for stage in zip(*portions, strict=True)]

    @torch.no_grad()
    def finished(self, stage: int, averaged: Float[Tensor, "n c r s"]) -> Float[Tensor, "n c r s"]:
        """The features of a stage, counted from 1, once it is averaged over patches."""
        return self.trunk.finished(stage, averaged)


def architecture(backbone: Backbone) -> Card:
    """What makes this backbone again beside its `state_dict`: for the card of a file that holds both."""
    name = backbone.facts.name
    return {"name": name, "deepest": backbone.deepest, "digest": backbone.digest, "folded": backbone.folded}
