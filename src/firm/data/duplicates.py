"""Photographs of the same part among the good images: found, so that they are kept on one side of every split.

A held-out image whose sister was learnt scores too low, and a threshold set on it promises too much.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

from firm.conditioning import Conditioning, has_direction
from firm.foreground import rule_for
from firm.images import resize

SIDE = 16  # px of the thumbnails that are compared
OTHERS = 20  # neighbours that are surely not all of one part: the distance to the last of them is that of strangers
FEW = 20  # images below which that cannot be told
NEAR = 0.5  # of the distance of strangers: sisters are nearer to each other
GAP = 0.6  # of the distance of the first stranger: that of the last sister
SURELY = 0.4  # the same where sisters are not the rule: of parts that differ in little, strangers lie before some gaps
IN_GROUPS, IN_ALL = (
    0.3,
    0.7,
)  # part of the images in groups of three or more, or with any sister: then they are the rule
ENOUGH = 128  # px at which the pose of an object is found
BLOCK = 1024  # thumbnails compared at once
WORTH_SAYING = 0.2  # part of the images with sisters from which it is told


def sisters(name: str, images: UInt8[Tensor, "n c h w"]) -> Int[Tensor, " n"]:
    """A number for each image, the same for those that seem to show one part; 0, 1, 2, ... in order of appearance.

    Two are sisters if after them, among the neighbours of each, comes a gap, in one pose and whatever the light. Where
    that makes sisters the rule, so are those that are much nearer to each other than to their twentieth neighbour (of
    few images: the middle one), for among many parts some gaps are closed by strangers. Otherwise only a wide gap
    tells: strangers that differ in two or three ways, such as where a disc lies, are rarely taken for sisters. Those
    that differ in a single way are.
    """
    if len(images) < FEW:
        return torch.arange(len(images))
    near, which = _neighbours(_thumbnails(_posed(name, images)))
    close = _before_a_gap(near, GAP)
    if not _are_the_rule(_joined(len(images), *_mutual(which, close))):
        return _joined(len(images), *_mutual(which, _before_a_gap(near, SURELY)))
    stranger = near[:, -1]
    close |= near < NEAR * torch.minimum(stranger[:, None], stranger[which])
    return _joined(len(images), *_mutual(which, close))


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


def _before_a_gap(near: Float[Tensor, "n k"], part: float) -> Bool[Tensor, "n k"]:
    """Of distances that rise, those before the last gap: where one is less than such a part of the next."""
    gap = near[:, :-1] < part * near[:, 1:]
    return F.pad(gap.int().flip(1).cummax(1).values.flip(1), (0, 1)).bool()


def _mutual(
    which: Int[Tensor, "n k"], close: Bool[Tensor, "n k"]
) -> tuple[Int[Tensor, " links"], Int[Tensor, " links"]]:
    """Pairs of images each of which is close to the other."""
    first = torch.arange(len(which))[:, None].expand_as(which)[close]
    second = which[close]
    both = torch.isin(first * len(which) + second, second * len(which) + first)
    return first[both], second[both]


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
    related = _related(groups)
    if related < WORTH_SAYING * len(groups):
        return ""
    return (
        f"sisters: {related} of the {len(groups)} good images seem to show a part that others show too, "
        f"{len(groups.unique())} parts in all; images of one part are kept together"
    )


def _are_the_rule(groups: Int[Tensor, " n"]) -> bool:
    """Whether so many images have sisters that chance does not explain it."""
    return _related(groups, 3) >= IN_GROUPS * len(groups) or _related(groups) >= IN_ALL * len(groups)


def _related(groups: Int[Tensor, " n"], least: int = 2) -> int:
    """How many images are in groups of at least so many."""
    sizes = groups.bincount()
    return int(sizes[sizes >= least].sum())
