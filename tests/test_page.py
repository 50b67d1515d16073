"""The inspection page: whole, safe and bounded, whatever the files are called and however many there are."""

import csv
import errno
import io
import json
import re
import weakref
from dataclasses import replace

import numpy as np
import pytest

from firm.errors import MachineError, named
from firm.report import page as pages
from firm.report.html import sha256
from firm.report.page import write_page
from firm.runtime.files import folder_lock
from html_tree import HOSTILE, Tree, batch, pixels_of, shown_of


def written(folder, shown=None, **settings):
    settings = {"title": "A lot", "good_scores": [0.5, 0.6, 0.7]} | settings
    path = write_page(folder, batch() if shown is None else shown, **settings)
    assert path == folder / "report.html"
    text = path.read_text("utf-8")
    return Tree(text), text


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
        assert f"{tag}-src '{sha256(content)}'" in policy


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
    left_out = [(HOSTILE[0], "</table><img src=x>"), (HOSTILE[2], "torn")]
    tree, text = written(tmp_path, title="<h1>", left_out=left_out, card=card, notes=["<i>drift</i>"])
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


def test_the_tables_stand_beside_the_page_in_the_order_of_inspection(tmp_path):
    written(tmp_path, gallery=1)
    with open(tmp_path / "verdicts.csv", encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (tmp_path / "verdicts.jsonl").read_text("ascii").splitlines()]
    assert [float(row["score"]) for row in rows] == [one["score"] for one in lines] == [0.5, 5.0, 2.5, 9.0, 0.75, 3.5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "verdicts.csv", "verdicts.jsonl"]


def test_without_heat_maps_there_is_no_scale(tmp_path):
    page, _ = written(tmp_path, [replace(shown_of(), heat=None)])
    assert not page.all("figure", "scale")


def test_only_the_worst_are_shown_and_that_is_said(tmp_path):
    scores = np.random.default_rng(0).permutation(40) / 20
    shown = [shown_of(f"{number}.png", float(score)) for number, score in enumerate(scores)]
    tree, _ = written(tmp_path, shown, gallery=7)
    assert [float(one["data-score"]) for one in tree.all("li", "entry")] == sorted(scores)[::-1][:7]
    assert any("7 worst of 40" in one for one in tree.said())
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
def test_a_full_disk_is_one_sentence_and_leaves_what_was_there(tmp_path, monkeypatch, name):
    if name != "verdicts.csv":
        written(tmp_path, [shown_of("old.png")])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def on_a_full_disk(path, *settings, **more):
        return Full() if path.name == name else open(path, *settings, **more)

    monkeypatch.setattr(pages, "open", on_a_full_disk, raising=False)
    with pytest.raises(MachineError, match="No space left on device") as caught:
        written(tmp_path)
    assert str(caught.value).count("\n") == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_disk_that_fills_while_entries_are_written(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pages.Path, "write_text", full)
    with pytest.raises(MachineError, match="No space left on device"):
        written(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_images_is_not_called_a_full_disk(tmp_path):
    def broken():
        yield shown_of()
        raise PermissionError(errno.EACCES, "not yours", "b.png")

    with pytest.raises(PermissionError, match="not yours"):
        written(tmp_path, broken())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="out"):
        written(tmp_path / "file" / "out")


def test_same_batch_same_bytes(tmp_path):
    assert written(tmp_path / "a")[1] == written(tmp_path / "b")[1]


def test_what_a_killed_process_has_left_is_removed_and_what_a_running_one_writes_is_not(tmp_path):
    dead, running = tmp_path / ".report.dead", tmp_path / ".report.running"
    for folder in (dead, running):
        folder.mkdir()
        (folder / "1.html").write_text("an entry")
    with folder_lock(running):
        written(tmp_path)
    assert sorted(path.name for path in tmp_path.glob(".report.*")) == [".report.running"]
    assert (running / "1.html").exists()
