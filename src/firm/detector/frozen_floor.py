"""The floor of an adaptor for whole images: frozen features must not be better on outliers that it was not taught.

Outliers of the training cannot judge it: an adaptor trained on rotations detects rotations, whatever else it misses.
"""

from contextlib import suppress
from dataclasses import replace

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from firm.detector.embed_images import ImageEmbedder
from firm.errors import DataError
from firm.metrics.image import auroc
from firm.networks.adaptor import Adapted, AdaptedImages
from firm.outliers.registry import OUTLIERS, CutPerm, Exposure, Rotations, RotationsAndExposure
from firm.recipes.recipe import Recipe
from firm.runtime.listener import SILENT, Listener
from firm.runtime.random import stream
from firm.training.feature_batches import FeatureTask
from firm.types import OutlierSource

FLOOR = "backbone"
JUDGES = {  # kinds of outliers -> those that are no judge of a training with them, or with their kin
    "cutpaste": (),
    "perlin-blend": (),
    "cutperm": (Rotations, RotationsAndExposure, CutPerm),  # rotations also move what belongs elsewhere
    "rotations": (Rotations, RotationsAndExposure, CutPerm),
    "exposure": (Exposure, RotationsAndExposure),
}

Kinds = dict[str, Float[Tensor, "m d"]]  # kind of outlier -> pooled features


def above_floor(
    recipe: Recipe,
    task: FeatureTask,
    network: Adapted,
    images: UInt8[Tensor, "n c h w"],
    *,
    seed: int,
    listener: Listener = SILENT,
) -> Recipe:
    """The recipe, with the frozen features in place of adapted ones that do not beat them; says which it took."""
    if task.validation is None or recipe.features == FLOOR:
        return recipe
    embedder = ImageEmbedder(recipe, task.backbone, images[task.validation], task.preprocessing, seed)
    outliers = judging_outliers(embedder, recipe.outliers, seed=seed)
    values = {}
    for kind in (recipe.features, FLOOR):
        by_kind = held_out_auroc(replace(recipe, features=kind), task, network, outliers)
        values[kind] = sum(by_kind.values()) / len(by_kind)
    adapted, floor = (100 * values[kind] for kind in (recipe.features, FLOOR))
    kept = f"{len(task.validation)} held-out good images against {', '.join(outliers)}"
    listener.say(f"{kept}: AUROC {adapted:.1f} with the adaptor, {floor:.1f} with frozen features")
    if adapted > floor:
        return recipe
    listener.warn("the adaptor does not beat the frozen features, so these are used; try other outliers")
    return replace(recipe, features=FLOOR)


def judging_outliers(embedder: ImageEmbedder, taught: OutlierSource, *, seed: int) -> Kinds:
    """Pooled features of outliers of the embedder's images, of every kind that was not taught; of exposure if a pool
    is there."""
    found = {}
    for name, kin in JUDGES.items():
        if taught != OUTLIERS[name] and not isinstance(taught, kin):
            with suppress(DataError):
                made = embedder.make(OUTLIERS[name], embedder.images, rng=stream(seed, "judging", name))
                found[name] = embedder.tested(made.images)
    return found


@torch.no_grad()
def held_out_auroc(recipe: Recipe, task: FeatureTask, network: Adapted, outliers: Kinds) -> dict[str, float]:
    """AUROC of images kept out of the training against each kind of outlier, by the recipe's features and score."""
    assert task.validation is not None
    described = AdaptedImages(network.backbone, network.adaptor, recipe.pretrained, recipe.features).eval()
    device = network.adaptor.mean.device

    def features(pooled: Tensor) -> Float[Tensor, "n d"]:
        return described.from_pooled(pooled.float().to(device)).cpu()

    score = recipe.score.by.fit(features(task.clean[task.good.drawn]))
    good, values = score(features(task.clean[task.validation])), {}
    for name, pooled in outliers.items():
        bad = score(features(pooled))
        values[name] = auroc(torch.cat([good, bad]), torch.arange(len(good) + len(bad)) >= len(good))
    return values
