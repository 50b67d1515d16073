"""Inspection that goes on: every image that appears in a folder is decided once, until it is asked to stop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firm.cli.terminal import say
from firm.errors import named

if TYPE_CHECKING:
    from firm.detector import Detector

JOURNAL = "watched.jsonl"
PAGE = "watched.html"
HEAT = "heat"  # the folder of the heat maps of what does not PASS


def watch_folders(detector: Detector, folders: list[Path], report: Path, *, as_json: bool) -> None:
    """Print a line for every image and keep it in the journal; after a restart what has a line there is not decided
    again."""
    from firm.report.board import Board
    from firm.runs import asked_to_stop
    from firm.watching import Journal, watch

    by = detector.decides  # what cannot decide is said before anything is waited for
    board = Board(report / PAGE, f"Watching {', '.join(map(str, folders))}", by.scores, (by.review, by.fail))
    with Journal(report / JOURNAL) as journal, asked_to_stop() as asked:
        before = len(journal.lines)
        where = ", ".join(map(named, folders))
        said = f"watching {where} by calibration {by.id}; decisions are kept in {named(journal.path)}"
        say(f"{said}, which holds {before}" if before else said)
        board.add(journal.lines)
        board.write()
        say(f"look at {named(board.path)}, which renews itself")
        decide = _decider(detector, folders, report)

        def stop() -> bool:  # asked at every look at the folders: the page is no later than that
            board.renew(time.monotonic())
            return bool(asked)

        for line in watch(folders, decide, journal, stop=stop, tell=say):
            print(json.dumps(line) if as_json else _line(line), flush=True)
            board.add([line])
        board.write()
        say(f"stopped; {len(journal.lines)} images are in {named(journal.path)}")


def _decider(detector: Detector, folders: list[Path], report: Path) -> Callable[[Path], dict[str, Any]]:
    """What decides a file, and writes its heat map unless it PASSes."""
    from firm.report.heat import places, write_overlay

    def decide(file: Path) -> dict[str, Any]:
        found = detector.examine(file)
        decision = asdict(found.verdict)
        if found.heat is not None and found.verdict.verdict != "PASS":
            where = report / HEAT / places([file], folders)[0].with_name(f"{file.name}.png")
            write_overlay(where, found.picture, found.heat.numpy(), found.verdict.review)
            decision["map"] = str(where)
        return decision

    return decide


def _line(line: dict[str, Any]) -> str:
    if "unreadable" in line:
        return f"UNREAD  {named(line['unreadable'])}"
    return f"{line['verdict']:<6}  {line['score']:.6f}  {named(line['file'])}"
