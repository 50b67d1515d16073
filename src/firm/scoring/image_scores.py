"""Scores of whole images (section 4.3, appendix B): Knn, Prototype and Kde, averaged over rotations and crops.

All are anomaly scores: similarities are negated where they are computed.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from firm.errors import SettingError
from firm.images.preprocess import Preprocessing
from firm.networks.heads import ImageEncoder, embed
from firm.outliers.whole_images import turned
from firm.runtime.random import stream
from firm.scoring.knn import CHUNK, nearest, unit
from firm.types import Score, Scorer
from firm.views.simclr import crop

BATCH = 128  # images embedded at once: larger batches leave the cache and are slower


@dataclass(frozen=True, kw_only=True)
class Knn:
    """Equation 6, negated: one minus the mean cosine to the k nearest normal embeddings.

    `norm` multiplies the similarity by the length of the embedding (Equation 7, the starred scores).
    """

    k: int = 1
    norm: bool = False

    def __post_init__(self) -> None:
        if self.k < 1:
            raise SettingError(f"k is {self.k}; a neighbour score needs k >= 1")

    def fit(self, normal: Float[Tensor, "m d"]) -> Scorer:
        bank = unit(normal)

        def score(embeddings: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
            similarity = nearest(unit(embeddings), bank, self.k).mean(1)
            return -similarity * embeddings.norm(dim=1) if self.norm else 1 - similarity

        return score


@dataclass(frozen=True, kw_only=True)
class Prototype:
    """s_proto: one minus the cosine to the mean direction of the normal embeddings."""

    def fit(self, normal: Float[Tensor, "m d"]) -> Scorer:
        prototype = unit(unit(normal).mean(0, keepdim=True))
        return lambda embeddings: 1 - (unit(embeddings) @ prototype.T).squeeze(1)


@dataclass(frozen=True, kw_only=True)
class Kde:
    """KDE with an RBF kernel on unit vectors; gamma = scale / (variance x dimensions) as DROC sets it."""

    scale: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise SettingError(f"score.by.scale is {self.scale}; it must be above 0")

    def fit(self, normal: Float[Tensor, "m d"]) -> Scorer:
        bank = unit(normal)
        # the minimum keeps a collapsed encoder scorable: all its distances are zero, whatever gamma is
        gamma = self.scale / max(float(bank.var(correction=0)) * bank.shape[1], 1e-6)
        rows = max(1, CHUNK // len(bank))

        def score(embeddings: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
            chunks = unit(embeddings).split(rows)
            return torch.cat([-torch.logsumexp(-gamma * (2 - 2 * (part @ bank.T)), dim=1) / gamma for part in chunks])

        return score


SCORES: dict[str, Score] = {"knn": Knn(), "prototype": Prototype(), "kde": Kde()}


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """A score averaged over rotations by quarter turns and over crops."""

    by: Score = field(default_factory=Knn)
    turns: int = 1  # or 4
    crops: int = 0  # 0: the whole image
    crop_scale: tuple[float, float] = (0.5, 1.0)  # area of a crop; the authors' code has 0.55 to 1

    def __post_init__(self) -> None:
        if not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise SettingError(f"score.crop_scale is {self.crop_scale}; use two areas that rise within 0..1")
        if self.turns not in (1, 4) or self.crops < 0:
            raise SettingError(f"score.turns is {self.turns} and score.crops {self.crops}; use 1 or 4, and 0 or more")


SCORINGS: dict[str, Scoring] = {
    "s_con": Scoring(by=Knn()),
    "s_con*": Scoring(by=Knn(norm=True)),
    "s_shift": Scoring(by=Knn(), turns=4),  # Equation 8
    "s_shift*": Scoring(by=Knn(norm=True), turns=4),
    "s_ens": Scoring(by=Knn(), turns=4, crops=10),  # Equation 9
    "s_ens*": Scoring(by=Knn(norm=True), turns=4, crops=10),
    "s_proto": Scoring(by=Prototype()),
    "kde": Scoring(by=Kde()),
}


def with_k(scoring: Scoring, k: int) -> Scoring:
    """The same scoring with k neighbours; a score without neighbours stays as it is."""
    return replace(scoring, by=replace(scoring.by, k=k)) if isinstance(scoring.by, Knn) else scoring


TestView = tuple[int, tuple[float, ...]]  # quarter turns, then top, left and side of a crop as parts of the image
WHOLE = (0.0, 0.0, 1.0)


@dataclass(frozen=True)
class Fitted:
    """A scoring with one fitted scorer per rotation: references are rotated like the image, never cropped."""

    scoring: Scoring
    scorers: tuple[Scorer, ...]

    def views(self) -> list[TestView]:
        """All views of an image that this scoring averages over."""
        boxes = crop_boxes(self.scoring.crops, self.scoring.crop_scale).tolist() if self.scoring.crops else [WHOLE]
        return [(turn, tuple(box)) for turn in range(self.scoring.turns) for box in boxes]


def reference_features(
    encoder: ImageEncoder, preprocessing: Preprocessing, references: Tensor, turns: int
) -> list[Float[Tensor, "m d"]]:
    """Embeddings of the normal images, once per rotation, shared by all scores."""
    return [
        embed(encoder, (turned(preprocessing.test_view(part), turn) for part in references.split(BATCH)))
        for turn in range(turns)
    ]


def fit_scorings(scorings: Mapping[str, Scoring], features: list[Tensor]) -> dict[str, Fitted]:
    """Fit every scoring to the reference embeddings of its rotations."""
    return {
        name: Fitted(scoring, tuple(scoring.by.fit(features[turn]) for turn in range(scoring.turns)))
        for name, scoring in scorings.items()
    }


def score_images(
    encoder: ImageEncoder,
    preprocessing: Preprocessing,
    images: Tensor,
    fitted: Mapping[str, Fitted],
    on_chunk: Callable[[int], None] | None = None,
) -> dict[str, Float[Tensor, " n"]]:
    """All scores of all images in one pass: each view is embedded once for all scorings that need it."""
    views = {name: scoring.views() for name, scoring in fitted.items()}
    parts: dict[str, list[Tensor]] = {name: [] for name in fitted}
    for chunk in images.split(BATCH):
        ready = preprocessing.test_view(chunk)
        totals = {name: torch.zeros(len(chunk)) for name in fitted}
        for view in sorted({view for wanted in views.values() for view in wanted}):
            features = embed(encoder, iter([transformed(ready, view)]))
            for name, scoring in fitted.items():
                if view in views[name]:
                    totals[name] += scoring.scorers[view[0]](features) / len(views[name])
        for name, total in totals.items():
            parts[name].append(total)
        if on_chunk is not None:
            on_chunk(len(chunk))
    return {name: torch.cat(values) for name, values in parts.items()}


def crop_boxes(crops: int, scale: tuple[float, float] = (0.5, 1.0)) -> Float[Tensor, "crops 3"]:
    """C_1, C_2, ...: top, left and side of square crops as parts of the image, area uniform in `scale`.

    They are the same for every image and every run, so that a score does not depend on chance.
    """
    draws = torch.rand(crops, 3, generator=stream(0, "crops"))
    side = (scale[0] + (scale[1] - scale[0]) * draws[:, 2]).sqrt()
    return torch.stack([draws[:, 0] * (1 - side), draws[:, 1] * (1 - side), side], dim=1)


def transformed(images: Tensor, view: TestView) -> Tensor:
    images, box, size = turned(images, view[0]), view[1], images.shape[-1]
    if box == WHOLE:
        return images
    top, left, side = (torch.tensor(box) * size).expand(len(images), 3).unbind(1)
    return crop(images, top, left, side, side, size)
