"""How many epochs fit into a time budget."""

import time

import torch

from firm.detector.prepare import Prepared, feature_sizes
from firm.detector.self_check import INSPECTED, KNOWN, PROBES
from firm.networks.backbone import Backbone
from firm.recipes.recipe import Recipe
from firm.runtime.listener import SILENT, Listener
from firm.scoring.patch_bank import BY_MEAN
from firm.scoring.patch_features import kinds_of
from firm.training.loop import start, train

TIMED = 4  # training steps to time
LEAST_EPOCHS = 5  # even if the time is too short
MOST_ADAPTOR_EPOCHS = 30  # an adaptor gains nothing from more
MATRIX = 1024  # side of the matrices whose product measures the speed of this machine
SEARCH_SPEED = 0.5  # speed of a neighbour search relative to a matrix product


def epochs_within(
    minutes: float,
    elapsed: float,
    prepared: Prepared,
    backbone: Backbone | None,
    *,
    held_out: int,
    device: str,
    trainings: int = 1,
    listener: Listener = SILENT,
) -> int:
    """How many epochs of so many trainings fit into the minutes less the elapsed seconds: times a few steps."""
    recipe, task = prepared.recipe, prepared.task
    state, moments = start(task.network(recipe.encoder), task.training, device), list[float]()
    for _ in train(state, task, recipe.method):
        moments.append(time.perf_counter())
        if len(moments) > TIMED:  # the first step warms up and is not timed
            break
    step = (moments[-1] - moments[0]) / max(1, len(moments) - 1)
    scored = held_out + 2 * INSPECTED + PROBES * (KNOWN + 2 * INSPECTED)
    after = _search_seconds(recipe, prepared, backbone) * (1 + scored / len(prepared.data.train))
    epoch = max(step * task.steps_per_epoch * trainings, 1e-9)
    epochs = (60 * minutes - elapsed - after) / epoch
    if epochs < LEAST_EPOCHS:
        least = (elapsed + after + LEAST_EPOCHS * epoch) / 60
        listener.warn(f"{minutes:g} minutes are too few: {LEAST_EPOCHS} epochs, the minimum, take about {least:.1f}")
    return max(LEAST_EPOCHS, int(min(epochs, MOST_ADAPTOR_EPOCHS) if backbone is not None else epochs))


def _search_seconds(recipe: Recipe, prepared: Prepared, backbone: Backbone | None) -> float:
    """Estimated time to select a coreset and to compare every good patch with its neighbourhood."""
    if not recipe.patchwise:
        return 0.0
    frame, memory, sizes = prepared.task.preprocessing.frame, recipe.memory, feature_sizes(recipe, backbone)
    rows, columns = recipe.grid.shape(*frame)
    patches = len(prepared.data.train) * rows * columns
    kept = memory.kept(patches)
    coreset = kept if memory.sampling == "coreset" and kept < patches else 0
    near = 1.0 if memory.neighbourhood < 0 else min(1.0, (2 * memory.neighbourhood + 1) ** 2 / (rows * columns))
    numbers = sum(sizes[kind] for kind in kinds_of(recipe.features) if kind != BY_MEAN)
    matrix = torch.ones(MATRIX, MATRIX)
    matrix @ matrix  # warm-up
    began = time.perf_counter()
    matrix @ matrix
    products_per_second = MATRIX**3 / max(1e-9, time.perf_counter() - began)
    return numbers * patches * (coreset + kept * near) / (SEARCH_SPEED * products_per_second)
