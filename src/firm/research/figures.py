"""The figures of the paper and our own: what each shows, and how it is drawn from run records or from nothing.

`FIGURES` names them all. Colours are Okabe and Ito's; a band is mean ± sample deviation over seeds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from firm.report.sheets import save_figure
from firm.research.anomalies import draw_gallery
from firm.research.cell_text import CURVE, curve_of
from firm.research.experiment import Record
from firm.research.landscape import draw_landscape
from firm.research.mechanism import COLOURS, LABELS, PROPERTIES, draw_mechanism
from firm.research.published import of_class
from firm.research.tables import TABLES, Table, stored_runs
from firm.runtime.listener import Listener

PALETTE = (*COLOURS.values(), "#E69F00", "#56B4E9", "#000000", "#999999")
SWEEPS = {"temperature": "temperature τ", "batch-size": "batch size"}
NORMS = {"without norm": "s_con k=1", "with norm": "s_con* k=1"}  # the starred scores multiply by the norm (Equation 7)
PEAKS = {("temperature", "without norm"): "0.2", ("temperature", "with norm"): "0.4"}  # appendix B, in words only

Curves = npt.NDArray[np.float64]  # seeds x points
BySeed = dict[int, list[dict[str, Record]]]  # seed -> for every class the record of each row


@dataclass(frozen=True)
class Picture:
    """A figure. `draw(out, scale=, seeds=, folder=, listener=)` writes into the folder `out` and returns the files."""

    title: str
    why: str  # what to look for
    draw: Callable[..., list[Path]]  # no file where it needs runs and there are none
    tables: tuple[str, ...] = ()  # whose runs it shows

    @property
    def needs(self) -> str:
        return f"runs of {' and '.join(f'`{name}`' for name in self.tables)}" if self.tables else ""


def draw_curves(table: Table, scale: str, seeds: list[int], folder: Path, path: Path) -> None:
    """Write AUROC over the steps of semantic trainings, or over the CPU minutes of those on patches, as a PNG."""
    semantic = table.protocol == "semantic"
    figure = Figure(figsize=(max(5.5, 3.6 * len(table.data)), 3.6), layout="constrained")
    axes = figure.subplots(1, len(table.data), squeeze=False)
    for place, (data, rows) in zip(axes[0], stored_runs(table, scale, seeds, folder).items(), strict=True):
        for number, (row, runs) in enumerate(rows.items()):
            curves = [_curve(run, semantic) for run in runs]
            if curves:
                x, y = (np.array(values, np.float64) for values in zip(*curves, strict=True))
                _band(place, x.mean(0), y, COLOURS.get(row, PALETTE[number % len(PALETTE)]), row)
        place.set_title(data, fontsize=9)
        place.set_xlabel("steps" if semantic else "CPU minutes of training, one thread", fontsize=8)
    axes[0][0].set_ylabel(f"AUROC %, {CURVE}" if semantic else "image AUROC %", fontsize=8)
    _finish(figure, f"{table.title}, scale {scale}", path)


def _curve(run: Record, semantic: bool) -> tuple[list[float], list[float]]:
    if semantic:
        return [probe["step"] for probe in run["probes"]], [100 * value for value in curve_of(run)]
    last = next(iter(run["final"].values()))["overall"]["auroc"]["value"]
    minutes = [probe["seconds"] / 60 for probe in run["probes"]] + [run["training_seconds"] / 60]
    return minutes, [100 * probe["auroc"] for probe in run["probes"]] + [100 * last]


def _band(place: Axes, x: Sequence[Any] | Curves, curves: Curves, colour: str, label: str) -> None:
    """The mean of the curves, and around it their deviation if there are several."""
    mean = curves.mean(0)
    place.plot(x, mean, color=colour, linewidth=1.4, marker="o", markersize=2.5, label=label)
    if len(curves) > 1:
        spread = curves.std(0, ddof=1)
        place.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.18, linewidth=0)


def _finish(figure: Figure, title: str, path: Path) -> None:
    """One legend of all that any of the axes shows, a title, and the file."""
    shown = dict[str, Any]()
    for place in figure.axes:
        place.tick_params(labelsize=7)
        place.grid(alpha=0.3)
        for handle, name in zip(*place.get_legend_handles_labels(), strict=True):
            shown.setdefault(name, handle)
    if shown:
        names, handles = list(shown), [*shown.values()]
        fitting = int(figure.get_figwidth() / (0.6 + 0.07 * max(map(len, names))))  # columns, by inches
        columns = max(1, min(len(names), 6, fitting))
        figure.legend(handles, names, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)


def _by_set(table: Table, scale: str, seeds: list[int], folder: Path) -> dict[str, BySeed]:
    """For every data set and seed its classes, as far as each row that has run at all has run on them."""
    records, grouped = stored_runs(table, scale, seeds, folder), dict[str, BySeed]()
    rows = [row for row in trained(table) if any(of_data.get(row) for of_data in records.values())]
    for (data, of_data), seed in product(records.items(), seeds):
        runs = {row: run for row in rows for run in of_data.get(row, []) if run["experiment"]["seed"] == seed}
        if rows and len(runs) == len(rows):
            grouped.setdefault(data.partition(":")[0], {}).setdefault(seed, []).append(runs)
    return grouped


def trained(table: Table) -> list[str]:
    """The rows that are no floors."""
    return [name for name, row in table.rows.items() if not row.floor]


def _means(by_seed: BySeed, value: Callable[[dict[str, Record]], Any]) -> Curves:
    """For every seed the mean over the classes whose records hold the value; nan where none does."""
    values = (np.ma.masked_invalid([value(runs) for runs in classes]).mean(axis=0) for classes in by_seed.values())
    return np.array([np.ma.filled(of_seed, np.nan) for of_seed in values], np.float64)


def draw_probes(
    out: Path, *, name: str, measures: dict[str, str], scale: str, seeds: list[int], folder: Path, listener: Listener
) -> list[Path]:
    """Measures over the epochs of the four objectives, a column per data set, each the mean over its classes."""
    grouped, path = _by_set(TABLES["objectives"], scale, seeds, folder), out / f"{name}.png"
    if not grouped:
        return []
    figure = Figure(figsize=(max(6.0, 4.2 * len(grouped)), 0.9 + 2.5 * len(measures)), layout="constrained")
    axes = figure.subplots(len(measures), len(grouped), squeeze=False, sharex="col")
    for column, (data, by_seed) in zip(axes.T, grouped.items(), strict=True):
        classes = max(map(len, by_seed.values()))
        column[0].set_title(f"{data}, classes: {classes}, seeds: {len(by_seed)}", fontsize=9)
        column[-1].set_xlabel("epochs", fontsize=8)
        for place, (measure, label) in zip(column, measures.items(), strict=True):
            place.set_ylabel(label, fontsize=8)
            for row in LABELS:
                _draw_row(place, by_seed, row, measure)
    _finish(figure, f"{TABLES['objectives'].title}, scale {scale}", path)
    return [path]


def _draw_row(place: Axes, by_seed: BySeed, row: str, measure: str) -> None:
    """A curve, or where records hold a property of the last batch alone, a marker at the end."""
    every = [runs[row] for classes in by_seed.values() for runs in classes if row in runs]
    if not every:
        return
    epochs = every[0]["recipe"]["training"]["epochs"]
    x = [probe["step"] / every[0]["steps"] * epochs for probe in every[0]["probes"]]
    if measure == "auroc":
        curves = _means(by_seed, lambda runs: [100 * value for value in curve_of(runs[row])])
    elif all("properties" in probe for run in every for probe in run["probes"]):
        curves = _means(by_seed, lambda runs: [_number(p["properties"][measure]) for p in runs[row]["probes"]])
    else:
        ends = _means(by_seed, lambda runs: _number((runs[row]["diagnostics"] or {}).get(measure)))
        error = {"yerr": ends.std(ddof=1)} if len(ends) > 1 else {}
        side_by_side = epochs * (1 + 0.02 * list(LABELS).index(row))
        place.errorbar(side_by_side, ends.mean(), color=COLOURS[row], fmt="o", markersize=5, capsize=3, **error)
        return
    _band(place, x, curves, COLOURS[row], LABELS[row])


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _finals(runs: dict[str, Record], score: str) -> list[float]:
    return [100 * run["final"][score]["value"] for run in runs.values()]


def _of(data: str, by_seed: BySeed) -> BySeed:
    """The runs on one class; a seed that has none is left out."""
    own = {
        seed: [runs for runs in classes if next(iter(runs.values()))["experiment"]["data"] == data]
        for seed, classes in by_seed.items()
    }
    return {seed: classes for seed, classes in own.items() if classes}


def draw_sweeps(out: Path, *, scale: str, seeds: list[int], folder: Path, listener: Listener) -> list[Path]:
    """AUROC of FIRM over temperature and batch size, scored without and with the norm of the embedding."""
    figure, path = Figure(figsize=(13, 3.7), layout="constrained"), out / "temperature-batch-size.png"
    axes = figure.subplots(1, len(SWEEPS) * len(NORMS))
    found = {sweep: list(_by_set(TABLES[sweep], scale, seeds, folder).values()) for sweep in SWEEPS}
    swept = [runs for sets in found.values() for by_seed in sets for several in by_seed.values() for runs in several]
    if max(map(len, swept), default=0) < 2:  # runs that other tables have made are no sweep
        return []
    classes = list(dict.fromkeys(run["experiment"]["data"] for runs in swept for run in runs.values()))
    colours = dict(zip(classes, PALETTE, strict=False))
    for place, letter, (sweep, norm) in zip(axes, "abcd", product(SWEEPS, NORMS), strict=True):
        ticks = trained(TABLES[sweep])
        for data, by_seed in ((data, _of(data, by_seed)) for by_seed in found[sweep] for data in classes):
            if by_seed:
                at = [ticks.index(row) for row in next(iter(by_seed.values()))[0]]
                curves = _means(by_seed, partial(_finals, score=NORMS[norm]))
                _band(place, at, curves, colours[data], f"{data} (paper at its settings {of_class()['firm', data][0]})")
        if (sweep, norm) in PEAKS:
            place.axvline(ticks.index(PEAKS[sweep, norm]), color="black", linestyle="dotted", label="the paper's best")
        place.set_title(f"({letter}) {SWEEPS[sweep]}, {norm}", fontsize=9)
        place.set_xticks(range(len(ticks)), ticks)
    axes[0].set_ylabel("AUROC %, k=1", fontsize=8)
    _finish(figure, f"FIRM on {', '.join(classes)}, scale {scale}", path)
    return [path]


AUROC = {"auroc": f"AUROC %, {CURVE}"}
FIGURES: dict[str, Picture] = {
    "mechanism": Picture(
        "The mechanism in seconds",
        "Four positive sets on a Gaussian mixture; in brackets, how many seeds have a property (above 0.5). On the "
        "sphere in 32 dimensions, after 600 steps, FIRM has all three with every seed at every noise; SupCon loses the "
        "spread of outliers, NT-Xent the compactness of inliers and with it the margin, Rot-SupCon the spread within a "
        "kind. What does not show: with little noise every set finds all anomalies, and FIRM is hardly above the raw "
        "inputs, if at all. The circle has little room: there NT-Xent may be compact by chance, SupCon may collapse to "
        "a point and, with the least noise, finds more anomalies than FIRM.",
        draw_mechanism,
    ),
    "landscape": Picture(
        "Loss landscape of three positive sets",
        "Equation 5 over the arcs that inliers and outliers take on the circle. The minimum of NT-Xent spreads both, "
        "that of SupCon collapses both, that of FIRM has inliers at a point and outliers spread away from it. The "
        "paper does not say what the axes of its figure are; these are ours.",
        draw_landscape,
    ),
    "learning-curves": Picture(
        "Learning curves",
        "Mean AUROC over the classes of a data set, with a band of one deviation over seeds.",
        partial(draw_probes, name="learning-curves", measures=AUROC),
        ("objectives",),
    ),
    "positive-sets": Picture(
        "Effect of the positive set over epochs",
        "AUROC above the three properties; a marker at the end where a record holds those of its last batch alone.",
        partial(draw_probes, name="positive-sets", measures=AUROC | PROPERTIES),
        ("objectives",),
    ),
    "temperature-batch-size": Picture(
        "Temperature and batch size, without and with norm",
        "The paper finds the best temperature at 0.2 without and at 0.4 with the norm, and small batches better.",
        draw_sweeps,
        ("temperature", "batch-size"),
    ),
    "gallery": Picture(
        "Anomalies of test sets and synthetic ones",
        "Anomalies of one product differ as much as synthetic ones of different sources: they are no single class. "
        "Photographs are shown where FIRM_DATA holds them.",
        draw_gallery,
    ),
}
