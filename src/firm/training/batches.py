"""Inliers + outliers + views -> Batch, as a pure function of seed and step.

An epoch is one pass over the list of every inlier and its outliers (section 6; four times the inliers for
rotations), shuffled, the incomplete last batch dropped. Nothing is remembered between steps, so a resumed run
composes the very same batches.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from firm.images import Preprocessing
from firm.outliers.sparing import spared
from firm.replay import Replay
from firm.streams import stream
from firm.types import INLIER, Batch, FirmError, Focus, Outliers, OutlierSource, Scene, Views


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
    foreground: Bool[Tensor, "n h w"] | None = None,
    hidden: Bool[Tensor, "n h w"] | None = None,
    replay: Replay | None = None,
    device: torch.device | str = "cpu",
) -> Batch:
    """The multiview batch of one step: all first views, then all second views in the same order.

    With a foreground, outliers and views are told where the object is, and views where an outlier was altered. No
    outlier is altered where it is hidden.
    """
    steps = steps_per_epoch(len(images), outliers.per_inlier, batch)
    place = step % steps
    order = _epoch(len(images), outliers.per_inlier, batch, stratified, seed, step // steps)
    items = order[place * batch : (place + 1) * batch]
    which, copy = items % len(images), items // len(images) - 1
    chosen = (copy >= 0).nonzero().squeeze(1)
    if replay is not None and len(chosen):
        made = replay.take(step, len(chosen))
    else:
        scene = None if foreground is None else Scene.among(images, foreground, hidden, which[chosen])
        made = _make(images[which[chosen]], outliers, copy[chosen], scene, rng=stream(seed, "outliers", step))
    clean, group = _fill(images[which], chosen, made)
    focus = None if foreground is None else _focus(foreground[which], chosen, made)
    first, second = views(clean.to(device), preprocessing.size, rng=stream(seed, "views", step), focus=focus)
    source = torch.arange(batch)
    return Batch(
        images=preprocessing.normalise(torch.cat([first, second])),
        source=source.repeat(2).to(device),
        group=group.repeat(2).to(device),
    )


def _make(
    inliers: UInt8[Tensor, "m c h w"],
    outliers: OutlierSource,
    copy: Int[Tensor, " m"],
    scene: Scene | None,
    *,
    rng: torch.Generator,
) -> Outliers:
    if not len(inliers):
        return Outliers(inliers, copy)
    return spared(outliers, inliers, rng=rng, copy=copy, scene=scene)


def _fill(
    clean: UInt8[Tensor, "b c h w"], chosen: Int[Tensor, " m"], made: Outliers
) -> tuple[UInt8[Tensor, "b k h w"], Int[Tensor, " b"]]:
    """The batch's images with the outliers in their places, and the group of each."""
    if made.images.shape[1] > clean.shape[1]:  # colour outliers beside grey inliers
        clean = clean.expand(-1, made.images.shape[1], -1, -1).clone()
    clean[chosen] = made.images
    group = torch.full((len(clean),), INLIER)
    group[chosen] = made.group
    return clean, group


def _focus(foreground: Bool[Tensor, "b h w"], chosen: Int[Tensor, " m"], made: Outliers) -> Focus:
    altered = torch.zeros_like(foreground)
    altered[chosen] = True if made.where is None else made.where
    return Focus(foreground, altered)


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
