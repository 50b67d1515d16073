"""The loss landscape of three positive sets: where on the circle each of them wants inliers and outliers.

The paper's figure shows the landscape of Equation 5 under the positive sets of Equations 2 to 4 and does not say over
which two parameters. Here they are the two that its properties are about: inliers lie evenly on an arc around 0 and
outliers on an arc around the opposite point, and the axes are the widths of the arcs. The two views of an image
coincide; batch, share of inliers and temperature are the paper's.
"""

from itertools import product
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from firm.report.sheets import save_figure
from firm.research.mechanism import LABELS, draw_circle
from firm.runtime.listener import Listener
from firm.training.positives import POSITIVES, contrastive_loss

SETS = {"ntxent": "Equation 2", "supcon": "Equation 3", "firm": "Equation 4"}
INLIERS, OUTLIERS, TEMPERATURE = 8, 24, 0.2  # of a batch of 32 with three rotations of every inlier
GRID, COARSE = 73, 13  # points along an axis; the coarse grid is for a smoke test
LEVELS = 25


def configuration(inlier_arc: float, outlier_arc: float) -> Float[Tensor, "b 2"]:
    """Unit vectors of a batch, first views then second, with inliers and outliers on arcs of these widths."""
    inliers = inlier_arc * _evenly(INLIERS)
    outliers = torch.pi + outlier_arc * _evenly(OUTLIERS)
    angles = torch.cat([inliers, outliers]).repeat(2)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def _evenly(count: int) -> Float[Tensor, " n"]:
    """Midpoints of as many equal parts of the interval from -1/2 to 1/2: a full circle has no two at one place."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count - 0.5


def landscape(positives: str, arcs: Float[Tensor, " g"]) -> Float[Tensor, "g g"]:
    """The loss by width of the outliers' arc (rows) and of the inliers' arc (columns)."""
    source = torch.arange(INLIERS + OUTLIERS).repeat(2)
    positive = POSITIVES[positives](source, (source >= INLIERS).long())
    batches = (configuration(inner, outer) for outer, inner in product(arcs.tolist(), repeat=2))
    losses = [contrastive_loss(z, positive, TEMPERATURE) for z in batches]
    return torch.stack(losses).reshape(len(arcs), len(arcs))


def draw_landscape(out: Path, *, scale: str, seeds: list[int], folder: Path, listener: Listener) -> list[Path]:
    """One panel per positive set, its minimum marked, and the batch at the minimum below it; nothing is random."""
    arcs = torch.linspace(0, 2 * torch.pi, COARSE if scale == "smoke" else GRID, dtype=torch.float64)
    degrees = np.rad2deg(arcs.numpy())
    figure = Figure(figsize=(12, 6.6), layout="constrained")
    axes = figure.subplots(2, len(SETS), height_ratios=(2.2, 1))
    for number, (name, equation) in enumerate(SETS.items()):
        values = landscape(name, arcs)
        outer, inner = divmod(int(values.argmin()), len(arcs))
        place = axes[0][number]
        filled = place.contourf(degrees, degrees, values.numpy(), LEVELS, cmap="cividis")
        place.contour(degrees, degrees, values.numpy(), LEVELS, colors="white", linewidths=0.3, alpha=0.6)
        place.plot(degrees[inner], degrees[outer], "*", color="white", markeredgecolor="black", markersize=16)
        place.set_title(f"({'abc'[number]}) {LABELS[name]}, {equation}", fontsize=11)
        place.set_xlabel("arc of the inliers, degrees", fontsize=9)
        place.set_ylabel("arc of the outliers, degrees" if not number else "", fontsize=9)
        place.tick_params(labelsize=8)
        place.set(xticks=range(0, 361, 90), yticks=range(0, 361, 90), xlim=(-8, 360), ylim=(-8, 360))
        figure.colorbar(filled, ax=place).ax.tick_params(labelsize=8)
        z = configuration(float(arcs[inner]), float(arcs[outer]))[: INLIERS + OUTLIERS]
        draw_circle(axes[1][number], {"inliers": z[:INLIERS], "outliers": z[INLIERS:]}, size=35)
        axes[1][number].set_title("the batch at the minimum ★", fontsize=9)
    path = out / "landscape.png"
    save_figure(figure, path)
    return [path]
