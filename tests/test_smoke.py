"""Every table runs at scale smoke on crafted files, and its page says that nothing there is a result."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from commands import run
from crafted import craft
from firm.research.tables import TABLES, experiment, rows_on

pytestmark = pytest.mark.slow
ITEMS = 48  # of the smallest crafted class: good images, and three outliers of each
CLASSES = ("cifar10:bird", "cifar100-super:fish", "fashion-mnist:sandal", "cats-vs-dogs:dog", "mvtec:screw")


@pytest.fixture(scope="module")
def crafted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("crafted")
    craft(root / "data")
    return root


@pytest.mark.filterwarnings("ignore::UserWarning")  # so few files are not the published ones, and say so
@pytest.mark.parametrize("name", TABLES)
def test_every_table_runs_at_scale_smoke_on_crafted_files(name, crafted, monkeypatch):
    places = [crafted / "data"]
    if TABLES[name].protocol == "frozen":  # takes the only exposure array there is
        places.insert(0, crafted / "pool")
        (places[0] / "exposure").mkdir(parents=True)
        shutil.copy(min((crafted / "data" / "exposure").glob("*.npy")), places[0] / "exposure")
    monkeypatch.setenv("FIRM_DATA", os.pathsep.join(map(str, places)))
    monkeypatch.setenv("FIRM_CACHE", str(crafted / "cache"))
    monkeypatch.chdir(crafted)
    table = TABLES[name]
    classes = [data for data in table.data if data in CLASSES]
    code, out, err = run("bench", "run", name, "--seeds", 1, *(f"--class={each}" for each in classes))
    assert code == 0, err
    asked = [experiment(table, data, row, "smoke", 0) for data in classes for row in rows_on(table, data, "smoke")]
    small = [one for one in asked if one.protocol != "semantic" or one.recipe.training.batch <= ITEMS]
    assert err.count(": skipped") == len(asked) - len(small)  # batches that the crafted files do not fill
    for one in small:
        record = json.loads((crafted / "results/runs" / f"{one.key}.json").read_text(encoding="utf-8"))
        assert record["experiment"] == one.content
    assert "not a result" in out
    if table.published:
        assert "Not the published files" in out
        assert "| ours, last |" in out
