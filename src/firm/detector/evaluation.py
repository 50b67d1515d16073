"""Evaluate a detector on labelled images: image and pixel metrics with confidence intervals."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import compress

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from firm.data.duplicates import copies_of_known, thumbnails
from firm.data.folder import GOOD
from firm.decision.calibration import FAIL, PASS, REVIEW, Calibration
from firm.decision.regions import start
from firm.decision.verdict import marked
from firm.detector.detector import Detector
from firm.errors import DataError
from firm.images.ignore_mask import scaled
from firm.metrics.image import Interval, auroc, auroc_interval, rate_of
from firm.metrics.pixel import Localisation, localisation
from firm.scoring.models import Located
from firm.types import Truth

IGNORED = "(ignored)"  # kind of images whose defect is under ignored pixels; cannot be a folder name
COVERED = 0.95  # fraction of a marked defect under ignored pixels from which the image is not evaluated
SUSPICIOUS = 0.75  # AUROC of a trivial baseline from which the test set is suspicious


@dataclass(frozen=True)
class Labelled:
    """Test images with the detector's scores and maps, and the ground truth."""

    located: Located
    images: UInt8[Tensor, "m c h w"]
    anomalous: Bool[Tensor, " m"]
    truth: Truth | None = None

    def __getitem__(self, chosen: Bool[Tensor, " m"]) -> Labelled:
        """A subset of the images."""
        if (truth := self.truth) is not None:
            kinds, files = (tuple(compress(names, chosen.tolist())) for names in (truth.kinds, truth.files))
            truth = Truth(kinds, truth.masks[chosen], truth.known[chosen], files)
        located = Located(self.located.scores[chosen], self.located.maps[chosen])
        return Labelled(located, self.images[chosen], self.anomalous[chosen], truth)

    @property
    def kinds(self) -> list[str]:
        if self.truth is not None:
            return list(self.truth.kinds)
        return ["defective" if bad else GOOD for bad in self.anomalous.tolist()]

    def under(self, ignored: Bool[Tensor, "a b"] | None) -> Bool[Tensor, " m"]:
        """The defective images whose marked pixels are (nearly) all ignored."""
        if ignored is None or self.truth is None:
            return torch.zeros_like(self.anomalous)
        masks = self.truth.masks
        marked, covered = (mask.flatten(1).sum(1) for mask in (masks, masks & scaled(ignored, *masks.shape[1:])))
        return self.anomalous & self.truth.known & (marked > 0) & (covered >= COVERED * marked)


@dataclass(frozen=True)
class Overlap:
    """How well the regions of images that do not PASS fit their masks: the mean over images of their IoU."""

    iou: float
    images: int  # that do not PASS
    of: int  # with a mask


@dataclass(frozen=True)
class Kind:
    """How well one kind of defect is detected and localised (None without ground-truth masks)."""

    images: int
    auroc: Interval
    localisation: Localisation | None
    overlap: Overlap | None = None  # None also where no image with a mask is called


@dataclass(frozen=True)
class Trivial:
    """AUROC of trivial baselines, to detect confounded or leaky test sets."""

    brightness: float  # mean grey level; far from 0.5, good and defective images differ in illumination
    neighbour: float  # distance of the thumbnail to the nearest good one

    @property
    def suspicious(self) -> bool:
        return max(self.brightness, 1 - self.brightness, self.neighbour, 1 - self.neighbour) >= SUSPICIOUS


@dataclass(frozen=True)
class Evaluation:
    """The metrics of a detector on labelled images."""

    images: int
    overall: Kind
    kinds: dict[str, Kind]
    caught: float
    false_calls: float
    trivial: Trivial
    confusion: dict[str, dict[str, int]] = field(default_factory=dict)  # kind -> verdict -> images
    copies: int = 0  # test images that are also training images, by their thumbnails
    ignored: int = 0  # defective images marked only under ignored pixels: counted in `confusion` alone


def evaluate(detector: Detector, test: Labelled) -> Evaluation:
    """Metrics over all defects and per kind of defect against all good images, and the rates at the threshold.

    Pixel metrics exclude ignored pixels; images whose defect is ignored are only counted.
    """
    ignored = detector.model.ignored
    under = test.under(ignored)
    if bool(under.any()) and bool(under[test.anomalous].all()):
        raise DataError("all marked defects are under ignored pixels; give images of others, or ignore less")
    counted, anomalous = test[~under], test.anomalous[~under]
    above = counted.located.scores > (math.inf if detector.calibration is None else detector.limit)
    kinds = [IGNORED if hidden else kind for kind, hidden in zip(test.kinds, under.tolist(), strict=True)]
    by_kind = {}
    for name in sorted(set(counted.kinds) - {GOOD}) if test.truth is not None else ():
        of_kind = torch.tensor([kind == name for kind in counted.kinds])
        by_kind[name] = _kind(counted[~anomalous | of_kind], ignored, detector.calibration)
    return Evaluation(
        images=len(counted.images),
        overall=_kind(counted, ignored, detector.calibration),
        kinds=by_kind,
        caught=float(above[anomalous].float().mean()),
        false_calls=float(above[~anomalous].float().mean()),
        trivial=trivial(counted.images, anomalous, detector.thumbnails),
        confusion=_confusion(detector.calibration, test.located.scores, kinds),
        copies=int(copies_of_known(test.images, detector.thumbnails).sum()),
        ignored=int(under.sum()),
    )


@dataclass(frozen=True)
class Kept:
    """A rate that a calibration states of good parts, beside what good test images show of it.

    It is the chance that a photograph of a new part lies above a threshold. So every part counts once, by the share of
    its photographs that do, and the interval is that of so many parts.
    """

    verdict: str
    stated: float
    realised: Interval
    parts: int
    images: int

    @property
    def broken(self) -> bool:
        """Whether chance does not explain that more than stated are above."""
        return self.realised.low > self.stated


def kept_rates(good: Float[Tensor, " n"], parts: Int[Tensor, " n"], by: Calibration) -> list[Kept]:
    """Stated and realised rates, from the scores of good images of these parts; none without images."""
    numbers = parts.unique(return_inverse=True)[1]
    sizes = numbers.bincount()
    weights, found = 1 / sizes[numbers].double(), []
    thresholds = (f"{REVIEW} or {FAIL}", by.reviewed, by.review), (FAIL, by.failed, by.fail)
    for name, rate, limit in thresholds if len(good) else ():
        above = round(float(weights[good.double() > limit].sum()), 9)  # of the parts; a third thrice is one
        low, high = rate_of(math.floor(above), len(sizes)).low, rate_of(math.ceil(above), len(sizes)).high
        found.append(Kept(name, rate.kept, Interval(above / len(sizes), low, high), len(sizes), len(good)))
    return found


def _confusion(by: Calibration | None, scores: Float[Tensor, " m"], kinds: list[str]) -> dict[str, dict[str, int]]:
    """Images per kind and verdict, good first, ignored last; empty without a calibration."""
    if by is None:
        return {}
    counts = Counter(zip(kinds, map(by.verdict, scores.tolist()), strict=True))
    order = sorted(set(kinds), key=lambda kind: (kind != GOOD, kind == IGNORED, kind))
    return {kind: {verdict: counts[kind, verdict] for verdict in (PASS, REVIEW, FAIL)} for kind in order}


def trivial(images: UInt8[Tensor, "m c h w"], anomalous: Bool[Tensor, " m"], known: UInt8[Tensor, "n s s"]) -> Trivial:
    """AUROC of brightness alone and of the nearest good thumbnail alone."""
    small = thumbnails(images).float().flatten(1)
    nearest = torch.cdist(small, known.float().flatten(1)).amin(1) if len(known) else torch.zeros(len(small))
    return Trivial(auroc(small.mean(1), anomalous), auroc(nearest, anomalous))


def ious(test: Labelled, by: Calibration | None, ignored: Bool[Tensor, "a b"] | None = None) -> Float[Tensor, " m"]:
    """The IoU of all regions of an image with its mask; NaN where it has no mask, or PASSes."""
    found, maps, truth = torch.full((len(test.images),), math.nan), test.located.maps, test.truth
    if by is None or by.pixel is None or truth is None or truth.masks.shape != maps.shape:
        return found
    free = True if ignored is None else ~scaled(ignored, *maps.shape[1:])
    masks = truth.masks & free
    called = truth.known & masks.flatten(1).any(1) & (test.located.scores > by.review)
    for number in called.nonzero().flatten().tolist():
        heat = maps[number].numpy()
        regions = torch.from_numpy(marked(heat, start(heat, by.pixel))) & free
        found[number] = float((regions & masks[number]).sum() / (regions | masks[number]).sum())
    return found


def _overlap(test: Labelled, by: Calibration | None, ignored: Bool[Tensor, "a b"] | None) -> Overlap | None:
    found = ious(test, by, ignored)
    found, truth = found[~found.isnan()], test.truth
    if truth is None or not len(found):
        return None
    return Overlap(float(found.mean()), len(found), int((truth.known & truth.masks.flatten(1).any(1)).sum()))


def _kind(test: Labelled, ignored: Bool[Tensor, "a b"] | None, by: Calibration | None) -> Kind:
    """Image metrics, and pixel metrics if there are maps and a marked defect."""
    maps, truth, pixels = test.located.maps, test.truth, None
    if truth is not None and maps.numel():
        masks = truth.masks[truth.known]
        if masks.shape[1:] == maps.shape[1:] and bool((masks if ignored is None else masks & ~ignored).any()):
            pixels = localisation(maps[truth.known], masks, ignored=ignored)
    auroc = auroc_interval(test.located.scores, test.anomalous)
    return Kind(int(test.anomalous.sum()), auroc, pixels, _overlap(test, by, ignored))
