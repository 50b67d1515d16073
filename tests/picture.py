"""The picture of the README: the report of the demo as a browser shows it. `make picture`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image

import browser

WIDTH, HEIGHT = 1180, 1340  # the top of the page: counts, histogram, the first row of the gallery
COLOURS = 256


def take(page: Path, out: Path) -> None:
    """The top of a page as a PNG small enough for a repository."""
    with tempfile.TemporaryDirectory() as scratch, browser.browse(Path(scratch), width=WIDTH, height=HEIGHT) as opened:
        opened.open(page.resolve())
        taken = Path(scratch) / "taken.png"
        opened.photograph(taken, HEIGHT)
        Image.open(taken).convert("RGB").quantize(COLOURS).save(out, optimize=True)


if __name__ == "__main__":
    if browser.missing():
        sys.exit(browser.missing())
    take(Path(sys.argv[1]), Path(sys.argv[2]))
