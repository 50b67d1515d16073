"""Batches of patch features from a cache: what a step of training an adaptor learns from.

An image is drawn first and one of its cells second, so that a scratch counts as much as a stain. The partner of a cell
is one whose patch overlaps its own (tau_over), on the object and, of a defect, altered too. Optional noise is drawn for
each step: the cached features never change, and without noise an adaptor memorises them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from firm.images.preprocess import Preprocessing, fingerprint
from firm.networks.adaptor import Adapted, Adaptor, Pretrained
from firm.networks.backbone import Backbone
from firm.networks.heads import Encoder
from firm.runtime.random import stream
from firm.training.batches import paired
from firm.training.loop import Training
from firm.types import Batch

CELLS_PER_IMAGE = 64  # cells of every good image in an epoch
ROWS = 64  # images whose features are read at once


@dataclass(frozen=True)
class CellSampler:
    """Draws cells of images among those that are allowed; every image must allow at least one."""

    allowed: Bool[Tensor, "n r c"]
    drawn: Bool[Tensor, " n"] | None = None  # the images that are drawn from; None: all

    @classmethod
    def at_least(
        cls, part: Float[Tensor, "n r c"], least: float, drawn: Bool[Tensor, " n"] | None = None
    ) -> CellSampler:
        """Cells with at least so much of something, or the best ones where an image has none."""
        best = part.flatten(1).amax(1)[:, None, None] if len(part) else part
        return cls(part >= torch.minimum(torch.full_like(best, least), best), drawn)

    @cached_property
    def cells(self) -> Int[Tensor, " m"]:
        """The allowed cells, image by image."""
        return self.allowed.flatten(1).nonzero()[:, 1]

    @cached_property
    def counts(self) -> Int[Tensor, " n"]:
        return self.allowed.flatten(1).sum(1)

    @cached_property
    def begins(self) -> Int[Tensor, " n"]:
        """Where in `cells` those of each image begin."""
        return self.counts.cumsum(0) - self.counts

    @cached_property
    def images(self) -> Int[Tensor, " d"]:
        return torch.arange(len(self.allowed)) if self.drawn is None else self.drawn.nonzero().squeeze(1)

    def draw_images(self, count: int, *, rng: torch.Generator) -> Int[Tensor, " b"]:
        """So many images, each as likely as the others."""
        return self.images[torch.randint(len(self.images), (count,), generator=rng)]

    def draw(self, images: Int[Tensor, " b"], *, rng: torch.Generator) -> Int[Tensor, " b"]:
        """A cell of each of these images."""
        places = (torch.rand(len(images), generator=rng) * self.counts[images]).long()
        return self.cells[self.begins[images] + places]

    def partners(
        self, images: Int[Tensor, " b"], cells: Int[Tensor, " b"], offsets: Int[Tensor, "k 2"], *, rng: torch.Generator
    ) -> Int[Tensor, " b"]:
        """For each cell one at an offset drawn from those that lead to an allowed cell, or itself if none does."""
        rows, columns = self.allowed.shape[1:]
        y = cells[:, None] // columns + offsets[:, 0]
        x = cells[:, None] % columns + offsets[:, 1]
        inside = (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
        target = y.clamp(0, rows - 1) * columns + x.clamp(0, columns - 1)
        fits = inside & self.allowed.flatten(1)[images[:, None], target]
        chosen = torch.rand(fits.shape, generator=rng).masked_fill(~fits, -1).argmax(1)
        return torch.where(fits.any(1), target.gather(1, chosen[:, None])[:, 0], cells)


@dataclass(frozen=True)
class PatchSet:
    """Features of images, the sampler of their cells, and the group of each image."""

    features: Float[Tensor, "n r c d"]  # possibly float16 on disk
    sampler: CellSampler
    group: Int[Tensor, " n"]

    def subset(self, known: Bool[Tensor, " n"]) -> PatchSet:
        """The same features, of which only those of known images are drawn."""
        drawn = known if self.sampler.drawn is None else known & self.sampler.drawn
        return replace(self, sampler=CellSampler(self.sampler.allowed, drawn))

    def pairs(self, count: int, offsets: Int[Tensor, "k 2"], *, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """So many pairs of overlapping patches: first views, second views, groups."""
        images = self.sampler.draw_images(count, rng=rng)
        first = self.sampler.draw(images, rng=rng)
        second = self.sampler.partners(images, first, offsets, rng=rng)
        flat = self.features.flatten(1, 2)
        return flat[images, first].float(), flat[images, second].float(), self.group[images]


@dataclass(frozen=True)
class ValidationImages:
    """Good images that are kept out of the training, to compare settings on; their features are cached, too.

    The images are rows of the good features; row i of the outliers was made of good image i % n.
    """

    images: Int[Tensor, " s"]
    foreground: Bool[Tensor, "n h w"]  # of every good image
    hidden: Bool[Tensor, "n h w"] | None
    altered: Float[Tensor, "m r c"]  # how much of each cell of each outlier is altered


@dataclass(frozen=True)
class PatchTask:
    """Training an adaptor on cached features of a frozen backbone: all that decides its batches."""

    good: PatchSet
    outliers: PatchSet
    backbone: Backbone
    settings: Pretrained
    preprocessing: Preprocessing
    over: float  # least overlap of two views of a patch
    training: Training
    seed: int
    fingerprint: str  # names the features, so that a run is never resumed on others
    validation: ValidationImages | None = None
    known: Int[Tensor, " k"] | None = None  # good images that the training may see; None: all

    def subset(self, known: Int[Tensor, " k"]) -> PatchTask:
        """The same training on some of the known good images and their outliers; the stored features are shared."""
        known = known if self.known is None else self.known[known]
        good, made = len(self.good.features), len(self.outliers.features)
        return replace(
            self,
            good=self.good.subset(torch.isin(torch.arange(good), known)),
            outliers=self.outliers.subset(torch.isin(torch.arange(made) % good, known)),
            fingerprint=f"{self.fingerprint}-{fingerprint(known)}",
            validation=None,
            known=known,
        )

    @property
    def steps_per_epoch(self) -> int:
        """Some cells of every good image, and as many of outliers."""
        images = len(self.good.features) if self.known is None else len(self.known)
        return max(1, images * CELLS_PER_IMAGE * 2 // self.training.batch)

    @cached_property
    def offsets(self) -> Int[Tensor, "k 2"]:
        return overlapping_offsets(self.settings.pool, self.over)

    @cached_property
    def statistics(self) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]]:
        """Mean and deviation of the good features."""
        return feature_statistics(self.good.features, self.known)

    def network(self, encoder: Encoder) -> Adaptor:
        """A new adaptor with the statistics of the good features; its weights depend on the seed alone."""
        return Adaptor.build(self.statistics, self.settings, encoder, rng=stream(self.seed, "weights"))

    def complete(self, network: nn.Module) -> Adapted:
        """A trained adaptor with its backbone: what computes features."""
        assert isinstance(network, Adaptor)
        return Adapted(self.backbone, network)

    def batch(self, step: int, device: torch.device | str = "cpu", *, rank: int = 0, world: int = 1) -> Batch:
        """Half good patches, half altered ones: all first views, then their partners in the same order."""
        rng = stream(self.seed, "cells", step)
        normal = self.training.batch // 2
        good = self.good.pairs(normal, self.offsets, rng=rng)
        bad = self.outliers.pairs(self.training.batch - normal, self.offsets, rng=rng)
        first, second, group = (torch.cat(both) for both in zip(good, bad, strict=True))
        features = torch.cat([first, second])
        if self.settings.noise:
            noise = torch.randn(features.shape, generator=rng)
            features = features + self.settings.noise * self.statistics[1] * noise
        return paired(features.to(device), group, rank, world)


def overlapping_offsets(pool: int, over: float) -> Int[Tensor, "k 2"]:
    """Offsets in cells, without zero, at which patches `pool` cells wide share at least the part `over` of each."""
    radius = range(-pool + 1, pool)
    shared = {(y, x): (pool - abs(y)) * (pool - abs(x)) / pool**2 for y in radius for x in radius}
    fitting = [offset for offset, part in shared.items() if part >= over and offset != (0, 0)]
    return torch.tensor(fitting or [(0, 0)])


def feature_statistics(
    features: Float[Tensor, "n r c d"], known: Int[Tensor, " k"] | None = None
) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]]:
    """Mean and deviation of every number over the cells of the known images; one that never varies has deviation 1."""
    count, total, squares = 0, torch.zeros(features.shape[-1]).double(), torch.zeros(features.shape[-1]).double()
    for part in features.split(ROWS) if known is None else (features[rows] for rows in known.split(ROWS)):
        values = part.flatten(0, 2).double()
        count, total, squares = count + len(values), total + values.sum(0), squares + values.square().sum(0)
    mean = total / count
    deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
    return mean.float(), torch.where(deviation > 1e-6, deviation, 1.0).float()
