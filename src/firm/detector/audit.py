"""Find images in a folder of good ones that do not belong: defective parts, other products, bad photographs.

Every patch is compared with the patches of other parts by frozen backbone features, in several ways: as they are or as
deviations from what is usual at its place; anywhere and, on an object, around its place; with the nearest part and,
since similar defects hide each other, with a farther one. An image scores as its worst patch, and its score in a way is
the deviation of the logarithm from the median of the folder. Suspects are left out, and the rest is scored again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from firm.detector.prepare import working_frame
from firm.errors import named
from firm.images.alignment import Conditioned, Conditioning, has_direction
from firm.images.foreground import foreground, rule_for
from firm.images.preprocess import resize
from firm.networks.adaptor import COARSEST
from firm.networks.backbone import Backbone
from firm.recipes.recipe import Recipe
from firm.runtime.listener import SILENT, Listener
from firm.runtime.random import stream
from firm.scoring.knn import unit
from firm.scoring.patch_features import UnadaptedFeatures, extract
from firm.scoring.patch_grid import Grid
from firm.types import OneClass

MIN_PARTS = 8  # with fewer nothing is suspected: a median of fewer says little
MOST = 0.2  # of the images that may be suspected
LIMIT, FEW = 3.5, 24.0  # deviations from which an image is suspected: LIMIT + FEW / images
CELLS = 16  # along each side of an image: fine enough for a defect, and coarse enough to compare all with all
AROUND = 2  # cells
REFERENCES = 128  # images compared with, drawn from more
FARTHER = 0.1  # of the parts: so many similar defects do not hide each other
ROUNDS = 5  # of leaving suspects out and scoring again
SMALLEST = 0.05  # least deviation of the log score, so that nearly equal images are not suspected
EQUAL = 1e-4  # scores below this are those of copies
QUARTILE = 0.6745  # of a normal distribution
BLOCK = 64  # images compared at once
EXAMPLES = 3  # suspects that a warning names

Distances = Float[Tensor, "ways n cells parts"]


@dataclass(frozen=True)
class Audit:
    """The score of every image, in deviations from what is usual in the folder, and the limit of a suspect."""

    scores: Float[Tensor, " n"]
    limit: float
    suspect: Bool[Tensor, " n"]
    names: tuple[str, ...]

    def ordered(self, *, suspect: bool) -> list[int]:
        """The suspects or the others, worst first."""
        order = self.scores.argsort(descending=True)
        return order[self.suspect[order] == suspect].tolist()

    def suspects(self) -> list[dict[str, Any]]:
        """For the card: the suspects, worst first."""
        return [
            {"file": self.names[i], "score": round(float(self.scores[i]), 2), "limit": round(self.limit, 2)}
            for i in self.ordered(suspect=True)
        ]

    def warning(self, *, kept: bool) -> str:
        """One line about the suspects; empty without any."""
        if not (suspects := self.suspects()):
            return ""
        examples = ", ".join(named(each["file"]) for each in suspects[:EXAMPLES])
        more = ", ..." if len(suspects) > EXAMPLES else ""
        found = f"{len(suspects)} of {len(self.scores)} good images do not look like the others ({examples}{more})"
        done = "are learnt from all the same" if kept else "are left out (--keep-suspects keeps them)"
        return f"{found} and {done}; look at them with `firm audit`"


@dataclass(frozen=True)
class Compared:
    """Distances of every patch to the nearest one of each part; infinite to its own part."""

    ways: Distances  # anywhere and, on an object, around its place
    parts: Int[Tensor, " n"]  # which part each image shows
    numbers: Int[Tensor, " parts"]  # which parts are compared with

    def known(self, usual: Bool[Tensor, " n"]) -> Distances:
        """Compared only with parts of which at least half of the images are usual."""
        most = torch.stack([usual[self.parts == number].float().mean() for number in self.numbers]) >= 0.5
        return self.ways[..., most]


def audit_images(
    recipe: Recipe,
    data: OneClass,
    parts: Int[Tensor, " n"],
    backbone: Backbone,
    *,
    seed: int = 0,
    listener: Listener = SILENT,
) -> Audit:
    """Score every image by those of other parts, and decide which do not belong."""
    count = len(data.train)
    names = tuple(file.name for file in data.files) if len(data.files) == count else ()
    names = names or tuple(f"number {number + 1}" for number in range(count))
    limit = LIMIT + FEW / count
    if len(parts.unique()) < MIN_PARTS:
        return Audit(torch.zeros(count), limit, torch.zeros(count, dtype=torch.bool), names)
    aligned = _aligned(recipe, data)
    side = math.sqrt(math.prod(aligned.images.shape[-2:]))
    cell = min(COARSEST, max(recipe.grid.stride, 2 ** round(math.log2(side / CELLS))))
    grid = replace(recipe.grid, size=cell, stride=cell)
    listener.progress("auditing good images", 0, None)
    features = extract(UnadaptedFeatures(backbone, recipe.pretrained, grid), aligned.images)["backbone"]
    around = AROUND if aligned.frames is not None or not bool(aligned.foreground.all()) else None
    compared = _compare(features, parts, around, seed=seed, listener=listener)
    scores, suspect = _decide(compared, _weights(grid, aligned), limit)
    return Audit(scores, limit, suspect, names)


def _aligned(recipe: Recipe, data: OneClass) -> Conditioned:
    """The images as their features are computed; what a fit would tune later is found simply."""
    images = resize(data.train, working_frame(recipe, data))
    settings = recipe.conditioning
    rule = rule_for(data.name, images) if "foreground" in recipe.automatic else settings.foreground
    masks = foreground(images, rule)
    align = settings.align
    if "align" in recipe.automatic:
        align = rule.method != "ones" and has_direction(masks)
    conditioned = Conditioning(illumination=settings.illumination, align=align, foreground=rule)(
        images, data.ignored, masks
    )
    return conditioned.completed(conditioned.typical())


def _weights(grid: Grid, aligned: Conditioned) -> Float[Tensor, "n cells"]:
    """How much every patch counts: by the object it shows or usually shows, and not at all if any of it is hidden."""
    hidden, share = aligned.hidden(), grid.parts(aligned.foreground)
    free = torch.ones(()) if hidden is None else (grid.parts(~hidden) >= 1).float()
    usual = torch.maximum(share, share.median(0).values)
    return (torch.minimum(usual, free) / max(grid.min_foreground, 0.01)).clamp(max=1).flatten(1)


def _compare(
    features: Float[Tensor, "n r c d"], parts: Int[Tensor, " n"], around: int | None, *, seed: int, listener: Listener
) -> Compared:
    """Compare all patches with those of the references."""
    n, rows, columns, _ = features.shape
    keys = unit(features.flatten(0, 2)).view(n, rows * columns, -1)
    references = torch.randperm(n, generator=stream(seed, "audit"))[:REFERENCES]
    numbers, column = parts[references].unique(return_inverse=True)
    ways = torch.full((1 if around is None else 2, n, rows * columns, len(numbers)), math.inf)
    near = None if around is None else _near(rows, columns, around)
    done = 0
    for block in torch.arange(n).split(BLOCK):
        for reference, at in zip(references.tolist(), column.tolist(), strict=True):
            products = keys[block] @ keys[reference].T
            nearest = [products.amax(2)]
            if near is not None:
                nearest.append(products.gather(2, near.expand(len(block), -1, -1)).amax(2))
            ways[:, block, :, at] = ways[:, block, :, at].minimum(1 - torch.stack(nearest))
        done += len(block)
        listener.progress("auditing good images", done, n)
    ways.masked_fill_((parts[:, None] == numbers)[:, None], math.inf)
    return Compared(ways, parts, numbers)


def _near(rows: int, columns: int, around: int) -> Int[Tensor, "cells k"]:
    """The cells around each cell; beyond the border the nearest ones inside, again."""
    step = torch.arange(-around, around + 1)
    y = (torch.arange(rows)[:, None] + step).clamp(0, rows - 1)
    x = (torch.arange(columns)[:, None] + step).clamp(0, columns - 1)
    return (y[:, None, :, None] * columns + x[None, :, None, :]).flatten(2).flatten(0, 1)


def _decide(
    compared: Compared, weights: Float[Tensor, "n cells"], limit: float
) -> tuple[Float[Tensor, " n"], Bool[Tensor, " n"]]:
    """Scores, and who exceeds the limit once all who do are left out; at most a fifth of the images."""
    n = len(weights)
    scores, suspect = torch.zeros(n), torch.zeros(n, dtype=torch.bool)
    for _ in range(ROUNDS):
        known = compared.known(~suspect)
        if known.shape[3] < MIN_PARTS // 2:
            break
        scores = torch.stack([_deviations(way, ~suspect) for way in _image_scores(known, ~suspect, weights)]).amax(0)
        worst = scores.argsort(descending=True)[: int(MOST * n)]
        now = torch.zeros_like(suspect)
        now[worst] = scores[worst] > limit
        if torch.equal(now, suspect):
            break
        suspect = now
    return scores, suspect


def _image_scores(
    known: Distances, usual: Bool[Tensor, " n"], weights: Float[Tensor, "n cells"]
) -> Iterator[Float[Tensor, " n"]]:
    """The worst patch of every image, in each way of comparing."""
    parts = known.shape[3]
    for distances in known:
        for rank in {1, min(1 + math.ceil(FARTHER * parts), parts - 1)}:
            cells = distances.kthvalue(rank, dim=2).values
            yield (cells * weights).amax(1)
            middle = cells[usual].median(0).values
            spread = (cells[usual] - middle).abs().median(0).values / QUARTILE
            spread = spread.clamp(min=max(float(spread.median()) / 2, EQUAL))
            yield ((cells - middle) / spread * weights).amax(1)


def _deviations(scores: Float[Tensor, " n"], usual: Bool[Tensor, " n"]) -> Float[Tensor, " n"]:
    """How many deviations the logarithm of each score is above the median; 0 where most images are copies."""
    if float(scores[usual].median()) < EQUAL:
        return torch.zeros_like(scores)
    logs = scores.clamp(min=EQUAL).log()
    above = logs - logs[usual].median()
    spread = torch.maximum(above[usual].abs().median(), above[usual].quantile(0.75)) / QUARTILE
    return above / spread.clamp(min=SMALLEST)
