"""Image metrics: AUROC and rates with confidence intervals, learning curves, deviation over seeds."""

import math
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv
from torch import Tensor

from firm.errors import DataError, SettingError

CHUNK = 2**22  # bootstrap weights per chunk
CONFIDENCE = 0.95  # of the interval of a rate

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.bool_]
AnyFloats = Tensor | Floats
AnyLabels = Tensor | Labels


@dataclass(frozen=True)
class Interval:
    """A value and its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Rate:
    """`count` of `of` images, with the exact binomial interval of the rate."""

    count: int
    of: int
    low: float
    high: float


def auroc(scores: AnyFloats, anomalous: AnyLabels) -> float:
    """The chance that an anomaly scores above a normal image, ties counting half."""
    values, labels = _checked(scores, anomalous)
    return float(_weighted_auroc(values, labels, np.ones((1, len(values))))[0])


def auroc_interval(
    scores: AnyFloats, anomalous: AnyLabels, *, confidence: float = 0.95, resamples: int = 1000, seed: int = 0
) -> Interval:
    """AUROC with a percentile bootstrap over the test images."""
    values, labels = _checked(scores, anomalous)
    rng = np.random.default_rng(seed)
    step = max(1, CHUNK // len(values))
    rows = [min(step, resamples - begin) for begin in range(0, resamples, step)]
    drawn = np.concatenate([_weighted_auroc(values, labels, resampled(labels, count, rng)) for count in rows])
    interval = percentile_interval(auroc(values, labels), drawn, confidence)
    if interval.low < interval.high:
        return interval
    # all samples agree, as for perfect separation: the Clopper-Pearson interval of the disjoint pairs
    pairs = min(int(labels.sum()), int((~labels).sum()))
    low, high = (rate_of(round_to(interval.value * pairs), pairs, confidence) for round_to in (math.floor, math.ceil))
    return Interval(interval.value, low.low, high.high)


def rate_of(count: int, of: int, confidence: float = CONFIDENCE) -> Rate:
    """A rate with its Clopper-Pearson interval."""
    if not 0 <= count <= of or not of:
        raise SettingError(f"{count} of {of} images is no rate; give at least one image and no more counted than given")
    tail = (1 - confidence) / 2
    low = float(betaincinv(count, of - count + 1, tail)) if count else 0.0
    high = float(betaincinv(count + 1, of - count, 1 - tail)) if count < of else 1.0
    return Rate(count, of, low, high)


def aulc(curve: list[float]) -> float:
    """Area under a learning curve by the trapezoid rule: the mean AUROC over training."""
    if not curve:
        raise SettingError("a learning curve needs at least one probe; probe more often")
    return float(np.trapezoid(curve, dx=1 / (len(curve) - 1))) if len(curve) > 1 else float(curve[0])


def mean_std(values: list[float]) -> tuple[float, float]:
    """Mean and sample deviation; nan deviation for a single run."""
    return fmean(values), stdev(values) if len(values) > 1 else float("nan")


def resampled(anomalous: Labels, resamples: int, rng: np.random.Generator) -> Floats:
    """How often each image is drawn in each bootstrap sample; anomalous and normal images are drawn separately."""
    weights = np.empty((resamples, len(anomalous)))
    for side in (anomalous, ~anomalous):
        if count := int(side.sum()):
            weights[:, side] = rng.multinomial(count, np.full(count, 1 / count), size=resamples)
    return weights


def percentile_interval(value: float, resampled_values: Floats, confidence: float) -> Interval:
    """The central interval of bootstrap values."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(resampled_values, [tail, 1 - tail])
    return Interval(value, float(low), float(high))


def _weighted_auroc(values: Floats, labels: Labels, weights: Floats) -> Floats:
    """AUROC of every row of sample weights, from one sort: pairs below plus half the ties."""
    order = np.argsort(values, kind="stable")
    first = np.flatnonzero(np.r_[True, np.diff(values[order]) > 0])  # where each run of equal scores begins
    bad = np.add.reduceat(weights[:, order] * labels[order], first, axis=1)
    good = np.add.reduceat(weights[:, order] * ~labels[order], first, axis=1)
    below = np.cumsum(good, axis=1) - good
    return (bad * (below + good / 2)).sum(1) / (bad.sum(1) * good.sum(1))


def _checked(scores: AnyFloats, anomalous: AnyLabels) -> tuple[Floats, Labels]:
    values = np.asarray(scores, dtype=np.float64)
    labels = np.asarray(anomalous, dtype=bool)
    if values.shape != labels.shape or values.ndim != 1:
        raise SettingError(f"{values.shape} scores do not match {labels.shape} labels; give one of each per image")
    if not np.isfinite(values).all():
        raise SettingError("a score is not finite; the training diverged, lower training.lr")
    if labels.all() or not labels.any():
        raise DataError("AUROC needs both normal and anomalous test images")
    return values, labels
