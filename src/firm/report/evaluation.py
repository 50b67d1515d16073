"""What an evaluation looks like: the ROC with both thresholds on it, and the images that were decided wrongly.

wrong.csv names every file that was decided wrongly, in the order of the pictures, which show the first of them.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file is written, no window opened
import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from firm.calibration import Calibration
from firm.errors import named
from firm.images import resize
from firm.report.ledger import MARK, csv_line, harmless
from firm.report.tray import Inspected, draw_tray
from firm.types import Located, Truth

MOST = 24  # wrong decisions that are shown, the worst first
SIDE = 128  # px at which they are shown
COLUMNS = ("image", "kind", "verdict", "score", "review", "fail")
LONGEST = 28  # letters of a name below a picture
ROC, MISSES, FALSE_CALLS, WRONG = "roc.png", "misses.png", "false-calls.png", "wrong.csv"


def write_pictures(
    folder: Path,
    found: Located,
    images: UInt8[Tensor, "m c h w"],
    anomalous: Bool[Tensor, " m"],
    truth: Truth | None,
    by: Calibration,
) -> list[Path]:
    """The files there is something to see in: none of misses where nothing was missed; older ones are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    draw_roc(folder / ROC, found.scores, anomalous, by)
    called = found.scores > by.review
    lowest, highest = found.scores.argsort(), found.scores.argsort(descending=True)
    written, rows = [folder / ROC], list[str]()
    for name, wrong, order, title in (
        (MISSES, anomalous & ~called, lowest, "defects that PASS, the lowest scores first"),
        (FALSE_CALLS, ~anomalous & called, highest, "good parts that do not PASS, the highest scores first"),
    ):
        places = order[wrong[order]]
        (folder / name).unlink(missing_ok=True)
        if len(places):
            parts = [_inspected(int(place), found, images, anomalous, truth) for place in places[:MOST]]
            shown = "" if len(places) <= MOST else f", {MOST} of {len(places)}"
            draw_tray(parts, by.review, folder / name, title=f"{title}{shown}")
            written.append(folder / name)
            rows += [_row(int(place), found, anomalous, truth, by) for place in places] if truth and truth.files else []
    (folder / WRONG).unlink(missing_ok=True)
    if rows:
        (folder / WRONG).write_text(MARK + csv_line(COLUMNS) + "".join(rows), encoding="utf-8", newline="")
        written.append(folder / WRONG)
    return written


def _row(place: int, found: Located, anomalous: Bool[Tensor, " m"], truth: Truth, by: Calibration) -> str:
    score = float(found.scores[place])
    kind = truth.kinds[place] if anomalous[place] else "good"
    return csv_line((harmless(truth.files[place]), harmless(kind), by.verdict(score), score, by.review, by.fail))


def _inspected(
    place: int, found: Located, images: UInt8[Tensor, "m c h w"], anomalous: Bool[Tensor, " m"], truth: Truth | None
) -> Inspected:
    picture = resize(images[place : place + 1].expand(-1, 3, -1, -1), SIDE)[0].permute(1, 2, 0).numpy()
    kind = "defective" if truth is None else truth.kinds[place]
    heat = found.maps[place].numpy() if found.maps.numel() else None
    name = named(Path(truth.files[place]).name) if truth and truth.files else ""
    short = name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}"  # names differ at their ends
    return Inspected(picture, float(found.scores[place]), kind if anomalous[place] else None, heat, short)


def roc(scores: Float[Tensor, " m"], anomalous: Bool[Tensor, " m"]) -> npt.NDArray[np.float64]:
    """Rows of false and true positive rate from (0, 0) to (1, 1), a row for each score that occurs."""
    values, order = scores.double().sort(descending=True)
    hits = anomalous[order].double()
    last = torch.cat([values[1:] != values[:-1], torch.ones(1, dtype=torch.bool)])  # equal scores are called together
    rates = torch.stack([(1 - hits).cumsum(0) / (1 - hits).sum(), hits.cumsum(0) / hits.sum()], dim=1)[last]
    return np.concatenate([np.zeros((1, 2)), rates.numpy()])


def draw_roc(path: Path, scores: Float[Tensor, " m"], anomalous: Bool[Tensor, " m"], by: Calibration) -> None:
    """The curve, and where on it the two thresholds lie."""
    figure, place = plt.subplots(figsize=(5, 5), layout="constrained")
    points = 100 * roc(scores, anomalous)
    place.plot(points[:, 0], points[:, 1], color="#1f4e79")
    place.plot([0, 100], [0, 100], color="grey", linestyle=":", linewidth=1)
    for name, limit, mark in (("review", by.review, "o"), ("fail", by.fail, "s")):
        above = scores > limit
        false, true = (100 * float(above[side].double().mean()) for side in (~anomalous, anomalous))
        place.plot(false, true, mark, color="#c0392b", label=f"{name} at {limit:.4g}: {true:.1f} % for {false:.1f} %")
    place.set(xlabel="good parts called, %", ylabel="defects caught, %", xlim=(-1, 101), ylim=(-1, 101))
    place.legend(loc="lower right", fontsize=8)
    place.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
