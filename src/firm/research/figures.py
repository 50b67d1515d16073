"""Learning curves of a table as a picture: one panel per data set, one colour per row, one thin line per seed."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from firm.research.experiment import Record
from firm.research.pages import CURVE, curve_of
from firm.research.tables import Table, stored_runs


def draw_curves(table: Table, scale: str, seeds: list[int], folder: Path, path: Path) -> None:
    """Write AUROC over the steps of semantic trainings, or over the CPU minutes of those on patches, as a PNG."""
    semantic = table.protocol == "semantic"
    figure = Figure(figsize=(max(5.5, 3.6 * len(table.data)), 3.4))
    axes = figure.subplots(1, len(table.data), squeeze=False)
    for place, (data, rows) in zip(axes[0], stored_runs(table, scale, seeds, folder).items(), strict=True):
        for number, (row, runs) in enumerate(rows.items()):
            curves = [_curve(run, semantic) for run in runs]
            for x, y in curves:
                place.plot(x, y, color=f"C{number}", linewidth=0.7, alpha=0.4)
            if curves:
                x, y = (np.mean(values, axis=0) for values in zip(*curves, strict=True))
                place.plot(x, y, color=f"C{number}", marker=None if semantic else "o", markersize=3, label=row)
        place.set_title(data, fontsize=9)
        place.set_xlabel("steps" if semantic else "CPU minutes of training, one thread", fontsize=8)
        place.tick_params(labelsize=7)
        place.grid(alpha=0.3)
    axes[0][0].set_ylabel(f"AUROC %, {CURVE}" if semantic else "image AUROC %", fontsize=8)
    if axes[0][0].get_legend_handles_labels()[0]:
        axes[0][0].legend(fontsize=7)
    figure.suptitle(f"{table.title}, scale `{scale}`", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def _curve(run: Record, semantic: bool) -> tuple[list[float], list[float]]:
    if semantic:
        return [probe["step"] for probe in run["probes"]], [100 * value for value in curve_of(run)]
    last = next(iter(run["final"].values()))["overall"]["auroc"]["value"]
    minutes = [probe["seconds"] / 60 for probe in run["probes"]] + [run["training_seconds"] / 60]
    return minutes, [100 * probe["auroc"] for probe in run["probes"]] + [100 * last]
