"""The light views of the whole-image industrial ablation: a small translation and a small change of colour."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional as F

from firm.colour import Jitter, jittered
from firm.images import resize
from firm.types import FirmError, Focus


def _light() -> Jitter:
    return Jitter(brightness=0.1, contrast=0.1, saturation=0.1, hue=0.1)


@dataclass(frozen=True, kw_only=True)
class Shift:
    """The defaults are the authors'; gentle, because a crop may lose the small defect that makes an outlier."""

    translate: float = 0.1  # of the side, at most, along each axis and either way
    jitter: Jitter = field(default_factory=_light)

    def __post_init__(self) -> None:
        if not 0 <= self.translate < 1:
            raise FirmError(f"views.translate is {self.translate}; it must lie in 0..1, and 1 would leave no image")

    def __call__(
        self, images: UInt8[Tensor, "n c h w"], size: int, *, rng: torch.Generator, focus: Focus | None = None
    ) -> tuple[Float[Tensor, "n c p p"], Float[Tensor, "n c p p"]]:
        pixels = resize(images, size).float() / 255
        both = torch.cat([pixels, pixels])
        part = self.translate * (2 * torch.rand(len(both), 2, generator=rng) - 1)
        first, second = jittered(moved(both, part), self.jitter, rng=rng).chunk(2)
        return first, second


def moved(images: Float[Tensor, "n c h w"], part: Float[Tensor, "n 2"]) -> Float[Tensor, "n c h w"]:
    """Each image moved down and right by a part of its height and width, bilinear, with black moving in."""
    theta = torch.eye(2, 3).repeat(len(images), 1, 1)
    theta[:, :, 2] = -2 * part.flip(1)  # the grid counts x before y, from -1 to 1
    grid = F.affine_grid(theta.to(images.device), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
