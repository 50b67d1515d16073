"""Learning curves of a table as a picture: one panel per data set, one line per row, the seeds behind it."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file is written, no window opened
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from firm.recipes.tables import Table
from firm.report.tables import CURVE, SCALE_TITLE, Found, curve_of, found_runs


def draw_curves(table: Table, scale: str, seeds: list[int], folder: Path, path: Path) -> None:
    """Write the AUROC at every probe as a PNG; the title carries the scale."""
    figure, axes = plt.subplots(1, len(table.data), figsize=(3.6 * len(table.data), 3.2), squeeze=False)
    for place, data in zip(axes[0], table.data, strict=True):
        _panel(place, data, found_runs(table, data, scale, seeds, folder))
    axes[0][0].set_ylabel(f"AUROC %, {CURVE}")
    axes[0][0].legend(fontsize=7)
    figure.suptitle(f"{table.title}: {SCALE_TITLE[scale]}", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _panel(place: Axes, data: str, found: Found) -> None:
    for number, (name, runs) in enumerate(found.items()):
        if not runs:
            continue
        steps = [probe["step"] for probe in runs[0]["probes"]]
        curves = 100 * np.array([curve_of(run) for run in runs])  # seeds, probes
        place.plot(steps, curves.T, color=f"C{number}", linewidth=0.7, alpha=0.4)
        place.plot(steps, curves.mean(axis=0), color=f"C{number}", linewidth=2, label=name)
    place.set_title(data, fontsize=9)
    place.set_xlabel("steps", fontsize=8)
    place.tick_params(labelsize=7)
    place.grid(alpha=0.3)
