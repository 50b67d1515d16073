"""The pipeline from good images to a detector, used by the command line, `Detector.fit` and `firm bench`.

read_good    decode the good images once and validate them
audit        leave out images that do not belong (audit.py)
split        training images, and images held out for the thresholds; no part is on both sides
choose       settings, tuned on synthetic defects (tune.py)
prepare      align every image once, embed it once (prepare.py)
train        the training, resumable at any step
remember     build the reference features with the trained network (remember.py)
calibrate    thresholds on the held-out images
self_check   AUROC on synthetic defects, next to the pixel baseline (self_check.py)
"""

import hashlib
import json
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from firm.data.duplicates import check_good, describe_parts, group_by_part, warnings_about
from firm.data.folder import SIZE
from firm.data.registry import load, shows_parts, training_files
from firm.data.splits import default_holdout, parts_needed, split_by_part
from firm.decision.calibration import Calibration, TargetRates, calibration_of
from firm.detector.audit import audit_images
from firm.detector.estimate import LEAST_EPOCHS, epochs_within
from firm.detector.prepare import (
    MEMORY,
    Prepared,
    check_ignore_mask,
    check_recipe,
    frozen_backbone,
    most_images,
    prepare,
    read_side,
)
from firm.detector.remember import Fitted, measure, remember
from firm.detector.self_check import CheckImages, Prober, self_check, summary, warning
from firm.detector.tune import choose, choose_features
from firm.errors import DataError, MachineError, named
from firm.images.ignore_mask import read_ignored
from firm.images.preprocess import fingerprint
from firm.networks.backbone import Backbone
from firm.recipes import presets
from firm.recipes.recipe import Recipe, change, sparse
from firm.runtime.files import folder_lock, write_atomically
from firm.runtime.listener import SILENT, Listener
from firm.training.loop import Progress
from firm.training.runs import Run
from firm.types import Depth, OneClass

Images = Path | str | UInt8[Tensor, "n c h w"] | OneClass
OnProgress = Callable[[Progress, Run], None]
LEFT_OUT = "left out"  # prefix of the warning about an unusable file


@dataclass(frozen=True, kw_only=True)
class Options:
    """Arguments of a fit besides the recipe; see `Detector.fit`."""

    seed: int = 0
    device: str = "cpu"
    folder: Path | None = None
    holdout: float | None = None
    false_calls: float = 0.05
    fail: float = 0.01
    minutes: float | None = None
    memory: float = MEMORY
    depth: Depth | None = None
    strict: bool = False
    ignored: Path | Bool[Tensor, "a b"] | None = None
    parts: Int[Tensor, " n"] | None = None
    keep_suspects: bool = False
    checkpoint_seconds: float = 30.0

    def __post_init__(self) -> None:
        TargetRates(false_calls=self.false_calls, fail=self.fail)  # refuses wrong rates before anything is read


@dataclass(frozen=True)
class Good:
    """Validated good images, and the settings of the fit."""

    data: OneClass
    recipe: Recipe
    options: Options
    backbone: Backbone | None
    left_out: tuple[str, ...] = ()  # one message per unusable file

    @property
    def key(self) -> str:
        """A digest of everything that determines the detector; stored in it, so an identical fit can be recognised."""
        by, ignored = self.options, self.data.ignored
        rates = (by.holdout, by.false_calls, by.fail, by.minutes, by.keep_suspects)
        hidden = None if ignored is None else fingerprint(ignored)
        content = [fingerprint(self.data.train), asdict(self.data.depth), by.seed, rates, hidden]
        return hashlib.sha256(json.dumps([sparse(self.recipe), *content], sort_keys=True).encode()).hexdigest()[:16]


def read_good(
    images: Images, recipe: Recipe | None = None, options: Options | None = None, listener: Listener = SILENT
) -> Good:
    """Decode and validate the good images before any training."""
    options, recipe = options or Options(), recipe or default_recipe(images)
    if options.minutes is not None:  # a time budget replaces the epochs; enough steps to time
        recipe = change(recipe, {"training.epochs": max(recipe.training.epochs, LEAST_EPOCHS)})
    ignored = _ignored(images, options.ignored)
    check_ignore_mask(recipe, ignored)
    backbone = frozen_backbone(recipe, options.device)
    left_out: list[str] = []
    if isinstance(images, OneClass):
        data = images
    elif isinstance(images, Tensor):
        data = as_data(images)
    else:
        data, left_out = _load(str(images), recipe, options, backbone, listener)
    check_good(data)
    data = data if ignored is None else replace(data, ignored=ignored)
    return Good(data, recipe, options, backbone, tuple(left_out))


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
            listener=listener,
        )
        check, prober = None, None
        if options.minutes is not None:
            prepared = _within_minutes(good, prepared, split, time.perf_counter() - began, listener)
        if options.minutes is not None or prepared.recipe.patchwise:
            check = CheckImages.of(prepared.recipe, prepared, split.held_out, seed=seed)
            prober = None if options.minutes is None else Prober(prepared, check, seed)
        run = train(prepared, options, listener=listener, callbacks=(prober, on_progress))
        network = prepared.trained(run)
        recipe = choose_features(prepared, network, seed=seed, listener=listener)
        origin = _origin(prepared, run) | {"asked": good.key, "suspects": suspects}
        listener.progress("remembering good images", 0, None)
        fitted = remember(recipe, prepared, network, origin, seed=seed)
        fitted.probes = [] if prober is None else prober.lines
        fitted.calibration = calibrate(fitted, split, options, listener)
        if check is not None and fitted.model.has_maps:
            listener.progress("self-check", 0, None)
            metrics = self_check(fitted, prepared, check, seed=seed)
            listener.say(summary(metrics))
            if text := warning(metrics, backbone=bool(recipe.pretrained.name)):
                listener.warn(text)
            fitted.origin |= {"metrics": metrics}
    return fitted


def default_recipe(images: Images) -> Recipe:
    """Patches for parts, whole images for semantic classes and for bare tensors."""
    if isinstance(images, Tensor):
        return presets.FAST
    name = images.name if isinstance(images, OneClass) else str(images)
    return presets.usual() if shows_parts(name) else presets.FAST


# --- the steps ---


@dataclass(frozen=True)
class Split:
    """Training images and held-out images, each with the part it shows."""

    learn: OneClass
    parts: Int[Tensor, " n"]
    held_out: UInt8[Tensor, "m c h w"]
    held_out_parts: Int[Tensor, " m"]


def audit(good: Good, listener: Listener = SILENT) -> tuple[Good, list[dict[str, Any]]]:
    """Leave out images that do not belong, unless they are to be kept, and list them; needs a frozen backbone."""
    data, options = good.data, good.options
    if good.backbone is None:
        return good, []
    check_recipe(good.recipe, data, len(data.train))
    parts = group_by_part(data.name, data.train) if options.parts is None else options.parts
    found = audit_images(good.recipe, data, parts, good.backbone, seed=options.seed, listener=listener)
    if text := found.warning(kept=options.keep_suspects):
        listener.warn(text)
    keep = torch.ones_like(found.suspect) if options.keep_suspects else ~found.suspect
    files = tuple(data.files[number] for number in keep.nonzero().squeeze(1)) if data.files else ()
    trimmed = replace(data, train=data.train[keep], files=files)
    numbers = parts[keep].unique(return_inverse=True)[1]
    return replace(good, data=trimmed, options=replace(options, parts=numbers)), found.suspects()


def split_good(good: Good, listener: Listener = SILENT) -> Split:
    """Group the images by part, and hold some parts out for the thresholds."""
    data, options = good.data, good.options
    parts = group_by_part(data.name, data.train) if options.parts is None else options.parts
    count, rate = len(data.train), options.false_calls
    holdout = default_holdout(count, rate) if options.holdout is None else options.holdout
    for text in warnings_about(data, holdout=holdout, false_calls=rate):
        listener.warn(text)
    learn, held_out = split_by_part(parts, holdout, seed=options.seed, min_parts=parts_needed(rate))
    check_recipe(good.recipe, data, len(learn))
    side = " x ".join(map(str, data.train.shape[:1:-1]))
    remarks = [text] if (text := describe_parts(parts)) else []
    if data.ignored is not None:
        remarks.append(f"{100 * float(data.ignored.float().mean()):.1f} % of the pixels ignored")
    listener.say(
        f"{named(data.name)}: {count} good images of {side} px, {len(learn)} to learn from, {len(held_out)} held out"
        + (f" ({'; '.join(remarks)})" if remarks else "")
    )
    numbers = parts[learn].unique(return_inverse=True)[1]  # from 0 without gaps
    return Split(replace(data, train=data.train[learn]), numbers, data.train[held_out], parts[held_out])


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


def _origin(prepared: Prepared, run: Run) -> dict[str, Any]:
    return {
        "data": prepared.data.name,
        "seed": prepared.task.seed,
        "good_images": len(prepared.data.train),
        "fingerprint": prepared.task.fingerprint,
        "task": run.digest,
        "firm": version("firm"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "collapsed": run.collapsed,
    }


def calibrate(fitted: Fitted, split: Split, options: Options, listener: Listener = SILENT) -> Calibration:
    """Thresholds from the scores of the held-out images."""
    images = split.held_out
    measured = measure(fitted.model, images, partial(listener.progress, "setting thresholds", total=len(images)))
    targets = TargetRates(false_calls=options.false_calls, fail=options.fail)
    return calibration_of(
        measured.scores,
        model=fitted.id,
        peaks=measured.peaks,
        parts=split.held_out_parts,
        light=measured.light,
        targets=targets,
    )


def as_data(good: UInt8[Tensor, "n c h w"], ignored: Bool[Tensor, "a b"] | None = None) -> OneClass:
    """Bare good images as a data set without test images."""
    check_images(good)
    size = min(SIZE, good.shape[-1])
    return OneClass("images", good, good[:0], torch.zeros(0, dtype=torch.bool), size, ignored=ignored)


def check_images(images: Tensor) -> None:
    """Accept uint8, channels first, at least one pixel."""
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] not in (1, 3) or not all(images.shape[2:]):
        raise DataError(f"images are {images.dtype} of shape {tuple(images.shape)}; give uint8 (n, 1 or 3, h, w)")


def _ignored(images: Images, ignored: Path | Bool[Tensor, "a b"] | None) -> Bool[Tensor, "a b"] | None:
    """The mask of what to ignore, read and compared with the images before these are decoded."""
    if isinstance(ignored, Path):
        files = training_files(str(images)) if isinstance(images, Path | str) else getattr(images, "files", ())
        return read_ignored(ignored, files)
    return images.ignored if ignored is None and isinstance(images, OneClass) else ignored


def _load(
    name: str, recipe: Recipe, options: Options, backbone: Backbone | None, listener: Listener
) -> tuple[OneClass, list[str]]:
    """Read a folder or data set, at most as many images as fit in memory; also returns why files were left out."""
    side = read_side(recipe)
    most, files = most_images(recipe, side, options.memory, backbone), len(training_files(name))
    if files > most:
        listener.warn(f"{files:,} good images: reading {most:,}, sampled uniformly; raise --memory to read more")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = load(name, side=side, depth=options.depth, strict=options.strict, max_images=most, with_test=False)
    messages = [str(caught_warning.message) for caught_warning in caught]
    for text in messages:
        listener.warn(text)
    return data, [text for text in messages if text.startswith(LEFT_OUT)]


def _within_minutes(good: Good, prepared: Prepared, split: Split, elapsed: float, listener: Listener) -> Prepared:
    """Set the epochs to fit the time budget; measured once and stored, so a resumed fit uses the same number."""
    minutes, folder = good.options.minutes, good.options.folder
    assert minutes is not None
    file = None if folder is None else folder / "minutes.json"
    epochs = json.loads(file.read_bytes()).get(str(minutes)) if file is not None and file.is_file() else None
    if epochs is None:
        epochs = epochs_within(
            minutes, elapsed, prepared, good.backbone, held_out=len(split.held_out), device=good.options.device
        )
        if file is not None:
            write_atomically(file, json.dumps({str(minutes): epochs}).encode())
    listener.detail(f"{minutes:g} minutes on this machine: {epochs} epochs")
    recipe = change(prepared.recipe, {"training.epochs": epochs})
    return replace(prepared, recipe=recipe, task=replace(prepared.task, training=recipe.training))


@contextmanager
def _claimed(folder: Path | None) -> Iterator[None]:
    """Lock a run's folder for this process."""
    with nullcontext(True) if folder is None else folder_lock(folder) as is_owner:
        if not is_owner:
            raise MachineError(f"another process is training in {folder}; wait for it or choose another --out")
        yield
