"""Views of whole images, batched on their device: SimCLR (appendix A), and a small translation (section 6)."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, UInt8
from torch import Generator, Tensor
from torch.nn import functional as F

from firm.errors import SettingError
from firm.images.colour import Jitter, grey, jittered
from firm.images.preprocess import resize
from firm.types import Focus

Images = UInt8[Tensor, "n c h w"]
Pair = tuple[Float[Tensor, "n c p p"], Float[Tensor, "n c p p"]]
SMALL = Jitter(brightness=0.1, contrast=0.1, saturation=0.1, hue=0.1)


@dataclass(frozen=True, kw_only=True)
class SimCLR:
    """Random resized crop, colour jitter and blur; the defaults are the authors' parameters."""

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
        rises, probability = "it must rise from above 0", "a probability lies in 0..1"
        for name, allowed, fix in (
            ("crop_by", self.crop_by in ("area", "side"), "use area or side"),
            ("crop", 0 < self.crop[0] <= self.crop[1] <= 1, "it must rise within 0..1"),
            ("flip", 0 <= self.flip <= 1, probability),
            ("grey", 0 <= self.grey <= 1, probability),
            ("blur", 0 <= self.blur <= 1, probability),
            ("aspect", 0 < self.aspect[0] <= self.aspect[1], rises),
            ("sigma", 0 < self.sigma[0] <= self.sigma[1], rises),
        ):
            if not allowed:
                raise SettingError(f"views.{name} is {getattr(self, name)!r}; {fix}")

    def __call__(self, images: Tensor, size: int, *, rng: Generator, focus: Focus | None = None) -> Pair:
        x = torch.cat([images, images])
        x = x.float() / 255 if x.dtype == torch.uint8 else x
        if self.crop_first:
            x = self._cropped(x, size, rng)
        x = jittered(x, self.jitter, rng=rng)
        if self.grey:
            chosen = (torch.rand(len(x), generator=rng) < self.grey).to(x.device)
            x = torch.where(chosen[:, None, None, None], grey(x).expand_as(x), x)
        if self.blur:
            x = self._blurred(x, rng)
        first, second = (x if self.crop_first else self._cropped(x, size, rng)).chunk(2)
        return first, second

    def _cropped(self, images: Tensor, size: int, rng: Generator) -> Tensor:
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

    def _blurred(self, images: Tensor, rng: Generator) -> Tensor:
        n = len(images)
        sigma = self.sigma[0] + (self.sigma[1] - self.sigma[0]) * torch.rand(n, generator=rng)
        # three taps of a Gaussian; without blur the identity
        side = torch.exp(-1 / (2 * sigma**2))
        side = torch.where(torch.rand(n, generator=rng) < self.blur, side, 0)
        weight = (side / (1 + 2 * side)).to(images.device)[:, None, None, None]
        for dim, border in ((2, (0, 0, 1, 1)), (3, (1, 1, 0, 0))):
            if (length := images.shape[dim]) > 1:
                padded = F.pad(images, border, mode="reflect")
                around = padded.narrow(dim, 0, length) + padded.narrow(dim, 2, length)
                images = images + weight * (around - 2 * images)
        return images


DROC = SimCLR(crop=(0.5, 1.0), crop_by="side", flip=0.5, jitter=Jitter(additive_brightness=True), grey=0.2, blur=0.0)
OFTEN = Jitter(hue=0.1, probability=0.8)
CSI = SimCLR(crop=(0.08, 1.0), aspect=(3 / 4, 4 / 3), crop_first=False, flip=0.5, jitter=OFTEN, grey=0.2, blur=0.0)


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A small move and change of colour (the authors' values): a crop may lose the small defect of an outlier."""

    translate: float = 0.1  # at most, as a fraction of the side, along each axis in either direction
    jitter: Jitter = SMALL

    def __post_init__(self) -> None:
        if not 0 <= self.translate < 1:
            raise SettingError(f"views.translate is {self.translate}; use 0 or more, below 1")

    def __call__(self, images: Images, size: int, *, rng: Generator, focus: Focus | None = None) -> Pair:
        pixels = resize(images, size).float() / 255
        both = torch.cat([pixels, pixels])
        fraction = self.translate * (2 * torch.rand(len(both), 2, generator=rng) - 1)
        first, second = jittered(moved(both, fraction), self.jitter, rng=rng).chunk(2)
        return first, second


def crop(
    images: Float[Tensor, "n c h w"],
    top: Tensor,
    left: Tensor,
    tall: Tensor,
    wide: Tensor,
    size: int,
    mirror: Tensor | float = 1.0,
) -> Float[Tensor, "n c size size"]:
    """One window of each image, given in pixels, resampled to size x size (bilinear, mirrored where `mirror` is -1)."""
    n, _, height, width = images.shape
    theta = torch.zeros(n, 2, 3)
    theta[:, 0, 0] = wide / width * mirror
    theta[:, 1, 1] = tall / height
    theta[:, 0, 2] = (2 * left + wide) / width - 1
    theta[:, 1, 2] = (2 * top + tall) / height - 1
    grid = F.affine_grid(theta.to(images.device), [n, 1, size, size], align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def moved(images: Float[Tensor, "n c h w"], fraction: Float[Tensor, "n 2"]) -> Float[Tensor, "n c h w"]:
    """Each image moved down and right by a fraction of its height and width, bilinear, filled with black."""
    theta = torch.eye(2, 3).repeat(len(images), 1, 1)
    theta[:, :, 2] = -2 * fraction.flip(1)  # the grid counts x before y, from -1 to 1
    grid = F.affine_grid(theta.to(images.device), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
