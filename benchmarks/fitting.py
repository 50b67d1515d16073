"""A fit with thresholds and self-check over a fit as PatchCore (docs/reference/features.md): CPU seconds of one run.

    python benchmarks/fitting.py [--data plate mvtec:screw magnetic_tile kolektor] [--images 24]

The same files, after a small fit that loads what is loaded only once; --images plates are drawn. PatchCore's
fit, too, sets thresholds by folds; its bank alone is the second ratio.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path

import torch
from scoring import PATCHCORE

from firm.detector.detector import Detector
from firm.detector.prepare import prepare
from firm.detector.read import Options, read_good
from firm.detector.remember import remember
from firm.drawn.render import PRODUCTS, write_folder
from firm.recipes.presets import recipe_of, usual
from firm.recipes.recipe import Recipe
from firm.runtime.platform import keep_freed_memory, peak_megabytes, reset_peak

SIDE, SMALL = 256, 8
TARGET = 1.5


def fit(good: str, recipe: Recipe) -> float:
    """CPU seconds, from the files on."""
    begin = time.process_time()
    Detector.fit(good, recipe=recipe)
    return time.process_time() - begin


def remembered(good: str, recipe: Recipe) -> float:
    """CPU seconds of reading, embedding and remembering alone."""
    begin = time.process_time()
    read = read_good(good, recipe, Options())
    prepared = prepare(recipe, read.data, read.parts, seed=0, backbone=read.backbone)
    remember(recipe, prepared, prepared.trained(prepared.run()), {}, seed=0)
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", default=["plate"])
    parser.add_argument("--images", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    warnings.simplefilter("ignore")
    plain = recipe_of("adapted", [*PATCHCORE, "automatic=[]"])
    with tempfile.TemporaryDirectory() as name:
        write_folder(Path(name) / "small", "plate", size=SIDE, train=SMALL, good=1, bad=0)
        fit(str(Path(name) / "small"), plain)
        for data in options.data:
            good = str(Path(name) / data) if data in PRODUCTS else data
            if data in PRODUCTS:
                write_folder(Path(good), data, size=SIDE, train=options.images, good=1, bad=0)
            bank, patchcore = remembered(good, plain), fit(good, plain)
            reset_peak()
            ours = fit(good, usual())
            print(
                f"{data}: a fit / one as PatchCore = {ours / patchcore:.2f} (target: at most {TARGET:g}), "
                f"/ its bank alone = {ours / bank:.2f}; {ours:.0f} s of CPU, at most {peak_megabytes() or 0} MB"
            )


if __name__ == "__main__":
    main()
