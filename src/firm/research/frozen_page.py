"""The section of a page about frozen features of whole images: means over classes first, then class by class."""

from collections.abc import Iterable

from firm.metrics.image import mean_std
from firm.research.blocks import Block, Grid
from firm.research.cell_text import PROPERTIES, Runs, interval_text, label, lead_text, property_cells, spread_text
from firm.research.experiment import Record
from firm.research.published import of_class
from firm.research.tables import Table

SCORES = ("s_con k=1", "s_con k=5", "s_shift", "s_ens", "s_proto")
SHOWN = "s_con k=1"  # class by class: the score of the preset


def frozen_blocks(_table: Table, by_data: dict[str, dict[str, Runs]]) -> list[Block]:
    """For each data set the means over its classes, and the classes by the preset's score."""
    parts = list[Block]()
    for family in dict.fromkeys(name.partition(":")[0] for name in by_data):
        classes = {name: rows for name, rows in by_data.items() if name.startswith(f"{family}:") and any(rows.values())}
        if not classes:
            parts += [f"### {family}", "Not run yet."]
            continue
        names = list(next(iter(classes.values())))
        every = {row: [run for rows in classes.values() for run in rows[row]] for row in names}
        means = [
            [label(row, every[row]), *_means([rows[row] for rows in classes.values()]), _lead(row, [*classes.values()])]
            for row in names
        ]
        head = ["row", "classes", "seeds", *SCORES, "held-out (frozen)", *PROPERTIES, "CPU s per class"]
        head.append(f"FIRM minus it, {SHOWN}")
        parts += [f"### {family}", Grid(head, means), f"Class by class, {SHOWN}:"]
        lines = [[row, *(interval_text(_intervals(rows[row], SHOWN)) for rows in classes.values())] for row in names]
        for method in ("firm", "firm + OE (300K)"):
            published = [of_class().get((method, name)) for name in classes]
            if any(published):
                lines.append(
                    [f"the paper's {method}", *("-" if value is None else f"{value[0]}" for value in published)]
                )
        parts.append(Grid(["row", *(name.partition(":")[2] for name in classes)], lines))
    return parts


def _means(classes: list[Runs]) -> list[str]:
    """Cells of a row: means over the classes that have run, with their deviation over the seeds that all have."""
    done = [runs for runs in classes if runs]
    seeds = min((len(runs) for runs in done), default=0)
    scores = [_over_seeds([by for runs in done if (by := _by_seed(runs, score))]) for score in SCORES]
    held = [run["held_out"] for runs in done for run in runs if run["held_out"]]
    unseen = {kind: [_average(by[kind].values()) for by in held] for kind in ("encoder", "backbone")}
    compared = f"{_mean(unseen['encoder'])} ({_mean(unseen['backbone'])})" if held else "-"
    seconds = [sum(run["cpu_seconds"][part] for part in ("embedding", "training", "test")) for r in done for run in r]
    cost = f"{_average(seconds):.0f}" if seconds else "-"
    return [str(len(done)), str(seeds), *scores, compared, *property_cells([run for r in done for run in r]), cost]


def _lead(row: str, classes: list[dict[str, Runs]]) -> str:
    """FIRM minus the row with its interval: the mean over the classes that both have run, seed by seed."""
    if row == "firm":
        return "-"
    both = [rows for rows in classes if rows["firm"] and rows[row]]
    pairs = [(_by_seed(rows["firm"], SHOWN), _by_seed(rows[row], SHOWN)) for rows in both]
    seeds = sorted(set.intersection(*(set(firm) for firm, _ in pairs))) if pairs else []
    if any(len(other) > 1 for _, other in pairs):  # a floor has one run for every seed
        seeds = [seed for seed in seeds if all(seed in other for _, other in pairs)]
    return lead_text(
        [_average(firm[seed] - other.get(seed, next(iter(other.values()))) for firm, other in pairs) for seed in seeds]
    )


def _over_seeds(by_class: list[dict[int, float]]) -> str:
    seeds = sorted(set.intersection(*map(set, by_class))) if by_class else []
    return spread_text([_average(values[seed] for values in by_class) for seed in seeds])


def _by_seed(runs: Runs, score: str) -> dict[int, float]:
    seeds = [run["experiment"]["seed"] for run in runs if score in _final(run)]
    return dict(zip(seeds, (interval["value"] for interval in _intervals(runs, score)), strict=True))


def _intervals(runs: Runs, score: str) -> list[dict[str, float]]:
    """A score of each run that has it."""
    return [final[score] for final in map(_final, runs) if score in final]


def _final(run: Record) -> dict[str, dict[str, float]]:
    """The scores by the features that the recipe of a run scores with."""
    return dict(run["final"][run["recipe"]["features"]])


def _average(values: Iterable[float]) -> float:
    return mean_std(list(values))[0]


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{100 * _average(known):.1f}" if known else "-"
