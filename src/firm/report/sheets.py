"""Sheets of pictures for a person to judge: synthetic outliers, foreground masks, inspected parts."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from firm.errors import SettingError
from firm.images.foreground import Rule
from firm.report.heatmap import overlay
from firm.runtime.files import write_atomically
from firm.types import Outliers

ALTERED_LINE, FOREGROUND_LINE = "#ff2d55", "#f1c40f"
PANELS = ("original", "outlier", "altered")
EXAMPLES = 4  # of a source in a row
MASKS, MASK_COLUMNS, PART_COLUMNS = 12, 6, 8
IGNORED = (231, 76, 60)  # the colour of ignored pixels, mixed in halves
DIMMED = 0.35  # brightness left to the background
CALLED, PASSED = "#c0392b", "#1e8449"

Images = UInt8[Tensor, "n c h w"]
Masks = Bool[Tensor, "n h w"]
Pixels = UInt8[npt.NDArray[np.uint8], "h w 3"]
Mask = Bool[npt.NDArray[np.bool_], "h w"]


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG in one step."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    write_atomically(path, content.getvalue())


def _pixels(image: UInt8[Tensor, "c h w"]) -> Pixels:
    return image.expand(3, -1, -1).permute(1, 2, 0).cpu().numpy()


def draw_outliers(originals: Images, outliers: dict[str, Outliers], path: Path, title: str) -> None:
    """A row per source and kind: each example as it was, as it became, and outlined where it was altered."""
    rows = [row for name, made in outliers.items() for row in _rows(name, made)]
    if not rows:
        raise SettingError("a sheet of outliers needs at least one; name a source and some images")
    columns = len(PANELS) * max(len(chosen) for _, _, chosen in rows)
    tall = 1.5 * originals.shape[2] / originals.shape[3]
    figure = Figure(figsize=(1.5 * columns, tall * len(rows) + 0.8), layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False)
    figure.suptitle(title)
    for panel in axes.flat:
        panel.axis("off")
    for panels, (name, made, chosen) in zip(axes, rows, strict=True):
        panels[0].text(-0.05, 0.5, name, rotation=90, ha="right", va="center", transform=panels[0].transAxes)
        for number, i in enumerate(chosen):
            three = panels[len(PANELS) * number :][: len(PANELS)]
            for panel, image in zip(three, (originals[i], made.images[i], made.images[i]), strict=True):
                panel.imshow(_pixels(image))
            _outline(three[-1], np.ones(image.shape[1:], bool) if made.where is None else made.where[i].cpu().numpy())
    for panel, name in zip(axes[0], PANELS * EXAMPLES, strict=False):
        panel.set_title(name, fontsize=8)
    save_figure(figure, path)


def _rows(name: str, made: Outliers) -> Iterator[tuple[str, Outliers, list[int]]]:
    """The label of each kind of a source, and the first examples of it."""
    kinds = made.group.unique().tolist()
    for kind in kinds:
        examples = (made.group == kind).nonzero().flatten().tolist()[:EXAMPLES]
        yield name if len(kinds) == 1 else f"{name} {kind}", made, examples


def _outline(panel: Axes, altered: Mask) -> None:
    """The border of the altered pixels; a frame of zeros closes it where they touch the edge."""
    if altered.any():
        y, x = (np.arange(-1, side + 1) for side in altered.shape)
        panel.contour(x, y, np.pad(altered, 1).astype(float), levels=[0.5], colors=ALTERED_LINE, linewidths=0.8)


def draw_rows(rows: dict[str, Images], path: Path, title: str) -> None:
    """A row of images under each name; they need not be of one size."""
    columns = max(1, *(len(images) for images in rows.values()))
    figure = Figure(figsize=(1.5 * columns + 0.5, 1.5 * len(rows) + 0.5), layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False)
    figure.suptitle(title, fontsize=9)
    for panel in axes.flat:
        panel.axis("off")
    for panels, (name, images) in zip(axes, rows.items(), strict=True):
        panels[0].text(-0.05, 0.5, name, rotation=90, ha="right", va="center", transform=panels[0].transAxes)
        for panel, image in zip(panels, images, strict=False):
            panel.imshow(_pixels(image))
    save_figure(figure, path)


def draw_masks(
    images: Images, masks: Masks, rule: Rule, path: Path, title: str, ignored: Bool[Tensor, "h w"] | None = None
) -> None:
    """Up to 12 evenly spaced images, the object outlined, the background dimmed, ignored pixels red."""
    if not len(images):
        raise SettingError("there is no image to draw a mask of; give at least one")
    chosen = torch.linspace(0, len(images) - 1, min(MASKS, len(images))).round().long().tolist()
    columns = min(MASK_COLUMNS, len(chosen))
    rows = -(-len(chosen) // columns)
    figure = Figure(figsize=(max(4.0, 1.9 * columns), 1.9 * rows + 0.9), layout="constrained")  # room for the text
    hidden = "" if ignored is None else f", ignored (red): {ignored.float().mean():.1%}"
    share = f"foreground: {masks.float().mean():.1%} of the pixels{hidden}"
    figure.suptitle(f"{title}\n{_describe(rule)}\n{share}", fontsize=9)
    for number, index in enumerate(chosen):
        panel, mask = figure.add_subplot(rows, columns, number + 1), masks[index].cpu().numpy()
        panel.axis("off")
        panel.imshow(masked(images[index], mask, None if ignored is None else ignored.cpu().numpy()))
        if not mask.all() and mask.any() and min(mask.shape) > 1:  # else there is no outline to draw
            panel.contour(mask, levels=[0.5], colors=FOREGROUND_LINE, linewidths=0.8)
    save_figure(figure, path)


def masked(image: UInt8[Tensor, "c h w"], mask: Mask, ignored: Mask | None) -> Pixels:
    """The image with a dim background and red where pixels are ignored."""
    shown = (_pixels(image) * np.where(mask, 1.0, DIMMED)[..., None]).astype(np.uint8)
    if ignored is not None:
        shown[ignored] = (shown[ignored] + np.array(IGNORED)) // 2
    return shown


def _describe(rule: Rule) -> str:
    if rule.method == "ones":
        return "no rule: all of the image is foreground"
    squares = [f"{name} {side}" for name, side in (("close", rule.close), ("open", rule.open)) if side]
    return ", ".join([f"{rule.method} on {rule.channel}, {rule.polarity} is foreground", *squares])


@dataclass(frozen=True)
class Part:
    """One inspected part."""

    image: npt.NDArray[np.uint8]
    score: float
    kind: str  # of defect, or good
    heat: npt.NDArray[np.float32] | None  # a score per pixel, for a detector that locates
    name: str  # by which a person finds the file
    marked: Mask | None = None  # its regions, in the pixels of the heat


def draw_parts(parts: list[Part], threshold: float, path: Path, *, title: str) -> None:
    """Each part with its score, framed in red above the threshold, its heat map below it."""
    rows = -(-len(parts) // PART_COLUMNS)
    tall = 3.5 if any(part.heat is not None for part in parts) else 1.95
    figure = Figure(figsize=(1.55 * PART_COLUMNS, tall * rows + 0.5), layout="constrained")
    figure.suptitle(f"{title} (threshold {threshold:.3f})")
    axes = figure.subplots(rows, PART_COLUMNS, squeeze=False)
    for panel in axes.flat:
        panel.axis("off")
    for panel, part in zip(axes.flat, parts, strict=False):
        colour = CALLED if part.score > threshold else PASSED
        heat = [] if part.heat is None else [overlay(part.image, part.heat, threshold, marked=part.marked)]
        shown = np.vstack([part.image, *heat])
        panel.imshow(shown)
        height, width = shown.shape[:2]
        panel.add_patch(Rectangle((-1, -1), width + 1, height + 1, fill=False, edgecolor=colour, linewidth=4))
        panel.set_title(f"{part.score:.3f}  {part.kind}", fontsize=8, color=colour)
        below = {"fontsize": 6, "ha": "center", "va": "top", "parse_math": False, "transform": panel.transAxes}
        panel.text(0.5, -0.02, part.name, **below)
    save_figure(figure, path)
