"""Knn, Prototype and Kde; Scoring = a score x turns x crops gives s_con, s_shift, s_ens and the starred ones.

Section 4.3 and appendix B. Everything is an anomaly score: similarities are negated once, where they are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from firm.encoder import ResNet18, embed
from firm.images import Preprocessing
from firm.memory import CHUNK, nearest, unit
from firm.outliers.rotations import turned
from firm.streams import stream
from firm.types import FirmError, Score, Scorer
from firm.views.augment import crop

BATCH = 128  # images embedded at once: larger batches leave the cache and are slower


@dataclass(frozen=True, kw_only=True)
class Knn:
    """Equation 6, negated: one less the mean cosine to the k nearest normal embeddings.

    `norm` multiplies the similarity by the length of the embedding (Equation 7, the starred scores).
    """

    k: int = 1
    norm: bool = False

    def __post_init__(self) -> None:
        if self.k < 1:
            raise FirmError(f"k is {self.k}; a neighbour score needs k >= 1")

    def fit(self, normal: Float[Tensor, "m d"]) -> Scorer:
        bank = unit(normal)

        def score(embeddings: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
            similarity = nearest(unit(embeddings), bank, self.k).mean(1)
            return -similarity * embeddings.norm(dim=1) if self.norm else 1 - similarity

        return score


@dataclass(frozen=True, kw_only=True)
class Prototype:
    """s_proto: one less the cosine to the mean direction of the normal embeddings."""

    def fit(self, normal: Float[Tensor, "m d"]) -> Scorer:
        prototype = unit(unit(normal).mean(0, keepdim=True))
        return lambda embeddings: 1 - (unit(embeddings) @ prototype.T).squeeze(1)


@dataclass(frozen=True, kw_only=True)
class Kde:
    """KDE with an RBF kernel on unit vectors; gamma = scale / (variance x dimensions) as DROC sets it."""

    scale: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise FirmError(f"score.by.scale is {self.scale}; it must be above 0")

    def fit(self, normal: Float[Tensor, "m d"]) -> Scorer:
        bank = unit(normal)
        # the floor keeps a collapsed encoder scorable: all its distances are zero, whatever gamma is
        gamma = self.scale / max(float(bank.var(correction=0)) * bank.shape[1], 1e-6)
        rows = max(1, CHUNK // len(bank))

        def score(embeddings: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
            parts = [
                -torch.logsumexp(-gamma * (2 - 2 * (part @ bank.T)), dim=1) / gamma
                for part in unit(embeddings).split(rows)
            ]
            return torch.cat(parts) if parts else embeddings.new_empty(0)

        return score


SCORES: dict[str, Score] = {"knn": Knn(), "prototype": Prototype(), "kde": Kde()}


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How an image is scored: by which score, over four turns or one, over so many crops or the whole image."""

    by: Score = field(default_factory=Knn)
    turns: int = 1
    crops: int = 0
    crop_scale: tuple[float, float] = (0.5, 1.0)  # area of a crop; the authors' code has 0.55 to 1

    def __post_init__(self) -> None:
        if not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise FirmError(f"score.crop_scale is {self.crop_scale}; it must rise within 0..1")
        if self.turns not in (1, 4) or self.crops < 0:
            raise FirmError(f"a scoring needs turns 1 or 4 and crops >= 0, not {self.turns} and {self.crops}")


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


Look = tuple[int, tuple[float, ...]]  # quarter turns, then top, left and side of a crop as parts of the image
WHOLE = (0.0, 0.0, 1.0)


@dataclass(frozen=True)
class Fitted:
    """A scoring with one scorer per turn: references are turned like the image, never cropped."""

    scoring: Scoring
    scorers: tuple[Scorer, ...]

    def looks(self) -> list[Look]:
        """Every look at an image this scoring averages over."""
        boxes = crop_boxes(self.scoring.crops, self.scoring.crop_scale).tolist() if self.scoring.crops else [WHOLE]
        return [(turn, tuple(box)) for turn in range(self.scoring.turns) for box in boxes]


def reference_features(
    encoder: ResNet18, preprocessing: Preprocessing, references: Tensor, turns: int
) -> list[Float[Tensor, "m d"]]:
    """Embeddings of the normal images, once per turn: computed once, shared by all scores."""
    return [
        embed(encoder, (turned(preprocessing.test_view(part), turn) for part in references.split(BATCH)))
        for turn in range(turns)
    ]


def fit_scorings(scorings: Mapping[str, Scoring], features: list[Tensor]) -> dict[str, Fitted]:
    """Fit every scoring to the reference embeddings of the turns it needs."""
    return {
        name: Fitted(scoring, tuple(scoring.by.fit(features[turn]) for turn in range(scoring.turns)))
        for name, scoring in scorings.items()
    }


def score_images(
    encoder: ResNet18,
    preprocessing: Preprocessing,
    images: Tensor,
    fitted: Mapping[str, Fitted],
    on_chunk: Callable[[int], None] | None = None,
) -> dict[str, Float[Tensor, " n"]]:
    """All scores of all images in one pass: each turn and crop is embedded once, whoever needs it.

    An image's scores never depend on the images beside it.
    """
    looks = {name: one.looks() for name, one in fitted.items()}
    parts: dict[str, list[Tensor]] = {name: [] for name in fitted}
    for chunk in images.split(BATCH):
        view = preprocessing.test_view(chunk)
        totals = {name: torch.zeros(len(chunk)) for name in fitted}
        for look in sorted({look for wanted in looks.values() for look in wanted}):
            features = embed(encoder, iter([_seen(view, look)]))
            for name, one in fitted.items():
                if look in looks[name]:
                    totals[name] += one.scorers[look[0]](features) / len(looks[name])
        for name, total in totals.items():
            parts[name].append(total)
        if on_chunk is not None:
            on_chunk(len(chunk))
    return {name: torch.cat(values) if values else torch.empty(0) for name, values in parts.items()}


def crop_boxes(crops: int, scale: tuple[float, float] = (0.5, 1.0)) -> Float[Tensor, "crops 3"]:
    """C_1, C_2, ...: top, left and side of square crops as parts of the image, area uniform in `scale`.

    They are the same for every image and every run: a score must not depend on chance or on company.
    """
    rng = stream(0, "crops")
    draws = torch.stack([torch.rand(3, generator=rng) for _ in range(crops)]) if crops else torch.empty(0, 3)
    side = (scale[0] + (scale[1] - scale[0]) * draws[:, 2]).sqrt()
    return torch.stack([draws[:, 0] * (1 - side), draws[:, 1] * (1 - side), side], dim=1)


def _seen(view: Tensor, look: Look) -> Tensor:
    turn, box = look
    view = turned(view, turn)
    if box == WHOLE:
        return view
    size = view.shape[-1]
    top, left, side = (torch.tensor(box) * size).expand(len(view), 3).unbind(1)
    return crop(view, top, left, side, side, size)
