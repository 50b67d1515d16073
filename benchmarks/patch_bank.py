"""The bank of patches: against torch.cdist, near its own place against everywhere, batched products against one per
cell, a coreset against its search.

    python benchmarks/patch_bank.py [--threads 1]

Eight images of 15 x 15 patches are looked up in banks of about 22,000, 72,000 and 160,000 patches of 128 and 512
numbers, k = 1; one image of 32 x 32 patches near its place, as `firm inspect` does it. All sides of a ratio are
measured in this run.
"""

from __future__ import annotations

import argparse

import torch
from training_step import in_turn, timed

from firm.scoring.knn import nearest, unit
from firm.scoring.memory import Memory
from firm.scoring.patch_bank import Bank, fit_bank

SIDE, IMAGES = 15, 8
BANKS = (98, 320, 711)  # good images: 22,050, 72,000 and 159,975 patches
DIMENSIONS = (128, 512)
ROUNDS = {98: 5, 320: 3, 711: 1}
CHOSEN = 0.1
CELLS, REACH = 32, 2  # the grid of a detector of 256 px with cells of 8 px, and its neighbourhood


def features(images: int, dimensions: int, seed: int, side: int = SIDE) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(images, side, side, dimensions, generator=rng).relu_()


def bank_of(good: torch.Tensor, memory: Memory) -> Bank:
    return fit_bank(good, memory, rng=torch.Generator().manual_seed(0))


def compare_with_cdist(good: torch.Tensor, suspects: torch.Tensor) -> None:
    bank = bank_of(good, Memory())
    queries = unit(suspects.flatten(0, 2))

    def plain_search() -> torch.Tensor:
        return torch.cat([torch.cdist(part, bank.vectors).amin(1) for part in queries.split(256)])

    ours, plain = in_turn(ROUNDS[len(good)], lambda: bank.score(suspects), plain_search)
    print(f"{described(bank)}: torch.cdist / bank = {plain / ours:.2f}")


def compare_places(good: torch.Tensor, suspects: torch.Tensor) -> None:
    everywhere = bank_of(good, Memory())
    rounds = ROUNDS[len(good)]
    for radius in (0, 1, 3):
        near = bank_of(good, Memory(neighbourhood=radius))
        all_of_it, part = in_turn(rounds, lambda: everywhere.score(suspects), lambda near=near: near.score(suspects))
        print(f"{described(near)}, reach {radius}: everywhere / near its place = {all_of_it / part:.1f}")


def compare_company(good: torch.Tensor, suspects: torch.Tensor) -> None:
    near = bank_of(good, Memory(neighbourhood=1))
    one_by_one, together = in_turn(
        ROUNDS[len(good)], lambda: [near.score(one[None]) for one in suspects], lambda: near.score(suspects)
    )
    print(f"{described(near)}, reach 1: {len(suspects)} images one by one / together = {one_by_one / together:.1f}")


def compare_batches(images: int, dimensions: int) -> None:
    bank = bank_of(features(images, dimensions, 0, CELLS), Memory(neighbourhood=REACH))
    one = features(1, dimensions, 1, CELLS)
    place = torch.arange(CELLS * CELLS)
    down, across = ((place[:, None] - place).abs() for place in (place // CELLS, place % CELLS))
    near = [row.nonzero().squeeze(1) for row in torch.maximum(down, across) <= REACH]
    blocks = bank.vectors.split(bank.cell.bincount().tolist())

    def cell_by_cell() -> torch.Tensor:
        queries, best = unit(one.flatten(0, 2)), torch.full((CELLS * CELLS,), -1.0)
        for keys, cells in zip(blocks, near, strict=True):
            best[cells] = torch.maximum(best[cells], (queries.index_select(0, cells) @ keys.T).amax(1))
        return 1 - best.view(1, CELLS, CELLS)

    apart = float((cell_by_cell() - bank.score(one)).abs().max())
    naive, batched = in_turn(ROUNDS[BANKS[0]], cell_by_cell, lambda: bank.score(one))
    ratio = f"a product per cell / batched products = {naive / batched:.1f}"
    print(f"{described(bank)}, reach {REACH}, 1 image: {ratio} (scores differ by {apart:.0e})")


def described(bank: Bank) -> str:
    return f"{len(bank.vectors):,} x {bank.vectors.shape[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for dimensions in DIMENSIONS:
        for images in BANKS:
            compare_with_cdist(features(images, dimensions, 0), features(IMAGES, dimensions, 1))
    good, suspects = features(BANKS[1], DIMENSIONS[0], 0), features(IMAGES, DIMENSIONS[0], 1)
    compare_places(good, suspects)
    compare_company(good, suspects)
    for images, dimensions in ((90, 64), (90, 154), (280, 64), (280, 154)):
        compare_batches(images, dimensions)
    bank = bank_of(features(BANKS[2], DIMENSIONS[0], 0), Memory())
    queries = unit(suspects.flatten(0, 2))
    rows, blocks = in_turn(1, lambda: nearest(queries, bank.vectors, 1), lambda: bank.score(suspects))
    print(f"{described(bank)}: whole rows of cosines / blocks = {rows / blocks:.2f}")
    good = good[: BANKS[0]]
    choosing = timed(lambda: bank_of(good, Memory(sampling_ratio=CHOSEN, sampling="coreset")))
    bank = bank_of(good, Memory())
    search = timed(lambda: bank.score(suspects))
    print(f"{described(bank)}: choosing a coreset of {CHOSEN} / looking up {IMAGES} images = {choosing / search:.1f}")


if __name__ == "__main__":
    main()
