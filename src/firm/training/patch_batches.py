"""Batches of patch features, drawn from a store: what a step of training an adaptor learns from.

An image is drawn first and a cell in it second, so that a scratch counts as much as a stain; of synthetic defects, if
asked, all cells alike, or those more often whose features the defect hardly changed. The partner of a cell is one whose
patch overlaps its own (tau_over), on the object and, of a defect, altered too. Noise, if asked, is added to all of them
anew in each step: the features are stored once, and without it an adaptor comes to know them by heart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from firm.adaptor import Adaptor, Pretrained
from firm.backbones import Backbone
from firm.encoder import Encoder, draw_weights
from firm.images import Preprocessing
from firm.streams import stream
from firm.training import Teaching, Training
from firm.types import INLIER, Batch

DRAWN = 64  # cells of every good image to an epoch
ROWS = 64  # images whose features are read at once
UNCHANGED = 0.1  # of the median change: cells that changed less are drawn as if by so much


@dataclass(frozen=True)
class Choosable:
    """The cells of some images that may be drawn, listed image by image; every image offers at least one."""

    allowed: Bool[Tensor, "n r c"]
    chance: Float[Tensor, "n r c"] | None = None  # of a cell beside others; None: all alike
    evenly: str = "images"  # every image is drawn as often; or `cells`: as its cells have chances
    drawn: Bool[Tensor, " n"] | None = None  # the images that are drawn at all; None: every one

    @cached_property
    def cells(self) -> Int[Tensor, " m"]:
        return self.allowed.flatten(1).nonzero()[:, 1]

    @cached_property
    def counts(self) -> Int[Tensor, " n"]:
        return self.allowed.flatten(1).sum(1)

    @cached_property
    def begins(self) -> Int[Tensor, " n"]:
        """Where in the list the cells of each image begin."""
        return self.counts.cumsum(0) - self.counts

    @cached_property
    def totals(self) -> Float[Tensor, " n"]:
        """The chances of all cells of each image."""
        if self.chance is None:
            return self.counts.double()
        return self.chance.double().where(self.allowed, 0).flatten(1).sum(1)

    @cached_property
    def ends(self) -> Float[Tensor, " m"]:
        """Where the share of each listed cell ends, those of image i filling i..i+1."""
        assert self.chance is not None
        share = self.chance.double().where(self.allowed, 0).flatten(1) / self.totals[:, None]
        return share[self.allowed.flatten(1)].cumsum(0)

    @classmethod
    def at_least(cls, part: Float[Tensor, "n r c"], least: float) -> Choosable:
        """Cells of which so much is wanted, or the best ones where an image has none."""
        best = part.flatten(1).amax(1)[:, None, None] if len(part) else part
        return cls(part >= torch.minimum(torch.full_like(best, least), best))

    @cached_property
    def images(self) -> Int[Tensor, " d"]:
        """Those that are drawn."""
        return torch.arange(len(self.allowed)) if self.drawn is None else self.drawn.nonzero().squeeze(1)

    def draw_images(self, count: int, *, rng: torch.Generator) -> Int[Tensor, " b"]:
        """The images of so many cells to be drawn."""
        if self.evenly == "cells":
            return self.images[torch.multinomial(self.totals[self.images], count, replacement=True, generator=rng)]
        return self.images[torch.randint(len(self.images), (count,), generator=rng)]

    def draw(self, images: Int[Tensor, " b"], *, rng: torch.Generator) -> Int[Tensor, " b"]:
        """A cell of each of these images."""
        begin = self.begins[images]
        if self.chance is None:
            place = (torch.rand(len(images), generator=rng) * self.counts[images]).long()
        else:
            at = images + torch.rand(len(images), generator=rng, dtype=torch.float64)
            place = torch.searchsorted(self.ends, at, right=True) - begin
        last = self.counts[images] - 1
        return self.cells[begin + torch.minimum(place.clamp(min=0), last)]  # rounding can reach the next image

    def partners(
        self, images: Int[Tensor, " b"], cells: Int[Tensor, " b"], offsets: Int[Tensor, "k 2"], *, rng: torch.Generator
    ) -> Int[Tensor, " b"]:
        """For each cell one at an offset drawn from those that lead to an allowed cell, or itself if none does."""
        rows, columns = self.allowed.shape[1:]
        y = cells[:, None] // columns + offsets[:, 0]
        x = cells[:, None] % columns + offsets[:, 1]
        inside = (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
        there = y.clamp(0, rows - 1) * columns + x.clamp(0, columns - 1)
        fits = inside & self.allowed.flatten(1)[images[:, None], there]
        order = torch.rand(fits.shape, generator=rng).masked_fill(~fits, -1)
        drawn = order.argmax(1)
        return torch.where(fits.any(1), there.gather(1, drawn[:, None])[:, 0], cells)


@dataclass(frozen=True)
class Cells:
    """Features of some images with the cells that may be drawn of them, and the group of each image."""

    features: Float[Tensor, "n r c d"]  # possibly float16 on disk
    choosable: Choosable
    group: Int[Tensor, " n"]

    def pairs(self, count: int, offsets: Int[Tensor, "k 2"], *, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """So many pairs of overlapping patches: first views, second views, groups."""
        images = self.choosable.draw_images(count, rng=rng)
        first = self.choosable.draw(images, rng=rng)
        second = self.choosable.partners(images, first, offsets, rng=rng)
        flat = self.features.flatten(1, 2)
        return flat[images, first].float(), flat[images, second].float(), self.group[images]


def overlapping(pool: int, over: float) -> Int[Tensor, "k 2"]:
    """Offsets in cells at which patches of so many cells share at least the part `over` of each, but are not one."""
    reach = range(-pool + 1, pool)
    shared = {(y, x): (pool - abs(y)) * (pool - abs(x)) / pool**2 for y in reach for x in reach}
    fitting = [offset for offset, part in shared.items() if part >= over and offset != (0, 0)]
    return torch.tensor(fitting or [(0, 0)])


def cell_steps(images: int, batch: int) -> int:
    """Batches in one epoch: some cells of every good image, and as many of outliers."""
    return max(1, images * DRAWN * 2 // batch)


@dataclass(frozen=True)
class Spare:
    """Good images whose features, plain and with defects, are stored and not learnt from: what is learnt is tried on.

    The images are rows of the good features; row i of the outliers was made of good image i % n.
    """

    images: Int[Tensor, " s"]
    foreground: Bool[Tensor, "n h w"]  # of every good image
    hidden: Bool[Tensor, "n h w"] | None
    altered: Float[Tensor, "m r c"]  # how much of each cell of each outlier is


@dataclass(frozen=True)
class CellTask(Teaching):
    """All that decides the training of an adaptor; the counterpart of `Task` where the encoder is pretrained."""

    good: Cells
    outliers: Cells
    backbone: Backbone
    settings: Pretrained
    preprocessing: Preprocessing
    positives: str
    over: float
    training: Training
    seed: int
    key: str  # names the features
    spare: Spare | None = None

    @property
    def steps_per_epoch(self) -> int:
        return cell_steps(len(self.good.features), self.training.batch)

    @cached_property
    def offsets(self) -> Int[Tensor, "k 2"]:
        return overlapping(self.settings.pool, self.over)

    @cached_property
    def spread(self) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]]:
        """Mean and deviation of the good features."""
        return spread(self.good.features)

    def batch(self, step: int, device: torch.device | str = "cpu") -> Batch:
        rng = stream(self.seed, "cells", step)
        normal = self.training.batch // 2
        good = self.good.pairs(normal, self.offsets, rng=rng)
        bad = self.outliers.pairs(self.training.batch - normal, self.offsets, rng=rng)
        first, second, group = (torch.cat(both) for both in zip(good, bad, strict=True))
        features = torch.cat([first, second])
        if self.settings.noise:
            features = features + self.settings.noise * self.spread[1] * torch.randn(features.shape, generator=rng)
        return Batch(
            images=features.to(device),
            source=torch.arange(len(group)).repeat(2).to(device),
            group=group.repeat(2).to(device),
        )

    def fresh(self, encoder: Encoder) -> Adaptor:
        """An adaptor with drawn weights that knows the spread of the good features."""
        adaptor = Adaptor(self.good.features.shape[-1], self.settings, encoder.head)
        draw_weights(adaptor, encoder.norm_momentum, rng=stream(self.seed, "weights"))
        adaptor.mean, adaptor.std = self.spread
        return adaptor

    @property
    def fingerprint(self) -> str:
        return self.key


def spread(features: Float[Tensor, "n r c d"]) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]]:
    """Mean and deviation of every number over all cells; a number that never varies keeps its scale."""
    count, total, squares = 0, torch.zeros(features.shape[-1]).double(), torch.zeros(features.shape[-1]).double()
    for part in features.split(ROWS):
        values = part.flatten(0, 2).double()
        count, total, squares = count + len(values), total + values.sum(0), squares + values.square().sum(0)
    mean = total / count
    deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
    return mean.float(), torch.where(deviation > 1e-6, deviation, 1.0).float()


def changes(
    outliers: Float[Tensor, "m r c d"], good: Float[Tensor, "n r c d"], deviation: Float[Tensor, " d"]
) -> Float[Tensor, "m r c"]:
    """How far a defect moved the features of every cell, in deviations of good ones; outlier i was good image i % n."""
    parts = []
    for rows in torch.arange(len(outliers)).split(ROWS):
        moved = outliers[rows].float() - good[rows % len(good)].float()
        parts.append((moved / deviation).norm(dim=3))
    return torch.cat(parts)


def hard_first(change: Float[Tensor, "m r c"], allowed: Bool[Tensor, "m r c"], hard: float) -> Float[Tensor, "m r c"]:
    """Chances of cells, falling with their change; a floor keeps what hardly changed from being all that is drawn."""
    changed = change[allowed & (change > 0)]
    usual = changed.median() if len(changed) else torch.ones(())
    return (change.double() / usual).clamp(min=UNCHANGED) ** -hard


def good_groups(images: int) -> Int[Tensor, " n"]:
    """The group of good images, once for each."""
    return torch.full((images,), INLIER)
