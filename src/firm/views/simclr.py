"""SimCLR-style views: random resized crop, colour jitter, blur (appendix A), batched on the images' device."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from firm.colour import Jitter, grey, jittered
from firm.types import FirmError, Focus


@dataclass(frozen=True, kw_only=True)
class Augment:
    """The defaults are the authors' parameters; DROC's and CSI's are values of the same settings."""

    crop: tuple[float, float] = (0.25, 1.0)
    crop_by: str = "area"  # the fraction is of the image's area, or of its "side" (DROC)
    aspect: tuple[float, float] = (1.0, 1.0)
    crop_first: bool = True  # CSI crops after the colour change
    flip: float = 0.0
    jitter: Jitter = field(default_factory=Jitter)
    grey: float = 0.0
    blur: float = 0.75
    sigma: tuple[float, float] = (0.1, 2.0)

    def __post_init__(self) -> None:
        if self.crop_by not in ("area", "side"):
            raise FirmError(f"views.crop_by is {self.crop_by!r}; use area or side")
        if not 0 < self.crop[0] <= self.crop[1] <= 1:
            raise FirmError(f"views.crop is {self.crop}; it must rise within 0..1")
        if not all(0 <= probability <= 1 for probability in (self.flip, self.grey, self.blur)):
            raise FirmError("views.flip, views.grey and views.blur are probabilities; they must lie in 0..1")
        if not 0 < self.aspect[0] <= self.aspect[1] or not 0 < self.sigma[0] <= self.sigma[1]:
            raise FirmError(f"views.aspect {self.aspect} and views.sigma {self.sigma} must rise from above 0")

    def __call__(
        self, images: Tensor, size: int, *, rng: torch.Generator, focus: Focus | None = None
    ) -> tuple[Tensor, Tensor]:
        both = self._one(torch.cat([images, images]), size, rng)
        first, second = both.chunk(2)
        return first, second

    def _one(self, images: Tensor, size: int, rng: torch.Generator) -> Float[Tensor, "n c size size"]:
        x = images.float() / 255 if images.dtype == torch.uint8 else images
        if self.crop_first:
            x = self._cropped(x, size, rng)
        x = jittered(x, self.jitter, rng=rng)
        if self.grey:
            x = _some(x, self.grey, rng, lambda y: grey(y).expand_as(y))
        if self.blur:
            x = self._blurred(x, rng)
        return x if self.crop_first else self._cropped(x, size, rng)

    def _cropped(self, images: Tensor, size: int, rng: torch.Generator) -> Tensor:
        """A random window of each image, mirrored with probability `flip`, resampled to size x size."""
        n, _, height, width = images.shape
        fraction = self.crop[0] + (self.crop[1] - self.crop[0]) * torch.rand(n, generator=rng)
        side = fraction.sqrt() if self.crop_by == "area" else fraction
        low, high = map(math.log, self.aspect)
        stretch = torch.exp((low + (high - low) * torch.rand(n, generator=rng)) / 2)
        tall = (side / stretch * height).clamp(max=height).round().clamp(min=1)
        wide = (side * stretch * width).clamp(max=width).round().clamp(min=1)
        top = (torch.rand(n, generator=rng) * (height - tall + 1)).floor()
        left = (torch.rand(n, generator=rng) * (width - wide + 1)).floor()
        mirror = torch.where(torch.rand(n, generator=rng) < self.flip, -1.0, 1.0)
        return crop(images, top, left, tall, wide, size, mirror)

    def _blurred(self, images: Tensor, rng: torch.Generator) -> Tensor:
        n = len(images)
        sigma = self.sigma[0] + (self.sigma[1] - self.sigma[0]) * torch.rand(n, generator=rng)
        # three taps of a Gaussian; an image that is not to be blurred gets the identity
        side = torch.exp(-1 / (2 * sigma**2))
        side = torch.where(torch.rand(n, generator=rng) < self.blur, side, 0)
        weight = (side / (1 + 2 * side)).to(images.device)[:, None, None, None]
        for dim in (2, 3):
            images = _three_taps(images, weight, dim)
        return images


def crop(
    images: Float[Tensor, "n c h w"],
    top: Tensor,
    left: Tensor,
    tall: Tensor,
    wide: Tensor,
    size: int,
    mirror: Tensor | float = 1.0,
) -> Float[Tensor, "n c size size"]:
    """Resample one window of each image, given in pixels, to size x size (bilinear, mirrored where -1)."""
    n, _, height, width = images.shape
    theta = torch.zeros(n, 2, 3)
    theta[:, 0, 0] = wide / width * mirror
    theta[:, 1, 1] = tall / height
    theta[:, 0, 2] = (2 * left + wide) / width - 1
    theta[:, 1, 2] = (2 * top + tall) / height - 1
    grid = F.affine_grid(theta.to(images.device), [n, 1, size, size], align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _some(images: Tensor, probability: float, rng: torch.Generator, change) -> Tensor:  # type: ignore[no-untyped-def]
    chosen = (torch.rand(len(images), generator=rng) < probability).to(images.device)
    return torch.where(chosen[:, None, None, None], change(images), images)


def _three_taps(images: Tensor, weight: Tensor, dim: int) -> Tensor:
    """weight, 1 - 2 weight, weight along one dimension, reflecting at the border."""
    size = images.shape[dim]
    if size == 1:
        return images
    before = torch.cat([images.narrow(dim, 1, 1), images.narrow(dim, 0, size - 1)], dim)
    after = torch.cat([images.narrow(dim, 1, size - 1), images.narrow(dim, size - 2, 1)], dim)
    return images + weight * (before + after - 2 * images)
