"""An evaluation as files: the ROC with both thresholds, scores, wrong decisions; and the curve of a training.

scores.csv has all images in their order; wrong.csv those decided wrongly, in the order of the pictures.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, UInt8
from matplotlib.figure import Figure
from torch import Tensor

from firm.decision.calibration import Calibration
from firm.decision.regions import start
from firm.decision.verdict import marked
from firm.detector.evaluation import Labelled, ious
from firm.errors import named
from firm.images.preprocess import resize
from firm.report.ledger import MARK, csv_line, harmless
from firm.report.sheets import Part, draw_parts, save_figure

MOST = 24  # wrong decisions that are shown, the worst first
SIDE = 128  # px at which they are shown
COLUMNS = ("image", "kind", "verdict", "score", "review", "fail", "iou")
LONGEST = 28  # letters of a name below a picture
ROC, MISSES, FALSE_CALLS, WRONG, SCORES = "roc.png", "misses.png", "false-calls.png", "wrong.csv", "scores.csv"


def write_evaluation(
    folder: Path,
    test: Labelled,
    by: Calibration,
    *,
    name: str = "test",
    ignored: Bool[Tensor, "a b"] | None = None,
) -> list[Path]:
    """Write the files and return them; of misses and false calls only those there are, older files are removed.

    An image that is no file is called by the name of the data set and its number.
    """
    folder.mkdir(parents=True, exist_ok=True)
    located, images, anomalous, truth, kinds = test.located, test.images, test.anomalous, test.truth, test.kinds
    draw_roc(folder / ROC, located.scores, anomalous, by)
    scores = located.scores.tolist()
    names = truth.files if truth and truth.files else [f"{name} {number}" for number in range(len(images))]
    fits = ["" if math.isnan(iou) else iou for iou in ious(test, by, ignored).tolist()]
    rows = [
        csv_line((harmless(file), harmless(kind), by.verdict(score), score, by.review, by.fail, fit))
        for file, kind, score, fit in zip(names, kinds, scores, fits, strict=True)
    ]
    _write_table(folder / SCORES, rows)
    written, wrong_rows = [folder / ROC, folder / SCORES], list[str]()
    for file in (MISSES, FALSE_CALLS, WRONG):
        (folder / file).unlink(missing_ok=True)
    called = located.scores > by.review
    lowest, highest = located.scores.argsort(), located.scores.argsort(descending=True)
    for file, wrong, order, title in (
        (MISSES, anomalous & ~called, lowest, "defects that PASS, the lowest scores first"),
        (FALSE_CALLS, ~anomalous & called, highest, "good parts that do not PASS, the highest scores first"),
    ):
        places = order[wrong[order]].tolist()
        if places:
            parts = [_part(images[i], located.maps[i], scores[i], kinds[i], names[i], by) for i in places[:MOST]]
            shown = "" if len(places) <= MOST else f", {MOST} of {len(places)}"
            draw_parts(parts, by.review, folder / file, title=f"{title}{shown}")
            written.append(folder / file)
            wrong_rows += [rows[place] for place in places]
    if wrong_rows:
        _write_table(folder / WRONG, wrong_rows)
        written.append(folder / WRONG)
    return written


def _write_table(path: Path, rows: list[str]) -> None:
    path.write_text(MARK + csv_line(COLUMNS) + "".join(rows), encoding="utf-8", newline="")


def _part(
    image: UInt8[Tensor, "c h w"], heat: Float[Tensor, "r s"], score: float, kind: str, file: str, by: Calibration
) -> Part:
    picture = resize(image[None].expand(-1, 3, -1, -1), SIDE)[0].permute(1, 2, 0).numpy()
    name = named(Path(file).name)
    short = name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}"  # names differ at their ends
    if not heat.numel():
        return Part(picture, score, kind, None, short)
    values, pixel = heat.numpy(), by.pixel
    if pixel is None:
        return Part(picture, score, kind, values, short)
    return Part(
        picture, score, kind, values, short, marked(values, pixel if score <= by.review else start(values, pixel))
    )


def roc(scores: Float[Tensor, " m"], anomalous: Bool[Tensor, " m"]) -> npt.NDArray[np.float64]:
    """Rows of false and true positive rate from (0, 0) to (1, 1), a row for each score that occurs."""
    values, order = scores.double().sort(descending=True)
    hits = anomalous[order].double()
    last = torch.cat([values[1:] != values[:-1], torch.ones(1, dtype=torch.bool)])  # equal scores are called together
    rates = torch.stack([(1 - hits).cumsum(0) / (1 - hits).sum(), hits.cumsum(0) / hits.sum()], dim=1)[last]
    return np.concatenate([np.zeros((1, 2)), rates.numpy()])


def draw_roc(path: Path, scores: Float[Tensor, " m"], anomalous: Bool[Tensor, " m"], by: Calibration) -> None:
    """The curve, and where on it the two thresholds lie."""
    figure = Figure(figsize=(5, 5), layout="constrained")
    panel = figure.subplots()
    points = 100 * roc(scores, anomalous)
    panel.plot(points[:, 0], points[:, 1], color="#1f4e79")
    panel.plot([0, 100], [0, 100], color="grey", linestyle=":", linewidth=1)
    for name, limit, mark in (("review", by.review, "o"), ("fail", by.fail, "s")):
        above = scores > limit
        false, true = (100 * float(above[side].double().mean()) for side in (~anomalous, anomalous))
        panel.plot(false, true, mark, color="#c0392b", label=f"{name} at {limit:.4g}: {true:.1f} % for {false:.1f} %")
    panel.set(xlabel="good parts called, %", ylabel="defects caught, %", xlim=(-1, 101), ylim=(-1, 101))
    panel.legend(loc="lower right", fontsize=8)
    panel.grid(alpha=0.3)
    save_figure(figure, path)


def draw_progress(probes: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the probes of a training as a PNG."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    panel = figure.subplots()
    minutes = [line["seconds"] / 60 for line in probes]
    panel.plot(minutes, [100 * line["synthetic_auroc"] for line in probes], marker="o", color="#1f4e79")
    panel.set(xlabel="CPU minutes of training", ylabel="AUROC on held-out good parts\nwith synthetic defects, %")
    panel.grid(alpha=0.3)
    save_figure(figure, path)
