"""The pages of tables: our numbers with scale, origin and floors, the paper's beside them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from commands import run
from firm.research import pages
from firm.research.experiment import Record, record_path
from firm.research.figures import draw_curves
from firm.research.pages import page, published
from firm.research.runner import code_digest
from firm.research.tables import SCALES, TABLES, experiment, stored_runs
from striped import write_striped_fashion_mnist

STORED, SEEDS = Path("results/runs"), [0, 1, 2]


def written(*names: str, scale: str = "short", seeds: list[int] = SEEDS, folder: Path = STORED) -> str:
    return page(names, scale, seeds, folder, command="firm bench", pictures={})


def block(text: str, data: str) -> str:
    return text.split(f"### {data}\n")[1].split("\n### ")[0]


def row_of(text: str, data: str, row: str) -> list[str]:
    """The cells of a row, and no mark of other code."""
    lines = [line.strip("| ").split(" | ") for line in block(text, data).splitlines() if line.startswith("| ")]
    (cells,) = [cells for cells in lines if cells[0].removesuffix(" †") == row and len(cells) > 8]
    return cells


def differences(text: str, data: str, begin: str) -> dict[str, list[float]]:
    """Of the line that begins so: row -> the differences seed by seed."""
    (line,) = [line.partition(": ")[2] for line in block(text, data).splitlines() if line.startswith(begin)]
    found = re.findall(r"(\S.*?) [+-][\d.]+ \(([^)]*)\)(?:; |\.$)", line)
    return {row: [float(value) for value in values.split(", ")] for row, values in found}


def auroc(run: Record, variant: str) -> float:
    return 100 * float(run["final"][variant]["overall"]["auroc"]["value"])


def test_a_semantic_page_has_our_numbers_and_the_papers():
    text, runs = written("objectives", seeds=[0, 1]), stored_runs(TABLES["objectives"], "short", [0, 1], STORED)
    cells = row_of(text, "fashion-mnist:sandal", "firm")
    last = [100 * run["final"]["s_con k=1"]["value"] for run in runs["fashion-mnist:sandal"]["firm"]]
    assert cells[1] == "2"
    assert cells[4].startswith(f"{sum(last) / 2:.1f} ± ")
    assert cells[-1] == "98.6 (k=5)"
    assert "5 of 6 pairs" in block(text, "fashion-mnist:sandal")
    less = differences(text, "fashion-mnist:sandal", "FIRM minus each row seed by seed, last")
    others = [100 * run["final"]["s_con k=1"]["value"] for run in runs["fashion-mnist:sandal"]["ntxent"]]
    assert less["ntxent"] == pytest.approx([a - b for a, b in zip(last, others, strict=True)], abs=0.051)


def test_settings_that_rows_vary_are_not_called_shared():
    shared = written("short-budget", seeds=[0]).split("### ")[0].split("ResNet")[1]
    assert "temperature" in shared
    assert "lr" not in shared
    assert "head" not in shared


def test_outlier_exposure_stands_beside_the_paper_only_with_the_papers_pool():
    text = written("exposure", seeds=[0, 1])
    assert row_of(text, "cifar10:dog", "firm + OE (300K)")[-1] == "96.2 (k=1)"
    assert row_of(text, "cifar10:dog", "firm + OE (Tiny-ImageNet 10K)")[-1] == "-"


def test_published_numbers_appear_where_nothing_has_run(tmp_path):
    text = written("objectives", "mvtec", "mvtec-ablation", "guarantees", scale="paper", folder=tmp_path)
    assert row_of(text, "cifar10:bird", "firm")[1::17] == ["0", "91.4 (k=1)"]
    assert "FIRM 99.9 / 98.4" in text
    assert "DeSTSeg - / 99.7" in text
    assert published(TABLES["mvtec-ablation"], "mvtec:cable")["firm"] == 97.4
    assert published(TABLES["objectives"], "drawn:plate") == {}


def test_a_page_names_its_scale_and_calls_only_the_papers_protocol_so():
    for name, table in TABLES.items():
        notes = {
            scale: written(name, scale=scale, folder=Path("nowhere")).split("## ")[1].split("\n\n")[1]
            for scale in SCALES
        }
        assert "not a result" in notes["smoke"]
        assert "The paper's protocol" not in notes["short"]
        assert notes["paper"].startswith("The paper's protocol") == (table.protocol == "semantic")
    assert "SIA" in TABLES["mvtec"].at_paper_scale


def test_rows_of_other_code_are_marked_and_counted(tmp_path):
    table = TABLES["objectives"]
    for row, code in (("firm", code_digest()), ("ntxent", "other")):
        asked = experiment(table, "cifar10:bird", row, "short", 0)
        record = json.loads(record_path(STORED, asked).read_text(encoding="utf-8"))
        record_path(tmp_path, asked).write_text(json.dumps(record | {"code": code}))
    text = written("objectives", seeds=[0], folder=tmp_path)
    assert "| ntxent †" in text
    assert "| firm |" in text
    assert text.rstrip().splitlines()[-1].startswith("† 1 of 2 rows")


@pytest.mark.parametrize(
    ("table", "row", "variant", "plain"),
    [
        ("patches", "firm", "+ pixels", "pixels"),
        ("wavelets", "firm, evened illumination", "+ unadapted", "pixels, evened illumination"),
    ],
)
def test_the_pixel_baseline_is_that_of_the_same_illumination(table, row, variant, plain):
    text, runs = written(table), stored_runs(TABLES[table], "short", SEEDS, STORED)["drawn:plate"]
    expected = [auroc(run, variant) - auroc(runs[plain][0], "") for run in runs[row]]
    over = differences(text, "drawn:plate", "FIRM minus plain pixels")
    assert over[f"{row} {variant}"] == pytest.approx(expected, abs=0.051)


def test_rows_are_compared_with_firm_of_their_own_sort_and_untrained_ones_with_every_seed():
    text, runs = written("wavelets"), stored_runs(TABLES["wavelets"], "short", SEEDS, STORED)["drawn:plate"]
    less = differences(text, "drawn:plate", "FIRM minus each row")
    for name, suffix in (("pixels", ""), ("unadapted", ""), ("pixels", ", evened illumination")):
        (untrained,) = runs[name + suffix]
        expected = [auroc(run, "+ unadapted") - auroc(untrained, "") for run in runs[f"firm{suffix}"]]
        assert less[name + suffix] == pytest.approx(expected, abs=0.051)


def test_the_seconds_of_a_resumed_run_are_not_shown(tmp_path):
    asked = experiment(TABLES["patches"], "drawn:plate", "pixels", "short", 0)
    record = json.loads(record_path(STORED, asked).read_text(encoding="utf-8"))
    shown: dict[bool, str] = {}
    for resumed in (True, False):
        record_path(tmp_path, asked).write_text(json.dumps(record | {"resumed": resumed}))
        shown[resumed] = row_of(written("patches", folder=tmp_path), "drawn:plate", "pixels")[8]
    assert shown[True] == "-"
    assert float(shown[False]) >= 0


def test_a_guarantee_page_has_every_run_and_their_mean():
    runs = stored_runs(TABLES["guarantees"], "short", SEEDS, STORED)
    text = written("guarantees")
    (first, *_) = runs["drawn:plate"]["pretrained"]
    rate = first["measured"]["review"]
    line = next(line for line in text.splitlines() if line.startswith("| drawn:plate | pretrained"))
    assert f"({rate['count']} of {rate['of']}; " in line
    pretrained = [run for rows in runs.values() for run in rows["pretrained"]]
    count, of = (sum(run["measured"]["review"][name] for run in pretrained) for name in ("count", "of"))
    assert f"pretrained: {len(pretrained)} calibrations" in text
    assert f"({count} of {of}) of the unseen good images did not PASS" in text


def test_curves_are_drawn(tmp_path):
    for name in ("objectives", "patch-curve"):
        draw_curves(TABLES[name], "short", SEEDS, STORED, tmp_path / f"{name}.png")
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert len(picture.convert("RGB").getcolors(2**24) or []) > 100  # lines, not a blank page


def test_the_command_lists_tables_and_writes_nothing_into_docs(tmp_path, monkeypatch):
    write_striped_fashion_mnist(tmp_path)
    monkeypatch.setenv("FIRM_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("bench")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(TABLES)
    tiny = {"encoder.width": 8, "encoder.head.hidden": (16,), "training.batch": 16}
    rows = {name: replace(row, changes=row.changes | tiny) for name, row in TABLES["objectives"].rows.items()}
    monkeypatch.setitem(TABLES, "objectives", replace(TABLES["objectives"], rows=rows))
    code, out, err = run("bench", "objectives", "--seeds", 1)
    assert code == 0, err
    assert err.count("skipped") == 12  # of CIFAR-10, which is not there
    assert "| firm | 1 |" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench-work", "fashion-mnist", "results"]
    assert len(list((tmp_path / "results/runs").iterdir())) == 8
    code, out, _ = run("bench", "objectives", "--seeds", 1, "--only-report", "--out", "pages/page.md")
    assert code == 0
    assert not out
    text = Path("pages/page.md").read_text(encoding="utf-8")
    assert "--only-report --out pages/page.md" in text
    assert Path("pages", *re.findall(r"!\[.*\]\((.*)\)", text)).is_file()


def test_the_legend_explains_every_protocol():
    assert set(pages.stored("legends")) == {table.protocol for table in TABLES.values()}
    assert set(pages.SECTIONS) == set(pages.stored("legends"))
