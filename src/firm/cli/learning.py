"""The verb that learns: fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firm.cli.inputs import depth_of, loaded, preset_for, recipe_of
from firm.cli.options import (
    AsJson,
    Bits,
    Data,
    Device,
    Fail,
    FalseCalls,
    Preset,
    Pretrained,
    Seed,
    Settings,
    Strict,
    Threads,
)
from firm.cli.terminal import Update, bar, say, settle, show
from firm.errors import FirmError, named

if TYPE_CHECKING:
    from firm.runs import Run
    from firm.training import Progress


def fit(
    data: Data,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the detector is written.")],
    preset: Preset = None,
    encoder: Pretrained = None,
    settings: Settings = None,
    seed: Seed = 0,
    device: Device = "cpu",
    threads: Threads = 0,
    holdout: Annotated[float, typer.Option(help="Part of the good images kept for the threshold.")] = 0.1,
    false_calls: FalseCalls = 0.05,
    fail: Fail = 0.01,
    checkpoint_seconds: Annotated[float, typer.Option(help="How much work an interruption may cost.")] = 30.0,
    depth: Bits = None,
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Learn from good images and write a detector. Run again after an interruption: it goes on where it was."""
    from firm.calibration_file import to_json
    from firm.detector import Detector
    from firm.fitting import side_for
    from firm.foretelling import foretell
    from firm.model_folder import check_target
    from firm.promises import doubts, sentences
    from firm.runs import claim, discard
    from firm.sisters import sisters

    settle(device, threads)
    recipe = recipe_of(preset or ("adapted" if encoder else preset_for(data)), _with_encoder(settings, encoder))
    check_target(out)
    images, left_out = loaded(data, side_for(recipe), depth=depth_of(depth), strict=strict)
    parts = sisters(images.name, images.train)
    for sentence in foretell(recipe, images, holdout=holdout, false_calls=false_calls, seed=seed, parts=parts):
        say(sentence)
    folder = out.with_name(out.name + ".run")
    with claim(folder) as mine, bar("training") as update:
        if not mine:
            raise FirmError(f"another process is training in {folder}; wait for it or choose another --out")
        detector = Detector.fit(
            images,
            recipe=recipe,
            seed=seed,
            device=device,
            folder=folder,
            holdout=holdout,
            false_calls=false_calls,
            fail=fail,
            checkpoint_seconds=checkpoint_seconds,
            on_progress=watched(update),
            on_choice=say,
            on_images=update,
            parts=parts,
        )
        detector.save(out)
        discard(folder)
    learnt = f"{named(out)}: learnt {detector.origin['good_images']} good images of {images.name}"
    by = detector.decides
    for doubt in doubts(by):
        say(f"warning: {doubt}")
    told = {"model": str(out), **detector.card(), "calibration": to_json(by), "left_out": left_out}
    show(told, "\n".join([learnt, f"thresholds {by.source}", *sentences(by)]), as_json)
    if left_out:
        raise typer.Exit(1)


def _with_encoder(settings: list[str] | None, encoder: str | None) -> list[str]:
    """The settings with the backbone among them; one that is set by path wins."""
    return [*([f"pretrained.name={encoder}"] if encoder else []), *(settings or [])]


def watched(update: Update) -> Callable[[Progress, Run], None]:
    """Moves a bar on by the steps of a training, with the loss beside it."""

    def watch(progress: Progress, run: Run) -> None:
        loss = f"loss {run.history.lines[-1]['loss']:.3f}" if run.history.lines else ""
        update(progress.step, progress.steps, loss)

    return watch
