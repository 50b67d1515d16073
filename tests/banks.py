"""Small banks of random patches, and the neighbourhood of a cell by loops."""

import itertools
import math

import torch
from hypothesis import strategies as st

import contracts
from firm.scoring.coreset import SAMPLERS
from firm.scoring.memory import METRICS, Memory
from firm.scoring.patch_bank import fit_bank

SETTINGS = st.builds(
    Memory,
    sampling_ratio=st.sampled_from([0.2, 0.5, 1.0]),
    sampling=st.sampled_from(list(SAMPLERS)),
    neighbourhood=st.sampled_from([-1, 0, 1, 2, 50]),
    k=st.integers(1, 3),
    metric=st.sampled_from(METRICS),
)


def features(n, rows=3, columns=4, dim=6, seed=0):
    """Non-negative, as the encoder's features are, and of any length."""
    return 3 * torch.rand(n, rows, columns, dim, generator=contracts.generator(seed))


def fitted(good, seed=0, **settings):
    return fit_bank(good, Memory(**settings), rng=contracts.generator(seed))


def kept(bank):
    """Which patches of the good images are in the bank, as rows of the flattened features."""
    return (bank.image * math.prod(bank.shape) + bank.cell).tolist()


def weighed(bank, suspect):
    """The weights of all patches of some images, one row of cells after the other."""
    cells = torch.arange(math.prod(bank.shape)).repeat(len(suspect))
    return bank.weights(suspect.flatten(0, 2), cells)


def apart(first, second, columns):
    """Chebyshev distance of two cells."""
    return max(abs(first // columns - second // columns), abs(first % columns - second % columns))


def window(cell, known, memory, columns, enough):
    """Rows of the bank a cell is compared with: within reach, or in as little more as is enough."""
    if memory.neighbourhood < 0:
        return list(range(len(known)))
    for radius in itertools.count(memory.neighbourhood):
        found = [i for i, other in enumerate(known) if apart(cell, other, columns) <= radius]
        if enough(found) or len(found) == len(known):
            return found
    return None
