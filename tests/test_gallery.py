"""An entry of the gallery: the picture, its heat, boxes and the nearest good part, whatever the file is called."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from firm.decision.verdict import Region
from firm.errors import named
from firm.report.gallery import entry, surroundings
from firm.report.heatmap import overlay, thumbnail
from html_tree import REGIONS, Tree, pixels_of, shown_of


@given(
    name=st.text(max_size=30)
    | st.text(st.characters(categories=["Cs", "Cc"]) | st.sampled_from("<>&\"'`=/ "), max_size=9)
)
def test_any_name_stays_a_name(name):
    tree = Tree(entry(shown_of(name)))
    (found,) = tree.all("li")
    assert found["data-name"] == named(name)
    assert {tag for tag, _ in tree.elements} == {"li", "label", "input", "span", "img", "svg", "p", "strong"}
    assert tree.all("img")[1]["alt"] == f"heat map of {named(name)}"


def test_an_entry_shows_picture_heat_boxes_and_the_nearest_good_part():
    good = np.full((300, 400, 3), 9, np.uint8)
    one = shown_of("a.png", 5.0, "FAIL", REGIONS, good, height=300, width=400)
    one.picture[:] = 128
    good[surroundings(REGIONS[1], 300, 400)] = 90  # the same place of both is shown
    tree = Tree(entry(one))
    plain, hot, worst, nearest = (pixels_of(image["src"]).astype(int) for image in tree.all("img"))
    assert plain.shape == hot.shape == (192, 256, 3)
    assert abs(plain - 128).max() <= 2
    expected = overlay(thumbnail(one.picture, 256), one.heat, one.verdict.review)
    assert abs(hot - expected).mean() < 4  # as JPEG keeps it
    assert abs(nearest - 90).max() <= 2
    assert worst.shape == (128, 128, 3)
    rects = [[float(box[key]) for key in ("x", "y", "width", "height")] for box in tree.all("rect")]
    assert rects == [[0, 0, 19, 16], [0, 12, 17, 20]]  # eight pixels of air, cut at the edges
    assert tree.all("svg")[0]["viewbox"] == "0 0 400 300"
    assert "worst region, peak 2.5" in tree.said()
    assert tree.all("input")[0]["aria-label"] == "heat map of a.png"


@given(height=st.integers(1, 400), width=st.integers(1, 400), data=st.data())
def test_the_surroundings_of_a_region_hold_it_and_lie_in_the_picture(height, width, data):
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    bottom, right = data.draw(st.integers(top + 1, height)), data.draw(st.integers(left + 1, width))
    rows, columns = surroundings(Region((top, left, bottom, right), 1, 1.0), height, width)
    for part, start, stop, length in ((rows, top, bottom, height), (columns, left, right, width)):
        assert 0 <= part.start <= start < stop <= part.stop <= length
        assert part.stop - part.start >= min(length, round(0.15 * max(height, width)))


@given(height=st.integers(1, 700), width=st.integers(1, 700))
def test_thumbnails_are_never_larger_than_asked(height, width):
    assert max(thumbnail(np.zeros((height, width, 3), np.uint8), 256).shape[:2]) == 256


def test_an_entry_without_heat_has_neither_map_nor_switch():
    plain = replace(shown_of(), heat=None)
    tree = Tree(entry(plain))
    assert len(tree.all("img")) == 1
    assert not tree.all("input")
