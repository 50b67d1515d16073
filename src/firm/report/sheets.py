"""A picture of inspected parts: each with its score and verdict, and all scores against the threshold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file is written, no window opened
import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from firm.report.heat import overlay

CALLED, PASSED = "#c0392b", "#1e8449"


@dataclass(frozen=True)
class Inspected:
    """One part on the tray; `truth` is what is really wrong with it, None if nothing, "" if unknown."""

    image: npt.NDArray[np.uint8]
    score: float
    truth: str | None = ""
    heat: npt.NDArray[np.float32] | None = None  # a score per pixel, for a detector that says where
    name: str = ""  # by which a person finds the file


def draw_tray(parts: list[Inspected], threshold: float, path: Path, *, title: str, columns: int = 8) -> None:
    """Write the tray as a PNG: frames are red where the detector calls a defect, heat maps stand below the parts."""
    rows = -(-len(parts) // columns)
    tall = 3.5 if any(part.heat is not None for part in parts) else 1.95
    figure = plt.figure(figsize=(1.55 * columns, tall * rows + 2.2), layout="constrained")
    figure.suptitle(title)
    grid = figure.add_gridspec(rows + 1, columns, height_ratios=[tall] * rows + [1.95])
    for number, part in enumerate(parts):
        _part(figure.add_subplot(grid[number // columns, number % columns]), part, threshold)
    _strip(figure.add_subplot(grid[rows, :]), parts, threshold)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _part(place: Axes, part: Inspected, threshold: float) -> None:
    colour = CALLED if part.score > threshold else PASSED
    place.axis("off")
    shown = part.image
    if part.heat is not None:
        shown = np.vstack([part.image, overlay(part.image, part.heat, threshold)])
    place.imshow(shown)
    height, width = shown.shape[:2]
    place.add_patch(Rectangle((-1, -1), width + 1, height + 1, fill=False, edgecolor=colour, linewidth=4))
    truth = "good" if part.truth is None else part.truth
    place.set_title(f"{part.score:.3f}  {truth}".strip(), fontsize=8, color=colour)
    place.text(0.5, -0.02, part.name, fontsize=6, ha="center", va="top", parse_math=False, transform=place.transAxes)


def _strip(place: Axes, parts: list[Inspected], threshold: float) -> None:
    """Every score as a tick, good and bad apart; what lies right of the line is called."""
    for level, (name, colour, chosen) in enumerate(
        [
            ("bad", CALLED, [part.score for part in parts if part.truth]),
            ("good", PASSED, [part.score for part in parts if part.truth is None]),
        ]
    ):
        place.plot(chosen, [level] * len(chosen), "|", markersize=22, markeredgewidth=2, color=colour, label=name)
    place.axvline(threshold, color="black", linestyle="--", linewidth=1)
    place.text(threshold, 1.45, " threshold", fontsize=8)
    place.set_yticks([0, 1], ["bad", "good"])
    place.set_ylim(-0.6, 1.8)
    place.set_xlabel("anomaly score (higher = more anomalous)")
