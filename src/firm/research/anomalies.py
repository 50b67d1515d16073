"""A gallery of anomalies: the defects of a test set above synthetic ones of every local source and of rotations.

Drawn parts are always there; photographs of screws and magnetic tiles are added where FIRM_DATA holds them. Published
photographs have owners: look at their terms before you pass such a sheet on.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Bool, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from firm.data.registry import load
from firm.drawn.render import PRODUCTS, draw_dataset
from firm.errors import FirmError
from firm.images.foreground import rule_for
from firm.outliers.registry import OUTLIERS, make_outliers, scene_of, stream_name
from firm.report.sheets import save_figure
from firm.runtime.listener import Listener
from firm.runtime.random import stream
from firm.types import OneClass

SOURCES = ("cutpaste", "cutpaste-scar", "nsa", "perlin-blend", "scratches", "spots", "pits", "rotations")
PHOTOGRAPHS = ("mvtec:screw", "magnetic_tile")
SIDE, GOOD = 256, 24  # pixels, and good images that lend their pixels
OUTLINE, MARGIN = "#D55E00", 4  # colour, and pixels between an anomaly and its outline

Image = UInt8[Tensor, "c h w"]
Panel = tuple[str, Image, Bool[Tensor, "h w"] | None]  # title, image, altered pixels


def draw_gallery(out: Path, *, scale: str, seeds: list[int], folder: Path, listener: Listener) -> list[Path]:
    """Two rows per product: its test defects, and the synthetic ones on good images of the same product."""
    sets = list(_sets(scale == "smoke", listener))
    columns, height = len(SOURCES) + 1, 2 * len(sets)
    figure = Figure(figsize=(1.15 * columns, 1.36 * height), layout="constrained")
    axes = figure.subplots(height, columns, squeeze=False)
    for place in axes.flat:
        place.axis("off")
    for number, data in enumerate(sets):
        good: Panel = ("good", data.train[0], None)
        for row, panels in enumerate((_defects(data), _synthetic(data, seeds[0]))):
            for place, panel in zip(axes[2 * number + row], [good, *panels], strict=False):
                _show(place, panel)
            first, label = axes[2 * number + row][0], f"{data.name}\n{'synthetic' if row else 'test defects'}"
            first.text(-0.06, 0.5, label, rotation=90, ha="right", va="center", fontsize=7, transform=first.transAxes)
    path = out / "gallery.png"
    save_figure(figure, path)
    return [path]


def _sets(smoke: bool, listener: Listener) -> Iterator[OneClass]:
    for product in list(PRODUCTS)[: 1 if smoke else None]:
        yield draw_dataset(product, size=64 if smoke else SIDE, train=GOOD // 4 if smoke else GOOD, good=1, bad=8)
    for name in () if smoke else PHOTOGRAPHS:
        try:
            data = load(name, side=SIDE)
            yield replace(data, train=data.train[:GOOD])
        except FirmError as error:
            listener.detail(f"{name} is not shown: {error}")


def _defects(data: OneClass) -> list[Panel]:
    """Defects of the test set, one of every kind in turn."""
    if data.truth is None:
        return [("defect", image, None) for image in data.test[data.anomalous][: len(SOURCES)]]
    kinds, masks = data.truth.kinds, data.truth.masks
    bad = data.anomalous.nonzero().squeeze(1).tolist()
    turns = sorted(bad, key=lambda i: kinds[:i].count(kinds[i]))
    return [(kinds[i], data.test[i], masks[i]) for i in turns[: len(SOURCES)]]


def _synthetic(data: OneClass, seed: int) -> list[Panel]:
    """One synthetic anomaly of every source, each on a good image of its own."""
    scene, panels = scene_of(data.train, data.train, data.ignored, rule=rule_for(data.name, data.train)), []
    for number, name in enumerate(SOURCES):
        at = torch.tensor([number % len(data.train)])
        rng = stream(seed, "gallery", data.name, stream_name(name))
        made = make_outliers(OUTLIERS[name], data.train[at], rng=rng, scene=scene[at])
        panels.append((name, made.images[0], None if made.where is None else made.where[0]))
    return panels


def _show(place: Axes, panel: Panel) -> None:
    title, image, altered = panel
    place.imshow(image.expand(3, -1, -1).permute(1, 2, 0).numpy())
    if altered is not None and altered.any() and not altered.all():
        around = F.max_pool2d(altered[None].float(), 2 * MARGIN + 1, stride=1, padding=MARGIN)[0]
        place.contour(around.numpy(), levels=[0.5], colors=OUTLINE, linewidths=0.7)
    place.set_title(title.replace("_", " "), fontsize=7, pad=2)
