"""Tables as values: rows of recipes x data sets x seeds, at a stated scale."""

from __future__ import annotations

from dataclasses import dataclass

from firm.objective import POSITIVES
from firm.recipes.experiment import Experiment
from firm.recipes.presets import FAST, PAPER
from firm.recipes.recipe import change
from firm.types import FirmError

# epochs of a reduced training: each costs minutes on one core, and CIFAR-10 is learnt more slowly
EPOCHS = {"smoke": {}, "short": {"fashion-mnist": 1, "cifar10": 2}}
TEST_IMAGES = {"smoke": 200, "short": 2000}
SCALES = ("smoke", "short", "paper")


@dataclass(frozen=True, kw_only=True)
class Table:
    """What is compared, on what; the scale decides how long each training is."""

    title: str
    rows: dict[str, dict[str, object]]  # name -> changes to the base recipe
    data: tuple[str, ...]


OBJECTIVES = Table(
    title="The four objectives",
    rows={name: {"positives": name} for name in POSITIVES},
    data=("fashion-mnist:sandal", "fashion-mnist:shirt", "cifar10:bird", "cifar10:cat", "cifar10:dog"),
)
EXPOSURE = Table(
    title="FIRM with rotations and with Outlier Exposure",
    rows={"firm": {}, "firm + OE": {"outliers": "exposure"}},
    data=("cifar10:bird", "cifar10:dog"),
)
SHORT_BUDGET = Table(
    title="Head and learning rate on a short budget",
    rows={
        f"{layers} hidden, lr {lr}": {"encoder.head.hidden": (512,) * layers, "training.lr": lr}
        for layers in (1, 8)
        for lr in (0.01, 0.05)
    },
    data=("fashion-mnist:sandal",),
)
TABLES = {"objectives": OBJECTIVES, "exposure": EXPOSURE, "short-budget": SHORT_BUDGET}


def plan(table: Table, scale: str, seeds: list[int]) -> list[Experiment]:
    """The experiments of a table, seed by seed, so that an interrupted plan still compares like with like."""
    return [
        experiment(data, changes, scale, seed)
        for seed in seeds
        for data in table.data
        for changes in table.rows.values()
    ]


def experiment(data: str, changes: dict[str, object], scale: str, seed: int) -> Experiment:
    """One cell at a scale; only `paper` is the paper's protocol, the others are reduced and called so."""
    if scale not in SCALES:
        raise FirmError(f"no scale {scale!r}; use one of {', '.join(SCALES)}")
    if scale == "paper":
        return Experiment(data=data, recipe=change(PAPER, changes), seed=seed, probes=200)
    epochs = EPOCHS[scale].get(data.partition(":")[0], 1)
    recipe = change(FAST, {"training.epochs": epochs} | changes)
    return Experiment(data=data, recipe=recipe, seed=seed, probes=10, test_images=TEST_IMAGES[scale])
