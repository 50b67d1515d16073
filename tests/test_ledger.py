"""Verdicts as tables: what is read back is what was written, and no cell is a formula."""

import csv
import io
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firm.decision.verdict import Region, Verdict
from firm.errors import named
from firm.report.ledger import COLUMNS, csv_line, csv_row, json_line
from html_tree import HOSTILE, REGIONS, verdict_of


@given(
    name=st.text(max_size=20) | st.sampled_from(HOSTILE) | st.text(st.sampled_from("=+-@' \t,;\"\n"), max_size=6),
    score=st.floats(allow_nan=False, allow_infinity=False),
    regions=st.lists(st.sampled_from(REGIONS), max_size=3),
)
def test_tables_give_back_what_was_written(name, score, regions):
    verdict = verdict_of(name, score, "REVIEW", regions)
    line = json_line(verdict)
    assert line.count("\n") == 1
    back = json.loads(line)
    back["regions"] = tuple(Region(tuple(one.pop("box")), **one) for one in back["regions"])
    assert replace(Verdict(**back), image="") == replace(verdict, image="")
    assert back["image"] == (name if "\udce9" not in name else named(name))
    (row,) = csv.DictReader(io.StringIO(csv_line(COLUMNS) + csv_row(verdict), newline=""))
    assert tuple(row) == COLUMNS
    assert row["image"].removeprefix("'") == named(name)
    assert row["image"].lstrip()[:1] not in list("=+-@")
    assert float(row["score"]) == score
    assert int(row["regions"]) == len(regions)
    if regions:
        worst = max(regions, key=lambda one: one.peak)
        assert [float(row[name]) for name in COLUMNS[6:12]] == [*worst.box, worst.area, worst.peak]
    else:
        assert [row[name] for name in COLUMNS[6:12]] == [""] * 6


@pytest.mark.parametrize("name", ["=1+1", "@SUM(A1)", " =1", "＝1", "'=1"])
def test_no_cell_is_a_formula_and_the_apostrophe_can_be_taken_back(name):
    first = next(csv.reader([csv_row(verdict_of(name))]))[0]
    assert first == f"'{name}"
