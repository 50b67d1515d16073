"""Thresholds with stated false-call rates: conformal quantiles of the scores of good images.

Scores of held-out images by the detector itself guarantee the rates, for future good parts like these and for any score
distribution. Out-of-fold scores come from models that learnt from fewer images than the detector: they use every good
image, and no theorem covers them, so their rates are called estimated. Rates count parts, not photographs. Defects do
not move a threshold, so the interval of the miss rate is exact.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from firm.errors import DataError, FirmError, ModelFileError, SettingError, named
from firm.metrics.image import CONFIDENCE, Rate, rate_of
from firm.runtime.files import read_file, write_atomically

SCHEMA = 2
PASS, REVIEW, FAIL = "PASS", "REVIEW", "FAIL"
KIND, NAME = "calibration", "calibration.json"
AGAIN = "run firm calibrate again"
HELD_OUT, FOLDS = "held-out", "folds"  # where the scores come from: the detector itself, or one model for each fold
FALSE_CALLS, FAILS = 0.05, 0.01  # default target rates, if there are images enough
SPARED = 4  # good parts above the default review threshold: with 20 of them a fifth, the review load that is acceptable
REVIEWED = 4  # and at most one part in so many
ODD = 0.75  # gap below the highest score, relative to the rest of the tail, from which its image is named

Scores = Float[Tensor, " n"]
Parts = Int[Tensor, " n"] | None


@dataclass(frozen=True, kw_only=True)
class TargetRates:
    """The rates a calibration aims at; a threshold set by hand is used unchanged."""

    false_calls: float | None = None  # of good parts with REVIEW or FAIL; None: what the good parts support
    fail: float | None = None  # of good parts that FAIL; None: the same
    misses: float | None = None  # of defects that do not FAIL
    fail_at: float | None = None
    review_at: float | None = None

    def __post_init__(self) -> None:
        for name, rate in (("false_calls", self.false_calls), ("fail", self.fail)):
            if rate is not None:
                _check_rate(name, rate)
        if self.misses is not None and not 0 <= self.misses < 1:
            raise SettingError(f"misses is {self.misses}; it must be 0 or more and below 1")
        if self.fail_at is not None and self.review_at is not None:
            _check_order(self.review_at, self.fail_at)

    def of(self, parts: int) -> tuple[float, float]:
        """Rates of false calls and of FAIL for so many good parts.

        With few parts the lowest rate is that of the highest score. FAIL takes it; REVIEW spares the highest few parts,
        because a defect that PASSes is worse than a good part that is looked at.
        """
        spared = min(SPARED, max(1, parts // REVIEWED))
        calls = max(FALSE_CALLS, min(0.5, (spared + 1) / (parts + 1))) if self.false_calls is None else self.false_calls
        fail = max(FAILS, 1 / (parts + 1)) if self.fail is None else self.fail
        return calls, min(fail, calls)  # FAIL implies a call


@dataclass(frozen=True)
class Guarantee:
    """At most a rate `kept` of good parts is above the threshold; `wished` is the target, None if set by hand."""

    wished: float | None
    kept: float

    @property
    def unmet(self) -> bool:
        return self.wished is not None and self.kept > self.wished + 1e-9


def threshold_of(held_out: Scores, false_calls: float, parts: Parts = None) -> tuple[float, Guarantee]:
    """The lowest threshold that guarantees the false-call rate, else the largest score; k parts allow 1 / (k + 1)."""
    _check_rate("false_calls", false_calls)
    weights = _weights(held_out, parts)
    ordered, order = held_out.double().sort()
    below = weights[order].cumsum(0)
    place = min(int((below < 1 - false_calls - 1e-9).sum()), len(held_out) - 1)
    return float(ordered[place]), Guarantee(false_calls, max(0.0, 1 - float(below[place])))


def rate_at(held_out: Scores, value: float, parts: Parts = None) -> float:
    """The guaranteed false-call rate at a threshold set by hand."""
    return max(0.0, 1 - float(_weights(held_out, parts)[held_out.double() <= value].sum()))


def _weights(held_out: Scores, parts: Parts) -> Scores:
    """Image weights: equal for all parts, the next part included."""
    if not len(held_out):
        raise DataError("a threshold needs held-out good images; set holdout above 0 or give more images")
    if not bool(held_out.isfinite().all()):
        raise SettingError("a held-out score is not finite; the training diverged, lower training.lr")
    numbers = torch.arange(len(held_out)) if parts is None else parts.unique(return_inverse=True)[1]
    sizes = numbers.bincount()
    return 1 / (sizes[numbers].double() * (len(sizes) + 1))


def _check_rate(name: str, rate: float) -> None:
    if not 0 < rate < 1:
        raise SettingError(f"{name} is {rate}; it must lie between 0 and 1")


def _check_order(review: float, fail: float) -> None:
    if review > fail:
        raise SettingError(f"review at {review:.6g} lies above fail at {fail:.6g}; lower review, or set both by hand")


@dataclass(frozen=True)
class Misses:
    """Rates of labelled defects that do not FAIL and that PASS."""

    wished: float | None
    unfailed: Rate
    passed: Rate
    enough: float | None = None  # the highest fail threshold that meets the target
    price: float | None = None  # its guaranteed false-call rate

    @property
    def too_many(self) -> bool:
        return self.wished is not None and self.unfailed.count > self.wished * self.unfailed.of + 1e-9


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Up to `review` an image PASSes, up to `fail` it is REVIEW, above it FAILs; regions peak above `pixel`."""

    model: str  # id of the detector it belongs to
    review: float
    fail: float
    pixel: float | None
    reviewed: Guarantee  # good parts with REVIEW or FAIL
    failed: Guarantee  # good parts that FAIL
    marked: Guarantee | None  # good parts with a region; None without maps
    images: int
    parts: int
    source: str
    scores: tuple[float, ...] = field(default=(), repr=False)  # of the good images
    shown: tuple[int, ...] = field(default=(), repr=False)  # the part each of them shows
    light: tuple[float, ...] = field(default=(), repr=False)  # brightness of each, 0 to 1; empty if unknown
    files: tuple[str, ...] = field(default=(), repr=False)  # their names; empty if unknown
    basis: str = HELD_OUT  # or folds: the rates are estimated
    misses: Misses | None = None

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.review, self.fail, self.pixel or 0.0))):
            raise ModelFileError("a threshold is not finite, so nothing can be decided; calibrate again on good images")
        _check_order(self.review, self.fail)

    @cached_property
    def id(self) -> str:
        """A digest of all its values, including the model."""
        return hashlib.sha256(json.dumps([SCHEMA, asdict(self)], sort_keys=True).encode()).hexdigest()[:16]

    def upper_bound(self, limit: float) -> float | None:
        """This calibration's 95 % confidence bound on the rate of good parts above a limit; None without scores."""
        if not self.scores:
            return None
        numbers = torch.tensor(self.shown)
        above = len(numbers[torch.tensor(self.scores, dtype=torch.float64) > limit].unique())
        return rate_of(above, int(numbers.max()) + 1, 2 * CONFIDENCE - 1).high

    def verdict(self, score: float) -> str:
        """PASS, REVIEW or FAIL; raises for nan."""
        if math.isnan(score):
            raise ModelFileError("a score is not a number, so nothing can be decided; fit the detector again")
        return PASS if score <= self.review else REVIEW if score <= self.fail else FAIL


def calibration_of(
    good: Scores,
    *,
    model: str,
    peaks: Scores | None = None,
    parts: Parts = None,  # that each image shows
    light: Scores | None = None,  # brightness, stored to detect drift
    files: Sequence[str] = (),
    basis: str = HELD_OUT,
    defects: Float[Tensor, " m"] | None = None,
    targets: TargetRates | None = None,
) -> Calibration:
    """Image thresholds from the scores of good images, the pixel threshold from the peaks of their maps."""
    targets = targets or TargetRates()
    if targets.misses is not None and defects is None:
        raise DataError("a target rate of misses needs labelled defects; give some")
    shown = torch.arange(len(good)) if parts is None else parts.unique(return_inverse=True)[1]
    count = int(shown.max()) + 1 if len(good) else 0
    calls, failing = targets.of(count)
    review, reviewed = _threshold(good, parts, calls, targets.review_at)
    fail, failed = _threshold(good, parts, failing, targets.fail_at)
    pixel, marked = (None, None) if peaks is None else threshold_of(peaks, failing, parts)
    source = f"from {plural(len(good), ('held-out ' if basis == HELD_OUT else '') + 'good image')}"
    source += f" of {count} parts" * (count < len(good)) + ", scored out of fold" * (basis == FOLDS)
    source += "" if defects is None else f" and {len(defects)} defects"
    by_hand = [name for name, value in (("fail", targets.fail_at), ("review", targets.review_at)) if value is not None]
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
        source=source + (f"; {' and '.join(by_hand)} set by hand" if by_hand else ""),
        scores=tuple(good.double().tolist()),
        shown=tuple(shown.tolist()),
        light=() if light is None else tuple(light.double().tolist()),
        files=tuple(files),
        basis=basis,
        misses=None if defects is None else _misses(defects, review, fail, good, parts, targets.misses),
    )


def _threshold(good: Scores, parts: Parts, target: float, by_hand: float | None) -> tuple[float, Guarantee]:
    if by_hand is None:
        return threshold_of(good, target, parts)
    return by_hand, Guarantee(None, rate_at(good, by_hand, parts))


def _misses(defects: Tensor, review: float, fail: float, good: Scores, parts: Parts, target: float | None) -> Misses:
    if not len(defects) or not bool(defects.isfinite().all()):
        raise DataError("the defects have no finite score among them all; give at least one image of a defect")
    scores = defects.double()
    unfailed, passed = (rate_of(int((scores <= limit).sum()), len(scores)) for limit in (fail, review))
    if target is None:
        return Misses(None, unfailed, passed)
    # the allowed misses are at or below the threshold, the next defect is above it
    first = float(scores.sort().values[min(int(target * len(scores) + 1e-9), len(scores) - 1)])
    enough = math.nextafter(first, -math.inf)
    return Misses(target, unfailed, passed, enough, rate_at(good, enough, parts))


def summary_of(calibration: Calibration) -> list[str]:
    """The thresholds and the rates they keep."""
    calls, fails = calibration.reviewed.kept, calibration.failed.kept
    stated, about = ("guarantee", "at most") if calibration.basis == HELD_OUT else ("estimate", "about")
    lines = [
        f"PASS up to {calibration.review:.6g}, REVIEW up to {calibration.fail:.6g}, FAIL above",
        f"{stated}: {about} {_percent(calls)} of good parts are for REVIEW or FAIL, {about} {_percent(fails)} FAIL, "
        "on average over calibrations",
    ]
    review, fail = calibration.upper_bound(calibration.review), calibration.upper_bound(calibration.fail)
    if review is not None and fail is not None:
        bounds = f"{_percent(review)} for REVIEW or FAIL, {_percent(fail)} FAIL"
        lines.append(f"95 % confidence bound for this calibration: {bounds}")
        load = round((calls - fails) * calibration.parts)
        if calls > FALSE_CALLS + 1e-9 and load:
            goes = "part goes" if calibration.parts == 1 or load == 1 else "parts go"
            lines[-1] += f"; about {load} of {calibration.parts} good {goes} to REVIEW, more good images shrink this"
    if calibration.pixel is not None and calibration.marked is not None:
        rate = _percent(calibration.marked.kept)
        lines.append(f"regions: heat above {calibration.pixel:.6g}, in {about} {rate} of good parts")
    if calibration.misses is not None:
        unfailed, passed = _counted(calibration.misses.unfailed), _counted(calibration.misses.passed)
        lines.append(f"defects: {unfailed} do not FAIL, {passed} PASS")
    return lines


def warnings_of(calibration: Calibration) -> list[str]:
    """Targets that are not met, and what would be needed."""
    images, parts, lines = calibration.images, calibration.parts, []
    count = plural(parts, "good part") if parts < images else plural(images, "good image")
    rates = {"FAIL": calibration.failed, "REVIEW or FAIL": calibration.reviewed}
    if calibration.failed.wished == calibration.reviewed.wished:
        del rates["FAIL"]
    for name, guarantee in rates.items():
        if guarantee.wished and guarantee.unmet:
            needed = math.ceil(1 / guarantee.wished - 1e-9) - 1
            lines.append(
                f"{count} cannot keep {name} at {100 * guarantee.wished:g} % of good parts: {_percent(guarantee.kept)} "
                f"is the lowest rate they support, and {100 * guarantee.wished:g} % takes {needed}"
            )
    if calibration.review == calibration.fail:
        lines.append("review and fail are the same threshold, so nothing is for REVIEW")
    if text := _odd_image(calibration):
        lines.append(text)
    misses = calibration.misses
    if misses is not None and misses.too_many and misses.wished is not None and misses.price is not None:
        lines.append(
            f"at most {100 * misses.wished:g} % misses cannot be reached with at most "
            f"{_percent(calibration.failed.kept)} false calls, which come first; it takes a fail threshold of "
            f"{misses.enough:.6g}, at which up to {_percent(misses.price)} of good parts FAIL"
        )
    return lines


def _odd_image(calibration: Calibration) -> str:
    """Names the image that alone sets the threshold of FAIL, if its score is far above the next."""
    if len(calibration.scores) < 4 or not calibration.files:
        return ""
    scores = torch.tensor(calibration.scores, dtype=torch.float64)
    top, following = scores.topk(2).values.tolist()
    if top != calibration.fail or top - following <= ODD * (following - float(scores.median())):
        return ""
    file = named(calibration.files[int(scores.argmax())])
    return f"the good image {file} scores {top:.3g}, the next {following:.3g}, and sets the FAIL threshold: look at it"


def plural(number: int, name: str) -> str:
    """1 image, 2 images."""
    return f"{number} {name}{'s' * (number != 1)}"


def _percent(rate: float) -> str:
    return f"{100 * rate:.1f} %"


def _counted(rate: Rate) -> str:
    interval = f"95 % interval {100 * rate.low:.1f} to {100 * rate.high:.1f}"
    return f"{rate.count} of {rate.of} ({_percent(rate.count / rate.of)}, {interval})"


def beside(model: Path | str) -> Path:
    """Where the calibration of a detector is stored."""
    return Path(model) / NAME


def to_json(calibration: Calibration) -> dict[str, Any]:
    """All values and the id."""
    return {"kind": KIND, "schema": SCHEMA, "id": calibration.id, **asdict(calibration)}


def from_json(values: Any) -> Calibration:
    """Read what `to_json` wrote; refuses anything else."""
    if not isinstance(values, dict) or values.get("kind") != KIND:
        raise ModelFileError(f"this is no calibration; {AGAIN}")
    if values.get("schema") != SCHEMA:
        raise ModelFileError(f"it has schema {values.get('schema')}, this firm reads {SCHEMA}; upgrade firm or {AGAIN}")
    fields = {name: value for name, value in values.items() if name not in ("kind", "schema", "id")}
    try:
        for name in ("reviewed", "failed", "marked"):
            fields[name] = fields[name] and Guarantee(**fields[name])
        for name in ("scores", "shown", "light", "files"):
            fields[name] = tuple(fields[name])
        if (misses := fields["misses"]) is not None:
            rates = {name: Rate(**misses[name]) for name in ("unfailed", "passed")}
            fields["misses"] = Misses(**(misses | rates))
        calibration = Calibration(**fields)
        unchanged = calibration.id == values["id"]
    except (FirmError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ModelFileError(f"its content is not that of a calibration ({_line(error)}); {AGAIN}") from error
    if not unchanged:
        raise ModelFileError(f"it was damaged or edited after it was written; {AGAIN}")
    return calibration


def write_calibration(path: Path | str, calibration: Calibration) -> None:
    """Write JSON atomically."""
    write_atomically(Path(path), (json.dumps(to_json(calibration), indent=2) + "\n").encode())


def read_calibration(path: Path | str, *, model: str) -> Calibration:
    """Read the calibration of a model; refuses a damaged, edited or foreign one."""
    try:
        calibration = from_json(json.loads(read_file(Path(path))))
    except FileNotFoundError:
        raise ModelFileError(f"there is no file {named(path)}; {AGAIN}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{named(path)} cannot be read as JSON ({_line(error)}); {AGAIN}") from None
    except FirmError as error:
        raise ModelFileError(f"the calibration {named(path)} cannot be used: {error}") from None
    if calibration.model != model:
        other = f"belongs to model {named(calibration.model)}, not to {model}"
        raise ModelFileError(f"the calibration {named(path)} {other}; {AGAIN} or remove it")
    return calibration


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
