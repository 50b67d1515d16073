"""What an evaluation found, as lines for a person and as values for a program."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from firm.cli.terminal import percent

if TYPE_CHECKING:
    from firm.evaluate import Evaluation, Kind, Trivial

HEADINGS = ("defect", "images", "image AUROC", "pixel AUROC", "AUPRO")


def as_text(data: str, found: Evaluation, limit: float, unmarked: int | None) -> str:
    """`unmarked` is the number of defective images without a mask; None if the data say nothing of kinds and masks."""
    overall = found.overall
    bad = f"{overall.images} of them defective"
    lines = [f"{data}: image AUROC {percent(overall.auroc)} on {found.images} images, {bad}"]
    lines += _ignored(found.ignored) + _where(overall, unmarked)
    lines += _table(found.kinds)
    caught, false = (
        f"{100 * found.caught:.1f} % of the anomalies caught",
        f"{100 * found.false_calls:.1f} % false calls",
    )
    lines += [f"at the threshold {limit:.6g}: {caught}, {false}", *_confusion(found.confusion)]
    return "\n".join([*lines, *_trivial(found.trivial), *_leak(found)])


def as_values(data: str, found: Evaluation, limit: float, unmarked: int | None) -> dict[str, Any]:
    """The same for a program; null where there is nothing to measure by."""
    where = found.overall.localisation
    best = None if where is None else {"value": where.best_f1, "threshold": where.best_f1_threshold}
    return {
        "data": data,
        **_measures(found.overall),
        "images": found.images,
        "defective": found.overall.images,
        "best_f1_chosen_on_the_test_set": best,
        "masks_unknown": unmarked,
        "ignored": found.ignored,
        "kinds": {name: _measures(kind) for name, kind in found.kinds.items()},
        "threshold": limit,
        "caught": found.caught,
        "false_calls": found.false_calls,
        "confusion": found.confusion,
        "copies": found.copies,
        "trivial": asdict(found.trivial) | {"suspicious": found.trivial.suspicious},
    }


def _measures(kind: Kind) -> dict[str, Any]:
    where = kind.localisation
    return {
        "images": kind.images,
        "auroc": asdict(kind.auroc),
        "pixel_auroc": None if where is None else asdict(where.pixel_auroc),
        "aupro": None if where is None else asdict(where.aupro),
    }


def _where(overall: Kind, unmarked: int | None) -> list[str]:
    """How well the places were found, by how many masks, or why that cannot be said."""
    if unmarked is None:
        return []
    doubt = f"{unmarked} of {overall.images} masks unknown"
    where = overall.localisation
    if where is None:
        return [f"pixel AUROC and AUPRO need heat maps and masks of the defects ({doubt})"]
    best = f"best F1 of pixels {100 * where.best_f1:.1f} at {where.best_f1_threshold:.6g}"
    return [
        f"pixel AUROC {percent(where.pixel_auroc)}, AUPRO {percent(where.aupro)}, "
        f"{where.regions} regions on {where.images} images, {doubt}",
        f"{best}, chosen on the test set: information, not a result",
    ]


def _ignored(images: int) -> list[str]:
    """Defects that are not to be found are no misses."""
    if not images:
        return []
    are, they = ("image is", "it is") if images == 1 else ("images are", "they are")
    return [
        f"{images} defective {are} marked only where pixels are ignored; "
        f"{they} left out of image AUROC and counted apart"
    ]


def _table(kinds: dict[str, Kind]) -> list[str]:
    """A line per kind of defect."""
    return _columns([HEADINGS, *(_row(name, kind) for name, kind in kinds.items())]) if kinds else []


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Cells one below the other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _confusion(counts: dict[str, dict[str, int]]) -> list[str]:
    """Verdicts by kind, and what part of the kind does not PASS, with its exact interval."""
    from firm.calibration import rate_of

    if not counts:
        return []
    words = tuple(next(iter(counts.values())))
    rows: list[tuple[str, ...]] = [("verdicts", *words, "not passed")]
    for kind, said in counts.items():
        rate = rate_of(sum(said.values()) - said["PASS"], sum(said.values()))
        part = f"{100 * rate.count / rate.of:.1f} % ({100 * rate.low:.1f} to {100 * rate.high:.1f})"
        rows.append((kind, *(str(said[word]) for word in words), part))
    return _columns(rows)


def _leak(found: Evaluation) -> list[str]:
    if not found.copies:
        return []
    return [f"warning: {found.copies} of the test images look like copies of learnt ones; results look too good"]


def _row(name: str, kind: Kind) -> tuple[str, ...]:
    where = kind.localisation
    pixels = ("-", "-") if where is None else (percent(where.pixel_auroc), percent(where.aupro))
    return name, str(kind.images), percent(kind.auroc), *pixels


def _trivial(trivial: Trivial) -> list[str]:
    """What scores that know nothing of defects reach, and a warning where that is much."""
    lines = [f"brightness alone {100 * trivial.brightness:.1f}, nearest whole image {100 * trivial.neighbour:.1f}"]
    if trivial.suspicious:
        lines.append(
            "warning: these know nothing of defects and yet tell bad images from good ones; before you trust the "
            "results, see whether the two differ in light, pose or origin"
        )
    return lines
