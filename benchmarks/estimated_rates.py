"""How well estimated false-call rates are kept: a simulation of thresholds from folds.

    python benchmarks/estimated_rates.py [--repeats 100] [--out docs/results/estimated-rates.md]

A detector learns from all good parts, and its thresholds come from the scores that models of the other folds give to
each part. No theorem covers that. Here a part is a point, a score its distance to the nearest learnt part, and good
parts come from a normal or a heavy-tailed distribution, so that the true rate of every calibration can be measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure

from firm.data.splits import folds_by_part
from firm.decision.calibration import FOLDS, calibration_of
from firm.decision.drift import drift
from firm.detector.fit import FOLDS as NUMBER_OF_FOLDS
from firm.runtime.random import stream

SIZES = (5, 10, 20, 40, 80, 160)
NEW, BATCH = 400, 60  # new good parts that a calibration is judged on; parts of an inspected batch
WORLDS = {  # how good parts vary -> dimensions and degrees of freedom (0: a normal distribution)
    "normal, 4 dimensions": (4, 0),
    "normal, 32 dimensions": (32, 0),
    "heavy tails, 4 dimensions": (4, 3),
    "heavy tails, 32 dimensions": (32, 3),
}
PAGE = """# Estimated rates, simulated

Written by `python benchmarks/estimated_rates.py --repeats {repeats} --out {out}`.

With frozen features `firm fit` learns from every good image and sets its thresholds on out-of-fold scores. The rates it
states are estimates, because the models that scored the images are not the detector. This page measures how far they
are off where the truth is known: a part is a random point, its score the distance to the nearest learnt point, and
{new} new good parts judge each of {repeats} calibrations. {folds} folds; default rates.

![Stated and realised rates over the number of good parts]({picture})

{table}

`above` is the share of calibrations whose realised rate lies above their stated 95 % confidence bound. `drift` is the
share of batches of {batch} new good parts that are reported as drifted, where at most 1 % is stated; `-` where the
reference is too small to show drift.

Out-of-fold scores come from models that know fewer parts, so they lie slightly higher than the detector's, and the
realised rates slightly below the stated ones. What this leaves out: the adaptor of each fold is trained by itself, so
the scale of its scores varies too. [Few images](few.md) measures that on real detectors.
"""
HEAD = (
    "good parts vary",
    "parts",
    "not PASS: stated",
    "realised",
    "above",
    "FAIL: stated",
    "realised",
    "above",
    "drift",
)


def parts_of(world: str, count: int, rng: torch.Generator) -> torch.Tensor:
    dimensions, freedom = WORLDS[world]
    points = torch.randn(count, dimensions, generator=rng)
    if freedom:
        squares = torch.randn(count, freedom, generator=rng).square().mean(1, keepdim=True)
        points = points / squares.sqrt()
    return points


def out_of_fold(points: torch.Tensor, seed: int) -> torch.Tensor:
    """The distance of each point to the nearest one of another fold."""
    fold = folds_by_part(torch.arange(len(points)), NUMBER_OF_FOLDS, seed=seed)
    return torch.cdist(points, points).masked_fill(fold[:, None] == fold, torch.inf).amin(1)


def one(world: str, count: int, seed: int) -> list[float]:
    """Stated and realised rates of one calibration, whether each is above its bound, and whether drift is reported."""
    rng = stream(seed, "simulation", world, count)
    points = parts_of(world, count, rng)
    by = calibration_of(out_of_fold(points, seed), model="simulated", basis=FOLDS)
    new = torch.cdist(parts_of(world, NEW + BATCH, rng), points).amin(1).double()
    values = []
    for limit, stated in ((by.review, by.reviewed.kept), (by.fail, by.failed.kept)):
        realised, bound = float((new[:NEW] > limit).double().mean()), by.upper_bound(limit)
        values += [stated, realised, float(bound is not None and realised > bound)]
    moved = drift(new[NEW:], torch.tensor(by.scores), estimated=True)
    return [*values, float(moved.moved) if moved.enough else float("nan")]


def measured(repeats: int) -> dict[tuple[str, int], torch.Tensor]:
    return {
        (world, count): torch.tensor([one(world, count, seed) for seed in range(repeats)]).mean(0)
        for world in WORLDS
        for count in SIZES
    }


def row(world: str, count: int, values: torch.Tensor) -> str:
    cells = [world, str(count), *("-" if value.isnan() else f"{100 * value:.1f} %" for value in values)]
    return "| " + " | ".join(cells) + " |"


def draw(means: dict[tuple[str, int], torch.Tensor], path: Path) -> None:
    figure = Figure(figsize=(8, 3.4))
    for axes, title, at in zip(figure.subplots(1, 2), ("REVIEW or FAIL", "FAIL"), (0, 3), strict=True):
        stated = [100 * float(means[next(iter(WORLDS)), count][at]) for count in SIZES]
        axes.plot(SIZES, stated, color="black", linewidth=2, label="stated")
        for number, world in enumerate(WORLDS):
            realised = [100 * float(means[world, count][at + 1]) for count in SIZES]
            axes.plot(SIZES, realised, "o--", color=f"C{number}", markersize=4, label=world)
        axes.set(xscale="log", xlabel="good parts", ylabel="% of new good parts", title=title, ylim=(0, None))
        axes.set_xticks(SIZES, [str(count) for count in SIZES])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    means = measured(options.repeats)
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    lines += [row(world, count, values) for (world, count), values in means.items()]
    print("\n".join(lines))
    print(f"repeats = {options.repeats}")
    if options.out:
        picture = options.out.with_suffix(".png")
        draw(means, picture)
        facts = {"repeats": options.repeats, "out": options.out.as_posix(), "new": NEW, "batch": BATCH}
        facts |= {"folds": NUMBER_OF_FOLDS, "picture": picture.name, "table": "\n".join(lines)}
        options.out.write_text(PAGE.format(**facts), encoding="utf-8")


if __name__ == "__main__":
    main()
