"""What thumbnails show of the good images: copies, photographs of one part, images unlike all others.

A held-out image scores too low if the training images show the same part, and a threshold set on it is too low:
images of one part belong on one side of every split.
"""

import hashlib
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.nn import functional as F

from firm.data.splits import held_out_images
from firm.errors import DataError, named
from firm.images.alignment import Conditioning, has_direction
from firm.images.foreground import foreground, rule_for
from firm.images.preprocess import resize
from firm.types import OneClass

THUMBNAIL_SIDE = 16  # px
BLOCK = 1024  # thumbnails compared at once: the distances of all pairs may not fit in memory
FLOATS = 64  # images that are floats at once
NEIGHBOURS = 20  # surely not all of one part: the last is as far as different parts are (of few images: half)

KNOWN = 0.25  # of the usual distance between neighbours: a re-encoded copy is nearer, another image is not
COPY = 0.06  # of the distance between different parts: a re-encoded copy is nearer, another photograph is not

MIN_IMAGES = 20  # below which photographs of one part are not looked for
SAME_PART = 0.5  # of the distance between different parts: photographs of one part are nearer
GAP = 0.6  # ratio of two successive neighbour distances that separates one part from the others
WIDE_GAP = 0.4  # the same where few images share a part: similar parts also have gaps between them
IN_GROUPS = 0.3  # fraction of the images in groups of three or more, or ...
IN_PAIRS = 0.7  # ... in any group, from which images are taken to share parts as a rule
ALIGNMENT_SIDE = 128  # px at which the pose of an object is found
WORTH_REPORTING = 0.2  # fraction of the images that share a part

FEW = 20  # images below which the best possible guarantee is stated
MIN_COMPARED = 10  # different images from which their usual distance is known
DEVIATIONS, TIMES = 6, 3.5  # an isolated image is this many deviations and this many times farther than usual
EXAMPLES = 3  # isolated images that a warning names

Distance = Callable[[Tensor, Tensor], Tensor]  # of every row of the first to every row of the second
EXACT: Distance = partial(torch.cdist, compute_mode="donot_use_mm_for_euclid_dist")
FAST: Distance = partial(torch.cdist, compute_mode="use_mm_for_euclid_dist")


def thumbnails(images: UInt8[Tensor, "n c h w"], side: int = THUMBNAIL_SIDE) -> UInt8[Tensor, "n {side} {side}"]:
    """Small grey versions, by default those that a detector keeps of its training images."""
    return resize(images, side).float().mean(1).round().to(torch.uint8)


def grey_thumbnails(images: UInt8[Tensor, "n c h w"]) -> Float[Tensor, "n s"]:
    """Small grey versions, not rounded: flat textures differ by less than a grey level."""
    blocks = (block.float().mean(1, keepdim=True) for block in images.split(FLOATS))
    return torch.cat([F.adaptive_avg_pool2d(block, THUMBNAIL_SIDE).flatten(1) for block in blocks])


def nearest(
    rows: Float[Tensor, "m s"], among: Float[Tensor, "n s"], count: int, distance: Distance
) -> tuple[Float[Tensor, "m k"], Int[Tensor, "m k"]]:
    """Distance and index of the `count` nearest rows of `among`, nearest first; no row is its own neighbour."""
    found = []
    for start in range(0, len(rows), BLOCK):
        block = distance(rows[start : start + BLOCK], among)
        if rows is among:
            block.diagonal(start).fill_(torch.inf)
        found.append(block.topk(count, dim=1, largest=False))
    return torch.cat([near.values for near in found]), torch.cat([near.indices for near in found])


def nearest_images(images: UInt8[Tensor, "n c h w"]) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """Distance and index of the nearest other images by grey level, nearest first."""
    # matrix products find them quickly, but the product of two copies is mostly rounding: the distances come after
    grey = grey_thumbnails(images)
    centred = grey - grey.mean(0)
    _, which = nearest(centred, centred, _neighbours(len(images)), FAST)
    blocks = zip(centred.split(BLOCK), which.split(BLOCK), strict=True)
    exact = torch.cat([(centred[others] - block[:, None]).norm(dim=2) for block, others in blocks])
    distances, order = exact.sort(dim=1, stable=True)
    return distances, which.gather(1, order)


def copies_of_known(images: UInt8[Tensor, "m c h w"], known: UInt8[Tensor, "n s s"]) -> Bool[Tensor, " m"]:
    """Which images are copies of the `known` ones: thumbnails are equal, or much nearer than those to each other.

    Where all known images look alike, such as flat textures, only equal thumbnails count.
    """
    if not len(known) or not len(images):
        return torch.zeros(len(images), dtype=torch.bool)
    there = known.float().flatten(1)
    usual = nearest(there, there, 1, EXACT)[0].median() if len(known) > 2 else torch.zeros(())
    return nearest(thumbnails(images).float().flatten(1), there, 1, EXACT)[0][:, 0] <= KNOWN * float(usual)


def duplicated(images: UInt8[Tensor, "n c h w"]) -> Bool[Tensor, " n"]:
    """Which images are copies of an earlier one: equal pixels, or nearer than two photographs ever are."""
    digests = [hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest() for image in images]
    copy = torch.ones(len(images), dtype=torch.bool)
    copy[np.unique(digests, return_index=True)[1]] = False  # the first image with these pixels
    distinct = (~copy).nonzero().squeeze(1)
    distances, which = nearest_images(images[distinct])
    if distances.shape[1]:
        earlier = which < torch.arange(len(distinct))[:, None]
        copy[distinct] = (_much_nearer(distances, which, COPY) & earlier).any(1)
    return copy


def group_by_part(name: str, images: UInt8[Tensor, "n c h w"]) -> Int[Tensor, " n"]:
    """The number of the part each image shows, 0, 1, 2, ... in order of appearance.

    Two images show one part if both are among the other's neighbours before a gap in distance, whatever their pose and
    exposure. Where images then share parts as a rule, those count as well that are much nearer to each other than to
    their twentieth neighbour, since among many parts a gap may be filled by another part. Otherwise only a wide gap
    counts, so that parts which differ in two or three ways are rarely confused; parts that differ in one way are.
    """
    count = len(images)
    if count < MIN_IMAGES:
        return torch.arange(count)
    grey = grey_thumbnails(_aligned(name, images))
    unit = F.normalize(grey - grey.mean(1, keepdim=True), dim=1)  # independent of the exposure
    products, which = nearest(unit, unit, _neighbours(count), lambda rows, among: -(rows @ among.T))
    distances = (2 + 2 * products).clamp(min=0).sqrt()
    near = _before_gap(distances, GAP)
    groups = _connected(which, near)
    if _in_groups_of(3, groups) < IN_GROUPS * count and _in_groups_of(2, groups) < IN_PAIRS * count:
        return _connected(which, _before_gap(distances, WIDE_GAP))
    return _connected(which, near | _much_nearer(distances, which, SAME_PART))


def describe_parts(parts: Int[Tensor, " n"]) -> str:
    """One line about images that share a part; empty where hardly any do."""
    shared = _in_groups_of(2, parts)
    if shared < WORTH_REPORTING * len(parts):
        return ""
    sharing = f"{shared} of the {len(parts)} good images share a part with others, {len(parts.unique())} parts in all"
    return f"parts: {sharing}; images of one part are kept together"


def check_good(data: OneClass) -> None:
    """Raise if there are too few good images or all are the same picture."""
    count = len(data.train)
    if count < 2:
        few = f"{named(data.name)} has {count} good image{'s' * (count != 1)}, which is too few"
        raise DataError(f"{few}; give at least 2, better 50 or more")
    if bool((data.train == data.train[:1]).all()):
        same = f"all {count} good images of {named(data.name)} are the same picture, so there is no variation to learn"
        raise DataError(f"{same}; give photographs of different parts")


def warnings_about(
    data: OneClass, *, holdout: float = 0.1, false_calls: float = 0.05, parts: int = 0, fail: float = 0.0
) -> list[str]:
    """What the user should know about the good images before training.

    `holdout` is 1 if all take turns in folds, and then their `parts` count and the rate of FAIL that is asked for.
    """
    count, copy = len(data.train), duplicated(data.train)
    warnings = [_too_few(count, holdout, false_calls)] if count < FEW and holdout < 1 else []
    if holdout == 1 and parts < FEW:
        what = f"{parts} good images" if parts == count else f"{parts} good parts ({count} images)"
        rate = max(fail, 1 / (parts + 1))
        warnings.append(f"{what} are few: about {100 * rate:.0f} % of good parts will FAIL; give {FEW} or more")
    if copy.any():
        found = f"{int(copy.sum())} of {count} good images are copies of others (for example {_names(data, copy)[0]})"
        why = "they add nothing, and a held-out copy makes the threshold too low"
        warnings.append(f"{found}; remove them: {why}")
    odd = isolated(data.train, ~copy)
    if odd.any():
        examples = ", ".join(_names(data, odd)[:EXAMPLES])
        found = f"{int(odd.sum())} of {count} good images look unlike all others ({examples})"
        warnings.append(f"{found}; remove any that are not good parts of this product")
    return warnings


def isolated(images: UInt8[Tensor, "n c h w"], among: Bool[Tensor, " n"]) -> Bool[Tensor, " n"]:
    """Which images are much farther from their nearest neighbour than usual; only those `among` are compared."""
    odd = torch.zeros(len(images), dtype=torch.bool)
    if int(among.sum()) >= MIN_COMPARED:
        distance = nearest_images(images[among])[0][:, 0]
        usual = distance.median()
        deviation = (distance - usual).abs().median()
        odd[among] = (distance > usual + DEVIATIONS * deviation) & (distance > TIMES * usual)
    return odd


def _too_few(count: int, holdout: float, false_calls: float) -> str:
    kept = held_out_images(count, holdout)
    rate = f"a false-call rate of {100 / (kept + 1):.0f} % at best"
    sentence = f"{count} good images are few: the {kept} held out for the thresholds can guarantee {rate}"
    if not (0 < holdout < 1 and 0 < false_calls < 1):
        return sentence  # rejected elsewhere
    images = math.ceil((math.ceil(1 / false_calls - 1e-9) - 1) / holdout - 1e-9)
    return f"{sentence}, and {100 * false_calls:g} % takes {images} images"


def _names(data: OneClass, which: Bool[Tensor, " n"]) -> list[str]:
    """The file names of these images, or their numbers where they come from no file."""
    unnamed = len(data.files) != len(data.train)
    numbers = which.nonzero().squeeze(1).tolist()
    return [f"number {number + 1}" if unnamed else named(data.files[number].name) for number in numbers]


def _neighbours(images: int) -> int:
    return min(NEIGHBOURS, (images - 1) // 2)


def _aligned(name: str, images: UInt8[Tensor, "n c h w"]) -> UInt8[Tensor, "n c h w"]:
    """Small images with elongated objects in one pose: parts in the same pose need not be the same part."""
    small = resize(images, ALIGNMENT_SIDE) if max(images.shape[-2:]) > ALIGNMENT_SIDE else images
    rule = rule_for(name, small)
    if rule.method == "ones":
        return small
    masks = foreground(small, rule)
    return Conditioning(align=True, foreground=rule)(small, masks=masks).images if has_direction(masks) else small


def _much_nearer(distances: Float[Tensor, "n k"], which: Int[Tensor, "n k"], ratio: float) -> Bool[Tensor, "n k"]:
    """Which pairs are nearer than `ratio` of the distance between different parts, as both images measure it."""
    apart = distances[:, -1]
    return distances < ratio * torch.minimum(apart[:, None], apart[which])


def _before_gap(distances: Float[Tensor, "n k"], ratio: float) -> Bool[Tensor, "n k"]:
    """Which neighbours come before the last gap: where a distance is less than `ratio` of the next."""
    gap = distances[:, :-1] < ratio * distances[:, 1:]
    return F.pad(gap.int().flip(1).cummax(1).values.flip(1), (0, 1)).bool()


def _connected(which: Int[Tensor, "n k"], near: Bool[Tensor, "n k"]) -> Int[Tensor, " n"]:
    """Connected components of the pairs that are near each other both ways, numbered in order of appearance."""
    rows = torch.arange(len(which))[:, None].expand_as(which)[near]
    links = csr_array((torch.ones(len(rows)), (rows, which[near])), shape=(len(which), len(which)))
    return torch.from_numpy(connected_components(links * links.T, directed=False)[1]).long()


def _in_groups_of(size: int, parts: Int[Tensor, " n"]) -> int:
    """How many images are in groups of at least this size."""
    sizes = parts.bincount()
    return int(sizes[sizes >= size].sum())
