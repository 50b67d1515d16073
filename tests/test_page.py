"""The inspection page: whole, safe and bounded, whatever the files are called and however many there are."""

from __future__ import annotations

import base64
import csv
import errno
import io
import json
import re
import weakref
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from firm.errors import FirmError, named
from firm.report import page as pages
from firm.report.entry import Shown, entry, surroundings, thumbnail
from firm.report.heat import overlay
from firm.report.histogram import BINS, MIDDLE, counts, histogram
from firm.report.ledger import COLUMNS, csv_head, csv_row, json_line
from firm.report.page import write_page
from firm.verdicts import Region, Verdict

VOID = {"meta", "img", "input", "br", "link", "hr"}
REGIONS = (Region((2, 3, 8, 11), 30, 1.25), Region((20, 4, 24, 9), 12, 2.5))
HOSTILE = ["<script>alert(1)</script>.png", "\"'>&amp;.png", "caf\udce9.png", "=cmd|' /C calc'!A0", "a\nb\u202e.png"]


def verdict_of(name="a.png", score=1.0, verdict="PASS", regions=()):
    return Verdict(name, score, verdict, tuple(regions), "model-1", "calibration-1", 2.0, 3.0)


def shown_of(name="a.png", score=1.0, verdict="PASS", regions=(), nearest=None, height=30, width=40, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    heat = np.linspace(0, 4, height * width, dtype=np.float32).reshape(height, width)
    return Shown(verdict_of(name, score, verdict, regions), pixels, heat, nearest)


def batch():
    """Out of order, with every verdict, regions, nearest parts and names that mean harm."""
    good = np.full((12, 12, 3), 90, np.uint8)
    return [
        shown_of("ok 1.png", 0.5),
        shown_of(HOSTILE[0], 5.0, "FAIL", REGIONS, good),
        shown_of("maybe.png", 2.5, "REVIEW", REGIONS[:1]),
        shown_of(HOSTILE[1], 9.0, "FAIL", REGIONS[1:]),
        shown_of("ok 2.png", 0.75, "PASS", (), good),
        shown_of(HOSTILE[2], 3.5, "FAIL"),
    ]


class Tree(HTMLParser):
    """What a browser would find: elements with their attributes, text by element; refuses tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert len({name for name, _ in attributes}) == len(attributes), f"{tag} says an attribute twice"
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data.strip()))

    def all(self, tag, kind=None):
        return [a for name, a in self.elements if name == tag and (kind is None or kind in a.get("class", "").split())]

    def said(self):
        return [text for tag, text in self.texts if tag not in ("style", "script")]


def written(folder, shown=None, **settings):
    settings = {"title": "A lot", "good_scores": [0.5, 0.6, 0.7]} | settings
    path = write_page(folder, batch() if shown is None else shown, **settings)
    assert path == folder / "report.html"
    text = path.read_text("utf-8")
    return Tree(text), text


def pixels_of(uri):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))))


def test_the_page_needs_nothing_but_itself(tmp_path):
    tree, text = written(tmp_path, card={"a": "http://example.org"}, notes=["see https://example.org"])
    images = tree.all("img")
    assert len(images) == 1 + 6 * 2 + 3 + 2  # the scale, two looks at each, worst regions, nearest good parts
    for image in images:
        assert re.match(r"data:image/(png|jpeg);base64,", image["src"])
        assert image["alt"]
        assert max(pixels_of(image["src"]).shape[:2]) <= 256
        assert [int(image["height"]), int(image["width"])] == list(pixels_of(image["src"]).shape[:2])
    for tag, attributes in tree.elements:
        for name, value in attributes.items():
            assert not name.startswith("on")
            assert name != "style"  # the policy of the page would not let it act
            if name in ("src", "href", "srcset", "action", "data", "poster", "xlink:href", "formaction"):
                assert value.startswith("data:image/") or value in ("verdicts.csv", "verdicts.jsonl"), (tag, value)
    assert "@import" not in text
    assert "url(" not in text
    assert not tree.all("link")
    assert all("src" not in one for one in tree.all("script"))


def test_the_policy_allows_its_own_style_and_script_only(tmp_path):
    _, text = written(tmp_path)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.S)
        assert f"{tag}-src '{pages._sha(content)}'" in policy


def test_what_a_page_must_have(tmp_path):
    tree, text = written(tmp_path)
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert ("title", "A lot") in tree.texts
    assert ("h1", "A lot") in tree.texts
    assert len(tree.all("main")) == 1
    ids = [attributes["id"] for _, attributes in tree.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert all(image.get("loading") == "lazy" for image in tree.all("img")[1:])
    assert "hidden" in tree.all("div", "tools")[0]  # until the script is there to serve them
    for rule in ("prefers-color-scheme: dark", "@media print", ":focus-visible"):
        assert rule in text


def test_counts_in_numbers_words_and_the_bar(tmp_path):
    tree, _ = written(tmp_path)
    said = tree.said()
    assert [text for tag, text in tree.texts if tag == "b"] == ["3", "1", "2"]
    assert [said[said.index(one) + 1] for one in ("50.0 %", "16.7 %")] == ["1", "2"]  # followed by the next number
    (bar,) = tree.all("svg", "bar")
    assert bar["aria-label"] == "of 6: 3 FAIL, 1 REVIEW, 2 PASS"
    widths = [(one["class"], float(one["width"])) for one in tree.all("rect") if "class" in one]
    assert widths == [("fail", 500), ("review", pytest.approx(166.67)), ("pass", pytest.approx(333.33))]


def test_the_worst_comes_first_and_a_word_says_each_verdict(tmp_path):
    tree, text = written(tmp_path)
    shown = tree.all("li", "entry")
    assert [float(one["data-score"]) for one in shown] == [9.0, 5.0, 3.5, 2.5, 0.75, 0.5]
    assert [one["data-rank"] for one in shown] == ["0", "0", "0", "1", "2", "2"]
    marks = [re.sub("<[^>]*>", "", one).split() for one in re.findall(r'<strong class="mark.*?</strong>', text)]
    assert marks == [["✕", "FAIL"]] * 3 + [["!", "REVIEW"]] + [["✓", "PASS"]] * 2


def test_a_milder_verdict_stands_behind_a_worse_one_whatever_its_score(tmp_path):
    tree, _ = written(tmp_path, [shown_of("a", 2.9, "REVIEW"), shown_of("b", 1.0, "FAIL"), shown_of("c", 1.0, "FAIL")])
    assert [one["data-name"] for one in tree.all("li", "entry")] == ["b", "c", "a"]


def test_names_reasons_notes_and_cards_are_texts_only(tmp_path):
    card = {HOSTILE[0]: {"deep": [1, "<b>"], "none": None, "yes": True, "1": 1, "list": [{"x": "</td>"}]}}
    quarantined = [(HOSTILE[0], "</table><img src=x>"), (HOSTILE[2], "torn")]
    tree, text = written(tmp_path, title="<h1>", quarantined=quarantined, card=card, notes=["<i>drift</i>"])
    said = tree.said()
    for one in ("<h1>", "</table><img src=x>", HOSTILE[0], named(HOSTILE[2]), "<i>drift</i>", "1, <b>"):
        assert one in said
    names = {one["data-name"] for one in tree.all("li", "entry")}
    assert names >= {HOSTILE[0], HOSTILE[1], named(HOSTILE[2])}
    assert len(tree.all("script")) == 1
    assert not tree.all("i")
    rows = [tree.texts[i + 1][1] for i, one in enumerate(tree.texts) if one[1].startswith(f"{HOSTILE[0]}.")]
    assert rows == ["1, <b>", "none", "yes", "1", "</td>"]
    assert text.index("<i>drift".replace("<", "&lt;").replace(">", "&gt;")) < text.index('class="numbers"')


@given(
    name=st.text(max_size=30)
    | st.text(st.characters(categories=["Cs", "Cc"]) | st.sampled_from("<>&\"'`=/ "), max_size=9)
)
def test_any_name_stays_a_name(name):
    tree = Tree(entry(shown_of(name), 2))
    (found,) = tree.all("li")
    assert found["data-name"] == named(name)
    assert {tag for tag, _ in tree.elements} == {"li", "label", "input", "span", "img", "svg", "p", "strong"}
    assert tree.all("img")[1]["alt"] == f"heat map of {named(name)}"


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
    (row,) = csv.DictReader(io.StringIO((csv_head() + csv_row(verdict)).removeprefix("\ufeff"), newline=""))
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


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", " =1", "＝1", "'=1", "'a"])
def test_no_cell_is_a_formula_and_the_apostrophe_can_be_taken_back(name):
    first = next(csv.reader([csv_row(verdict_of(name))]))[0]
    assert first == f"'{name}"


def test_the_tables_stand_beside_the_page_in_the_order_of_inspection(tmp_path):
    written(tmp_path, gallery=1)
    with open(tmp_path / "verdicts.csv", encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (tmp_path / "verdicts.jsonl").read_text("ascii").splitlines()]
    assert [float(row["score"]) for row in rows] == [one["score"] for one in lines] == [0.5, 5.0, 2.5, 9.0, 0.75, 3.5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "verdicts.csv", "verdicts.jsonl"]


def test_an_entry_shows_picture_heat_boxes_and_the_nearest_good_part():
    good = np.full((12, 12, 3), 90, np.uint8)
    one = shown_of("a.png", 5.0, "FAIL", REGIONS, good, height=300, width=400)
    one.picture[:] = 128
    tree = Tree(entry(one, 0))
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
    assert "most similar good part" in tree.said()
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


@pytest.mark.parametrize("box", [(0, 0, 31, 5), (0, 0, 5, 41), (-1, 0, 5, 5), (5, 5, 5, 6)])
def test_a_box_outside_its_picture_is_refused(box):
    with pytest.raises(FirmError, match="does not lie in its picture of 30 x 40"):
        shown_of(regions=[Region(box, 1, 1.0)])


def test_only_the_worst_are_shown_and_that_is_said(tmp_path):
    scores = np.random.default_rng(0).permutation(40) / 20
    shown = [shown_of(f"{number}.png", float(score)) for number, score in enumerate(scores)]
    tree, _ = written(tmp_path, shown, gallery=7)
    assert [float(one["data-score"]) for one in tree.all("li", "entry")] == sorted(scores)[::-1][:7]
    assert any("The 7 worst of 40 images; the rest is in the tables" in one for one in tree.said())
    tree, _ = written(tmp_path, shown)
    assert any("All 40 images" in one for one in tree.said())
    assert len(written(tmp_path, shown, gallery=0)[0].all("li", "entry")) == 0


def test_images_are_taken_one_by_one_and_let_go(tmp_path):
    alive, most, made = [], [], []

    def one_by_one():
        for number in range(20):
            most.append(sum(one() is not None for one in alive))
            one = shown_of(f"{number}.png", float(number), "FAIL")
            alive.append(weakref.ref(one.picture))
            made.append(number)
            yield one
            waiting = list(tmp_path.glob(".report.*/*.html"))
            assert len(waiting) == min(number + 1, 5)  # those no longer among the worst are gone from the disk too
            del one

    written(tmp_path, one_by_one(), gallery=5)
    assert made == list(range(20))
    assert max(most) == 0


def test_an_empty_batch_and_a_page_without_anything(tmp_path):
    tree, _ = written(tmp_path, [], good_scores=[])
    assert [text for tag, text in tree.texts if tag == "b"] == ["0", "0", "0"]
    assert "There is no score to draw." in tree.said()
    assert not tree.all("table")
    assert not tree.all("figure", "scale")
    tree, _ = written(tmp_path, [shown_of()], card={"settings": {}, "list": []})
    assert [text for tag, text in tree.texts if tag == "th"][-2:] == ["settings", "list"]
    assert [text for tag, text in tree.texts if tag == "td"][-2:] == ["none", "none"]


class Full(io.StringIO):
    def write(self, _):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fileno(self):
        return 1


@pytest.mark.parametrize("name", ["report.html", "verdicts.csv", "verdicts.jsonl"])
@pytest.mark.parametrize("old", [False, True])
def test_a_full_disk_is_one_sentence_and_leaves_what_was_there(tmp_path, monkeypatch, name, old):
    if old:
        written(tmp_path, [shown_of("old.png")])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def on_a_full_disk(path, *settings, **more):
        return Full() if path.name == name else open(path, *settings, **more)

    monkeypatch.setattr(pages, "open", on_a_full_disk, raising=False)
    with pytest.raises(FirmError, match=r"cannot write .*: No space left on device; free some space") as caught:
        written(tmp_path)
    assert str(caught.value).count("\n") == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_disk_that_fills_while_entries_are_written(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pages.Path, "write_text", full)
    with pytest.raises(FirmError, match="No space left on device"):
        written(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_trouble_of_whoever_makes_the_images_is_not_called_a_full_disk(tmp_path):
    def broken():
        yield shown_of()
        raise PermissionError(errno.EACCES, "not yours", "b.png")

    with pytest.raises(PermissionError, match="not yours"):
        written(tmp_path, broken())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FirmError, match="cannot write"):
        written(tmp_path / "file" / "out")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (verdict_of(verdict="GOOD"), "the verdict of a.png is 'GOOD'; it is one of FAIL, REVIEW, PASS"),
        (verdict_of(score=float("nan")), "is not finite"),
        (verdict_of(regions=[Region((0, 0, 1, 1), 1, float("inf"))]), "is not finite"),
        (replace(verdict_of(), model="model-2"), "not decided by the model and thresholds of the others"),
        (replace(verdict_of(), calibration="other"), "not decided by the model and thresholds"),
        (replace(verdict_of(), fail=4.0), "not decided by the model and thresholds"),
    ],
)
def test_verdicts_that_cannot_stand_on_one_page_are_refused(tmp_path, other, said):
    with pytest.raises(FirmError, match=said):
        written(tmp_path, [shown_of("first.png"), replace(shown_of(), verdict=other)])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FirmError, match="gallery is -1"):
        written(tmp_path, gallery=-1)


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
        assert tops == [pytest.approx(MIDDLE - up * bars(text, kind)[0][1], abs=0.1)]
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


def test_same_batch_same_bytes(tmp_path):
    assert written(tmp_path / "a")[1] == written(tmp_path / "b")[1]
