"""Batches of cached features of whole images: what a step of training an adaptor on them learns from.

Augmented views of every image and of every outlier were embedded once; a pair is two of them, drawn for each step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from firm.images.preprocess import Preprocessing, fingerprint
from firm.networks.adaptor import Adapted, Adaptor, Pretrained
from firm.networks.backbone import Backbone
from firm.networks.heads import Encoder
from firm.runtime.random import stream
from firm.training.batches import paired
from firm.training.loop import Training
from firm.types import Batch

STEPS = 20  # of an epoch, however many images there are


@dataclass(frozen=True)
class FeatureSet:
    """Features of the views of images, the group of each image, and the images that are drawn from."""

    features: Float[Tensor, "n v d"]  # possibly float16 on disk
    group: Int[Tensor, " n"]
    drawn: Int[Tensor, " k"]

    def pairs(self, count: int, *, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Two different views of so many images: first views, second views, groups."""
        images = self.drawn[torch.randint(len(self.drawn), (count,), generator=rng)]
        views = torch.rand(count, self.features.shape[1], generator=rng).argsort(1)
        return (
            self.features[images, views[:, 0]].float(),
            self.features[images, views[:, 1]].float(),
            self.group[images],
        )


@dataclass(frozen=True)
class FeatureTask:
    """Training an adaptor on cached features of whole images: all that decides its batches."""

    clean: Float[Tensor, "n d"]  # of the good images as they are tested
    good: FeatureSet
    outliers: FeatureSet
    backbone: Backbone
    settings: Pretrained
    preprocessing: Preprocessing
    training: Training
    seed: int
    fingerprint: str  # names the features, so that a run is never resumed on others
    validation: Int[Tensor, " s"] | None = None  # good images kept out of the training
    known: Int[Tensor, " k"] | None = None  # good images that the training may see; None: all

    steps_per_epoch = STEPS

    @property
    def references(self) -> Float[Tensor, "k d"]:
        """Features of the good images that a model may remember."""
        return self.clean if self.known is None else self.clean[self.known]

    def subset(self, known: Int[Tensor, " k"]) -> FeatureTask:
        """The same training on some of the known good images and their outliers; the stored features are shared."""
        known = known if self.known is None else self.known[known]
        kept = self.good.drawn[torch.isin(self.good.drawn, known)]
        made = self.outliers.drawn[torch.isin(self.outliers.drawn % len(self.clean), known)]
        return replace(
            self,
            good=replace(self.good, drawn=kept),
            outliers=replace(self.outliers, drawn=made),
            fingerprint=f"{self.fingerprint}-{fingerprint(known)}",
            validation=None,
            known=known,
        )

    def network(self, encoder: Encoder) -> Adaptor:
        """A new adaptor of features as they are; its weights depend on the seed alone."""
        size = self.clean.shape[1]
        statistics = torch.zeros(size), torch.ones(size)
        return Adaptor.build(statistics, self.settings, encoder, rng=stream(self.seed, "weights"))

    def complete(self, network: nn.Module) -> Adapted:
        """A trained adaptor with its backbone."""
        assert isinstance(network, Adaptor)
        return Adapted(self.backbone, network)

    def batch(self, step: int, device: torch.device | str = "cpu", *, rank: int = 0, world: int = 1) -> Batch:
        """Half good images, half outliers: all first views, then their partners in the same order."""
        rng, normal = stream(self.seed, "pairs", step), self.training.batch // 2
        good = self.good.pairs(normal, rng=rng)
        bad = self.outliers.pairs(self.training.batch - normal, rng=rng)
        first, second, group = (torch.cat(both) for both in zip(good, bad, strict=True))
        return paired(torch.cat([first, second]).to(device), group, rank, world)
