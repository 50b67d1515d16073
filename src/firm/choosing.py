"""Settings chosen on good images alone, before anything is trained.

A part of the good images plays the inspected ones, with and without synthetic defects, in a light that varies as it
does on a line. Whichever light, pose and reach let plain pixels tell them apart best are taken: a
trial of seconds, which never sees a real defect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from firm.bank import Memory
from firm.conditioning import LIGHTS, Conditioning, elongation
from firm.foreground import Rule, foreground, rule_for
from firm.images import Preprocessing, resize
from firm.localiser import Looker, fit_localiser, is_grey
from firm.metrics import auroc
from firm.outliers import Donor
from firm.recipes.recipe import Recipe
from firm.streams import stream
from firm.tiling import Grid
from firm.types import FirmError, OneClass, Scene
from firm.views import PatchPairs

KNOWN, INSPECTED = 60, 30  # good images of the trial: remembered, and looked at
EXPOSURE = 0.15  # by which the light of the inspected images varies
LONG = 1.8  # ratio of an object's axes from which it has a direction to align by
CALM = 0.1  # most that brightness and contrast of patches vary after `local` light
COARSE = 0.01  # part of all cells of pretrained features that is kept where each is compared with all: a coreset
WORTH = 0.01  # AUROC by which a further setting must win over a simpler one


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


def choose(recipe: Recipe, data: OneClass, *, seed: int, on_choice: Callable[[str], None] | None = None) -> Recipe:
    """The recipe with all that it leaves to be chosen filled in; what was tried is told sentence by sentence."""
    if not recipe.automatic:
        return recipe
    tell = on_choice or (lambda sentence: None)
    size = recipe.size or data.size
    images = resize(data.train, size) if data.train.shape[-1] > size else data.train
    rule = recipe.conditioning.foreground
    if "foreground" in recipe.automatic:
        rule = rule_for(data.name, images)
        tell(f"foreground: {describe(rule)}")
    settled = replace(
        recipe, conditioning=replace(recipe.conditioning, foreground=rule), automatic=(),
    )  # fmt: skip
    settled = within(settled, len(data.train))
    if settled.training.batch < recipe.training.batch:
        fewer = f"batches of {settled.training.batch} instead of {recipe.training.batch}"
        tell(f"only {len(data.train)} good images: {fewer}")
    candidates = list(_candidates(recipe, rule, images))
    conditioning, reach = candidates[0]
    if len(candidates) > 1:
        best = _best(_tried(candidates, settled, images, seed, tell))
        tell(f"chosen: {best.sentence()}")
        conditioning, reach = best.conditioning, best.reach
    settled = replace(settled, conditioning=conditioning, memory=replace(settled.memory, reach=reach))
    if "reach" in recipe.automatic and recipe.pretrained.name and settled.memory.reach < 0:
        settled = replace(settled, memory=replace(settled.memory, keep=COARSE, choose="coreset"))
    if "light" in recipe.automatic and isinstance(settled.views, PatchPairs) and settled.conditioning.light == "local":
        # local contrast leaves little of a change of light, so patches need not vary as much
        settled = replace(settled, views=replace(settled.views, light=min(CALM, settled.views.light)))
    return settled


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
    if "light" in recipe.automatic and recipe.pretrained.name:
        lights = ("none", "median")  # local contrast looks like no photograph the backbone has seen
    aligns, reaches = [recipe.conditioning.align], [recipe.memory.reach]
    if "align" in recipe.automatic:
        some = images[:: max(1, len(images) // 32)]
        long = rule.method != "ones" and elongation(foreground(some, rule)) >= LONG
        aligns = [False, True] if long else [False]
    if "reach" in recipe.automatic and recipe.pretrained.name and rule.method == "ones":
        reaches = [-1]  # a texture has no places, and good ones vary from place to place more than defects do
    elif "reach" in recipe.automatic:
        reaches = [max(1, recipe.memory.reach), -1]  # near first: it costs a fraction
    return [
        (Conditioning(light=light, align=align, foreground=rule), reach)
        for reach, align, light in product(reaches, aligns, lights)
    ]


@dataclass(frozen=True)
class Trial:
    """Good images to remember, and inspected ones of which half carry a defect."""

    known: UInt8[Tensor, "n c h w"]
    inspected: UInt8[Tensor, "m c h w"]
    defective: Bool[Tensor, " m"]


def make_trial(images: UInt8[Tensor, "n c h w"], rule: Rule, *, seed: int) -> Trial:
    """Good images, some of them with defects of the donor kind, in changing light; the same for every candidate."""
    if len(images) < 4:
        raise FirmError(
            f"{len(images)} good images are too few to choose settings on; give 4 or more or set automatic=[]"
        )
    rng = stream(seed, "trial")
    order = torch.randperm(len(images), generator=rng)
    inspected = min(INSPECTED, len(images) // 3)
    good, known = images[order[:inspected]], images[order[inspected:][:KNOWN]]
    scene = Scene(foreground(good, rule), known, foreground(known, rule))
    bad = Donor()(good, rng=rng, scene=scene).images
    both = torch.cat([good, bad])
    light = 1 + EXPOSURE * (2 * torch.rand(len(both), 1, 1, 1, generator=rng) - 1)
    lit = (both.float() * light).round().clamp(0, 255).to(torch.uint8)
    return Trial(known, lit, torch.arange(len(both)) >= len(good))


def _tried(
    candidates: list[tuple[Conditioning, int]], recipe: Recipe, images: Tensor, seed: int, tell: Callable[[str], None]
) -> list[Choice]:
    trial = make_trial(images, recipe.conditioning.foreground, seed=seed)
    choices = []
    for conditioning, reach in candidates:
        choice = Choice(conditioning, reach, _told_apart(trial, conditioning, reach, recipe, seed))
        tell(f"tried {choice.sentence()}")
        choices.append(choice)
    return choices


def _told_apart(trial: Trial, conditioning: Conditioning, reach: int, recipe: Recipe, seed: int) -> float:
    """How well the worst patch of plain pixels tells defective from good; coarse, for speed."""
    given = recipe.tiling if isinstance(recipe.tiling, Grid) else Grid()
    grid = replace(given, stride=max(given.stride, given.size // 2))
    if recipe.pretrained.name:  # its cells say more than their few pixels do
        grid = replace(given, size=Grid().size, stride=Grid().stride)
    cells = -1 if reach < 0 else max(1, reach * given.stride // grid.stride)
    look = Looker(None, Preprocessing(trial.known.shape[-1]), grid, ("pixels",), is_grey(trial.known))
    memory = Memory(reach=cells, standardise=recipe.memory.standardise)
    localiser = fit_localiser(look, conditioning(trial.known), memory, seed=seed)
    ready = conditioning(trial.inspected)
    scores = localiser.scores(localiser.cells(look(ready.images), ready.foreground))
    return auroc(scores, trial.defective)


def _best(choices: list[Choice]) -> Choice:
    """The best, but the simplest of those that are hardly worse."""
    top = max(choice.auroc for choice in choices)
    return next(choice for choice in choices if choice.auroc >= top - WORTH)
