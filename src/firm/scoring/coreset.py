"""Which patches a bank keeps when it cannot keep all: a uniform sample, or a greedy coreset (k-center)."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from firm.scoring.knn import unit

PROJECTED = 128  # dimensions in which the coreset is selected
CANDIDATES = 128  # for the next centers, per pass over the points
BLOCK = 1024  # so many points against as many centers: 4 MB of distances
POINTS = 4096  # projected at once


def random_sample(patches: Float[Tensor, "m d"], kept: int, metric: str, rng: torch.Generator) -> Int[Tensor, " kept"]:
    """A uniform sample without replacement."""
    return torch.randperm(len(patches), generator=rng)[:kept].to(patches.device)


def greedy_coreset(patches: Float[Tensor, "m d"], kept: int, metric: str, rng: torch.Generator) -> Int[Tensor, " kept"]:
    """Greedy k-center from a random patch: always the patch farthest from those kept so far.

    It works on unit vectors (cosine) or the features themselves (l2), projected at random if they have more than 128
    dimensions. There no patch is more than twice as far from a kept one as under the best selection.
    """
    scaled = unit if metric == "cosine" else Tensor.float
    if patches.shape[1] <= PROJECTED:
        points = scaled(patches)
    else:
        projection = torch.randn(patches.shape[1], PROJECTED, generator=rng) / math.sqrt(PROJECTED)
        points = torch.cat([scaled(part) @ projection.to(patches.device) for part in patches.split(POINTS)])
    halves = points.square().sum(1) / 2
    distance = torch.full_like(halves, math.inf)
    centers = selected = torch.randint(len(points), (1,), generator=rng).to(points.device)
    while len(selected) < kept:
        _update(distance, points, halves, centers)
        distance[centers] = -1  # never again, not even where only copies are left
        centers = _farthest(distance, points, halves, min(CANDIDATES, kept - len(selected)))
        selected = torch.cat([selected, centers])
    return selected


def _update(
    distance: Float[Tensor, " m"], points: Float[Tensor, "m p"], halves: Float[Tensor, " m"], centers: Int[Tensor, " f"]
) -> None:
    """Lower, in place, each point's distance to its nearest center (half its square) for the new centers."""
    rows = max(1, BLOCK * BLOCK // len(centers))
    for begin in range(0, len(points), rows):
        part = slice(begin, begin + rows)
        nearest = torch.addmm(halves[centers], points[part], points[centers].T, alpha=-1).amin(1)
        distance[part] = torch.minimum(distance[part], (nearest + halves[part]).clamp(min=0))


def _farthest(
    distance: Float[Tensor, " m"], points: Float[Tensor, "m p"], halves: Float[Tensor, " m"], most: int
) -> Int[Tensor, " f"]:
    """The next centers of the greedy selection, exactly, as many as one pass over the points can decide.

    Distances only shrink: while the farthest candidate, updated for the centers just taken, is no nearer than the
    farthest point that is no candidate, it is the farthest of all.
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


Sampler = Callable[[Tensor, int, str, torch.Generator], Tensor]
SAMPLERS: dict[str, Sampler] = {"random": random_sample, "coreset": greedy_coreset}
