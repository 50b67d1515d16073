"""What hands the training loop its loss. A baseline with another loss is one more class that fits `Method`."""

from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from firm.errors import SettingError
from firm.training.positives import POSITIVES, check_loss_settings, collapsed_loss, contrastive_loss
from firm.types import INLIER, Batch

COLLAPSE = 0.99  # mean cosine over all pairs of different images above which a batch counts as collapsed
STUCK = 1e-3  # distance from the loss of a collapsed network that counts as none

B = TypeVar("B", contravariant=True)


@dataclass(frozen=True)
class Diagnosis:
    """What a method says of one batch: numbers for the history, and whether the network has become useless."""

    numbers: dict[str, float | None] = field(default_factory=dict)
    collapsed: bool = False


@runtime_checkable
class Method(Protocol[B]):
    """A loss on the batches of a task."""

    def loss(self, network: nn.Module, batch: B) -> tuple[Tensor, Tensor]:
        """The loss to minimise, a scalar, and the outputs of the network that `diagnose` needs."""
        ...

    def diagnose(self, outputs: Tensor, batch: B, loss: Tensor) -> Diagnosis:
        """How the training is doing, measured on one batch; called only for steps that are logged."""
        ...


@dataclass(frozen=True)
class Contrastive:
    """The paper's loss (Equation 5) with one of its four positive sets."""

    positives: str = "firm"
    temperature: float = 0.2
    layout: str = "concat"

    def __post_init__(self) -> None:
        if self.positives not in POSITIVES:
            raise SettingError(f"no positive set {self.positives!r}; use one of {', '.join(POSITIVES)}")
        check_loss_settings(self.temperature, self.layout)

    def loss(self, network: nn.Module, batch: Batch) -> tuple[Float[Tensor, ""], Float[Tensor, "b d"]]:
        z = network(batch.images)
        positive = POSITIVES[self.positives](batch.source, batch.group)
        return contrastive_loss(z, positive, self.temperature, self.layout), z

    def diagnose(self, outputs: Float[Tensor, "b d"], batch: Batch, loss: Float[Tensor, ""]) -> Diagnosis:
        """The three properties of section 4; collapsed if all projections point one way."""
        stuck = abs(float(loss) - collapsed_loss(len(outputs), self.layout)) < STUCK
        numbers, overall = properties(outputs, batch.source, batch.group)
        return Diagnosis(numbers, collapsed=stuck or (overall is not None and overall > COLLAPSE))


@torch.no_grad()
def properties(
    z: Float[Tensor, "b d"], source: Int[Tensor, " b"], group: Int[Tensor, " b"]
) -> tuple[dict[str, float | None], float | None]:
    """The three properties of section 4 as mean cosines, and the mean over all pairs; None where there is no pair.

    `compactness` is that between inliers (property 1), `margin` is compactness less that between inliers and outliers
    (2), `outlier_spread` is one less that between outliers (3): all are better higher. Pairs of views of one image are
    left out, since every loss pulls them together.
    """
    z, source, inlier = z.cpu(), source.cpu(), (group == INLIER).cpu()  # not every device has float64
    normal, outlying = _by_source(z, source, inlier), _by_source(z, source, ~inlier)
    within, across = _mean_cosine(normal, normal), _mean_cosine(normal, outlying)
    among = _mean_cosine(outlying, outlying)
    numbers = {
        "compactness": within,
        "margin": None if within is None or across is None else within - across,
        "outlier_spread": None if among is None else 1 - among,
    }
    return numbers, _mean_cosine(normal + outlying, normal + outlying)


def _by_source(z: Float[Tensor, "b d"], source: Int[Tensor, " b"], chosen: Bool[Tensor, " b"]) -> Float[Tensor, "s e"]:
    """For every source the sum of its chosen unit vectors, and behind it how many they are."""
    sources, place = source.unique(return_inverse=True)
    unit = F.pad(F.normalize(z.float(), dim=1).double(), (0, 1), value=1.0)
    return unit.new_zeros(len(sources), unit.shape[1]).index_add_(0, place, unit * chosen[:, None])


def _mean_cosine(first: Float[Tensor, "s e"], second: Float[Tensor, "s e"]) -> float | None:
    """Of all pairs of different sources, by products of sums: those of all pairs less those within a source."""
    products = first.sum(0) * second.sum(0) - (first * second).sum(0)
    return float(products[:-1].sum() / products[-1]) if products[-1] else None
