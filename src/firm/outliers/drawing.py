"""What the local sources share: every image is altered with a random stream of its own."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from torch import Tensor

from firm.types import Outliers, Scene

Pixels = UInt8[NDArray[np.uint8], "c h w"]
Levels = NDArray[np.float32]  # of pixels, 0..255
Mask = NDArray[np.bool_]


def each_image(
    inliers: UInt8[Tensor, "n c h w"], scene: Scene | None, *, rng: torch.Generator
) -> Iterator[tuple[Pixels, Mask | None, np.random.Generator]]:
    """Each image, its object (None: everywhere) and a random stream of its own: redrawing one changes no other."""
    for i, seed in enumerate(torch.randint(2**62, (len(inliers),), generator=rng).tolist()):
        foreground = None if scene is None else scene.foreground[i].cpu().numpy()
        yield inliers[i].cpu().numpy(), foreground, np.random.default_rng(seed)


def local_outliers(inliers: UInt8[Tensor, "n c h w"], altered: Sequence[Pixels]) -> Outliers:
    """The altered images, all of one kind, and the pixels in which they differ from the inliers."""
    images = torch.empty_like(inliers)
    for i, image in enumerate(altered):
        images[i] = torch.from_numpy(image)
    group = torch.ones(len(inliers), dtype=torch.long, device=inliers.device)
    return Outliers(images, group, (images != inliers).any(1))
