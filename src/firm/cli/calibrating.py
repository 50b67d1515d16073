"""The verb that sets thresholds anew: calibrate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firm.cli.inputs import loaded
from firm.cli.options import AsJson, Data, Device, Fail, FalseCalls, Model, Strict, Threads
from firm.cli.terminal import bar, counting, say, settle, show
from firm.errors import FirmError, named

if TYPE_CHECKING:
    from torch import Tensor

    from firm.calibration import Calibration, Misses, Promise, Rate
    from firm.images import Preprocessing


def calibrate(
    model: Model,
    good: Data,
    false_calls: FalseCalls = 0.05,
    fail: Fail = 0.01,
    defects: Annotated[Path | None, typer.Option(help="A folder of defective images: what is missed of them.")] = None,
    misses: Annotated[float | None, typer.Option(help="Wished rate of those defects that do not FAIL.")] = None,
    fail_at: Annotated[float | None, typer.Option(help="The score above which to FAIL, by hand.")] = None,
    review_at: Annotated[float | None, typer.Option(help="The score up to which to PASS, by hand.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where it is written; unless given beside the detector.")
    ] = None,
    device: Device = "cpu",
    threads: Threads = 0,
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Set PASS, REVIEW and FAIL anew on good images that were not learnt from; nothing is trained.

    calibration.json, in the detector's folder, from then on decides instead of what the fit has set.
    """
    from firm.calibration import Wishes
    from firm.calibration_file import beside, to_json, write_calibration
    from firm.detector import Detector

    settle(device, threads)
    wishes = Wishes(false_calls=false_calls, fail=fail, misses=misses, fail_at=fail_at, review_at=review_at)
    if misses is not None and defects is None:
        raise FirmError("--misses needs defects to be counted on; give their folder by --defects")
    file = out or beside(model)
    if file.is_dir():
        raise FirmError(f"{named(file)} is a folder; name the file to write")
    detector = Detector.load(model, device=device, calibration=False)
    how = detector.preprocessing
    images, left_out = loaded(good, how.file_side, depth=how.depth, strict=strict)
    wrong, unread = (None, []) if defects is None else _defects(defects, how, strict=strict)
    left_out += unread
    with bar("scoring") as update:
        total = len(images.train) + (0 if wrong is None else len(wrong))
        found = detector.calibrate(
            images.train,
            name=images.name,
            defects=wrong,
            wishes=wishes,
            on_doubt=say,
            on_image=counting(update, total),
        )
    write_calibration(file, found)
    for doubt in doubts(found):
        say(f"warning: {doubt}")
    told = {"file": str(file), **to_json(found), "doubts": doubts(found), "left_out": left_out}
    show(told, "\n".join([f"{named(file)}: {found.source}", *sentences(found)]), as_json)
    if left_out:
        raise typer.Exit(1)


def _defects(folder: Path, how: Preprocessing, *, strict: bool) -> tuple[Tensor, list[str]]:
    """The defective images of a labelled folder, or all images of one that is not; good/ among them is no defect."""
    from firm.data.folder import NORMAL, find_files, read_files, read_test

    if (folder / "test").is_dir() or (folder / "bad").is_dir():
        test = read_test(folder, how.file_side, depth=how.depth, strict=strict)
        images, skipped = test.images[test.anomalous], test.skipped
    else:
        files = [file for file in find_files([folder]) if file.relative_to(folder).parts[0] not in NORMAL]
        if not files:
            raise FirmError(f"{named(folder)} holds good images alone; give the folder of the defects")
        images, _, skipped = read_files(files, how.file_side, depth=how.depth, strict=strict)
    for _, reason in skipped:
        say(f"left out: {reason}")
    if not len(images):
        raise FirmError(f"none of the defects in {named(folder)} could be read; see the lines above")
    return images, [str(file) for file, _ in skipped]


def sentences(found: Calibration) -> list[str]:
    """What it decides and what that promises."""
    lines = [
        f"PASS up to {found.review:.6g}, REVIEW up to {found.fail:.6g}, FAIL above",
        f"good parts: {_promised(found.reviewed)} for REVIEW or FAIL, {_promised(found.failed)} FAIL",
    ]
    if found.pixel is not None and found.marked is not None:
        lines.append(f"regions: heat above {found.pixel:.6g}, in {_promised(found.marked)} of good parts")
    if found.misses is not None:
        lines.append(f"defects: {_counted(found.misses.unfailed)} do not FAIL, {_counted(found.misses.passed)} PASS")
    return lines


def doubts(found: Calibration) -> list[str]:
    """What was wished and cannot be had, with what it would take."""
    told = [
        _too_few(found, name, promise)
        for name, promise in (("FAIL", found.failed), ("REVIEW", found.reviewed))
        if promise.broken
    ]
    if found.review == found.fail:
        told.append("review and fail are the same threshold, so nothing is for REVIEW")
    if found.misses is not None and found.misses.too_many:
        told.append(_missed(found.misses, found.failed))
    return told


def _promised(promise: Promise) -> str:
    return f"at most {100 * promise.kept:.1f} %"


def _counted(rate: Rate) -> str:
    share = f"{100 * rate.count / rate.of:.1f} %, 95 % interval {100 * rate.low:.1f} to {100 * rate.high:.1f}"
    return f"{rate.count} of {rate.of} ({share})"


def _too_few(found: Calibration, name: str, promise: Promise) -> str:
    wished = promise.wished or 0.0
    things, shown = ("parts", found.parts) if found.parts < found.images else ("images", found.images)
    return (
        f"{shown} good {things} cannot promise {100 * wished:g} % for {name}: the lowest honest rate is "
        f"{100 * promise.kept:.1f} %, and {100 * wished:g} % takes {math.ceil(1 / wished - 1e-9) - 1}"
    )


def _missed(misses: Misses, failed: Promise) -> str:
    assert misses.wished is not None
    assert misses.enough is not None
    assert misses.price is not None
    wish = f"at most {100 * misses.wished:g} % misses cannot be had with {_promised(failed)} false calls"
    return (
        f"{wish}, which are kept; it takes a fail threshold of {misses.enough:.6g}, "
        f"at which up to {100 * misses.price:.1f} % of good parts FAIL"
    )
