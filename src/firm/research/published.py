"""The paper's tables beside our runs: what each printed cell measures, and the same measured here.

published.json holds the tables as printed; `headers` in tables.json says what the names of their rows and columns mean.
A name that means nothing there is a method that is not here yet, so its cells show the published number only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from operator import itemgetter
from statistics import fmean
from typing import Any

from firm.metrics.image import aulc
from firm.research.blocks import Block, Grid
from firm.research.cell_text import curve_of, spread_text
from firm.research.experiment import Record
from firm.research.runner import is_outdated
from firm.research.tables import TABLES, Table, expanded, extended, stored

Records = Mapping[str, Mapping[str, list[Record]]]  # by data set and row, one for each seed
Names = Sequence[str]
Cell = float | str | list[float] | None  # a number, a percentage as text, [mean, deviation], or a dash
LOWEST = "lowest"
FLOOR = "floor: "
NEIGHBOUR_SCORES = ("s_con", "s_con*", "s_shift", "s_shift*", "s_ens", "s_ens*")


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a printed cell measures: of which row, on which data sets, by which score; no row: a method not here."""

    row: str = ""
    data: Sequence[str] = ()
    score: str = "s_con"
    k: int = 1
    measure: str = "auroc"  # or aulc, pixel_auroc
    over: Mapping[str, Any] | None = None  # the percentage by which it exceeds the same cell with this changed

    @property
    def scoring(self) -> str:
        """The name of the score in a record."""
        return f"{self.score} k={self.k}" if self.score in NEIGHBOUR_SCORES else self.score


@dataclass(frozen=True)
class Ours:
    """Values by seed, each the mean over the data sets that have run; † marks runs of other code."""

    values: dict[int, float]
    ran: int
    asked: int
    outdated: bool

    @property
    def mean(self) -> float:
        return fmean(self.values.values())

    def __str__(self) -> str:
        ran = "" if self.ran == self.asked else f" ({self.ran} of {self.asked})"
        return spread_text([*self.values.values()]) + ran + " †" * self.outdated


def printed(name: str) -> dict[str, Any]:
    """A table as the paper prints it: label, caption, columns, rows, cells."""
    return dict(stored("published")[name])


def sources(table: Table, name: str, rows: Sequence[Names], columns: Sequence[Names]) -> list[list[Source]]:
    """What each cell of a printed table measures."""
    how, content = table.published[name], stored("tables")
    headers = extended(content["headers"], content["shared"]) | how.get("headers", {})

    def meaning(names: Names) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for part in names:
            if part.startswith(FLOOR):
                merged |= {"row": part.removeprefix(FLOOR)}
            elif part.isdigit():
                merged |= {"data": [table.data[int(part)]]}
            else:
                merged |= headers.get(part, {})
        return merged | ({"data": expanded(merged["data"])} if "data" in merged else {})

    start = {"k": how.get("k", 1), "data": table.data}
    return [[Source(**(start | meaning(column) | meaning(row))) for column in columns] for row in rows]


def printed_blocks(table: Table, name: str, records: Records) -> list[Block]:
    """The table as printed, and under each row ours: the last checkpoint, the best on the test set, the difference.

    Floors are further rows, or further columns where the methods are columns.
    """
    content = printed(name)
    across = any("row" in stored("tables")["headers"].get(parts[0], {}) for parts in content["columns"])
    under = dict.fromkeys(tuple(parts[1:]) for parts in content["columns"]) if across else [()]
    floors: list[Names] = [[FLOOR + row, *parts] for row, how in table.rows.items() if how.floor for parts in under]
    rows = [*content["rows"], *([] if across else floors)]
    columns = [*content["columns"], *(floors if across else [])]
    cells = [[*line, *[None] * (len(columns) - len(line))] for line in content["cells"]]
    cells += [[None] * len(columns) for _ in rows[len(cells) :]]
    wanted = sources(table, name, rows, columns)
    ours = {how: _ours(wanted, len(content["rows"]), records, how) for how in ("last", "best")}
    lines = list[list[str]]()
    for row, line, last, best in zip(rows, cells, ours["last"], ours["best"], strict=True):
        less = [_less(mine, cell) for mine, cell in zip(last, line, strict=True)]
        lines += [] if row in floors else [[" ".join(row), "paper", *map(cell_text, line)]]
        for how, found in (("ours, last", last), ("ours, best", best), ("last - paper", less)):
            lines += [[" ".join(row), how, *(str(each or "-") for each in found)]] if any(found) else []
    head = ["", "", *(" ".join(parts) for parts in columns)]
    return [f"### {name}, `{content['label']}` of the paper", content["caption"], Grid(head, lines)]


def cell_text(cell: Cell) -> str:
    """A published number as it is printed."""
    if cell is None:
        return "-"
    return f"{cell[0]} ± {cell[1]}" if isinstance(cell, list) else str(cell)


@cache
def of_class() -> dict[tuple[str, str], tuple[float, int]]:
    """Row and class -> the paper's s_con in % and its k, of the tables by class; the smallest k if there are two."""
    found: dict[tuple[str, str], tuple[float, int]] = {}
    for table in (table for table in TABLES.values() if table.protocol == "semantic"):
        for name in table.published:
            content = printed(name)
            wanted = sources(table, name, content["rows"], content["columns"])
            for cell, source in zip(chain(*content["cells"]), chain(*wanted), strict=True):
                plain = source.score == "s_con" and source.measure == "auroc" and source.over is None
                if plain and source.row and len(source.data) == 1 and isinstance(cell, list):
                    what = source.row, source.data[0]
                    found[what] = min(found.get(what, (cell[0], source.k)), (cell[0], source.k), key=itemgetter(1))
    return found


def of_product(data: str) -> str:
    """The paper's image / pixel AUROC of every method on a category of MVTec-AD; empty for other products."""
    content, table = printed("mvtec"), TABLES["mvtec"]
    for cells, line in zip(content["cells"], sources(table, "mvtec", content["rows"], content["columns"]), strict=True):
        if list(line[0].data) == [data]:
            values = [cell[0] if isinstance(cell, list) else cell for cell in cells]
            names = [parts[0] for parts in content["columns"]]
            return ", ".join(
                f"{names[at]} {cell_text(values[at])} / {cell_text(values[at + 1])}" for at in range(0, len(names), 2)
            )
    return ""


def _ours(
    wanted: Sequence[Sequence[Source]], methods: int, records: Records, how: str
) -> list[list[Ours | str | None]]:
    """Every cell measured here, a percentage as text; the rows after the methods are floors."""

    def shown(source: Source, column: int) -> Ours | str | None:
        mine = measured(source, records, how)
        if mine is None or source.over is None:
            return mine
        lowest = source.over.get("row") == LOWEST
        rivals = [line[column] for line in wanted[:methods]] if lowest else [replace(source, **source.over)]
        data, means = _compared([source, *rivals], records, how)
        if len(means) < 2:
            return None
        mean, *others = means
        if lowest and min(others) == mean:  # as the paper prints the lowest itself
            return str(mine)
        ran = "" if len(data) == len(source.data) else f" ({len(data)} of {len(source.data)})"
        return f"{100 * (mean / min(others) - 1):+.1f}%{ran}"

    return [[shown(source, column) for column, source in enumerate(line)] for line in wanted]


def _compared(cells: Sequence[Source], records: Records, how: str) -> tuple[list[str], list[float]]:
    """The data sets that all cells with runs have run, and the mean of each on these and on the seeds that all have."""
    ran = [cell for cell in cells if measured(cell, records, how)]
    data = [name for name in cells[0].data if all(measured(replace(each, data=[name]), records, how) for each in ran)]
    found = [ours for each in ran if (ours := measured(replace(each, data=data), records, how))]
    seeds = set.intersection(*(set(ours.values) for ours in found)) if found else ()
    return data, [fmean(ours.values[seed] for seed in seeds) for ours in found] if seeds else []


def measured(source: Source, records: Records, how: str = "last") -> Ours | None:
    """The values of our runs, on the data sets and seeds that all have run; `how` is last or best."""
    values: dict[str, dict[int, float]] = {}
    outdated = False
    for data in source.data:
        for run in records.get(data, {}).get(source.row, []):
            value = _value(source, run, how)
            if value is not None:
                values.setdefault(data, {})[run["experiment"]["seed"]] = value
                outdated |= is_outdated(run)
    if not values:
        return None
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in values.values())))
    means = {seed: fmean(by_seed[seed] for by_seed in values.values()) for seed in seeds}
    unlike = {} if means else {-1: fmean(fmean(by_seed.values()) for by_seed in values.values())}  # no seed has run all
    return Ours(means or unlike, len(values), len(source.data), outdated)


def _value(source: Source, run: Record, how: str) -> float | None:
    if run["experiment"]["protocol"] != "semantic":
        if how == "best":
            return best_of(run, next(iter(run["final"])), source.measure)
        overall = next(iter(run["final"].values()))["overall"]
        measures = overall if source.measure == "auroc" else overall["localisation"] or {}
        return float(measures[source.measure]["value"]) if source.measure in measures else None
    curve = curve_of(run, source.scoring)
    if source.measure == "aulc":
        return aulc(curve) if curve and how == "last" else None
    if how == "best":
        return max(curve, default=None)
    plain = replace(source, score="s_con") if run["recipe"]["features"] == "pixels" else source  # they have no views
    return run["final"].get(source.scoring, run["final"].get(plain.scoring, {})).get("value")


def best_of(run: Record, way: str, measure: str = "auroc") -> float | None:
    """The best probe of a training on patches, its end among them; None without probes, and of a further variant."""
    probed = [probe[measure] for probe in run["probes"] if measure in probe]
    if not probed or way != next(iter(run["final"])):
        return None
    return max(*probed, _value(Source(measure=measure), run, "last") or 0.0)


def _less(mine: object, cell: Cell) -> str | None:
    """Ours minus the paper's, where all data sets have run."""
    if not isinstance(mine, Ours) or mine.ran < mine.asked or cell is None or isinstance(cell, str):
        return None
    return f"{100 * mine.mean - (cell[0] if isinstance(cell, list) else cell):+.1f}"
