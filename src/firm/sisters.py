"""Photographs of the same part among the good images: found, so that they are kept on one side of every split.

A held-out image whose sister was learnt scores too low, and a threshold set on it promises too much.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

from firm.conditioning import Conditioning, has_direction
from firm.foreground import rule_for
from firm.images import resize

SIDE = 16  # px of the thumbnails that are compared
OTHERS = 20  # neighbours that are surely not all of one part: the distance to the last of them is that of strangers
FEW = 20  # images below which that cannot be told
NEAR = 0.5  # of the distance of strangers: sisters are nearer to each other
ENOUGH = 128  # px at which the pose of an object is found
BLOCK = 1024  # thumbnails compared at once
WORTH_SAYING = 0.2  # part of the images with sisters from which it is told


def sisters(name: str, images: UInt8[Tensor, "n c h w"]) -> Int[Tensor, " n"]:
    """A number for each image, the same for those that seem to show one part; 0, 1, 2, ... in order of appearance.

    Two are sisters if each is much nearer to the other than to its twentieth neighbour (of few images: the middle one),
    in one pose and whatever the light. Strangers are hardly ever so close, so a folder without sisters gets as many
    numbers as images.
    """
    if len(images) < FEW:
        return torch.arange(len(images))
    thumbnails = _thumbnails(_posed(name, images))
    near, which = _neighbours(thumbnails)
    stranger = near[:, -1]
    close = near < NEAR * torch.minimum(stranger[:, None], stranger[which])
    first = torch.arange(len(images))[:, None].expand_as(which)
    return _joined(len(images), first[close], which[close])


def _posed(name: str, images: UInt8[Tensor, "n c h w"]) -> UInt8[Tensor, "n c h w"]:
    """Small, and long objects in one pose: those that lie alike are not sisters for that."""
    small = resize(images, ENOUGH) if max(images.shape[-2:]) > ENOUGH else images
    rule = rule_for(name, small)
    return Conditioning(align=True, foreground=rule)(small).images if has_direction(small, rule) else small


def _thumbnails(images: UInt8[Tensor, "n c h w"]) -> Float[Tensor, "n s"]:
    """Small, grey, without their mean and of unit length: what another exposure hardly changes."""
    parts = [F.adaptive_avg_pool2d(part.float().mean(1, keepdim=True), SIDE).flatten(1) for part in images.split(BLOCK)]
    grey = torch.cat(parts)
    return F.normalize(grey - grey.mean(1, keepdim=True), dim=1)


def _neighbours(thumbnails: Float[Tensor, "n s"]) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The OTHERS nearest to each, nearest first, in blocks: the distances of all pairs may not fit in memory."""
    others = min(OTHERS, (len(thumbnails) - 1) // 2)
    distances, places = [], []
    for begin in range(0, len(thumbnails), BLOCK):
        part = thumbnails[begin : begin + BLOCK]
        products = part @ thumbnails.T
        products[torch.arange(len(part)), torch.arange(begin, begin + len(part))] = -2.0
        largest, at = products.topk(others, dim=1)
        distances.append((2 - 2 * largest).clamp(min=0).sqrt())
        places.append(at)
    return torch.cat(distances), torch.cat(places)


def _joined(images: int, first: Int[Tensor, " k"], second: Int[Tensor, " k"]) -> Int[Tensor, " n"]:
    """Numbers of the connected parts: every image takes the least number it is linked to until nothing changes."""
    least = torch.arange(images)
    while True:
        fresh = least.scatter_reduce(0, first, least[second], "amin").scatter_reduce(0, second, least[first], "amin")
        fresh = fresh[fresh]  # and that of its number, which halves the rounds
        if torch.equal(fresh, least):
            return least.unique(return_inverse=True)[1]
        least = fresh


def describe(groups: Int[Tensor, " n"]) -> str:
    """What was found, in words; nothing where hardly any image has a sister."""
    sizes = groups.bincount()
    related = int(sizes[sizes > 1].sum())
    if related < WORTH_SAYING * len(groups):
        return ""
    return (
        f"sisters: {related} of the {len(groups)} good images seem to show a part that others show too, "
        f"{len(sizes)} parts in all; images of one part are kept together"
    )
