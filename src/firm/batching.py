"""Inliers + outliers + views -> Batch, as a pure function of seed and step.

An epoch is one pass over the list of every inlier and its outliers (section 6; four times the inliers for
rotations), shuffled, the incomplete last batch dropped. Nothing is remembered between steps, so a resumed run
composes the very same batches.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from firm.images import Preprocessing
from firm.streams import stream
from firm.types import INLIER, Batch, FirmError, OutlierSource, Views


def steps_per_epoch(inliers: int, per_inlier: int, batch: int) -> int:
    """Whole batches in one pass over inliers and outliers; an error if there is not even one."""
    items = inliers * (1 + per_inlier)
    if items < batch:
        raise FirmError(
            f"{inliers} good images with {per_inlier} outliers each make {items} items, fewer than one batch of "
            f"{batch}; add images or set training.batch={max(2, items)} or less"
        )
    return items // batch


def make_batch(
    images: UInt8[Tensor, "n c h w"],
    outliers: OutlierSource,
    views: Views,
    preprocessing: Preprocessing,
    *,
    batch: int,
    stratified: bool,
    seed: int,
    step: int,
    device: torch.device | str = "cpu",
) -> Batch:
    """The multiview batch of one step: all first views, then all second views in the same order."""
    steps = steps_per_epoch(len(images), outliers.per_inlier, batch)
    place = step % steps
    order = _epoch(len(images), outliers.per_inlier, batch, stratified, seed, step // steps)
    items = order[place * batch : (place + 1) * batch]
    clean, group = _fill(images, items, outliers, rng=stream(seed, "outliers", step))
    first, second = views(clean.to(device), preprocessing.size, rng=stream(seed, "views", step))
    source = torch.arange(batch)
    return Batch(
        images=preprocessing.normalise(torch.cat([first, second])),
        source=source.repeat(2).to(device),
        group=group.repeat(2).to(device),
    )


def _fill(
    images: UInt8[Tensor, "n c h w"], items: Int[Tensor, " b"], outliers: OutlierSource, *, rng: torch.Generator
) -> tuple[UInt8[Tensor, "b k h w"], Int[Tensor, " b"]]:
    """Item j is inlier j mod n: itself in the first n places, its outliers in the further ones."""
    which, copy = items % len(images), items // len(images) - 1
    clean = images[which]
    group = torch.full((len(items),), INLIER)
    chosen = (copy >= 0).nonzero().squeeze(1)
    if len(chosen):
        made = outliers(clean[chosen], rng=rng, copy=copy[chosen])
        if made.images.shape[1] > clean.shape[1]:  # colour outliers beside grey inliers
            clean = clean.expand(-1, made.images.shape[1], -1, -1).clone()
        clean[chosen] = made.images
        group[chosen] = made.group
    return clean, group


@lru_cache(maxsize=2)
def _epoch(inliers: int, per_inlier: int, batch: int, stratified: bool, seed: int, epoch: int) -> Int[Tensor, " m"]:
    """The order of one epoch's items; `stratified` gives every batch the same number of inliers."""
    rng = stream(seed, "order", epoch)
    if not stratified:
        return torch.randperm(inliers * (1 + per_inlier), generator=rng)
    steps = steps_per_epoch(inliers, per_inlier, batch)
    normal = max(1, batch // (1 + per_inlier))
    first = _repeated(inliers, steps * normal, rng).view(steps, normal)
    rest = inliers + _repeated(inliers * per_inlier, steps * (batch - normal), rng).view(steps, batch - normal)
    return torch.cat([first, rest], dim=1).flatten()


def _repeated(n: int, wanted: int, rng: torch.Generator) -> Int[Tensor, " wanted"]:
    """Shuffled passes over n things until there are enough."""
    passes = [torch.randperm(n, generator=rng) for _ in range(-(-wanted // n))]
    return torch.cat(passes)[:wanted]
