"""Verbs that put a detector to work: score, evaluate, card."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from firm.cli.inputs import deciding, loaded, refuse_mixing
from firm.cli.options import AsJson, Data, Device, Model, Strict, Threads
from firm.cli.terminal import bar, counting, decided, say, settle, show
from firm.errors import FirmError, named

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from firm.data.folder import Skipped
    from firm.detector import Detector
    from firm.images import Preprocessing
    from firm.types import Truth

CHUNK = 128  # images decoded and scored at once

OnChunk = Callable[[int], None]


def score(
    model: Model,
    images: Annotated[list[str], typer.Argument(help="Image files, folders, or one DATASET:CLASS.")],
    maps: Annotated[
        Path | None, typer.Option(help="Write every image under its heat map into this folder, sub-folders kept.")
    ] = None,
    device: Device = "cpu",
    threads: Threads = 0,
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Score images and call each +1 (PASS) or -1 (REVIEW or FAIL). Higher = more anomalous.

    For regions, a report and exit codes by verdict there is `firm inspect`.
    """
    settle(device, threads)
    detector = deciding(model, device)
    limit, rows, left_out, reasons = detector.limit, list[dict[str, Any]](), list[str](), list[str]()
    with bar("scoring") as update:
        for some in _suspects(images, detector.preprocessing, maps, strict=strict):
            rows += _scored(detector, some, maps, counting(update, some.total, len(rows) + len(left_out)))
            left_out += some.left_out
            reasons += some.reasons
    if not rows:
        raise FirmError(f"none of the images could be read: {reasons[0]}")
    said, by = [row["verdict"] for row in rows], detector.decides
    lines = [f"{row['verdict']:<6}  {row['score']:.6f}  {named(row['image'])}" for row in rows]
    lines.append(decided({word: said.count(word) for word in ("PASS", "REVIEW", "FAIL")}, by.review, by.fail))
    if maps is not None:
        lines.append(f"heat maps, in colours from 0 to {2 * limit:.6g}, are in {named(maps)}")
    show({"threshold": limit, "images": rows, "left_out": left_out}, "\n".join(lines), as_json)
    if left_out:
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Some:
    """Images to be scored together: what each is called, where below --maps its overlay goes, how it really looks."""

    names: list[str]
    places: list[Path]
    pixels: Tensor
    pictures: Iterable[npt.NDArray[np.uint8]]  # decoded when they are asked for
    left_out: list[str]
    reasons: list[str]  # of what is left out
    total: int  # of all images, not of these


def _suspects(images: list[str], how: Preprocessing, maps: Path | None, *, strict: bool) -> Iterator[_Some]:
    """What is to be scored, in pieces that fit in memory."""
    from firm.data import DATASETS
    from firm.data.folder import find_files

    if len(images) == 1 and images[0].partition(":")[0] in DATASETS:
        yield from _tests(images[0], how, strict=strict)
        return
    paths = [Path(name) for name in images]
    files = find_files(paths)
    refuse_mixing(maps, paths)
    yield from _files(files, paths, how, strict=strict)


def _tests(data: str, how: Preprocessing, *, strict: bool) -> Iterator[_Some]:
    task, left_out = loaded(data, how.file_side, depth=how.depth, strict=strict)
    for begin in range(0, len(task.test), CHUNK):
        pixels = task.test[begin : begin + CHUNK]
        numbers = range(begin, begin + len(pixels))
        names, places = [f"{task.name} test {i}" for i in numbers], [Path(f"{i:05d}.png") for i in numbers]
        pictures = (one.expand(3, -1, -1).permute(1, 2, 0).numpy() for one in pixels)
        unread = [] if begin else left_out
        yield _Some(names, places, pixels, pictures, unread, unread, len(task.test))


def _files(files: list[Path], paths: list[Path], how: Preprocessing, *, strict: bool) -> Iterator[_Some]:
    from firm.data.folder import read_files
    from firm.images import decode
    from firm.report.heat import places

    place = dict(zip(files, places(files, paths), strict=True))
    for begin in range(0, len(files), CHUNK):
        chunk = files[begin : begin + CHUNK]
        pixels, read, skipped = read_files(chunk, how.file_side, depth=how.depth, strict=strict)
        left_out = _told(skipped)
        where, pictures = [place[file] for file in read], (decode(file, how.depth) for file in read)
        reasons = [reason for _, reason in skipped]
        yield _Some([str(file) for file in read], where, pixels, pictures, left_out, reasons, len(files))


def _told(skipped: Skipped) -> list[str]:
    """The files that could not be used, after saying why."""
    for _, reason in skipped:
        say(f"left out: {reason}")
    return [str(file) for file, _ in skipped]


def _scored(detector: Detector, some: _Some, maps: Path | None, advance: OnChunk) -> list[dict[str, Any]]:
    """Name, score and call of each image; its overlay is written if there is a folder for it."""
    from firm.report.heat import write_overlay

    if not some.names:
        return []
    limit, by = detector.limit, detector.decides
    found = None if maps is None else detector.locate(some.pixels, advance)
    scores = detector.score(some.pixels, advance) if found is None else found.scores
    rows: list[dict[str, Any]] = [
        {"image": name, "score": value, "label": -1 if value > limit else 1, "verdict": by.verdict(value)}
        for name, value in zip(some.names, scores.tolist(), strict=True)
    ]
    if maps is not None and found is not None:
        for row, place, picture, heat in zip(rows, some.places, some.pictures, found.maps, strict=True):
            write_overlay(maps / place, picture, heat.numpy(), limit)
            row["map"] = str(maps / place)
    return rows


def evaluate(
    model: Model,
    data: Data,
    report: Annotated[Path | None, typer.Option(help="Write the ROC, misses and false calls into this folder.")] = None,
    device: Device = "cpu",
    threads: Threads = 0,
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Measure a detector on labelled images.

    AUROC of images and pixels and AUPRO, with 95 % intervals, over all defects and for each kind; verdicts
    by kind, with exact intervals.
    """
    from firm.cli.findings import as_text, as_values
    from firm.evaluate import evaluation, look, seen_alone, wholly_ignored
    from firm.report.evaluation import write_pictures

    settle(device, threads)
    detector = deciding(model, device)
    images, anomalous, truth, left_out = _labelled(data, detector.preprocessing, strict=strict)
    with bar("scoring") as update:
        seen = look(detector, images, counting(update, len(images)))
    found = evaluation(detector, seen, images, anomalous, truth)
    pictures = []
    if report is not None:
        counted = ~wholly_ignored(detector.ignored, anomalous, truth)
        shown = seen_alone(counted, seen, images, anomalous, truth)
        pictures = write_pictures(report, *shown, detector.decides)
    unmarked = None if truth is None else int((anomalous & ~truth.known).sum())
    limit = detector.limit
    told = as_values(data, found, limit, unmarked) | {"left_out": left_out, "pictures": [str(one) for one in pictures]}
    lines = [as_text(data, found, limit, unmarked), *(f"look at {named(one)}" for one in pictures)]
    show(told, "\n".join(lines), as_json)
    if left_out:
        raise typer.Exit(1)


def _labelled(data: str, how: Preprocessing, *, strict: bool) -> tuple[Tensor, Tensor, Truth | None, list[str]]:
    """Test images, which are anomalous, what else is known of them, and what had to be left out."""
    from firm.data import DATASETS, folder_named
    from firm.data.folder import read_test

    if data.partition(":")[0] in DATASETS:
        task, left_out = loaded(data, how.file_side, depth=how.depth, strict=strict)
        return task.test, task.anomalous, task.truth, left_out
    folder = folder_named(data) or Path(data)
    test = read_test(folder, how.file_side, depth=how.depth, strict=strict)
    left_out = _told(test.skipped)
    if not (folder / "test").is_dir():
        say("warning: good/ holds the images one learns from; on them false calls look fewer than they are")
    return test.images, test.anomalous, test.truth, left_out


def card(model: Model) -> None:
    """Show what a detector says of itself.

    Recipe, preprocessing and origin, its id, and the calibration it decides by, as JSON.
    """
    from firm.calibration_file import to_json
    from firm.detector import Detector

    detector = Detector.load(model)
    by = None if detector.calibration is None else to_json(detector.calibration)
    print(json.dumps(detector.card() | {"id": detector.id, "calibration": by}, indent=2))
