"""One industrial experiment: choose, train with probes over CPU time, and measure what the detector is worth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jaxtyping import UInt8
from torch import Tensor

from firm.batching import steps_per_epoch
from firm.bench import origin
from firm.choosing import choose
from firm.data import load
from firm.detector import Detector
from firm.embedding import teaching
from firm.evaluate import evaluation, look
from firm.holdout import split
from firm.localisation import pixel_auroc
from firm.metrics import auroc
from firm.peak import forget_peak, peak_megabytes
from firm.preferring import prefer
from firm.proving import prove
from firm.recipes.industrial import PatchExperiment
from firm.recipes.recipe import Recipe, change, to_json
from firm.restoring import network_of
from firm.runs import CLAIM, Run
from firm.sisters import sisters
from firm.types import OneClass

Tell = Callable[[str], None]

KEPT, PARTS = 0.1, 40  # part of the good images that a proof keeps back, and parts where images share them
PROVED = 0  # the seed of every proof


def conduct_patches(
    experiment: PatchExperiment, work: Path, *, device: str = "cpu", tell: Tell | None = None
) -> dict[str, Any]:
    """Train with probes, then evaluate; the work folder makes it resumable.

    Settings are chosen on the good images with the same draw for every row and seed, so that rows differ in nothing
    else. All good images are learnt from, for no threshold is to be set, unless the experiment asks for a proof.
    """
    data = load(experiment.data, side=experiment.side)
    data, kept = _kept_back(data) if experiment.proof else (data, data.train[:0])
    forget_peak()
    settled, choosing = _settled(experiment, data, tell)
    begun = work.is_dir() and any(path.name != CLAIM for path in work.iterdir())
    recipe, started = _lasting(experiment, settled, data), time.process_time()
    task = teaching(recipe, data, seed=experiment.seed, device=device, folder=work)
    prepared = choosing + time.process_time() - started
    run = Run(recipe, task, device=device, folder=work)
    steps = run.task.steps
    at = {steps * part // experiment.probes for part in range(1, experiment.probes)}
    for progress in run:
        if progress.step in at:
            probe = _probe(run, recipe, data) | {"seconds": round(run.seconds, 1)}
            run.history.write({"step": progress.step, "probe": probe})
            if tell is not None:
                tell(f"step {progress.step} of {steps}: {probe}")
    recipe = prefer(recipe, network_of(run), run.task, seed=experiment.seed, on_choice=tell)
    final = {look: _measured(run, change(recipe, changes), data, kept) for look, changes in experiment.looks.items()}
    lines = [line for line in run.history.lines if "loss" in line]
    return {
        "data": experiment.data,
        "row": experiment.row,
        "seed": experiment.seed,
        "recipe": to_json(recipe),
        "steps": steps,
        "good_images": len(data.train),
        "test_images": len(data.test),
        "probes": [{"step": line["step"], **line["probe"]} for line in run.history.lines if "probe" in line],
        "final": final,
        "diagnostics": lines[-1] if lines else None,
        "prepare_seconds": round(prepared, 1),
        "training_seconds": round(run.seconds, 1),
        "peak_megabytes": peak_megabytes(),
        "resumed": begun or run.resumed_at > 0,  # some of it was there already, so its seconds are not all
        "origin": origin(device),
    }


_choices: dict[tuple[str, int, bool, Recipe], tuple[Recipe, float]] = {}


def _settled(experiment: PatchExperiment, data: OneClass, tell: Tell | None) -> tuple[Recipe, float]:
    """The recipe with its open settings chosen, and the CPU seconds of it; rows that leave the same open share one."""
    given = experiment.recipe
    left_open = ("conditioning", "tiling", "memory", "views", "size", "pretrained", "automatic")
    asked = replace(Recipe(), **{name: getattr(given, name) for name in left_open})
    key = (experiment.data, experiment.side, experiment.proof, asked)
    if key not in _choices:
        started = time.process_time()
        _choices[key] = choose(asked, data, seed=0, on_choice=tell), time.process_time() - started
    found, seconds = _choices[key]
    chosen = {name: getattr(found, name) for name in left_open if name != "size"}
    return replace(given, **chosen), seconds


def _lasting(experiment: PatchExperiment, recipe: Recipe, data: OneClass) -> Recipe:
    """The recipe with as many epochs as come nearest to the steps asked for."""
    if not experiment.steps:
        return recipe
    epoch = steps_per_epoch(len(data.train), recipe.outliers.per_inlier, recipe.training.batch)
    return change(recipe, {"training.epochs": max(1, round(experiment.steps / epoch))})


def _detector(run: Run, recipe: Recipe, data: OneClass) -> Detector:
    return Detector.remember(recipe, run, data, {}, seed=run.task.seed)


def _probe(run: Run, recipe: Recipe, data: OneClass) -> dict[str, float]:
    """A quick look without intervals."""
    found = look(_detector(run, recipe, data), data.test)
    values = {"auroc": auroc(found.scores, data.anomalous)}
    if data.truth is not None and found.maps.numel() and bool(data.truth.masks.any()):
        known = data.truth.known
        values["pixel_auroc"] = pixel_auroc(found.maps[known], data.truth.masks[known])
    return {name: round(value, 5) for name, value in values.items()}


def _measured(run: Run, recipe: Recipe, data: OneClass, kept: UInt8[Tensor, "n c h w"]) -> dict[str, Any]:
    started = time.process_time()
    detector = _detector(run, recipe, data)
    remembered = time.process_time()
    found = look(detector, data.test)
    scored = time.process_time()
    measured: dict[str, Any] = asdict(evaluation(detector, found, data.test, data.anomalous, data.truth))
    if len(kept):
        measured["synthetic"] = asdict(prove(detector, kept, data.train, seed=PROVED))
    return _rounded(measured) | {
        "remember_seconds": round(remembered - started, 1),
        "images_per_second": round(len(data.test) / (scored - remembered), 2),
    }


def _kept_back(data: OneClass) -> tuple[OneClass, UInt8[Tensor, "n c h w"]]:
    """The data without some good parts, and images of those; the same ones for every row and seed."""
    learn, kept = split(sisters(data.name, data.train), KEPT, seed=PROVED, least=PARTS)
    return replace(data, train=data.train[learn]), data.train[kept]


def _rounded(found: dict[str, Any]) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(inner) for name, inner in value.items()}
        if isinstance(value, tuple):
            return [plain(inner) for inner in value]
        return round(value, 5) if isinstance(value, float) else value

    return dict(plain(found))


def patch_line(result: dict[str, Any]) -> str:
    """What came out of a run, in a few words."""
    told = [f"{look} {100 * found['overall']['auroc']['value']:.1f}".strip() for look, found in result["final"].items()]
    return f"{', '.join(told)}, {result['training_seconds']:.0f} s of training"
