"""An outlier source, views and a score as a user may write them in a script of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from firm.types import Outliers


@dataclass(frozen=True)
class Stripes:
    """Draws a dark stripe across every inlier."""

    width: int = 3
    per_inlier: int = 1
    kinds: int = 1

    def __call__(self, inliers, *, rng, copy=None, scene=None):
        images = inliers.clone()
        tops = torch.randint(images.shape[2] - self.width, (len(images),), generator=rng).tolist()
        for image, top in zip(images, tops, strict=True):
            image[:, top : top + self.width] = 0
        return Outliers(images, torch.ones(len(images), dtype=torch.long))


@dataclass(frozen=True)
class NoisyViews:
    """The image itself with noise."""

    noise: float = 0.1

    def __call__(self, images, size, *, rng, focus=None):
        pixels = torch.nn.functional.interpolate(images.float() / 255, size=(size, size))
        first, second = (pixels + self.noise * torch.randn(pixels.shape, generator=rng) for _ in range(2))
        return first, second


@dataclass(frozen=True)
class Farthest:
    """The distance to the farthest normal embedding."""

    power: float = 1.0

    def fit(self, normal):
        return lambda embeddings: torch.cdist(embeddings, normal).amax(1) ** self.power
