"""The verb that shows the journey on drawn parts: demo."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firm.cli.inputs import recipe_of
from firm.cli.learning import watched
from firm.cli.options import AsJson, Device, Seed, Settings, Threads
from firm.cli.terminal import bar, counting, percent, say, settle, show

if TYPE_CHECKING:
    from firm.data.drawn import DrawnPart
    from firm.detector import Detector

PRESET = "wavelets"  # needs no weights, so that the same report comes out whatever is installed


def demo(
    out: Annotated[Path, typer.Option(help="Where parts, detector and report are written.")] = Path("demo"),
    product: Annotated[str, typer.Option(help="plate, weave or label.")] = "plate",
    settings: Settings = None,
    seed: Seed = 0,
    device: Device = "cpu",
    threads: Threads = 1,  # the same report on every machine
    as_json: AsJson = False,
) -> None:
    """Fit on drawn parts, inspect a mixed tray of others and write the report."""
    from firm.data.drawn import drawn
    from firm.detector import Detector
    from firm.evaluate import evaluation, look

    settle(device, threads)
    data, parts = drawn(product, seed=seed)
    with bar(f"learning {product}") as update:
        detector = Detector.fit(
            data,
            recipe=recipe_of(PRESET, settings),
            seed=seed,
            device=device,
            holdout=0.2,
            on_progress=watched(update),
            on_choice=say,
            on_images=update,
        )
    model = out / f"{product}.firm"
    detector.save(model)
    found = evaluation(detector, look(detector, data.test), data.test, data.anomalous, data.truth)
    page = _inspected(detector, _tray(parts, out / product), out, model)
    where = found.overall.localisation
    pixels = "" if where is None else f", of its pixels {percent(where.pixel_auroc)}"
    good, bad = found.confusion["good"], int(data.anomalous.sum())
    caught, false = round(found.caught * bad), sum(good.values()) - good["PASS"]
    show(
        {"report": str(page), **asdict(found.overall), "caught": caught, "bad": bad, "false_calls": false},
        f"{product}: {caught} of {bad} bad parts do not PASS, nor do {false} of {sum(good.values())} good ones\n"
        f"AUROC {percent(found.overall.auroc)}{pixels}\nlook at {page}; the detector is {model}",
        as_json,
    )


def _tray(parts: list[DrawnPart], folder: Path) -> list[Path]:
    """The parts as files, each named by what is wrong with it, so that a report can be checked by eye."""
    import cv2

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, part in enumerate(parts):
        files.append(folder / f"{number:03d}-{part.defect or 'good'}.png")
        cv2.imwrite(str(files[-1]), cv2.cvtColor(part.image, cv2.COLOR_RGB2BGR))
    return files


def _inspected(detector: Detector, files: list[Path], out: Path, model: Path) -> Path:
    from firm.report.inspection import Inspection

    with bar("inspecting") as update:
        batch = Inspection(detector, on_image=counting(update, len(files)))
        return batch.write(out, batch(files), model=model.name)
