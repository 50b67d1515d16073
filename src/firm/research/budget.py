"""What a plan costs on this machine: a few timed steps of each network, times the steps that its trainings take."""

import time
from collections.abc import Iterable
from functools import cache

import torch

from firm.data.registry import DATASETS
from firm.networks.heads import Encoder, build
from firm.recipes.recipe import Recipe
from firm.research.experiment import Experiment
from firm.research.semantic import REFERENCES
from firm.research.tables import stored
from firm.runtime.random import stream
from firm.training.batches import steps_per_epoch
from firm.views.registry import PatchPairs

TIMED = 3  # steps, after one that warms up
VIEWS = 44  # of a test image that all scores embed: 4 rotations, and 10 crops of each
TEST_IMAGES = 10_000  # of a whole semantic test


def good_images(data: str) -> int:
    """How many good images a class of a published set has; 0 where that is not known."""
    family, _, name = data.partition(":")
    numbers = DATASETS[family].classes.get(name, ()) if family in DATASETS else ()
    return stored("tables")["good_images"].get(family) or (numbers[0] if numbers else 0)


def hours(experiments: Iterable[Experiment]) -> tuple[float, int]:
    """CPU hours of the trainings whose cost can be told, and the number of those whose cost cannot."""
    costs = [_seconds(experiment) for experiment in experiments]
    return sum(cost for cost in costs if cost is not None) / 3600, costs.count(None)


def _seconds(experiment: Experiment) -> float | None:
    """Training, and on semantic sets scoring; None for frozen features and sets of unknown size."""
    recipe, count = experiment.recipe, good_images(experiment.data)
    if recipe.pretrained.name or experiment.protocol in ("guarantees", "few") or not count:
        return None
    steps = recipe.training.epochs * steps_per_epoch(count, recipe.outliers.per_inlier, recipe.training.batch)
    step, embed = step_seconds(recipe.encoder, recipe.training.batch, _side(recipe, experiment.data))
    if experiment.protocol != "semantic":
        return (experiment.steps or steps) * step
    if recipe.features == "pixels":
        return 0.0
    test = experiment.test_images or TEST_IMAGES
    probed = min(count, REFERENCES) if experiment.test_images else count
    return steps * step + embed * (experiment.probes * (probed + test) + 4 * count + VIEWS * test)


def _side(recipe: Recipe, data: str) -> int:
    if isinstance(recipe.views, PatchPairs):
        return max(recipe.views.sizes)
    return recipe.size or DATASETS[data.partition(":")[0]].size


@cache
def step_seconds(settings: Encoder, batch: int, side: int) -> tuple[float, float]:
    """Seconds of a training step with two views of each item, and of the embedding of one image."""
    network = build(settings, rng=stream(0, "weights"))
    images = torch.zeros(2 * batch, 3, side, side)
    moments = list[float]()
    for _ in range(TIMED + 1):
        network(images).square().mean().backward()
        moments.append(time.perf_counter())
    network.eval()
    with torch.no_grad():
        started = time.perf_counter()
        network.encoder(images)
        embed = (time.perf_counter() - started) / len(images)
    return (moments[-1] - moments[0]) / TIMED, embed
