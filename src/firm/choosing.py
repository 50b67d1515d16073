"""Settings chosen on good images alone, before anything is trained.

A part of the good images plays the inspected ones (`trial.py`). Whichever light, pose and reach let plain pixels, or
the features of a pretrained backbone, tell those with synthetic defects apart best are taken: a trial of seconds, which
never sees a real defect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from firm.adaptor import Pretrained, cell_features
from firm.backbones import Backbone, load_backbone
from firm.bank import Memory
from firm.conditioning import LIGHTS, Conditioned, Conditioning, has_direction
from firm.embedding import deepest
from firm.foreground import Rule, rule_for
from firm.images import Preprocessing, resize
from firm.localiser import Looker, Looks, Seen, fit_localiser, is_grey, look_at
from firm.metrics import auroc
from firm.outliers import KINDS, Donor, Mixed
from firm.recipes.recipe import AFTERWARDS, Recipe
from firm.sisters import sisters
from firm.tiling import Grid
from firm.trial import Trial, make_trial
from firm.types import OneClass
from firm.views import PatchPairs

ALL = Mixed(sources=KINDS, per_inlier=len(KINDS))
COARSE_CELL = 16  # px: cells of pretrained features in the trial
CALM = 0.1  # most that brightness and contrast of patches vary after `local` light
COARSE = 0.01  # part of all cells of pretrained features that is kept where each is compared with all: a coreset
MANY, CORE = 80_000, 8_000  # patches each of which is compared with all: of more, a coreset of so many is kept
AROUND = 0.4  # of a texture: what lies around a place counts as well, for its defects may be wide and slight
PLACED = 0.03  # AUROC by which places must win besides on a texture: it has none, and a trial of 30 images errs by more
WORTH = 0.02  # AUROC by which a further setting must win over a simpler one; a guess of what so few images can tell


@dataclass(frozen=True)
class Choice:
    """One candidate, and the AUROC of the trial with it."""

    conditioning: Conditioning
    reach: int
    auroc: float

    def sentence(self) -> str:
        where = "everywhere" if self.reach < 0 else f"within {self.reach} cells"
        pose = "aligned" if self.conditioning.align else "as it lies"
        return f"light {self.conditioning.light}, {pose}, compared {where}: {100 * self.auroc:.1f}"


def choose(
    recipe: Recipe,
    data: OneClass,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    on_choice: Callable[[str], None] | None = None,
) -> Recipe:
    """The recipe with all that it leaves to be chosen filled in; what was tried is told sentence by sentence."""
    if not recipe.automatic:
        return recipe
    tell = on_choice or (lambda sentence: None)
    size = recipe.size or data.size
    images = resize(data.train, size) if data.train.shape[-1] > size else data.train
    rule = recipe.conditioning.foreground
    if "foreground" in recipe.automatic:
        rule = rule_for(data.name, images)
        kind = "texture" if rule.method == "ones" else "product on a background"
        tell(f"foreground: {describe(rule)}, so it is taken for a {kind}")
    settled = replace(
        recipe,
        conditioning=replace(recipe.conditioning, foreground=rule),
        automatic=tuple(name for name in recipe.automatic if name in AFTERWARDS),
    )
    settled = within(settled, len(data.train))
    if settled.training.batch < recipe.training.batch:
        fewer = f"batches of {settled.training.batch} instead of {recipe.training.batch}"
        tell(f"only {len(data.train)} good images: {fewer}")
    candidates = list(_candidates(recipe, rule, images))
    conditioning, reach = candidates[0]
    if len(candidates) > 1:
        asked = replace(settled, automatic=recipe.automatic)
        tried = _tried(candidates, asked, replace(data, train=images), seed, device, tell)
        best = _best(tried, texture=rule.method == "ones")
        tell(f"chosen: {best.sentence()}")
        conditioning, reach = best.conditioning, best.reach
    settled = replace(settled, conditioning=conditioning, memory=replace(settled.memory, reach=reach))
    if "features" in recipe.automatic and settled.memory.reach >= 0:
        # they stay before the head, where each place has its like and noise only blurs what differs
        settled = replace(settled, pretrained=replace(settled.pretrained, noise=0.0))
    if "reach" in recipe.automatic and settled.memory.reach < 0:
        settled = replace(settled, memory=_thinned(settled, images))
    if isinstance(settled.tiling, Grid):
        settled = replace(settled, tiling=_looking(settled.tiling, reach, recipe))
    if "light" in recipe.automatic and isinstance(settled.views, PatchPairs) and settled.conditioning.light == "local":
        # local contrast leaves little of a change of light, so patches need not vary as much
        settled = replace(settled, views=replace(settled.views, light=min(CALM, settled.views.light)))
    return settled


def _looking(grid: Grid, reach: int, recipe: Recipe) -> Grid:
    """The grid with what goes with the reach of a backbone, if that is chosen: in the trial as in the detector."""
    wide = reach < 0 and recipe.pretrained.name and "reach" in recipe.automatic
    return replace(grid, around=AROUND) if wide else grid


def _thinned(recipe: Recipe, images: UInt8[Tensor, "n c h w"]) -> Memory:
    """The memory of what is compared everywhere: a coreset of it."""
    if recipe.pretrained.name:
        return replace(recipe.memory, keep=COARSE, choose="coreset")
    rows, columns = recipe.tiling.shape(*images.shape[-2:]) if isinstance(recipe.tiling, Grid) else (1, 1)
    patches = len(images) * rows * columns
    return replace(recipe.memory, keep=CORE / patches, choose="coreset") if patches > MANY else recipe.memory


def within(recipe: Recipe, images: int) -> Recipe:
    """The recipe with batches that so many good images and their outliers can fill."""
    if recipe.pretrained.name:
        return recipe  # an image has as many cells as are wanted
    items = images * (1 + recipe.outliers.per_inlier)
    batch = min(recipe.training.batch, max(2, 2 * (items // 2)))
    return replace(recipe, training=replace(recipe.training, batch=batch))


def describe(rule: Rule) -> str:
    """A rule in words."""
    if rule.method == "ones":
        return "everything is object"
    return f"the {rule.polarity} side of {rule.method} on {rule.channel}"


def _candidates(recipe: Recipe, rule: Rule, images: Tensor) -> list[tuple[Conditioning, int]]:
    """From the cheapest and simplest on; what the recipe does not leave open has one value."""
    lights: tuple[str, ...] = LIGHTS if "light" in recipe.automatic else (recipe.conditioning.light,)
    aligns, reaches = [recipe.conditioning.align], [recipe.memory.reach]
    if "align" in recipe.automatic:
        aligns = [False, True] if has_direction(images, rule) else [False]
    if "reach" in recipe.automatic:
        near = max(1, recipe.memory.reach)
        reaches = [-1, near] if rule.method == "ones" else [near, -1]  # a texture has no places, an object has
    return [
        (Conditioning(light=light, align=align, foreground=rule), reach)
        for reach, align, light in product(reaches, aligns, lights)
    ]


def _tried(
    candidates: list[tuple[Conditioning, int]],
    recipe: Recipe,
    data: OneClass,
    seed: int,
    device: torch.device | str,
    tell: Callable[[str], None],
) -> list[Choice]:
    defects = ALL if recipe.pretrained.name else Donor()  # a backbone finds every donor, plain pixels little else
    parts, rule = sisters(data.name, data.train), recipe.conditioning.foreground
    trial = make_trial(data.train, parts, rule, defects, seed=seed, ignored=data.ignored)
    look = _looker(recipe, trial, device)
    looked: dict[Conditioning, Looked] = {}
    choices = []
    for conditioning, reach in candidates:
        if conditioning not in looked:
            looked[conditioning] = Looked.at(trial, conditioning, look, data.ignored)
        choice = Choice(conditioning, reach, looked[conditioning].told_apart(reach, recipe, seed))
        tell(f"tried {choice.sentence()}")
        choices.append(choice)
    return choices


def _looker(recipe: Recipe, trial: Trial, device: torch.device | str) -> Looks:
    """Plain pixels, or the features of a pretrained backbone as they are; coarse, for speed."""
    given = recipe.tiling if isinstance(recipe.tiling, Grid) else Grid()
    size = trial.known.shape[-1]
    if not recipe.pretrained.name:
        grid = replace(given, stride=max(given.stride, given.size // 2))
        return Looker(None, Preprocessing(size), grid, ("pixels",), is_grey(trial.known))
    grid = replace(given, size=max(COARSE_CELL, given.size), stride=max(COARSE_CELL, given.stride))
    backbone = load_backbone(recipe.pretrained.name, deepest=deepest(recipe.pretrained)).to(device)
    return Unadapted(backbone, recipe.pretrained, grid)


@dataclass(frozen=True)
class Unadapted:
    """What a pretrained backbone sees before anything is learnt."""

    backbone: Backbone
    settings: Pretrained
    grid: Grid
    kinds: tuple[str, ...] = ("backbone",)

    def __call__(self, images: UInt8[Tensor, "n k h w"]) -> Seen:
        alone = replace(self.settings, context=0)
        return {"backbone": cell_features(self.backbone, alone, self.grid, images)}


@dataclass(frozen=True)
class Looked:
    """What is seen of a trial in one light and pose."""

    trial: Trial
    look: Looks
    known: Conditioned
    inspected: Conditioned
    remembered: dict[str, Tensor]  # not Seen: there are other numbers of images in both
    seen: dict[str, Tensor]

    @classmethod
    def at(
        cls, trial: Trial, conditioning: Conditioning, look: Looks, ignored: Bool[Tensor, "a b"] | None = None
    ) -> Looked:
        known = conditioning(trial.known, ignored)
        usual = known.usual()
        known, inspected = known.completed(usual), conditioning(trial.inspected, ignored).completed(usual)
        return cls(trial, look, known, inspected, look_at(look, known.images), look_at(look, inspected.images))

    def told_apart(self, reach: int, recipe: Recipe, seed: int) -> float:
        """How well the worst patch tells defective from good."""
        stride = recipe.tiling.stride if isinstance(recipe.tiling, Grid) else self.look.grid.stride
        cells = -1 if reach < 0 else max(1, reach * stride // self.look.grid.stride)
        memory = Memory(reach=cells, standardise=recipe.memory.standardise)
        localiser = fit_localiser(self.look, self.known, memory, seed=seed, seen=self.remembered)
        localiser = replace(localiser, grid=_looking(self.look.grid, reach, recipe))
        found = localiser.cells(self.seen, self.inspected.foreground, self.inspected.hidden())
        return auroc(localiser.scores(found), self.trial.defective)


def _best(choices: list[Choice], *, texture: bool) -> Choice:
    """The best, but the simplest of those that are hardly worse; places of a texture must win by more."""
    values = [choice.auroc - (PLACED if texture and choice.reach >= 0 else 0) for choice in choices]
    return next(choice for choice, value in zip(choices, values, strict=True) if value >= max(values) - WORTH)
