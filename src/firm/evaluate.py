"""A trained encoder x labelled images -> AUROC rows, each with its interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from firm.encoder import ResNet18
from firm.images import Preprocessing
from firm.metrics import Interval, auroc_interval
from firm.scores import Scoring, fit_scorings, reference_features, score_images
from firm.streams import stream


def evaluate(
    encoder: ResNet18,
    preprocessing: Preprocessing,
    *,
    references: Tensor,
    test: Tensor,
    anomalous: Bool[Tensor, " m"],
    scorings: Mapping[str, Scoring],
    on_chunk: Callable[[int], None] | None = None,
) -> dict[str, Interval]:
    """AUROC of every scoring from one embedding of the references and one of each look at the test images."""
    turns = max(scoring.turns for scoring in scorings.values())
    fitted = fit_scorings(scorings, reference_features(encoder, preprocessing, references, turns))
    scores = score_images(encoder, preprocessing, test, fitted, on_chunk)
    return {name: auroc_interval(values, anomalous) for name, values in scores.items()}


def balanced_subset(anomalous: Bool[Tensor, " m"], images: int, *, seed: int = 0) -> Int[Tensor, " k"]:
    """Indices of a reduced test set, half normal and half anomalous where there are enough; 0 is all of it."""
    if not images or images >= len(anomalous):
        return torch.arange(len(anomalous))
    rng = stream(seed, "test subset")
    normal, wrong = ((anomalous == label).nonzero().squeeze(1) for label in (False, True))
    take = min(images // 2, len(normal))
    chosen = [side[torch.randperm(len(side), generator=rng)] for side in (normal, wrong)]
    return torch.cat([chosen[0][:take], chosen[1][: images - take]]).sort().values
