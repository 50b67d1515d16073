"""Verdicts as rows for a spreadsheet and as lines for a program.

verdicts.csv (UTF-8 with a mark, so that spreadsheets read umlauts): one row per image in the order of inspection,
columns `COLUMNS`; the places are those of the region with the highest peak, empty where there is none. A text that a
spreadsheet could take for a formula, or that begins with an apostrophe, has an apostrophe in front.

verdicts.jsonl: one object per line with image, verdict, score, review, fail, model, calibration and all regions (box as
top, left, bottom, right; area; peak). A name is kept exactly; only one that is no Unicode is escaped.
"""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict

from firm.decision.verdict import Region, Verdict
from firm.errors import named

REGION = ("top", "left", "bottom", "right", "area", "peak")
# the image first: a quoted first cell stays whole whatever a spreadsheet takes for the separator
COLUMNS = ("image", "verdict", "score", "review", "fail", "regions", *REGION, "model", "calibration")
MARK = "\ufeff"  # of UTF-8, before the names of the columns
FORMULA = tuple("=+-@＝＋－＠'")


def csv_row(verdict: Verdict) -> str:
    """One image as a line of the table."""
    region = worst_region(verdict)
    place = ("",) * len(REGION) if region is None else (*region.box, region.area, region.peak)
    limits = (verdict.score, verdict.review, verdict.fail)
    texts = (harmless(verdict.model), harmless(verdict.calibration))
    return csv_line((harmless(verdict.image), verdict.verdict, *limits, len(verdict.regions), *place, *texts))


def json_line(verdict: Verdict) -> str:
    """One image as an object on a line of its own."""
    names = ("image", "model", "calibration")
    texts = {name: getattr(verdict, name).encode(errors="backslashreplace").decode() for name in names}
    return json.dumps(asdict(verdict) | texts, allow_nan=False) + "\n"


def worst_region(verdict: Verdict) -> Region | None:
    """The region with the highest peak; of equal ones the first."""
    return max(verdict.regions, key=lambda region: region.peak, default=None)


def harmless(text: str) -> str:
    """A text no spreadsheet computes: printable, with an apostrophe before what could begin a formula."""
    shown = named(text)
    return f"'{shown}" if shown.lstrip().startswith(FORMULA) else shown


def csv_line(cells: Sequence[object]) -> str:
    """Cells as a line of a table; texts are quoted, so that no separator within one ends it."""
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_NONNUMERIC).writerow(cells)
    return text.getvalue()
