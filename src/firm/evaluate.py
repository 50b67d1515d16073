"""A trained encoder or a whole detector x labelled images -> what it is worth, each number with its interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from firm.calibration import FAIL, PASS, REVIEW, Calibration
from firm.data.folder import GOOD
from firm.detector import Detector
from firm.encoder import ResNet18
from firm.images import Preprocessing
from firm.leaks import copies, thumbnails
from firm.localisation import Localisation, localisation
from firm.metrics import Interval, auroc, auroc_interval
from firm.scores import Scoring, fit_scorings, reference_features, score_images
from firm.streams import stream
from firm.types import Located, Truth


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


SUSPICIOUS = 0.75  # AUROC from which a trivial score tells that images differ by more than their defects


@dataclass(frozen=True)
class Kind:
    """How well one kind of defect is told from good images, and found in them (None: its masks are not known)."""

    images: int
    auroc: Interval
    localisation: Localisation | None


@dataclass(frozen=True)
class Trivial:
    """AUROC of scores that know nothing of defects: a warning against confounded or leaky test sets, no result."""

    brightness: float  # the mean grey level; far above or below 0.5 the light differs between good and bad
    neighbour: float  # the distance of the shrunken whole image to the nearest good one

    @property
    def suspicious(self) -> bool:
        return max(self.brightness, 1 - self.brightness, self.neighbour, 1 - self.neighbour) >= SUSPICIOUS


@dataclass(frozen=True)
class Evaluation:
    """What a detector is worth on labelled images."""

    images: int
    overall: Kind
    kinds: dict[str, Kind]
    caught: float
    false_calls: float
    trivial: Trivial
    confusion: dict[str, dict[str, int]] = field(default_factory=dict)  # kind -> verdict -> images
    copies: int = 0  # test images that were learnt from, as far as thumbnails tell


def evaluate_detector(
    detector: Detector,
    images: UInt8[Tensor, "m c h w"],
    anomalous: Bool[Tensor, " m"],
    truth: Truth | None,
    on_chunk: Callable[[int], None] | None = None,
) -> Evaluation:
    """Image and pixel measures over all defects and for each kind against all good images; the threshold's rates."""
    return evaluation(detector, look(detector, images, on_chunk), images, anomalous, truth)


def look(
    detector: Detector, images: UInt8[Tensor, "m c h w"], on_chunk: Callable[[int], None] | None = None
) -> Located:
    """What a detector finds; one that looks at whole images has empty maps."""
    if detector.localiser is None:
        return Located(detector.score(images, on_chunk), torch.empty(len(images), 0, 0))
    return detector.locate(images, on_chunk)


def evaluation(
    detector: Detector,
    found: Located,
    images: UInt8[Tensor, "m c h w"],
    anomalous: Bool[Tensor, " m"],
    truth: Truth | None,
) -> Evaluation:
    """The same of what was found already."""
    names = () if truth is None else tuple(sorted(set(truth.kinds) - {"good"}))
    kinds = {}
    for name in names:
        of_kind = torch.tensor([kind == name for kind in truth.kinds]) if truth else anomalous
        kinds[name] = _kind(found, anomalous, truth, ~anomalous | of_kind)
    above = found.scores > (math.inf if detector.calibration is None else detector.limit)
    return Evaluation(
        images=len(images),
        overall=_kind(found, anomalous, truth, torch.ones_like(anomalous)),
        kinds=kinds,
        caught=float(above[anomalous].float().mean()),
        false_calls=float(above[~anomalous].float().mean()),
        trivial=trivial(images, anomalous, detector.thumbnails),
        confusion=_confusion(detector.calibration, found.scores, anomalous, truth),
        copies=int(copies(images, detector.thumbnails).sum()),
    )


def _confusion(
    by: Calibration | None, scores: Float[Tensor, " m"], anomalous: Bool[Tensor, " m"], truth: Truth | None
) -> dict[str, dict[str, int]]:
    """How many images of each kind have each verdict, the good ones first; empty without a calibration."""
    if by is None:
        return {}
    kinds = ["defective" if bad else GOOD for bad in anomalous.tolist()] if truth is None else list(truth.kinds)
    said = [by.verdict(score) for score in scores.tolist()]
    order = sorted(set(kinds), key=lambda kind: (kind != GOOD, kind))
    return {
        kind: {word: sum(one == (kind, word) for one in zip(kinds, said, strict=True)) for word in (PASS, REVIEW, FAIL)}
        for kind in order
    }


def trivial(images: UInt8[Tensor, "m c h w"], anomalous: Bool[Tensor, " m"], known: UInt8[Tensor, "n s s"]) -> Trivial:
    """What brightness alone and the nearest whole good image alone would reach on these images."""
    small = thumbnails(images).float().flatten(1)
    nearest = torch.cdist(small, known.float().flatten(1)).amin(1) if len(known) else torch.zeros(len(small))
    return Trivial(auroc(small.mean(1), anomalous), auroc(nearest, anomalous))


def _kind(found: Located, anomalous: Bool[Tensor, " m"], truth: Truth | None, chosen: Bool[Tensor, " m"]) -> Kind:
    return Kind(
        images=int((chosen & anomalous).sum()),
        auroc=auroc_interval(found.scores[chosen], anomalous[chosen]),
        localisation=_localisation(found.maps, truth, chosen),
    )


def _localisation(maps: Float[Tensor, "m h w"], truth: Truth | None, chosen: Bool[Tensor, " m"]) -> Localisation | None:
    """Pixel measures on the images whose masks are known; None without maps or without a marked defect."""
    if truth is None or not maps.numel():
        return None
    known = chosen & truth.known
    masks = truth.masks[known]
    if masks.shape[1:] != maps.shape[1:] or not bool(masks.any()):
        return None
    return localisation(maps[known], masks)
