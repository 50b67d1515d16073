"""Which patches a bank keeps when it cannot keep all: a uniform sample, or a greedy coreset (k-center).

Where patches are compared near their place only, the coreset is one of each place, and places share what is kept.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from firm.scoring.knn import unit

PROJECTED = 128  # dimensions in which the coreset is selected
CANDIDATES = 128  # for the next centers, per pass over the points
BLOCK = 1024  # so many points against as many centers: 4 MB of distances
POINTS = 4096  # projected at once
TOGETHER = 4  # patches of a place that are kept together: places that keep equally many share a matrix product
RICHEST = 4  # times as many patches as the mean are kept at a place, at most
PRODUCTS = 2**22  # between the patches of a few places, held at once


def random_sample(patches: Float[Tensor, "m d"], kept: int, metric: str, rng: torch.Generator) -> Int[Tensor, " kept"]:
    """A uniform sample without replacement."""
    return torch.randperm(len(patches), generator=rng)[:kept].to(patches.device)


def greedy_coreset(patches: Float[Tensor, "m d"], kept: int, metric: str, rng: torch.Generator) -> Int[Tensor, " kept"]:
    """Greedy k-center from a random patch: always the patch farthest from those kept so far.

    It works on unit vectors (cosine) or the features themselves (l2), projected at random if they have more than 128
    dimensions. There no patch is more than twice as far from a kept one as under the best selection.
    """
    scaled = unit if metric != "l2" else Tensor.float
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


def coreset_of_places(
    patches: Float[Tensor, "n p d"],
    usable: Bool[Tensor, "n p"],
    counts: Float[Tensor, " p"],
    kept: int,
    metric: str,
) -> Int[Tensor, " kept"]:
    """About so many of the patches of n images at p places, numbered image by image: greedy k-center at each place.

    A place has the more of them, the farther its patches are from those kept, and the more a distance `counts` there.
    """
    places, most = patches.shape[1], min(len(patches), RICHEST * math.ceil(kept / patches.shape[1]))
    taken, gaps = _greedy_by_place(patches, usable, most, metric)
    numbers = taken * places + torch.arange(places, device=taken.device)[:, None]
    there = gaps > -math.inf
    worth = (gaps[:, ::TOGETHER] * counts[:, None]).flatten()
    chosen = torch.zeros_like(worth, dtype=torch.bool)
    chosen[worth.sort(descending=True, stable=True).indices[: max(places, kept // TOGETHER)]] = True
    chosen = chosen.view(places, -1).repeat_interleave(TOGETHER, dim=1)[:, :most]
    return numbers[chosen & there]


def _greedy_by_place(
    patches: Float[Tensor, "n p d"], usable: Bool[Tensor, "n p"], most: int, metric: str
) -> tuple[Int[Tensor, "p most"], Float[Tensor, "p most"]]:
    """Which image gives each place its next patch, and how far that is from those before: infinitely the first.

    The first is the nearest to the mean; minus infinity marks that none is left.
    """
    images, places = patches.shape[:2]
    taken = torch.zeros(places, most, dtype=torch.long, device=patches.device)
    gaps = torch.full((places, most), -math.inf, device=patches.device)
    for part in torch.arange(places, device=patches.device).split(max(1, PRODUCTS // images**2)):
        free = usable[:, part].T.clone()
        points = patches[:, part].transpose(0, 1).float().masked_fill(~free[..., None], 0)
        points = points if metric == "l2" else unit(points.flatten(0, 1)).view_as(points)
        products, row = points @ points.mT, torch.arange(len(part), device=points.device)
        squares = products.diagonal(dim1=1, dim2=2)
        distance = torch.full_like(squares, math.inf)
        to_mean = products.sum(2) / free.sum(1, keepdim=True).clamp(min=1) - squares / 2
        current = to_mean.masked_fill(~free, -math.inf).argmax(1)
        for number in range(most):
            gap = distance[row, current].masked_fill(~free[row, current], -math.inf)
            taken[part, number], gaps[part, number] = current, gap.sqrt().where(gap > 0, gap) if metric == "l2" else gap
            free[row, current] = False
            from_current = squares + squares[row, current][:, None] - 2 * products[row, current]
            distance = torch.minimum(distance, from_current.clamp(min=0))
            current = distance.masked_fill(~free, -math.inf).argmax(1)
    return taken, gaps


Sampler = Callable[[Tensor, int, str, torch.Generator], Tensor]
SAMPLERS: dict[str, Sampler] = {"random": random_sample, "coreset": greedy_coreset}
