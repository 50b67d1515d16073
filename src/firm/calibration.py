"""A threshold from good images alone, with the false-call rate it can promise.

Good images that the encoder never saw are scored; the threshold is their conformal quantile. If future good
images are like them, the chance that one is called anomalous is at most the stated rate, whatever the scores'
distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from firm.types import FirmError


@dataclass(frozen=True)
class Threshold:
    """Scores above `value` are anomalous; `false_calls` is the rate that `images` held-out good images support."""

    value: float
    false_calls: float
    images: int


def threshold_of(held_out: Float[Tensor, " n"], false_calls: float) -> Threshold:
    """The lowest threshold whose false-call rate is at most the wished one, or the best the images can promise.

    n images cannot promise less than 1 / (n + 1); then the threshold is their largest score and says so.
    """
    n = len(held_out)
    if not n:
        raise FirmError("a threshold needs held-out good images; set holdout above 0 or give more images")
    if not 0 < false_calls < 1:
        raise FirmError(f"false_calls is {false_calls}; it must lie between 0 and 1")
    if not bool(held_out.isfinite().all()):
        raise FirmError("a held-out score is not finite; the training diverged, lower training.lr")
    rank = max(1, min(n, math.ceil((n + 1) * (1 - false_calls) - 1e-9)))
    ordered = held_out.double().sort().values
    return Threshold(float(ordered[rank - 1]), 1 - rank / (n + 1), n)
