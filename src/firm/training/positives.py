"""Four positive sets and one contrastive loss; `firm.losses` is their public face.

A positive set is a function of `(source, group)`: the two views of one image share a source, and group 0 is normal
(Equations 2, 3 and 4, and the Rot-SupCon paragraph of section 6). The loss is Equation 5; with NT-Xent's positive set
it is Equation 1.
"""

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from firm.errors import SettingError
from firm.types import INLIER

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


POSITIVES = {  # P(i) is row i of the mask; the diagonal is always False
    "ntxent": ntxent,
    "supcon": supcon,
    "rot-supcon": rot_supcon,
    "firm": firm,
}


def check_loss_settings(temperature: float, layout: str) -> None:
    """Refuse a temperature or a layout the loss is not defined for."""
    if not 0 < temperature < math.inf:
        raise SettingError(f"temperature is {temperature}; it must be a number above 0")
    if layout not in LAYOUTS:
        raise SettingError(f"layout is {layout!r}; use one of {', '.join(LAYOUTS)}")


def contrastive_loss(
    z: Float[Tensor, "b d"], positive: Bool[Tensor, "b b"], temperature: float, layout: str = "concat"
) -> Float[Tensor, ""]:
    """Equation 5: mean over anchors of the mean negative log-probability of their positives.

    `concat` contrasts every view with all others, as the equation does. `pairwise` is the layout of the authors' code:
    z holds all first views, then all second views in the same order; the first are anchors and the second keys, so the
    positives are the upper right block of the same mask.
    Computed in float32 (or float64 if z is): half precision loses the small log-probabilities.
    """
    check_loss_settings(temperature, layout)
    if layout == "pairwise" and len(z) % 2:
        raise SettingError(f"the pairwise layout needs two views of every image, but there are {len(z)} views")
    z = F.normalize(z.double() if z.dtype == torch.float64 else z.float(), dim=1, eps=1e-12)
    # without this, autocast would run the matrix product in half precision and undo the cast above
    device, known = z.device.type, torch.amp.is_autocast_available(z.device.type)
    with torch.autocast(device, enabled=False) if known else nullcontext():
        if layout == "concat":
            logits = (z @ z.T / temperature).fill_diagonal_(-torch.inf)
        else:
            n = len(z) // 2
            logits, positive = z[:n] @ z[n:].T / temperature, positive[:n, n:]
        log_prob = logits.log_softmax(dim=1)
    # where(), not multiplication: the diagonal is -inf and 0 * -inf is nan
    # with two views |P(i)| >= 1 always; the clamp keeps an anchor without positives at zero instead of nan
    per_anchor = torch.where(positive, log_prob, 0).sum(1) / positive.sum(1).clamp(min=1)
    return -per_anchor.mean()


def collapsed_loss(views: int, layout: str = "concat") -> float:
    """The loss of a network that maps everything to one point: the log of the number of keys."""
    return math.log(views - 1 if layout == "concat" else views // 2)


def _same(labels: Tensor) -> Bool[Tensor, "b b"]:
    return labels[:, None] == labels[None, :]


def _others(mask: Bool[Tensor, "b b"]) -> Bool[Tensor, "b b"]:
    return mask.fill_diagonal_(False)
