"""AUROC with its interval, the area under a learning curve, and the spread over seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
import numpy.typing as npt
from torch import Tensor

from firm.calibration import rate_of
from firm.types import FirmError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A value and the range that covers it with the stated confidence."""

    value: float
    low: float
    high: float


def auroc(scores: Tensor | Floats, anomalous: Tensor | npt.NDArray[np.bool_]) -> float:
    """The chance that an anomaly scores above a normal image, ties counting half. Never flipped to look better."""
    values, labels = _checked(scores, anomalous)
    return float(_weighted_auroc(values, labels, np.ones((1, len(values))))[0])


def auroc_interval(
    scores: Tensor | Floats,
    anomalous: Tensor | npt.NDArray[np.bool_],
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """AUROC with a percentile bootstrap: normal and anomalous images are resampled separately.

    It covers the chance of the test images, not that of the training; seeds show the latter. Where every resample says
    the same, as of sides that lie wholly apart, it knows nothing of chance: then independent pairs are counted.
    """
    values, labels = _checked(scores, anomalous)
    rng = np.random.default_rng(seed)
    drawn = np.empty(resamples)
    step = max(1, 2**22 // len(values))
    for begin in range(0, resamples, step):
        rows = min(step, resamples - begin)
        weights = np.empty((rows, len(values)))
        for side in (labels, ~labels):
            count = int(side.sum())
            weights[:, side] = rng.multinomial(count, np.full(count, 1 / count), size=rows)
        drawn[begin : begin + rows] = _weighted_auroc(values, labels, weights)
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    found = auroc(values, labels)
    if low == high:
        low, high = _paired(found, min(int(labels.sum()), int((~labels).sum())), confidence)
    return Interval(found, float(low), float(high))


def aulc(curve: list[float]) -> float:
    """Area under a learning curve over 0..1 by the trapezoid rule: the AUROC averaged over training."""
    if not curve:
        raise FirmError("a learning curve needs at least one probe; probe more often")
    return float(np.trapezoid(curve, dx=1 / (len(curve) - 1))) if len(curve) > 1 else float(curve[0])


def mean_std(values: list[float]) -> tuple[float, float]:
    """Mean and sample deviation over seeds; the deviation of a single run is nan, not 0."""
    return fmean(values), stdev(values) if len(values) > 1 else float("nan")


def _paired(value: float, pairs: int, confidence: float) -> tuple[float, float]:
    """What so many pairs, no image in two of them, leave open if this part of them is in order; exact, so wide."""
    low, high = (
        rate_of(math.floor(value * pairs), pairs, confidence),
        rate_of(math.ceil(value * pairs), pairs, confidence),
    )
    return low.low, high.high


def _weighted_auroc(values: Floats, labels: npt.NDArray[np.bool_], weights: Floats) -> Floats:
    """AUROC of every row of sample weights, from one sort: pairs below plus half the ties."""
    order = np.argsort(values, kind="stable")
    first = np.flatnonzero(np.r_[True, np.diff(values[order]) > 0])  # where each run of equal scores begins
    bad = np.add.reduceat(weights[:, order] * labels[order], first, axis=1)
    good = np.add.reduceat(weights[:, order] * ~labels[order], first, axis=1)
    below = np.cumsum(good, axis=1) - good
    return (bad * (below + good / 2)).sum(1) / (bad.sum(1) * good.sum(1))


def _checked(
    scores: Tensor | Floats, anomalous: Tensor | npt.NDArray[np.bool_]
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    values = np.asarray(scores, dtype=np.float64)
    labels = np.asarray(anomalous, dtype=bool)
    if values.shape != labels.shape or values.ndim != 1:
        raise FirmError(f"{values.shape} scores do not match {labels.shape} labels; give one of each per image")
    if not np.isfinite(values).all():
        raise FirmError("a score is not finite; the training diverged, lower training.lr")
    if labels.all() or not labels.any():
        raise FirmError("AUROC needs both normal and anomalous test images")
    return values, labels
