"""Records -> a page: our numbers with their scale and origin, and the paper's beside them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from firm.research.blocks import Block, Drawing, Grid
from firm.research.budget import good_images
from firm.research.cell_text import CURVE as CURVE
from firm.research.cell_text import (
    PROPERTIES,
    Runs,
    differences_text,
    firm_minus,
    interval_text,
    label,
    machine_text,
    mean_text,
    property_cells,
    spread_text,
)
from firm.research.cell_text import curve_of as curve_of
from firm.research.experiment import Record
from firm.research.few_page import few_blocks
from firm.research.frozen_page import frozen_blocks
from firm.research.published import best_of, of_product, printed_blocks
from firm.research.runner import is_confirmed, is_outdated
from firm.research.semantic_page import semantic_blocks
from firm.research.tables import Table, chosen, stored, stored_runs

SCALES = {
    "smoke": "**Smoke test, not a result**: it shows that the command runs.",
    "short": "**Reduced scale**, far from the paper's protocol: compare rows with each other, not with the paper.",
}
FULL = "Our recipe at its full length; nothing of it is the paper's protocol."
OURS = "Our recipe at its full length, not the paper's protocol."
PAPERS = "**Closest to the paper**: its protocol as its text gives it."
SILENT = "Where the paper is silent (docs/paper.md, ambiguities):"
CLOSEST = "**Closest to the paper**; this differs from its protocol:"
WHERE_KNOWN = ("best probe", "synthetic, image", "synthetic, pixel", *PROPERTIES)  # columns of patches
FITTED = "+ unadapted"  # the variant of an adaptor that a fit scores with


def page(
    tables: Mapping[str, Table],
    scale: str,
    seeds: list[int],
    folder: Path,
    *,
    command: str,
    pictures: Mapping[str, Sequence[Drawing]],
) -> list[Block]:
    """A page with these tables; `command` wrote it, and `pictures` are beside it, by the name of the table."""
    records = {name: stored_runs(table, scale, seeds, folder) for name, table in tables.items()}
    closest = scale == "paper" and any(table.differences is not None for table in tables.values())
    titles = "; ".join(table.title for table in tables.values())
    blocks: list[Block] = [f"# {titles}{', closest to the paper' if closest else ''}"]
    blocks.append(f"Written by `{command}`; `firm bench run` makes the missing runs first.")
    blocks += [stored("legends")[protocol] for protocol in dict.fromkeys(table.protocol for table in tables.values())]
    for name, table in tables.items():
        by_data = {data: rows for data, rows in records[name].items() if data in chosen(table)}
        blocks += [f"## {table.title}", *_scale_notes(table, scale), *pictures.get(name, ())]
        for part in table.published:
            blocks += printed_blocks(table, part, records[name])
        blocks += SECTIONS[table.protocol](table, by_data)
    blocks += _warnings([rows for by_data in records.values() for rows in by_data.values()])
    return [block for block in blocks if block]


def _scale_notes(table: Table, scale: str) -> list[str]:
    settings = ", ".join(f"`{path}={value}`" for path, value in table.settings.items())
    notes = [f"With {settings}." if settings else ""]
    if scale != "paper":
        return [FULL if table.full and scale != "smoke" else SCALES[scale], *notes]
    if table.differences is None:
        return [OURS, *notes]
    if table.protocol == "semantic":
        notes = [SILENT, _listed(stored("tables")["silent"]), *notes]
    return [CLOSEST, _listed(table.differences), *notes] if table.differences else [PAPERS, *notes]


def _listed(lines: Sequence[str]) -> str:
    return "- " + "\n- ".join(lines)


def _warnings(products: Sequence[Mapping[str, Runs]]) -> list[str]:
    """Rows made by other code, rows measured on different images, and files that are not the published set."""
    rows = [runs for product in products for runs in product.values() if runs]
    outdated = sum(any(map(is_outdated, runs)) for runs in rows)
    confirmed = sum(any(map(is_confirmed, runs)) and not any(map(is_outdated, runs)) for runs in rows)
    differing, partial = set[str](), set[str]()
    for product in products:
        runs = [run for runs in product.values() for run in runs]
        if len({run["data"]["test"] for run in runs} - {None}) > 1:  # the oldest records do not tell
            differing.add(runs[0]["experiment"]["data"])
        partial |= {text for run in runs if (text := _partial(run))}
    return [
        f"Rows of {', '.join(sorted(differing))} were measured on different images: do not compare them."
        if differing
        else "",
        f"**Not the published files**: {', '.join(sorted(partial))}." if partial else "",
        f"† {outdated} of {len(rows)} rows hold runs made by other code than today's." if outdated else "",
        f"{confirmed} of {len(rows)} rows hold runs of other code that today's repeats to the bit: one run of each "
        "recipe was repeated (`firm bench confirm`)."
        if confirmed
        else "",
    ]


def _partial(run: Record) -> str:
    """What a run on crafted or incomplete files of a published set had; empty for the published ones."""
    data, count, wanted = run["experiment"]["data"], run.get("good_images"), good_images(run["experiment"]["data"])
    asked = run["experiment"]
    reduced = asked["protocol"] == "frozen" and "test_images" in asked  # learns from few images, too
    whole = asked["protocol"] in ("semantic", "patches", "frozen") and not reduced and not asked.get("keep_back")
    return f"{data} has {count} good images, not {wanted}" if whole and wanted not in (0, count) else ""


def _patches(table: Table, by_data: dict[str, dict[str, Runs]]) -> list[Block]:
    blocks = list[Block]()
    for data, rows in by_data.items():
        runs = [run for runs in rows.values() for run in runs]
        if not runs and table.published:
            continue
        listed = "" if table.published else of_product(data)
        blocks += [f"### {data}", *(_product(rows, runs) if runs else ["Not run yet."])]
        blocks.append(f"The paper, image / pixel AUROC at its full scale: {listed}." if listed else "")
    return blocks


def _product(rows: dict[str, Runs], runs: Runs) -> list[Block]:
    head = ["row", "seeds", "image AUROC", "pixel AUROC", "AUPRO", *WHERE_KNOWN, "training, CPU min", "remember, CPU s"]
    head += ["images/s", "whole fit, CPU min", "memory, MB"]
    shown = {(row, way): runs for row, runs in rows.items() for way in (runs[0]["final"] if runs else ())}
    lines = [[label(f"{row} {way}".strip(), group), *_patch_cells(way, group)] for (row, way), group in shown.items()]
    told = [at for at, name in enumerate(head) if name not in WHERE_KNOWN or any(line[at] != "-" for line in lines)]
    less, over = firm_minus(rows, _image), _over_pixels(rows)
    floor = next(iter(runs[0]["final"].values()))["trivial"]
    return [
        _patch_settings((rows.get("firm") or [run for run in runs if run["steps"]] or runs)[0]),
        Grid([head[at] for at in told], [[line[at] for at in told] for line in lines]),
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
    return f"{images}; {shown}; {grid if tiling['kind'] == 'grid' else ''}{machine_text(run)}"


def _patch_cells(way: str, runs: Runs) -> list[str]:
    finals = [run["final"][way] for run in runs]
    located = [final["overall"]["localisation"] for final in finals]
    synthetic = [final["synthetic"] for final in finals if "synthetic" in final]
    whole = [run for run in runs if run.get("peak_megabytes") and not run["resumed"]]
    seconds = [r["prepare_seconds"] + r["training_seconds"] + r["final"][way]["remember_seconds"] for r in whole]
    return [
        str(len(runs)),
        interval_text([final["overall"]["auroc"] for final in finals]),
        *[
            interval_text([measures[m] for measures in located]) if all(located) else "-"
            for m in ("pixel_auroc", "aupro")
        ],
        spread_text([best for run in runs if (best := best_of(run, way)) is not None]),
        *[mean_text([100 * measures[m] for measures in synthetic], ".1f") for m in ("auroc", "pixel_auroc")],
        *property_cells(runs),
        mean_text([run["training_seconds"] / 60 for run in runs], ".1f"),
        mean_text([final["remember_seconds"] for final in finals], ".0f"),
        mean_text([final["images_per_second"] for final in finals], ".1f"),
        mean_text([value / 60 for value in seconds], ".1f"),
        str(max((run["peak_megabytes"] for run in whole), default="-")),
    ]


def _kinds(shown: dict[tuple[str, str], Runs]) -> list[Block]:
    """Image and pixel AUROC for every kind of defect, where there are several."""
    kinds = sorted({kind for (_, way), runs in shown.items() for run in runs for kind in run["final"][way]["kinds"]})

    def cell(measured: list[dict[str, Any]]) -> str:
        image = mean_text([100 * kind["auroc"]["value"] for kind in measured], ".1f")
        located = [kind["localisation"] for kind in measured]
        pixel = mean_text([100 * measures["pixel_auroc"]["value"] for measures in located if measures], ".1f")
        return f"{image} / {pixel}" if all(located) else image

    lines = [
        [f"{row} {way}".strip(), *(cell([run["final"][way]["kinds"][kind] for run in runs]) for kind in kinds)]
        for (row, way), runs in shown.items()
    ]
    return ["Image / pixel AUROC by kind of defect:", Grid(["row", *kinds], lines)] if len(kinds) > 1 else []


def _over_pixels(rows: dict[str, Runs]) -> str:
    """FIRM minus plain pixels, seed by seed: below zero the training was of no use."""
    over = {}
    for row, runs in rows.items():
        name, _, how = row.partition(", ")
        plain = rows.get(f"pixels, {how}") or rows.get("pixels", [])
        alike = bool(runs and plain) and runs[0]["recipe"]["conditioning"] == plain[0]["recipe"]["conditioning"]
        for way in runs[0]["final"] if alike and name == "firm" else ():
            over[f"{row} {way}".strip()] = [_auroc(run["final"][way]) - _image(plain[0]) for run in runs]
    return differences_text(over)


def _image(run: Record) -> float:
    """The image AUROC of what a fit scores with: the adapted features beside the others, else the first variant."""
    return _auroc(run["final"].get(FITTED) or next(iter(run["final"].values())))


def _auroc(final: Record) -> float:
    return float(final["overall"]["auroc"]["value"])


def _guarantees(_table: Table, by_data: dict[str, dict[str, Runs]]) -> list[Block]:
    every = [(row, run) for rows in by_data.values() for row, runs in rows.items() for run in runs]
    head = ["product", "row", "seed", "good images", "held out (parts)"]
    for which in ("REVIEW or FAIL", "FAIL"):
        head += [f"{which}: guaranteed", "95 % bound", "measured"]
    head += ["drift", "defects caught", "image AUROC"]
    by_row = {row: [run for name, run in every if name == row] for row, _ in every}
    lines = [_guarantee_cells(row, run) for row, run in every]
    return [Grid(head, lines) if every else "Not run yet.", *(_pooled(row, runs) for row, runs in by_row.items())]


def _pooled(row: str, runs: Runs) -> str:
    """What all runs of a row guaranteed on average, and what was measured."""
    rates = [run["measured"]["review"] for run in runs]
    count, of = (sum(rate[name] for rate in rates) for name in ("count", "of"))
    above = sum(rate["count"] / rate["of"] > run["bound"]["review"] for run, rate in zip(runs, rates, strict=True))
    guaranteed = mean_text([100 * run["guaranteed"]["review"] for run in runs], ".1f")
    return (
        f"{row}: {len(runs)} calibrations guaranteed at most {guaranteed} % on average; {100 * count / of:.1f} % "
        f"({count} of {of}) of the unseen good images did not PASS. {above} of the {len(runs)} lie above their bound."
    )


def _guarantee_cells(row: str, run: Record) -> list[str]:
    cells = [run["experiment"]["data"], label(row, [run]), str(run["experiment"]["seed"]), str(run["good_images"])]
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
    return [*cells, ", ".join(drift) or "no", caught_share, interval_text([run["auroc"]])]


Section = Callable[[Table, dict[str, dict[str, Runs]]], list[Block]]
SECTIONS: dict[str, Section] = {
    "semantic": semantic_blocks,
    "patches": _patches,
    "guarantees": _guarantees,
    "few": few_blocks,
    "frozen": frozen_blocks,
}
