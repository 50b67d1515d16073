"""Named random streams: a stream depends on the seed and its names only.

Adding a draw shifts no other, and a resumed run needs no saved generator state.
"""

import hashlib

import numpy as np
import torch


def stream_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the named stream; distinct names give unrelated streams."""
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def stream(seed: int, *names: str | int) -> torch.Generator:
    """The torch generator of a named stream, on the CPU, so every device gets the same draws."""
    return torch.Generator().manual_seed(stream_seed(seed, *names))


def numpy_stream(seed: int, *names: str | int) -> np.random.Generator:
    """The NumPy generator of a named stream."""
    return np.random.default_rng(stream_seed(seed, *names))
