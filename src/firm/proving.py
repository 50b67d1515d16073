"""What a detector is worth by good images it has not learnt from: as they are, and with synthetic defects of all kinds.

No real defect is seen, so settings may be chosen by it. Each kind counts alike: a kind the training has not seen tells
more than those it has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from torch import Tensor

from firm.detector import Detector
from firm.images import resize
from firm.localisation import pixel_auroc
from firm.metrics import auroc
from firm.outliers import KINDS, LOCAL
from firm.outliers.sparing import spared
from firm.streams import stream
from firm.trial import EXPOSURE, seen_by_the_camera

DONORS = 60  # learnt images that lend their pixels to defects


@dataclass(frozen=True)
class Proof:
    """AUROC of the images and of their pixels, the mean over the kinds of defect and by kind."""

    good_images: int
    auroc: float
    pixel_auroc: float
    kinds: dict[str, tuple[float, float]]


def prove(detector: Detector, good: UInt8[Tensor, "n c h w"], learnt: UInt8[Tensor, "m c h w"], *, seed: int) -> Proof:
    """Inspect held-out good images with and without defects, in changing light; the same ones for every detector."""
    side = detector.preprocessing.size
    images, donors = resize(good, side), resize(learnt[:DONORS], side)
    scene = seen_by_the_camera(images, donors, detector.recipe.conditioning.foreground, detector.ignored)
    plain = detector.locate(_lit(images, seed, "good"))
    none = torch.zeros(plain.maps.shape, dtype=torch.bool)
    kinds = {}
    for kind in KINDS:
        made = spared(LOCAL[kind], images, rng=stream(seed, "proof", kind), scene=scene)
        assert made.where is not None
        found = detector.locate(_lit(made.images, seed, kind))
        kinds[kind] = (
            auroc(torch.cat([plain.scores, found.scores]), torch.arange(2 * len(images)) >= len(images)),
            pixel_auroc(torch.cat([plain.maps, found.maps]), torch.cat([none, made.where]), detector.ignored),
        )
    of_images, of_pixels = (sum(values) / len(values) for values in zip(*kinds.values(), strict=True))
    return Proof(len(images), of_images, of_pixels, kinds)


def _lit(images: UInt8[Tensor, "n c h w"], seed: int, kind: str) -> UInt8[Tensor, "n c h w"]:
    """Brighter or darker by as much as a camera may be."""
    light = 1 + EXPOSURE * (2 * torch.rand(len(images), 1, 1, 1, generator=stream(seed, "light", kind)) - 1)
    return (images.float() * light).round().clamp(0, 255).to(torch.uint8)
