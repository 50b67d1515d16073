"""What synthetic defects add to a training step on patches: ratios measured in one run.

    python benchmarks/patches.py [--threads 1]

1. Making the outliers of a batch over the whole training step, for every source, with each outlier used 16 times as the
   `inspect` preset does: at most 0.15.
2. A Perlin mask and a blended outlier against one bare forward pass of the encoder over 64 patches.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np
import torch
from training_step import in_turn

from firm.detector.prepare import prepare
from firm.drawn.render import draw_dataset
from firm.images.foreground import automatic
from firm.images.preprocess import resize
from firm.networks.heads import build
from firm.networks.resnet import ResNet
from firm.outliers.perlin_blend import perlin_mask
from firm.outliers.registry import PerlinBlend
from firm.recipes.presets import INSPECT
from firm.recipes.recipe import change
from firm.runtime.platform import keep_freed_memory
from firm.runtime.random import stream
from firm.types import OneClass

SOURCES: dict[str, object] = {name: name for name in ("perlin-blend", "nsa", "cutpaste-union")} | {
    "six kinds": INSPECT.outliers
}
STEPS = 24


def share_of_synthesis(data: OneClass, source: object) -> float:
    """Seconds in the outlier source over seconds of the steps; the first steps fill the buffer and do not count."""
    recipe = change(INSPECT, {"automatic": (), "conditioning.foreground": automatic(data.train), "outliers": source})
    recipe = change(recipe, {"outliers.per_inlier": 1})
    run = prepare(recipe, data, torch.arange(len(data.train)), seed=0).run(log_every=1000)
    spent, make = 0.0, run.task.buffer._make

    def timed_make(number: int):
        nonlocal spent
        begin = time.perf_counter()
        made = make(number)
        spent += time.perf_counter() - begin
        return made

    run.task.buffer._make = timed_make
    steps = iter(run)
    for _ in range(3):
        next(steps)
    spent, begin = 0.0, time.perf_counter()
    for _ in range(STEPS):
        next(steps)
    return spent / (time.perf_counter() - begin)


def synthesis_against_encoder(encoder: ResNet, data: OneClass) -> None:
    patches, rng = torch.zeros(64, 3, 32, 32), np.random.default_rng(0)
    blend, images = PerlinBlend(), data.train[:8]
    with torch.no_grad():
        mask, outlier, forward = in_turn(
            9,
            lambda: perlin_mask(256, 256, rng=rng),
            lambda: blend(images[:1], rng=stream(0, "benchmark")),
            lambda: encoder(patches),
        )
    print(f"a Perlin mask / forward pass over 64 patches = {mask / forward:.3f}")
    print(f"a blended outlier of 256 px / forward pass over 64 patches = {outlier / forward:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    keep_freed_memory()
    data = draw_dataset("plate", train=40, good=1, bad=1)
    data = replace(data, train=resize(data.train, 256), size=256)
    for name, source in SOURCES.items():
        share = share_of_synthesis(data, source)
        print(f"{name}: synthesis / training step = {share:.3f} (target: at most 0.15)")
    synthesis_against_encoder(build(INSPECT.encoder, rng=stream(0, "weights")).eval().encoder, data)


if __name__ == "__main__":
    main()
