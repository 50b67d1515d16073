"""Randomness by name: every draw comes from a stream named after its purpose and its place in the run.

A stream depends on the seed and its names only, so adding a draw shifts no other, and a resumed run
needs no saved generator state: step 700 draws the same numbers whether or not step 699 ran in this process.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def stream_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the named stream; distinct names give unrelated streams."""
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def stream(seed: int, *names: str | int) -> torch.Generator:
    """The torch generator of a named stream.

    Always on the CPU: parameters are drawn there and moved, so every device sees the same batch.
    """
    return torch.Generator().manual_seed(stream_seed(seed, *names))


def numpy_stream(seed: int, *names: str | int) -> np.random.Generator:
    """The NumPy generator of a named stream."""
    return np.random.default_rng(stream_seed(seed, *names))
