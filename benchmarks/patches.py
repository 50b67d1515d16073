"""What synthesis adds to a training step on patches, and what a dense pass saves: ratios measured in one run.

    python benchmarks/patches.py [--threads 1]

1. Making the outliers of a batch over the whole training step, for every source, with each outlier used 16 times as the
   `inspect` preset does: at most 0.15.
2. Features of all patches of an image cut and embedded one by one, over those of one pass over the image.
3. A Perlin mask and a donor outlier against one bare forward pass of the encoder over 64 patches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from training_step import in_turn

from firm.allocator import keep_freed_memory
from firm.data.drawn import drawn
from firm.encoder import Network, ResNet18, build
from firm.fitting import looker_of, task_of
from firm.foreground import automatic
from firm.images import Preprocessing, resize
from firm.outliers import Donor
from firm.outliers.perlin import perlin_mask
from firm.recipes.presets import INSPECT
from firm.recipes.recipe import Recipe, change
from firm.streams import stream
from firm.training import start, train
from firm.types import OneClass

SOURCES: dict[str, object] = {name: name for name in ("donor", "nsa", "cutpaste-union")} | {
    "six kinds": INSPECT.outliers
}
STEPS = 24


def recipe_for(data: OneClass, changes: dict[str, object]) -> Recipe:
    recipe = change(INSPECT, {"automatic": [], "conditioning.foreground": automatic(data.train)} | changes)
    return change(recipe, {"outliers.per_inlier": 1})


def share_of_synthesis(data: OneClass, source: object) -> float:
    """Seconds in the outlier source over seconds of the steps; the first steps fill the window and do not count."""
    task = task_of(recipe_for(data, {"outliers": source}), data, seed=0)
    spent = 0.0
    make = task.replay._make

    def timed_make(number: int):
        nonlocal spent
        begin = time.perf_counter()
        made = make(number)
        spent += time.perf_counter() - begin
        return made

    task.replay._make = timed_make
    steps = train(start(INSPECT.encoder, task.training, seed=0), task)
    for _ in range(3):
        next(steps)
    spent, begin = 0.0, time.perf_counter()
    for _ in range(STEPS):
        next(steps)
    return spent / (time.perf_counter() - begin)


def dense_against_exact(network: Network, image: torch.Tensor, stride: int) -> None:
    def look(dense: bool) -> Callable[[], object]:
        recipe = change(INSPECT, {"tiling.stride": stride, "tiling.dense": dense, "features": "encoder"})
        looker = looker_of(recipe, network, Preprocessing(256), grey=True)
        return lambda: looker(image)

    exact, dense = in_turn(5, look(False), look(True))
    print(f"stride {stride}: patch by patch / one dense pass = {exact / dense:.1f}")


def synthesis_against_encoder(encoder: ResNet18, data: OneClass) -> None:
    patches, rng = torch.zeros(64, 3, 32, 32), np.random.default_rng(0)
    donor, images = Donor(), data.train[:8]
    with torch.no_grad():
        mask, outlier, forward = in_turn(
            9,
            lambda: perlin_mask(256, 256, rng=rng),
            lambda: donor(images[:1], rng=stream(0, "benchmark")),
            lambda: encoder(patches),
        )
    print(f"a Perlin mask / forward pass over 64 patches = {mask / forward:.3f}")
    print(f"a donor outlier of 256 px / forward pass over 64 patches = {outlier / forward:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    keep_freed_memory()
    data, _ = drawn("plate", train=40, good=1, bad=1)
    data = OneClass(data.name, resize(data.train, 256), data.test, data.anomalous, 256)
    network = build(INSPECT.encoder, rng=stream(0, "weights")).eval()
    for name, source in SOURCES.items():
        share = share_of_synthesis(data, source)
        print(f"{name}: synthesis / training step = {share:.3f} (target: at most 0.15)")
    for stride in (16, 8):
        dense_against_exact(network, data.train[:1], stride)
    synthesis_against_encoder(network.encoder, data)


if __name__ == "__main__":
    main()
