"""Tables as values: rows of recipes x data sets x seeds, at a stated scale. tables.json holds what is in each."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

from firm.data.registry import DATASETS
from firm.errors import SettingError
from firm.outliers.registry import Sia
from firm.recipes.presets import FAST, PAPER, PRESETS
from firm.recipes.recipe import Recipe, change
from firm.research.experiment import PLAIN, Changes, Experiment, Record, read_record

SCALES = ("smoke", "short", "paper")
SIA: dict[str, Changes] = {  # the diffusion model of `outliers=sia` at each scale
    "smoke": {"outliers.steps": 4, "outliers.images": 4},
    "short": {},
    "paper": {"outliers.model": "paper", "outliers.images": 10_000},
}
STEPS = {"smoke": 20, "short": 600}  # of a reduced training on patches: 600 are about two CPU minutes
EPOCHS = {  # of a reduced semantic training, 1 elsewhere: 4,500 steps on Fashion-MNIST, about 10,000 on the others
    "smoke": {},
    "short": {"fashion-mnist": 6, "cifar10": 16, "cifar100-super": 32, "cats-vs-dogs": 8},
}
# of a reduced semantic training, chosen on held-out training images (docs/results/README.md)
SHORT = {"training.stratified": True, "training.lr": 0.1, "views.jitter.hue": 0.1}
OF_TRAINING = ("training", "positives", "outliers", "views")  # settings that features not trained have nothing of
NOT_TRAINED = ("pixels", "backbone")  # features
TEST_IMAGES = {"smoke": 200, "short": 2000, "paper": 0}  # of a semantic test; 0: all of it


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: what it changes in the table's recipe, and how its training is measured."""

    changes: Changes = field(default_factory=dict)
    on: dict[str, Changes] = field(default_factory=dict)  # data set -> further changes there
    preset: str = ""  # instead of the table's
    variants: dict[str, Changes] = field(default_factory=lambda: dict(PLAIN))  # ways of scoring -> settings
    without: dict[str, list[str]] = field(default_factory=dict)  # data set -> variants left out there
    only: list[str] = field(default_factory=list)  # data sets it is measured on; empty: all of the table
    scales: list[str] = field(default_factory=list)  # at which it is run; empty: all
    longer: int = 1  # times the usual steps of a scale
    steps: int = 0  # instead of the scale's, and with as many probes
    probes: int = 1
    keep_back: bool = False
    floor: bool = False  # nothing is trained: what a result has to exceed
    once: bool = False  # chance decides nothing, so one seed is enough
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
    differences: list[str] | None = None  # from the paper's protocol at its scale; None: not its protocol at all
    published: dict[str, dict[str, Any]] = field(default_factory=dict)  # printed tables beside it -> how they are read
    along: dict[str, Row] = field(default_factory=dict)  # one of your settings -> what comes with it
    settings: Changes = field(default_factory=dict)  # yours, on top of everything
    classes: list[str] = field(default_factory=list)  # yours: the only ones that are run; empty: all
    only: list[str] = field(default_factory=list)  # your rows: the only ones that are run; empty: all
    why: str = ""  # for readers of the file


@cache
def stored(name: str) -> dict[str, Any]:
    """A JSON file of this folder."""
    return json.loads(resources.files("firm.research").joinpath(f"{name}.json").read_text(encoding="utf-8"))


def _tables() -> dict[str, Table]:
    content = stored("tables")
    tables = extended(content["tables"], content["shared"])
    for table in tables.values():
        for rows in ("rows", "along"):
            table[rows] = {row: Row(**fields) for row, fields in table.get(rows, {}).items()}
        table["data"] = expanded(table["data"])
    return {name: Table(**fields) for name, fields in tables.items()}


def expanded(names: Iterable[str]) -> list[str]:
    """Data sets by name; `cifar10:*` is every class of a set."""
    sets = [(name, *name.partition(":")[::2]) for name in names]
    return [
        f"{family}:{each}" if chosen == "*" else name
        for name, family, chosen in sets
        for each in (DATASETS[family].classes if chosen == "*" else [chosen])
    ]


def extended(value: Any, shared: dict[str, Any]) -> Any:
    """The value with every mapping that names a `base` put on top of the shared mapping of that name."""
    if not isinstance(value, dict):
        return value
    own = {key: extended(inner, shared) for key, inner in value.items() if key != "base"}
    return extended(shared[value["base"]], shared) | own if "base" in value else own


TABLES = _tables()


def plan(table: Table, scale: str, seeds: list[int]) -> list[Experiment]:
    """The experiments of a table, seed by seed, so that an interrupted plan still compares like with like."""
    return [
        experiment(table, data, row, scale, seed)
        for seed in seeds
        for data in chosen(table)
        for row in rows_on(table, data, scale)
        if seed in seeds_of(table.rows[row], seeds)
    ]


def rows_on(table: Table, data: str, scale: str) -> list[str]:
    """The rows that are measured on a data set at a scale."""
    family = data.partition(":")[0]
    return [
        name
        for name, row in table.rows.items()
        if (not row.only or family in row.only)
        and (not row.scales or scale in row.scales)
        and (not table.only or name in table.only)
    ]


def seeds_of(row: Row, seeds: list[int]) -> list[int]:
    """The seeds that a row is run with."""
    return seeds[:1] if row.once else seeds


def narrowed(table: Table, classes: Sequence[str], settings: Mapping[str, object], rows: Sequence[str] = ()) -> Table:
    """The table on some of its classes and rows, and with your settings on top of every training."""
    return replace(table, classes=list(classes), only=list(rows), settings=dict(settings))


def chosen(table: Table) -> list[str]:
    """The data sets that are run; a class goes by `cifar10:bird` or `bird`."""
    wanted = set(table.classes)
    return [data for data in table.data if not wanted or {data, data.partition(":")[2]} & wanted]


def experiment(table: Table, data: str, name: str, scale: str, seed: int) -> Experiment:
    """One cell of a table at a scale."""
    if scale not in SCALES:
        raise SettingError(f"no scale {scale!r}; use one of {', '.join(SCALES)}")
    row, made = table.rows[name], partial(Experiment, protocol=table.protocol, data=data, seed=seed)
    changes, steps, probes, paper = row.changes | row.on.get(data, {}), 0, 1, scale == "paper"
    if table.protocol == "semantic":
        recipe = PAPER if paper else _reduced(table, row, data, scale)
        recipe = _with_settings(change(recipe, changes), table, data, scale)
        probes = 1 if row.floor else 200 if paper else 10
        return made(recipe=recipe, probes=probes, test_images=TEST_IMAGES[scale])
    if table.protocol == "frozen":  # at full length, with all images
        made = partial(made, test_images=TEST_IMAGES["smoke"] if scale == "smoke" else 0)
    recipe = change(change(PRESETS[row.preset or table.preset], table.changes), changes)
    if table.full:
        recipe = change(recipe, {"training.epochs": 1}) if scale == "smoke" and recipe.training.epochs else recipe
    elif row.steps:
        steps, probes = row.steps if scale != "smoke" else STEPS["smoke"] // 2, row.probes
    elif paper:
        length = recipe.training.epochs * row.longer
        recipe, probes = change(recipe, {"training.epochs": length}), 10 if length else 1
    else:
        recipe = change(recipe, {} if row.preset else table.reduced)
        steps = STEPS[scale] * row.longer if recipe.training.epochs else 0
    settled = replace(table, along={}) if row.preset else table  # what comes along is for the table's own preset
    recipe, side = _with_settings(recipe, settled, data, scale), 128 if data.startswith("drawn:") else 256
    steps = 0 if "training.epochs" in table.settings else steps
    variants = {way: how for way, how in row.variants.items() if way not in row.without.get(data, ())}
    return made(recipe=recipe, probes=probes, steps=steps, side=side, variants=variants, keep_back=row.keep_back)


def _reduced(table: Table, row: Row, data: str, scale: str) -> Recipe:
    """The recipe of a reduced semantic training, with the changes of the table; floors keep the preset's settings."""
    if row.floor:
        return FAST
    epochs = {"training.epochs": EPOCHS[scale].get(data.partition(":")[0], 1)}
    return change(FAST, SHORT | epochs | table.reduced | (epochs if scale == "smoke" else {}))


def _with_settings(recipe: Recipe, table: Table, data: str, scale: str) -> Recipe:
    """The recipe with the table's settings, `{class}` being that of the data; what trains nothing goes on doing so."""
    name = data.partition(":")[2] or data
    settings = {path: v.replace("{class}", name) if isinstance(v, str) else v for path, v in table.settings.items()}
    along = [row for setting, row in table.along.items() if setting.partition("=")[::2] in settings.items()]
    for changes in (*(row.changes | row.on.get(data, {}) for row in along), settings):
        if recipe.features in NOT_TRAINED:
            changes = {path: value for path, value in changes.items() if path.partition(".")[0] not in OF_TRAINING}
        if not recipe.training.epochs:
            changes = {path: value for path, value in changes.items() if path != "training.epochs"}
        recipe = change(recipe, changes)
    own = {path: value for path, value in SIA[scale].items() if path not in settings}
    return change(recipe, own) if isinstance(recipe.outliers, Sia) and not recipe.outliers.folder else recipe


def stored_runs(table: Table, scale: str, seeds: list[int], folder: Path) -> dict[str, dict[str, list[Record]]]:
    """The records of a table, by data set and row, one for each seed that has run."""

    def runs(data: str, row: str) -> list[Record]:
        asked = (experiment(table, data, row, scale, seed) for seed in seeds_of(table.rows[row], seeds))
        records = [read_record(folder, one) for one in asked]
        return [record for record in records if record is not None]

    return {data: {row: runs(data, row) for row in rows_on(table, data, scale)} for data in table.data}


def with_runs(table: Table, scale: str, seeds: list[int], folder: Path) -> Table | None:
    """The trained rows of a table on the data sets that have runs of them; None if none has."""
    rows = {name: row for name, row in table.rows.items() if not row.floor}
    trained = stored_runs(replace(table, rows=rows, data=chosen(table)), scale, seeds, folder)
    data = [name for name, runs in trained.items() if any(runs.values())]
    return replace(table, rows=rows, data=data) if data else None
