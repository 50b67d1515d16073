"""Normal patches remembered: a patch scores its distance to the nearest ones (Bank) or to their mean (Prototype)."""

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from firm.errors import DataError, ModelFileError, SettingError
from firm.scoring.coreset import SAMPLERS, coreset_of_places
from firm.scoring.knn import BLOCK, SearchPlan, largest_products, search_plan, search_radii, unit
from firm.scoring.memory import Memory, memory_for
from firm.scoring.place_statistics import statistics

QUERIES = 16384  # patches searched for in one pass over the bank
LIGHTEST = 0.01  # weight of a place in the choice of what is kept: new images may count where good ones do not
PACKED = 2**25  # numbers in a bank up to which its keys are held twice: 128 MB
SAMPLE = 32  # images by which the coresets of places are given their sizes
IMAGES = 16  # whose patches are added to a prototype at once
ISOLATED = 5.0  # deviations from which a good patch that no other part supports is left out: it may be a defect
BY_MEAN = "projection"  # compared with the mean of the good patches, not with each of them
Cells = Float[Tensor, "n r c"]
PatchFeatures = Float[Tensor, "n r c d"]
Parts = Int[Tensor, " n"]
Visible = Bool[Tensor, "n r c"]
Owners = tuple[Int[Tensor, " n"], Int[Tensor, " m"]] | None  # of images and of keys


class PatchReference(nn.Module):
    """What patches are compared with; every tensor is a buffer. Features must come on its device."""

    TENSORS: ClassVar[tuple[str, ...]]
    mean: Float[Tensor, "r c"]  # of the scores of good images; 0 and 1 without standardise
    deviation: Float[Tensor, "r c"]

    def __init__(self, memory: Memory, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        if missing := [name for name in self.TENSORS if name not in tensors]:
            raise ModelFileError(
                f"the {type(self).__name__} lacks {', '.join(missing)}; fit and save the detector again"
            )
        self.memory = memory
        for name in self.TENSORS:
            self.register_buffer(name, tensors[name])
        self.register_load_state_dict_post_hook(_plan_again)  # type: ignore[no-untyped-call]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the grid."""
        rows, columns = self.mean.shape
        return rows, columns

    @property
    def dim(self) -> int:
        """How many numbers describe a patch."""
        raise NotImplementedError

    def distances(self, features: PatchFeatures, needed: Visible | None = None) -> Cells:
        """The distance of every patch to what is normal; where it is not `needed` it may be infinite."""
        raise NotImplementedError

    def weights(self, patches: Float[Tensor, "p d"], cells: Int[Tensor, " p"]) -> Float[Tensor, " p"]:
        """How much patches at these cells count in the score of an image."""
        raise NotImplementedError

    def score(self, features: PatchFeatures, needed: Visible | None = None) -> Cells:
        """The distance of every patch, standardised if set."""
        expected = (*self.shape, self.dim)
        if features.shape[1:] != expected:
            raise SettingError(
                f"features {tuple(features.shape[1:])} do not fit patches of {expected}; "
                "use the encoder, image size and tiling of the fit"
            )
        return self.standardised(self.distances(features, needed))

    forward = score

    def standardised(self, scores: Cells) -> Cells:
        """Distances as deviations from the mean of their place, or unchanged without `standardise`."""
        return (scores - self.mean) / self.deviation if self.memory.standardise else scores


class Bank(PatchReference):
    """Normal patches and their places; those of one cell are in a row."""

    TENSORS = ("vectors", "image", "cell", "mean", "deviation")
    vectors: Float[Tensor, "m e"]  # keys as `Memory.keys` makes them
    image: Int[Tensor, " m"]
    cell: Int[Tensor, " m"]  # row-major

    @property
    def dim(self) -> int:
        return self.vectors.shape[1] - (self.memory.metric == "l2")

    @cached_property
    def search_plan(self) -> SearchPlan | None:
        """Which patches each cell is compared with: computed once."""
        return search_plan(self.cell.cpu(), self.shape, self.memory.neighbourhood, self.memory.k)

    @cached_property
    def packed(self) -> list[Float[Tensor, "_ e _"]] | None:
        """The keys once more, as the plan wants them; not of large banks."""
        plan = self.search_plan
        return plan.packed(self.vectors) if plan is not None and self.vectors.numel() <= PACKED else None

    @cached_property
    def radii(self) -> Int[Tensor, " cells"]:
        """How many cells around itself each cell is compared with."""
        return search_radii(self.cell.cpu(), self.shape, self.memory.neighbourhood, self.memory.k).flatten()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Bank":
        """Moved, it packs its keys again where they are."""
        vars(self).pop("packed", None)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def distances(self, features: PatchFeatures, needed: Visible | None = None) -> Cells:
        """Equation 6, negated, for every patch: the mean distance to its k nearest normal patches.

        A cell with fewer than k patches in its neighbourhood searches as little further as it takes to have them.
        """
        return self._search(features, self.search_plan, needed=needed, packed=self.packed)

    def leave_one_out(
        self, features: PatchFeatures, parts: Parts | None = None, which: Int[Tensor, " s"] | None = None
    ) -> Float[Tensor, "_ r c"]:
        """Distances of the images the bank was fitted to, in that order, each to the patches of the others.

        With `parts` an image is compared only with those of other parts; `which` are the images that are compared. A
        cell searches further, as in `distances`, until there are k patches of others whichever image is left out.
        """
        owner = (torch.arange(len(features)) if parts is None else parts).to(self.image.device)
        key_owner, k = owner[self.image], self.memory.k
        others = len(key_owner) - int(key_owner.bincount().max())
        if others < k:
            raise DataError(
                f"leaving an image out leaves {others} patches of others where k = {k} are needed; "
                "give more good images, keep more patches or set memory.standardise to False"
            )
        plan = search_plan(self.cell.cpu(), self.shape, self.memory.neighbourhood, k, key_owner.cpu())
        some = slice(None) if which is None else which
        return self._search(features[some], plan, owners=(owner[some], key_owner))

    def weights(self, patches: Float[Tensor, "p d"], cells: Int[Tensor, " p"]) -> Float[Tensor, " p"]:
        """PatchCore's weights: 1 - exp(d*) / sum of exp(d).

        d* is the distance to the nearest normal patch, and the sum is over that one and its nearest neighbours, in all
        `memory.reweight`: beside a rare normal patch a distance counts more than beside a common one.
        """
        at_once = min(BLOCK, max(1, BLOCK * BLOCK // len(self.vectors)))
        weights = []
        for part, at in zip(patches.split(at_once), cells.to(patches.device).split(at_once), strict=True):
            queries = self.memory.queries(part)
            products = queries @ self.vectors.T
            nearest = self._near(products, at).argmax(1, keepdim=True)
            around = self.memory.queries(self.vectors[nearest[:, 0], : self.dim]) @ self.vectors.T
            around.scatter_(1, nearest, math.inf)  # itself comes first, whatever rounding makes of its copies
            neighbours = around.topk(self.memory.reweight, dim=1).indices
            weights.append(1 - self.memory.distances(queries, products.gather(1, neighbours)).softmax(1)[:, 0])
        return torch.cat(weights)

    def nearest(self, patch: Float[Tensor, " d"], cell: int) -> tuple[int, int]:
        """Image and cell of the normal patch nearest to a patch at this cell."""
        products = self.memory.queries(patch[None]) @ self.vectors.T
        best = self._near(products, torch.tensor([cell], device=products.device)).argmax()
        return int(self.image[best]), int(self.cell[best])

    def _near(self, products: Float[Tensor, "p m"], cells: Int[Tensor, " p"]) -> Float[Tensor, "p m"]:
        """Products of patches at these cells, minus infinity with keys outside their neighbourhood."""
        if self.memory.neighbourhood < 0:
            return products
        columns = self.shape[1]
        down = (self.cell // columns - cells[:, None] // columns).abs()
        across = (self.cell % columns - cells[:, None] % columns).abs()
        radius = self.radii.to(cells.device)[cells]
        return products.masked_fill(torch.maximum(down, across) > radius[:, None], -math.inf)

    def _search(
        self,
        features: PatchFeatures,
        plan: SearchPlan | None,
        owners: Owners = None,
        needed: Visible | None = None,
        packed: list[Float[Tensor, "_ e _"]] | None = None,
    ) -> Cells:
        """A few images at a time; with owners (of images, of keys) an image is compared only with keys of others."""
        memory, n = self.memory, len(features)
        result = self.vectors.new_empty(n, *self.shape)
        images = max(1, min(BLOCK // (1 if plan is None else plan.width), QUERIES // math.prod(self.shape)))
        for begin in range(0, n, images):
            part = slice(begin, begin + images)
            by_cell = features[part].flatten(1, 2).transpose(0, 1)
            queries = memory.queries(by_cell.flatten(0, 1))
            owned = None if owners is None else (owners[0][part], owners[1])
            some = None if needed is None else needed[part].flatten(1).any(0).cpu()
            asked = queries.unflatten(0, by_cell.shape[:2])
            largest = largest_products(self.vectors, plan, asked, memory.k, owned, some, packed)
            distances = memory.distances(queries, largest.flatten(0, 1)).mean(1)
            result[part] = distances.view(by_cell.shape[:2]).T.unflatten(1, self.shape)
        return result


class Prototype(PatchReference):
    """The mean direction of all normal patches (s_proto, patch by patch).

    FIRM pulls normal patches together behind its head, so their mean serves as well as a neighbour, with less noise and
    no search.
    """

    TENSORS = ("direction", "mean", "deviation")
    direction: Float[Tensor, " d"]

    @property
    def dim(self) -> int:
        return len(self.direction)

    def distances(self, features: PatchFeatures, needed: Visible | None = None) -> Cells:
        return _cosine_distances(features, self.direction.expand(len(features), -1))

    def weights(self, patches: Float[Tensor, "p d"], cells: Int[Tensor, " p"]) -> Float[Tensor, " p"]:
        """A prototype has no neighbours, so every patch weighs the same."""
        return patches.new_ones(len(patches), dtype=torch.float32)


def remember(
    kind: str,
    features: PatchFeatures,
    memory: Memory,
    *,
    rng: torch.Generator,
    parts: Parts | None = None,
    visible: Visible | None = None,
    weight: Float[Tensor, "r c"] | None = None,
) -> PatchReference:
    """A bank of good patches; behind the head, where these lie together, their mean."""
    settings = memory_for(memory, kind)
    if kind == BY_MEAN:
        return fit_prototype(features, settings, parts=parts, visible=visible)
    return fit_bank(features, settings, rng=rng, parts=parts, visible=visible, weight=weight)


def fit_bank(
    features: PatchFeatures,
    memory: Memory,
    *,
    rng: torch.Generator,
    parts: Parts | None = None,
    visible: Visible | None = None,
    weight: Float[Tensor, "r c"] | None = None,
) -> Bank:
    """The bank of good images, given as their features on the grid; `parts` numbers the part each image shows.

    Only patches that are `visible` are kept and enter the statistics of their place; a coreset keeps more where a score
    has more `weight`. With `memory.standardise` a patch that is far from those of all other parts is left out, so that
    a few defective images do no harm.
    """
    visible = _checked_visible(features, memory, visible)
    n, owner = len(features), _owner(parts, len(features))
    among = visible.flatten().nonzero().squeeze(1)
    kept = memory.kept(len(among))
    for name, needed in (("k", memory.k), ("reweight", memory.reweight)):
        if kept < needed:
            raise SettingError(f"memory.{name} is {needed}, but only {kept} patches are kept; keep more or lower it")
    if kept < len(among) and memory.neighbourhood >= 0 and memory.sampling == "coreset":
        deviation = features.new_ones(features.shape[1:3])
        if memory.standardise:
            sample = torch.arange(min(n, SAMPLE)) * n // min(n, SAMPLE)
            scores = _bank_of(features, memory, among).leave_one_out(features, owner, sample)
            deviation = statistics(scores, visible[sample])[1]
        counts = (deviation.new_ones(()) if weight is None else weight.clamp(min=LIGHTEST)) / deviation
        of_places = features.flatten(1, 2), visible.flatten(1), counts.flatten()
        among = coreset_of_places(*of_places, kept, memory.metric)
    elif kept < len(among):
        flat = features.flatten(0, 2)
        patches = flat if len(among) == len(flat) else flat[among]
        among = among[SAMPLERS[memory.sampling](patches, kept, memory.metric, rng)]
    bank = _bank_of(features, memory, among)
    if not memory.standardise:
        return bank
    scores = bank.leave_one_out(features, owner)
    bank.mean, bank.deviation = statistics(scores, visible)
    alone = bank.standardised(scores) > ISOLATED
    supported = ~alone.flatten(1)[bank.image, bank.cell]
    if bool(supported.all()):
        return bank
    mean, deviation = statistics(scores, visible & ~alone)  # hardly any patch is nearest to one that is alone
    keys = {name: getattr(bank, name)[supported] for name in ("vectors", "image", "cell")}
    return Bank(memory, {**keys, "mean": mean, "deviation": deviation})


def _bank_of(features: PatchFeatures, memory: Memory, patches: Int[Tensor, " m"]) -> Bank:
    """The bank of these patches, numbered image by image; not standardised yet."""
    flat, cells = features.flatten(0, 2), math.prod(features.shape[1:3])
    cell, image = patches % cells, patches // cells
    order = cell * len(features) + image
    if memory.neighbourhood >= 0:  # cells with equally many patches side by side are compared together, uncopied
        order += cell.bincount(minlength=cells)[cell] * len(flat)
    patches = patches[order.argsort()]
    vectors = features.new_empty(len(patches), features.shape[3] + (memory.metric == "l2"), dtype=torch.float32)
    for chunk in torch.arange(len(patches)).split(QUERIES):  # no second copy of a large bank
        vectors[chunk] = memory.keys(flat[patches[chunk]])
    mean, deviation = vectors.new_zeros(features.shape[1:3]), vectors.new_ones(features.shape[1:3])
    places = {"image": patches // cells, "cell": patches % cells}
    return Bank(memory, {"vectors": vectors, **places, "mean": mean, "deviation": deviation})


def fit_prototype(
    features: PatchFeatures, memory: Memory, *, parts: Parts | None = None, visible: Visible | None = None
) -> Prototype:
    """The prototype of good images, as `fit_bank`; scores are standardised by those of each image without its part."""
    visible = _checked_visible(features, memory, visible)
    n, rows, columns, dim = features.shape
    chunks = torch.arange(n).split(IMAGES)
    sums = torch.empty(n, dim, dtype=torch.float64)  # there are many patches, hence doubles, and so the CPU
    for chunk in chunks:
        good = features[chunk]
        units = unit(good.flatten(0, 2)).view_as(good).cpu().double()
        sums[chunk] = (units * visible[chunk][..., None].cpu()).sum((1, 2))
    whole = sums.sum(0)
    direction = unit(whole[None])[0].to(features.device)
    mean, deviation = direction.new_zeros(rows, columns), direction.new_ones(rows, columns)
    prototype = Prototype(memory, {"direction": direction, "mean": mean, "deviation": deviation})
    if memory.standardise:
        owner = _owner(parts, n)
        own = torch.zeros(int(owner.max()) + 1, dim, dtype=sums.dtype).index_add_(0, owner, sums)
        others = unit(whole - own[owner]).to(features.device)
        scores = torch.cat([_cosine_distances(features[chunk], others[chunk]) for chunk in chunks])
        prototype.mean, prototype.deviation = statistics(scores, visible)
    return prototype


def _checked_visible(features: PatchFeatures, memory: Memory, visible: Visible | None) -> Visible:
    """Which patches count; what is impossible is refused before the long work begins."""
    visible = torch.ones(features.shape[:3], dtype=torch.bool) if visible is None else visible
    if not bool(visible.any()):
        raise DataError("there are no good patches to remember; give at least 1 good image")
    if memory.standardise and len(features) < 2:
        raise DataError("1 good image cannot be standardised by others; give 2 or set memory.standardise to False")
    return visible.to(features.device)


def _plan_again(bank: nn.Module, _: object) -> None:
    """Another state has patches at other places."""
    for name in ("search_plan", "packed", "radii"):
        vars(bank).pop(name, None)


def _owner(parts: Parts | None, images: int) -> Parts:
    """Whose scores are left out together: those of one part, or single images where all show one."""
    return torch.arange(images) if parts is None or len(parts.unique()) < 2 else parts.cpu()


def _cosine_distances(features: PatchFeatures, directions: Float[Tensor, "n d"]) -> Cells:
    """Of every patch to the direction of its image."""
    units = unit(features.flatten(0, 2)).view_as(features)
    return 1 - (units @ directions[:, None, :, None].to(units)).squeeze(3)
