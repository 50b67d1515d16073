"""The histogram of a page: both batches, both thresholds, no score lost."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firm.report.histogram import BINS, counts, histogram
from html_tree import Tree

AXIS = 130  # its height in the drawing


def bars(text, kind):
    """Left end and height of every bar."""
    (path,) = re.findall(rf'<path class="bars {kind}" d="([^"]*)"', text)
    return [tuple(map(float, one)) for one in re.findall(r"M([\d.]+) [\d.]+h[\d.]+v([\d.]+)", path)]


def test_the_histogram_draws_both_batches_and_both_thresholds():
    text = histogram([0.0, 0.0, 1.0], [4.0, 4.0, 2.0, 2.0, 2.0], (2.5, 3.0))
    tree = Tree(text)
    good, batch = bars(text, "good"), bars(text, "batch")
    assert [len(good), len(batch)] == [2, 2]
    assert good[0][1] == pytest.approx(2 * good[1][1], abs=0.1)
    assert batch[0][1] == pytest.approx(1.5 * batch[1][1], abs=0.1)
    assert good[0][0] < good[1][0] < batch[0][0] < batch[1][0]
    for kind, up in (("batch", 1), ("good", 0)):  # from one axis, this batch upwards
        tops = [float(one["d"].split("h")[0].split(" ")[1]) for one in tree.all("path", kind)]
        assert tops == [pytest.approx(AXIS - up * bars(text, kind)[0][1], abs=0.1)]
    lines = [float(re.match(r"M([\d.]+)", one["d"])[1]) for one in tree.all("path", "limit")]
    assert batch[0][0] < lines[0] < lines[1] < batch[1][0]
    assert {"review 2.5", "fail 3", "this batch (5)"} <= set(tree.said())
    assert any("3 good calibration images from 0 to 1; review above 2.5" in one for one in tree.said())


def test_a_score_far_away_does_not_flatten_the_others():
    text = histogram([0.0, 1.0], [0.5, 1e9], (1.5, 2.0))
    assert "8.16 and beyond" in text  # three times as far beyond 2 as that is above 0, and some room
    assert bars(text, "good")[1][0] - bars(text, "good")[0][0] > 80


@given(scores=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), good=st.lists(st.floats(-1e6, 1e6), max_size=30))
def test_no_score_is_lost_from_the_histogram(scores, good):
    assert counts(scores, -5.0, 7.0).sum() == len(scores)
    assert len(counts(scores, -5.0, 7.0)) == BINS
    text = histogram(good, scores, (min(scores), max(scores)))
    assert "nan" not in text
    assert all(24 <= x <= 936 and tall > 0 for x, tall in bars(text, "batch"))
