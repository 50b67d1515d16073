"""Neighbour search: against torch.cdist, and against the time of the embedding it follows.

    python benchmarks/neighbours.py [--threads 1]

10,000 test images, 5,000 references, 512 numbers each, k = 5. The search may cost at most 10 % of embedding the test
images at width 64. Both sides of each ratio are measured in this run.
"""

from __future__ import annotations

import argparse

import torch
from training_step import in_turn

from firm.networks.heads import build, embed
from firm.recipes.presets import PAPER
from firm.runtime.random import stream
from firm.scoring.image_scores import BATCH
from firm.scoring.knn import nearest, unit

QUERIES, REFERENCES, DIMENSIONS, K = 10_000, 5_000, 512, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rng = torch.Generator().manual_seed(0)
    queries = unit(torch.randn(QUERIES, DIMENSIONS, generator=rng))
    bank = unit(torch.randn(REFERENCES, DIMENSIONS, generator=rng))
    encoder = build(PAPER.encoder, rng=stream(0, "weights")).encoder
    images = torch.randn(2 * BATCH, 3, 32, 32, generator=rng)
    search, embedding = in_turn(3, lambda: nearest(queries, bank, K), lambda: embed(encoder, iter(images.split(BATCH))))
    share = search / (embedding * QUERIES / len(images))
    print(f"search / embedding of the test images = {share:.4f} (target: at most 0.10)")
    for k in (1, K):
        ours, plain = in_turn(
            5,
            lambda k=k: nearest(queries, bank, k),
            lambda k=k: torch.cdist(queries, bank).topk(k, dim=1, largest=False),
        )
        print(f"k = {k}: torch.cdist and top k / chunked matrix product = {plain / ours:.2f}")


if __name__ == "__main__":
    main()
