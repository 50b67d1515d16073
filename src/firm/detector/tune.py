"""Good images that play the inspected ones: some as they are, some with synthetic defects, in changing light.

No sister of an inspected image is remembered: a trial on parts that are known finds everything easy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from firm.conditioning import Conditioning
from firm.foreground import Rule
from firm.outliers.sparing import spared
from firm.streams import stream
from firm.types import FirmError, OutlierSource, Scene

KNOWN, INSPECTED = 60, 30  # good images of the trial: remembered, and looked at
EXPOSURE = 0.15  # by which the light of the inspected images varies


@dataclass(frozen=True)
class Trial:
    """Good images to remember, and inspected ones of which half carry a defect."""

    known: UInt8[Tensor, "n c h w"]
    inspected: UInt8[Tensor, "m c h w"]
    defective: Bool[Tensor, " m"]


def make_trial(
    images: UInt8[Tensor, "n c h w"],
    parts: Int[Tensor, " n"],
    rule: Rule,
    defects: OutlierSource,
    *,
    seed: int,
    ignored: Bool[Tensor, "a b"] | None = None,
) -> Trial:
    """Good images, and others with and without defects; the same for every candidate. `parts` are `sisters`."""
    if len(images) < 4:
        raise FirmError(
            f"{len(images)} good images are too few to choose settings on; give 4 or more or set automatic=[]"
        )
    rng = stream(seed, "trial")
    inspected, known = apart(parts, rng=rng)
    copies = min(defects.per_inlier, max(1, INSPECTED // len(inspected)))  # few images are looked at more often
    good, others = images[inspected].repeat_interleave(copies, 0), images[known]
    copy = torch.arange(len(good)) % defects.per_inlier
    bad = spared(defects, good, rng=rng, copy=copy, scene=seen_by_the_camera(good, others, rule, ignored)).images
    both = torch.cat([good, bad])
    light = 1 + EXPOSURE * (2 * torch.rand(len(both), 1, 1, 1, generator=rng) - 1)
    lit = (both.float() * light).round().clamp(0, 255).to(torch.uint8)
    return Trial(others, lit, torch.arange(len(both)) >= len(good))


def seen_by_the_camera(
    good: UInt8[Tensor, "n c h w"],
    others: UInt8[Tensor, "m c h w"],
    rule: Rule,
    ignored: Bool[Tensor, "a b"] | None = None,
) -> Scene:
    """The scene of images as they come: their objects by the rule, less what is ignored."""
    plain = Conditioning(foreground=rule)
    ready = plain(good, ignored)
    return Scene(ready.foreground, others, plain(others, ignored).foreground, ready.hidden())


def apart(parts: Int[Tensor, " n"], *, rng: torch.Generator) -> tuple[Int[Tensor, " m"], Int[Tensor, " k"]]:
    """Places of the inspected images, drawn at random, and of the remembered ones, none of which shows their parts.

    Where a third of the images cannot be inspected without showing every part, the parts are shared after all.
    """
    order = torch.randperm(len(parts), generator=rng)
    inspected = order[: min(INSPECTED, len(parts) // 3)]
    strange = ~torch.isin(parts[order], parts[inspected])
    known = order[strange] if int(strange.sum()) >= len(inspected) else order[len(inspected) :]
    return inspected, known[:KNOWN]
