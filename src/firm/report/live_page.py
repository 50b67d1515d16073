"""The latest decisions of a watch as a page that renews itself: counts, scores, and what did not PASS as pictures.

It is made of the lines of the journal alone, so a watch that starts again shows what was before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from firm.report.entry import SIGNS, escaped
from firm.report.histogram import histogram
from firm.storage import write_atomically

LAST = 50  # decisions that are listed
SHOWN = 24  # images that did not PASS, the latest first
SCORES = 1000  # latest ones that the histogram shows
POLICY = "default-src 'none'; img-src 'self' file:; style-src 'unsafe-inline'"  # nothing runs, nothing is fetched
RENEWED = 5  # seconds after which a browser reads the page again

Line = dict[str, Any]  # of the journal: "file" and what was decided, or why it is "unreadable"


@dataclass
class Board:
    """What the page shows of all lines so far; only the latest are remembered."""

    path: Path
    title: str
    good_scores: Sequence[float]
    limits: tuple[float, float]  # review and fail
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*SIGNS, "unread"), 0))
    last: deque[Line] = field(default_factory=lambda: deque(maxlen=LAST))
    shown: deque[Line] = field(default_factory=lambda: deque(maxlen=SHOWN))
    scores: deque[float] = field(default_factory=lambda: deque(maxlen=SCORES))
    _news: bool = False  # since it was written
    _written: float = -math.inf

    def add(self, lines: Iterable[Line]) -> None:
        """Count further lines, the oldest first."""
        for line in lines:
            self._news = True
            self.last.append(line)
            self.counts[line.get("verdict", "unread")] += 1
            if "score" in line:
                self.scores.append(line["score"])
            if "map" in line:
                self.shown.append(line)

    def renew(self, now: float) -> None:
        """Write the page if there is news, but not more often than it is read; `now` in seconds of any clock."""
        if self._news and now >= self._written + RENEWED / 2:
            self.write()
            self._written = now

    def write(self) -> None:
        """Put the page in the place of the last one."""
        write_atomically(self.path, self.text().encode())
        self._news = False

    def text(self) -> str:
        style = files("firm.report").joinpath("page.css").read_text("utf-8")
        chart = histogram(self.good_scores, list(self.scores), self.limits if self.scores else None)
        pictures = "".join(map(self._picture, reversed(self.shown))) or "<li>none so far</li>"
        rows = "".join(map(_row, reversed(self.last)))
        return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="refresh" content="{RENEWED}">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escaped(self.title)}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{escaped(self.title)}</h1>
<section aria-label="verdicts"><ul class="numbers">{self._tiles()}</ul></section>
<section><h2>Scores of the last {len(self.scores)} images</h2>
<div class="chart">{chart}</div></section>
<section><h2>Did not PASS, the latest first</h2>
<ol class="gallery">{pictures}</ol></section>
<section><h2>The last {len(self.last)} decisions</h2>
<table><thead><tr><th scope="col">verdict</th><th scope="col">score</th><th scope="col">file</th></tr></thead>
<tbody>
{rows}</tbody></table></section>
</main>
</body>
</html>
"""

    def _tiles(self) -> str:
        tiles = [
            f'<li class="{kind.lower()}"><b>{self.counts[kind]}</b> <span aria-hidden="true">{sign}</span> {kind}</li>'
            for kind, sign in SIGNS.items()
        ]
        unread = self.counts["unread"]
        return "".join([*tiles, *([f'<li class="aside"><b>{unread}</b> not readable</li>'] if unread else [])])

    def _picture(self, line: Line) -> str:
        kind, name = line["verdict"], escaped(line["file"])
        where = Path(line["map"])
        near = where.relative_to(self.path.parent) if where.is_relative_to(self.path.parent) else where
        return f"""<li class="entry {kind.lower()}">
<img src="{quote(near.as_posix())}" alt="heat map of {name}" width="256">
<p><strong class="mark {kind.lower()}">{SIGNS[kind]} {kind}</strong> {line["score"]:.4g}</p>
<p class="name" title="{name}">{name}</p></li>
"""


def _row(line: Line) -> str:
    name = escaped(line["file"])
    if "unreadable" in line:
        return f"<tr><td>not readable</td><td></td><td>{name}: {escaped(line['unreadable'])}</td></tr>\n"
    kind = line["verdict"]
    mark = f'<strong class="mark {kind.lower()}">{SIGNS[kind]} {kind}</strong>'
    return f"<tr><td>{mark}</td><td>{line['score']:.4g}</td><td>{name}</td></tr>\n"
