"""Build the fitted model from prepared images and a trained network."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from firm.data.duplicates import THUMBNAIL_SIDE, thumbnails
from firm.decision.calibration import Calibration
from firm.detector.prepare import Prepared, Task
from firm.images.colour import is_grey
from firm.images.decode import decode
from firm.images.preprocess import brightness, resize
from firm.networks.adaptor import Adapted, AdaptedImages, ImageNetwork, image_network
from firm.networks.heads import Network
from firm.recipes.recipe import Recipe, sparse
from firm.runtime.files import digest
from firm.scoring.image_scores import reference_features
from firm.scoring.models import ImageModel, Located, Model, PatchModel
from firm.scoring.patch_features import CHUNK, BackboneFeatures, extractor_of
from firm.training.feature_batches import FeatureTask

PICTURES = 2000  # good images stored: about ten megabytes
JPEG_QUALITY = 85

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Examples:
    """Concatenated JPEG pictures of the first good images, as tensors for saving."""

    encoded: UInt8[Tensor, " b"]
    ends: Int[Tensor, " n"]

    @classmethod
    def of(cls, images: UInt8[Tensor, "n c h w"]) -> Examples:
        parts = [_encoded(image.permute(1, 2, 0).numpy()) for image in images[:PICTURES]]
        ends = torch.tensor([len(part) for part in parts], dtype=torch.int64).cumsum(0)
        return cls(torch.cat([torch.empty(0, dtype=torch.uint8), *parts]), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def picture(self, number: int) -> UInt8[Pixels, "h w 3"] | None:
        """A training image, None if it was not stored."""
        if not 0 <= number < len(self):
            return None
        begin = int(self.ends[number - 1]) if number else 0
        return decode(self.encoded[begin : int(self.ends[number])].numpy().tobytes())

    def tensors(self) -> dict[str, Tensor]:
        return {"encoded": self.encoded, "ends": self.ends}


NONE = Examples(torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))


def _encoded(picture: Pixels) -> UInt8[Tensor, " b"]:
    pixels = cv2.cvtColor(picture, cv2.COLOR_RGB2BGR) if picture.shape[2] == 3 else np.ascontiguousarray(picture)
    return torch.from_numpy(cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1].copy())


@dataclass
class Fitted:
    """The result of a fit: everything a detector needs and saves."""

    recipe: Recipe
    model: Model
    origin: dict[str, Any]  # data, seed, versions, metrics
    thumbnails: UInt8[Tensor, "n s s"] = field(
        default_factory=lambda: torch.empty(0, THUMBNAIL_SIDE, THUMBNAIL_SIDE, dtype=torch.uint8)
    )
    examples: Examples = NONE  # pictures of the good images
    calibration: Calibration | None = None
    probes: list[dict[str, Any]] = field(default_factory=list)  # AUROC during the training; not saved

    @cached_property
    def id(self) -> str:
        """A digest of everything that determines a score: no thresholds, no pictures, no setting at its default."""
        settings = {"recipe": sparse(self.recipe), "preprocessing": sparse(self.model.preprocessing)}
        decided_by = {name: self.origin.get(name) for name in ("grey", "backbone")}
        return digest(self.model.state_dict(), json.dumps(settings | decided_by, sort_keys=True))[:16]


def remember(
    recipe: Recipe, prepared: Prepared, network: Network | Adapted, origin: dict[str, Any], *, seed: int
) -> Fitted:
    """The fitted model, not calibrated; `recipe` may differ from the training's in what needs no training."""
    images = prepared.data.train
    model = fit_model(recipe, prepared, network, seed=seed)
    examples = Examples.of(model.pictures(images, prepared.aligned))
    return Fitted(recipe, model, origin | model.describe(), thumbnails(images), examples)


def fit_model(
    recipe: Recipe, prepared: Prepared, network: Network | Adapted, *, seed: int, first: int | None = None
) -> Model:
    """The model alone, of all good images or of the first `first`."""
    preprocessing, aligned = prepared.task.preprocessing, prepared.aligned
    if not recipe.patchwise:
        images = (prepared.data.train if aligned is None else aligned.images)[:first]
        whole = image_network(network, recipe.pretrained, recipe.features)
        task, turns = prepared.task, recipe.score.turns
        references = None if turns > 1 else _embedded(whole, task, first)
        references = references or reference_features(whole.encoder, preprocessing, images, turns)
        return ImageModel(whole, preprocessing, recipe.conditioning, recipe.score, references)
    assert aligned is not None
    grey = is_grey(resize(prepared.data.train, preprocessing.frame))
    extractor = extractor_of(network, preprocessing, recipe.grid, recipe.features, recipe.pretrained, grey=grey)
    count = len(aligned.images[:first])
    return PatchModel.fit(
        extractor, preprocessing, recipe.conditioning, recipe.memory, aligned[:count], seed=seed,
        parts=prepared.parts[:count], cells=prepared.cells, typical=prepared.typical,
    )  # fmt: skip


@torch.no_grad()
def _embedded(whole: ImageNetwork, task: Task, first: int | None) -> list[Float[Tensor, "n d"]] | None:
    """The features of good images that are embedded already; None if they are not."""
    if not isinstance(task, FeatureTask) or not isinstance(whole, AdaptedImages) or whole.kind == "pixels":
        return None
    device = whole.adaptor.mean.device
    return [whole.eval().from_pooled(task.references[:first].float().to(device)).cpu()]


class Measured(NamedTuple):
    """What thresholds are set on: of each image its score, the maximum of its map, and its brightness."""

    scores: Float[Tensor, " n"]
    peaks: Float[Tensor, " n"] | None  # None without maps
    light: Float[Tensor, " n"]


def measure(
    model: Model,
    images: UInt8[Tensor, "n c h w"],
    on_image: Callable[[int], None] = lambda _: None,
    stored: Prepared | None = None,
) -> Measured:
    """Measure the images one by one, exactly as in inspection; `on_image` gets the number of images done.

    What is `stored` of the images spares embedding them again: then the scores are those of inspection up to the
    rounding of the features.
    """
    embedded = None if stored is None else stored.cells
    scores, peaks = [torch.empty(0)], [torch.empty(0)]
    for rows in torch.arange(len(images)).split(1 if embedded is None else CHUNK):
        located = model.locate(images[rows]) if embedded is None else _locate_stored(model, stored, rows)
        scores.append(located.scores)
        peaks.append(located.maps.amax(dim=(1, 2)) if model.has_maps else peaks[0])
        on_image(int(rows[-1]) + 1)
    return Measured(torch.cat(scores), torch.cat(peaks) if model.has_maps else None, brightness(images, model.ignored))


def _locate_stored(model: Model, stored: Prepared | None, rows: Int[Tensor, " k"]) -> Located:
    """Scores and maps of images that are aligned and embedded already."""
    assert stored is not None
    assert stored.aligned is not None
    assert stored.cells is not None
    assert isinstance(model, PatchModel)
    assert isinstance(model.extractor, BackboneFeatures)
    aligned, device = stored.aligned[rows], model.scorer.present.device
    features = model.extractor.from_stored(aligned.images, stored.cells[rows])
    features = {kind: values.to(device) for kind, values in features.items()}
    cells = model.scorer.cells(features, aligned.foreground, aligned.hidden())
    return Located(model.scorer.scores(cells, features).cpu(), model.scorer.maps(cells, aligned).cpu())
