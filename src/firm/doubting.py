"""Doubts about good images, said before anything is learnt from them: too few, copies, strangers among them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

from firm.errors import named
from firm.types import FirmError, OneClass

FEW = 20  # images below which it is said what so few can promise
SIDE = 16  # px of the thumbnails that are compared
OTHERS = 20  # neighbours that are surely not all copies: the distance to the last of them is that of strangers
NEAR = 0.06  # of the distance of strangers: a copy saved anew is nearer, another photograph of the part is not
ENOUGH = 10  # different images from which it is known how far apart they usually are
DEVIATIONS, TIMES = 6, 3.5  # an image is unlike the rest if it is both far out and this many times as far as usual
NAMED = 3  # images of which the names are said
BLOCK = 1024  # thumbnails compared at once


def check_good(data: OneClass) -> None:
    """Images that nothing can be learnt from are refused."""
    count = len(data.train)
    if count < 2:
        fix = "give at least 2, better 50 or more"
        raise FirmError(f"{named(data.name)} has {count} good image{'s' * (count != 1)}, which is too few; {fix}")
    if bool((data.train == data.train[:1]).all()):
        raise FirmError(
            f"all {count} good images of {named(data.name)} are the same picture, so nothing can be learnt of what "
            "varies; give photographs of different parts"
        )


def doubts_about(data: OneClass, *, holdout: float = 0.1, false_calls: float = 0.05) -> list[str]:
    """What a person should know of the good images before they are learnt from; nothing of sound ones."""
    count, again = len(data.train), copied(data.train)
    told = [] if count >= FEW else [_few(count, holdout, false_calls)]
    if again.any():
        whose = f"for example {_names(data, again.nonzero().squeeze(1))[0]}"
        told.append(
            f"{int(again.sum())} of {count} good images are copies of others ({whose}); "
            "they tell nothing new, and a held-out copy promises too much: remove them"
        )
    odd = unlike(data.train, ~again)
    if odd.any():
        whose = ", ".join(_names(data, odd.nonzero().squeeze(1))[:NAMED])
        told.append(
            f"{int(odd.sum())} of {count} good images look unlike all others ({whose}); "
            "remove what is no good part of this product"
        )
    return told


def copied(images: UInt8[Tensor, "n c h w"]) -> Bool[Tensor, " n"]:
    """Which images are copies of an earlier one: of the same pixels, or so near as only the same photograph is.

    How near that is, each image tells itself: by its twentieth neighbour (of few images: the middle one).
    """
    again = ~_first_of_their_pixels(images)
    fresh = (~again).nonzero().squeeze(1)
    near, which = _neighbours(_thumbnails(images[fresh]))
    if near.shape[1]:
        stranger = near[:, -1]
        close = near < NEAR * torch.minimum(stranger[:, None], stranger[which])
        earlier = which < torch.arange(len(fresh))[:, None]
        again[fresh] = (close & earlier).any(1)
    return again


def unlike(images: UInt8[Tensor, "n c h w"], among: Bool[Tensor, " n"]) -> Bool[Tensor, " n"]:
    """Which images are much farther from their nearest neighbour than is usual; those not `among` do not count."""
    odd = torch.zeros(len(images), dtype=torch.bool)
    if int(among.sum()) >= ENOUGH:
        near = _neighbours(_thumbnails(images[among]))[0][:, 0]
        usual = near.median()
        spread = (near - usual).abs().median()
        odd[among] = (near > usual + DEVIATIONS * spread) & (near > TIMES * usual)
    return odd


def _few(count: int, holdout: float, false_calls: float) -> str:
    kept = min(count - 1, max(1, round(holdout * count)))  # as holdout.split
    told = (
        f"{count} good images are few: the {kept} held out for the thresholds can promise a false-call rate of "
        f"{100 / (kept + 1):.0f} % at best"
    )
    if not (0 < holdout < 1 and 0 < false_calls < 1):
        return told  # refused elsewhere
    images = math.ceil((math.ceil(1 / false_calls - 1e-9) - 1) / holdout - 1e-9)
    return f"{told}, and {100 * false_calls:g} % takes {images} images"


def _names(data: OneClass, which: Int[Tensor, " k"]) -> Sequence[str]:
    """The files of these images, or their numbers where no file is known."""
    known: Sequence[Path] = data.files if len(data.files) == len(data.train) else ()
    return [named(known[one].name) if known else f"number {one + 1}" for one in which.tolist()]


def _first_of_their_pixels(images: UInt8[Tensor, "n c h w"]) -> Bool[Tensor, " n"]:
    """Which images have pixels that none before them has."""
    seen, first = set[bytes](), list[bool]()
    for image in images:
        pixels = hashlib.sha256(image.contiguous().numpy().tobytes()).digest()
        first.append(pixels not in seen)
        seen.add(pixels)
    return torch.tensor(first, dtype=torch.bool)


def _thumbnails(images: UInt8[Tensor, "n c h w"]) -> Float[Tensor, "n s"]:
    """Small and grey, not rounded: flat textures differ by less than a level."""
    parts = [F.adaptive_avg_pool2d(part.float().mean(1, keepdim=True), SIDE).flatten(1) for part in images.split(BLOCK)]
    return torch.cat(parts)


def _neighbours(thumbnails: Float[Tensor, "n s"]) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The OTHERS nearest to each, at most half of all, nearest first, in blocks: all pairs may not fit in memory.

    Found by products, which is fast, and then measured anew: of a copy a product tells little but rounding.
    """
    count = min(OTHERS, (len(thumbnails) - 1) // 2)
    centred = thumbnails - thumbnails.mean(0)
    distances, places = [], []
    for begin in range(0, len(centred), BLOCK):
        part = centred[begin : begin + BLOCK]
        apart = torch.cdist(part, centred, compute_mode="use_mm_for_euclid_dist")
        apart[torch.arange(len(part)), torch.arange(begin, begin + len(part))] = torch.inf
        which = apart.topk(count, dim=1, largest=False).indices
        exact, order = (centred[which] - part[:, None]).norm(dim=2).sort(dim=1, stable=True)
        distances.append(exact)
        places.append(which.gather(1, order))
    return torch.cat(distances), torch.cat(places)
