"""What the tables plan at each scale, and that every stored run belongs to one of them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from firm.data.duplicates import group_by_part
from firm.detector.prepare import frozen_backbone
from firm.detector.tune import choose
from firm.drawn.render import draw_dataset
from firm.errors import ModelFileError, SettingError
from firm.outliers.registry import Exposure, Sia
from firm.recipes.presets import FAST, PAPER
from firm.recipes.recipe import change
from firm.research import budget
from firm.research.budget import good_images
from firm.research.experiment import read_record
from firm.research.protocols import _tuned
from firm.research.published import printed, sources
from firm.research.tables import SCALES, TABLES, experiment, narrowed, plan, rows_on, stored
from firm.runtime.listener import SILENT
from firm.training.batches import steps_per_epoch
from firm.training.positives import POSITIVES

STORED = Path("results/runs")


def test_a_plan_is_every_row_on_every_data_set_seed_by_seed():
    for scale, table in itertools.product(SCALES, TABLES.values()):
        experiments = plan(table, scale, [0, 1])
        cells = [
            (seed, data, table.rows[row])
            for seed in (0, 1)
            for data in table.data
            for row in rows_on(table, data, scale)
            if seed == 0 or not table.rows[row].once
        ]
        assert len({one.key for one in experiments}) == len(cells) or scale == "smoke"  # where every length is one
        for (seed, data, row), one in zip(cells, experiments, strict=True):
            assert (one.seed, one.data, one.protocol) == (seed, data, table.protocol)
            changes = row.changes | row.on.get(data, {})
            generator = ["outliers"] if isinstance(one.recipe.outliers, Sia) else []  # smaller at a smaller scale
            length = {"training.epochs", *table.reduced, *generator}
            assert change(one.recipe, {path: changes[path] for path in set(changes) - length}) == one.recipe


def test_every_table_of_the_paper_stands_beside_runs_that_can_be_planned():
    beside = [name for table in TABLES.values() for name in table.published]
    assert sorted(beside) == sorted(stored("published"))
    for table in TABLES.values():
        for name in table.published:
            content = printed(name)
            for line in sources(table, name, content["rows"], content["columns"]):
                for source in line:
                    assert set(source.data) <= set(table.data)
                    assert not source.row or source.row in table.rows, source


def test_every_method_that_is_here_has_its_cells_in_every_table():
    """What no header explains is a method of others; a header misspelt would be one of ours among them."""
    foreign = set()
    for table in TABLES.values():
        for name in table.published:
            content = printed(name)
            lines = zip(content["rows"], sources(table, name, content["rows"], content["columns"]), strict=True)
            for row, line in lines:
                cells = zip(content["columns"], line, strict=True)
                foreign |= {
                    (row if len(table.data) < 15 or name == "semantic" else column)[0]
                    for column, source in cells
                    if not source.row
                }
    others = {"GOAD", "SSD", "Rot. Pred.", "DROC", "CSI", "Rot. + OE", "P-SVDD", "CutPaste", "NSA", "DRAEM", "DeSTSeg"}
    assert foreign == others | {"DiffAD", "RotNet", "DOCC", "U-Student"}


def test_floors_stand_in_every_semantic_table_and_train_nothing():
    for table in TABLES.values():
        floors = [name for name, row in table.rows.items() if row.floor]
        if table.protocol == "semantic":
            assert floors == ["pixels, cosine", "pixels, L2", "untrained"]
        for scale, row in itertools.product(SCALES, floors):
            assert experiment(table, table.data[0], row, scale, 0).recipe.training.epochs == 0


def test_tables_on_patches_have_floors_on_the_same_test_images():
    """Plain pixels, and the encoder or the features without training."""
    shared = {data: experiment(TABLES["patches"], data, "pixels", "short", 0).key for data in TABLES["patches"].data}
    for name, table in TABLES.items():
        if table.protocol != "patches":
            continue
        floors = {row for row, how in table.rows.items() if how.floor}
        assert (floors | set(table.rows)) & {"unadapted", "untrained"}, name
        asked = [experiment(table, data, row, "short", 0).recipe for data in table.data for row in floors]
        pixels = [recipe for recipe in asked if recipe.features == "pixels"]
        assert pixels, name
        assert all(recipe.patchwise == (table.preset != "whole") for recipe in pixels)
    for name in ("patch-scoring", "patch-curve", "pretrained", "sia", "sia-patches"):  # where they cost nothing
        for data in TABLES[name].data:
            assert experiment(TABLES[name], data, "pixels", "short", 0).key == shared[data]


def test_what_is_not_trained_has_nothing_of_a_training():
    """Settings of outliers reach trained rows alone; PatchCore stays the run of another table."""
    images = {"outliers.folder": "sdas/{class}", "training.lr": 0.5}
    table = narrowed(TABLES["mvtec"], [], images)
    for row in ("pixels, cosine", "pixels, L2", "patchcore"):
        asked = {experiment(one, "mvtec:screw", row, "short", 0).key for one in (TABLES["mvtec"], table)}
        assert len(asked) == 1, row
    assert experiment(table, "mvtec:screw", "firm", "short", 0).recipe.outliers.folder == "sdas/screw"
    for settings in ({}, {"outliers": "sia"}):
        mine = experiment(narrowed(TABLES["mvtec"], [], settings), "mvtec:screw", "patchcore", "short", 0)
        assert mine.key == experiment(TABLES["pretrained"], "mvtec:screw", "patchcore", "short", 0).key


def test_exposure_is_measured_only_where_its_pool_fits():
    table = TABLES["semantic"]
    assert "firm + OE (300K)" in rows_on(table, "cifar10:bird", "short")
    assert "firm + OE (300K)" not in rows_on(table, "cats-vs-dogs:cat", "short")


def test_classes_and_settings_of_your_own_narrow_a_plan():
    table = narrowed(TABLES["mvtec"], ["screw", "mvtec:pill"], {"outliers.folder": "sia/{class}", "training.epochs": 7})
    planned = plan(table, "short", [0])
    assert {one.data for one in planned} == {"mvtec:screw", "mvtec:pill"}
    assert {(one.recipe.training.epochs, one.steps) for one in planned} == {(0, 0), (7, 0)}  # floors train nothing
    known = {one.key for one in plan(TABLES["mvtec"], "short", [0])}
    fixed = ("pixels", "backbone")
    untrained, encoders = ([one for one in planned if (one.recipe.features in fixed) == it] for it in (True, False))
    assert {one.recipe.outliers.folder for one in encoders} == {"sia/screw", "sia/pill"}
    assert {one.key for one in encoders}.isdisjoint(known)
    assert {one.key for one in untrained} <= known  # what only a training reads does not rename them


def test_rows_of_your_own_choice_are_the_only_ones():
    table = narrowed(TABLES["objectives"], ["cifar10:bird"], {}, ["firm", "untrained"])
    assert len(plan(table, "short", [0, 1])) == 4
    assert rows_on(table, "cifar10:bird", "short") == ["untrained", "firm"]


def test_rows_of_the_objectives_differ_in_the_positive_set_alone():
    table = TABLES["objectives"]
    plans = [experiment(table, "cifar10:bird", name, "short", 0) for name in POSITIVES]
    assert [one.recipe.positives for one in plans] == list(POSITIVES)
    assert len({change(one.recipe, {"positives": "firm"}) for one in plans}) == 1


def test_tables_share_runs():
    objectives, exposure = (
        {one.key for one in plan(TABLES[name], "short", [0])} for name in ("objectives", "exposure")
    )
    assert len(objectives & exposure) == 3 * (1 + 3)  # FIRM and the floors on three classes


def test_only_the_paper_scale_is_the_papers_protocol():
    table = TABLES["objectives"]
    paper = experiment(table, "cifar10:bird", "firm", "paper", 0)
    assert (paper.recipe, paper.probes, paper.test_images) == (PAPER, 200, 0)
    for scale in ("smoke", "short"):
        reduced = experiment(table, "cifar10:bird", "firm", scale, 0)
        assert reduced.recipe.training.epochs < PAPER.training.epochs
        assert reduced.test_images > 0
    with pytest.raises(SettingError, match=r"'huge'.*smoke, short, paper"):
        plan(table, "huge", [0])
    curve = TABLES["patch-curve"]
    assert [one.steps for one in plan(curve, "paper", [0])] == [one.steps for one in plan(curve, "short", [0])]


def test_a_short_semantic_training_is_long_enough_to_learn():
    asked = {data: experiment(TABLES["objectives"], data, "firm", "short", 0) for data in TABLES["objectives"].data}
    for data, one in asked.items():
        training, family = one.recipe.training, data.partition(":")[0]
        steps = training.epochs * steps_per_epoch(good_images(data), 3, training.batch)
        assert steps == 4500 if family == "fashion-mnist" else 9900 < steps <= 10_000
        assert training.stratified
        assert experiment(TABLES["objectives"], data, "firm", "smoke", 0).recipe.training.epochs == 1
        floor = experiment(TABLES["objectives"], data, "untrained", "short", 0).recipe
        assert floor == change(FAST, {"training.epochs": 0})


@pytest.mark.parametrize("name", ["temperature", "batch-size"])
def test_a_sweep_is_shorter_than_the_other_tables_and_leaves_out_batches_without_steps(name):
    planned = plan(narrowed(TABLES[name], ["horse"], {}), "short", [0])
    trained = [one.recipe.training for one in planned if one.recipe.training.epochs]
    assert {training.epochs for training in trained} == {4}
    assert max(training.batch for training in trained) == {"temperature": 32, "batch-size": 256}[name]
    at_paper = {one.recipe.training.batch for one in plan(TABLES[name], "paper", [0])}
    assert max(at_paper) == {"temperature": 32, "batch-size": 2048}[name]


def test_hours_on_frozen_features_count_shared_embeddings_once(monkeypatch):
    monkeypatch.setattr(budget, "embedding", lambda pretrained, size: (0.01, 8))
    table = TABLES["semantic-frozen"]
    classes = narrowed(table, ["cifar10:cat"], {})
    one, two = (budget.hours(plan(narrowed(table, names, {}), "short", [0])) for names in (["cat"], ["cat", "dog"]))
    assert one[1] == two[1] == 0
    test = 0.01 * (4 * 10_000 + 40 * 1000) / 3600
    assert one[0] > test
    assert two[0] == pytest.approx(2 * (one[0] - test) + test, rel=0.1)  # the test images are embedded once
    single = sum(budget.hours([asked])[0] for asked in plan(classes, "short", [0]))
    assert single > 3 * one[0]
    monkeypatch.setattr(budget, "embedding", missing_weights)
    assert budget.hours(plan(classes, "short", [0])) == (0, len(table.rows))


def missing_weights(pretrained, size):
    raise ModelFileError("no weights")


def test_every_exposure_row_names_its_pool():
    found = [
        experiment(TABLES["exposure"], "cifar10:dog", row, "short", 0).recipe.outliers
        for row in TABLES["exposure"].rows
    ]
    pools = [source.path for source in found if isinstance(source, Exposure)]
    assert len(set(pools)) == len(pools) == 2
    assert all(pools)


def test_the_row_of_patchcore_scores_as_patchcore_does():
    memory = experiment(TABLES["pretrained"], "drawn:plate", "patchcore", "short", 0).recipe.memory
    assert (memory.reweight, memory.standardise, memory.neighbourhood, memory.sampling) == (9, False, -1, "coreset")


def test_variants_that_take_hours_are_left_out_where_they_do():
    table = TABLES["patch-scoring"]
    plates, tiles = (experiment(table, data, "firm", "short", 0).variants for data in ("drawn:plate", "magnetic_tile"))
    assert len(set(plates) - set(tiles)) == 3
    assert set(tiles) < set(plates)


def test_a_table_tunes_as_a_fit_does():
    """All that is tuned is taken over, or a table would measure what no user gets."""
    one = experiment(TABLES["wavelets"], "drawn:plate", "firm", "short", 0)
    data = draw_dataset("plate", size=64, train=24, good=2, bad=2)
    parts = group_by_part(data.name, data.train)
    for left_open in (("foreground", "features"), ("foreground", "align", "neighbourhood")):
        recipe = change(one.recipe, {"size": 64, "automatic": left_open})
        backbone = frozen_backbone(recipe)
        tuned, _ = _tuned(recipe, data, parts, backbone, SILENT)
        assert tuned.recipe == choose(recipe, data, parts, seed=0, backbone=backbone).recipe
        assert tuned.recipe != recipe


def test_every_stored_run_belongs_to_a_table():
    """A setting added later must not rename what was measured before it, or the pages could not be written again."""
    planned = {one.key: one for table in TABLES.values() for one in plan(table, "short", list(range(10)))}
    stored = sorted(STORED.glob("*.json"))
    assert stored
    for path in stored:
        assert path.stem in planned, path
        record = read_record(STORED, planned[path.stem])
        assert record is not None
        assert record["key"] == path.stem
        assert replace(planned[path.stem], seed=99).key != path.stem
        assert json.loads(path.read_text(encoding="utf-8"))["code"]
