"""A threshold from good images alone, with the false-call rate it can promise.

Good images that the encoder never saw are scored; the threshold is their conformal quantile. If future good
images are like them, the chance that one is called anomalous is at most the stated rate, whatever the scores'
distribution. Several photographs of one part count as one together: it is parts that are drawn anew, and a hundred
photographs of ten parts say little of an eleventh.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from firm.types import FirmError


@dataclass(frozen=True)
class Threshold:
    """Scores above `value` are anomalous; `false_calls` is the rate that `images` held-out good images support.

    `parts` is how many parts they show; 0 where that was not looked for.
    """

    value: float
    false_calls: float
    images: int
    parts: int = 0


def threshold_of(
    held_out: Float[Tensor, " n"], false_calls: float, parts: Int[Tensor, " n"] | None = None
) -> Threshold:
    """The lowest threshold whose false-call rate is at most the wished one, or the best the images can promise.

    `parts` numbers the part each image shows; without it each shows one of its own. k parts cannot promise less than
    1 / (k + 1); then the threshold is the largest score and says so.
    """
    n = len(held_out)
    if not n:
        raise FirmError("a threshold needs held-out good images; set holdout above 0 or give more images")
    if not 0 < false_calls < 1:
        raise FirmError(f"false_calls is {false_calls}; it must lie between 0 and 1")
    if not bool(held_out.isfinite().all()):
        raise FirmError("a held-out score is not finite; the training diverged, lower training.lr")
    numbers = torch.arange(n) if parts is None else parts.unique(return_inverse=True)[1]
    sizes = numbers.bincount()
    ordered, order = held_out.double().sort()
    weights = 1 / (sizes[numbers[order]].double() * (len(sizes) + 1))  # the new part has the rest
    below = weights.cumsum(0)
    place = min(int((below < 1 - false_calls - 1e-9).sum()), n - 1)
    return Threshold(float(ordered[place]), max(0.0, 1 - float(below[place])), n, len(sizes))
