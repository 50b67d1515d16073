"""The page and the picture of decisions from few good images."""

from collections import Counter
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from firm.report.sheets import save_figure
from firm.research.blocks import Block, Grid
from firm.research.cell_text import Runs, label, spread_text
from firm.research.tables import Table, chosen, stored_runs

VERDICTS = ("PASS", "REVIEW", "FAIL")
WAYS = {"split": "#D55E00", "folds": "#0072B2"}  # of calibrating, and their colours
HEAD = (
    "good images", "thresholds by", "subsets", "defects that PASS", "in REVIEW", "FAIL", "PASS, ideal threshold",
    "good in REVIEW", "stated", "good that FAIL", "stated", "drift", "image AUROC",
)  # fmt: skip
ALL = "all products"


def few_blocks(table: Table, by_data: dict[str, dict[str, Runs]]) -> list[Block]:
    """Verdicts by number of good images, summed over seeds, for both ways of calibrating; floors by themselves."""
    together = {row: [run for rows in by_data.values() for run in rows.get(row, [])] for row in table.rows}
    blocks = list[Block]()
    for data, rows in {**({ALL: together} if len(by_data) > 1 else {}), **by_data}.items():
        trained = [run for row, runs in rows.items() if not table.rows[row].floor for run in runs]
        shown = {"": trained} | {f"{row}, ": runs for row, runs in rows.items() if table.rows[row].floor}
        sizes = sorted({size for runs in shown.values() for run in runs for size in run["final"]}, key=int)
        lines = [
            [size, label(f"{row}{way}", runs), *_cells(runs, size, way)]
            for size in sizes
            for row, runs in shown.items()
            for way in WAYS
            if any(size in run["final"] for run in runs)
        ]
        blocks += [f"### {data}", Grid(HEAD, lines) if lines else "Not run yet."]
    return blocks


def _cells(runs: Runs, size: str, way: str) -> list[str]:
    shares = _shares(runs, size, way)
    found = [run["final"][size][way] for run in runs if size in run["final"]]
    drifted = sum(bool(judged["drift"]) for judged in found)
    percent = [
        *(shares["defects", verdict] for verdict in VERDICTS),
        shares["defects", "ideal"],
        *(shares[side, verdict] for verdict in VERDICTS[1:] for side in ("good", "stated")),
    ]
    return [
        str(len(found)),
        *(f"{value:.1f} %" for value in percent),
        f"{drifted} of {len(found)}",
        spread_text([judged["auroc"] for judged in found]),
    ]


def _shares(runs: Runs, size: str, way: str) -> dict[tuple[str, str], float]:
    """Verdicts on good parts and on defects in %, what was stated of good parts, and what an ideal threshold passes."""
    found = [run["final"][size][way] for run in runs if size in run["final"]]
    shares = dict[tuple[str, str], float]()
    for side in ("good", "defects"):
        counts = sum((Counter(judged[side]) for judged in found), Counter[str]())
        shares |= {(side, verdict): 100 * counts[verdict] / counts.total() for verdict in VERDICTS}
    defects = sum(sum(judged["defects"].values()) for judged in found)
    shares["defects", "ideal"] = 100 * sum(judged["ideal_passes"] for judged in found) / defects
    stated = {name: sum(judged["stated"][name] for judged in found) / len(found) for name in ("review", "fail")}
    return shares | {
        ("stated", "REVIEW"): 100 * (stated["review"] - stated["fail"]),
        ("stated", "FAIL"): 100 * stated["fail"],
    }


def draw_few(table: Table, scale: str, seeds: list[int], folder: Path, path: Path) -> None:
    """Over the number of good images: defects that PASS, good parts in REVIEW and good parts that FAIL, by product."""
    by_data = stored_runs(table, scale, seeds, folder)
    every = {data: [run for runs in by_data[data].values() for run in runs] for data in chosen(table)}
    every = {data: runs for data, runs in every.items() if runs}
    figure = Figure(figsize=(2 + 2.4 * len(every), 6.4), layout="constrained")
    axes = figure.subplots(3, len(every), squeeze=False, sharex=True, sharey="row")
    for column, (data, runs) in zip(axes.T, every.items(), strict=True):
        sizes = sorted({size for run in runs for size in run["final"]}, key=int)
        column[0].set_title(data, fontsize=9)
        for way, colour in WAYS.items():
            by_size = [_shares(runs, size, way) for size in sizes]
            _line(column[0], sizes, by_size, ("defects", "PASS"), color=colour, label=way)
            if way == "folds":
                _line(column[0], sizes, by_size, ("defects", "ideal"), color="black", ls=":", label="ideal threshold")
            for place, verdict in zip(column[1:], VERDICTS[1:], strict=True):
                _line(place, sizes, by_size, ("good", verdict), color=colour)
                _line(place, sizes, by_size, ("stated", verdict), color=colour, ls="--", marker="", label="stated")
        column[-1].set_xlabel("good images", fontsize=8)
        column[-1].set_xticks(range(len(sizes)), sizes)
    for place, title in zip(
        axes[:, 0], ("defects that PASS, %", "good in REVIEW, %", "good that FAIL, %"), strict=True
    ):
        place.set_ylabel(title, fontsize=8)
    for place in figure.axes:
        place.grid(alpha=0.3)
        place.tick_params(labelsize=7)
        place.set_ylim(bottom=0)
    first, second = (place.get_legend_handles_labels() for place in axes[:2, 0])
    handles, labels = [*first[0], *second[0][-1:]], [*first[1], *second[1][-1:]]
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    save_figure(figure, path)


def _line(place: Axes, sizes: list[str], by_size: list[Any], what: tuple[str, str], **style: Any) -> None:
    values = [shares[what] for shares in by_size]
    how: dict[str, Any] = {"marker": "o", "markersize": 3, "linewidth": 1.3} | style
    place.plot(range(len(sizes)), values, **how)
