"""Stored runs of promises -> a Markdown page: what was promised of good parts, and what came true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from firm.recipes.industrial import PROMISES, PatchTable
from firm.report.industrial import patch_runs
from firm.report.tables import SCALE_NOTE

HEAD = (
    "product", "row", "seed", "good images", "held out (parts)", "REVIEW or FAIL: promised", "95 % sure", "realised",
    "FAIL: promised", "95 % sure", "realised", "moved as a whole", "defects caught", "image AUROC",
)  # fmt: skip


def promise_report(scale: str, seeds: list[int], folder: Path, table: PatchTable = PROMISES) -> str:
    """All runs there are, one line each."""
    command = f"firm bench promises --scale {scale} --seeds {len(seeds)} --threads 1 --out PAGE"
    runs = [
        run for data in table.data for some in patch_runs(table, data, scale, seeds, folder).values() for run in some
    ]
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD), *map(_line, runs)]
    about = (
        "A detector is fitted on the good images of a product as `firm fit` does it unasked, some of them held out for "
        "the thresholds. Then the images to test on are judged. `promised` is the rate of good parts that thresholds "
        "answer for, `realised` what happened on good images nobody had seen, with its exact 95 % interval. A promise "
        "holds on average over calibrations, and one from few parts may lie well above it or below; `95 % sure` is "
        "what a single calibration keeps in 19 of 20 cases. Drawn products are judged on 400 good parts. `moved as a "
        "whole` is what `firm inspect` says of these good images beside those of the calibration: of a batch that "
        "moved nothing was promised. Of `parts kept back` a fifth of the good images that come with the product, "
        "drawn anew with every seed, is kept from the fit and judged, instead of those to test on."
    )
    parts = [f"# {table.title}", SCALE_NOTE[scale] if scale == "smoke" else "", f"Written by `{command}`.", about]
    text = ["\n".join(lines), *_pooled(runs)] if runs else ["Not run yet."]
    return "\n\n".join([*filter(None, parts), *text]) + "\n"


def _pooled(runs: list[dict[str, Any]]) -> list[str]:
    """What all runs of a row promised on average, and what came true of it."""
    told = []
    for row in dict.fromkeys(run["row"] for run in runs):
        some = [run for run in runs if run["row"] == row]
        found = [run["realised"]["review"] for run in some]
        promised = 100 * sum(run["promised"]["review"] for run in some) / len(some)
        count, of = (sum(one[name] for one in found) for name in ("count", "of"))
        above = sum(one["count"] / one["of"] > run["surely"]["review"] for run, one in zip(some, found, strict=True))
        told.append(
            f"{row}: {len(some)} calibrations promised at most {promised:.1f} % on average; "
            f"{100 * count / of:.1f} % ({count} of {of}) of the good images they had not seen did not PASS. "
            f"{above} of the {len(some)} lie above what they were 95 % sure of."
        )
    return told


def _line(run: dict[str, Any]) -> str:
    caught, found = run["caught"], run["auroc"]
    cells = [run["data"], run["row"], str(run["seed"]), str(run["good_images"])]
    cells.append(f"{run['calibration']['images']} ({run['calibration']['parts']})")
    for name in ("review", "fail"):
        cells += [f"{100 * run[said][name]:.1f} %" for said in ("promised", "surely")]
        cells.append(_rate(run["realised"][name]))
    cells.append(_moved(run["moved"]))
    cells.append(f"{100 * caught['share']:.1f} % of {caught['of']}")
    cells.append(f"{100 * found['value']:.1f} [{100 * found['low']:.1f}, {100 * found['high']:.1f}]")
    return "| " + " | ".join(cells) + " |"


def _moved(found: dict[str, Any]) -> str:
    words = [f"score {found['scores']}"] if found["scores"] else []
    words += [f"{100 * abs(found['by']):.0f} % {found['light']}"] if found["light"] else []
    return ", ".join(words) or "no"


def _rate(found: dict[str, Any]) -> str:
    share = 100 * found["count"] / found["of"]
    return f"{share:.1f} % ({found['count']} of {found['of']}; {100 * found['low']:.1f} to {100 * found['high']:.1f})"
