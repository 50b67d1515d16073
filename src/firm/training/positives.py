"""Four positive sets, one contrastive loss, and the paper's three properties as numbers.

A positive set is a function of `(source, group)`: the two views of one image share a source, and group 0
is normal (Equations 2, 3 and 4, and the Rot-SupCon paragraph of section 6). The loss is Equation 5;
with NT-Xent's positive set it is Equation 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from firm.types import INLIER, Batch, FirmError, PositiveSet

LAYOUTS = ("concat", "pairwise")


def ntxent(source: Int[Tensor, " b"], group: Int[Tensor, " b"]) -> Bool[Tensor, "b b"]:
    """Equation 2: P(i) = {i+}. Every other image repels, inliers too (class collision)."""
    return _others(_same(source))


def supcon(source: Int[Tensor, " b"], group: Int[Tensor, " b"]) -> Bool[Tensor, "b b"]:
    """Equation 3 with two labels: all inliers attract each other, and so do all outliers."""
    return _others(_same(group == INLIER))


def rot_supcon(source: Int[Tensor, " b"], group: Int[Tensor, " b"]) -> Bool[Tensor, "b b"]:
    """Equation 3 with one label per kind of outlier: only outliers of one kind attract each other."""
    return _others(_same(group))


def firm(source: Int[Tensor, " b"], group: Int[Tensor, " b"]) -> Bool[Tensor, "b b"]:
    """Equation 4: all inliers attract each other, an outlier only its own other view."""
    inlier = group == INLIER
    return _others(_same(source) | (inlier[:, None] & inlier[None, :]))


POSITIVES: dict[str, PositiveSet] = {
    "ntxent": ntxent,
    "supcon": supcon,
    "rot-supcon": rot_supcon,
    "firm": firm,
}


def contrastive_loss(
    z: Float[Tensor, "b d"], positive: Bool[Tensor, "b b"], temperature: float, layout: str = "concat"
) -> Float[Tensor, ""]:
    """Equation 5: mean over anchors of the mean negative log-probability of their positives.

    `concat` contrasts every view with all others, as the equation does. `pairwise` is the layout of the
    authors' code: z holds all first views, then all second views in the same order; the first are anchors
    and the second keys, so the positives are the upper right block of the same mask.
    Computed in float32 (or float64 if z is): half precision loses the small log-probabilities.
    """
    z = F.normalize(z.double() if z.dtype == torch.float64 else z.float(), dim=1, eps=1e-12)
    # without this, autocast would run the matrix product in half precision and undo the cast above
    with torch.autocast(device_type=z.device.type, enabled=False):
        if layout == "concat":
            logits = (z @ z.T / temperature).fill_diagonal_(-torch.inf)
        elif layout == "pairwise":
            n = _pairs(z)
            logits, positive = z[:n] @ z[n:].T / temperature, positive[:n, n:]
        else:
            raise FirmError(f"no layout {layout!r}; use one of {', '.join(LAYOUTS)}")
        log_prob = logits.log_softmax(dim=1)
    # where(), not multiplication: the diagonal is -inf and 0 * -inf is nan
    per_anchor = torch.where(positive, log_prob, 0).sum(1) / _count(positive)
    return -per_anchor.mean()


@dataclass(frozen=True)
class Diagnostics:
    """The three properties of section 4 as cosines of one batch of projections; None where undefined."""

    compactness: float | None  # mean cosine between inliers of different images: property 1, high is good
    margin: float | None  # compactness less the mean inlier-outlier cosine: property 2, high is good
    outlier_spread: float | None  # one less the mean cosine between different outliers: property 3, high is good
    collapsed: bool  # all embeddings point one way, so nothing is told apart


COLLAPSE = 0.99  # mean cosine over all pairs of different images above which a batch counts as collapsed


@torch.no_grad()
def diagnose(z: Float[Tensor, "b d"], batch: Batch) -> Diagnostics:
    """Measure the three properties on one batch; views of one image are left out, they are pulled by every loss."""
    inlier = batch.group == INLIER
    normal, strange = _by_source(z, batch.source, inlier), _by_source(z, batch.source, ~inlier)
    within, across, among = (_mean_cosine(*both) for both in ((normal, normal), (normal, strange), (strange, strange)))
    everything = normal + strange
    overall = _mean_cosine(everything, everything)
    return Diagnostics(
        compactness=within,
        margin=None if within is None or across is None else within - across,
        outlier_spread=None if among is None else 1 - among,
        collapsed=overall is not None and overall > COLLAPSE,
    )


def resting_loss(views: int, layout: str = "concat") -> float:
    """The loss of a network that maps everything to one point: the log of the number of keys."""
    return math.log(views - 1 if layout == "concat" else views // 2)


def _same(labels: Tensor) -> Bool[Tensor, "b b"]:
    return labels[:, None] == labels[None, :]


def _others(mask: Bool[Tensor, "b b"]) -> Bool[Tensor, "b b"]:
    return mask.fill_diagonal_(False)


def _pairs(z: Tensor) -> int:
    if len(z) % 2:
        raise FirmError(f"the pairwise layout needs two views of every image, but there are {len(z)} views")
    return len(z) // 2


def _count(positive: Bool[Tensor, "n k"]) -> Int[Tensor, " n"]:
    # with two views |P(i)| >= 1 always; the clamp keeps a one-view batch at zero instead of nan
    return positive.sum(1).clamp(min=1)


def _by_source(z: Float[Tensor, "b d"], source: Int[Tensor, " b"], wanted: Bool[Tensor, " b"]) -> Float[Tensor, "s e"]:
    """For every source the sum of its wanted unit vectors, and behind it how many they are."""
    sources, place = source.unique(return_inverse=True)
    unit = F.pad(F.normalize(z.float(), dim=1).double(), (0, 1), value=1.0)
    return unit.new_zeros(len(sources), unit.shape[1]).index_add_(0, place, unit * wanted[:, None])


def _mean_cosine(first: Float[Tensor, "s e"], second: Float[Tensor, "s e"]) -> float | None:
    """Of all pairs of different sources, by products of sums: those of all pairs less those within a source."""
    products = first.sum(0) * second.sum(0) - (first * second).sum(0)
    return float(products[:-1].sum() / products[-1]) if products[-1] else None
