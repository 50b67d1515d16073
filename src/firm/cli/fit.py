"""The verb that learns: fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firm.cli.inputs import at_most, depth_of, loaded, preset_for, recipe_of, with_ignored
from firm.cli.options import (
    AsJson,
    Bits,
    Data,
    Device,
    Fail,
    FalseCalls,
    Gigabytes,
    Holdout,
    Ignore,
    Preset,
    Pretrained,
    Seed,
    Settings,
    Strict,
    Threads,
)
from firm.cli.terminal import Update, bar, say, settle, show
from firm.errors import FirmError, named

CURVE = "curve.png"
MEMORY = 6.0  # GB, as firm.foretelling.MEMORY, which takes long to import

if TYPE_CHECKING:
    from firm.detector import Detector
    from firm.progressing import Prober
    from firm.recipes.recipe import Recipe
    from firm.runs import Run
    from firm.training import Progress
    from firm.types import OneClass


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked of a fit, whatever the product."""

    preset: str | None
    settings: list[str]
    seed: int
    device: str
    holdout: float | None
    false_calls: float
    fail: float
    checkpoint_seconds: float
    depth: int | None
    strict: bool
    ignore: Path | None = None
    minutes: float | None = None
    memory: float = MEMORY


@dataclass(frozen=True)
class Ready:
    """The good images of one product, read and fit to be learnt from, and by which recipe."""

    recipe: Recipe
    images: OneClass
    left_out: list[str]
    asked: Asked

    @property
    def key(self) -> str:
        """Names all that decides what is learnt: kept in the detector, it tells whether that would be learnt again."""
        import hashlib
        import json
        from dataclasses import asdict

        from firm.images import fingerprint
        from firm.recipes.recipe import sparse

        by, wishes = self.asked, (self.asked.holdout, self.asked.false_calls, self.asked.fail)
        hidden = None if self.images.ignored is None else fingerprint(self.images.ignored)
        seen = [fingerprint(self.images.train), asdict(self.images.depth), by.seed, wishes, hidden]
        return hashlib.sha256(json.dumps([sparse(self.recipe), *seen], sort_keys=True).encode()).hexdigest()[:16]


def fit(
    data: Data,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the detector is written.")],
    preset: Preset = None,
    encoder: Pretrained = None,
    settings: Settings = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.1, help="Train about so long, on pretrained features if installed; draw how it goes."),
    ] = None,
    per_folder: Annotated[
        bool,
        typer.Option("--per-folder", help="One product per sub-folder of DATA: each gets its own OUT/<name>.firm."),
    ] = False,
    seed: Seed = 0,
    device: Device = "cpu",
    threads: Threads = 0,
    holdout: Holdout = None,
    false_calls: FalseCalls = 0.05,
    fail: Fail = 0.01,
    checkpoint_seconds: Annotated[float, typer.Option(help="How much work an interruption may cost.")] = 30.0,
    depth: Bits = None,
    strict: Strict = False,
    ignore: Ignore = None,
    memory: Gigabytes = MEMORY,
    as_json: AsJson = False,
) -> None:
    """Learn from good images and write a detector. Run again after an interruption: it goes on where it was."""
    from firm.calibration_file import to_json
    from firm.cli.several import fit_each
    from firm.promises import sentences

    settle(device, threads)
    left_open = not preset and preset_for(data) == "inspect"  # a setting changes itself and nothing else
    encoder = encoder or (best_encoder(data) if left_open else None)
    asked = Asked(
        preset=preset or preset_with(encoder),
        settings=_with_encoder(settings, encoder),
        seed=seed,
        device=device,
        holdout=holdout,
        false_calls=false_calls,
        fail=fail,
        checkpoint_seconds=checkpoint_seconds,
        depth=depth,
        strict=strict,
        ignore=ignore,
        minutes=minutes,
        memory=memory,
    )
    if per_folder:
        raise typer.Exit(fit_each(data, out, asked, as_json=as_json))
    ready = made_ready(data, out, asked)
    detector = learn(ready, out)
    by = detector.decides
    told = {"model": str(out), **detector.card(), "calibration": to_json(by), "left_out": ready.left_out}
    learnt = f"{named(out)}: learnt {detector.origin['good_images']} good images of {ready.images.name}"
    show(told, "\n".join([learnt, f"thresholds {by.source}", *sentences(by)]), as_json)
    if ready.left_out:
        raise typer.Exit(1)


def made_ready(data: str, out: Path, asked: Asked) -> Ready:
    """What can be refused before anything is learnt, refused; the images."""
    from firm.doubting import check_good
    from firm.fitting import check_ignoring, side_for
    from firm.foretelling import most_images
    from firm.model_folder import check_target

    recipe = recipe_of(asked.preset or preset_for(data), asked.settings)
    check_target(out)
    side = side_for(recipe)
    why = f"{asked.memory:g} GB of memory hold no more, and --memory allows it"
    most = at_most(data, most_images(recipe, side, asked.memory), why)
    images, left_out = loaded(data, side, depth=depth_of(asked.depth), strict=asked.strict, most=most, tested=False)
    check_good(images)
    images = with_ignored(images, data, asked.ignore)
    check_ignoring(recipe, images.ignored)
    if asked.minutes:
        recipe = within_minutes(recipe, images, asked.minutes, run_folder(out), seed=asked.seed, device=asked.device)
    return Ready(recipe, images, left_out, asked)


def learn(ready: Ready, out: Path) -> Detector:
    """The detector of one product, learnt where it was left and written; every doubt is said."""
    from firm.detector import Detector
    from firm.doubting import doubts_about
    from firm.foretelling import foretell
    from firm.holdout import usual
    from firm.progressing import Prober, proved
    from firm.promises import doubts
    from firm.report.progress import draw_progress
    from firm.runs import claim, discard
    from firm.sisters import sisters

    recipe, images, asked = ready.recipe, ready.images, ready.asked
    false_calls, seed = asked.false_calls, asked.seed
    holdout = usual(len(images.train), false_calls) if asked.holdout is None else asked.holdout
    for doubt in doubts_about(images, holdout=holdout, false_calls=false_calls):
        say(f"warning: {doubt}")
    parts = sisters(images.name, images.train)
    for sentence in foretell(recipe, images, holdout=holdout, false_calls=false_calls, seed=seed, parts=parts):
        say(sentence)
    prober = Prober(images, parts, holdout=holdout, false_calls=false_calls, seed=seed)
    folder, unproved = run_folder(out), list[str]()
    with claim(folder) as mine, bar("training") as update:
        if not mine:
            raise FirmError(f"another process is training in {folder}; wait for it or choose another --out")
        detector = Detector.fit(
            images,
            recipe=recipe,
            seed=seed,
            device=asked.device,
            folder=folder,
            holdout=holdout,
            false_calls=false_calls,
            fail=asked.fail,
            checkpoint_seconds=asked.checkpoint_seconds,
            on_progress=watched(update, prober if asked.minutes else None),
            on_choice=say,
            on_images=update,
            parts=parts,
        )
        detector.origin["asked"] = ready.key
        if recipe.tiling.patchwise:
            detector.origin["metrics"] = prober.proof(detector)
            told, *unproved = proved(detector.origin["metrics"], backbone=bool(recipe.pretrained.name))
            say(told)
        detector.save(out)
        if draw_progress(prober.lines, out / CURVE):
            say(f"how the training went is drawn in {named(out / CURVE)}")
        discard(folder)
    for doubt in [*unproved, *doubts(detector.decides)]:
        say(f"warning: {doubt}")
    return detector


def run_folder(out: Path) -> Path:
    """Where the training of a detector keeps what it needs to go on."""
    return out.with_name(out.name + ".run")


def best_encoder(data: str) -> str:
    """The backbone to start from where there is a choice: the one whose weights are installed, else wavelets."""
    from firm.backbones import WAVELETS
    from firm.data import files_to_learn
    from firm.recipes.presets import usual

    files_to_learn(data)  # a folder that is not there is to be said first
    name = usual().pretrained.name
    if name == WAVELETS:
        say("no pretrained weights are installed (pip install 'firm[pretrained]'): wavelets describe the patches")
    else:
        say(f"pretrained features of {name}")
    return name


def preset_with(encoder: str | None) -> str | None:
    """Where the settings start from a backbone; None: there is none."""
    from firm.backbones import WAVELETS

    return None if encoder is None else "wavelets" if encoder == WAVELETS else "adapted"


def within_minutes(recipe: Recipe, images: OneClass, minutes: float, folder: Path, *, seed: int, device: str) -> Recipe:
    """The recipe with the epochs that some minutes hold, as timed once: an interrupted fit goes on with the same."""
    from firm.progressing import lasting
    from firm.recipes.recipe import change
    from firm.storage import write_atomically

    kept = folder / "minutes.json"
    epochs = json.loads(kept.read_bytes()).get(str(minutes)) if kept.is_file() else None
    if epochs is None:
        epochs = lasting(recipe, minutes, images, seed=seed, device=device).training.epochs
        write_atomically(kept, json.dumps({str(minutes): epochs}).encode())
    say(f"{minutes:g} minutes on this machine: {epochs} epochs")
    return change(recipe, {"training.epochs": epochs})


def _with_encoder(settings: list[str] | None, encoder: str | None) -> list[str]:
    """The settings with the backbone among them; one that is set by path wins."""
    for one in settings or [] if encoder else []:
        path = one.partition("=")[0]
        if path == "encoder" or (path.startswith("encoder.") and not path.startswith("encoder.head")):
            how = "fit with --preset inspect and without --encoder"
            raise FirmError(f"{path} is of an encoder learnt from scratch, and {encoder} is none; {how}")
    return [*([f"pretrained.name={encoder}"] if encoder else []), *(settings or [])]


def watched(update: Update, prober: Prober | None = None) -> Callable[[Progress, Run], None]:
    """Moves a bar on by the steps of a training, with the loss beside it, and has it probed."""

    def watch(progress: Progress, run: Run) -> None:
        losses = [line["loss"] for line in run.history.lines[-2:] if "loss" in line]
        update(progress.step, progress.steps, f"loss {losses[-1]:.3f}" if losses else "")
        if prober is not None:
            prober(progress, run)

    return watch
