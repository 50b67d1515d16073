"""The page of a watch: what it shows of the journal, and when it is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from firm.errors import MachineError
from firm.report import live_page
from firm.report.live_page import LAST, RELOAD, SHOWN, LivePage


def line(number: int, verdict: str, folder: Path | None = None) -> dict[str, object]:
    score = {"PASS": 1.0, "REVIEW": 2.5, "FAIL": 4.0}[verdict] + number / 1000
    found: dict[str, object] = {"file": f"{number:03d} <b>.png", "verdict": verdict, "score": score}
    if folder is not None:
        found["map"] = str(folder / "heat" / f"{number:03d} <b>.png.png")
    return found


def page_in(folder: Path) -> LivePage:
    return LivePage(folder / "watched.html", "Watching <line>", [0.5, 1.0, 1.5], (2.0, 3.0))


def test_counts_are_of_all_lines_and_lists_of_the_latest(tmp_path: Path) -> None:
    shown = page_in(tmp_path)
    shown.add(line(number, "PASS") for number in range(70))
    shown.add(line(number, "FAIL", tmp_path) for number in range(70, 100))
    shown.add([{"file": "broken.png", "unreadable": "broken.png is <cut> short"}])
    text = shown.text()
    for count, word in ((30, "FAIL"), (0, "REVIEW"), (70, "PASS"), (1, "not readable")):
        assert re.search(rf"<b>{count}</b>[^/]*(</span>)? {word}</li>", text), word
    assert text.count("<img ") == SHOWN
    assert text.count("<tr><td>") == LAST
    assert text.index("099 &lt;b&gt;.png") < text.index("098 &lt;b&gt;.png")  # the latest first
    assert "broken.png is &lt;cut&gt; short" in text
    assert "<line>" not in text
    assert 'src="heat/099%20%3Cb%3E.png.png"' in text


def test_an_empty_watch_has_a_page(tmp_path: Path) -> None:
    shown = page_in(tmp_path)
    shown.write()
    assert "none so far" in shown.path.read_text()
    assert f'<meta http-equiv="refresh" content="{RELOAD}">' in shown.path.read_text()


def test_a_page_that_cannot_be_replaced_now_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = page_in(tmp_path)
    shown.add([line(1, "PASS")])

    def refused(*_: object) -> None:
        raise MachineError("a browser is reading it")

    with monkeypatch.context() as patch:
        patch.setattr(live_page, "write_atomically", refused)
        shown.update(0.0)
    assert not shown.path.exists()
    shown.update(RELOAD)
    assert shown.path.exists()


def test_it_is_written_when_there_is_news_and_not_too_often(tmp_path: Path) -> None:
    shown = page_in(tmp_path)
    shown.update(0.0)
    assert not shown.path.exists()  # nothing to tell
    shown.add([line(1, "PASS")])
    shown.update(100.0)
    first = shown.path.read_text()
    shown.add([line(2, "PASS")])
    shown.update(100.0 + RELOAD / 4)
    assert shown.path.read_text() == first
    shown.update(100.0 + RELOAD / 2)
    second = shown.path.read_text()
    assert "002 " in second
    shown.path.unlink()
    shown.update(200.0)
    assert not shown.path.exists()
