"""Colour changes of whole batches, one strength per image, on the images' own device.

Images are floats in 0..1 with one or three channels; each operation returns values in 0..1. The meanings are
Pillow's (blend with black, with the mean grey, with the grey image; turn the hue), because the published
parameters were tuned for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from firm.types import FirmError

LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """Ranges of a random colour change: factor in 1 ± x for the first three, a turn in ± hue for the last."""

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.4
    probability: float = 1.0
    additive_brightness: bool = False  # DROC adds the brightness change instead of multiplying by it

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1 or not 0 <= self.hue <= 0.5:
            raise FirmError(f"a jitter needs probability in 0..1 and hue in 0..0.5, not {self.probability}, {self.hue}")
        if min(self.brightness, self.contrast, self.saturation) < 0:
            raise FirmError("a jitter needs brightness, contrast and saturation of at least 0")


def grey(images: Float[Tensor, "n c h w"]) -> Float[Tensor, "n 1 h w"]:
    """Luminance by the usual weights; a one-channel image is its own."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue).unsqueeze(1)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Multiply by the factor."""
    return (images * _wide(factor)).clamp_(0, 1)


def shifted_brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Add factor - 1."""
    return (images + (_wide(factor) - 1)).clamp_(0, 1)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Away from (factor > 1) or towards the image's mean grey."""
    mean = grey(images).mean(dim=(1, 2, 3), keepdim=True)
    return torch.lerp(mean, images, _wide(factor)).clamp_(0, 1)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Away from (factor > 1) or towards the grey image; nothing to do on one channel."""
    if images.shape[1] == 1:
        return images
    return torch.lerp(grey(images), images, _wide(factor)).clamp_(0, 1)


def turned_hue(images: Tensor, turn: Tensor) -> Tensor:
    """Turn the hue by a part of the circle in -0.5..0.5; nothing to do on one channel."""
    if images.shape[1] == 1:
        return images
    hue, chroma, value = _hexcone(images)
    hue = hue + 6 * turn[:, None, None]
    # each channel is the value less the chroma times a trapezoid of the hue, 120 degrees apart
    offset = torch.tensor([5.0, 3.0, 1.0], device=images.device)[None, :, None, None]
    sector = torch.remainder(offset + hue[:, None], 6)
    trapezoid = torch.minimum(sector, 4 - sector).clamp_(0, 1)
    return value[:, None] - chroma[:, None] * trapezoid


def jittered(images: Float[Tensor, "n c h w"], jitter: Jitter, *, rng: torch.Generator) -> Float[Tensor, "n c h w"]:
    """The four changes in an order of its own for every image, each image changed with the given probability."""
    n = len(images)
    ranges = (jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
    strength = torch.rand(4, n, generator=rng) * 2 - 1
    order = torch.rand(n, 4, generator=rng).argsort(dim=1)
    changed = torch.rand(n, generator=rng) < jitter.probability
    operations: list[Callable[[Tensor, Tensor], Tensor]] = [
        shifted_brightness if jitter.additive_brightness else brightness,
        contrast,
        saturation,
        turned_hue,
    ]
    result = images.clone()
    for place in range(4):
        for which, operation in enumerate(operations):
            if not ranges[which] or (which >= 2 and images.shape[1] == 1):
                continue
            chosen = ((order[:, place] == which) & changed).nonzero().squeeze(1)
            if len(chosen):
                amount = strength[which, chosen] * ranges[which]
                amount = (amount if which == 3 else (1 + amount).clamp(min=0)).to(images.device)
                here = chosen.to(images.device)
                result[here] = operation(result[here], amount)
    return result


def _wide(factor: Tensor) -> Tensor:
    return factor[:, None, None, None]


def _hexcone(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hue in 0..6, chroma and value."""
    red, green, blue = images.unbind(1)
    value, brightest = images.max(dim=1)
    chroma = value - images.amin(dim=1)
    safe = chroma.clamp(min=1e-8)
    hue = torch.where(
        brightest == 0,
        (green - blue) / safe,
        torch.where(brightest == 1, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    return hue, chroma, value
