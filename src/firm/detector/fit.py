"""The pipeline from good images to a detector, used by the command line, `Detector.fit` and `firm bench`.

read_good    decode the good images once and validate them (read.py)
audit        leave out images that do not belong (audit.py)
split        training images, and images that set the thresholds: held out, or in folds; no part is on both sides
choose       settings, tuned on synthetic defects (tune.py)
prepare      align every image once, embed it once (prepare.py)
train        the training, resumable at any step
remember     build the reference features with the trained network (remember.py)
fold_model   for each fold, a model of the other folds, which scores it
calibrate    thresholds on the scores of images that their model has not seen
self_check   AUROC on synthetic defects, next to the pixel baseline (self_check.py)
"""

import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from firm.data.duplicates import describe_parts, warnings_about
from firm.data.splits import default_holdout, parts_needed
from firm.decision.calibration import FALSE_CALLS, Calibration, TargetRates, calibration_of
from firm.detector.audit import audit_images
from firm.detector.estimate import LEAST_EPOCHS, epochs_within
from firm.detector.prepare import Prepared, check_recipe, prepare
from firm.detector.read import Good, Options
from firm.detector.remember import Fitted, Measured, fit_model, measure, remember
from firm.detector.self_check import INSPECTED, Checked, CheckImages, Prober, check_model, self_check, summary, warning
from firm.detector.split import Split, by_folds, by_holdout
from firm.detector.tune import choose, choose_features
from firm.errors import MachineError, SettingError, named
from firm.recipes.recipe import Recipe, change
from firm.runtime.files import folder_lock, read_file, write_atomically
from firm.runtime.listener import SILENT, Listener
from firm.scoring.models import Model
from firm.training.loop import Progress
from firm.training.runs import Run

OnProgress = Callable[[Progress, Run], None]
FOLDS, FEW_FOLDS = 5, 3  # models that score the good images they have not seen; few if the training is long
SHORT = 15  # epochs of a short training
LEAST, CUT = 10, 3  # a longer one is cut for the folds: at least so many epochs, and to this fraction
FEWEST_PARTS = 4  # of which folds are made
FOLDS_INSPECTED = 16  # images of folds that the self-check inspects: each fold it needs costs a pixel baseline


def fit(good: Good, listener: Listener = SILENT, on_progress: OnProgress | None = None) -> Fitted:
    """Run all steps from good images to a calibrated detector."""
    began, options, seed = time.perf_counter(), good.options, good.options.seed
    with _claimed(options.folder):
        belonging, suspects = audit(good, listener)
        split = split_good(belonging, listener)
        tuned = choose(good.recipe, split.learn, split.parts, seed=seed, backbone=good.backbone, listener=listener)
        prepared = prepare(
            tuned.recipe,
            split.learn,
            split.parts,
            seed=seed,
            backbone=good.backbone,
            masks=tuned.masks,
            folder=options.folder,
            device=options.device,
            listener=listener,
        )
        if options.minutes is not None:
            prepared = _within_minutes(good, prepared, split, time.perf_counter() - began, listener)
        origin = _origin(prepared) | {"asked": good.key, "suspects": suspects}
        return learn(prepared, split, options, origin, listener=listener, on_progress=on_progress)


def learn(
    prepared: Prepared,
    split: Split,
    options: Options,
    origin: dict[str, Any],
    *,
    listener: Listener = SILENT,
    on_progress: OnProgress | None = None,
    check: bool = True,
) -> Fitted:
    """The steps that follow the preparation: train, remember, score what was not learnt from, calibrate, self-check."""
    seed, prober = options.seed, None
    if options.minutes is not None:
        held_out = split.held_out_from(prepared, 0)
        images = CheckImages.of(prepared.recipe, held_out.prepared, held_out.images, seed=seed)
        prober = Prober(held_out.prepared, images, seed)
    callbacks = (on_progress,) if split.folds else (prober, on_progress)
    run = train(prepared, options, listener=listener, callbacks=callbacks)
    network = prepared.trained(run)
    recipe = choose_features(prepared, network, seed=seed, listener=listener)
    listener.progress("remembering good images", 0, None)
    origin = origin | {"task": run.digest, "collapsed": run.collapsed}
    fitted = remember(recipe, prepared, network, origin, seed=seed)
    measured, checked, room = list[Measured](), list[Checked](), 0
    if check:
        room = FOLDS_INSPECTED if split.folds else INSPECTED
    for number in range(max(1, split.folds)):
        held_out, model = split.held_out_from(prepared, number), fitted.model
        if split.folds:
            model = fold_model(recipe, held_out.prepared, number, split.folds, options, listener, prober)
        stage = f"scoring fold {number + 1} of {split.folds}" if split.folds else "setting thresholds"
        counted = partial(listener.progress, stage, total=len(held_out.images))
        measured.append(measure(model, held_out.images, counted, held_out.stored))
        if model.has_maps and room > 0:
            images = CheckImages.of(recipe, held_out.prepared, held_out.images[:room], seed=seed, fold=number)
            room -= len(held_out.images)
            checked.append(check_model(model, recipe, held_out.prepared, images, seed=seed))
    if checked:
        fitted.origin |= {"metrics": _self_check(checked, recipe, listener)}
    fitted.probes = [] if prober is None else prober.lines
    fitted.calibration = calibrate(fitted.id, measured, split, options)
    return fitted


# --- the steps ---


def audit(good: Good, listener: Listener = SILENT) -> tuple[Good, list[dict[str, Any]]]:
    """Leave out images that do not belong, unless they are to be kept, and list them; needs frozen patch features."""
    data, options = good.data, good.options
    if good.backbone is None or not good.recipe.patchwise:
        return good, []
    check_recipe(good.recipe, data, len(data.train))
    parts = good.parts
    found = audit_images(good.recipe, data, parts, good.backbone, seed=options.seed, listener=listener)
    if text := found.warning(kept=options.keep_suspects):
        listener.warn(text)
    keep = torch.ones_like(found.suspect) if options.keep_suspects else ~found.suspect
    files = tuple(data.files[number] for number in keep.nonzero().squeeze(1)) if data.files else ()
    trimmed = replace(data, train=data.train[keep], files=files)
    numbers = parts[keep].unique(return_inverse=True)[1]
    return replace(good, data=trimmed, options=replace(options, parts=numbers, group_by=None)), found.suspects()


def split_good(good: Good, listener: Listener = SILENT) -> Split:
    """Group the images by part, and hold some parts out for the thresholds, or divide all of them into folds."""
    data, options = good.data, good.options
    parts, count, rate = good.parts, len(data.train), options.false_calls or FALSE_CALLS
    if _uses_folds(good, parts):
        folds = FOLDS if good.recipe.training.epochs <= SHORT else FEW_FOLDS
        holdout, split = 1.0, by_folds(data, parts, folds, seed=options.seed)
    else:
        holdout = default_holdout(count, rate) if options.holdout is None else options.holdout
        split = by_holdout(data, parts, holdout, seed=options.seed, min_parts=parts_needed(rate))
    shown = len(parts.unique())
    for text in warnings_about(data, holdout=holdout, false_calls=rate, parts=shown, fail=options.fail or 0.0):
        listener.warn(text)
    check_recipe(good.recipe, data, split.fewest)
    side = " x ".join(map(str, data.train.shape[:1:-1]))
    remarks = [text] if (text := describe_parts(parts)) else []
    if data.ignored is not None:
        remarks.append(f"{100 * float(data.ignored.float().mean()):.1f} % of the pixels ignored")
    listener.say(
        f"{named(data.name)}: {count} good images of {side} px, {split}"
        + (f" ({'; '.join(remarks)})" if remarks else "")
    )
    return split


def _uses_folds(good: Good, parts: Int[Tensor, " n"]) -> bool:
    """Folds for frozen features, unless a split is asked for; an encoder from scratch is trained only once."""
    options, enough = good.options, len(parts.unique()) >= FEWEST_PARTS
    if options.calibration is None:
        return good.backbone is not None and options.holdout is None and enough
    if options.calibration == "folds" and (good.backbone is None or not enough):
        raise SettingError(
            f"--calibration folds needs frozen features and {FEWEST_PARTS} parts or more; use --calibration split"
        )
    return options.calibration == "folds"


def train(
    prepared: Prepared, options: Options, *, listener: Listener = SILENT, callbacks: Sequence[OnProgress | None] = ()
) -> Run:
    """Train the network; with a folder, an interrupted training resumes."""
    recipe, epochs = prepared.recipe, prepared.recipe.training.epochs
    run = prepared.run(device=options.device, folder=options.folder, checkpoint_seconds=options.checkpoint_seconds)
    if run.steps:
        what = (recipe.pretrained.name and f"an adaptor on {recipe.pretrained.name}") or "an encoder from scratch"
        listener.say(f"training: {what}, {epochs} epochs of {run.steps // epochs} steps")
    for progress in run:
        losses = [line["loss"] for line in run.history.lines[-2:] if "loss" in line]
        listener.progress("training", progress.step, progress.steps, f"loss {losses[-1]:.3f}" if losses else "")
        for callback in filter(None, callbacks):
            callback(progress, run)
    if run.collapsed:
        listener.warn("the embeddings collapsed to one point, so this detector detects nothing; lower training.lr")
    return run


def _origin(prepared: Prepared) -> dict[str, Any]:
    return {
        "data": prepared.data.name,
        "seed": prepared.task.seed,
        "good_images": len(prepared.data.train),
        "fingerprint": prepared.task.fingerprint,
        "firm": version("firm"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def fold_model(
    recipe: Recipe,
    prepared: Prepared,
    number: int,
    folds: int,
    options: Options,
    listener: Listener,
    prober: Prober | None,
) -> Model:
    """The model of all images but those of a fold; its training resumes in a folder of its own.

    A long training is cut to a third, so that all folds cost little more than one training, unless minutes are given.
    Scores of good images by such a model are a little different: see docs/results/README.md.
    """
    if (epochs := prepared.recipe.training.epochs) > SHORT and options.minutes is None:
        prepared = _trained_for(prepared, max(LEAST, epochs // CUT))
    folder = None if options.folder is None else options.folder / f"fold-{number}"
    run = prepared.run(device=options.device, folder=folder, checkpoint_seconds=options.checkpoint_seconds)
    for progress in run:
        listener.progress(f"training fold {number + 1} of {folds}", progress.step, progress.steps)
        if number == 0 and prober is not None:
            prober(progress, run)
    return fit_model(recipe, prepared, prepared.trained(run), seed=options.seed)


def _self_check(checked: Sequence[Checked], recipe: Recipe, listener: Listener) -> dict[str, Any]:
    metrics = self_check(checked)
    listener.say(summary(metrics))
    if text := warning(metrics, backbone=bool(recipe.pretrained.name)):
        listener.warn(text)
    return metrics


def calibrate(model: str, measured: Sequence[Measured], split: Split, options: Options) -> Calibration:
    """Thresholds from the scores of good images that their models have not seen."""
    scores, peaks, light = zip(*measured, strict=True)
    return calibration_of(
        torch.cat(scores),
        model=model,
        peaks=None if peaks[0] is None else torch.cat(peaks),
        parts=split.held_out_parts,
        light=torch.cat(light),
        files=split.files,
        basis="folds" if split.folds else "held-out",
        targets=TargetRates(false_calls=options.false_calls, fail=options.fail),
    )


def _within_minutes(good: Good, prepared: Prepared, split: Split, elapsed: float, listener: Listener) -> Prepared:
    """Set the epochs to fit the time budget; measured once and stored, so a resumed fit uses the same number."""
    minutes, folder = good.options.minutes, good.options.folder
    assert minutes is not None
    file = None if folder is None else folder / "minutes.json"
    epochs = None if file is None else _stored_epochs(file, minutes)
    if epochs is None:
        epochs = epochs_within(
            minutes,
            elapsed,
            prepared,
            good.backbone,
            held_out=len(split.held_out_parts),
            trainings=max(1, split.folds),
            device=good.options.device,
            listener=listener,
        )
        if file is not None:
            write_atomically(file, json.dumps({str(minutes): epochs}).encode())
    listener.detail(f"{minutes:g} minutes on this machine: {epochs} epochs")
    return _trained_for(prepared, epochs)


def _stored_epochs(file: Path, minutes: float) -> int | None:
    """The epochs that were measured for so many minutes; None if never, or if the file is damaged."""
    try:
        epochs = json.loads(read_file(file))[str(minutes)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return epochs if type(epochs) is int and epochs >= LEAST_EPOCHS else None


def _trained_for(prepared: Prepared, epochs: int) -> Prepared:
    recipe = change(prepared.recipe, {"training.epochs": epochs})
    return replace(prepared, recipe=recipe, task=replace(prepared.task, training=recipe.training))


@contextmanager
def _claimed(folder: Path | None) -> Iterator[None]:
    """Lock a run's folder for this process."""
    with nullcontext(True) if folder is None else folder_lock(folder) as is_owner:
        if not is_owner:
            raise MachineError(f"another process is training in {folder}; wait for it or choose another --out")
        yield
