"""What good images score at each place of the grid, by which scores are standardised."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

PRIOR = 10  # images that the variance of all places counts as at each place
SMALLEST = 1e-6  # deviation: ten times what float32 leaves of a cosine of one


def statistics(
    scores: Float[Tensor, "n r c"], visible: Bool[Tensor, "n r c"]
) -> tuple[Float[Tensor, "r c"], Float[Tensor, "r c"]]:
    """Mean and deviation of the visible scores of good images at each place.

    Variances are averaged over 3 x 3 cells and drawn towards that of all places, the more the fewer images there are:
    as if `PRIOR` more images had it. No deviation is below half the median: where good images happen to agree, a small
    difference must not raise an alarm. A place that is never seen has the mean of all.
    """
    count = visible.sum(0)
    means = (scores.where(visible, 0).sum(0) / count.clamp(min=1)).where(count > 0, scores[visible].mean())
    squares = (scores - means).square().where(visible, 0).sum(0)
    free = (count - 1).clamp(min=0)  # degrees of freedom
    pooled = squares.sum() / free.sum().clamp(min=1)
    summed = F.avg_pool2d(torch.stack([squares / free.clamp(min=1), (free > 0).float()]), 3, stride=1, padding=1)
    around = (summed[0] / summed[1]).where(summed[1] > 0, pooled)  # over the places that have a variance
    deviation = ((count * around + PRIOR * pooled) / (count + PRIOR)).sqrt()
    return means, deviation.clamp(min=float(deviation.quantile(0.5)) / 2).clamp(min=SMALLEST)
