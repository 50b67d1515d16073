"""Verbs about a detector's worth: evaluate measures it on labelled images, card prints what it is."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from firm.cli.options import AsJson, Data, Device, GroupBy, Model, Output, Strict, Threads
from firm.cli.terminal import percent, reporting, show, use_device, warn, warn_left_out
from firm.errors import named

if TYPE_CHECKING:
    from torch import Tensor

    from firm.decision.calibration import Calibration
    from firm.detector.evaluation import Evaluation, Kept, Kind, Overlap
    from firm.images.preprocess import Preprocessing
    from firm.types import OneClass, Truth

Rows = list[tuple[str, ...]]


def evaluate(
    model: Model,
    data: Data,
    report: Annotated[
        Path | None, Option(help="Write the ROC, the score of every image, misses and false calls into this folder.")
    ] = None,
    device: Device = "cpu",
    threads: Threads = 0,
    group_by: GroupBy = None,
    strict: Strict = False,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Measure a detector on labelled images.

    AUROC of images and pixels and AUPRO, with 95 % intervals, over all defects and for each kind; the IoU of
    regions and masks; verdicts by kind, with exact intervals; of good parts the stated rates beside the realised ones.
    """
    from firm.data.splits import compiled
    from firm.detector import evaluation
    from firm.detector.detector import Detector
    from firm.images.preprocess import brightness
    from firm.report.evaluation import write_evaluation
    from firm.runtime.files import check_writable

    use_device(device, threads)
    compiled(group_by or "")  # a wrong one is refused at once
    if report is not None:
        check_writable(report)
    detector = Detector.load(model, device=device)
    by = detector.decides  # refused before an image is read
    images, anomalous, truth, left_out = _labelled(data, detector.preprocessing, strict=strict)
    with reporting() as listener:
        located = detector.locate(images, listener.count("scoring", len(images)))
    test = evaluation.Labelled(located, images, anomalous, truth)
    result = evaluation.evaluate(detector, test)
    counted = test[~test.under(detector.model.ignored)]
    files = [] if report is None else write_evaluation(report, counted, by, name=data, ignored=detector.model.ignored)
    good, scores = images[~anomalous], located.scores[~anomalous]
    parts = _parts(data, good, () if truth is None else compress(truth.files, (~anomalous).tolist()), group_by)
    kept = evaluation.kept_rates(scores, parts, by)
    light = brightness(good, detector.model.ignored)
    for text in (*warnings_about(result), *_broken(kept, by, scores, light, parts)):
        warn(text)
    unmarked = None if truth is None else int((anomalous & ~truth.known).sum())
    values = as_values(data, result, by.review, unmarked)
    values |= {"stated": [asdict(each) | {"broken": each.broken} for each in kept]}
    values |= {"left_out": left_out, "pictures": [str(file) for file in files]}
    rates = _columns(_stated_rows(kept, "guaranteed" if by.basis == "held-out" else "estimated"))
    lines = [as_text(data, result, by.review, unmarked), *rates, *(f"see {named(file)}" for file in files)]
    show(values, "\n".join(lines), as_json, left_out)


def _parts(data: str, good: Tensor, files: Iterable[str], group_by: str | None) -> Tensor:
    """The part that each good test image shows: by name, or found as in a fit."""
    from firm.data.duplicates import group_by_part
    from firm.data.splits import parts_by_name

    return group_by_part(data, good) if group_by is None else parts_by_name([Path(file) for file in files], group_by)


def _stated_rows(kept: list[Kept], word: str) -> Rows:
    if not kept:
        return []
    parts, images = kept[0].parts, kept[0].images
    counted = f"of {parts} good parts" + f" ({images} images)" * (parts < images)
    rows: Rows = [(counted, f"{word} at most" if word == "guaranteed" else word, "realised, %")]
    for each in kept:
        rows.append(
            (each.verdict, f"{100 * each.stated:.1f} %", percent(each.realised) + "  more than stated" * each.broken)
        )
    return rows


def _broken(kept: list[Kept], by: Calibration, good: Tensor, light: Tensor, parts: Tensor) -> list[str]:
    """Rates that are not kept, and the drift of the good images' scores and light, which may explain it."""
    import torch

    from firm.decision.calibration import FOLDS
    from firm.decision.drift import drift, light_drift, one_of_each

    broken = [each.verdict for each in kept if each.broken]
    found, known = list[str](), torch.tensor(by.shown)
    if by.light and len(light):
        found.append(light_drift(one_of_each(light, parts), torch.tensor(by.light), parts=known).sentence)
    if not broken or not by.scores:
        return [text for text in found if text]
    alone, estimated = one_of_each(good, parts), by.basis == FOLDS
    found.append(drift(alone, torch.tensor(by.scores), parts=known, estimated=estimated).sentence)
    why = "; ".join(text for text in found if text) or "no drift of the scores or of the light is seen"
    return [f"more good parts are for {' and for '.join(broken)} than stated: {why}"]


def card(model: Model) -> None:
    """Print what a detector is as JSON: recipe, preprocessing, origin, id and calibration."""
    from firm.decision.calibration import to_json
    from firm.detector.detector import Detector

    detector = Detector.load(model)
    calibration = None if detector.calibration is None else to_json(detector.calibration)
    print(json.dumps(detector.card() | {"id": detector.id, "calibration": calibration}, indent=2))


def _labelled(data: str, how: Preprocessing, *, strict: bool) -> tuple[Tensor, Tensor, Truth | None, list[str]]:
    """Test images, which are anomalous, what else is known about them, and the files left out."""
    from firm.data.folder import read_test
    from firm.data.registry import DATASETS, folder_named

    if data.partition(":")[0] in DATASETS:
        task, left_out = loaded(data, how, strict=strict)
        return task.test, task.anomalous, task.truth, left_out
    folder = folder_named(data) or Path(data)
    test = read_test(folder, how.file_side, depth=how.depth, strict=strict, crop=how.crop)
    if not (folder / "test").is_dir():
        warn("the good images in good/ may be those the detector learnt from; false calls then look fewer")
    return test.images, test.anomalous, test.truth, warn_left_out(test.skipped)


def loaded(
    data: str, how: Preprocessing, *, strict: bool, most: int = 0, with_test: bool = True
) -> tuple[OneClass, list[str]]:
    """The images as a detector reads them, and the reasons why files were left out; all warnings are printed."""
    from firm.data.registry import load

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        images = load(
            data,
            side=how.file_side,
            depth=how.depth,
            strict=strict,
            max_images=most,
            with_test=with_test,
            crop=how.crop,
        )
    texts = [str(warning.message) for warning in caught]
    for text in texts:
        warn(text)
    return images, [text for text in texts if text.startswith("left out")]


def as_values(data: str, result: Evaluation, threshold: float, unmarked: int | None) -> dict[str, Any]:
    """An evaluation for a program; null where there is nothing to measure by."""
    measured_by = {"data": data, "threshold": threshold, "masks_unknown": unmarked}
    return measured_by | asdict(result) | {"suspicious": result.trivial.suspicious}


def as_text(data: str, result: Evaluation, threshold: float, unmarked: int | None) -> str:
    """An evaluation for a person; `unmarked` counts defective images without a mask, None: masks are unknown."""
    total, trivial = result.overall, result.trivial
    lines = [f"{data}: image AUROC {percent(total.auroc)} on {result.images} images, {total.images} of them defective"]
    if result.ignored:
        lines.append(f"{result.ignored} defective images are marked only on ignored pixels and not counted above")
    if unmarked is not None:
        lines += _pixel_lines(total, f"{unmarked} of {total.images} masks unknown")
    lines += [
        *_columns(_kinds(result.kinds)),
        f"at the threshold {threshold:.6g}: {100 * result.caught:.1f} % of the defects caught, "
        f"{100 * result.false_calls:.1f} % false calls",
        *_columns(_verdicts(result.confusion)),
        f"trivial baselines: brightness {100 * trivial.brightness:.1f}, "
        f"nearest whole image {100 * trivial.neighbour:.1f}",
    ]
    return "\n".join(lines)


def warnings_about(result: Evaluation) -> list[str]:
    """Why the numbers may be too good."""
    texts = []
    if result.trivial.suspicious:
        texts.append(
            "trivial baselines tell defective images from good ones; before you trust the results, check whether "
            "the two differ in illumination, alignment or origin"
        )
    if result.copies:
        texts.append(f"{result.copies} test images look like copies of learnt ones, so the results are too good")
    return texts


def _pixel_lines(overall: Kind, masks: str) -> list[str]:
    pixels = overall.localisation
    if pixels is None:
        return [f"no pixel AUROC or AUPRO: they need heat maps and masks of the defects ({masks})"]
    overlap = overall.overlap
    fit = [] if overlap is None else [f"IoU of regions and masks {_iou(overlap)} images with a mask: those not passed"]
    return [
        *fit,
        f"pixel AUROC {percent(pixels.pixel_auroc)}, AUPRO {percent(pixels.aupro)}, "
        f"{pixels.regions} regions on {pixels.images} images, {masks}",
        f"best pixel F1 {100 * pixels.best_f1:.1f} at {pixels.best_f1_threshold:.6g}, a threshold chosen on the "
        "test set: for information only",
    ]


def _kinds(kinds: dict[str, Kind]) -> Rows:
    rows: Rows = [("defect", "images", "image AUROC", "pixel AUROC", "AUPRO", "IoU")] if kinds else []
    for name, kind in kinds.items():
        pixels, overlap = kind.localisation, kind.overlap
        located = ("-", "-") if pixels is None else (percent(pixels.pixel_auroc), percent(pixels.aupro))
        rows.append((name, str(kind.images), percent(kind.auroc), *located, _iou(overlap) if overlap else "-"))
    return rows


def _iou(overlap: Overlap) -> str:
    return f"{100 * overlap.iou:.1f} on {overlap.images} of {overlap.of}"


def _verdicts(confusion: dict[str, dict[str, int]]) -> Rows:
    """Verdicts by kind, and the share that does not PASS with its exact interval."""
    from firm.metrics.image import Interval, rate_of

    rows: Rows = []
    for kind, counts in confusion.items():
        rows = rows or [("verdicts", *counts, "not passed, %")]
        rate = rate_of(sum(counts.values()) - counts["PASS"], sum(counts.values()))
        share = Interval(rate.count / rate.of, rate.low, rate.high)
        rows.append((kind, *map(str, counts.values()), percent(share)))
    return rows


def _columns(rows: Rows) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
