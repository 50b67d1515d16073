"""What the sources share: the check of their settings, and how a local source alters image by image."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt8
from numpy.typing import NDArray
from torch import Generator, Tensor

from firm.errors import SettingError
from firm.types import Outliers, Scene

Pixels = UInt8[NDArray[np.uint8], "c h w"]
Levels = NDArray[np.float32]  # of pixels, 0..255
Mask = NDArray[np.bool_]
Copy = Int[Tensor, " n"] | None  # which of its outliers each inlier gets; None: drawn


def check(source: Any, *settings: tuple[str, bool, str]) -> None:
    """Refuse the first setting of an outlier source that is not allowed, with its fix; `per_inlier` is in all."""
    every = ("per_inlier", source.per_inlier >= 1, "use 1 or more outliers per good image")
    for name, allowed, fix in (*settings, every):
        if not allowed:
            raise SettingError(f"outliers.{name} is {getattr(source, name)!r}; {fix}")


def each_image(
    inliers: Tensor, scene: Scene | None, *, rng: Generator
) -> Iterator[tuple[Pixels, Mask | None, np.random.Generator]]:
    """Each image, its object (None: everywhere) and a random stream of its own, so redrawing one changes no other."""
    for i, seed in enumerate(torch.randint(2**62, (len(inliers),), generator=rng).tolist()):
        foreground = None if scene is None else scene.foreground[i].cpu().numpy()
        yield inliers[i].cpu().numpy(), foreground, np.random.default_rng(seed)


def altered(inliers: Tensor, made: list[Pixels]) -> Outliers:
    """The altered images as outliers of one kind, with the pixels that differ."""
    images = torch.empty_like(inliers)
    for i, pixels in enumerate(made):
        images[i] = torch.from_numpy(pixels)
    group = torch.ones(len(inliers), dtype=torch.long, device=inliers.device)
    return Outliers(images, group, (images != inliers).any(1))
