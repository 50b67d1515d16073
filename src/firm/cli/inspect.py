"""The verb that decides: inspect, for a batch of images or for folders that are watched."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from firm.cli.options import AsJson, Device, Model, Output, Strict, Threads
from firm.cli.terminal import reporting, say, show, use_device, warn, warn_left_out
from firm.errors import DataError, SettingError, named

if TYPE_CHECKING:
    from firm.decision.calibration import Calibration
    from firm.decision.verdict import Verdict
    from firm.detector.detector import Detector
    from firm.detector.inspection import InspectedImage, Inspection

UNREAD, REVIEWED, FAILED = 1, 3, 4  # exit codes; 0: all PASS, 2: a mistake in what was asked
JOURNAL, PAGE, HEAT = "watched.jsonl", "watched.html", "heat"  # what a watch writes


def inspect(
    model: Model,
    images: Annotated[list[Path], Argument(help="Image files and folders.")],
    report: Annotated[
        Path | None, Option(help="Write report.html, verdicts.csv and verdicts.jsonl into this folder.")
    ] = None,
    maps: Annotated[
        Path | None, Option(help="Write every image under its heat map into this folder, sub-folders kept.")
    ] = None,
    watch: Annotated[
        bool, Option("--watch", help="Decide every image that appears in the folders, once; needs --report.")
    ] = False,
    gallery: Annotated[int, Option(min=0, help="How many images the report shows, the worst first.")] = 500,
    device: Device = "cpu",
    threads: Threads = 0,
    strict: Strict = False,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Decide PASS, REVIEW or FAIL for every image, say where, and write a report.

    The exit code is 0 if all PASS, 4 if any FAILs, 1 if a file could not be read, 3 if some are for REVIEW, 2 if
    nothing could be done. A watch ends with 0 when it is stopped; started again, it resumes.
    """
    from firm.data.folder import find_files, refuse_mixing
    from firm.detector.detector import Detector
    from firm.detector.inspection import Inspection
    from firm.report.heatmap import places
    from firm.report.page import write_inspection

    use_device(device, threads)
    for folder in filter(None, (report, maps)):
        refuse_mixing(folder, images)
    if watch and (report is None or maps is not None):
        raise SettingError("--watch keeps its decisions and heat maps in the folder of --report; name that one alone")
    detector = Detector.load(model, device=device)
    by = detector.decides  # refused before an image is read
    if watch and report is not None:
        return _watch(detector, images, report, as_json=as_json)
    if maps is not None and not detector.model.has_maps:
        raise SettingError("this detector scores whole images and has no heat maps; leave --maps out")
    files = find_files(images)
    targets = {} if maps is None else {str(f): maps / p for f, p in zip(files, places(files, images), strict=True)}
    with reporting() as listener:
        batch = Inspection(detector, strict, on_image=listener.count("inspecting", len(files)))
        inspected = _with_maps(batch(files, explain=report is not None), targets)
        page = None
        if report is None:
            deque(inspected, maxlen=0)  # inspected, and nothing kept
        else:
            now = datetime.now().astimezone().strftime("%Y-%m-%d at %H:%M %Z")
            page = write_inspection(report, batch, inspected, model=model.name, gallery=gallery, when=now)
    warn_left_out(batch.left_out if batch.verdicts else batch.left_out[1:])
    if not batch.verdicts:
        raise DataError(f"none of the images could be read: {batch.left_out[0][1]}")
    for note in batch.notes:
        warn(note)
    show(_values(batch, page, targets), "\n".join(_lines(batch, by, page, maps)), as_json)
    counts = batch.counts()
    raise Exit(FAILED if counts["FAIL"] else UNREAD if batch.left_out else REVIEWED if counts["REVIEW"] else 0)


def _with_maps(images: Iterable[InspectedImage], targets: dict[str, Path]) -> Iterator[InspectedImage]:
    """The images, each heat map written as it passes."""
    from firm.report.heatmap import write_overlay

    for image in images:
        if targets and image.heat is not None:
            write_overlay(
                targets[image.verdict.image], image.picture, image.heat, image.verdict.review, marked=image.marked
            )
        yield image
        del image  # else it would live on while the next one is made


def _values(batch: Inspection, page: Path | None, targets: dict[str, Path]) -> dict[str, Any]:
    drifts = {"drift": batch.drift(), "light": batch.light_drift()}
    written = ({"map": str(targets[verdict.image])} if targets else {} for verdict in batch.verdicts)
    return {
        "report": None if page is None else str(page),
        "counts": batch.counts(),
        "images": [asdict(verdict) | file for verdict, file in zip(batch.verdicts, written, strict=True)],
        "left_out": [{"file": file, "reason": reason} for file, reason in batch.left_out],
        **{name: found and asdict(found) | {"sentence": found.sentence} for name, found in drifts.items()},
    }


def _lines(batch: Inspection, by: Calibration, page: Path | None, maps: Path | None) -> list[str]:
    counts = batch.counts()
    lines = [_line(verdict) for verdict in batch.verdicts]
    lines.append(
        f"{len(lines)} image{'' if len(lines) == 1 else 's'}: {counts['PASS']} PASS up to {by.review:.6g}, "
        f"{counts['REVIEW']} REVIEW, {counts['FAIL']} FAIL above {by.fail:.6g}"
    )
    if maps is not None:
        lines.append(f"heat maps, in colours from 0 to {2 * by.review:.6g}, are in {named(maps)}")
    return lines if page is None else [*lines, f"see {named(page)}"]


def _line(verdict: Verdict) -> str:
    count = len(verdict.regions)
    where = f"  {count} region{'' if count == 1 else 's'}" if count else ""
    return f"{verdict.verdict:<6}  {verdict.score:.6f}  {named(verdict.image)}{where}"


def _watch(detector: Detector, folders: list[Path], report: Path, *, as_json: bool) -> None:
    """Print a line for every image and keep it in the journal; what has a line there is not decided again."""
    from firm.deploy.journal import Journal
    from firm.deploy.watch import decide_by, watch
    from firm.report.live_page import LivePage
    from firm.runtime.platform import stop_signals

    by = detector.decides
    page = LivePage(report / PAGE, f"Watching {', '.join(map(str, folders))}", by.scores, (by.review, by.fail))
    with Journal(report / JOURNAL) as journal, stop_signals() as asked:
        page.add(journal.lines)
        before, where = sum(page.counts.values()), ", ".join(map(named, folders))
        say(f"watching {where}; decisions are kept in {named(journal.path)}" + (f", {before} so far" if before else ""))
        page.write()
        say(f"see {named(page.path)}, which reloads itself")

        def stop() -> bool:  # asked at every listing: the page is no later than that
            page.update(time.monotonic())
            return bool(asked)

        for line in watch(folders, decide_by(detector, folders, report / HEAT), journal, stop=stop, tell=warn):
            print(json.dumps(line) if as_json else _watched_line(line), flush=True)
            page.add([line])
        page.write()
        say(f"stopped; {sum(page.counts.values())} decisions are in {named(journal.path)}")


def _watched_line(line: dict[str, Any]) -> str:
    if "unreadable" in line:
        return f"UNREAD  {named(line['unreadable'])}"
    return f"{line['verdict']:<6}  {line['score']:.6f}  {named(line['file'])}"
