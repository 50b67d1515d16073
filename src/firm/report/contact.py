"""A contact sheet of synthetic outliers: what each source makes of good images, and which pixels it says it altered."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a file is written, no window opened
import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, UInt8
from matplotlib.axes import Axes
from torch import Tensor

from firm.storage import write_atomically
from firm.types import FirmError, Outliers

OUTLINE = "#ff2d55"
SHOWN = ("original", "outlier", "altered")
EACH = 4  # examples in a row


def draw_contact(originals: UInt8[Tensor, "n c h w"], outliers: dict[str, Outliers], path: Path, title: str) -> None:
    """Write a PNG with a row per source and kind: each example as it was, as it became, and outlined where altered."""
    rows = [row for name, made in outliers.items() for row in _rows(name, made)]
    if not rows:
        raise FirmError("a contact sheet needs at least one outlier; name a source and some images")
    columns = len(SHOWN) * max(len(chosen) for _, _, chosen in rows)
    tall = 1.5 * originals.shape[2] / originals.shape[3]
    figure, axes = plt.subplots(
        len(rows), columns, figsize=(1.5 * columns, tall * len(rows) + 0.8), squeeze=False, layout="constrained"
    )
    figure.suptitle(title)
    for place in axes.flat:
        place.axis("off")
    for places, (name, made, chosen) in zip(axes, rows, strict=True):
        places[0].text(-0.05, 0.5, name, rotation=90, ha="right", va="center", transform=places[0].transAxes)
        for number, i in enumerate(chosen):
            _example(places[len(SHOWN) * number :], originals[i], made, i)
    for place, name in zip(axes[0], SHOWN * EACH, strict=False):
        place.set_title(name, fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    plt.close(figure)
    write_atomically(path, picture.getvalue())


def _rows(name: str, made: Outliers) -> list[tuple[str, Outliers, list[int]]]:
    """The label of each kind of a source, and the first examples of it."""
    kinds = sorted(set(made.group.tolist()))
    return [
        (name if len(kinds) == 1 else f"{name} {kind}", made, (made.group == kind).nonzero().flatten().tolist()[:EACH])
        for kind in kinds
    ]


def _example(places: npt.NDArray[Any], original: Tensor, made: Outliers, number: int) -> None:
    for place, image in zip(places, (original, made.images[number], made.images[number]), strict=False):
        _show(place, image)
    altered = np.ones(original.shape[1:], bool) if made.where is None else made.where[number].cpu().numpy()
    _outline(places[len(SHOWN) - 1], altered)


def _show(place: Axes, image: UInt8[Tensor, "c h w"]) -> None:
    place.imshow(image.expand(3, -1, -1).permute(1, 2, 0).cpu().numpy())


def _outline(place: Axes, altered: Bool[npt.NDArray[np.bool_], "h w"]) -> None:
    """The border of the altered pixels; a frame of zeros closes it where they touch the edge."""
    if altered.any():
        height, width = altered.shape
        framed = np.pad(altered, 1).astype(float)
        place.contour(
            np.arange(-1, width + 1), np.arange(-1, height + 1), framed, levels=[0.5], colors=OUTLINE, linewidths=0.8
        )
