"""The verb that sets thresholds: calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from firm.cli.evaluate import loaded
from firm.cli.options import AsJson, Data, Device, Fail, FalseCalls, GroupBy, Model, Output, Strict, Threads
from firm.cli.terminal import reporting, say, show, use_device, warn, warn_left_out
from firm.errors import DataError, SettingError, named

if TYPE_CHECKING:
    from torch import Tensor

    from firm.images.preprocess import Preprocessing

ENOUGH = 5000  # good images for any threshold; they are held in memory


def calibrate(
    model: Model,
    good: Data,
    false_calls: FalseCalls = None,
    fail: Fail = None,
    defects: Annotated[Path | None, Option(help="A folder of defective images, to count how many are missed.")] = None,
    misses: Annotated[float | None, Option(help="Target rate of those defects that do not FAIL.")] = None,
    fail_at: Annotated[float | None, Option(help="FAIL above this score, instead of a target rate.")] = None,
    review_at: Annotated[float | None, Option(help="PASS up to this score, instead of a target rate.")] = None,
    out: Annotated[Path | None, Option("--out", "-o", help="Where to write; by default beside the detector.")] = None,
    device: Device = "cpu",
    threads: Threads = 0,
    group_by: GroupBy = None,
    strict: Strict = False,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Set the thresholds of PASS, REVIEW and FAIL on new good images, without training.

    Writes calibration.json into the detector's folder, which decides from then on.
    """
    from firm.data.registry import training_files
    from firm.data.splits import compiled, parts_by_name
    from firm.decision.calibration import TargetRates, beside, summary_of, to_json, warnings_of, write_calibration
    from firm.detector.detector import Detector
    from firm.runtime.files import check_writable

    use_device(device, threads)
    targets = TargetRates(false_calls=false_calls, fail=fail, misses=misses, fail_at=fail_at, review_at=review_at)
    compiled(group_by or "")  # a wrong one is refused at once
    if misses is not None and defects is None:
        raise SettingError("--misses needs defects to count on; give their folder by --defects")
    file = out or beside(model)
    if file.is_dir():
        raise SettingError(f"{named(file)} is a folder; name the file to write")
    if out is not None or model.is_dir():
        check_writable(file.parent)
    detector = Detector.load(model, device=device, calibration=False)
    how, count = detector.preprocessing, len(training_files(good))
    if count > ENOUGH:
        say(f"{count:,} good images: {ENOUGH:,} of them, drawn evenly, are read; more would not change the thresholds")
    images, left_out = loaded(good, how, strict=strict, most=ENOUGH, with_test=False)
    bad, unread = (None, []) if defects is None else _defects(defects, how, strict=strict)
    left_out += unread
    names = [file.name for file in images.files]
    parts = None if group_by is None else parts_by_name(images.files, group_by)
    with reporting() as listener:
        result = detector.calibrate(
            images.train, name=images.name, files=names, parts=parts, defects=bad, targets=targets, listener=listener
        )
    write_calibration(file, result)
    texts = warnings_of(result)
    for text in texts:
        warn(text)
    values = {"file": str(file), **to_json(result), "warnings": texts, "left_out": left_out}
    show(values, "\n".join([f"{named(file)}: {result.source}", *summary_of(result)]), as_json, left_out)


def _defects(folder: Path, how: Preprocessing, *, strict: bool) -> tuple[Tensor, list[str]]:
    """The defective images of a labelled folder, or all images of one that is not; good/ among them is no defect."""
    from firm.data.folder import NORMAL, find_files, read_files, read_test

    if (folder / "test").is_dir() or (folder / "bad").is_dir():
        test = read_test(folder, how.file_side, depth=how.depth, strict=strict)
        images, skipped = test.images[test.anomalous], test.skipped
    else:
        files = [file for file in find_files([folder]) if file.relative_to(folder).parts[0] not in NORMAL]
        if not files:
            raise DataError(f"{named(folder)} has only good images; give the folder of the defects")
        images, _, skipped = read_files(files, how.file_side, depth=how.depth, strict=strict)
    if not len(images):
        raise DataError(f"none of the defects in {named(folder)} could be read: {skipped[0][1]}")
    return images, warn_left_out(skipped)
