"""How long a fit will take on this machine: a few images and steps are timed, and the rest follows from its size."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from firm.choosing import within
from firm.conditioning import LIGHTS
from firm.embedding import FEWEST, MOST_SPARED, SPARED, teaching
from firm.fitting import conditioned, looker_of
from firm.foretelling import numbers_of, steps_of
from firm.localiser import MEANT, is_grey, kinds_of
from firm.preferring import BEFORE, BEHIND, THIN
from firm.recipes.recipe import Recipe
from firm.restoring import network_of
from firm.runs import Run
from firm.tiling import Grid
from firm.trial import INSPECTED, KNOWN
from firm.types import OneClass

TIMED = 4  # steps by which the length of one is told
IMAGES = 8  # good images by which the length of a look at one is told
SIDE = 1024  # of the matrices that tell how fast this machine compares patches
SHARE = 0.5  # of that speed which a search reaches

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Duration:
    """The seconds of a fit, part by part."""

    choosing: float  # settings on good images
    features: float  # of a pretrained backbone: good images and synthetic defects
    epoch: float
    epochs: int
    preferring: float = 0.0  # features before or behind the head, tried on what was spared
    memory: float  # remembering the good patches
    thresholds: float  # looking at what was held out

    @property
    def fixed(self) -> float:
        """What does not depend on how long is trained."""
        return self.choosing + self.features + self.preferring + self.memory + self.thresholds

    @property
    def seconds(self) -> float:
        return self.fixed + self.epochs * self.epoch

    def sentence(self) -> str:
        parts = {
            "features": self.features,
            "training": self.epochs * self.epoch,
            "choice of features": self.preferring,
            "memory": self.memory,
            "thresholds": self.thresholds,
        }
        unit, size, digits = ("minutes", 60, 1) if self.seconds >= 60 else ("seconds", 1, 0)
        said = {name: f"{seconds / size:.{digits}f}" for name, seconds in parts.items()}
        told = ", ".join(f"{name} {number}" for name, number in said.items() if float(number))
        whole = f"time: about {max(2.0, self.seconds) / size:.{digits}f} {unit} on this machine"
        return f"{whole} ({told})" if told else whole


def duration(
    recipe: Recipe, data: OneClass, *, held_out: int, seed: int, device: torch.device | str = "cpu"
) -> Duration:
    """What learning from these images will take, with thresholds on so many others."""
    images, epochs = len(data.train), recipe.training.epochs
    recipe = within(recipe, images)
    few = replace(data, train=data.train[: IMAGES if recipe.pretrained.name else max(IMAGES, recipe.training.batch)])
    tried = replace(recipe, automatic=(), training=replace(recipe.training, epochs=max(1, epochs)))
    task, embedded = _timed(lambda: teaching(tried, few, seed=seed, device=device))
    run = Run(tried, task, device=device)
    epoch = _step(run) * steps_of(recipe, images) if epochs else 0.0
    look = _look(tried, run, few)
    speed = SHARE * _speed()
    compared = _comparisons(recipe, data) / speed
    learnt = bool(recipe.pretrained.name)  # then good images are looked at once, for the training
    return Duration(
        choosing=look * (KNOWN + 2 * INSPECTED) * len(LIGHTS) if "light" in recipe.automatic else 0.0,
        features=embedded * images / len(few.train) if learnt else 0.0,
        epoch=epoch,
        epochs=epochs,
        preferring=_tried(recipe, data) / speed,
        memory=compared + (0.0 if learnt else look * images),
        thresholds=held_out * (look + compared / images),
    )


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def _step(run: Run) -> float:
    """The seconds of a step; the first is not counted, for it warms up."""
    moments = []
    for progress in run:
        moments.append(time.perf_counter())
        if progress.step > TIMED:
            break
    return (moments[-1] - moments[0]) / max(1, len(moments) - 1)


def _look(recipe: Recipe, run: Run, few: OneClass) -> float:
    """The seconds of looking at one image patch by patch; of whole images they are not worth a word."""
    if not isinstance(recipe.tiling, Grid):
        return 0.0
    some = replace(few, train=few.train[:IMAGES])
    ready = conditioned(replace(recipe, size=run.task.preprocessing.size), some)[1]
    assert ready is not None
    look = looker_of(recipe, network_of(run), run.task.preprocessing, grey=is_grey(ready.images))
    return _timed(lambda: look(ready.images))[1] / len(some.train)


def _comparisons(recipe: Recipe, data: OneClass) -> float:
    """Multiplications of choosing a coreset and of comparing every good patch with those it may be compared with."""
    if not isinstance(recipe.tiling, Grid):
        return 0.0
    cells = _cells(recipe.tiling, recipe, data)
    patches, memory = len(data.train) * cells, recipe.memory
    kept = memory.kept(patches)
    chosen = kept if memory.choose == "coreset" and kept < patches else 0
    numbers = numbers_of(recipe, recipe.tiling, grey=is_grey(data.train[:IMAGES]))
    searched = sum(numbers[kind] for kind in kinds_of(recipe.features) if kind != MEANT)
    return searched * patches * (chosen + kept * _near(memory.reach, cells))


def _tried(recipe: Recipe, data: OneClass) -> float:
    """The same of `firm.preferring.prefer`: known images among themselves, and what was spared with them, twice."""
    images = len(data.train)
    left_open = "features" in recipe.automatic and recipe.training.epochs and images >= FEWEST
    if not left_open or recipe.memory.reach >= 0 or not isinstance(recipe.tiling, Grid) or not recipe.pretrained.name:
        return 0.0
    cells, known = _cells(recipe.tiling, recipe, data), min(KNOWN, images)
    kept = known * cells * THIN
    spare = min(SPARED * images, MOST_SPARED) * (1 + recipe.outliers.per_inlier)
    numbers = numbers_of(recipe, recipe.tiling, grey=False)
    tried = [kind for kind in (*kinds_of(BEFORE), *kinds_of(BEHIND)) if kind != MEANT]
    remembered, compared = sum(numbers[kind] for kind in set(tried)), sum(numbers[kind] for kind in tried)
    return cells * kept * (known * remembered + spare * compared)


def _cells(grid: Grid, recipe: Recipe, data: OneClass) -> int:
    side = min(recipe.size or data.size, data.train.shape[-1])
    rows, columns = grid.shape(side, side)
    return rows * columns


def _near(reach: int, cells: int) -> float:
    """The part of the remembered patches that a patch may be compared with."""
    return 1.0 if reach < 0 else min(1.0, (2 * reach + 1) ** 2 / cells)


def _speed() -> float:
    """Multiplications a second of a product of matrices."""
    matrix: Tensor = torch.ones(SIDE, SIDE)
    _timed(lambda: matrix @ matrix)
    return SIDE**3 / max(1e-9, _timed(lambda: matrix @ matrix)[1])
