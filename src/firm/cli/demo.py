"""The verb that shows the whole way on drawn parts: demo."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Option

from firm.cli.options import AsJson, Device, Output, Seed, Settings, Threads
from firm.cli.terminal import percent, reporting, show, use_device
from firm.errors import named

PRESET = "wavelets"  # needs no weights, so that the same report comes out whatever is installed
GOOD = 80  # parts to learn from: few enough that REVIEW has work to do


def demo(
    out: Annotated[Path, Option(help="Where parts, detector and report are written.")] = Path("demo"),
    product: Annotated[str, Option(help="plate, weave or label.")] = "plate",
    settings: Settings = None,
    seed: Seed = 0,
    device: Device = "cpu",
    threads: Threads = 1,  # the same report on every machine
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Fit on drawn parts, inspect a mixed batch of others and write the report."""
    from firm.decision.calibration import summary_of
    from firm.detector.detector import Detector
    from firm.detector.evaluation import Labelled, evaluate
    from firm.detector.inspection import Inspection
    from firm.detector.model_folder import check_target
    from firm.drawn.render import draw_dataset, save_png
    from firm.recipes.presets import recipe_of
    from firm.report.page import write_inspection

    use_device(device, threads)
    model, recipe = out / f"{product}.firm", recipe_of(PRESET, settings)
    check_target(model)
    data = draw_dataset(product, seed=seed, train=GOOD)
    assert data.truth is not None
    files = [out / product / f"{number:03d}-{kind}.png" for number, kind in enumerate(data.truth.kinds)]
    with reporting() as listener:
        detector = Detector.fit(data, recipe=recipe, seed=seed, device=device, listener=listener)
        detector.save(model)
        for file, image in zip(files, data.test, strict=True):  # named by their defects, to check the report by eye
            save_png(file, image)
        batch = Inspection(detector, on_image=listener.count("inspecting", len(files)))
        page = write_inspection(out, batch, batch(files), model=model.name)
    result = evaluate(detector, Labelled(detector.locate(data.test), data.test, data.anomalous, data.truth))
    pixels = result.overall.localisation
    located = "" if pixels is None else f", of pixels {percent(pixels.pixel_auroc)}"
    good, bad = result.confusion["good"], int(data.anomalous.sum())
    caught, false = round(result.caught * bad), sum(good.values()) - good["PASS"]
    show(
        {"report": str(page), **asdict(result.overall), "caught": caught, "bad": bad, "false_calls": false},
        f"{product}: {caught} of {bad} bad parts and {false} of {sum(good.values())} good ones do not PASS\n"
        f"good parts: {good['PASS']} PASS, {good['REVIEW']} REVIEW, {good['FAIL']} FAIL\n"
        f"{summary_of(detector.decides)[1]}\n"
        f"AUROC of images {percent(result.overall.auroc)}{located}\nsee {named(page)}; the detector is {named(model)}",
        as_json,
    )
