"""Stored results -> Markdown tables: ours, with scale, seeds and machine beside them, and the paper's numbers."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from firm.bench import results
from firm.metrics import aulc, mean_std
from firm.recipes.tables import Table, experiment

Result = dict[str, Any]
SCALE_NOTE = {
    "smoke": "**Smoke test, not a result**: it shows that the command runs.",
    "short": "**Reduced scale**, far from the paper's protocol; compare rows with each other, not with the paper.",
    "paper": "The paper's protocol.",
}
CURVE = "s_con k=1"
LAST = ("s_con k=1", "s_con k=5", "s_shift k=1", "s_ens k=1", "s_proto", "kde")


def report(tables: list[Table], names: list[str], scale: str, seeds: list[int], folder: Path) -> str:
    """A page with every table: what was run, what came out, and where the paper's order holds."""
    command = f"firm bench {' '.join(names)} --scale {scale} --seeds {len(seeds)} --out PAGE.md"
    parts = ["# Semantic benchmarks", SCALE_NOTE[scale], f"Regenerate with `{command}`."]
    for table in tables:
        parts.append(_section(table, scale, seeds, folder))
    return "\n\n".join(parts) + "\n"


def _section(table: Table, scale: str, seeds: list[int], folder: Path) -> str:
    """One table: a block per data set, a line per row of the table, all seeds side by side."""
    parts = [f"## {table.title}"]
    origin: Result | None = None
    for data in table.data:
        found: dict[str, list[Result]] = {}
        for name, changes in table.rows.items():
            stored = results(folder, [experiment(data, changes, scale, seed) for seed in seeds])
            found[name] = [one for one in stored if one is not None]
            origin = found[name][0] if found[name] else origin
        parts.append(_block(data, found))
    if origin is not None:
        parts.insert(1, _setting(origin, seeds))
    return "\n\n".join(parts)


def _setting(one: Result, seeds: list[int]) -> str:
    """The sentence that says what a number of this table is."""
    recipe, origin = one["recipe"], one["origin"]
    balance = ", half of them anomalous" if one["test_images"] < 10000 else ""
    encoder, training = recipe["encoder"], recipe["training"]
    hidden = encoder["head"]["hidden"]
    return (
        f"ResNet-18 of width {encoder['width']}, stem {encoder['stem']}, head {len(hidden)} x {hidden[0]} + "
        f"{encoder['head']['out']}, batch {training['batch']}, lr {training['lr']}, temperature "
        f"{training['temperature']}, layout {training['layout']}; {one['test_images']} test images{balance}; "
        f"seeds {', '.join(map(str, seeds))}, the same for every row. AUROC in %, mean ± sample deviation "
        f"over seeds; in brackets the mean 95 % bootstrap interval over test images. `last` is the end of training, "
        f"`best` the best of {len(one['probes'])} probes *chosen on the test set* and therefore optimistic, AULC the "
        f"mean of the learning curve. torch {origin['torch']}, {origin['machine']}, {origin['device']}, "
        f"{origin['threads']} thread(s)."
    )


def _block(data: str, found: dict[str, list[Result]]) -> str:
    head = ["row", "runs", "epochs", "steps", f"last {CURVE}", "best", "AULC", *LAST[1:], "compactness", "margin"]
    head += ["outlier spread", "CPU s", "paper"]
    lines = [f"### {data}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, runs in found.items():
        lines.append("| " + " | ".join(_line(data, name, runs)) + " |")
    paired = _paired(found)
    return "\n".join(lines) + (f"\n\n{paired}" if paired else "")


def _line(data: str, name: str, runs: list[Result]) -> list[str]:
    if not runs:
        return [name, "0", *["-"] * 15]
    curves = [[probe[CURVE]["value"] for probe in run["probes"]] for run in runs]
    final = [run["final"] for run in runs]
    low, high = (100 * mean_std([one[CURVE][side] for one in final])[0] for side in ("low", "high"))
    return [
        name,
        str(len(runs)),
        str(runs[0]["recipe"]["training"]["epochs"]),
        str(runs[0]["steps"]),
        f"{_spread([one[CURVE]['value'] for one in final])} [{low:.1f}, {high:.1f}]",
        _spread([max(curve) for curve in curves]),
        _spread([aulc(curve) for curve in curves]),
        *[_spread([one[score]["value"] for one in final]) for score in LAST[1:]],
        *[_plain(runs, key) for key in ("compactness", "margin", "outlier_spread")],
        _seconds(runs),
        published(data, name),
    ]


def _paired(found: dict[str, list[Result]]) -> str:
    """Differences to FIRM seed by seed: the seeds share weights, batches and views, so chance cancels."""
    parts = []
    reference = {run["seed"]: run for run in found.get("firm", [])}
    for name, runs in found.items():
        both = [(run, reference[run["seed"]]) for run in runs if name != "firm" and run["seed"] in reference]
        if both:
            last = [firm["final"][CURVE]["value"] - other["final"][CURVE]["value"] for other, firm in both]
            area = [_area(firm) - _area(other) for other, firm in both]
            parts.append(f"FIRM less {name}: last {_signed(last)}, AULC {_signed(area)}")
    return "; ".join(parts) + "." if parts else ""


def published(data: str, name: str) -> str:
    """The paper's AUROC of this cell where it prints one."""
    text = resources.files("firm.recipes").joinpath("published.json").read_text()
    cell = json.loads(text)["per_class"].get(data, {}).get(name)
    return "-" if cell is None else f"{cell:.1f}"


def _area(run: Result) -> float:
    return aulc([probe[CURVE]["value"] for probe in run["probes"]])


def _spread(values: list[float]) -> str:
    mean, deviation = mean_std(values)
    return f"{100 * mean:.1f} ± {100 * deviation:.1f}" if len(values) > 1 else f"{100 * mean:.1f}"


def _signed(values: list[float]) -> str:
    return f"{100 * mean_std(values)[0]:+.1f} ({', '.join(f'{100 * value:+.1f}' for value in values)})"


def _seconds(runs: list[Result]) -> str:
    """Mean CPU time of the runs that were made in one go; a resumed one counted only its last part."""
    whole = [run["seconds"] for run in runs if not run["resumed"]]
    return f"{mean_std(whole)[0]:.0f}" if whole else "-"


def _plain(runs: list[Result], key: str) -> str:
    values = [run["diagnostics"][key] for run in runs if run["diagnostics"][key] is not None]
    return f"{mean_std(values)[0]:.2f}" if values else "-"
