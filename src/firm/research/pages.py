"""Stored results -> a Markdown page: our numbers with their scale, the paper's, and where its order holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Any

from firm.bench import results
from firm.metrics import aulc, mean_std
from firm.recipes.tables import Table, experiment

Result = dict[str, Any]
Found = dict[str, list[Result]]  # row -> its runs, one per seed
SCALE_NOTE = {
    "smoke": "**Smoke test, not a result**: it shows that the command runs.",
    "short": "**Reduced scale**, far from the paper's protocol; compare rows with each other, not with the paper.",
    "paper": "The paper's protocol.",
}
SCALE_TITLE = {"smoke": "smoke test, not a result", "short": "reduced scale", "paper": "the paper's protocol"}
CURVE = "s_con k=1"
LAST = ("s_con k=1", "s_con k=5", "s_shift k=1", "s_shift k=5", "s_ens k=1", "s_ens k=5", "s_proto", "kde")


def report(
    tables: Mapping[str, Table], scale: str, seeds: list[int], folder: Path, pictures: Mapping[str, str] | None = None
) -> str:
    """A page with every table: what was run, what came out, and where the paper's order holds.

    `pictures` names the file with each table's learning curves, beside the page.
    """
    command = f"firm bench {' '.join(tables)} --scale {scale} --seeds {len(seeds)} --threads 1 --out PAGE"
    parts = ["# Semantic benchmarks", SCALE_NOTE[scale], f"Written by `{command}`.", _legend()]
    for name, table in tables.items():
        title, *rest = _section(table, scale, seeds, folder)
        picture = [f"![learning curves]({pictures[name]})"] if pictures else []
        parts += [title, *picture, *rest]
    return "\n\n".join(parts) + "\n"


def _legend() -> str:
    return (
        "AUROC in %: mean ± sample deviation over seeds, in brackets the mean 95 % bootstrap interval over the test "
        "images. `last` is the end of training; `best` is the best probe of s_con k=1, *chosen on the test set* and "
        "therefore optimistic; AULC is the mean of that learning curve. Compactness, margin and outlier spread are "
        "cosines of the last logged training batch. The paper's numbers are s_con with the k given, most probably of "
        "the best checkpoint on the test set. CPU seconds are of the whole run, scoring included."
    )


def _section(table: Table, scale: str, seeds: list[int], folder: Path) -> list[str]:
    found = {data: found_runs(table, data, scale, seeds, folder) for data in table.data}
    runs = [run for rows in found.values() for some in rows.values() for run in some]
    head = [f"## {table.title}"]
    if runs:
        head.append(_setting(table, runs[0], seeds))
    return [*head, *(_block(data, rows) for data, rows in found.items()), *_summary(found)]


def found_runs(table: Table, data: str, scale: str, seeds: list[int], folder: Path) -> Found:
    """The stored runs of one data set, row by row."""
    plans = {name: [experiment(data, changes, scale, seed) for seed in seeds] for name, changes in table.rows.items()}
    return {name: [one for one in results(folder, todo) if one is not None] for name, todo in plans.items()}


def _setting(table: Table, one: Result, seeds: list[int]) -> str:
    """What all rows share; what the rows vary is left to their names."""
    varied = {path for changes in table.rows.values() for path in changes}
    encoder, training, origin = one["recipe"]["encoder"], one["recipe"]["training"], one["origin"]
    hidden = encoder["head"]["hidden"]
    shared = {
        "encoder.width": f"ResNet-18 of width {encoder['width']}, stem {encoder['stem']}",
        "encoder.head.hidden": f"head {len(hidden)} x {hidden[0]} + {encoder['head']['out']}",
        "training.batch": f"batch {training['batch']}",
        "training.lr": f"lr {training['lr']}",
        "training.temperature": f"temperature {training['temperature']}",
        "training.layout": f"layout {training['layout']}",
    }
    said = ", ".join(text for path, text in shared.items() if path not in varied)
    balance = ", half of them anomalous" if one["test_images"] < 10000 else ""
    return (
        f"{said}; {one['test_images']} test images{balance}; seeds {', '.join(map(str, seeds))}, each with the same "
        f"initial weights, batches and views in every row where they can be the same. torch {origin['torch']}, "
        f"{origin['machine']}, {origin['device']}, {origin['threads']} thread(s)."
    )


def _block(data: str, found: Found) -> str:
    head = ["row", "runs", "epochs", "steps", *(f"last {name}" for name in LAST), "best", "AULC"]
    head += ["compactness", "margin", "outlier spread", "CPU s", "paper"]
    lines = [f"### {data}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, runs in found.items():
        cells = _line(data, name, runs) if runs else [name, "0", *["-"] * (len(head) - 2)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, *_orders(data, found), *_paired(found)])


def _line(data: str, name: str, runs: list[Result]) -> list[str]:
    collapsed = " (collapsed)" if any(run["diagnostics"] and run["diagnostics"]["collapsed"] for run in runs) else ""
    return [
        name + collapsed,
        str(len(runs)),
        str(runs[0]["recipe"]["training"]["epochs"]),
        str(runs[0]["steps"]),
        *[_interval([run["final"][score] for run in runs]) for score in LAST],
        _spread([max(curve_of(run)) for run in runs]),
        _spread([aulc(curve_of(run)) for run in runs]),
        *[_plain(runs, key) for key in ("compactness", "margin", "outlier_spread")],
        _seconds(runs),
        _published_cell(data, name),
    ]


def _orders(data: str, found: Found) -> list[str]:
    """The rows by rising AUROC, here and in the paper, and how many pairs stand in the same order."""
    k, numbers = published(data)
    rows = {name: runs for name, runs in found.items() if runs and name in numbers}
    if len(rows) < 2:
        return []
    paper = {name: numbers[name] for name in rows}
    last = {name: mean_std([run["final"][f"s_con k={k}"]["value"] for run in runs])[0] for name, runs in rows.items()}
    area = {name: mean_std([aulc(curve_of(run)) for run in runs])[0] for name, runs in rows.items()}
    return [
        "",
        f"Rising AUROC in the paper (k={k}): {_rising(paper)}. "
        f"Here by last: {_rising(last)} ({_agreement(last, paper)}); "
        f"by AULC: {_rising(area)} ({_agreement(area, paper)}).",
    ]


def _agreement(ours: dict[str, float], paper: dict[str, float]) -> str:
    pairs = list(combinations(paper, 2))
    same = sum((ours[a] - ours[b]) * (paper[a] - paper[b]) > 0 for a, b in pairs)
    return f"{same} of {len(pairs)} pairs as in the paper"


def _paired(found: Found) -> list[str]:
    """Differences to FIRM seed by seed: the seeds share weights, batches and views, so chance cancels."""
    parts = []
    reference = {run["seed"]: run for run in found.get("firm", [])}
    for name, runs in found.items():
        both = [(reference[run["seed"]], run) for run in runs if name != "firm" and run["seed"] in reference]
        if both:
            last = [firm["final"][CURVE]["value"] - other["final"][CURVE]["value"] for firm, other in both]
            area = [aulc(curve_of(firm)) - aulc(curve_of(other)) for firm, other in both]
            parts.append(f"FIRM less {name}: last {_signed(last)}, AULC {_signed(area)}")
    return ["", "; ".join(parts) + "."] if parts else []


def _summary(found: dict[str, Found]) -> list[str]:
    """On how many data sets FIRM's mean lies above each other row's."""
    lines = []
    for name in next(iter(found.values())):
        both = [rows for rows in found.values() if name != "firm" and rows.get("firm") and rows[name]]
        if both:
            last = sum(_mean_last(rows["firm"]) > _mean_last(rows[name]) for rows in both)
            area = sum(_mean_area(rows["firm"]) > _mean_area(rows[name]) for rows in both)
            lines.append(f"- FIRM above {name}: by last {CURVE} on {last}, by AULC on {area} of {len(both)} data sets.")
    return ["### Over all data sets of this table\n\n" + "\n".join(lines)] if lines else []


def published(data: str) -> tuple[int, dict[str, float]]:
    """The paper's k and AUROC per row for this data set; empty where it prints none."""
    text = resources.files("firm.recipes").joinpath("published.json").read_text()
    content = json.loads(text)
    return content["k"].get(data.partition(":")[0], 1), content["per_class"].get(data, {})


def _published_cell(data: str, name: str) -> str:
    k, numbers = published(data)
    return f"{numbers[name]:.1f} (k={k})" if name in numbers else "-"


def curve_of(run: Result) -> list[float]:
    """The learning curve of a run: AUROC at every probe."""
    return [probe[CURVE]["value"] for probe in run["probes"]]


def _mean_last(runs: list[Result]) -> float:
    return mean_std([run["final"][CURVE]["value"] for run in runs])[0]


def _mean_area(runs: list[Result]) -> float:
    return mean_std([aulc(curve_of(run)) for run in runs])[0]


def _interval(values: list[Result]) -> str:
    low, high = (100 * mean_std([one[side] for one in values])[0] for side in ("low", "high"))
    return f"{_spread([one['value'] for one in values])} [{low:.1f}, {high:.1f}]"


def _spread(values: list[float]) -> str:
    mean, deviation = mean_std(values)
    return f"{100 * mean:.1f} ± {100 * deviation:.1f}" if len(values) > 1 else f"{100 * mean:.1f}"


def _rising(values: dict[str, float]) -> str:
    return " < ".join(sorted(values, key=values.__getitem__))


def _signed(values: list[float]) -> str:
    return f"{100 * mean_std(values)[0]:+.1f} ({', '.join(f'{100 * value:+.1f}' for value in values)})"


def _seconds(runs: list[Result]) -> str:
    """Mean CPU time of the runs that were made in one go; a resumed one counted only its last part."""
    whole = [run["seconds"] for run in runs if not run["resumed"]]
    return f"{mean_std(whole)[0]:.0f}" if whole else "-"


def _plain(runs: list[Result], key: str) -> str:
    told = [run["diagnostics"] for run in runs if run["diagnostics"]]
    values = [found[key] for found in told if found[key] is not None]
    return f"{mean_std(values)[0]:.2f}" if values else "-"
