"""Tables as values: rows of recipes x data sets x seeds, at a stated scale. tables.json holds what is in each."""

import json
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

from firm.errors import SettingError
from firm.recipes.presets import FAST, PAPER, PRESETS
from firm.recipes.recipe import change
from firm.research.experiment import PLAIN, Changes, Experiment, Record, read_record

SCALES = ("smoke", "short", "paper")
STEPS = {"smoke": 20, "short": 600}  # of a reduced training on patches: 600 are about two CPU minutes
EPOCHS = {"smoke": {}, "short": {"fashion-mnist": 1, "cifar10": 2}}  # of a reduced semantic training, 1 elsewhere
TEST_IMAGES = {"smoke": 200, "short": 2000, "paper": 0}  # of a semantic test; 0: all of it


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: what it changes in the table's recipe, and how its training is measured."""

    changes: Changes = field(default_factory=dict)
    on: dict[str, Changes] = field(default_factory=dict)  # data set -> further changes there
    preset: str = ""  # instead of the table's
    variants: dict[str, Changes] = field(default_factory=lambda: dict(PLAIN))  # ways of scoring -> settings
    without: dict[str, list[str]] = field(default_factory=dict)  # data set -> variants left out there
    longer: int = 1  # times the usual steps of a scale
    steps: int = 0  # instead of the scale's, and with as many probes
    probes: int = 1
    keep_back: bool = False
    why: str = ""  # for readers of the file


@dataclass(frozen=True, kw_only=True)
class Table:
    """What is compared, on which data, and what `--scale paper` makes of it."""

    title: str
    rows: dict[str, Row]
    data: list[str]
    protocol: str = "patches"
    preset: str = "paper"
    changes: Changes = field(default_factory=dict)  # in the preset, for all rows
    full: bool = False  # minutes as it is: only a smoke test is shorter
    reduced: Changes = field(default_factory=dict)  # below the paper's scale
    at_paper_scale: str = "Our recipe at its full length, not the paper's protocol."
    published: str = "mvtec"  # the part of published.json that stands beside it
    why: str = ""  # for readers of the file


@cache
def stored(name: str) -> dict[str, Any]:
    """A JSON file of this folder."""
    return json.loads(resources.files("firm.research").joinpath(f"{name}.json").read_text(encoding="utf-8"))


def _tables() -> dict[str, Table]:
    content = stored("tables")
    tables = _extended(content["tables"], content["shared"])
    rows = {name: {row: Row(**fields) for row, fields in table.pop("rows").items()} for name, table in tables.items()}
    return {name: Table(rows=rows[name], **fields) for name, fields in tables.items()}


def _extended(value: Any, shared: dict[str, Any]) -> Any:
    """The value with every mapping that names a `base` put on top of the shared mapping of that name."""
    if not isinstance(value, dict):
        return value
    own = {key: _extended(inner, shared) for key, inner in value.items() if key != "base"}
    return _extended(shared[value["base"]], shared) | own if "base" in value else own


TABLES = _tables()


def plan(table: Table, scale: str, seeds: list[int]) -> list[Experiment]:
    """The experiments of a table, seed by seed, so that an interrupted plan still compares like with like."""
    return [experiment(table, data, row, scale, seed) for seed in seeds for data in table.data for row in table.rows]


def experiment(table: Table, data: str, name: str, scale: str, seed: int) -> Experiment:
    """One cell of a table at a scale."""
    if scale not in SCALES:
        raise SettingError(f"no scale {scale!r}; use one of {', '.join(SCALES)}")
    row, made = table.rows[name], partial(Experiment, protocol=table.protocol, data=data, seed=seed)
    changes, steps, probes, paper = row.changes | row.on.get(data, {}), 0, 1, scale == "paper"
    if table.protocol == "semantic":
        epochs = {} if paper else {"training.epochs": EPOCHS[scale].get(data.partition(":")[0], 1)}
        recipe, images = change(PAPER if paper else FAST, epochs | changes), TEST_IMAGES[scale]
        return made(recipe=recipe, probes=200 if paper else 10, test_images=images)
    if table.protocol == "frozen":  # at full length, with all images
        made = partial(made, test_images=TEST_IMAGES["smoke"] if scale == "smoke" else 0)
    recipe = change(change(PRESETS[row.preset or table.preset], table.changes), changes)
    if table.full:
        recipe = change(recipe, {"training.epochs": 1}) if scale == "smoke" and recipe.training.epochs else recipe
    elif row.steps:
        steps, probes = row.steps if scale != "smoke" else STEPS["smoke"] // 2, row.probes
    elif paper:
        recipe, probes = change(recipe, {"training.epochs": recipe.training.epochs * row.longer}), 10
    else:
        recipe = change(recipe, table.reduced)
        steps = STEPS[scale] * row.longer if recipe.training.epochs else 0
    side = 128 if data.startswith("drawn:") else 256
    variants = {way: how for way, how in row.variants.items() if way not in row.without.get(data, ())}
    return made(recipe=recipe, probes=probes, steps=steps, side=side, variants=variants, keep_back=row.keep_back)


def stored_runs(table: Table, scale: str, seeds: list[int], folder: Path) -> dict[str, dict[str, list[Record]]]:
    """The records of a table, by data set and row, one for each seed that has run."""

    def runs(data: str, row: str) -> list[Record]:
        records = [read_record(folder, experiment(table, data, row, scale, seed)) for seed in seeds]
        return [record for record in records if record is not None]

    return {data: {row: runs(data, row) for row in table.rows} for data in table.data}
