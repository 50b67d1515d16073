"""The bank of normal embeddings and its nearest neighbours by cosine.

The search is exact: a matrix product in chunks. On one core it takes about the time of a flat faiss index
(`benchmarks/neighbours.py` measures both) and well below a hundredth of the embedding it follows.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from firm.types import FirmError

CHUNK = 2**22  # similarities held at once: 16 MB; fewer cost speed in the product, more in the top k


def unit(embeddings: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Embeddings scaled to length one; a zero vector stays zero."""
    return F.normalize(embeddings.float(), dim=1, eps=1e-12)


@torch.no_grad()
def nearest(queries: Float[Tensor, "n d"], bank: Float[Tensor, "m d"], k: int) -> Float[Tensor, "n k"]:
    """The k largest cosines of each query to the bank, both given as unit vectors, largest first."""
    if not 1 <= k <= len(bank):
        raise FirmError(f"k = {k} neighbours cannot be found among {len(bank)} reference images; use a smaller k")
    if not len(queries):
        return queries.new_empty(0, k)
    rows = min(len(queries), max(1, CHUNK // len(bank)))
    room = queries.new_empty(rows, len(bank))  # fresh memory for every product is a tenth slower
    parts = []
    for some in queries.split(rows):
        cosines = torch.mm(some, bank.T, out=room[: len(some)])
        # one maximum is cheaper than a top 1
        parts.append(cosines.amax(1, keepdim=True) if k == 1 else cosines.topk(k, dim=1).values)
    return torch.cat(parts)
