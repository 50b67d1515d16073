"""The latest decisions of a watch as a page that reloads itself: counts, scores, and pictures of what did not PASS.

It is made from the lines of the journal alone, so a watch that starts again shows what was decided before.
"""

import contextlib
import math
import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from firm.errors import MachineError
from firm.report.histogram import Limits, histogram
from firm.report.html import SIGNS, render
from firm.runtime.files import write_atomically

LAST = 50  # decisions that are listed
SHOWN = 24  # images that did not PASS, the latest first
SCORES = 1000  # latest ones that the histogram shows
RELOAD = 5  # seconds after which a browser reads the page again

Line = dict[str, Any]  # of the journal: "file" and what was decided, or why it is "unreadable"


@dataclass
class LivePage:
    """What the page shows of all lines so far; only the latest are kept."""

    path: Path
    title: str
    good_scores: Sequence[float]
    limits: Limits
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*SIGNS, "unread"), 0))
    last: deque[Line] = field(default_factory=lambda: deque(maxlen=LAST))
    shown: deque[Line] = field(default_factory=lambda: deque(maxlen=SHOWN))
    scores: deque[float] = field(default_factory=lambda: deque(maxlen=SCORES))
    _changed: bool = False  # since it was written
    _written: float = -math.inf

    def add(self, lines: Iterable[Line]) -> None:
        """Count further lines, the oldest first."""
        for line in lines:
            self._changed = True
            self.last.append(line)
            self.counts[line.get("verdict", "unread")] += 1
            if "score" in line:
                self.scores.append(line["score"])
            if "map" in line:
                self.shown.append(line)

    def update(self, now: float) -> None:
        """Write the page if it has changed, but not more often than it is read; `now` in seconds of any clock.

        A page that cannot be replaced, as on Windows while a browser reads it, is written the next time.
        """
        if self._changed and now >= self._written + RELOAD / 2:
            self._written = now
            with contextlib.suppress(MachineError):
                self.write()

    def write(self) -> None:
        """Replace the page."""
        write_atomically(self.path, self.text().encode())
        self._changed = False

    def text(self) -> str:
        """The page as HTML."""
        drawn = histogram(self.good_scores, list(self.scores), self.limits if self.scores else None)
        shown = [(line, self._source(line)) for line in reversed(self.shown)]
        values = {"counts": self.counts, "scores": len(self.scores), "last": list(reversed(self.last))}
        return render("live.html", title=self.title, seconds=RELOAD, histogram=drawn, shown=shown, **values)

    def _source(self, line: Line) -> str:
        """The heat map as an address, relative to the page where it can be."""
        file, home = Path(line["map"]), self.path.parent
        if not file.is_relative_to(home):
            return file.absolute().as_uri()
        return quote(os.fsencode(file.relative_to(home).as_posix()))  # a name may be no Unicode
