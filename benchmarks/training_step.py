"""What a training step costs beside its network: ratios measured in one run, never seconds.

    python benchmarks/training_step.py [--threads 1]

1. Our whole step (data, outliers, views, loss, logging) over the bare forward, backward and optimiser step of the same
   network on a ready batch: at most 1.15 at width 64 and 1.35 at width 16.
2. The bare step's rate of multiplications over this machine's float32 matrix product: at least 0.80 at width 64.

The two sides of a ratio take turns, so that a change of the machine's load meets both; the best of each is compared,
since load only ever adds. For the first ratio, where logging happens every tenth step, sums are compared instead.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from firm.detector.prepare import prepare
from firm.detector.read import as_data
from firm.networks.heads import Encoder, build
from firm.recipes.presets import PAPER
from firm.recipes.recipe import change
from firm.runtime.platform import keep_freed_memory
from firm.runtime.random import stream
from firm.training.loop import State, start

CIFAR_LIKE = torch.randint(0, 256, (512, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def multiplications(settings: Encoder) -> int:
    """Multiply-adds of one forward pass over one 32 px image, convolutions and linear layers."""
    total = 0

    def count(module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        nonlocal total
        weight = module.weight
        total += output[0].numel() * weight.numel() // weight.shape[0]

    network = build(settings, rng=stream(0, "weights")).eval()
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(count)
    with torch.no_grad():
        network(torch.zeros(1, 3, 32, 32))
    return total


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def in_turn(rounds: int, *calls: Callable[[], object]) -> list[float]:
    """Least seconds of each call, the calls taking turns after unmeasured ones that warm up the allocator."""
    for call in calls * 2:
        call()
    measured = [[timed(call) for call in calls] for _ in range(rounds)]
    return [min(column) for column in zip(*measured, strict=True)]


def bare_step(state: State, images: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        state.optimizer.zero_grad(set_to_none=True)
        state.network(images).square().mean().backward()
        state.optimizer.step()

    return step


def compare(width: int, rounds: int, target: float) -> None:
    """Steps of a real run, logging to a folder, and bare ones take turns; the sums are compared."""
    recipe = change(PAPER, {"encoder.width": width})
    prepared = prepare(recipe, as_data(CIFAR_LIKE), torch.arange(len(CIFAR_LIKE)), seed=0)
    with tempfile.TemporaryDirectory() as folder:
        run = prepared.run(folder=Path(folder), checkpoint_seconds=math.inf)
        steps = iter(run)
        bare = bare_step(run.state, prepared.task.batch(0).images.contiguous(memory_format=torch.channels_last))
        for _ in range(3):  # warm up the allocator
            next(steps)
            bare()
        measured = [(timed(lambda: next(steps)), timed(bare)) for _ in range(rounds)]
    ours, theirs = (sum(column) for column in zip(*measured, strict=True))
    print(f"width {width}: whole step / bare step = {ours / theirs:.3f} (target: at most {target})")


def matmul_share(rounds: int) -> None:
    settings = PAPER.encoder
    state = start(build(settings, rng=stream(0, "weights")), PAPER.training)
    images = torch.randn(64, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    left, right = torch.randn(2048, 2048), torch.randn(2048, 2048)
    step, product = in_turn(rounds, bare_step(state, images), lambda: left @ right)
    rate = 3 * 64 * multiplications(settings) / step  # a backward pass costs two forward ones
    share = rate / (2048**3 / product)
    print(f"width 64: bare step reaches {share:.2f} of the matrix product's rate (target: at least 0.80)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    matmul_share(arguments.rounds)
    compare(64, 20, 1.15)
    compare(16, 100, 1.35)


if __name__ == "__main__":
    main()
