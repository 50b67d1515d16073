"""One industrial experiment: choose, train with probes over CPU time, and measure what the detector is worth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from firm.batching import steps_per_epoch
from firm.bench import origin
from firm.choosing import choose
from firm.data import load
from firm.detector import Detector
from firm.embedding import teaching
from firm.evaluate import Evaluation, evaluation, look
from firm.localisation import pixel_auroc
from firm.metrics import auroc
from firm.recipes.industrial import PatchExperiment
from firm.recipes.recipe import Recipe, change, to_json
from firm.runs import Run
from firm.types import OneClass

Tell = Callable[[str], None]


def conduct_patches(
    experiment: PatchExperiment, work: Path, *, device: str = "cpu", tell: Tell | None = None
) -> dict[str, Any]:
    """Train with probes, then evaluate; the work folder makes it resumable.

    Settings are chosen on the good images with the same draw for every row and seed, so that rows differ in nothing
    else. All good images are learnt from: there is no threshold to be held out for.
    """
    data = load(experiment.data, side=experiment.side)
    recipe = _lasting(experiment, _settled(experiment, data, tell), data)
    task = teaching(recipe, data, seed=experiment.seed, device=device, folder=work)
    run = Run(recipe, task, device=device, folder=work)
    steps = run.task.steps
    at = {steps * part // experiment.probes for part in range(1, experiment.probes)}
    for progress in run:
        if progress.step in at:
            probe = _probe(run, recipe, data) | {"seconds": round(run.seconds, 1)}
            run.history.write({"step": progress.step, "probe": probe})
            if tell is not None:
                tell(f"step {progress.step} of {steps}: {probe}")
    final = {look: _measured(run, change(recipe, changes), data) for look, changes in experiment.looks.items()}
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
        "training_seconds": round(run.seconds, 1),
        "resumed": run.resumed_at > 0,
        "origin": origin(device),
    }


_choices: dict[tuple[str, int, Recipe], Recipe] = {}


def _settled(experiment: PatchExperiment, data: OneClass, tell: Tell | None) -> Recipe:
    """The recipe with its open settings chosen; rows that leave the same open share one trial."""
    given = experiment.recipe
    left_open = ("conditioning", "tiling", "memory", "views", "size", "pretrained", "automatic")
    asked = replace(Recipe(), **{name: getattr(given, name) for name in left_open})
    key = (experiment.data, experiment.side, asked)
    if key not in _choices:
        _choices[key] = choose(asked, data, seed=0, on_choice=tell)
    found = _choices[key]
    return replace(given, conditioning=found.conditioning, memory=found.memory, views=found.views, automatic=())


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


def _measured(run: Run, recipe: Recipe, data: OneClass) -> dict[str, Any]:
    started = time.process_time()
    detector = _detector(run, recipe, data)
    remembered = time.process_time()
    found = look(detector, data.test)
    scored = time.process_time()
    return _rounded(evaluation(detector, found, data.test, data.anomalous, data.truth)) | {
        "remember_seconds": round(remembered - started, 1),
        "images_per_second": round(len(data.test) / (scored - remembered), 2),
    }


def _rounded(found: Evaluation) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(inner) for name, inner in value.items()}
        return round(value, 5) if isinstance(value, float) else value

    return dict(plain(asdict(found)))


def patch_line(result: dict[str, Any]) -> str:
    """What came out of a run, in a few words."""
    told = [f"{look} {100 * found['overall']['auroc']['value']:.1f}".strip() for look, found in result["final"].items()]
    return f"{', '.join(told)}, {result['training_seconds']:.0f} s of training"
