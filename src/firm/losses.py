"""The four contrastive losses of the paper, for any training loop.

`z` holds one projection per view (b, d). Views of one image share a number in `source` (b,). `group` (b,) is 0 for
normal images and any other number for outliers; only `RotSupConLoss` tells one kind of outlier from another.

    FirmLoss       normal images attract each other; an outlier attracts only its own views
    NTXentLoss     an image attracts only its own views
    SupConLoss     normal images attract each other, and so do all outliers
    RotSupConLoss  normal images attract each other, and so do outliers of one kind

>>> import torch
>>> from firm.losses import FirmLoss
>>> z = torch.randn(8, 16, requires_grad=True)  # two views each of two normal images and two outliers
>>> loss = FirmLoss(temperature=0.2)(z, source=torch.tensor([0, 1, 2, 3] * 2), group=torch.tensor([0, 0, 1, 1] * 2))
>>> loss.backward()
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from firm.errors import SettingError
from firm.training.positives import POSITIVES, check_loss_settings, contrastive_loss

__all__ = ["FirmLoss", "NTXentLoss", "RotSupConLoss", "SupConLoss"]


class _ContrastiveLoss(nn.Module):
    """Equation 5 of the paper with the positive set that a subclass names; takes any device, dtype and autocast.

    A view without positives adds nothing to the mean. The result is float32, or float64 where z is.

    Args:
        temperature: divides the cosines; lower values make the nearest negatives count for more.
        layout: "concat" contrasts every view with all others. "pairwise" takes the first half of `z` as anchors and
            the second half, the other views of the same images in the same order, as keys.
    """

    positives: ClassVar[str]

    def __init__(self, temperature: float = 0.2, *, layout: str = "concat") -> None:
        super().__init__()
        check_loss_settings(temperature, layout)
        self.temperature, self.layout = temperature, layout

    def forward(self, z: Tensor, *, source: Tensor, group: Tensor) -> Tensor:
        """The loss of one batch, a scalar."""
        if z.dim() != 2 or not z.is_floating_point() or len(z) < 2:
            raise SettingError(
                f"z is {z.dtype} of shape {tuple(z.shape)}; give floats (b, d), one row for each of 2 or more views"
            )
        for name, labels in (("source", source), ("group", group)):
            if labels.shape != z.shape[:1] or labels.is_floating_point() or labels.is_complex():
                raise SettingError(
                    f"{name} is {labels.dtype} of shape {tuple(labels.shape)}; give one whole number for each of the "
                    f"{len(z)} views in z"
                )
        positive = POSITIVES[self.positives](source.to(z.device, torch.long), group.to(z.device, torch.long))
        return contrastive_loss(z, positive, self.temperature, self.layout)

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}, layout={self.layout!r}"


class FirmLoss(_ContrastiveLoss):
    """FIRM (Equation 4): compact normal images, every outlier kept apart from them and from other outliers."""

    positives = "firm"


class NTXentLoss(_ContrastiveLoss):
    """NT-Xent (Equations 1 and 2), as in SimCLR; `group` changes nothing."""

    positives = "ntxent"


class SupConLoss(_ContrastiveLoss):
    """Supervised contrastive loss (Equation 3) with two classes: normal and outlier."""

    positives = "supcon"


class RotSupConLoss(_ContrastiveLoss):
    """Supervised contrastive loss (Equation 3) with one class per group."""

    positives = "rot-supcon"
