"""What thresholds from folds cost: CPU seconds of a fit with folds / of one with a split, by the same code.

    python benchmarks/folds.py [--images 40] [--encoders efficientnet-lite0 wavelets] [--repeats 3]

Drawn plates of 256 px, after a small fit that loads what is loaded only once; fits take turns, and the quickest of each
kind counts, because other work on the machine slows a fit down by a tenth.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch

from firm.detector.fit import fit
from firm.detector.read import Options, as_data, read_good
from firm.drawn.render import draw_dataset
from firm.networks.weights import installed
from firm.recipes.presets import ADAPTED, WAVES
from firm.recipes.recipe import Recipe, change
from firm.runtime.platform import keep_freed_memory
from firm.types import OneClass

RECIPES = {recipe.pretrained.name: recipe for recipe in (ADAPTED, WAVES)}
SMALL = 12  # good images of the first fit
LIMIT = 2.0


def seconds(recipe: Recipe, data: OneClass, calibration: str) -> float:
    """CPU seconds of a fit."""
    began = time.process_time()
    fit(read_good(data, recipe, Options(calibration=calibration)))
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--encoders", nargs="+", default=[name for name in RECIPES if installed(name)])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    warnings.simplefilter("ignore")
    data = as_data(draw_dataset("plate", size=256, train=options.images, good=1, bad=1).train)
    for name in options.encoders:
        seconds(change(RECIPES[name], {"training.epochs": 1}), as_data(data.train[:SMALL]), "split")
        took = [[seconds(RECIPES[name], data, way) for way in ("folds", "split")] for _ in range(options.repeats)]
        folds, split = map(min, zip(*took, strict=True))
        print(f"{name}, {options.images} plates: folds / split = {folds / split:.2f} (target: at most {LIMIT:g})")


if __name__ == "__main__":
    main()
