"""Which good images are learnt from and which set the threshold."""

from __future__ import annotations

import math

import torch
from jaxtyping import Int
from torch import Tensor

from firm.streams import stream
from firm.types import FirmError

TENTH, QUARTER = 0.1, 0.25
SHARED = 0.8  # parts to an image below which images are said to share parts: a few pairs are chance


def split(parts: Int[Tensor, " n"], holdout: float, *, seed: int, least: int = 0) -> tuple[Tensor, Tensor]:
    """Which images are learnt from, and which are held out for the threshold, given the part each shows: at least one.

    Images of one part stay together, for a held-out image scores too low beside a learnt sister. So a few less than
    wished may be held out, or more: where images share parts, `least` parts, but at most a quarter of all. Only where
    no part is as small as what is wished is one divided.
    """
    images = len(parts)
    if images < 2:
        raise FirmError(f"{images} good images are too few; give at least 2, better 50 or more")
    if not 0 < holdout < 1:
        raise FirmError(f"holdout is {holdout}; it must lie between 0 and 1")
    room = count = min(images - 1, max(1, round(holdout * images)))
    sizes = parts.bincount()
    enough = min(least, len(sizes) // 4) if len(sizes) < SHARED * images else 0
    order = torch.randperm(len(sizes), generator=stream(seed, "holdout"))
    chosen = torch.zeros(len(sizes), dtype=torch.bool)
    for number, part in enumerate(order.tolist()):
        if sizes[part] <= room or number < enough:
            chosen[part], room = True, room - int(sizes[part])
    first = parts == order[0]
    held_out = chosen[parts] if bool(chosen.any()) else first & (first.cumsum(0) <= count)
    return (~held_out).nonzero().squeeze(1), held_out.nonzero().squeeze(1)


def usual(images: int, false_calls: float) -> float:
    """The part that is held out unasked: a tenth, or what the wished rate takes, but at most a quarter.

    A few images more to learn from change little; a threshold set on a few keeps no promise worth having.
    """
    return max(TENTH, min(QUARTER, wanted(false_calls) / max(1, images)))


def wanted(false_calls: float) -> int:
    """Parts with which the wished rate is promised although the worst of them is an exception."""
    return math.ceil(2 / false_calls) if 0 < false_calls < 1 else 0  # what is not between is refused elsewhere
