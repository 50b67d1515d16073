"""Scores as a drawing for a page: good calibration scores below the axis, this batch above, thresholds as lines."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from firm.report.html import render

BINS = 60
BEYOND = 3  # the axis ends so many times as far above the fail threshold as that lies above the lowest score

Limits = tuple[float, float]  # review and fail


def histogram(good: Sequence[float], batch: Sequence[float], limits: Limits | None) -> Markup:
    """An inline SVG; each side is in parts of its own images, so that few and many can be compared."""
    everything = [*good, *batch, *(limits or ())]
    if not everything:
        return Markup("<p>There is no score to draw.</p>")
    low, high, cut = _span(everything, limits)
    places = [(limit - low) / (high - low) for limit in limits or ()]
    marks = list(zip(("review", "fail"), limits or (), places, strict=False))
    sides = {"batch": counts(batch, low, high), "good": counts(good, low, high)}
    bars = {side: (bins / max(1, bins.max())).tolist() for side, bins in sides.items()}
    return render("histogram.html", batch=batch, good=good, bars=bars, limits=marks, low=low, high=high, cut=cut)


def counts(scores: Sequence[float], low: float, high: float) -> npt.NDArray[np.int64]:
    """How many scores fall into each bin; what lies beyond an end is counted in the bin there."""
    return np.histogram(np.clip(scores, low, high), BINS, (low, high))[0]


def _span(everything: list[float], limits: Limits | None) -> tuple[float, float, bool]:
    """The ends of the axis, and whether scores beyond the upper one were pulled in."""
    low, high = min(everything), max(everything)
    end = high if limits is None else limits[1] + BEYOND * (limits[1] - low)
    cut = low < end < high
    high = end if cut else high
    room = 0.02 * (high - low) or max(abs(low), 1.0) * 0.05
    return low - room, high + room, cut
