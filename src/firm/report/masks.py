"""A contact sheet of foreground masks: object outlined, background dimmed, so that a person can judge the rule."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file is written, no window opened
import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, UInt8
from matplotlib.axes import Axes
from torch import Tensor

from firm.foreground import Rule
from firm.storage import write_atomically
from firm.types import FirmError

SHOWN = 12
COLUMNS = 6
IGNORED = (231, 76, 60)  # the colour of what is ignored, mixed in halves
DIMMED = 0.35  # what is left of the background's brightness
LINE = "#f1c40f"


def draw_masks(
    images: UInt8[Tensor, "n c h w"],
    masks: Bool[Tensor, "n h w"],
    rule: Rule,
    path: Path,
    title: str,
    ignored: Bool[Tensor, "h w"] | None = None,
) -> None:
    """Write up to 12 evenly spaced images as a PNG; the fraction in the heading is that of all masks.

    What is ignored is red.
    """
    if not len(images):
        raise FirmError("there is no image to draw a mask of; give at least one")
    chosen = torch.linspace(0, len(images) - 1, min(SHOWN, len(images))).round().long().tolist()
    columns = min(COLUMNS, len(chosen))
    rows = -(-len(chosen) // columns)
    figure = plt.figure(figsize=(max(4.0, 1.9 * columns), 1.9 * rows + 0.9), layout="constrained")  # room for the text
    without = "" if ignored is None else f", ignored (red): {ignored.float().mean():.1%}"
    told = f"foreground: {masks.float().mean():.1%} of the pixels{without}"
    figure.suptitle(f"{title}\n{_said(rule)}\n{told}", fontsize=9)
    for number, index in enumerate(chosen):
        place = figure.add_subplot(rows, columns, number + 1)
        hidden = None if ignored is None else ignored.cpu().numpy()
        _image(place, images[index].permute(1, 2, 0).cpu().numpy(), masks[index].cpu().numpy(), hidden)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    plt.close(figure)
    write_atomically(path, picture.getvalue())


def _said(rule: Rule) -> str:
    if rule.method == "ones":
        return "no rule: all of the image is foreground"
    squares = [f"{name} {side}" for name, side in (("close", rule.close), ("open", rule.open)) if side]
    return ", ".join([f"{rule.method} on {rule.channel}, {rule.polarity} is foreground", *squares])


def _image(
    place: Axes, image: npt.NDArray[np.uint8], mask: npt.NDArray[np.bool_], ignored: npt.NDArray[np.bool_] | None
) -> None:
    shade = np.where(mask, 1.0, DIMMED)[..., None]
    place.axis("off")
    shown = np.repeat((image * shade).astype(np.uint8), 3 // image.shape[2], axis=2)
    if ignored is not None:
        shown[ignored] = (shown[ignored] + np.array(IGNORED)) // 2
    place.imshow(shown)
    if not mask.all() and mask.any() and min(mask.shape) > 1:  # else there is no outline to draw
        place.contour(mask, levels=[0.5], colors=LINE, linewidths=0.8)
