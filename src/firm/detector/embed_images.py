"""Embed whole images once with a frozen backbone: the good ones, augmented views of them, and views of outliers."""

import hashlib
import json
import re
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from firm.data.splits import split_by_part
from firm.errors import SettingError
from firm.images.colour import grey, is_grey
from firm.images.preprocess import Preprocessing, fingerprint, resize
from firm.networks.adaptor import pooled_features, pooled_stages
from firm.networks.backbone import Backbone
from firm.outliers.registry import Exposure, RotationsAndExposure, make_outliers
from firm.recipes.recipe import Recipe, to_json
from firm.runtime.feature_cache import stored
from firm.runtime.listener import SILENT, Listener
from firm.runtime.random import stream
from firm.training.feature_batches import FeatureSet, FeatureTask
from firm.types import INLIER, Outliers, OutlierSource
from firm.views.registry import PatchPairs

CHUNK = 64  # images per row block of the cache
AT_ONCE = 16  # images that pass the backbone together: faster than few, and different by less than float16 stores
OUTLIER_VIEWS = 2
FEWEST_OUTLIERS = 2000  # of each source; with more good images one outlier of each
VALIDATION_SHARE, VALIDATION_MOST = 0.1, 500  # good images kept out of the training, to compare features on
VALIDATION_FROM = 40  # good images from which some are kept out


@dataclass(frozen=True)
class ImageEmbedder:
    """Good images and the backbone that embeds them; `inliers` and `outliers` compute rows of the cache."""

    recipe: Recipe
    backbone: Backbone
    images: UInt8[Tensor, "n c h w"]
    preprocessing: Preprocessing
    seed: int

    def key(self, *more: object, of: OutlierSource | None = None) -> str:
        """A digest of everything that determines the features; good images give exposure only their shape."""
        how = (self.stages, self.preprocessing.size, self.preprocessing.zoom, self.recipe.pretrained.views)
        shape = (*self.images.shape, self.is_grey)
        seen = shape if isinstance(of, Exposure) else fingerprint(self.images)
        text = [seen, self.backbone.digest, how, to_json(self.recipe.views), self.seed, of and to_json(of), *more]
        return hashlib.sha256(json.dumps(text, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @property
    def stages(self) -> tuple[int, ...]:
        return pooled_stages(self.recipe.pretrained, self.backbone)

    @cached_property
    def is_grey(self) -> bool:
        """Whether no good image has any colour."""
        return is_grey(self.images)

    def tested(self, images: UInt8[Tensor, "n c h w"]) -> Float[Tensor, "n d"]:
        """The same of images as they are tested."""
        return torch.cat([self.pooled(self.preprocessing.test_view(part)) for part in images.split(CHUNK)])

    def inliers(self, begin: int, end: int) -> Float[Tensor, "n v d"]:
        """The image as it is tested, then its augmented views."""
        images = self.images[begin:end]
        views = self._views(images, self.recipe.pretrained.views, stream(self.seed, "views", begin))
        return torch.cat([self.tested(images)[:, None], views], dim=1)

    def outliers(self, source: OutlierSource, begin: int, end: int) -> Float[Tensor, "n v e"]:
        """Augmented views of an outlier of every good image, then of another one, ...; the group comes last."""
        which = torch.arange(begin, end) % len(self.images)
        made = self.make(source, self.images[which], rng=stream(self.seed, "outliers", begin))
        views = self._views(made.images, OUTLIER_VIEWS, stream(self.seed, "outlier views", begin))
        return torch.cat([views, made.group[:, None, None].expand(-1, OUTLIER_VIEWS, 1)], dim=2)

    def make(self, source: OutlierSource, images: UInt8[Tensor, "n c h w"], *, rng: torch.Generator) -> Outliers:
        """Outliers of the images; grey where the good ones are, since colour alone would tell them apart."""
        made = make_outliers(source, images, rng=rng)
        if not self.is_grey:
            return made
        channels = len(self.images[0])
        return replace(made, images=grey(made.images.float()).round().byte().expand(-1, channels, -1, -1))

    def _views(self, images: UInt8[Tensor, "n c h w"], count: int, rng: torch.Generator) -> Float[Tensor, "n v d"]:
        pairs = [self.recipe.views(images, self.preprocessing.size, rng=rng) for _ in range((count + 1) // 2)]
        views = [self.pooled(self.preprocessing.normalise(view)) for pair in pairs for view in pair]
        return torch.stack(views[:count], dim=1)

    def pooled(self, images: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n d"]:
        """Pooled features of normalised images, on the CPU."""
        images = images.to(self.backbone.mean.device)
        return pooled_features(self.backbone, self.stages, images, AT_ONCE).cpu()


def embed_images(
    recipe: Recipe,
    images: UInt8[Tensor, "n c h w"],
    parts: Int[Tensor, " n"],
    backbone: Backbone,
    preprocessing: Preprocessing,
    *,
    seed: int,
    name: str = "",
    folder: Path | None = None,
    listener: Listener = SILENT,
) -> FeatureTask:
    """Embed the training images; with a folder the features are cached there by name, and resumed if interrupted."""
    if isinstance(recipe.views, PatchPairs) or recipe.pretrained.noise:
        raise SettingError("whole images need views=simclr and pretrained.noise=0; start from the preset semantic")
    size = preprocessing.size
    images = resize(images, size) if images.shape[-1] > size else images  # views crop without antialiasing
    embedder, count = ImageEmbedder(recipe, backbone, images, preprocessing, seed), len(images)
    key, counted = embedder.key(), partial(listener.progress, "embedding good images", total=count)
    good = stored(folder, file_name("good", name), key, count, embedder.inliers, chunk=CHUNK, on_rows=counted)
    validation = _validation_images(recipe, parts, seed=seed)
    learnt = torch.arange(count) if validation is None else _without(count, validation)
    outliers, made_by = _outliers(embedder, learnt, folder, listener)
    return FeatureTask(
        good[:, 0],
        FeatureSet(good[:, 1:], torch.full((count,), INLIER), learnt),
        outliers,
        backbone,
        recipe.pretrained,
        preprocessing,
        recipe.training,
        seed,
        "-".join([key, *made_by, *([] if validation is None else [fingerprint(validation)])]),
        validation,
    )


def file_name(kind: str, name: str) -> str:
    """Under which features of a kind of view of a data set are stored."""
    own = re.sub(r"[^\w.]+", "-", name)
    return f"{kind}-{own[-80:]}"


def _outliers(
    embedder: ImageEmbedder, learnt: Int[Tensor, " k"], folder: Path | None, listener: Listener
) -> tuple[FeatureSet, list[str]]:
    """Embedded outliers of each source, their groups numbered one source after another, and the keys of the features.

    Sources are cached apart, so trainings with one of them and with both share the features.
    """
    count, taught = len(embedder.images), embedder.recipe.outliers
    sources: tuple[OutlierSource, ...] = taught.sources if isinstance(taught, RotationsAndExposure) else (taught,)
    sources = sources if embedder.recipe.training.epochs else ()
    rows = count * max(1, -(-FEWEST_OUTLIERS // count))
    features, groups, keys, kinds = [], [torch.empty(0, dtype=torch.long)], [], 0
    for source in sources:
        name = type(source).__name__.lower()
        keys.append(embedder.key(of=source))
        counted = partial(listener.progress, f"embedding outliers ({name})", total=rows)
        compute = partial(embedder.outliers, source)
        values = stored(folder, f"outliers-{name}", keys[-1], rows, compute, chunk=CHUNK, on_rows=counted)
        features.append(values[..., :-1])
        groups.append(kinds + values[:, 0, -1].long())
        kinds += source.kinds
    drawn = torch.arange(rows * len(sources))
    drawn = drawn[torch.isin(drawn % count, learnt)]
    return FeatureSet(torch.cat(features) if features else torch.empty(0, 2, 0), torch.cat(groups), drawn), keys


def _validation_images(recipe: Recipe, parts: Int[Tensor, " n"], *, seed: int) -> Int[Tensor, " s"] | None:
    """Good images kept out of the training; None if nothing is compared on them or they are too few."""
    if "features" not in recipe.automatic or len(parts) < VALIDATION_FROM or not recipe.training.epochs:
        return None
    return split_by_part(parts, min(VALIDATION_SHARE, VALIDATION_MOST / len(parts)), seed=seed)[1]


def _without(count: int, left_out: Int[Tensor, " s"]) -> Int[Tensor, " k"]:
    every = torch.arange(count)
    return every[~torch.isin(every, left_out)]
