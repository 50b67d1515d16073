"""Which good images are trained on and which set the thresholds: one split, or folds in which each takes its turn."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from firm.errors import DataError, SettingError, named
from firm.runtime.random import stream

TENTH, QUARTER = 0.1, 0.25
SHARED = 0.8  # parts per image below which images share parts: a few pairs are chance


def split_by_part(
    parts: Int[Tensor, " n"], holdout: float, *, seed: int, min_parts: int = 0
) -> tuple[Int[Tensor, " k"], Int[Tensor, " m"]]:
    """Indices of the images to train on and of those held out for the threshold, at least one of each.

    Images of one part stay together, because a held-out image scores too low if its part was trained on. So slightly
    fewer images than asked may be held out. Where images share parts, at least `min_parts` parts are held out, but no
    more than a quarter of all. A part is divided only if every part is larger than the holdout.
    """
    images = len(parts)
    if images < 2:
        raise DataError(f"{images} good images are too few; give at least 2, better 50 or more")
    check_holdout(holdout)
    room = count = held_out_images(images, holdout)
    sizes = parts.bincount()
    forced = min(min_parts, len(sizes) // 4) if len(sizes) < SHARED * images else 0
    order = torch.randperm(len(sizes), generator=stream(seed, "holdout"))
    chosen = torch.zeros(len(sizes), dtype=torch.bool)
    for number, part in enumerate(order.tolist()):
        if sizes[part] <= room or number < forced:
            chosen[part], room = True, room - int(sizes[part])
    first = parts == order[0]
    held_out = chosen[parts] if bool(chosen.any()) else first & (first.cumsum(0) <= count)
    return (~held_out).nonzero().squeeze(1), held_out.nonzero().squeeze(1)


def check_holdout(holdout: float) -> None:
    """Refuse a share that is none."""
    if not 0 < holdout < 1:
        raise SettingError(f"holdout is {holdout}; it must lie between 0 and 1")


def folds_by_part(parts: Int[Tensor, " n"], folds: int, *, seed: int) -> Int[Tensor, " n"]:
    """The fold of each image, 0, 1, ...: of about equal size, with images of one part in one fold."""
    sizes = parts.bincount()
    images, fold = torch.zeros(min(folds, len(sizes)), dtype=torch.long), torch.zeros_like(sizes)
    for part in torch.randperm(len(sizes), generator=stream(seed, "folds")).tolist():
        fold[part] = images.argmin()
        images[fold[part]] += sizes[part]
    return fold[parts]


def parts_by_name(files: Sequence[Path], pattern: str) -> Int[Tensor, " n"]:
    """The part of each image from its path: what the first group of a regular expression matches, else all of it."""
    search = compiled(pattern).search
    if not files:
        raise SettingError("--group-by needs images that are files; pass `parts` for others")
    names = []
    for file in files:
        match = search(file.as_posix())
        if not (name := match and match[min(1, match.re.groups)]):
            raise DataError(f"--group-by {pattern!r} matches nothing in {named(file)}; every image needs a part")
        names.append(name)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names])


def compiled(pattern: str) -> re.Pattern[str]:
    """The regular expression that names parts."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise SettingError(f"--group-by {pattern!r} is no regular expression: {error}") from error


def held_out_images(images: int, holdout: float) -> int:
    """How many images a holdout fraction asks for: at least one, never all."""
    return min(images - 1, max(1, round(holdout * images)))


def default_holdout(images: int, false_calls: float) -> float:
    """A tenth, or what the false-call rate takes, at most a quarter: a threshold set on few guarantees little."""
    return max(TENTH, min(QUARTER, parts_needed(false_calls) / max(1, images)))


def parts_needed(false_calls: float) -> int:
    """Held-out parts that guarantee the requested rate even if the worst of them is an exception."""
    return math.ceil(2 / false_calls) if 0 < false_calls < 1 else 0  # other rates are rejected elsewhere
