"""Semantic runs as blocks of a page: means over the classes of a set, then every class with the paper's number."""

from collections.abc import Callable, Mapping
from itertools import combinations
from statistics import fmean

from firm.metrics.image import aulc
from firm.research.blocks import Block, Grid
from firm.research.cell_text import (
    CURVE,
    PROPERTIES,
    Runs,
    curve_of,
    firm_minus,
    interval_text,
    label,
    lead_text,
    machine_text,
    mean_text,
    property_cells,
    rival_of,
    spread_text,
)
from firm.research.experiment import Record
from firm.research.published import Ours, Records, Source, measured, of_class
from firm.research.tables import Table

SCORES = ("s_con k=1", "s_con k=5", "s_shift k=1", "s_shift k=5", "s_ens k=1", "s_ens k=5", "s_proto", "kde")


def semantic_blocks(table: Table, by_data: dict[str, dict[str, Runs]]) -> list[Block]:
    """Means over classes, then each class that has run."""
    ran = {data: rows for data, rows in by_data.items() if any(rows.values())}
    if not ran:
        return ["Not run yet."]
    runs = [run for rows in ran.values() for runs in rows.values() for run in runs]
    trained = next((run for run in runs if run["steps"]), runs[0])
    families = dict.fromkeys(data.partition(":")[0] for data in ran)
    blocks: list[Block] = [_shared_settings(table, trained, runs)]
    blocks += [block for family in families for block in _means(table, family, by_data)]
    blocks += [block for data, rows in ran.items() for block in _class(data, rows)]
    left = len(by_data) - len(ran)
    return [*blocks, f"{left} of {len(by_data)} classes have not run yet." if left else ""]


def _shared_settings(table: Table, run: Record, runs: Runs) -> str:
    """What all rows share; what they vary is left to their names."""
    varied = {path for row in table.rows.values() for path in row.changes}
    encoder, training = run["recipe"]["encoder"], run["recipe"]["training"]
    head = encoder["head"]
    settings = {
        "encoder.width": f"ResNet-18 of width {encoder['width']}, stem {encoder['stem']}",
        "encoder.head.hidden": f"head {len(head['hidden'])} x {head['hidden'][0]} + {head['out']}",
        **{f"training.{name}": f"{name} {training[name]}" for name in ("batch", "lr", "temperature", "layout")},
    }
    shared = ", ".join(text for path, text in settings.items() if path not in varied)
    epochs = {
        one["experiment"]["data"].partition(":")[0]: one["recipe"]["training"]["epochs"] for one in runs if one["steps"]
    }
    length = "".join(f", {count} epochs on {family}" for family, count in epochs.items())
    images = f"{run['test_images']} test images"
    return f"{shared}{length}; {images}. Rows share initial weights, batches and views. {machine_text(run)}"


def _means(table: Table, family: str, by_data: Records) -> list[Block]:
    """Means over the classes of a set that every trained row with runs has: floors, scores, properties."""
    classes = [data for data in by_data if data.partition(":")[0] == family]
    rows = [row for row in table.rows if any(by_data[data].get(row) for data in classes)]
    trained = [row for row in rows if not table.rows[row].floor]
    shared = [data for data in classes if all(by_data[data].get(row) for row in trained or rows)]
    if len(shared) < 2:
        return []
    head = ["row", "last s_con k=1", "last s_con k=5", "best s_con k=1", "AULC", "FIRM minus it, last k=1"]
    head += [*PROPERTIES]
    lines = []
    for row in rows:
        if not all(by_data[data].get(row) for data in shared):
            continue
        asked = [Source(row=row, data=shared, k=k) for k in (1, 5)]
        found = [measured(source, by_data) for source in asked]
        found += [measured(asked[0], by_data, "best")]
        found += [measured(Source(row=row, data=shared, measure="aulc"), by_data)]
        runs = [run for data in shared for run in by_data[data][row]]
        means = [spread_text([*ours.values.values()]) if ours else "-" for ours in found]
        lines.append([label(row, runs), *means, _lead(found[0], row, shared, by_data), *property_cells(runs)])
    return [f"### {family}, means over {len(shared)} of {len(classes)} classes", Grid(head, lines)]


def _lead(ours: Ours | None, row: str, shared: list[str], by_data: Records) -> str:
    """FIRM minus the row on the same seeds, with its interval; what has no seed of its own against every seed."""
    rival = rival_of(row, by_data[shared[0]])
    firm = measured(Source(row=rival, data=shared), by_data)
    if firm is None or ours is None or row == rival or firm.ran < len(shared):
        return "-"
    others = dict.fromkeys(firm.values, ours.mean) if row.startswith("pixels") else ours.values
    return lead_text([firm.values[seed] - others[seed] for seed in firm.values.keys() & others.keys()])


def _class(data: str, rows: dict[str, Runs]) -> list[Block]:
    head = ["row", "runs", "epochs", "steps", *(f"last {name}" for name in SCORES), "best", "AULC", *PROPERTIES]
    head += ["CPU s", "paper"]
    lines = []
    for name, runs in rows.items():
        cells = _class_cells(runs) if runs else ["0", *["-"] * (len(head) - 3)]
        paper = of_class().get((name, data))
        lines.append([label(name, runs), *cells, f"{paper[0]:.1f} (k={paper[1]})" if paper else "-"])
    less = {
        "last": _minus(rows, lambda run: float(run["final"][CURVE]["value"])),
        "AULC": _minus(rows, _aulc, curves=True),
    }
    below = [f"FIRM minus each row seed by seed, {name}: {text}" for name, text in less.items() if text]
    return [f"### {data}", Grid(head, lines), _agreement(data, rows), *below]


def _minus(rows: Mapping[str, Runs], value: Callable[[Record], float], *, curves: bool = False) -> str:
    return firm_minus({name: runs for name, runs in rows.items() if not curves or all(map(curve_of, runs))}, value)


def _class_cells(runs: Runs) -> list[str]:
    whole = [run["seconds"] for run in runs if not run["resumed"]]  # a resumed run counts only its last part
    curves = [curve for run in runs if (curve := curve_of(run))]
    return [
        str(len(runs)),
        str(runs[0]["recipe"]["training"]["epochs"]),
        str(runs[0]["steps"]),
        *[interval_text([run["final"][score] for run in runs if score in run["final"]]) for score in SCORES],
        spread_text([max(curve) for curve in curves]),
        spread_text([aulc(curve) for curve in curves]),
        *property_cells(runs),
        mean_text(whole, ".0f"),
    ]


def _agreement(data: str, rows: dict[str, Runs]) -> str:
    """How many pairs of rows stand in the paper's order."""
    paper = {name: of_class()[name, data] for name, runs in rows.items() if runs and (name, data) in of_class()}
    if len(paper) < 2:
        return ""
    k = next(iter(paper.values()))[1]
    ours = {name: fmean(run["final"][f"s_con k={k}"]["value"] for run in rows[name]) for name in paper}
    pairs = list(combinations(ours, 2))
    same = sum((ours[a] - ours[b]) * (paper[a][0] - paper[b][0]) > 0 for a, b in pairs)
    return f"By last s_con k={k}, {same} of {len(pairs)} pairs of rows stand in the paper's order."


def _aulc(run: Record) -> float:
    return aulc(curve_of(run))
