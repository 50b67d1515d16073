"""A trained encoder or a whole detector x labelled images -> what it is worth, each number with its interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import compress

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from firm.calibration import FAIL, PASS, REVIEW, Calibration
from firm.data.folder import GOOD
from firm.detector import Detector
from firm.encoder import ResNet18
from firm.ignoring import scaled
from firm.images import Preprocessing
from firm.leaks import copies, thumbnails
from firm.localisation import Localisation, localisation
from firm.metrics import Interval, auroc, auroc_interval
from firm.scores import Scoring, fit_scorings, reference_features, score_images
from firm.streams import stream
from firm.types import FirmError, Located, Truth


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


IGNORED = "(ignored)"  # the kind of images whose defect is not to be found: no folder's name
UNSEEN = 0.95  # part of a marked defect under ignored pixels from which it is not to be found
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
    ignored: int = 0  # defective images marked only where pixels are ignored: in `confusion`, in no other number


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
    """The same of what was found already.

    Ignored pixels are left out of the pixel measures, and images whose defect they cover of all but a count.
    """
    under = wholly_ignored(detector.ignored, anomalous, truth)
    if not bool(under.any()):
        return _evaluation(detector, found, images, anomalous, truth)
    if bool(under[anomalous].all()):
        raise FirmError("all defects are marked only where pixels are ignored; give images of others, or mark less")
    counted = _evaluation(detector, *seen_alone(~under, found, images, anomalous, truth))
    apart = _confusion(detector.calibration, found.scores[under], [IGNORED] * int(under.sum()))
    return replace(
        counted,
        confusion=counted.confusion | apart,
        copies=int(copies(images, detector.thumbnails).sum()),
        ignored=int(under.sum()),
    )


def wholly_ignored(
    ignored: Bool[Tensor, "a b"] | None, anomalous: Bool[Tensor, " m"], truth: Truth | None
) -> Bool[Tensor, " m"]:
    """The defective images whose marked pixels are ignored, as good as all of them; without a mask none is known."""
    if ignored is None or truth is None:
        return torch.zeros_like(anomalous)
    here = scaled(ignored, *truth.masks.shape[1:])
    marked = truth.masks.flatten(1).sum(1)
    covered = (truth.masks & here).flatten(1).sum(1)
    return anomalous & truth.known & (marked > 0) & (covered >= UNSEEN * marked)


def seen_alone(
    chosen: Bool[Tensor, " m"],
    found: Located,
    images: UInt8[Tensor, "m c h w"],
    anomalous: Bool[Tensor, " m"],
    truth: Truth | None,
) -> tuple[Located, UInt8[Tensor, "k c h w"], Bool[Tensor, " k"], Truth | None]:
    """The chosen images alone."""
    if bool(chosen.all()):
        return found, images, anomalous, truth
    located = Located(found.scores[chosen], found.maps[chosen])
    if truth is not None:
        kinds, files = (tuple(compress(names, chosen.tolist())) for names in (truth.kinds, truth.files))
        truth = Truth(kinds, truth.masks[chosen], truth.known[chosen], files)
    return located, images[chosen], anomalous[chosen], truth


def _evaluation(
    detector: Detector,
    found: Located,
    images: UInt8[Tensor, "m c h w"],
    anomalous: Bool[Tensor, " m"],
    truth: Truth | None,
) -> Evaluation:
    names = () if truth is None else tuple(sorted(set(truth.kinds) - {"good"}))
    kinds = {}
    for name in names:
        of_kind = torch.tensor([kind == name for kind in truth.kinds]) if truth else anomalous
        kinds[name] = _kind(found, anomalous, truth, ~anomalous | of_kind, detector.ignored)
    above = found.scores > (math.inf if detector.calibration is None else detector.limit)
    return Evaluation(
        images=len(images),
        overall=_kind(found, anomalous, truth, torch.ones_like(anomalous), detector.ignored),
        kinds=kinds,
        caught=float(above[anomalous].float().mean()),
        false_calls=float(above[~anomalous].float().mean()),
        trivial=trivial(images, anomalous, detector.thumbnails),
        confusion=_confusion(detector.calibration, found.scores, _called(anomalous, truth)),
        copies=int(copies(images, detector.thumbnails).sum()),
    )


def _called(anomalous: Bool[Tensor, " m"], truth: Truth | None) -> list[str]:
    """The kind of each image."""
    return ["defective" if bad else GOOD for bad in anomalous.tolist()] if truth is None else list(truth.kinds)


def _confusion(by: Calibration | None, scores: Float[Tensor, " m"], kinds: list[str]) -> dict[str, dict[str, int]]:
    """How many images of each kind have each verdict, the good ones first; empty without a calibration."""
    if by is None:
        return {}
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


def _kind(
    found: Located,
    anomalous: Bool[Tensor, " m"],
    truth: Truth | None,
    chosen: Bool[Tensor, " m"],
    ignored: Bool[Tensor, "s s"] | None,
) -> Kind:
    return Kind(
        images=int((chosen & anomalous).sum()),
        auroc=auroc_interval(found.scores[chosen], anomalous[chosen]),
        localisation=_localisation(found.maps, truth, chosen, ignored),
    )


def _localisation(
    maps: Float[Tensor, "m h w"],
    truth: Truth | None,
    chosen: Bool[Tensor, " m"],
    ignored: Bool[Tensor, "s s"] | None,
) -> Localisation | None:
    """Pixel measures on the images whose masks are known; None without maps or without a marked defect."""
    if truth is None or not maps.numel():
        return None
    known = chosen & truth.known
    masks = truth.masks[known]
    if masks.shape[1:] != maps.shape[1:] or not bool((masks if ignored is None else masks & ~ignored).any()):
        return None
    return localisation(maps[known], masks, ignored=ignored)
