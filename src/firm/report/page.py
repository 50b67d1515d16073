"""An inspection as one HTML file that opens anywhere without a network, with its verdicts as CSV and JSON lines.

Images arrive one by one and are let go again: entries of the gallery wait on disk, only the worst are kept, and the
three files take their names when all of them are whole.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import heapq
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

from firm.errors import FirmError, named
from firm.report.entry import SIGNS, Shown, entry, escaped, scale
from firm.report.histogram import histogram
from firm.report.ledger import csv_head, csv_row, json_line
from firm.verdicts import Verdict

PAGE, TABLE, LINES = "report.html", "verdicts.csv", "verdicts.jsonl"
RANKS = {verdict: rank for rank, verdict in enumerate(SIGNS)}  # the worst verdict first
GALLERY = 500


def write_page(
    folder: Path,
    shown: Iterable[Shown],
    *,
    title: str,
    good_scores: Sequence[float],
    quarantined: Sequence[tuple[str, str]] = (),
    card: dict[str, Any] | None = None,
    notes: Sequence[str] = (),
    gallery: int = GALLERY,
    when: str = "",
) -> Path:
    """Write report.html, verdicts.csv and verdicts.jsonl into the folder; old ones stay until the new are whole.

    `shown` is consumed image by image. Beyond the `gallery` worst, an image is in the two tables only. `when` it was
    inspected is said if it is given.
    """
    if gallery < 0:
        raise FirmError(f"gallery is {gallery}; the number of images shown is 0 or more")
    with _scratch(folder) as scratch:
        batch = _gather(scratch, shown, gallery)
        with _writing(folder / PAGE), open(scratch / PAGE, "w", encoding="utf-8", newline="\n") as file:
            for part in _page(batch, title, good_scores, quarantined, card or {}, notes, when):
                file.write(part)
            _settle(file)
        for name in (TABLE, LINES, PAGE):  # the page last: where it is new, the tables beside it are too
            with _writing(folder / name):
                os.replace(scratch / name, folder / name)
    return folder / PAGE


@dataclass(order=True)
class _Kept:
    """An entry that waits on disk; the least of all is the first to go: mildest verdict, lowest score, latest."""

    harm: tuple[int, float, int]
    path: Path = field(compare=False)


@dataclass
class _Batch:
    """What is remembered of all images: counts, scores, one verdict for what they share, and the worst entries."""

    first: Verdict | None = None
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIGNS, 0))
    scores: list[float] = field(default_factory=list)
    kept: list[_Kept] = field(default_factory=list)

    @property
    def limits(self) -> tuple[float, float] | None:
        return None if self.first is None else (self.first.review, self.first.fail)

    def count(self, verdict: Verdict) -> None:
        self.first = self.first or verdict
        _check(verdict, self.first)
        self.counts[verdict.verdict] += 1
        self.scores.append(verdict.score)

    def keep(self, one: Shown, scratch: Path, gallery: int) -> None:
        """Write the entry if it is among the worst so far, in place of the one that then no longer is."""
        number, rank = len(self.scores), RANKS[one.verdict.verdict]
        waiting = _Kept((-rank, one.verdict.score, -number), scratch / f"{number}.html")
        if not gallery or (len(self.kept) == gallery and waiting < self.kept[0]):
            return
        waiting.path.write_text(entry(one, rank), encoding="utf-8", newline="\n")
        if len(self.kept) < gallery:
            heapq.heappush(self.kept, waiting)
        else:
            heapq.heappushpop(self.kept, waiting).path.unlink()


def _gather(scratch: Path, shown: Iterable[Shown], gallery: int) -> _Batch:
    """Both tables written, the worst entries on disk, the rest counted; never more than one image in memory."""
    batch = _Batch()
    with (
        _writing(scratch.parent / TABLE),
        open(scratch / TABLE, "w", encoding="utf-8", newline="") as table,
        open(scratch / LINES, "w", encoding="utf-8", newline="\n") as lines,
    ):
        table.write(csv_head())
        for one in _unharmed(shown):
            batch.count(one.verdict)
            table.write(csv_row(one.verdict))
            lines.write(json_line(one.verdict))
            batch.keep(one, scratch, gallery)
            del one  # else it would live on while the next is made
        _settle(table)
        _settle(lines)
    return batch


def _check(verdict: Verdict, first: Verdict) -> None:
    name = named(verdict.image)
    if verdict.verdict not in RANKS:
        raise FirmError(f"the verdict of {name} is {verdict.verdict!r}; it is one of {', '.join(SIGNS)}")
    numbers = (verdict.score, verdict.review, verdict.fail, *(one.peak for one in verdict.regions))
    if not all(math.isfinite(one) for one in numbers):
        raise FirmError(f"a score, threshold or peak of {name} is not finite; inspect it again with a sound detector")
    if _shared(verdict) != _shared(first):
        raise FirmError(f"{name} was not decided by the model and thresholds of the others; write a report for each")


def _shared(verdict: Verdict) -> tuple[str, str, float, float]:
    return verdict.model, verdict.calibration, verdict.review, verdict.fail


class _NotOurs(Exception):
    """Carries an OSError of whoever makes the images past those who speak of writing."""

    def __init__(self, error: OSError) -> None:
        self.error = error


def _unharmed(shown: Iterable[Shown]) -> Iterator[Shown]:
    try:
        yield from shown
    except OSError as error:
        raise _NotOurs(error) from error


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """A failed write as a sentence; what the images themselves raise goes through as it was."""
    try:
        yield
    except _NotOurs as wrapped:
        raise wrapped.error from wrapped.error.__cause__
    except OSError as error:
        said = f"cannot write {named(path)}: {error.strerror or error}"
        raise FirmError(f"{said}; free some space or name another folder, an older report is unchanged") from error


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder beside the report for what is not whole yet, gone afterwards whatever happened."""
    with _writing(folder / PAGE):
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder, prefix=".report."))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _settle(file: IO[str]) -> None:
    """Have it on the disk before it gets its name."""
    file.flush()
    os.fsync(file.fileno())


def _page(
    batch: _Batch,
    title: str,
    good_scores: Sequence[float],
    quarantined: Sequence[tuple[str, str]],
    card: dict[str, Any],
    notes: Sequence[str],
    when: str,
) -> Iterator[str]:
    """The page piece by piece; an entry is read back only when its turn has come."""
    style, script = (files("firm.report").joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    yield _head(title, style, script)
    yield f"<h1>{escaped(title)}</h1>\n"
    yield "".join(f'<p class="note" role="note">{escaped(note)}</p>\n' for note in notes)
    yield _numbers(batch, len(quarantined), when)
    yield f'<section><h2>Scores</h2>\n<div class="chart">{histogram(good_scores, batch.scores, batch.limits)}</div>\n'
    yield "</section>\n<section>\n<h2>Images</h2>\n"
    yield _tools(batch)
    for kept in sorted(batch.kept, reverse=True):
        yield kept.path.read_text("utf-8")
    yield "</ol>\n</section>\n"
    yield _left_out(quarantined)
    yield _card(batch, card)
    yield f"</main>\n<script>{script}</script>\n</body>\n</html>\n"


def _head(title: str, style: str, script: str) -> str:
    """Only this style and this script may act, and nothing may be fetched, whatever a file is called."""
    allowed = f"img-src data:; style-src '{_sha(style)}'; script-src '{_sha(script)}'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; base-uri 'none'; form-action 'none'; {allowed}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escaped(title)}</title>
<style>{style}</style>
</head>
<body>
<main>
"""


def _sha(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _numbers(batch: _Batch, quarantined: int, when: str) -> str:
    """The counts as large numbers and as one bar, worst first."""
    total = len(batch.scores)
    tiles = [
        f'<li class="{kind.lower()}"><b>{count}</b> <span><span aria-hidden="true">{SIGNS[kind]}</span> {kind}</span>'
        f"<small>{100 * count / max(total, 1):.1f} %</small></li>"
        for kind, count in batch.counts.items()
    ]
    if quarantined:
        tiles.append(f'<li class="aside"><b>{quarantined}</b> <span>not inspected</span><small>see below</small></li>')
    said = ", ".join(f"{count} {kind}" for kind, count in batch.counts.items())
    bars, left = [], 0.0
    for kind, count in batch.counts.items():
        wide = 1000 * count / max(total, 1)
        bars.append(f'<rect class="{kind.lower()}" x="{left:.2f}" width="{wide:.2f}" height="16"/>')
        left += wide
    return f"""<section aria-label="verdicts">
<ul class="numbers">{"".join(tiles)}</ul>
<svg class="bar" viewBox="0 0 1000 16" preserveAspectRatio="none" role="img" aria-label="of {total}: {said}">
{"".join(bars)}</svg>
<p class="total">{total} images inspected{f" on {escaped(when)}" if when else ""}</p>
</section>
"""


def _tools(batch: _Batch) -> str:
    """What is shown, the scale of the colours, and tools that stay hidden until a script brings them to life."""
    total, count = len(batch.scores), len(batch.kept)
    what = (
        f"All {total} images" if count == total else f"The {count} worst of {total} images; the rest is in the tables"
    )
    boxes = "".join(
        f'<label class="mark {kind.lower()}"><input type="checkbox" data-show="{kind.lower()}" checked> {sign} {kind}'
        "</label>"
        for kind, sign in SIGNS.items()
    )
    bar = "" if batch.first is None else scale(batch.first.review)
    return f"""<p>{what}, worst first. Point at a picture, or select it, to see its heat map;
every image is in <a href="{TABLE}">{TABLE}</a> and <a href="{LINES}">{LINES}</a>.</p>
{bar}<div class="tools" hidden>
<fieldset><legend>show</legend>{boxes}</fieldset>
<label>order <select id="order"><option value="worst">worst first</option><option value="high">highest score</option>
<option value="low">lowest score</option><option value="name">name</option><option value="verdict">verdict, then name
</option></select></label>
<label><input type="checkbox" id="heat"> all heat maps</label>
<span id="count" role="status"></span>
</div>
<ol class="gallery">
"""


def _left_out(quarantined: Sequence[tuple[str, str]]) -> str:
    if not quarantined:
        return ""
    rows = "".join(f"<tr><td>{escaped(name)}</td><td>{escaped(reason)}</td></tr>\n" for name, reason in quarantined)
    heads = '<tr><th scope="col">file</th><th scope="col">reason</th></tr>'
    return (
        f"<section>\n<h2>Not inspected</h2>\n<table><thead>{heads}</thead><tbody>\n{rows}</tbody></table>\n</section>\n"
    )


def _card(batch: _Batch, card: dict[str, Any]) -> str:
    """Who decided, and all settings of the model, nested ones by their path."""
    facts: list[tuple[str, str]] = []
    if batch.first is not None:
        facts += [("model", batch.first.model), ("calibration", batch.first.calibration)]
        facts += [("review above", f"{batch.first.review:.6g}"), ("fail above", f"{batch.first.fail:.6g}")]
    facts += _leaves("", card)
    rows = "".join(f'<tr><th scope="row">{escaped(name)}</th><td>{escaped(said)}</td></tr>\n' for name, said in facts)
    return f"<section>\n<h2>Model</h2>\n<table><tbody>\n{rows}</tbody></table>\n</section>\n" if rows else ""


def _leaves(path: str, value: object) -> Iterator[tuple[str, str]]:
    """Every setting by its path, as a person would say it; what is empty is said to be."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{path}.{name}" if path else str(name), inner)
    elif isinstance(value, list | tuple) and any(isinstance(one, dict | list | tuple) for one in value):
        yield from _leaves(path, dict(enumerate(value)))
    elif isinstance(value, list | tuple):
        yield path, ", ".join(_word(one) for one in value) or "none"
    elif path:
        yield path, _word(value)


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None or value == {} else str(value)
