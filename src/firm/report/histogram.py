"""Scores as a drawing for a page: good calibration scores below the axis, this batch above, thresholds as lines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

WIDTH, HEIGHT, TOP, MIDDLE, DEPTH, EDGE = 960, 250, 30, 130, 90, 24
BINS = 60
REACH = 3  # so many times as far beyond the fail threshold as that lies above the least score; the rest joins the end
LEAST = 1.5  # height of a bar that holds anything


def histogram(good: Sequence[float], batch: Sequence[float], limits: tuple[float, float] | None) -> str:
    """An inline SVG; each side is in parts of its own images, so that few and many can be compared."""
    everything = [*good, *batch, *(limits or ())]
    if not everything:
        return "<p>There is no score to draw.</p>"
    low, high, cut = _span(everything, limits)
    parts = [
        f'<svg class="histogram" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="scores-said">',
        f'<title id="scores-said">{_said(good, batch, limits)}</title>',
        _bars(batch, low, high, "batch", -1),
        _bars(good, low, high, "good", 1),
        f'<path class="axis" d="M{EDGE} {MIDDLE}H{WIDTH - EDGE}"/>',
        f'<text x="{EDGE}" y="{TOP + 12}" class="batch">this batch ({len(batch)})</text>',
        f'<text x="{EDGE}" y="{MIDDLE + DEPTH}" class="good">good parts of the calibration ({len(good)})</text>',
        *_lines(limits, low, high),
        *_ticks(low, high, cut),
        "</svg>",
    ]
    return "\n".join(parts)


def counts(scores: Sequence[float], low: float, high: float) -> npt.NDArray[np.int64]:
    """How many scores fall into each bin; what lies beyond an end joins the bin there."""
    places = np.floor((np.asarray(scores, float) - low) / (high - low) * BINS)
    return np.bincount(np.clip(places, 0, BINS - 1).astype(np.int64), minlength=BINS)


def _span(everything: list[float], limits: tuple[float, float] | None) -> tuple[float, float, bool]:
    """The ends of the axis, and whether scores beyond the upper one were pulled in."""
    low, high = min(everything), max(everything)
    reach = high if limits is None else limits[1] + REACH * (limits[1] - low)
    cut = low < reach < high
    high = reach if cut else high
    room = 0.02 * (high - low) or max(abs(low), 1.0) * 0.05
    return low - room, high + room, cut


def _x(score: float, low: float, high: float) -> float:
    return EDGE + (WIDTH - 2 * EDGE) * (score - low) / (high - low)


def _bars(scores: Sequence[float], low: float, high: float, kind: str, way: int) -> str:
    if not len(scores):
        return ""
    found = counts(scores, low, high)
    step, room = (WIDTH - 2 * EDGE) / BINS, DEPTH - 20
    boxes = []
    for place in np.flatnonzero(found):
        tall = max(LEAST, room * found[place] / found.max())
        top = MIDDLE - tall if way < 0 else MIDDLE
        boxes.append(f"M{EDGE + step * place + 0.5:.1f} {top:.1f}h{step - 1:.1f}v{tall:.1f}h{1 - step:.1f}z")
    return f'<path class="bars {kind}" d="{"".join(boxes)}"/>'


def _lines(limits: tuple[float, float] | None, low: float, high: float) -> list[str]:
    """Each threshold with its name and value, on rows of their own so that close ones do not collide."""
    drawn = []
    for row, (name, limit) in enumerate(zip(("review", "fail"), limits or (), strict=False)):
        x, y = _x(limit, low, high), 14 + 16 * row
        anchor, gap = ("start", 5) if x < WIDTH / 2 else ("end", -5)
        drawn.append(f'<path class="limit {name}" d="M{x:.1f} {y - 10}V{MIDDLE + DEPTH - 12}"/>')
        drawn.append(f'<text x="{x + gap:.1f}" y="{y}" text-anchor="{anchor}" class="{name}">{name} {limit:.4g}</text>')
    return drawn


def _ticks(low: float, high: float, cut: bool) -> list[str]:
    y = HEIGHT - 8
    end = f"{high:.3g} and beyond" if cut else f"{high:.3g}"
    return [
        f'<text x="{EDGE}" y="{y}">{low:.3g}</text>',
        f'<text x="{WIDTH / 2}" y="{y}" text-anchor="middle">score (higher = more anomalous)</text>',
        f'<text x="{WIDTH - EDGE}" y="{y}" text-anchor="end">{end}</text>',
    ]


def _said(good: Sequence[float], batch: Sequence[float], limits: tuple[float, float] | None) -> str:
    """The drawing in words, for who cannot see it."""
    said = [_range("images of this batch", batch), _range("good calibration images", good)]
    if limits:
        said.append(f"review above {limits[0]:.4g}, fail above {limits[1]:.4g}")
    return "Scores: " + "; ".join(said)


def _range(what: str, scores: Sequence[float]) -> str:
    if not len(scores):
        return f"no {what}"
    return f"{len(scores)} {what} from {min(scores):.4g} to {max(scores):.4g}"
