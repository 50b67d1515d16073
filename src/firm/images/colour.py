"""Pillow's colour changes on batches of floats in 0..1 (one or three channels), one strength per image."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from firm.errors import SettingError

LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """Ranges of a random colour change: a factor in 1 ± x, for the hue a rotation in ± hue."""

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.4
    probability: float = 1.0
    additive_brightness: bool = False  # DROC adds the brightness change instead of multiplying by it

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1 or not 0 <= self.hue <= 0.5:
            raise SettingError(
                f"jitter.probability {self.probability} is not in 0..1 or jitter.hue {self.hue} not in 0..0.5"
            )
        if min(self.brightness, self.contrast, self.saturation) < 0:
            raise SettingError("jitter.brightness, jitter.contrast and jitter.saturation must be at least 0")


def is_grey(images: UInt8[Tensor, "n k h w"]) -> bool:
    """Whether no image has any colour."""
    return bool((images == images[:, :1]).all())


def grey(images: Float[Tensor, "n c h w"]) -> Float[Tensor, "n 1 h w"]:
    """Luminance; a one-channel image is returned unchanged."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue).unsqueeze(1)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Multiply by the factor."""
    return (images * factor[:, None, None, None]).clamp_(0, 1)


def shifted_brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Add factor - 1."""
    return (images + (factor[:, None, None, None] - 1)).clamp_(0, 1)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image's mean grey; factor > 1 moves away from it."""
    mean = grey(images).mean(dim=(1, 2, 3), keepdim=True)
    return torch.lerp(mean, images, factor[:, None, None, None]).clamp_(0, 1)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the grey image; factor > 1 moves away from it."""
    if images.shape[1] == 1:
        return images
    return torch.lerp(grey(images), images, factor[:, None, None, None]).clamp_(0, 1)


def turned_hue(images: Tensor, turn: Tensor) -> Tensor:
    """Rotate the hue by a fraction of the circle in -0.5..0.5."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    value, brightest = images.max(dim=1)
    chroma = value - images.amin(dim=1)
    safe = chroma.clamp(min=1e-8)
    hue = torch.where(brightest == 1, 2 + (blue - red) / safe, 4 + (red - green) / safe)  # in 0..6
    hue = torch.where(brightest == 0, (green - blue) / safe, hue) + 6 * turn[:, None, None]
    # each channel is the value minus the chroma times a trapezoid of the hue, 120 degrees apart
    offset = torch.tensor([5.0, 3.0, 1.0], device=images.device)[None, :, None, None]
    sector = torch.remainder(offset + hue[:, None], 6)
    trapezoid = torch.minimum(sector, 4 - sector).clamp_(0, 1)
    return value[:, None] - chroma[:, None] * trapezoid


def jittered(images: Float[Tensor, "n c h w"], jitter: Jitter, *, rng: torch.Generator) -> Float[Tensor, "n c h w"]:
    """Apply the four changes in a random order per image, to each image with the given probability."""
    n = len(images)
    ranges = (jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
    strength = torch.rand(4, n, generator=rng) * 2 - 1
    order = torch.rand(n, 4, generator=rng).argsort(dim=1)
    changed = torch.rand(n, generator=rng) < jitter.probability
    first: Callable[[Tensor, Tensor], Tensor] = shifted_brightness if jitter.additive_brightness else brightness
    result = images.clone()
    for place in range(4):
        for which, operation in enumerate((first, contrast, saturation, turned_hue)):
            chosen = ((order[:, place] == which) & changed).nonzero().squeeze(1)
            if len(chosen) and ranges[which]:
                amount = strength[which, chosen] * ranges[which]
                amount = (amount if which == 3 else (1 + amount).clamp(min=0)).to(images.device)
                here = chosen.to(images.device)
                result[here] = operation(result[here], amount)
    return result
