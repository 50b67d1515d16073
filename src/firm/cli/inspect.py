"""The verb that decides: inspect."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from firm.cli.inputs import deciding, refuse_mixing
from firm.cli.options import AsJson, Device, Model, Strict, Threads
from firm.cli.terminal import bar, counting, decided, say, settle, show
from firm.cli.watching import watch_folders
from firm.errors import FirmError, named

if TYPE_CHECKING:
    from firm.report.entry import Shown
    from firm.report.inspection import Inspection
    from firm.verdicts import Verdict

UNREAD, REVIEWED, FAILED = 1, 3, 4  # exit codes; 0: all PASS, 2: a mistake in what was asked


def inspect(
    model: Model,
    images: Annotated[list[Path], typer.Argument(help="Image files and folders.")],
    report: Annotated[
        Path | None,
        typer.Option(help="Write report.html, verdicts.csv and verdicts.jsonl into this folder."),
    ] = None,
    maps: Annotated[
        Path | None, typer.Option(help="Write every image under its heat map into this folder, sub-folders kept.")
    ] = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Go on with every image that appears in the folders, each once; decisions go to --report."
        ),
    ] = False,
    gallery: Annotated[int, typer.Option(min=0, help="The report shows so many images, the worst first.")] = 500,
    device: Device = "cpu",
    threads: Threads = 0,
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Decide PASS, REVIEW or FAIL for every image, say where, and write a report.

    The exit code is 0 if all PASS, 4 if any FAILs, 1 if one could not be read, 3 if some are for REVIEW, 2 if nothing
    could be done. A watch ends with 0 when it is asked to stop, and goes on where it was when it is started again.
    """
    from firm.data.folder import find_files
    from firm.report.inspection import Inspection

    settle(device, threads)
    for folder in (report, maps):
        refuse_mixing(folder, images)
    if watch and (report is None or maps is not None):
        raise FirmError("--watch keeps its decisions and heat maps in the folder of --report; name that one alone")
    detector = deciding(model, device)
    if watch and report is not None:
        watch_folders(detector, images, report, as_json=as_json)
        return
    files = find_files(images)
    if maps is not None and detector.localiser is None:
        raise FirmError("this detector looks at whole images and has no heat maps; leave --maps out")
    with bar("inspecting") as update:
        batch = Inspection(detector, strict, on_image=counting(update, len(files)))
        judged = _mapped(batch(files, explain=report is not None), files, images, maps)
        page = None
        if report is None:
            deque(judged, maxlen=0)  # judged, and nothing kept
        else:
            now = datetime.now().astimezone().strftime("%Y-%m-%d at %H:%M %Z")
            page = batch.write(report, judged, model=model.name, gallery=gallery, when=now)
    for _, reason in batch.quarantined:
        say(f"left out: {reason}")
    if not batch.verdicts:
        raise FirmError(f"none of the images could be read: {batch.quarantined[0][1]}")
    for sentence in batch.notes:
        say(f"warning: {sentence}")
    show(_values(batch, page), "\n".join(_lines(batch, page, maps)), as_json)
    raise typer.Exit(exit_code(batch))


def exit_code(batch: Inspection) -> int:
    """The worst that happened, as a number for a script."""
    counts = batch.counts()
    if counts["FAIL"]:
        return FAILED
    return UNREAD if batch.quarantined else REVIEWED if counts["REVIEW"] else 0


def _mapped(judged: Iterable[Shown], files: list[Path], paths: list[Path], maps: Path | None) -> Iterator[Shown]:
    """The images, each overlay written as it passes."""
    from firm.report.heat import places, write_overlay

    place = {str(file): where for file, where in zip(files, places(files, paths), strict=True)}
    for one in judged:
        if maps is not None:
            write_overlay(maps / place[one.verdict.image], one.picture, one.heat, one.verdict.review)
        yield one


def _values(batch: Inspection, page: Path | None) -> dict[str, Any]:
    moved, lit = batch.drift(), batch.light_drift()
    return {
        "report": None if page is None else str(page),
        "counts": batch.counts(),
        "images": [asdict(one) for one in batch.verdicts],
        "left_out": [{"file": file, "reason": reason} for file, reason in batch.quarantined],
        "drift": None if moved is None else asdict(moved) | {"sentence": moved.sentence},
        "light": None if lit is None else asdict(lit) | {"sentence": lit.sentence},
    }


def _lines(batch: Inspection, page: Path | None, maps: Path | None) -> list[str]:
    by = batch.detector.decides
    lines = [*(_line(one) for one in batch.verdicts), decided(batch.counts(), by.review, by.fail)]
    if maps is not None:
        lines.append(f"heat maps, in colours from 0 to {2 * by.review:.6g}, are in {named(maps)}")
    return lines if page is None else [*lines, f"look at {named(page)}"]


def _line(one: Verdict) -> str:
    count = len(one.regions)
    where = f"  {count} region{'' if count == 1 else 's'}" if count else ""
    return f"{one.verdict:<6}  {one.score:.6f}  {named(one.image)}{where}"
