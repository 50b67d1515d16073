"""An inspection as one HTML file that opens anywhere without a network, with its verdicts as CSV and JSON lines.

Images arrive one by one and are released again: entries of the gallery wait on disk, only the worst are kept, and the
three files get their names when all of them are complete.
"""

import heapq
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from markupsafe import Markup

from firm.decision.calibration import summary_of
from firm.decision.verdict import Verdict
from firm.detector.inspection import InspectedImage, Inspection
from firm.report.gallery import RANKS, entry, scale
from firm.report.histogram import histogram
from firm.report.html import SIGNS, generate
from firm.report.ledger import COLUMNS, MARK, csv_line, csv_row, json_line
from firm.runtime.files import folder_lock, replace_file, writing

PAGE, TABLE, LINES = "report.html", "verdicts.csv", "verdicts.jsonl"
GALLERY = 500
KEPT = "an older report is unchanged"
SCRATCH = ".report."  # what is not complete

Images = Iterable[InspectedImage]


def write_inspection(
    folder: Path, inspection: Inspection, images: Images, *, model: str, gallery: int = GALLERY, when: str = ""
) -> Path:
    """The report of a batch that is inspected while it is written; `when` is the time to print on it."""
    by = inspection.detector.decides
    return write_page(
        folder,
        images,
        title=f"Inspection by {model}",
        good_scores=by.scores,
        left_out=inspection.left_out,
        card={"thresholds": [f"thresholds {by.source}", *summary_of(by)], **inspection.detector.card()},
        notes=inspection.notes,  # complete after the last image
        gallery=gallery,
        when=when,
    )


def write_page(
    folder: Path,
    images: Images,
    *,
    title: str,
    good_scores: Sequence[float],
    left_out: Sequence[tuple[str, str]] = (),
    card: dict[str, Any] | None = None,
    notes: Sequence[str] = (),
    gallery: int = GALLERY,
    when: str = "",
) -> Path:
    """Write report.html, verdicts.csv and verdicts.jsonl into the folder; old ones stay until the new are complete.

    `images` is consumed one by one. Beyond the `gallery` worst, an image is in the two tables only.
    """
    with writing(folder / PAGE, KEPT):
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        beside = TemporaryDirectory(dir=folder, prefix=SCRATCH, ignore_cleanup_errors=True)
    with beside as name, folder_lock(Path(name)):
        scratch = Path(name)
        batch = _gather(scratch, images, gallery)
        limits = (batch.first.review, batch.first.fail) if batch.first else None
        values = batch.values() | {"title": title, "left_out": left_out, "notes": notes, "when": when}
        values |= {"histogram": histogram(good_scores, batch.scores, limits), "card": dict(_leaves("", card or {}))}
        with writing(folder / PAGE, KEPT), open(scratch / PAGE, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(generate("page.html", table=TABLE, lines=LINES, **values))
            _sync(file)
        for name in (TABLE, LINES, PAGE):  # the page last: where it is new, the tables beside it are too
            with writing(folder / name, KEPT):
                replace_file(scratch / name, folder / name)
    return folder / PAGE


def _remove_abandoned(folder: Path) -> None:
    """Remove what killed processes have left; a running one holds the lock of its own."""
    for scratch in folder.glob(f"{SCRATCH}*"):
        with folder_lock(scratch) as mine:
            abandoned = mine
        if abandoned:
            shutil.rmtree(scratch, ignore_errors=True)


@dataclass
class _Batch:
    """What is kept of all images: counts, scores, one verdict for what they share, and the worst entries."""

    first: Verdict | None = None  # one detector decides all, by the same thresholds
    maps: bool = False
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIGNS, 0))
    scores: list[float] = field(default_factory=list)
    entries: list[tuple[int, float, int, Path]] = field(default_factory=list)  # on disk; the smallest goes first

    def add(self, image: InspectedImage, scratch: Path, gallery: int) -> None:
        """Count the image; write its entry if it is among the worst so far, instead of the one that no longer is."""
        verdict = image.verdict
        self.first = self.first or verdict
        self.maps |= image.heat is not None
        self.counts[verdict.verdict] += 1
        self.scores.append(verdict.score)
        number = len(self.scores)
        new = (-RANKS[verdict.verdict], verdict.score, -number, scratch / f"{number}.html")
        if not gallery or (len(self.entries) == gallery and new < self.entries[0]):
            return
        new[-1].write_text(entry(image), encoding="utf-8", newline="\n")
        heapq.heappush(self.entries, new)
        if len(self.entries) > gallery:
            heapq.heappop(self.entries)[-1].unlink()

    def values(self) -> dict[str, Any]:
        """What the template shows; an entry is read back only when its turn has come."""
        return {
            "total": len(self.scores),
            "counts": self.counts,
            "shown": len(self.entries),
            "entries": (Markup(file.read_text("utf-8")) for *_, file in sorted(self.entries, reverse=True)),
            "decided": self.first,
            "scale": scale(self.first.review) if self.first and self.maps else None,
        }


def _gather(scratch: Path, images: Images, gallery: int) -> _Batch:
    """Both tables written, the worst entries on disk, the rest counted; never more than one image in memory."""
    batch, target = _Batch(), scratch.parent / TABLE
    with ExitStack() as opened:
        with writing(target, KEPT):
            table = opened.enter_context(open(scratch / TABLE, "w", encoding="utf-8", newline=""))
            lines = opened.enter_context(open(scratch / LINES, "w", encoding="utf-8", newline="\n"))
            table.write(MARK + csv_line(COLUMNS))
        for image in images:
            with writing(target, KEPT):
                batch.add(image, scratch, gallery)
                table.write(csv_row(image.verdict))
                lines.write(json_line(image.verdict))
            del image  # else it would live on while the next one is made
        with writing(target, KEPT):
            _sync(table)
            _sync(lines)
    return batch


def _sync(file: IO[str]) -> None:
    """Have it on the disk before it gets its name."""
    file.flush()
    os.fsync(file.fileno())


def _leaves(path: str, value: object) -> Iterator[tuple[str, str]]:
    """Every setting by its path, as text; empty ones are "none"."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{path}.{name}" if path else str(name), inner)
    elif isinstance(value, list | tuple) and any(isinstance(item, dict | list | tuple) for item in value):
        yield from _leaves(path, dict(enumerate(value)))
    elif isinstance(value, list | tuple):
        yield path, ", ".join(map(_word, value)) or "none"
    elif path:
        yield path, _word(value)


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None or value == {} else str(value)
