"""The bank of normal patches: scores of patches by their nearest neighbours, everywhere or near their own place.

The search is exact (`search.py`). Over a hundred thousand patches it takes half the time of whole rows of cosines
(`benchmarks/patch_bank.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from firm.coreset import CHOICES, Step
from firm.memory import unit
from firm.search import BLOCK, Places, Visit, largest_products
from firm.types import FirmError

QUERIES = 16384  # patches looked up before the bank is read again
FEW = 10  # images below which a place has too few scores for statistics of its own
SMALLEST = 1e-6  # deviation: ten times what float32 leaves of a cosine of one
METRICS = ("cosine", "l2")

OnProgress = Callable[[int, int], None]  # done, total


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Which normal patches are remembered, and with which of them a patch is compared.

    `random` keeps a uniform part; `coreset` those that leave no patch far from a kept one. `reach` compares a patch
    only with normal ones at most so many grid cells away (-1: with all), so that a good thing in a wrong place counts.
    `standardise` turns scores into deviations from what good images score at that place. `reweight` makes the score of
    an image count more where good patches are rare, as PatchCore does with 9; maps stay as they are.
    """

    keep: float = 1.0  # part of all normal patches
    choose: str = "random"
    reach: int = -1
    standardise: bool = False
    k: int = 1
    metric: str = "cosine"  # or l2: the distance of the features as they are
    reweight: int = 0  # normal patches around the nearest one that weigh the score of an image; 0: it is not weighed

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise FirmError(f"memory.keep is {self.keep}; it is the part of the patches to keep, above 0 and at most 1")
        if self.choose not in CHOICES:
            raise FirmError(f"no way to choose patches {self.choose!r}; use one of {', '.join(CHOICES)}")
        if self.reach < -1:
            raise FirmError(f"memory.reach is {self.reach}; use -1 for every place or 0 and more cells")
        if self.metric not in METRICS:
            raise FirmError(f"memory.metric is {self.metric!r}; use one of {', '.join(METRICS)}")
        if self.k < 1:
            raise FirmError(f"memory.k is {self.k}; a neighbour score needs k >= 1")
        self._check_reweight()

    def _check_reweight(self) -> None:
        if self.reweight < 0 or self.reweight == 1:  # one patch alone would weigh every distance as nothing
            raise FirmError(f"memory.reweight is {self.reweight}; use 0 for none or 2 and more patches, 9 as PatchCore")
        if self.reweight and self.standardise:
            raise FirmError(
                "memory.reweight weighs distances, and memory.standardise makes deviations of them; "
                "set memory.standardise=false or memory.reweight=0"
            )

    def with_metric(self, metric: str) -> Memory:
        """The same memory by another distance."""
        return replace(self, metric=metric)

    def keys(self, features: Float[Tensor, "p d"]) -> Float[Tensor, "p e"]:
        """What is remembered of features: such that the nearest has the largest product with a query.

        |q - b|^2 = |q|^2 - 2 (q b - |b|^2 / 2), so one number beside b turns the product into the distance.
        """
        if self.metric == "cosine":
            return unit(features)
        return torch.cat([features, -features.square().sum(1, keepdim=True) / 2], dim=1)

    def queries(self, features: Float[Tensor, "p d"]) -> Float[Tensor, "p e"]:
        """What is asked of the keys."""
        if self.metric == "cosine":
            return unit(features)
        return torch.cat([features, features.new_ones(len(features), 1)], dim=1)

    def remembered(self, keys: Float[Tensor, "p e"]) -> Float[Tensor, "p d"]:
        """The features keys were made of; of cosine their directions."""
        return keys if self.metric == "cosine" else keys[:, :-1]

    def distances(self, queries: Float[Tensor, "p e"], products: Float[Tensor, "p k"]) -> Float[Tensor, "p k"]:
        """The distance behind the largest products of each query."""
        if self.metric == "cosine":
            return 1 - products
        squares = queries[:, :-1].square().sum(1, keepdim=True)
        return (squares - 2 * products).clamp(min=0).sqrt()

    def kept(self, patches: int) -> int:
        """How many of so many patches are kept."""
        return max(1, round(self.keep * patches))


def cost(images: int, rows: int, columns: int, dim: int, memory: Memory) -> str:
    """What the bank will hold, as a sentence to be read before it is made."""
    patches = images * rows * columns
    kept = memory.kept(patches)
    megabytes = kept * dim * 4 / 1e6
    size = f"{megabytes:,.0f} MB" if megabytes >= 10 else f"{megabytes:.1f} MB"
    if kept == patches:
        return f"bank: {kept:,} patches x {dim} = {size}"
    sentence = f"bank: {kept:,} of {patches:,} patches x {dim} = {size}"
    return f"{sentence}, found by {kept * patches:,} comparisons" if memory.choose == "coreset" else sentence


@dataclass(frozen=True)
class Bank:
    """Normal patches and where they come from, ordered by cell; tensors only, so that it can be saved."""

    vectors: Float[Tensor, "m e"]  # of unit length, or as `Memory.keys` makes them for l2
    image: Int[Tensor, " m"]
    cell: Int[Tensor, " m"]  # row-major, rising
    shape: tuple[int, int]
    memory: Memory
    mean: Float[Tensor, "r c"]  # of the scores of good images; 0 and 1 without standardise
    deviation: Float[Tensor, "r c"]

    @property
    def places(self) -> Places:
        return Places(self.image, self.cell, self.shape)

    @cached_property
    def visits(self) -> list[Visit]:
        """Which patches each cell is compared with: found once, however often the bank is asked."""
        return self.places.visits(self.memory.reach, self.memory.k, apart=False)

    def score(self, features: Float[Tensor, "n r c d"]) -> Float[Tensor, "n r c"]:
        """Equation 6, negated, for every patch: one less the mean of its k largest cosines, or the mean of the k least
        distances; standardised if asked.

        A cell with fewer than k patches within reach reaches further, by as little as it takes to have them.
        """
        return self.standardised(_scores(self, features))

    def standardised(self, scores: Float[Tensor, "n r c"]) -> Float[Tensor, "n r c"]:
        """Raw scores as the bank's settings want them: in deviations from the mean of their place, or as they are."""
        return (scores - self.mean) / self.deviation if self.memory.standardise else scores

    def weights(self, patches: Float[Tensor, "p d"], cells: Int[Tensor, " p"]) -> Float[Tensor, " p"]:
        """PatchCore's weights of patches seen at these cells: 1 - exp(d*) / sum of exp(d).

        d* is the distance to the nearest normal patch, and the sum is over that one and those nearest to it, in all
        `memory.reweight`: beside a normal patch that is rare a distance counts more than in a crowd.
        """
        reaches = None
        if self.memory.reach >= 0:
            reaches = self.places.reaches(self.memory.reach, self.memory.k, apart=False).flatten()[cells]
        at_once = min(BLOCK, max(1, BLOCK * BLOCK // len(self.vectors)))
        parts = [
            _weights(self, patches[part], None if reaches is None else self.places.within(cells[part], reaches[part]))
            for part in torch.arange(len(patches)).split(at_once)
        ]
        return torch.cat(parts)

    def nearest(self, patch: Float[Tensor, " d"], cell: int) -> tuple[int, int]:
        """Image and cell of the normal patch that one seen at this cell is most like."""
        asked = torch.tensor([cell])
        products = self.memory.queries(patch[None]) @ self.vectors.T
        if self.memory.reach >= 0:
            reach = self.places.reaches(self.memory.reach, self.memory.k, apart=False).flatten()[asked]
            products = products.masked_fill(~self.places.within(asked, reach), -math.inf)
        return int(self.image[products.argmax()]), int(self.cell[products.argmax()])

    def tensors(self) -> dict[str, Tensor]:
        """Everything but the settings."""
        return {name: getattr(self, name) for name in TENSORS}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], memory: Memory) -> Bank:
        """The bank whose `tensors` these are."""
        found = complete("bank", TENSORS, tensors)
        rows, columns = found["mean"].shape
        return cls(**found, shape=(rows, columns), memory=memory)


TENSORS = ("vectors", "image", "cell", "mean", "deviation")


def complete(what: str, names: tuple[str, ...], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of these names, refused if one is not there."""
    missing = [name for name in names if name not in tensors]
    if missing:
        raise FirmError(f"the {what} lacks {', '.join(missing)}; write it again with {what.title()}.tensors")
    return {name: tensors[name] for name in names}


def fit_bank(
    features: Float[Tensor, "n r c d"],
    memory: Memory,
    *,
    rng: torch.Generator,
    parts: Int[Tensor, " n"] | None = None,
    seen: Bool[Tensor, "n r c"] | None = None,
    on_progress: OnProgress | None = None,
) -> Bank:
    """Remember patches of good images, given as their features on the grid; `parts` numbers the part each shows.

    Only patches that are `seen` are remembered and have a part in the statistics of their place. Progress is told by
    the two parts that can take long: choosing a coreset, and scoring the good images themselves.
    """
    n, rows, columns, dim = features.shape
    cells = rows * columns
    flat = features.flatten(0, 2)
    among = None if seen is None else seen.flatten().nonzero().squeeze(1)
    patches = len(flat) if among is None else len(among)
    kept = _checked_size(n, patches, memory)
    total = kept * ((memory.choose == "coreset" and kept < patches) + memory.standardise)
    tell = on_progress or (lambda done, total: None)
    image, cell = _places(flat, among, cells, memory, rng, lambda done: tell(done, total))
    vectors = torch.empty(kept, dim + (memory.metric == "l2"))
    for part in torch.arange(kept).split(QUERIES):  # no second copy of a large bank
        vectors[part] = memory.keys(flat[image[part] * cells + cell[part]])
    bank = Bank(vectors, image, cell, (rows, columns), memory, torch.zeros(rows, columns), torch.ones(rows, columns))
    if not memory.standardise:
        return bank
    shown = None if parts is None or len(parts.unique()) < 2 else parts
    own = leave_one_out(bank, features, lambda images: tell(total - kept + kept * images // n, total), parts=shown)
    mean, deviation = statistics(own, seen)
    return replace(bank, mean=mean, deviation=deviation)


def leave_one_out(
    bank: Bank,
    features: Float[Tensor, "n r c d"],
    on_images: Step | None = None,
    *,
    parts: Int[Tensor, " n"] | None = None,
) -> Float[Tensor, "n r c"]:
    """Raw scores of the images the bank was fitted to, in that order, each against the patches of the others.

    Images of the same part, given their numbers, are no others: a new part has no sisters in the bank. A cell reaches
    further, as in `Bank.score`, until whichever image is left out there are k patches of others.
    """
    if len(features) <= int(bank.image.max()):
        raise FirmError(
            f"the bank remembers image {int(bank.image.max())} but {len(features)} are given; "
            "give all images it was fitted to, in the same order"
        )
    owner = torch.arange(len(features)) if parts is None else parts
    owned = replace(bank, image=owner[bank.image])
    others = len(owned.image) - int(owned.image.bincount().max())
    if others < bank.memory.k:
        raise FirmError(
            f"leaving an image out leaves {others} patches of others where k = {bank.memory.k} are needed; "
            "give more good images, keep more patches or set memory.standardise to False"
        )
    return _scores(owned, features, on_images, owner=owner)


def statistics(
    scores: Float[Tensor, "n r c"], seen: Bool[Tensor, "n r c"] | None = None
) -> tuple[Float[Tensor, "r c"], Float[Tensor, "r c"]]:
    """Mean and deviation of the scores of good images at each place.

    Variances are averaged over the 3 x 3 cells around each, and no deviation is below half the median one: where good
    images happened to agree, a little must not raise the alarm. Fewer than ten images share one mean and deviation.
    """
    if seen is not None and not bool(seen.all()):
        return _statistics_of_seen(scores, seen)
    if len(scores) < FEW:
        mean, deviation = scores.mean().expand(scores.shape[1:]), scores.std().expand(scores.shape[1:])
    else:
        around = F.avg_pool2d(scores.var(0)[None], 3, stride=1, padding=1, count_include_pad=False)[0]
        mean, deviation = scores.mean(0), around.sqrt()
        deviation = deviation.clamp(min=float(deviation.flatten().quantile(0.5)) / 2)
    return mean.contiguous(), deviation.clamp(min=SMALLEST)


def _statistics_of_seen(
    scores: Float[Tensor, "n r c"], seen: Bool[Tensor, "n r c"]
) -> tuple[Float[Tensor, "r c"], Float[Tensor, "r c"]]:
    """The same of the scores that are seen; places with fewer than ten of them have the statistics of all places."""
    count = seen.sum(0)
    own = count >= FEW
    some = scores[seen]
    mean, deviation = some.mean().expand_as(count).clone(), some.std().expand_as(count).clone()
    if bool(own.any()):
        means = scores.where(seen, 0).sum(0) / count.clamp(min=1)
        variance = (scores - means).square().where(seen, 0).sum(0) / (count - 1).clamp(min=1)
        summed = F.avg_pool2d(torch.stack([variance.where(own, 0), own.float()]), 3, stride=1, padding=1)
        around = (summed[0] / summed[1])[own].sqrt()  # of places that have a variance
        mean[own], deviation[own] = means[own], around.clamp(min=float(around.quantile(0.5)) / 2)
    return mean, deviation.clamp(min=SMALLEST)


def _checked_size(images: int, patches: int, memory: Memory) -> int:
    """How many patches the bank will hold; what cannot be done is refused before the long work begins."""
    if not patches:
        raise FirmError("there are no good patches to remember; give at least 1 good image")
    if memory.standardise and images < 2:
        raise FirmError("1 good image cannot be standardised by others; give 2 or set memory.standardise to False")
    kept = memory.kept(patches)
    if kept < memory.k:
        raise FirmError(f"k = {memory.k} neighbours cannot be found among {kept} kept patches; keep more or lower k")
    if kept < memory.reweight:
        raise FirmError(
            f"memory.reweight is {memory.reweight}, but only {kept} patches are kept; keep more or lower it"
        )
    return kept


# --- searching ---


def _scores(
    bank: Bank,
    features: Float[Tensor, "n r c d"],
    on_images: Step | None = None,
    *,
    owner: Int[Tensor, " n"] | None = None,
) -> Float[Tensor, "n r c"]:
    """Raw scores; with an owner each image is compared with patches of other owners only. A few images at a time."""
    n, *grid = features.shape
    dim = bank.vectors.shape[1] - (bank.memory.metric == "l2")
    if (*grid,) != (*bank.shape, dim):
        raise FirmError(
            f"features {tuple(grid)} do not fit a bank of {(*bank.shape, dim)}; "
            "use the encoder, image size and tiling it was fitted with"
        )
    visits = bank.visits if owner is None else bank.places.visits(bank.memory.reach, bank.memory.k, apart=True)
    result = torch.empty(n, *bank.shape)
    images = min(BLOCK, max(1, QUERIES // math.prod(bank.shape)))
    for begin in range(0, n, images):
        part = slice(begin, min(begin + images, n))
        owners = None if owner is None else (owner[part], bank.image)
        result[part] = _distances(bank, visits, features[part], owners)
        if on_images is not None:
            on_images(part.stop)
    return result


def _distances(
    bank: Bank, visits: list[Visit], features: Float[Tensor, "n r c d"], owners: tuple[Tensor, Tensor] | None
) -> Float[Tensor, "n r c"]:
    """The mean of the k least of every patch, which are looked up cell by cell."""
    by_cell = features.flatten(1, 2).transpose(0, 1)
    queries = bank.memory.queries(by_cell.flatten(0, 1))
    largest = largest_products(
        bank.vectors, visits, queries.unflatten(0, by_cell.shape[:2]), bank.memory.k, owners
    ).flatten(0, 1)
    away = bank.memory.distances(queries, largest).mean(1)
    return away.view(by_cell.shape[:2]).T.unflatten(1, bank.shape)


def _weights(bank: Bank, patches: Float[Tensor, "p d"], within: Bool[Tensor, "p m"] | None) -> Float[Tensor, " p"]:
    memory = bank.memory
    queries = memory.queries(patches)
    products = queries @ bank.vectors.T
    nearest = (products if within is None else products.masked_fill(~within, -math.inf)).argmax(1, keepdim=True)
    around = memory.queries(memory.remembered(bank.vectors[nearest[:, 0]])) @ bank.vectors.T
    around.scatter_(1, nearest, math.inf)  # itself comes first, whatever rounding says of its copies
    crowd = around.topk(memory.reweight, dim=1).indices
    return 1 - memory.distances(queries, products.gather(1, crowd)).softmax(1)[:, 0]


def _places(
    flat: Float[Tensor, "p d"],
    among: Int[Tensor, " s"] | None,
    cells: int,
    memory: Memory,
    rng: torch.Generator,
    on_kept: Step,
) -> tuple[Int[Tensor, " m"], Int[Tensor, " m"]]:
    """Image and cell of every patch to keep, ordered by cell and then by image; `among` are those to choose from."""
    chosen = torch.arange(len(flat)) if among is None else among
    kept = memory.kept(len(chosen))
    if kept < len(chosen):
        some = flat if among is None else flat[among]
        chosen = chosen[CHOICES[memory.choose](some, kept, memory.metric, rng, on_kept).sort().values]
    chosen = chosen[(chosen % cells).argsort(stable=True)]
    return chosen // cells, chosen % cells
