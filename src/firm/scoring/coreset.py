"""Which patches a bank keeps when it cannot keep all: a uniform part, or those that leave no patch far from one."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from firm.memory import unit

PROJECTED = 128  # dimensions in which the coreset is chosen
ROUND = 128  # candidates for the next centres of the coreset
BLOCK = 1024  # so many points against as many centres: 4 MB of distances
POINTS = 4096  # projected at once

Step = Callable[[int], None]  # done


def _random(
    flat: Float[Tensor, "m d"], kept: int, metric: str, rng: torch.Generator, on_kept: Step
) -> Int[Tensor, " kept"]:
    return torch.randperm(len(flat), generator=rng)[:kept]


def _coreset(
    flat: Float[Tensor, "m d"], kept: int, metric: str, rng: torch.Generator, on_kept: Step
) -> Int[Tensor, " kept"]:
    """Greedy k-centre from a drawn patch: always the patch farthest from those kept so far.

    In the space it works in (unit vectors or, for l2, the features as they are, projected at random if they have more
    than 128 dimensions) no patch is then more than twice as far from a kept one as under the best choice. Beside the
    points it holds a distance per point.
    """
    points = _projected(flat, metric, rng)
    halves = points.square().sum(1) / 2
    distance = torch.full((len(points),), math.inf)
    fresh = chosen = torch.randint(len(points), (1,), generator=rng)
    while len(chosen) < kept:
        _bring_closer(distance, points, halves, fresh)
        distance[fresh] = -1  # never again, not even where all that is left are copies
        fresh = _farthest(distance, points, halves, min(ROUND, kept - len(chosen)))
        chosen = torch.cat([chosen, fresh])
        on_kept(len(chosen))
    return chosen


def _projected(flat: Float[Tensor, "m d"], metric: str, rng: torch.Generator) -> Float[Tensor, "m p"]:
    dim = flat.shape[1]
    scaled = unit if metric == "cosine" else Tensor.float
    if dim <= PROJECTED:
        return scaled(flat)
    onto = torch.randn(dim, PROJECTED, generator=rng) / math.sqrt(PROJECTED)
    return torch.cat([scaled(part) @ onto for part in flat.split(POINTS)])


def _bring_closer(
    distance: Float[Tensor, " m"], points: Float[Tensor, "m p"], halves: Float[Tensor, " m"], fresh: Int[Tensor, " f"]
) -> None:
    """Lower, in place, the distance of every point to the nearest centre (half its square) for the fresh centres."""
    rows = max(1, BLOCK * BLOCK // len(fresh))
    for begin in range(0, len(points), rows):
        part = slice(begin, begin + rows)
        to_fresh = torch.addmm(halves[fresh], points[part], points[fresh].T, alpha=-1).amin(1)
        distance[part] = torch.minimum(distance[part], (to_fresh + halves[part]).clamp(min=0))


def _farthest(
    distance: Float[Tensor, " m"], points: Float[Tensor, "m p"], halves: Float[Tensor, " m"], most: int
) -> Int[Tensor, " f"]:
    """The next centres of the greedy choice, exactly, as many as can be told without looking at every point again.

    Distances only shrink. As long as the best of the farthest candidates, brought closer by those just taken, is no
    nearer than the farthest point outside was before, it is the farthest of all.
    """
    far, candidates = distance.topk(min(most + 1, len(distance)))
    outside = float(far[most]) if len(far) > most else -math.inf
    far, candidates = far[:most], candidates[:most]
    halves, points = halves[candidates], points[candidates]
    between = (halves[:, None] + halves[None, :] - points @ points.T).clamp(min=0)
    taken: list[int] = []
    while len(taken) < most:
        farthest = int(far.argmax())
        if taken and float(far[farthest]) < outside:
            break
        taken.append(farthest)
        far = torch.minimum(far, between[farthest])
        far[taken] = -math.inf
    return candidates[taken]


Choice = Callable[[Tensor, int, str, torch.Generator, Step], Tensor]
CHOICES: dict[str, Choice] = {"random": _random, "coreset": _coreset}
