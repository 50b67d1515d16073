"""The published numbers: every cell is the paper's, and where its own means disagree with its cells is known."""

from __future__ import annotations

import json
from importlib import resources
from itertools import chain
from statistics import fmean
from typing import Any

import pytest

from firm.research.published import sources
from firm.research.tables import TABLES as RUNNABLE
from paper_tables import Cell, paper, read_tables

TABLES = json.loads(resources.files("firm.research").joinpath("published.json").read_text(encoding="utf-8"))
OBJECTS = ["Bottle", "Cable", "Capsule", "Hazelnut", "Metal Nut", "Pill", "Screw", "Toothbrush", "Transistor", "Zipper"]
TEXTURES = ["Carpet", "Grid", "Leather", "Tile", "Wood"]
MEANS = {  # what the paper averages, by the name it gives the mean
    "Object Avg.": OBJECTS,
    "Objects Mean": OBJECTS,
    "Texture Avg.": TEXTURES,
    "Texture Mean": TEXTURES,
    "Overall Avg.": OBJECTS + TEXTURES,
    "Overall Mean": OBJECTS + TEXTURES,
}
ROUNDING = 0.05 + 1e-9  # the printed mean is that of the printed cells to its last digit
RELATIVE = 0.11  # the same for a quotient of two numbers near 90

# What the paper prints beside what its own cells give; only the last is beyond what rounded cells could explain.
DISAGREEMENTS = [
    "per-class-cifar100: Rot-SupCon s_con, Mean: printed 85.8, of its cells 85.85",
    "mvtec-further: DOCC, Objects Mean: printed 90.8, of its cells 90.86",
    "mvtec-further: NSA, Texture Mean: printed 96.3, of its cells 96.36",
    "mvtec-further: CutPaste, Overall Mean: printed 90.9, of its cells 93.49",
]


def number(cell: Cell) -> float | None:
    if isinstance(cell, str):
        return float(cell.removesuffix("%"))
    return cell[0] if isinstance(cell, list) else cell


def transposed(table: dict[str, Any]) -> dict[str, Any]:
    return {"rows": table["columns"], "columns": table["rows"], "cells": list(zip(*table["cells"], strict=True))}


def wrong_means(name: str, table: dict[str, Any]) -> list[str]:
    """Means along the columns of every row that its cells do not give."""
    lines = []
    heads = [parts[0] for parts in table["columns"]]
    for mean in (column for column in ("Mean", *MEANS) if column in heads):
        wanted = MEANS.get(mean, [head for head in heads if head != mean])
        for row, cells in zip(table["rows"], table["cells"], strict=True):
            values = dict(zip(heads, map(number, cells), strict=True))
            parts, printed = [values[head] for head in wanted], values[mean]
            if isinstance(cells[0], str) or printed is None or None in parts:
                continue
            if abs(fmean(parts) - printed) > ROUNDING:
                lines.append(f"{name}: {' '.join(row)}, {mean}: printed {printed}, of its cells {fmean(parts):.2f}")
    return lines


def wrong_improvements(name: str, table: dict[str, Any]) -> list[str]:
    """Relative improvements of FIRM over NT-Xent that the rows above do not give."""
    rows = {
        row[0].removesuffix(" + OE"): list(map(number, line))
        for row, line in zip(table["rows"], table["cells"], strict=True)
    }
    lines = []
    for column, firm, rival, printed in zip(
        table["columns"], rows["FIRM"], rows["NT-Xent"], rows["Relative Improvement"], strict=True
    ):
        found = 100 * (firm / rival - 1)
        if abs(found - printed) > RELATIVE:
            lines.append(f"{name}: improvement, {column[0]}: printed {printed:+}, of its rows {found:+.2f}")
    return lines


def test_every_cell_is_the_papers():
    file = paper()
    if file is None:
        pytest.skip("the paper's LaTeX file is not here; FIRM_PAPER names it")
    printed = read_tables(file.read_text(encoding="utf-8"))
    assert list(printed) == list(TABLES)
    for name, table in printed.items():
        assert table == TABLES[name], name


def test_all_tables_of_the_paper_are_here_with_every_number():
    cells = [cell for table in TABLES.values() for line in table["cells"] for cell in line]
    assert len({table["label"] for table in TABLES.values()}) == 14
    assert len([cell for cell in cells if cell is not None]) == 1550
    assert len([cell for cell in cells if isinstance(cell, list)]) == 1235  # with a deviation
    for table in TABLES.values():
        assert len(table["rows"]) == len(table["cells"])
        assert {len(line) for line in table["cells"]} == {len(table["columns"])}


def test_numbers_read_by_eye_are_where_they_belong():
    def cell(name: str, row: list[str], column: list[str]) -> Cell:
        table = TABLES[name]
        found: Cell = table["cells"][table["rows"].index(row)][table["columns"].index(column)]
        return found

    assert cell("objectives", ["SupCon"], ["FashionMNIST", "AULC"]) == [87.5, 4.7]
    assert cell("mvtec", ["Screw"], ["DeSTSeg", "image"]) is None
    assert cell("mvtec", ["Overall Avg."], ["DeSTSeg", "image"]) == 98.6
    assert cell("mvtec", ["Zipper"], ["NSA", "pixel"]) == [99.3, 0.1]
    assert cell("scores", ["SupCon"], ["s_ens*", "ΔMin"]) == 79.4
    assert cell("scores", ["FIRM + OE"], ["s_shift*", "Δs_con"]) == "-6.2%"
    assert cell("scores-exposure", ["SupCon + OE", "s_ens*"], ["Ship"]) == [58.2, 12.6]
    assert cell("per-class-cifar100", ["3"], ["SupCon", "s_con"]) == [72.6, 10.6]
    assert cell("mvtec-further", ["Texture Mean"], ["FIRM"]) == [91.3, 0.28]


def test_where_the_papers_means_disagree_with_its_cells_is_known():
    found = []
    for name, table in TABLES.items():
        found += wrong_means(name, table) + wrong_means(name, transposed(table))
        if name.startswith("sources"):
            found += wrong_improvements(name, table)
    print("\n".join(found))
    assert found == DISAGREEMENTS


def test_what_is_printed_in_two_tables_agrees_but_for_known_cells():
    """This also checks what each cell is taken to measure: by another k or score, dozens would disagree."""
    seen: dict[tuple[object, ...], dict[str, float | None]] = {}
    for table in RUNNABLE.values():
        for name in table.published:
            content = TABLES[name]
            wanted = sources(table, name, content["rows"], content["columns"])
            for cell, source in zip(chain(*content["cells"]), chain(*wanted), strict=True):
                if source.row and source.over is None and cell is not None:
                    patches = name if name == "mvtec" else table.protocol  # whole images are another experiment
                    what = (patches, source.row, tuple(source.data), source.scoring, source.measure)
                    seen.setdefault(what, {})[name] = number(cell)
    twice = [found for found in seen.values() if len(found) > 1]
    assert len(twice) > 100
    assert [found for found in twice if len(set(found.values())) > 1] == [
        {"scores-rotations": 87.0, "per-class-cifar10": 86.9},  # FIRM by s_shift on cat
        {"scores-rotations": 95.1, "per-class-cifar10": 95.0},  # and its mean
    ]
