"""Outliers that leave alone what is hidden: nobody is to learn a defect where nothing is ever looked at."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from firm.types import Outliers, OutlierSource, Scene

VISIBLE = 5  # grey levels from which a change can be seen
LEAST = 16  # pixels of a defect that must be seen of one that was cut
TRIES = 10
LIGHT = 48  # grey levels of the last resort


def spared(
    source: OutlierSource,
    inliers: UInt8[Tensor, "n c h w"],
    *,
    rng: torch.Generator,
    copy: Int[Tensor, " n"] | None = None,
    scene: Scene | None = None,
) -> Outliers:
    """What the source makes, with hidden pixels as they were; of which too little is left, that is drawn again.

    Without anything hidden it is what the source makes, and so is what alters whole images.
    """
    made = source(inliers, rng=rng, copy=copy, scene=scene)
    if scene is None or scene.hidden is None or made.where is None:
        return made
    images, where, seen = _cut(made.images, inliers, scene.hidden)
    group, enough = made.group.clone(), ~(made.where & scene.hidden).flatten(1).any(1) | (seen >= LEAST)
    for _ in range(TRIES):
        again = (~enough).nonzero().squeeze(1)
        if not len(again):
            break
        same = None if copy is None else copy[again]
        fresh = source(inliers[again], rng=rng, copy=same, scene=scene.some(again))
        cut = _cut(fresh.images, inliers[again], scene.hidden[again])
        more = cut[2] > seen[again]
        at = again[more]
        images[at], where[at], seen[at], group[at] = cut[0][more], cut[1][more], cut[2][more], fresh.group[more]
        enough[at] = seen[at] >= LEAST
    for number in (seen == 0).nonzero().squeeze(1).tolist():
        where[number] = _free(scene.foreground[number], scene.hidden[number])
        images[number] = torch.where(where[number], _struck(inliers[number]), inliers[number])
    return Outliers(images, group, where)


def _cut(
    images: UInt8[Tensor, "n c h w"], inliers: UInt8[Tensor, "n c h w"], hidden: Bool[Tensor, "n h w"]
) -> tuple[UInt8[Tensor, "n c h w"], Bool[Tensor, "n h w"], Int[Tensor, " n"]]:
    """The images with hidden pixels of the inliers, where they still differ, and on how many pixels that is seen."""
    left = torch.where(hidden[:, None], inliers, images)
    change = (left.int() - inliers.int()).abs().amax(1)
    return left, change > 0, (change >= VISIBLE).flatten(1).sum(1)


def _free(foreground: Bool[Tensor, "h w"], hidden: Bool[Tensor, "h w"]) -> Bool[Tensor, "h w"]:
    """The object that is not hidden; without any, all that is not; of an image that is hidden as a whole all of it."""
    return next((place for place in (foreground & ~hidden, ~hidden) if bool(place.any())), torch.ones_like(hidden))


def _struck(inlier: UInt8[Tensor, "c h w"]) -> UInt8[Tensor, "c h w"]:
    """Another light, towards where there is room."""
    return torch.where(inlier < 128, inlier + LIGHT, inlier - LIGHT)
