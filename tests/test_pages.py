"""The pages of tables: our numbers with scale, origin and floors, the paper's beside them."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import pytest
from PIL import Image

from commands import run
from firm.recipes.presets import PAPER
from firm.research import figures, pages, tables
from firm.research.blocks import Block, Grid, as_csv, as_html, latex, markdown, parsed
from firm.research.cell_text import paired_interval
from firm.research.experiment import Record, read_record, record_path
from firm.research.figures import draw_curves
from firm.research.frozen_page import SCORES
from firm.research.pages import page
from firm.research.published import best_of
from firm.research.runner import code_digest
from firm.research.tables import SCALES, TABLES, experiment, narrowed, plan, stored_runs
from semantic_records import semantic_record, write_semantic_records
from striped import write_striped_fashion_mnist

STORED, SEEDS = Path("results/runs"), [0, 1, 2]
ROOT = Path(__file__).parent.parent


def written(*names: str, scale: str = "short", seeds: list[int] = SEEDS, folder: Path = STORED) -> str:
    return markdown(blocks_of(*names, scale=scale, seeds=seeds, folder=folder))


def blocks_of(*names: str, scale: str = "short", seeds: list[int] = SEEDS, folder: Path = STORED) -> list[Block]:
    tables = {name: TABLES[name] for name in names}
    return page(tables, scale, seeds, folder, command="firm bench", pictures={})


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
    found = re.findall(r"(\S.*?) [+-][\d.]+(?: \[[^\]]*\])? \(([^)]*)\)(?:; |\.$)", line)
    return {row: [float(value) for value in values.split(", ")] for row, values in found}


def auroc(run: Record, variant: str) -> float:
    return 100 * float(run["final"][variant]["overall"]["auroc"]["value"])


def test_a_semantic_page_has_our_numbers_and_the_papers(tmp_path):
    write_semantic_records(tmp_path)
    runs = stored_runs(TABLES["objectives"], "short", [0, 1], tmp_path)
    text = written("objectives", seeds=[0, 1], folder=tmp_path)
    cells = row_of(text, "fashion-mnist:sandal", "firm")
    last = [100 * run["final"]["s_con k=1"]["value"] for run in runs["fashion-mnist:sandal"]["firm"]]
    assert cells[1] == "2"
    assert cells[4].startswith(f"{sum(last) / 2:.1f} ± ")
    assert cells[-1] == "98.6 (k=5)"
    assert re.search(r"[0-6] of 6 pairs", block(text, "fashion-mnist:sandal"))
    assert re.search(r"16 epochs on cifar10, 6 epochs on fashion-mnist; \d+ test images", text)
    less = differences(text, "fashion-mnist:sandal", "FIRM minus each row seed by seed, last")
    others = [100 * run["final"]["s_con k=1"]["value"] for run in runs["fashion-mnist:sandal"]["ntxent"]]
    assert less["ntxent"] == pytest.approx([a - b for a, b in zip(last, others, strict=True)], abs=0.051)


def test_means_over_classes_are_compared_on_the_same_seeds(tmp_path):
    write_semantic_records(tmp_path)
    runs = stored_runs(TABLES["objectives"], "short", [0, 1], tmp_path)
    text = written("objectives", seeds=[0, 1], folder=tmp_path)
    classes = [data for data in runs if data.startswith("fashion-mnist:") and runs[data]["firm"]]
    heading = f"fashion-mnist, means over {len(classes)} of 10 classes"
    last = {
        row: [fmean(100 * runs[data][row][seed]["final"]["s_con k=1"]["value"] for data in classes) for seed in (0, 1)]
        for row in ("firm", "ntxent")
    }
    lines = [line.strip("| ").split(" | ") for line in block(text, heading).splitlines() if "| ntxent" in line]
    lead, bounds = lines[0][5].split(" ", 1)
    assert lines[0][1].startswith(f"{fmean(last['ntxent']):.1f} ± ")
    first, second = (a - b for a, b in zip(last["firm"], last["ntxent"], strict=True))
    assert float(lead) == pytest.approx((first + second) / 2, abs=0.051)
    low, high = map(float, bounds.strip("[]").split(", "))
    assert high - low == pytest.approx(12.7062 * abs(first - second), abs=0.11)  # 2 t s / sqrt(2), of two seeds


def test_settings_that_rows_vary_are_not_called_shared():
    shared = written("short-budget", seeds=[0]).split("### ")[0].split("ResNet")[1]
    assert "temperature" in shared
    assert "lr" not in shared
    assert "head" not in shared


def test_outlier_exposure_stands_beside_the_paper_only_with_the_papers_pool(tmp_path):
    text = written("exposure", seeds=[0, 1], folder=write_semantic_records(tmp_path))
    assert row_of(text, "cifar10:dog", "firm + OE (300K)")[-1] == "96.2 (k=1)"
    assert row_of(text, "cifar10:dog", "firm + OE (Tiny-ImageNet 10K)")[-1] == "-"


def test_published_numbers_appear_where_nothing_has_run(tmp_path):
    for name, table in TABLES.items():
        for scale in SCALES:
            text = written(name, scale=scale, folder=tmp_path)
            for part in table.published:
                lines = block(text, f"{part}, `{pages.stored('published')[part]['label']}` of the paper").splitlines()
                printed = [line for line in lines if "| paper |" in line]
                assert len(printed) == len(pages.stored("published")[part]["rows"])
    text = written("mvtec", "patches", scale="paper", folder=tmp_path)
    assert "| Screw | paper | 81.3 | 95.7 |" in text
    assert "DeSTSeg - / 99.7" in text  # beside our own tables on a category of the paper


def test_ours_stands_under_the_papers_with_the_difference(tmp_path):
    table, value = TABLES["per-class-cats-vs-dogs"], {"cat": 0.8, "dog": 0.9}
    asked = experiment(TABLES["objectives"], "cifar10:bird", "firm", "short", 0)
    record = semantic_record(asked)
    for (name, auroc), seed in itertools.product(value.items(), (0, 1)):
        mine = experiment(table, f"cats-vs-dogs:{name}", "firm", "short", seed)
        measured = {"value": auroc + 0.02 * seed, "low": 0.0, "high": 1.0}
        final = dict.fromkeys(record["final"], measured)
        probes = [{"step": 1, "s_con k=5": {"value": 0.95}}, {"step": 2, "s_con k=5": measured}]
        changed = record | {"experiment": mine.content, "final": final, "probes": probes}
        record_path(tmp_path, mine).write_text(json.dumps(changed))
    text = written("per-class-cats-vs-dogs", seeds=[0, 1], folder=tmp_path)
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| Mean |")]
    cells = {line[1]: line[2:] for line in lines}  # NT-Xent, SupCon, Rot-SupCon, FIRM by three scores, three floors
    assert cells["paper"][3:6] == ["90.4 ± 0.5", "89.9 ± 0.3", "90.2 ± 0.3"]
    assert cells["ours, last"][3] == "86.0 ± 1.4 †"
    assert cells["ours, best"][3:5] == ["95.0 ± 0.0 †", "-"]  # probes have s_con only
    assert cells["last - paper"][:4] == ["-", "-", "-", "-4.4"]
    record_path(tmp_path, mine).unlink()
    record_path(tmp_path, experiment(table, "cats-vs-dogs:dog", "firm", "short", 0)).unlink()
    text = written("per-class-cats-vs-dogs", seeds=[0, 1], folder=tmp_path)
    assert "81.0 ± 1.4 (1 of 2) †" in text  # a mean of other classes is not compared with the paper's
    assert "| Mean | last - paper |" not in text


def test_relative_cells_are_those_of_our_means(tmp_path):
    """Both deltas, and the lowest of a column as it is."""
    table = TABLES["scores"]
    asked = experiment(TABLES["objectives"], "cifar10:bird", "firm", "short", 0)
    record = semantic_record(asked)
    record["code"] = code_digest("semantic")
    for row, (plain, starred) in {"firm": (0.9, 0.99), "supcon": (0.8, 0.9), "untrained": (0.5, 0.6)}.items():
        mine = experiment(table, "cifar10:bird", row, "short", 0)
        final = record["final"] | {"s_con k=1": {"value": plain}, "s_con* k=1": {"value": starred}}
        final = {name: {"low": 0.0, "high": 1.0} | value for name, value in final.items()}
        record_path(tmp_path, mine).write_text(json.dumps(record | {"experiment": mine.content, "final": final}))
    text = written("scores", seeds=[0], folder=tmp_path)
    ours = {line.split(" | ")[0]: line.split(" | ")[2:5] for line in text.splitlines() if "| ours, last |" in line}
    ran = " (1 of 10)"
    assert ours["| FIRM"] == [f"90.0{ran}", f"+10.0%{ran}", f"+10.0%{ran}"]
    assert ours["| SupCon"] == [f"80.0{ran}", f"90.0{ran}", f"+12.5%{ran}"]
    assert ours["| floor: untrained"] == [f"50.0{ran}", f"-33.3%{ran}", f"+20.0%{ran}"]  # no method: never the lowest


def write_values(folder: Path, table: str, values: dict[tuple[str, str], float]) -> None:
    """Records of one seed whose scores are all the same number, by row and class of CIFAR-10."""
    for (row, name), value in values.items():
        mine = experiment(TABLES[table], f"cifar10:{name}", row, "short", 0)
        record = semantic_record(mine) | {"code": code_digest("semantic")}
        same = {"value": value, "low": 0.0, "high": 1.0}
        probes = [{"step": 1, "s_con k=1": same}]
        final = dict.fromkeys(record["final"], same)
        record_path(folder, mine).write_text(json.dumps(record | {"final": final, "probes": probes}))


def test_percentages_compare_the_classes_that_both_have_run(tmp_path):
    write_values(tmp_path, "sources", {("ntxent", "airplane"): 0.9, ("ntxent", "cat"): 0.6, ("firm", "airplane"): 0.89})
    lines = written("sources", seeds=[0], folder=tmp_path).splitlines()
    (line,) = [line for line in lines if "| ours, last |" in line and "%" in line and "floor" not in line]
    assert "-1.1% (1 of 10)" in line


def test_rows_with_exposure_are_compared_with_firm_with_exposure(tmp_path):
    oe = " + OE (300K)"
    values = {(f"firm{oe}", "cat"): 0.9, (f"supcon{oe}", "cat"): 0.83, ("firm", "cat"): 0.8, ("supcon", "cat"): 0.7}
    write_values(tmp_path, "sources", values)
    less = differences(
        written("sources", seeds=[0], folder=tmp_path), "cifar10:cat", "FIRM minus each row seed by seed, l"
    )
    assert {row: found for row, (found,) in less.items()} == {f"supcon{oe}": 7.0, "supcon": 10.0, f"firm{oe}": -10.0}
    write_values(tmp_path, "scores-exposure", {name: value for name, value in values.items() if oe in name[0]})
    text = written("scores-exposure", seeds=[0], folder=tmp_path)
    assert differences(text, "cifar10:cat", "FIRM minus each row seed by seed, l") == {f"supcon{oe}": [7.0]}


def test_every_table_of_the_paper_has_floors():
    """Pixels by cosine and L2, and the untrained encoder."""
    for name, table in TABLES.items():
        if table.published:
            floors = {row for row, how in table.rows.items() if how.floor}
            assert floors == {"untrained", "pixels, L2", "pixels, cosine"}, name


def test_a_page_names_its_scale_and_calls_only_the_papers_protocol_so():
    for name, table in TABLES.items():
        texts = {scale: written(name, scale=scale, folder=Path("nowhere")) for scale in SCALES}
        notes = {scale: text.split("\n## ")[1].split("\n\n")[1] for scale, text in texts.items()}
        assert "not a result" in notes["smoke"]
        assert "protocol as its text gives it" not in notes["short"]
        assert ("protocol as its text gives it" in notes["paper"]) == (table.differences == [])
        closest = table.differences is not None
        assert ("closest to the paper" in texts["paper"].splitlines()[0]) == closest
        assert all(difference in texts["paper"] for difference in table.differences or ())
        silent = table.protocol == "semantic" and table.differences is not None
        assert all((gap in texts["paper"]) == silent for gap in pages.stored("tables")["silent"])
    assert {"mvtec", "mvtec-ablation", "mvtec-further"} <= {name for name in TABLES if TABLES[name].differences}


def test_what_the_paper_does_not_say_is_listed_as_it_is_done():
    views, batch, _ = pages.stored("tables")["silent"]
    assert f"crops of {PAPER.views.crop[0]} to {PAPER.views.crop[1]:g} of the area" in views
    assert f"jitter {PAPER.views.jitter.hue} and blur {PAPER.views.blur}," in views
    assert f"enlarged by {PAPER.zoom} " in views
    assert batch.startswith(f"a batch of {PAPER.training.batch} ")
    assert f"warm-up takes {100 * PAPER.training.warmup:g} %" in batch


def test_patches_have_their_best_probe_and_the_three_properties_beside_the_end(tmp_path):
    asked = experiment(TABLES["patch-curve"], "mvtec:screw", "fast", "short", 0)
    record = read_record(STORED, asked)
    assert record is not None
    record["diagnostics"] |= {"compactness": 0.11, "margin": 0.22, "outlier_spread": 0.33}
    record["probes"] = [{"step": 1, "seconds": 1.0, "auroc": 0.5}, {"step": 2, "seconds": 2.0, "auroc": 0.9991}]
    record_path(tmp_path, asked).write_text(json.dumps(record))
    lines = [line.strip("| ").split(" | ") for line in written("patch-curve", folder=tmp_path).splitlines()]
    (head,) = [line for line in lines if line[0] == "row" and "seeds" in line]
    cells = {line[0].removesuffix(" †"): dict(zip(head, line, strict=True)) for line in lines if len(line) == len(head)}
    assert cells["fast"]["best probe"] == "99.9"
    assert cells["fast stride 8 + pixels"]["best probe"] == "-"  # probes score in the first way
    assert [cells["fast"][name] for name in ("compactness", "margin", "outlier spread")] == ["0.11", "0.22", "0.33"]
    assert "synthetic, image" not in head  # no image was kept back
    best = best_of(record | {"probes": [{"step": 1, "auroc": 0.1}]}, "")
    assert best == record["final"][""]["overall"]["auroc"]["value"]  # the end is a probe, too
    assert best_of(record | {"probes": []}, "") is None


def test_a_page_is_written_in_four_formats():
    blocks = blocks_of("objectives", seeds=[0, 1])
    assert r"NT-Xent & paper & 92.2 $\pm$ 0.2 &" in latex(blocks)
    assert latex(["- a_b*", "*so* `x`"]) == "\\begin{itemize}\n\\item a\\_b*\n\\end{itemize}\n\nso x\n"
    rows = list(csv.reader(io.StringIO(as_csv(blocks))))
    assert rows[0] == ["table", "section", "row", "column", "value", "deviation", "low", "high", "mark"]
    of = ["The four objectives", "objectives, `tab:ablation_objectives` of the paper"]
    assert [*of, "FIRM, paper", "CIFAR-10 AULC", "91.9", "0.1", "", "", ""] in rows
    assert {len(row) for row in rows} == {9}
    grid = Grid(["row", "a"], [["firm †", "1.0 ± 0.2 [0.5, 1.5]"], ["x", "two"], ["y", "3 †"]])
    cells = [row[2:] for row in csv.reader(io.StringIO(as_csv(["## t", "### s", grid])))][1:]
    assert cells[0] == ["firm", "a", "1.0", "0.2", "0.5", "1.5", "†"]
    assert cells[1] == ["x", "a", "two", "", "", "", ""]
    assert cells[2] == ["y", "a", "3", "", "", "", "†"]
    assert parsed(markdown(blocks)) == blocks
    tree = ElementTree.fromstring(as_html(blocks).partition("\n")[2].replace('<meta charset="utf-8">', ""))
    cells = ["".join(cell.itertext()) for cell in tree.iter("td")]
    assert "91.9 ± 0.1" in cells


def test_files_that_are_not_the_published_ones_are_named(tmp_path):
    asked = experiment(TABLES["objectives"], "cifar10:bird", "firm", "short", 0)
    record = semantic_record(asked)
    for count, named in ((5000, False), (12, True)):
        record_path(tmp_path, asked).write_text(json.dumps(record | {"good_images": count}))
        assert ("cifar10:bird has 12 good images, not 5000" in written("objectives", folder=tmp_path)) == named
    asked = experiment(TABLES["semantic-frozen"], "cifar10:bird", "firm", "short", 0)
    same = {score: {"value": 0.5, "low": 0.0, "high": 1.0} for score in SCORES}
    further = {"final": {asked.recipe.features: same}, "held_out": {}, "cpu_seconds": {}}
    further["cpu_seconds"] = dict.fromkeys(("embedding", "training", "test"), 1.0)
    record_path(tmp_path, asked).write_text(json.dumps(semantic_record(asked) | further | {"good_images": 12}))
    assert "cifar10:bird has 12 good images, not 5000" in written("semantic-frozen", folder=tmp_path)


def test_rows_measured_on_different_images_are_named(tmp_path):
    for row, digest in (("firm", "one"), ("ntxent", "other")):
        asked = experiment(TABLES["objectives"], "cifar10:bird", row, "short", 0)
        record = semantic_record(asked)
        record_path(tmp_path, asked).write_text(json.dumps(record | {"data": {"train": "same", "test": digest}}))
    assert "Rows of cifar10:bird were measured on different images" in written("objectives", seeds=[0], folder=tmp_path)
    write_semantic_records(tmp_path)
    assert "different images" not in written("objectives", seeds=[0, 1], folder=tmp_path)


def test_paired_differences_have_students_interval():
    found = paired_interval([0.01, 0.02, 0.06])
    reach = 4.302653 * (0.0007**0.5) / 3**0.5  # the 97.5 % quantile with two degrees of freedom
    assert (found.value, found.high - found.value) == (pytest.approx(0.03), pytest.approx(reach))
    assert paired_interval([0.01]).high == float("inf")


def test_rows_of_other_code_are_marked_and_counted(tmp_path):
    table = TABLES["objectives"]
    for row, code in (("firm", code_digest("semantic")), ("ntxent", "other")):
        asked = experiment(table, "cifar10:bird", row, "short", 0)
        record = semantic_record(asked)
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


def test_pixels_under_other_preprocessing_are_a_floor_and_not_that_baseline(tmp_path):
    """Beside pretrained features plain pixels have their own illumination; the line of settings is not theirs."""
    table = TABLES["sia"]
    donor, plain = (experiment(table, "drawn:plate", row, "short", 0) for row in ("firm, donor", "pixels"))
    pixels, like = (
        read_record(STORED, each)
        for each in (plain, experiment(TABLES["pretrained"], "drawn:plate", "firm", "short", 0))
    )
    assert pixels is not None
    assert like is not None
    record_path(tmp_path, plain).write_text(json.dumps(pixels))
    record_path(tmp_path, donor).write_text(json.dumps(like | {"experiment": donor.content}))
    assert pixels["recipe"]["conditioning"] != like["recipe"]["conditioning"]
    text = block(written("sia", seeds=[0], folder=tmp_path), "drawn:plate")
    assert "patches of 8 px" in text.split("|")[0]
    assert row_of(written("sia", seeds=[0], folder=tmp_path), "drawn:plate", "pixels")
    assert "under the same preprocessing" not in text


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


def test_floors_of_few_images_are_counted_by_themselves(tmp_path):
    """A floor's verdicts are no part of the totals of the trained detector."""
    for row, passed in (("pretrained", 10), ("pixels", 20)):
        asked = experiment(TABLES["few"], "drawn:plate", row, "short", 0)
        verdicts = {"PASS": passed, "REVIEW": 0, "FAIL": 40 - passed}
        judged = {"good": verdicts, "defects": verdicts, "stated": {"review": 0.1, "fail": 0.05}}
        judged |= {"ideal_passes": 0, "drift": "", "auroc": 0.9}
        record = {"experiment": asked.content, "recipe": {}, "code": code_digest("few"), "data": {"test": "0"}}
        final = {"5": {"split": judged, "folds": judged}}
        record_path(tmp_path, asked).write_text(json.dumps(record | {"final": final}))
    text = written("few", seeds=[0], folder=tmp_path)
    for part in ("all products", "drawn:plate"):
        lines = [line.split(" | ")[1:4] for line in block(text, part).splitlines() if line.startswith("| 5 ")]
        ways = {"split": "25.0 %", "folds": "25.0 %", "pixels, split": "50.0 %", "pixels, folds": "50.0 %"}
        assert lines == [[way, "1", passed] for way, passed in ways.items()]


def test_curves_are_drawn(tmp_path):
    for name, folder in (("objectives", write_semantic_records(tmp_path)), ("patch-curve", STORED)):
        draw_curves(TABLES[name], "short", SEEDS, folder, tmp_path / f"{name}.png")
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert len(picture.convert("RGB").getcolors(2**24) or []) > 100  # lines, not a blank page


TINY = ("--set=encoder.width=8", "--set=encoder.head.hidden=[16]", "--set=training.batch=16")


@pytest.fixture
def sandals(tmp_path, monkeypatch):
    """A folder to work in, with crafted Fashion-MNIST and nothing else."""
    write_striped_fashion_mnist(tmp_path)
    monkeypatch.setenv("FIRM_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listed(out: str) -> dict[str, list[int]]:
    """Table or figure -> runs done, missing, without data; those that need no runs are left out."""
    lines = [line.split() for line in out.splitlines()[1:]]
    return {words[0]: list(map(int, words[1:4])) for words in lines if words[1].isdigit()}


def test_every_table_is_listed_with_what_is_done_missing_and_without_data(sandals):
    code, out, _ = run("bench")
    assert code == 0
    of_runs = [name for name, figure in figures.FIGURES.items() if figure.tables]
    assert list(listed(out)) == [*TABLES, *of_runs]
    assert all(name in out for name in figures.FIGURES)
    assert listed(out)["objectives"] == listed(out)["learning-curves"] == [0, 10 * 12, 32 * 12]
    assert listed(out)["few"][:2] == [0, 3 * 4 * 2]  # drawn parts need no files
    code, out, _ = run("bench", "list", "--seeds", 1, "--scale", "short", "--results", ROOT / STORED)
    asked = plan(TABLES["objectives"], "short", [0])
    assert listed(out)["objectives"][0] == sum(record_path(ROOT / STORED, one).exists() for one in asked) > 20


def test_a_plan_counts_what_tables_share_and_its_hours(sandals):
    shared = ("objectives", "per-class-fashion-mnist")
    code, out, err = run("bench", "plan", *shared, "--class=sandal", "--class=cifar10:cat", "--seeds", 1, *TINY)
    assert code == 0, err
    assert "objectives: 14 runs, 0 of them shared" in out
    assert "per-class-fashion-mnist: 7 runs, 7 of them shared" in out
    assert "all: 14 runs, 0 done, 7 to make, 7 without data (cifar10)" in out
    hours = [float(value) for value in re.findall(r"about ([\d.]+) CPU hours", out)]
    assert len(hours) == 2
    assert 0 <= hours[0] <= hours[1]


def test_runs_go_on_past_missing_data_and_their_page_has_both_numbers(sandals):
    classes = ("--class=sandal", "--class=bird")
    code, out, err = run("bench", "run", "objectives", "--seeds", 1, *classes, *TINY)
    assert code == 0, err
    assert err.count("skipped") == 7  # of CIFAR-10, which is not there
    assert "| FIRM | paper | 93.4 ± 0.2 |" in out
    assert row_of(out, "fashion-mnist:sandal", "firm")[1] == "1"
    assert float(row_of(out, "fashion-mnist:sandal", "pixels, L2")[4].split()[0]) > 0
    assert "fashion-mnist:sandal has 6 good images, not 6000" in out
    assert sorted(path.name for path in sandals.iterdir()) == ["bench-work", "fashion-mnist", "results"]
    assert len(list((sandals / "results/runs").iterdir())) == 7
    code, out, err = run("bench", "run", "objectives", "--seeds", 1, "--class=sandal", *TINY)
    assert (code, err) == (0, "")  # nothing is made twice


def test_a_report_is_written_by_the_suffix_or_in_all_formats(sandals):
    command = ("bench", "report", "objectives", "--seeds", 1)
    assert run(*command, "--out", "pages/page.md").code == 0
    text = Path("pages/page.md").read_text(encoding="utf-8")
    assert "`firm bench report objectives --scale smoke --seeds 1 --out pages/page.md`" in text
    assert not re.findall(r"!\[.*\]", text)  # nothing has run
    assert not Path("pages/page.tex").exists()
    write_semantic_records(Path("pages"))
    command = ("bench", "report", "objectives", "--seeds", 1, "--scale", "short", "--results", "pages")
    assert run(*command, "--out", "all").code == 0
    assert sorted(path.suffix for path in Path("all").iterdir()) == [".csv", ".html", ".md", ".png", ".tex"]
    assert "data:image/png;base64," in Path("all/report.html").read_text(encoding="utf-8")
    code, _, err = run(*command, "--out", "page.pdf")
    assert code == 2
    assert "page.pdf" in err


def test_figures_are_listed_run_and_reported_like_tables(sandals, monkeypatch):
    calls = []

    class Dot:
        title, why, needs, tables = "A dot", "It shows a dot.", "ink", ()

        def draw(self, out, *, scale, seeds, folder, listener):
            calls.append((scale, seeds, folder))
            Image.new("RGB", (2, 2)).save(out / "dot.png")
            (out / "dot.md").write_text("Sizes:\n\n| dot | side |\n| --- | --- |\n| black | 2 |\n")
            return [out / "dot.png", out / "dot.md"]

    monkeypatch.setattr(figures, "FIGURES", {"dot": Dot()}, raising=False)
    assert "figure: A dot" in run("bench", "list").out
    code, _, err = run("bench", "report", "dot", "--seeds", 1, "--out", "all")
    assert code == 0, err
    assert "![A dot](dot.png)" in Path("all/report.md").read_text(encoding="utf-8")
    assert "A dot,,black,side,2," in Path("all/report.csv").read_text(encoding="utf-8")
    assert calls == [("smoke", [0], Path("results/runs"))]
    assert run("bench", "run", "dot", "mvtec-further", "--class=bottle").code == 0  # a category that is not there
    assert Path("figures/dot.png").is_file()
    assert TABLES["mvtec-further"].title in Path("figures/report.md").read_text(encoding="utf-8")


def test_a_figure_of_runs_is_planned_and_run_with_its_tables(sandals, monkeypatch):
    code, out, err = run("bench", "plan", "learning-curves", "positive-sets", "--seeds", 1)
    assert code == 0, err
    assert f"objectives: {len(plan(TABLES['objectives'], 'smoke', [0]))} runs, 0 of them shared" in out
    one = {
        "objectives": narrowed(
            TABLES["objectives"], ["sandal"], {"encoder.width": 8, "training.batch": 16}, ["untrained"]
        )
    }
    monkeypatch.setattr(tables, "TABLES", one)
    code, out, err = run("bench", "run", "learning-curves", "--seeds", 1)
    assert code == 0, err
    assert len(list((sandals / "results/runs").iterdir())) == 1
    assert "## Learning curves" in Path("figures/report.md").read_text(encoding="utf-8")


def test_the_legend_explains_every_protocol():
    assert set(pages.stored("legends")) == {table.protocol for table in TABLES.values()}
    assert set(pages.SECTIONS) == set(pages.stored("legends"))


def test_classes_are_checked_one_by_one_and_figures_have_none(sandals):
    assert run("bench", "run", "objectives", "--class=sandal", "--class=sandel", *TINY).code == 2
    code, _, err = run("bench", "report", "objectives", "per-class-cifar10", "--class=sandal", "--class=bird")
    assert code == 0, err  # each is a class of one of them
    for option in ("--class=bird", "--set=training.lr=1"):
        assert run("bench", "report", "mechanism", option).code == 2
    code, out, _ = run("bench", "report", "mvtec", "--class=screw", "--set", "outliers.folder=sia/{class}")
    assert code == 0
    assert "--set 'outliers.folder=sia/{class}'`" in out  # as a shell takes it


def test_means_on_frozen_features_pair_seeds_and_classes(tmp_path):
    """Of each row the mean over its classes, and FIRM minus it on the classes and seeds that both have."""
    values = {("firm", "cat", 0): 0.9, ("firm", "cat", 1): 0.92, ("firm", "dog", 0): 0.96, ("firm", "dog", 1): 0.94}
    values |= {
        ("supcon", "cat", 0): 0.8,
        ("supcon", "cat", 1): 0.84,
        ("frozen", "cat", 0): 0.85,
        ("frozen", "dog", 0): 0.9,
    }
    for (row, name, seed), value in values.items():
        mine = experiment(TABLES["semantic-frozen"], f"cifar10:{name}", row, "short", seed)
        same = {score: {"value": value, "low": 0.0, "high": 1.0} for score in SCORES}
        record = semantic_record(mine) | {
            "code": code_digest("frozen"),
            "final": {mine.recipe.features: same},
            "held_out": {},
            "cpu_seconds": {"embedding": 100.0, "training": 20.0, "test": 30.0},
        }
        record_path(tmp_path, mine).write_text(json.dumps(record))
    text = block(written("semantic-frozen", seeds=[0, 1], folder=tmp_path), "cifar10")
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    cells = {line[0]: line for line in lines if len(line) > 12}
    assert cells["firm"][1:4] == ["2", "2", "93.0 ± 0.0"]
    assert cells["supcon"][1:4] == ["1", "2", "82.0 ± 2.8"]
    assert cells["supcon"][-1].startswith("+9.0 [")  # 10 and 8 on cat, not the difference of the means
    assert cells["frozen"][-1].startswith("+5.5 [")  # its one run against both seeds
    assert cells["firm"][-5:] == ["0.50", "0.40", "1.00", "150", "-"]
    assert cells["frozen"][-5:-2] == ["-", "-", "-"]  # nothing was trained
    (of_class,) = [line for line in lines if line[0] == "firm" and "[" in line[1]]
    assert of_class[1] == "91.0 ± 1.4 [0.0, 100.0]"
