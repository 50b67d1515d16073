"""Thresholds from good images, with the false-call rates they can promise; and what of labelled defects they miss.

Good images that the encoder never saw are scored; a threshold is their conformal quantile. If future good images are
like them, the chance that one is called anomalous is at most the stated rate, whatever the scores' distribution.
Several photographs of one part count as one together: it is parts that are drawn anew, and a hundred photographs of ten
parts say little of an eleventh.

Of all thresholds that keep a promise the lowest misses least. So defects move no threshold: they only tell what it
misses, and because it was not chosen on them their exact binomial interval holds.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from firm.types import FirmError

SCHEMA = 1
PASS, REVIEW, FAIL = "PASS", "REVIEW", "FAIL"
CONFIDENCE = 0.95  # of the interval around a rate, and of what one calibration keeps


@dataclass(frozen=True)
class Threshold:
    """Scores above `value` are anomalous; `false_calls` is the rate that `images` held-out good images support.

    `parts` is how many parts they show; 0 where that was not looked for.
    """

    value: float
    false_calls: float
    images: int
    parts: int = 0


def threshold_of(
    held_out: Float[Tensor, " n"], false_calls: float, parts: Int[Tensor, " n"] | None = None
) -> Threshold:
    """The lowest threshold whose false-call rate is at most the wished one, or the best the images can promise.

    `parts` numbers the part each image shows; without it each shows one of its own. k parts cannot promise less than
    1 / (k + 1); then the threshold is the largest score and says so.
    """
    check_rate("false_calls", false_calls)
    weights, count = _weights(held_out, parts)
    ordered, order = held_out.double().sort()
    below = weights[order].cumsum(0)
    place = min(int((below < 1 - false_calls - 1e-9).sum()), len(held_out) - 1)
    return Threshold(float(ordered[place]), max(0.0, 1 - float(below[place])), len(held_out), count)


def rate_at(held_out: Float[Tensor, " n"], value: float, parts: Int[Tensor, " n"] | None = None) -> float:
    """The false-call rate that the images support for a threshold which was not chosen on them."""
    weights, _ = _weights(held_out, parts)
    return max(0.0, 1 - float(weights[held_out.double() <= value].sum()))


def _weights(held_out: Float[Tensor, " n"], parts: Int[Tensor, " n"] | None) -> tuple[Float[Tensor, " n"], int]:
    """What each image counts, those of a part together as much as any other part, and the number of parts."""
    if not len(held_out):
        raise FirmError("a threshold needs held-out good images; set holdout above 0 or give more images")
    if not bool(held_out.isfinite().all()):
        raise FirmError("a held-out score is not finite; the training diverged, lower training.lr")
    numbers = torch.arange(len(held_out)) if parts is None else parts.unique(return_inverse=True)[1]
    sizes = numbers.bincount()
    return 1 / (sizes[numbers].double() * (len(sizes) + 1)), len(sizes)  # the new part has the rest


def check_rate(name: str, rate: float) -> None:
    if not 0 < rate < 1:
        raise FirmError(f"{name} is {rate}; it must lie between 0 and 1")


def check_order(review: float, fail: float) -> None:
    if review > fail:
        raise FirmError(
            f"review at {review:.6g} lies above fail at {fail:.6g}; set review no higher than fail, or both by hand"
        )


@dataclass(frozen=True)
class Promise:
    """At most `kept` of good parts lie above a threshold; `wished` is what was asked for, None of one set by hand."""

    wished: float | None
    kept: float

    @property
    def broken(self) -> bool:
        """More was wished than the images can support."""
        return self.wished is not None and self.kept > self.wished + 1e-9


@dataclass(frozen=True)
class Rate:
    """`count` of `of` images, and the exact binomial interval of the rate behind it."""

    count: int
    of: int
    low: float
    high: float


def rate_of(count: int, of: int, confidence: float = CONFIDENCE) -> Rate:
    """Clopper and Pearson's interval: it holds the true rate at least so often, however few the images."""
    if not 0 <= count <= of or not of:
        raise FirmError(f"{count} of {of} images is no rate; give at least one image and no more counted than given")
    tail = (1 - confidence) / 2
    low = _solved(lambda rate: _at_most(of - count, of, 1 - rate) < tail) if count else 0.0
    high = _solved(lambda rate: _at_most(count, of, rate) > tail) if count < of else 1.0
    return Rate(count, of, low, high)


def _solved(below: Callable[[float], bool]) -> float:
    """The rate up to which it holds."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return (low + high) / 2


def _at_most(count: int, of: int, rate: float) -> float:
    """The chance of at most so many among so many, each at this rate; a sum of logarithms, for many are no matter."""
    if rate in (0.0, 1.0):
        return 1.0 if rate == 0 or count >= of else 0.0
    hit, miss = math.log(rate), math.log1p(-rate)
    ways = (math.lgamma(of + 1) - math.lgamma(k + 1) - math.lgamma(of - k + 1) for k in range(count + 1))
    return math.fsum(math.exp(one + k * hit + (of - k) * miss) for k, one in enumerate(ways))


@dataclass(frozen=True)
class Misses:
    """Labelled defects that are not called: those that do not FAIL, and those of them that even PASS.

    `enough` is the highest fail threshold at which no more than the wished rate would be missed, and `price` the rate
    of false calls the good images support there; both None where nothing was wished.
    """

    wished: float | None
    unfailed: Rate
    passed: Rate
    enough: float | None = None
    price: float | None = None

    @property
    def too_many(self) -> bool:
        return self.wished is not None and self.unfailed.count > self.wished * self.unfailed.of + 1e-9


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Up to `review` an image PASSes, up to `fail` it is for REVIEW, above it FAILs; each with what it promises.

    `pixel` is the heat above which a region is shown, None where there are no maps.
    """

    model: str  # id of the detector it belongs to
    review: float
    fail: float
    pixel: float | None
    reviewed: Promise  # of good parts that are for REVIEW or FAIL
    failed: Promise  # of good parts that FAIL
    marked: Promise | None  # of good parts with a region
    images: int
    parts: int
    source: str
    scores: tuple[float, ...] = ()  # of the good images
    shown: tuple[int, ...] = ()  # the part each of them shows
    light: tuple[float, ...] = ()  # how bright each of them is, 0 to 1; none where that was not noted
    misses: Misses | None = None

    def __post_init__(self) -> None:
        values = [self.review, self.fail, *([] if self.pixel is None else [self.pixel])]
        if not all(map(math.isfinite, values)):
            raise FirmError("a threshold is not finite, so nothing can be decided; calibrate again on good images")
        check_order(self.review, self.fail)

    @property
    def id(self) -> str:
        """Names it by all it says, its model included: two with one name decide and promise alike."""
        said = {name: value for name, value in asdict(self).items() if value or name != "light"}  # added later
        return hashlib.sha256(json.dumps([SCHEMA, said], sort_keys=True).encode()).hexdigest()[:16]

    def surely(self, limit: float) -> float | None:
        """The rate of good parts above a limit that this very calibration keeps with 95 % confidence.

        A promise holds on average over calibrations, and one from few parts may lie well above it: exact and one-sided,
        from the parts of which any image lies above. None where the scores are not known.
        """
        if not self.scores:
            return None
        numbers = torch.tensor(self.shown)
        above = len(numbers[torch.tensor(self.scores, dtype=torch.float64) > limit].unique())
        return rate_of(above, int(numbers.max()) + 1, 2 * CONFIDENCE - 1).high

    def verdict(self, score: float) -> str:
        """The word for a score; one that is no number is for nobody to pass."""
        if math.isnan(score):
            raise FirmError("a score is not a number, so nothing can be decided; fit the detector again")
        return PASS if score <= self.review else REVIEW if score <= self.fail else FAIL


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What is asked of a calibration; a threshold set by hand is taken as it is."""

    false_calls: float = 0.05  # of good parts that are for REVIEW or FAIL
    fail: float = 0.01  # of good parts that FAIL
    misses: float | None = None  # of defects that do not FAIL
    fail_at: float | None = None
    review_at: float | None = None

    def __post_init__(self) -> None:
        check_rate("false_calls", self.false_calls)
        check_rate("fail", self.fail)
        if self.misses is not None and not 0 <= self.misses < 1:
            raise FirmError(f"misses is {self.misses}; it must be 0 or more and below 1")
        if self.fail_at is not None and self.review_at is not None:
            check_order(self.review_at, self.fail_at)


def calibration_of(
    good: Float[Tensor, " n"],
    *,
    model: str,
    peaks: Float[Tensor, " n"] | None = None,
    parts: Int[Tensor, " n"] | None = None,
    light: Float[Tensor, " n"] | None = None,
    defects: Float[Tensor, " m"] | None = None,
    wishes: Wishes | None = None,
) -> Calibration:
    """Both thresholds from the scores of held-out good images, that of regions from the maxima of their maps.

    `light` is how bright the images are; it decides nothing and is kept for comparison.
    """
    wishes = wishes or Wishes()
    if wishes.misses is not None and defects is None:
        raise FirmError("a wished rate of misses needs labelled defects; give some")
    review, reviewed, count = _set(good, parts, wishes.false_calls, wishes.review_at)
    # all that fails is called: where few false calls are wished, no more may fail
    fail, failed, _ = _set(good, parts, min(wishes.fail, wishes.false_calls), wishes.fail_at)
    pixel, marked, _ = (
        (None, None, 0) if peaks is None else _set(peaks, parts, min(wishes.fail, wishes.false_calls), None)
    )
    misses = None
    if defects is not None:
        misses = _misses(defects, review, fail, good, parts, wishes.misses)
    return Calibration(
        model=model,
        review=review,
        fail=fail,
        pixel=pixel,
        reviewed=reviewed,
        failed=failed,
        marked=marked,
        images=len(good),
        parts=count,
        source=_source(len(good), count, 0 if defects is None else len(defects), wishes),
        scores=tuple(good.double().tolist()),
        shown=tuple(range(len(good)) if parts is None else parts.unique(return_inverse=True)[1].tolist()),
        light=() if light is None else tuple(light.double().tolist()),
        misses=misses,
    )


def of_threshold(bound: Threshold, model: str, *, maps: bool) -> Calibration:
    """The one threshold of a detector of schema 1: nothing is for review, and heat is measured by it, too."""
    promise = Promise(None, bound.false_calls)
    return Calibration(
        model=model,
        review=bound.value,
        fail=bound.value,
        pixel=bound.value if maps else None,
        reviewed=promise,
        failed=promise,
        marked=None,
        images=bound.images,
        parts=bound.parts,
        source=f"the fit's own threshold, {_from(bound.images, bound.parts)}",
    )


def _set(
    good: Float[Tensor, " n"], parts: Int[Tensor, " n"] | None, wished: float, by_hand: float | None
) -> tuple[float, Promise, int]:
    found = threshold_of(good, wished, parts)
    if by_hand is None:
        return found.value, Promise(wished, found.false_calls), found.parts
    return by_hand, Promise(None, rate_at(good, by_hand, parts)), found.parts


def _misses(
    defects: Float[Tensor, " m"],
    review: float,
    fail: float,
    good: Float[Tensor, " n"],
    parts: Int[Tensor, " n"] | None,
    wished: float | None,
) -> Misses:
    if not len(defects) or not bool(defects.isfinite().all()):
        raise FirmError("the defects have no finite score among them all; give at least one image of a defect")
    scores = defects.double()
    unfailed, passed = (rate_of(int((scores <= limit).sum()), len(scores)) for limit in (fail, review))
    if wished is None:
        return Misses(None, unfailed, passed)
    # as many as may be missed lie at or below it; the next one must lie above
    first = float(scores.sort().values[min(int(wished * len(scores) + 1e-9), len(scores) - 1)])
    enough = math.nextafter(first, -math.inf)
    return Misses(wished, unfailed, passed, enough, rate_at(good, enough, parts))


def _source(images: int, parts: int, defects: int, wishes: Wishes) -> str:
    by_hand = [name for name, value in (("fail", wishes.fail_at), ("review", wishes.review_at)) if value is not None]
    told = _from(images, parts) + (f" and {defects} defects" if defects else "")
    return f"{told}; {' and '.join(by_hand)} set by hand" if by_hand else told


def _from(images: int, parts: int) -> str:
    """Parts rather than photographs, where these are several of one part."""
    told = f"from {images} held-out good image{'s' * (images != 1)}"
    return f"{told} of {parts} parts" if 0 < parts < images else told
