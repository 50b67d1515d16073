"""How the cost of scoring grows with the bank, the image, the batch and the threads: ratios of one run.

    python benchmarks/growth.py [--full] [--threads 1 2] [--out docs/results/growth.md]

Random unit features, because the search costs the same whatever they are; images of noise through the backbone of
`firm fit`, and a bank of a few patches for every place of their grid. CPU time, the best of several rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure

from firm.networks.backbone import Backbone
from firm.networks.weights import load_backbone
from firm.recipes.presets import ADAPTED
from firm.runtime.platform import keep_freed_memory, peak_megabytes, reset_peak
from firm.scoring.knn import unit
from firm.scoring.memory import Memory
from firm.scoring.patch_bank import Bank
from firm.scoring.patch_features import cell_features

DIM, CELL, REACH = 64, 8, 2  # numbers of a patch; px of a place; places around a patch it is compared with
KEPT = 4  # patches at each place where images and batches grow
PATCHES, SIDES, BATCHES = (10**4, 10**5, 10**6), (256, 512, 1024, 2048, 4096), (1, 4, 16, 64)
SHORT = 2  # of patches and sides, without --full
PAGE = """# Growth

Written by `{command}`.

What one image costs as bank, image and batch grow, over the first row of each table: CPU time of one run, on one
thread, with the backbone of `firm fit` ({backbone}), random features of {dim} numbers and, but in the first table,
{kept} patches for each place. `near` compares a patch with those at most {reach} places away, `all` with every patch;
`firm fit` keeps a coreset, so a bank does not grow with the good images.

![Cost over the size of bank, image and batch]({picture})

{tables}

`python benchmarks/growth.py --threads 1 2` adds threads, on a machine that nobody else uses: a thread that waits for
another takes CPU time, too.
"""


@dataclass(frozen=True)
class Curve:
    """Costs over a size."""

    title: str
    head: tuple[str, ...]  # the size, then what is measured
    rows: list[tuple[float, ...]]

    @property
    def table(self) -> str:
        lines = ["| " + " | ".join(self.head) + " |", "|" + " --- |" * len(self.head)]
        lines += [
            "| "
            + " | ".join(
                [f"{row[0]:,.0f}", *(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in row[1:])]
            )
            + " |"
            for row in self.rows
        ]
        return "\n".join([f"## {self.title}", "", *lines])


def best(call: Callable[[], object], rounds: int = 3, clock: Callable[[], float] = time.process_time) -> float:
    """Milliseconds."""
    times = []
    for _ in range(rounds):
        begin = clock()
        call()
        times.append(1000 * (clock() - begin))
    return min(times)


def bank_of(patches: int, side: int, reach: int) -> Bank:
    """About so many patches, equally many at each place of a square grid."""
    places = side * side
    each = max(1, patches // places)
    where = {"image": torch.arange(each).repeat(places), "cell": torch.arange(places).repeat_interleave(each)}
    flat = torch.ones(side, side)
    tensors = {"vectors": unit(torch.randn(each * places, DIM)), **where, "mean": 0 * flat, "deviation": flat}
    return Bank(Memory(neighbourhood=reach), tensors)


def by_bank(sizes: tuple[int, ...]) -> Curve:
    side, rows = SIDES[0] // CELL, list[tuple[float, ...]]()
    image = torch.randn(1, side, side, DIM)
    for size in sizes:
        costs = []
        for reach in (REACH, -1):
            bank = bank_of(size, side, reach)
            bank.score(image)  # plans once
            costs.append(best(lambda bank=bank: bank.score(image)))
        rows.append((size, *costs))
    relative = [(size, near, near / rows[0][1], every, every / rows[0][2]) for size, near, every in rows]
    return Curve("Patches in the bank", ("patches", "near, ms", "ratio", "all, ms", "ratio"), relative)


@dataclass(frozen=True)
class Scoring:
    """Images of noise to scores of their patches."""

    backbone: Backbone
    bank: Bank

    @classmethod
    def of(cls, backbone: Backbone, side: int) -> Scoring:
        cells = side // CELL
        return cls(backbone, bank_of(KEPT * cells * cells, cells, REACH))

    def __call__(self, images: torch.Tensor) -> None:
        features = cell_features(self.backbone, ADAPTED.pretrained, ADAPTED.grid, images)
        self.bank.score(features[..., :DIM])


def noise(count: int, side: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)


def by_side(backbone: Backbone, sides: tuple[int, ...]) -> Curve:
    rows = list[tuple[float, ...]]()
    for side in sides:
        score, image = Scoring.of(backbone, side), noise(1, side)
        score(image)
        reset_peak()
        cost = best(lambda score=score, image=image: score(image), rounds=3 if side <= 1024 else 1)
        first = rows[0] if rows else (side, cost)
        rows.append((side, cost, cost / first[1], cost / first[1] / (side / first[0]) ** 2, peak_megabytes() or 0))
    return Curve("Image", ("px a side", "ms", "ratio", "ratio per pixel", "peak MB"), rows)


def by_batch(backbone: Backbone, side: int = 256) -> Curve:
    score, rows = Scoring.of(backbone, side), list[tuple[float, ...]]()
    for size in BATCHES:
        images = noise(size, side)
        cost = best(lambda images=images: score(images)) / size
        rows.append((size, cost, cost / (rows[0][1] if rows else cost)))
    return Curve("Batch of 256 px", ("images", "ms each", "ratio"), rows)


def by_threads(backbone: Backbone, counts: list[int], side: int = 512) -> Curve:
    score, image, rows = Scoring.of(backbone, side), noise(1, side), list[tuple[float, ...]]()
    for threads in counts:
        torch.set_num_threads(threads)
        cpu = best(lambda: score(image), 5)
        wall = best(lambda: score(image), 10, time.perf_counter)
        first = rows[0] if rows else (threads, cpu, 1.0, wall)
        rows.append((threads, cpu, cpu / first[1], wall, wall / first[3]))
    torch.set_num_threads(1)
    return Curve("Threads, at 512 px", ("threads", "CPU ms", "ratio", "wall ms", "ratio"), rows)


def draw(curves: list[Curve], path: Path) -> None:
    figure = Figure(figsize=(9, 3))
    for axes, curve in zip(figure.subplots(1, len(curves)), curves, strict=True):
        for at, name in enumerate(curve.head):
            if "ms" in name:
                axes.plot([row[0] for row in curve.rows], [row[at] for row in curve.rows], "o-", label=name)
        sizes, top = [row[0] for row in curve.rows], max(max(row[1:]) for row in curve.rows)
        axes.set(xscale="log", yscale="log", xlabel=curve.head[0], title=curve.title, ylim=(1, 3 * top))
        axes.set_xticks(sizes, [f"{size:.0f}" if size < 10_000 else f"{size:.0e}" for size in sizes], fontsize=7)
        axes.minorticks_off()
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    backbone = load_backbone(ADAPTED.pretrained.name, deepest=4)
    most = None if options.full else SHORT
    curves = [by_bank(PATCHES[:most]), by_side(backbone, SIDES[:most]), by_batch(backbone)]
    threads = [by_threads(backbone, options.threads)] if options.threads != [1] else []
    tables = "\n\n".join(curve.table for curve in [*curves, *threads])
    print(tables)
    print(f"sizes = {'all' if options.full else 'the first'}")
    if options.out:
        picture = options.out.with_suffix(".png")
        draw(curves, picture)
        facts = {"command": " ".join(["python", *sys.argv]), "backbone": backbone.facts.name, "tables": tables}
        facts |= {"dim": DIM, "kept": KEPT, "reach": REACH, "picture": picture.name}
        options.out.write_text(PAGE.format(**facts), encoding="utf-8")


if __name__ == "__main__":
    main()
