"""Records -> a Markdown page: our numbers with their scale and origin, and the paper's beside them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from firm.metrics.image import aulc, mean_std
from firm.research.experiment import Record
from firm.research.frozen_page import frozen_section
from firm.research.runner import code_digest
from firm.research.tables import TABLES, Table, stored, stored_runs

Runs = list[Record]  # of one row, one per seed
SCALES = {
    "smoke": "**Smoke test, not a result**: it shows that the command runs.",
    "short": "**Reduced scale**, far from the paper's protocol: compare rows with each other, not with the paper.",
}
FULL = "Our recipe at its full length; nothing of it is the paper's protocol."
CURVE = "s_con k=1"
SCORES = ("s_con k=1", "s_con k=5", "s_shift k=1", "s_shift k=5", "s_ens k=1", "s_ens k=5", "s_proto", "kde")
FITTED = "+ unadapted"  # the variant of an adaptor that a fit scores with
NOT_TRAINED = ("pixels", "backbone")  # features
VERDICTS = ("PASS", "REVIEW", "FAIL")


def page(
    names: Sequence[str], scale: str, seeds: list[int], folder: Path, *, command: str, pictures: Mapping[str, str]
) -> str:
    """A page with these tables; `command` wrote it, and `pictures` are files beside it."""
    records = {name: stored_runs(TABLES[name], scale, seeds, folder) for name in names}
    parts = [
        f"# {'; '.join(TABLES[name].title for name in names)}",
        f"Written by `{command}`; without `--only-report` it makes the missing runs first.",
    ]
    parts += [stored("legends")[protocol] for protocol in dict.fromkeys(TABLES[name].protocol for name in names)]
    for name, by_data in records.items():
        table = TABLES[name]
        note = table.at_paper_scale if scale == "paper" else FULL if table.full and scale != "smoke" else SCALES[scale]
        parts += [f"## {table.title}", note, f"![{table.title}]({pictures[name]})" if name in pictures else ""]
        parts += SECTIONS[table.protocol](table, by_data)
    rows = [runs for by_data in records.values() for rows in by_data.values() for runs in rows.values() if runs]
    outdated = sum(map(_outdated, rows))
    parts.append(f"† {outdated} of {len(rows)} rows hold runs made by other code than today's." if outdated else "")
    return "\n\n".join(filter(None, parts)) + "\n"


def _outdated(runs: Runs) -> bool:
    return any(run["code"] != code_digest() for run in runs)


def _label(name: str, runs: Runs) -> str:
    """The row's name, marked where a training collapsed and where other code made it."""
    collapsed = any((run.get("diagnostics") or {}).get("collapsed") for run in runs)
    return name + " (collapsed)" * collapsed + " †" * _outdated(runs)


def _semantic(table: Table, by_data: dict[str, dict[str, Runs]]) -> list[str]:
    runs = [run for rows in by_data.values() for runs in rows.values() for run in runs]
    parts = [_shared_settings(table, runs[0]) if runs else ""]
    head = ["row", "runs", "epochs", "steps", *(f"last {name}" for name in SCORES), "best", "AULC"]
    head += ["compactness", "margin", "outlier spread", "CPU s", "paper"]
    for data, rows in by_data.items():
        k, paper = stored("published")["k"].get(data.partition(":")[0], 1), published(table, data)
        lines = []
        for name, runs in rows.items():
            cells = _class_cells(runs) if runs else ["0", *["-"] * (len(head) - 3)]
            lines.append([_label(name, runs), *cells, f"{paper[name]:.1f} (k={k})" if name in paper else "-"])
        less = {"last": _minus(rows, lambda run: float(run["final"][CURVE]["value"])), "AULC": _minus(rows, _aulc)}
        below = [f"FIRM minus each row seed by seed, {name}: {text}" if text else "" for name, text in less.items()]
        parts += [f"### {data}", _markdown(head, lines), _agreement(rows, k, paper), *below]
    return parts


def _shared_settings(table: Table, run: Record) -> str:
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
    return f"{shared}; {run['test_images']} test images. Rows share initial weights, batches and views. {_machine(run)}"


def _class_cells(runs: Runs) -> list[str]:
    logged = [run["diagnostics"] for run in runs if run["diagnostics"]]
    whole = [run["seconds"] for run in runs if not run["resumed"]]  # a resumed run counts only its last part
    return [
        str(len(runs)),
        str(runs[0]["recipe"]["training"]["epochs"]),
        str(runs[0]["steps"]),
        *[_interval([run["final"][score] for run in runs]) for score in SCORES],
        _spread([max(curve_of(run)) for run in runs]),
        _spread([_aulc(run) for run in runs]),
        *[_mean([line[name] for line in logged], ".2f") for name in ("compactness", "margin", "outlier_spread")],
        _mean(whole, ".0f"),
    ]


def _agreement(rows: dict[str, Runs], k: int, paper: dict[str, float]) -> str:
    """How many pairs of rows stand in the paper's order."""
    both = [name for name, runs in rows.items() if runs and name in paper]
    ours = {name: mean_std([run["final"][f"s_con k={k}"]["value"] for run in rows[name]])[0] for name in both}
    pairs = list(combinations(ours, 2))
    same = sum((ours[a] - ours[b]) * (paper[a] - paper[b]) > 0 for a, b in pairs)
    return f"By last s_con k={k}, {same} of {len(pairs)} pairs of rows stand in the paper's order." if pairs else ""


def curve_of(run: Record) -> list[float]:
    """The learning curve of a semantic run: AUROC at every probe."""
    return [probe[CURVE]["value"] for probe in run["probes"]]


def _aulc(run: Record) -> float:
    return aulc(curve_of(run))


def _minus(rows: dict[str, Runs], value: Callable[[Record], float]) -> str:
    """FIRM minus each row, seed by seed: seeds share weights, batches and views, so chance cancels.

    A row is compared with the FIRM row of the same suffix if there is one, and a single run of features that are not
    trained with every seed.
    """
    pairs = {}
    for row, runs in rows.items():
        name, _, how = row.partition(", ")
        rival = rows.get(f"firm, {how}" if name != "firm" and f"firm, {how}" in rows else "firm", [])
        others = {run["experiment"]["seed"]: value(run) for run in runs}
        if len(runs) == 1 and runs[0]["recipe"]["features"] in NOT_TRAINED:
            others = dict.fromkeys((run["experiment"]["seed"] for run in rival), value(runs[0]))
        both = [run for run in rival if row != "firm" and run["experiment"]["seed"] in others]
        pairs[row] = [value(run) - others[run["experiment"]["seed"]] for run in both]
    return _differences(pairs)


def _patches(table: Table, by_data: dict[str, dict[str, Runs]]) -> list[str]:
    parts = []
    for data, rows in by_data.items():
        runs = [run for runs in rows.values() for run in runs]
        parts += [f"### {data}", *(_product(rows, runs) if runs else ["Not run yet."])]
        level = "image" if table.published == "mvtec_ablation" else "image / pixel"
        listed = ", ".join(f"{name} {_slashed(value)}" for name, value in published(table, data).items())
        parts.append(f"The paper, {level} AUROC at its full scale: {listed}." if listed else "")
    return parts


def _slashed(value: Any) -> str:
    numbers = value if isinstance(value, list) else [value]
    return " / ".join("-" if number is None else str(number) for number in numbers)


def _product(rows: dict[str, Runs], runs: Runs) -> list[str]:
    head = ["row", "seeds", "image AUROC", "pixel AUROC", "AUPRO", "training, CPU min", "remember, CPU s", "images/s"]
    head += ["whole fit, CPU min", "memory, MB", "synthetic, image", "synthetic, pixel"]
    if not any("synthetic" in final for run in runs for final in run["final"].values()):
        head = head[:-2]
    shown = {(row, way): runs for row, runs in rows.items() for way in (runs[0]["final"] if runs else ())}
    lines = [
        [_label(f"{row} {way}".strip(), group), *_patch_cells(way, group)][: len(head)]
        for (row, way), group in shown.items()
    ]
    less, over = _minus(rows, _image), _over_pixels(rows)
    floor = next(iter(runs[0]["final"].values()))["trivial"]
    return [
        _patch_settings((rows.get("firm") or runs)[0]),
        _markdown(head, lines),
        *_kinds(shown),
        f"FIRM minus each row seed by seed, image AUROC ({FITTED} where it is adapted): {less}" if less else "",
        f"FIRM minus plain pixels under the same preprocessing, image AUROC: {over}" if over else "",
        f"Trivial baselines: brightness alone {100 * floor['brightness']:.1f}, "
        f"nearest whole image {100 * floor['neighbour']:.1f}.",
    ]


def _patch_settings(run: Record) -> str:
    recipe = run["recipe"]
    tiling, condition, radius = recipe["tiling"], recipe["conditioning"], recipe["memory"]["neighbourhood"]
    grid = f"patches of {tiling.get('size')} px at stride {tiling.get('stride')}, compared with "
    grid += "all good patches; " if radius < 0 else f"good patches within {radius} cells; "
    aligned = "aligned" if condition["align"] else "not aligned"
    images = f"{run['good_images']} good and {run['test_images']} test images"
    shown = f"illumination `{condition['illumination']}`, {aligned}"
    return f"{images}; {shown}; {grid if tiling['kind'] == 'grid' else ''}{_machine(run)}"


def _patch_cells(way: str, runs: Runs) -> list[str]:
    finals = [run["final"][way] for run in runs]
    located = [final["overall"]["localisation"] for final in finals]
    synthetic = [final["synthetic"] for final in finals if "synthetic" in final]
    whole = [run for run in runs if run.get("peak_megabytes") and not run["resumed"]]
    seconds = [r["prepare_seconds"] + r["training_seconds"] + r["final"][way]["remember_seconds"] for r in whole]
    return [
        str(len(runs)),
        _interval([final["overall"]["auroc"] for final in finals]),
        *[_interval([measures[m] for measures in located]) if all(located) else "-" for m in ("pixel_auroc", "aupro")],
        _mean([run["training_seconds"] / 60 for run in runs], ".1f"),
        _mean([final["remember_seconds"] for final in finals], ".0f"),
        _mean([final["images_per_second"] for final in finals], ".1f"),
        _mean([value / 60 for value in seconds], ".1f"),
        str(max((run["peak_megabytes"] for run in whole), default="-")),
        *[_mean([100 * measures[m] for measures in synthetic], ".1f") for m in ("auroc", "pixel_auroc")],
    ]


def _kinds(shown: dict[tuple[str, str], Runs]) -> list[str]:
    """Image and pixel AUROC for every kind of defect, where there are several."""
    kinds = sorted({kind for (_, way), runs in shown.items() for run in runs for kind in run["final"][way]["kinds"]})

    def cell(measured: list[dict[str, Any]]) -> str:
        image = _mean([100 * kind["auroc"]["value"] for kind in measured], ".1f")
        located = [kind["localisation"] for kind in measured]
        pixel = _mean([100 * measures["pixel_auroc"]["value"] for measures in located if measures], ".1f")
        return f"{image} / {pixel}" if all(located) else image

    lines = [
        [f"{row} {way}".strip(), *(cell([run["final"][way]["kinds"][kind] for run in runs]) for kind in kinds)]
        for (row, way), runs in shown.items()
    ]
    return ["Image / pixel AUROC by kind of defect:", _markdown(["row", *kinds], lines)] if len(kinds) > 1 else []


def _over_pixels(rows: dict[str, Runs]) -> str:
    """FIRM minus plain pixels, seed by seed: below zero the training was of no use."""
    over = {}
    for row, runs in rows.items():
        name, _, how = row.partition(", ")
        plain = rows.get(f"pixels, {how}") or rows.get("pixels", [])
        for way in runs[0]["final"] if runs and plain and name == "firm" else ():
            over[f"{row} {way}".strip()] = [_auroc(run["final"][way]) - _image(plain[0]) for run in runs]
    return _differences(over)


def _image(run: Record) -> float:
    """The image AUROC of what a fit scores with: the adapted features beside the others, else the first variant."""
    return _auroc(run["final"].get(FITTED) or next(iter(run["final"].values())))


def _auroc(final: Record) -> float:
    return float(final["overall"]["auroc"]["value"])


def _guarantees(_table: Table, by_data: dict[str, dict[str, Runs]]) -> list[str]:
    every = [(row, run) for rows in by_data.values() for row, runs in rows.items() for run in runs]
    head = ["product", "row", "seed", "good images", "held out (parts)"]
    for which in ("REVIEW or FAIL", "FAIL"):
        head += [f"{which}: guaranteed", "95 % bound", "measured"]
    head += ["drift", "defects caught", "image AUROC"]
    by_row = {row: [run for name, run in every if name == row] for row, _ in every}
    lines = [_guarantee_cells(row, run) for row, run in every]
    return [_markdown(head, lines) if every else "Not run yet.", *(_pooled(row, runs) for row, runs in by_row.items())]


def _pooled(row: str, runs: Runs) -> str:
    """What all runs of a row guaranteed on average, and what was measured."""
    rates = [run["measured"]["review"] for run in runs]
    count, of = (sum(rate[name] for rate in rates) for name in ("count", "of"))
    above = sum(rate["count"] / rate["of"] > run["bound"]["review"] for run, rate in zip(runs, rates, strict=True))
    return (
        f"{row}: {len(runs)} calibrations guaranteed at most "
        f"{_mean([100 * run['guaranteed']['review'] for run in runs], '.1f')} % on average; {100 * count / of:.1f} % "
        f"({count} of {of}) of the unseen good images did not PASS. {above} of the {len(runs)} lie above their bound."
    )


def _guarantee_cells(row: str, run: Record) -> list[str]:
    cells = [run["experiment"]["data"], _label(row, [run]), str(run["experiment"]["seed"]), str(run["good_images"])]
    cells.append(f"{run['calibration']['images']} ({run['calibration']['parts']})")
    for name in ("review", "fail"):
        rate = run["measured"][name]
        share, low, high = (100 * value for value in (rate["count"] / rate["of"], rate["low"], rate["high"]))
        cells += [f"{100 * run[what][name]:.1f} %" for what in ("guaranteed", "bound")]
        cells.append(f"{share:.1f} % ({rate['count']} of {rate['of']}; {low:.1f} to {high:.1f})")
    moved, caught = run["drift"], run["caught"]
    drift = [f"scores {moved['scores']}"] if moved["scores"] else []
    drift += [f"{100 * abs(moved['by']):.0f} % {moved['illumination']}"] if moved["illumination"] else []
    caught_share = f"{100 * caught['share']:.1f} % of {caught['of']}"
    return [*cells, ", ".join(drift) or "no", caught_share, _interval([run["auroc"]])]


def _few(_table: Table, by_data: dict[str, dict[str, Runs]]) -> list[str]:
    """Verdicts by number of good images, summed over seeds, for both ways of calibrating."""
    head = ["good images", "thresholds by", "subsets", "defects that PASS", "in REVIEW", "FAIL", "good in REVIEW"]
    head += ["good that FAIL", "stated: not PASS", "stated: FAIL", "image AUROC"]
    parts = []
    for data, rows in by_data.items():
        runs = [run for runs in rows.values() for run in runs]
        sizes = sorted({size for run in runs for size in run["final"]}, key=int)
        lines = [[size, way, *_few_cells(runs, size, way)] for size in sizes for way in ("split", "folds")]
        parts += [f"### {data}", _markdown(head, lines) if lines else "Not run yet."]
    return parts


def _few_cells(runs: Runs, size: str, way: str) -> list[str]:
    found = [run["final"][size][way] for run in runs if size in run["final"]]
    counts = {side: Counter[str]() for side in ("good", "defects")}
    for judged in found:
        for side, total in counts.items():
            total.update(judged[side])
    cells = [f"{100 * counts['defects'][verdict] / counts['defects'].total():.1f} %" for verdict in VERDICTS]
    cells += [f"{100 * counts['good'][verdict] / counts['good'].total():.1f} %" for verdict in VERDICTS[1:]]
    stated = [_mean([100 * judged["stated"][name] for judged in found], ".1f") + " %" for name in ("review", "fail")]
    return [str(len(found)), *cells, *stated, _spread([judged["auroc"] for judged in found])]


SECTIONS = {
    "semantic": _semantic,
    "patches": _patches,
    "guarantees": _guarantees,
    "few": _few,
    "frozen": frozen_section,
}


def published(table: Table, data: str) -> dict[str, Any]:
    """The paper's AUROC in % for each row or method; empty where it prints none."""
    return dict(stored("published")[table.published].get(data, {}))


def _machine(run: Record) -> str:
    origin = run["origin"]
    return f"torch {origin['torch']}, {origin['machine']}, {origin['device']}, {origin['threads']} thread(s)."


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])


def _mean(values: Iterable[float | None], digits: str) -> str:
    known = [value for value in values if value is not None]
    return f"{mean_std(known)[0]:{digits}}" if known else "-"


def _spread(values: list[float]) -> str:
    mean, deviation = mean_std(values)
    return f"{100 * mean:.1f} ± {100 * deviation:.1f}" if len(values) > 1 else f"{100 * mean:.1f}"


def _interval(intervals: list[dict[str, float]]) -> str:
    low, high = (100 * mean_std([interval[end] for interval in intervals])[0] for end in ("low", "high"))
    return f"{_spread([interval['value'] for interval in intervals])} [{low:.1f}, {high:.1f}]"


def _differences(pairs: Mapping[str, list[float]]) -> str:
    """The mean difference of every row, and that of every seed."""
    each = [
        f"{name} {100 * mean_std(values)[0]:+.1f} ({', '.join(f'{100 * value:+.1f}' for value in values)})"
        for name, values in pairs.items()
        if values
    ]
    return f"{'; '.join(each)}." if each else ""
