"""The verb that sets thresholds anew: calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firm.cli.inputs import at_most, loaded
from firm.cli.options import AsJson, Data, Device, Fail, FalseCalls, Model, Strict, Threads
from firm.cli.terminal import bar, counting, say, settle, show
from firm.errors import FirmError, named

ENOUGH = 5000  # good images for any threshold; they are held in memory

if TYPE_CHECKING:
    from torch import Tensor

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
    from firm.promises import doubts, sentences

    settle(device, threads)
    wishes = Wishes(false_calls=false_calls, fail=fail, misses=misses, fail_at=fail_at, review_at=review_at)
    if misses is not None and defects is None:
        raise FirmError("--misses needs defects to be counted on; give their folder by --defects")
    file = out or beside(model)
    if file.is_dir():
        raise FirmError(f"{named(file)} is a folder; name the file to write")
    detector = Detector.load(model, device=device, calibration=False)
    how = detector.preprocessing
    most = at_most(good, ENOUGH, "more would not change the thresholds")
    images, left_out = loaded(good, how.file_side, depth=how.depth, strict=strict, most=most, tested=False)
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
        raise FirmError(f"none of the defects in {named(folder)} could be read: {skipped[0][1]}")
    return images, [str(file) for file, _ in skipped]
