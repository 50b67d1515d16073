"""Tune settings on good images and synthetic defects; no real defect is used.

`choose` runs before the training: foreground rule, illumination, alignment and neighbourhood, by the AUROC of plain
pixels or unadapted backbone features. `choose_features` runs after it: features before or after the adaptor's head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from firm.detector.frozen_floor import above_floor
from firm.detector.prepare import Prepared
from firm.errors import DataError, SettingError
from firm.images.alignment import ILLUMINATION, Conditioned, Conditioning, has_direction
from firm.images.colour import is_grey
from firm.images.foreground import Rule, foreground, rule_for
from firm.images.preprocess import Preprocessing, resize
from firm.metrics.image import auroc
from firm.networks.adaptor import COARSEST, Adapted
from firm.networks.backbone import Backbone
from firm.outliers.registry import KINDS, Mixture, PerlinBlend, make_outliers, scene_of
from firm.recipes.recipe import AFTERWARDS, Recipe, change
from firm.runtime.listener import SILENT, Listener
from firm.runtime.random import stream
from firm.scoring.memory import Memory
from firm.scoring.models import PatchScorer
from firm.scoring.patch_bank import remember
from firm.scoring.patch_features import (
    BackboneFeatures,
    EncoderFeatures,
    FeatureExtractor,
    UnadaptedFeatures,
    extract,
    kinds_of,
)
from firm.scoring.patch_grid import Grid
from firm.training.feature_batches import FeatureTask
from firm.training.patch_batches import PatchTask, ValidationImages
from firm.types import OneClass, OutlierSource
from firm.views.registry import PatchPairs

ALL_DEFECTS = Mixture(sources=KINDS, per_inlier=len(KINDS))
KNOWN, INSPECTED = 60, 30  # good images of a trial: references, and inspected ones
EXPOSURE = 0.15  # random change of the inspected images' brightness
TRIAL_CELL = 16  # px: cells of backbone features in the trial
LOCAL_JITTER = 0.1  # limit on brightness and contrast jitter of patches after `local` illumination
LARGE = 4 * 256 * 256  # pixels of an image from which the cost must grow no faster than them
CORESET_RATIO = 0.01  # of all backbone cells, if each is compared with all
CORESET_LEAST = 2000  # cells: leaving an image out of a smaller coreset says little about new images
KEPT_AT_PLACE = 24  # backbone cells kept at each place, on average, if each is compared near its place
MANY, CORESET = 80_000, 8_000  # above this many encoder patches, each compared with all, keep a coreset of this size
SURROUNDINGS = 0.4  # weight of a texture's surroundings, because its defects may be wide and faint
TEXTURE_MARGIN = 0.03  # AUROC by which a neighbourhood must win on a texture; 30 images give a larger error
MARGIN = 0.02  # AUROC by which a setting must beat a simpler one; a guess for so few images

BEFORE, BEHIND = "encoder+backbone", "projection+backbone"  # before and after the head of the adaptor
SAMPLED = 0.1  # fraction of the known patches kept to compare the two
ALTERED = 0.5  # altered fraction from which a cell is defective; cells between 0 and this are not evaluated


@dataclass(frozen=True)
class Tuned:
    """The tuned recipe, and the foregrounds of the good images if they were computed."""

    recipe: Recipe
    masks: Bool[Tensor, "n h w"] | None = None


@dataclass(frozen=True)
class Trial:
    """Reference images, and inspected images of which half have a synthetic defect."""

    known: UInt8[Tensor, "n c h w"]
    masks: Bool[Tensor, "n h w"]  # foregrounds of the known images
    inspected: UInt8[Tensor, "m c h w"]
    defective: Bool[Tensor, " m"]


@dataclass(frozen=True)
class Candidate:
    """Settings to try, and their AUROC."""

    conditioning: Conditioning
    radius: int
    auroc: float = 0.0

    def __str__(self) -> str:
        where = "anywhere" if self.radius < 0 else f"within {self.radius} cells"
        aligned = "aligned" if self.conditioning.align else "not aligned"
        return f"illumination {self.conditioning.illumination}, {aligned}, patches compared {where}"


def choose(
    recipe: Recipe,
    data: OneClass,
    parts: Int[Tensor, " n"],
    *,
    seed: int,
    backbone: Backbone | None = None,
    listener: Listener = SILENT,
) -> Tuned:
    """Tune the recipe's automatic settings before the training; no part is on both sides of a trial."""
    if not recipe.automatic or (backbone is not None and not recipe.patchwise):
        return Tuned(recipe)
    size = recipe.size or data.size
    images = data.train if recipe.shape or data.train.shape[-1] <= size else resize(data.train, size)
    rule = rule_for(data.name, images) if "foreground" in recipe.automatic else recipe.conditioning.foreground
    texture = rule.method == "ones"
    listener.detail(f"foreground: {rule}, so it is treated as {'a texture' if texture else 'an object'}")
    later = tuple(name for name in recipe.automatic if name in AFTERWARDS)
    settled = replace(recipe, conditioning=replace(recipe.conditioning, foreground=rule), automatic=later)
    settled = fill_batches(settled, len(images))
    if settled.training.batch < recipe.training.batch:
        listener.detail(f"{len(images)} good images: batches of {settled.training.batch}, not {recipe.training.batch}")
    masks = foreground(images, rule)
    candidates = _candidates(recipe, rule, masks)
    best = candidates[0]
    if len(candidates) > 1:
        untuned = replace(settled, automatic=recipe.automatic)
        defects = PerlinBlend() if backbone is None else ALL_DEFECTS  # pixels detect little but blends
        trial = make_trial(images, masks, parts, defects, seed=seed, ignored=data.ignored)
        tried = _tried(candidates, untuned, trial, data.ignored, backbone, seed, listener)
        best = _best(tried, texture=texture)
        listener.say(f"chosen on synthetic defects: {best} (AUROC {100 * best.auroc:.1f}{_reason(best, tried)})")
    return Tuned(_settled(settled, recipe, best, images), masks)


def _settled(settled: Recipe, recipe: Recipe, best: Candidate, images: UInt8[Tensor, "n c h w"]) -> Recipe:
    """The recipe with the best candidate's settings and those that depend on them."""
    changes: dict[str, Any] = {"memory.neighbourhood": best.radius}
    if "features" in recipe.automatic and best.radius >= 0:
        changes["pretrained.noise"] = 0.0  # features stay before the head; noise would blur differences between places
    compared = change(settled, {"memory.neighbourhood": best.radius})
    if "neighbourhood" in recipe.automatic and (ratio := coreset_ratio(compared, images)) < 1:
        changes |= {"memory.sampling_ratio": ratio, "memory.sampling": "coreset"}
    local = "illumination" in recipe.automatic and best.conditioning.illumination == "local"
    if local and isinstance(settled.views, PatchPairs):
        changes["views.illumination"] = min(LOCAL_JITTER, settled.views.illumination)
    if recipe.patchwise:
        settled = replace(settled, tiling=_grid_for(recipe.grid, best.radius, recipe))
    return change(replace(settled, conditioning=best.conditioning), changes)


def _grid_for(grid: Grid, radius: int, recipe: Recipe) -> Grid:
    """The grid, with surroundings if backbone features are compared anywhere; the same in trial and detector."""
    anywhere = radius < 0 and recipe.pretrained.name and "neighbourhood" in recipe.automatic
    return replace(grid, surroundings=SURROUNDINGS) if anywhere else grid


def coreset_ratio(recipe: Recipe, images: UInt8[Tensor, "n c h w"]) -> float:
    """The fraction of patches kept: fewer of frozen features, and where every patch is compared with all."""
    if recipe.memory.neighbourhood >= 0:
        return min(1.0, KEPT_AT_PLACE / len(images)) if recipe.pretrained.name else 1.0
    rows, columns = recipe.grid.shape(*images.shape[-2:]) if recipe.patchwise else (1, 1)
    patches = len(images) * rows * columns
    if recipe.pretrained.name:
        return min(1.0, max(CORESET_RATIO * min(1.0, LARGE / images[0, 0].numel()), CORESET_LEAST / patches))
    return CORESET / patches if patches > MANY else 1.0


def fill_batches(recipe: Recipe, images: int) -> Recipe:
    """Limit the batch size to what the images and their outliers can fill."""
    if recipe.pretrained.name:
        return recipe  # every image has enough cells
    items = images * (1 + recipe.outliers.per_inlier)
    batch = min(recipe.training.batch, max(2, 2 * (items // 2)))
    return replace(recipe, training=replace(recipe.training, batch=batch))


def _candidates(recipe: Recipe, rule: Rule, masks: Bool[Tensor, "n h w"]) -> list[Candidate]:
    """All combinations of the automatic settings, simplest first."""
    kinds: tuple[str, ...] = ILLUMINATION if "illumination" in recipe.automatic else (recipe.conditioning.illumination,)
    aligns, radii = [recipe.conditioning.align], [recipe.memory.neighbourhood]
    if "align" in recipe.automatic:
        aligns = [False, True] if rule.method != "ones" and has_direction(masks) else [False]
    if "neighbourhood" in recipe.automatic:
        near = max(1, recipe.memory.neighbourhood)
        radii = [-1, near] if rule.method == "ones" else [near, -1]  # positions matter on an object only
    return [
        Candidate(Conditioning(illumination=illumination, align=align, foreground=rule), radius)
        for radius, align, illumination in product(radii, aligns, kinds)
    ]


def _best(candidates: list[Candidate], *, texture: bool) -> Candidate:
    """The simplest candidate within `MARGIN` of the best; on a texture a neighbourhood has a handicap."""
    values = [tried.auroc - (TEXTURE_MARGIN if texture and tried.radius >= 0 else 0) for tried in candidates]
    return next(tried for tried, value in zip(candidates, values, strict=True) if value >= max(values) - MARGIN)


def _reason(best: Candidate, tried: list[Candidate]) -> str:
    """Why a candidate is chosen although another has the larger AUROC; empty if none has."""
    largest = max(candidate.auroc for candidate in tried)
    if largest <= best.auroc:
        return ""
    return f"; another reaches {100 * largest:.1f}, but this one is simpler and within the margin"


def make_trial(
    images: UInt8[Tensor, "n c h w"],
    masks: Bool[Tensor, "n h w"],
    parts: Int[Tensor, " n"],
    defects: OutlierSource,
    *,
    seed: int,
    ignored: Bool[Tensor, "a b"] | None = None,
) -> Trial:
    """Draw reference images and inspected ones, with and without defects and with random exposure."""
    if len(images) < 4:
        raise DataError(f"{len(images)} good images are too few to choose settings; give 4 or more or set automatic=[]")
    rng = stream(seed, "trial")
    inspected, known = disjoint_parts(parts, rng=rng)
    copies = min(defects.per_inlier, max(1, INSPECTED // len(inspected)))  # reuse the images if they are few
    inspected = inspected.repeat_interleave(copies)
    good, others = images[inspected], images[known]
    copy = torch.arange(len(good)) % defects.per_inlier
    scene = scene_of(good, others, ignored, rule=Rule(), masks=(masks[inspected], masks[known]))
    bad = make_outliers(defects, good, rng=rng, copy=copy, scene=scene).images
    both = torch.cat([good, bad])
    exposure = 1 + EXPOSURE * (2 * torch.rand(len(both), 1, 1, 1, generator=rng) - 1)
    exposed = (both.float() * exposure).round().clamp(0, 255).to(torch.uint8)
    return Trial(others, masks[known], exposed, torch.arange(len(both)) >= len(good))


def disjoint_parts(parts: Int[Tensor, " n"], *, rng: torch.Generator) -> tuple[Int[Tensor, " m"], Int[Tensor, " k"]]:
    """Random indices of inspected and of reference images of other parts; with too few parts, these are shared."""
    order = torch.randperm(len(parts), generator=rng)
    inspected = order[: min(INSPECTED, len(parts) // 3)]
    other = ~torch.isin(parts[order], parts[inspected])
    known = order[other] if int(other.sum()) >= len(inspected) else order[len(inspected) :]
    return inspected, known[:KNOWN]


def _tried(
    candidates: list[Candidate],
    recipe: Recipe,
    trial: Trial,
    ignored: Bool[Tensor, "a b"] | None,
    backbone: Backbone | None,
    seed: int,
    listener: Listener,
) -> list[Candidate]:
    """The candidates with their AUROC; alignment and features are computed once per conditioning."""
    extractor = _trial_extractor(recipe, trial, backbone)
    views: dict[Conditioning, _View] = {}
    tried = []
    for number, candidate in enumerate(candidates, 1):
        if candidate.conditioning not in views:
            views[candidate.conditioning] = _View.of(trial, candidate.conditioning, extractor, ignored)
        value = views[candidate.conditioning].auroc(candidate.radius, recipe, trial.defective, seed)
        tried.append(replace(candidate, auroc=value))
        listener.detail(f"tried {tried[-1]}: AUROC {100 * value:.1f}")
        listener.progress("choosing settings", number, len(candidates))
    return tried


def _trial_extractor(recipe: Recipe, trial: Trial, backbone: Backbone | None) -> FeatureExtractor:
    """Plain pixels or unadapted backbone features, on a coarse grid for speed."""
    grid = recipe.grid if recipe.patchwise else Grid()
    if backbone is None:
        coarse = replace(grid, stride=max(grid.stride, grid.size // 2))
        return EncoderFeatures(None, Preprocessing(trial.known.shape[-1]), coarse, ("pixels",), is_grey(trial.known))
    cell = TRIAL_CELL if trial.known[0, 0].numel() <= LARGE else COARSEST
    coarse = replace(grid, size=max(cell, grid.size), stride=max(cell, grid.stride))
    return UnadaptedFeatures(backbone, recipe.pretrained, coarse)


@dataclass(frozen=True)
class _View:
    """A trial under one conditioning."""

    grid: Grid
    known: Conditioned
    inspected: Conditioned
    known_features: dict[str, Tensor]  # not Features: the two hold different numbers of images
    inspected_features: dict[str, Tensor]

    @classmethod
    def of(
        cls, trial: Trial, conditioning: Conditioning, extractor: FeatureExtractor, ignored: Bool[Tensor, "a b"] | None
    ) -> _View:
        known = conditioning(trial.known, ignored, trial.masks)
        typical = known.typical()
        known, inspected = known.completed(typical), conditioning(trial.inspected, ignored).completed(typical)
        features = extract(extractor, known.images), extract(extractor, inspected.images)
        return cls(extractor.grid, known, inspected, *features)

    def auroc(self, radius: int, recipe: Recipe, defective: Bool[Tensor, " m"], seed: int) -> float:
        stride = recipe.grid.stride if recipe.patchwise else self.grid.stride
        cells = -1 if radius < 0 else max(1, radius * stride // self.grid.stride)
        memory = Memory(neighbourhood=cells, standardise=recipe.memory.standardise)
        fitted = PatchScorer.fit(self.grid, self.known_features, self.known, memory, seed=seed)
        scorer = fitted.of(fitted.kinds, _grid_for(self.grid, radius, recipe))
        scores = scorer.cells(self.inspected_features, self.inspected.foreground, self.inspected.hidden())
        return auroc(scorer.scores(scores), defective)


def choose_features(prepared: Prepared, network: Adapted | object, *, seed: int, listener: Listener = SILENT) -> Recipe:
    """Choose features before or after the adaptor's head, by the AUROC on the validation images.

    The head separates synthetic defects best, but discards cues of other defects, so it must win by a margin. Within
    a neighbourhood features stay before the head: its mean has no positions, so a missing hole looks like good surface.
    """
    recipe, task = prepared.recipe, prepared.task
    if "features" not in recipe.automatic:
        return recipe
    settled = replace(recipe, automatic=())
    if isinstance(task, FeatureTask) and isinstance(network, Adapted):
        return above_floor(settled, task, network, prepared.data.train, seed=seed, listener=listener)
    if not isinstance(task, PatchTask) or task.validation is None or recipe.memory.neighbourhood >= 0:
        return settled
    if not isinstance(network, Adapted):
        raise SettingError("automatic features need a pretrained backbone; remove features from automatic")
    kinds = tuple({*kinds_of(BEFORE), *kinds_of(BEHIND)})
    extractor = BackboneFeatures(network, recipe.pretrained, recipe.grid, kinds)
    values = _compared(settled, extractor, task, task.validation, seed)
    for features, value in values.items():
        listener.detail(f"tried features {features}: {100 * value:.1f}")
    best = BEHIND if values[BEHIND] >= values[BEFORE] + MARGIN else BEFORE
    listener.detail(f"chosen: features {best}")
    return replace(settled, features=best)


def _compared(
    recipe: Recipe, extractor: BackboneFeatures, task: PatchTask, validation: ValidationImages, seed: int
) -> dict[str, float]:
    """The mean AUROC on the validation images for features before and after the head."""
    count = len(validation.foreground)
    trained = (~torch.isin(torch.arange(count), validation.images)).nonzero().squeeze(1)
    known = trained[torch.randperm(len(trained), generator=stream(seed, "preferring"))[:KNOWN]]
    bad = torch.isin(torch.arange(len(validation.altered)) % count, validation.images).nonzero().squeeze(1)
    inspected = extractor.from_cells(torch.cat([task.good.features[validation.images], task.outliers.features[bad]]))
    whose = torch.cat([validation.images, bad % count])
    altered = torch.cat([torch.zeros(len(validation.images), *validation.altered.shape[1:]), validation.altered[bad]])
    hidden = None if validation.hidden is None else validation.hidden[whose]
    memory = replace(recipe.memory, sampling_ratio=SAMPLED, sampling="random")
    banks = {
        kind: remember(kind, features, memory, rng=stream(seed, "preferring", kind))
        for kind, features in extractor.from_cells(task.good.features[known]).items()
    }
    no_weights = torch.zeros(altered.shape[1:])  # positions do not count here
    values = {}
    for features in (BEFORE, BEHIND):
        scorer = PatchScorer(extractor.grid, {kind: banks[kind] for kind in kinds_of(features)}, no_weights)
        cells = scorer.cells(inspected, validation.foreground[whose], hidden)
        values[features] = _mean_auroc(scorer.scores(cells), cells, altered, len(validation.images))
    return values


def _mean_auroc(
    scores: Float[Tensor, " n"], cells: Float[Tensor, "n r c"], altered: Float[Tensor, "n r c"], good: int
) -> float:
    """The mean of image and cell AUROC (the first `good` images are good); image AUROC if no cell is defective."""
    of_images = auroc(scores, torch.arange(len(scores)) >= good)
    if not bool((altered >= ALTERED).any()):
        return of_images
    clear = (altered == 0) | (altered >= ALTERED)
    return (of_images + auroc(cells[clear], altered[clear] > 0)) / 2
