"""The mechanism in seconds: four positive sets on a Gaussian mixture, and the paper's three properties of each.

The paper's semantic experiment without images: half of the modes in 32 dimensions are the normal class, synthetic
outliers are inliers turned by quarters, unseen anomalies come from the other modes. An MLP maps them onto the sphere in
32 dimensions, and onto the circle for the picture. Loop, loss, batch and temperature are the package's and the paper's.
A property is 0 where there is none of it, and 1 for inliers at one point or pairs as far apart as random directions; it
counts as held above one half. `firm.research.figures` lists what shows and what does not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Generator, Tensor, nn

from firm.metrics.image import auroc, mean_std
from firm.report.sheets import save_figure
from firm.runtime.files import write_atomically
from firm.runtime.listener import Listener
from firm.runtime.random import stream
from firm.scoring.image_scores import Knn
from firm.scoring.knn import unit
from firm.training.loop import Training, start, train
from firm.training.methods import Contrastive, properties
from firm.types import Batch

LABELS = {"ntxent": "NT-Xent", "supcon": "SupCon", "rot-supcon": "Rot-SupCon", "firm": "FIRM"}
# Okabe and Ito's colours, which colour-blind readers tell apart
COLOURS = {"ntxent": "#0072B2", "supcon": "#D55E00", "rot-supcon": "#CC79A7", "firm": "#009E73"}
PROPERTIES = {"compactness": "inlier compactness", "margin": "margin", "outlier_spread": "outlier spread"}
MEASURES = PROPERTIES | {"kind_spread": "spread within a kind", "auroc": "AUROC, unseen anomalies"}
HELD = 0.5  # a property above it counts as held
INPUTS = {"inputs": "raw inputs"}
SORTS = ("reference", "inliers", "outliers", "anomalies")  # the first are inliers to be scored against
RINGS = {"inliers": ("#000000", 1.0), "outliers": ("#E69F00", 1.16), "anomalies": ("#56B4E9", 1.32)}

DIMENSIONS, MODES, TURNS = 32, 4, 3
NOISES = (0.5, 1.0, 1.5)  # of a mode; the centres of the modes have deviation 1 in every dimension
VIEW_NOISE = 0.5
STEPS, WIDTH, OUT = 600, 64, (32, 2)
IMAGES = 400  # test points of each sort
KINDS = torch.arange(IMAGES) % TURNS + 1  # of the outliers among them
TRAINING = Training(epochs=1, lr=0.05, warmup=0.05)

Embedded = dict[str, Float[Tensor, "n d"]]  # by sort
Seeds = list[dict[str, float]]  # what was measured, seed by seed
Cell = tuple[int, float, str]  # dimensions of the sphere, noise, positive set


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Batches of the mixture of one seed; a quarter of every batch are inliers, as with three rotations."""

    seed: int
    noise: float = 1.0
    steps_per_epoch: int = STEPS
    training: Training = TRAINING

    def draw(self, count: int, rng: Generator, *, anomalous: bool = False) -> Float[Tensor, "n d"]:
        """Points of the normal modes, or of the modes that no training sees."""
        centres = torch.randn(2 * MODES, DIMENSIONS, generator=stream(self.seed, "centres"))
        mode = torch.randint(MODES, (count,), generator=rng) + MODES * anomalous
        return centres[mode] + self.noise * torch.randn(count, DIMENSIONS, generator=rng)

    def batch(self, step: int, device: torch.device | str = "cpu", *, rank: int = 0, world: int = 1) -> Batch:
        rng, count = stream(self.seed, "batch", step), self.training.batch
        group = torch.arange(count) % (TURNS + 1)
        points = turned(self.draw(count, rng), group).repeat(2, 1)
        views = points + VIEW_NOISE * torch.randn(points.shape, generator=rng)
        return Batch(views.to(device), torch.arange(count).repeat(2), group.repeat(2))


def turned(points: Float[Tensor, "n d"], quarters: Int[Tensor, " n"]) -> Float[Tensor, "n d"]:
    """Each point turned by so many quarters in the planes that pair its first half with its second."""
    first, second = points.chunk(2, dim=1)
    quarter = torch.cat([-second, first], dim=1)
    return torch.stack([points, quarter, -points, -quarter])[quarters, torch.arange(len(points))]


def embed(mixture: Mixture, positives: str, out: int) -> Embedded:
    """Unit vectors of points that the training has not seen; the positive set `inputs` leaves them as drawn."""
    rng, encoder = stream(mixture.seed, "test"), nn.Sequential()
    points = {name: mixture.draw(IMAGES, rng, anomalous=name == "anomalies") for name in SORTS}
    points["outliers"] = turned(points["outliers"], KINDS)
    if positives != "inputs":
        encoder, method = _mlp(out, stream(mixture.seed, "weights")), Contrastive(positives, TRAINING.temperature)
        for _ in train(start(encoder, mixture.training), mixture, method):
            pass
    with torch.no_grad():
        return {name: unit(encoder(part)) for name, part in points.items()}


def _mlp(out: int, rng: Generator) -> nn.Sequential:
    linear = nn.Linear(DIMENSIONS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, out)
    for layer in linear:
        nn.init.kaiming_normal_(layer.weight, generator=rng)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(linear[0], nn.ReLU(), linear[1], nn.ReLU(), linear[2])


def measure(z: Embedded) -> dict[str, float]:
    """The three properties, the outlier spread within one kind, and AUROC (s_con, k = 1) on unseen anomalies."""

    def spread(vectors: Float[Tensor, "n d"], group: Int[Tensor, " n"]) -> dict[str, float]:
        numbers, _ = properties(vectors, torch.arange(len(group)), group)
        return {name: value for name, value in numbers.items() if value is not None}

    values = spread(torch.cat([z["inliers"], z["outliers"]]), torch.cat([0 * KINDS, KINDS]))
    of_kinds = [spread(z["outliers"][kind::TURNS], KINDS[kind::TURNS]) for kind in range(TURNS)]
    scores = Knn(k=1).fit(z["reference"])(torch.cat([z["inliers"], z["anomalies"]]))
    found = auroc(scores, torch.arange(2 * IMAGES) >= IMAGES)
    return values | {"kind_spread": fmean(kind["outlier_spread"] for kind in of_kinds), "auroc": found}


def draw_mechanism(out: Path, *, scale: str, seeds: list[int], folder: Path, listener: Listener) -> list[Path]:
    """Train every positive set on every seed; write mechanism.png and the table mechanism.md."""
    noises, steps = (NOISES[1:2], 60) if scale == "smoke" else (NOISES, STEPS)
    names = {size: [*LABELS, *INPUTS] if size == OUT[0] else [*LABELS] for size in OUT}
    cells = [(size, noise, name) for size in OUT for noise in noises for name in names[size]]
    report, values = listener.count("mechanism", len(cells)), dict[Cell, Seeds]()
    for size, noise, name in cells:
        mixtures = [Mixture(seed=seed, noise=noise, steps_per_epoch=steps) for seed in seeds]
        values[size, noise, name] = [measure(embed(mixture, name, size)) for mixture in mixtures]
        report(1)
    figure = Figure(figsize=(14, 7.4), layout="constrained")
    grid = figure.add_gridspec(2, len(LABELS) * len(MEASURES), height_ratios=(1.15, 1))
    above = "unseen points on the circle, noise 1, first seed, each sort on a ring of its own"
    below = f"the sphere in {OUT[0]} dimensions, mean ± std of {len(seeds)} seeds; dotted: a property counts as held"
    figure.suptitle(f"Above: {above}. Below: {below}", fontsize=10)
    for number, name in enumerate(LABELS):
        z = embed(Mixture(seed=seeds[0], steps_per_epoch=steps), name, 2)
        place = figure.add_subplot(grid[0, len(MEASURES) * number : len(MEASURES) * (number + 1)])
        draw_circle(place, {sort: z[sort] for sort in RINGS}, size=7)
        place.set_title(LABELS[name], color=COLOURS[name], fontsize=11, fontweight="bold")
    for number, measured in enumerate(MEASURES):
        place = figure.add_subplot(grid[1, len(LABELS) * number : len(LABELS) * (number + 1)])
        _draw_bars(place, values, noises, measured)
    figure.legend(*place.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    save_figure(figure, out / "mechanism.png")
    write_atomically(out / "mechanism.md", _table(values).encode())
    return [out / "mechanism.png", out / "mechanism.md"]


def _draw_bars(place: Axes, values: Mapping[Cell, Seeds], noises: tuple[float, ...], measured: str) -> None:
    """A measure of every positive set at every noise, and where it is AUROC, that of the raw inputs."""
    for number, (name, label) in enumerate((LABELS | INPUTS).items()):
        stats = [mean_std([each[measured] for each in values[OUT[0], noise, name]]) for noise in noises]
        (means, deviations), at = zip(*stats, strict=True), np.arange(len(noises)) + 0.2 * (number - 1.5)
        if name in LABELS:
            place.bar(at, means, 0.19, yerr=deviations, color=COLOURS[name], label=label, error_kw={"lw": 0.8})
        elif measured == "auroc":
            place.hlines(means, at - 0.95, at - 0.05, colors="black", linestyles="dashed", label=label)
            place.set_ylim(0.5, 1.01)
    if measured in PROPERTIES:
        place.axhline(HELD, color="black", linewidth=0.8, linestyle="dotted")
    place.set_title(MEASURES[measured], fontsize=10)
    place.set_xticks(range(len(noises)), [f"noise {noise}" for noise in noises], fontsize=8)
    place.tick_params(axis="y", labelsize=8)


def draw_circle(place: Axes, points: Mapping[str, Float[Tensor, "_ 2"]], *, size: float) -> None:
    """Each sort of unit vectors on its ring, so that none hides another."""
    turn = np.linspace(0, 2 * np.pi, 200)
    for label, vectors in points.items():
        colour, radius = RINGS[label]
        place.plot(radius * np.cos(turn), radius * np.sin(turn), color="#cccccc", linewidth=0.6, zorder=0)
        x, y = (radius * vectors.numpy()).T
        place.scatter(x, y, s=size, color=colour, alpha=0.5, linewidths=0, label=label)
    place.legend(loc="center", fontsize=8, frameon=False, markerscale=(35 / size) ** 0.5)
    place.set_aspect("equal")
    place.axis("off")


def _table(values: Mapping[Cell, Seeds]) -> str:
    """Mean ± std over seeds, and in brackets how many seeds have a property."""

    def cell(name: str, seeds: Seeds) -> str:
        mean, deviation = mean_std([each[name] for each in seeds])
        held = f" ({sum(each[name] > HELD for each in seeds)}/{len(seeds)})" if name in PROPERTIES else ""
        return f"{mean:.2f} ± {deviation:.2f}{held}" if len(seeds) > 1 else f"{mean:.2f}"

    lines = [["sphere", "noise", "positive set", *MEASURES.values()], ["---"] * (3 + len(MEASURES))]
    for (size, noise, name), seeds in values.items():
        row = [f"{size}-D", str(noise), (LABELS | INPUTS)[name]]
        lines.append(row + [cell(measured, seeds) for measured in MEASURES])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
