"""Stored industrial runs -> a Markdown page and a picture of accuracy over CPU time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a file is written, no window opened
import matplotlib.pyplot as plt

from firm.bench import result_path
from firm.metrics import mean_std
from firm.recipes.industrial import PatchTable, patch_experiment
from firm.report.tables import SCALE_NOTE, SCALE_TITLE

Result = dict[str, Any]
Found = dict[str, list[Result]]  # row -> its runs, one per seed
HEAD = ("row", "seeds", "image AUROC", "pixel AUROC", "AUPRO", "training, CPU min", "remember, CPU s", "images/s")
WHOLE = ("fit in all, CPU min", "memory, MB")  # of runs that know it
UNSEEDED = ("pixels", "backbone")  # features that are not learnt
FITTED = "+ unadapted"  # the look of an adaptor as a fit compares
PROVED = ("synthetic, image", "synthetic, pixel")  # of runs that kept good images back


def patch_report(
    tables: Mapping[str, PatchTable],
    scale: str,
    seeds: list[int],
    folder: Path,
    pictures: Mapping[str, str] | None = None,
) -> str:
    """A page with every table: what was run, what came out, and the paper's numbers where it has them."""
    command = f"firm bench {' '.join(tables)} --scale {scale} --seeds {len(seeds)} --threads 1 --out PAGE"
    parts = ["# Industrial benchmarks", SCALE_NOTE[scale], f"Written by `{command}`.", _legend()]
    for name, table in tables.items():
        picture = [f"![accuracy over CPU time]({pictures[name]})"] if pictures and name in pictures else []
        blocks = [_block(name, data, patch_runs(table, data, scale, seeds, folder)) for data in table.data]
        parts += [f"## {table.title}", *picture, *blocks]
    return "\n\n".join(parts) + "\n"


def patch_runs(table: PatchTable, data: str, scale: str, seeds: list[int], folder: Path) -> Found:
    """The stored runs of one product, row by row."""
    found: Found = {}
    for row in table.rows:
        paths = [result_path(folder, patch_experiment(table, data, row, scale, seed)) for seed in seeds]
        found[row] = [json.loads(path.read_text()) for path in paths if path.exists()]
    return found


def _legend() -> str:
    return (
        "AUROC and AUPRO in %: mean ± sample deviation over seeds, in brackets the mean 95 % bootstrap interval over "
        "the test images; with few defective images such intervals run a little narrow. `pixels` compares plain pixels "
        "and learns nothing, `untrained` is the encoder as initialised; `+ pixels` adds the standardised scores of "
        "plain pixels to the encoder's. Of pretrained features, `patchcore` leaves out all that is ours and keeps a "
        "coreset of 10 % of the cells (of magnetic tile, which has 731,136, 0.5 %), `unadapted` "
        "learns nothing, and `+ unadapted` adds its standardised scores to the adaptor's. Light, pose and reach were "
        "chosen on good images with synthetic defects, once for all rows, but `evened light` is the one that plain "
        "pixels choose. CPU time is of one thread; `fit in all` is "
        "choice, features, training and memory together. `synthetic` is measured on good images kept back, as they are "
        "and with synthetic defects of six kinds, each kind counting alike: settings may be chosen by it, for it sees "
        "no real defect."
    )


def _block(table: str, data: str, found: Found) -> str:
    runs = [run for some in found.values() for run in some]
    lines = [f"### {data}", ""]
    if not runs:
        return "\n".join([*lines, "Not run yet."])
    head = HEAD + _further(runs)
    typical = (found.get("firm") or runs)[0]  # a baseline may have settings of its own
    lines += [_setting(typical), "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row, some in found.items():
        for look in some[0]["final"] if some else ():
            cells = [*_line(f"{row} {look}".strip(), look, some), *_rest(look, some, head)]
            lines.append("| " + " | ".join(cells) + " |")
    below = [*_kinds(found), *_paired(found), *_gate(found), *_trivial(runs[0]), *_paper(table, data)]
    return "\n".join([*lines, *below])


def _setting(run: Result) -> str:
    condition, tiling, origin = run["recipe"]["conditioning"], run["recipe"]["tiling"], run["origin"]
    where = ""
    if tiling["kind"] == "grid":
        reach = run["recipe"]["memory"]["reach"]
        near = "all good patches" if reach < 0 else f"good patches within {reach} cells"
        where = f"patches of {tiling['size']} px at stride {tiling['stride']}, compared with {near}; "
    pose = "aligned" if condition["align"] else "as they lie"
    return (
        f"{run['good_images']} good and {run['test_images']} test images; light `{condition['light']}`, {pose}; {where}"
        f"torch {origin['torch']}, {origin['machine']}, {origin['device']}, {origin['threads']} thread(s)."
    )


def _line(name: str, look: str, runs: list[Result]) -> list[str]:
    finals = [run["final"][look] for run in runs]
    stuck = any(run["diagnostics"] and run["diagnostics"]["collapsed"] for run in runs)
    minutes = [run["training_seconds"] / 60 for run in runs]
    return [
        name + (" (collapsed)" if stuck else ""),
        str(len(runs)),
        _interval([final["overall"]["auroc"] for final in finals]),
        *[_pixelwise(finals, measure) for measure in ("pixel_auroc", "aupro")],
        f"{mean_std(minutes)[0]:.1f}",
        f"{mean_std([final['remember_seconds'] for final in finals])[0]:.0f}",
        f"{mean_std([final['images_per_second'] for final in finals])[0]:.1f}",
    ]


def _further(runs: list[Result]) -> tuple[str, ...]:
    """The columns that not every table has."""
    whole = any("prepare_seconds" in run for run in runs)
    proved = any("synthetic" in final for run in runs for final in run["final"].values())
    return (WHOLE if whole else ()) + (PROVED if proved else ())


def _rest(look: str, runs: list[Result], head: tuple[str, ...]) -> list[str]:
    finals = [run["final"][look] for run in runs]
    cells: list[str] = []
    if WHOLE[0] in head:
        known = [run for run in runs if run.get("peak_megabytes") and not run["resumed"]]
        steps = ("prepare_seconds", "training_seconds")
        seconds = [sum(run[step] for step in steps) + run["final"][look]["remember_seconds"] for run in known]
        told = [f"{mean_std(seconds)[0] / 60:.1f}", f"{max(run['peak_megabytes'] for run in known)}"] if known else []
        cells += told or ["-", "-"]
    if PROVED[0] in head:
        proofs = [final["synthetic"] for final in finals if "synthetic" in final]
        means = [mean_std([proof[name] for proof in proofs])[0] for name in ("auroc", "pixel_auroc") if proofs]
        cells += [f"{100 * mean:.1f}" for mean in means] or ["-", "-"]
    return cells


def _pixelwise(finals: list[Result], measure: str) -> str:
    found = [final["overall"]["localisation"] for final in finals]
    return _interval([one[measure] for one in found]) if all(found) else "-"


def _kinds(found: Found) -> list[str]:
    """Image and pixel AUROC for every kind of defect, where there are several."""
    kinds = sorted(
        {kind for runs in found.values() for run in runs for one in run["final"].values() for kind in one["kinds"]}
    )
    if len(kinds) < 2:
        return []
    lines = ["", "Image / pixel AUROC by kind of defect:", ""]
    lines += ["| row | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds)]
    for row, runs in found.items():
        for look in runs[0]["final"] if runs else ():
            cells = [_kind_cell([run["final"][look]["kinds"][kind] for run in runs]) for kind in kinds]
            lines.append(f"| {f'{row} {look}'.strip()} | " + " | ".join(cells) + " |")
    return lines


def _kind_cell(found: list[Result]) -> str:
    image = 100 * mean_std([one["auroc"]["value"] for one in found])[0]
    if not all(one["localisation"] for one in found):
        return f"{image:.1f}"
    pixel = 100 * mean_std([one["localisation"]["pixel_auroc"]["value"] for one in found])[0]
    return f"{image:.1f} / {pixel:.1f}"


def _paired(found: Found) -> list[str]:
    """Differences to FIRM seed by seed: the seeds share weights and batches, so chance cancels.

    A single run of features that no seed decides is compared with every seed.
    """
    parts = []
    for row, runs in found.items():
        rival = _rival(row, found)
        others = {run["seed"]: _image(run) for run in runs}
        if len(runs) == 1 and runs[0]["recipe"]["features"] in UNSEEDED:
            others = dict.fromkeys((run["seed"] for run in rival), _image(runs[0]))
        pairs = [_image(run) - others[run["seed"]] for run in rival if row != "firm" and run["seed"] in others]
        if pairs:
            parts.append(_differing(row, pairs))
    beside = any(FITTED in run["final"] for run in found.get("firm", []))
    told = f"image AUROC seed by seed{f', each {FITTED} where it is adapted' if beside else ''}"
    return ["", f"FIRM less, {told}: {'; '.join(parts)}."] if parts else []


def _gate(found: Found) -> list[str]:
    """Whether FIRM beats plain pixels under the same preprocessing, seed by seed: what does not is of no use."""
    parts = []
    for row, runs in found.items():
        kin = f"pixels, {row.partition(', ')[2]}"
        plain = found.get(kin if kin in found else "pixels", [])
        for look in runs[0]["final"] if runs and plain and row.partition(", ")[0] == "firm" else ():
            over = [_value(run["final"][look]) - _image(plain[0]) for run in runs]
            parts.append(_differing(f"{row} {look}".strip(), over))
    return ["", f"The gate, image AUROC less that of plain pixels: {'; '.join(parts)}."] if parts else []


def _differing(name: str, values: list[float]) -> str:
    """The mean difference, and that of every seed."""
    return f"{name} {100 * mean_std(values)[0]:+.1f} ({', '.join(f'{100 * value:+.1f}' for value in values)})"


def _rival(row: str, found: Found) -> list[Result]:
    """FIRM's runs to compare a row with: those that differ from it in nothing else, where there are such."""
    name, _, how = row.partition(", ")
    return found.get(f"firm, {how}" if name != "firm" and f"firm, {how}" in found else "firm", [])


def _image(run: Result) -> float:
    """Of adapted features those beside unadapted ones, by which a fit decides; else the first look, the plain one."""
    final = run["final"].get(FITTED) or next(iter(run["final"].values()))
    return _value(final)


def _value(final: Result) -> float:
    return float(final["overall"]["auroc"]["value"])


def _trivial(run: Result) -> list[str]:
    found = next(iter(run["final"].values()))["trivial"]
    told = f"Brightness alone {100 * found['brightness']:.1f}, nearest whole image {100 * found['neighbour']:.1f}"
    return ["", f"{told}: what knows nothing of defects reaches."]


def _paper(table: str, data: str) -> list[str]:
    content = json.loads(resources.files("firm.recipes").joinpath("published.json").read_text())
    main, ablation = content["mvtec"].get(data), content["mvtec_ablation"].get(data)
    if main is None or ablation is None:
        return []
    if table == "mvtec-ablation":
        return ["", "The paper: " + ", ".join(f"{name} {value}" for name, value in ablation.items()) + "."]
    listed = ", ".join(f"{name} {'-' if i is None else i} / {p}" for name, (i, p) in main.items())
    return ["", f"The paper, image / pixel, its full scale: {listed}."]


def _interval(values: list[Result]) -> str:
    low, high = (100 * mean_std([one[side] for one in values])[0] for side in ("low", "high"))
    mean, deviation = mean_std([one["value"] for one in values])
    spread = f" ± {100 * deviation:.1f}" if len(values) > 1 else ""
    return f"{100 * mean:.1f}{spread} [{low:.1f}, {high:.1f}]"


def draw_patch_curves(table: PatchTable, scale: str, seeds: list[int], folder: Path, path: Path) -> None:
    """Image AUROC over CPU minutes of training, one panel per product, one line per row."""
    figure, axes = plt.subplots(1, len(table.data), figsize=(5.5 * len(table.data), 3.6), squeeze=False)
    for place, data in zip(axes[0], table.data, strict=True):
        for number, (row, runs) in enumerate(patch_runs(table, data, scale, seeds, folder).items()):
            for run in runs:
                minutes = [probe["seconds"] / 60 for probe in run["probes"]] + [run["training_seconds"] / 60]
                values = [100 * probe["auroc"] for probe in run["probes"]] + [100 * _image(run)]
                place.plot(minutes, values, marker="o", markersize=3, color=f"C{number}", label=row)
        place.set_title(f"{data}, {SCALE_TITLE[scale]}", fontsize=9)
        place.set_xlabel("CPU minutes of training, one thread", fontsize=8)
        place.set_ylabel("image AUROC %", fontsize=8)
        place.grid(alpha=0.3)
        if place.get_legend_handles_labels()[0]:
            place.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
