"""Prepare good images for training: align them once, or embed them once with a frozen backbone."""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Self

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from firm.data.folder import SIDE
from firm.data.splits import split_by_part
from firm.detector.embed_images import embed_images
from firm.detector.generate import generated
from firm.errors import MachineError, SettingError
from firm.images.alignment import Conditioned, Conditioning
from firm.images.colour import is_grey
from firm.images.ignore_mask import check_ignored, scaled
from firm.images.preprocess import Preprocessing, fingerprint, inlier_statistics
from firm.images.resize import Size, height_and_width, resize, resize_mask
from firm.networks.adaptor import Adapted
from firm.networks.backbone import Backbone
from firm.networks.heads import Network
from firm.networks.weights import FACTS, STAGES, load_backbone
from firm.outliers.registry import make_outliers
from firm.recipes.recipe import Recipe, digest, to_json
from firm.runtime.feature_cache import stored
from firm.runtime.listener import SILENT, Listener
from firm.runtime.random import stream
from firm.scoring.patch_features import (
    EncoderFeatures,
    cell_features,
    cell_pixels,
    check_cells,
    feature_count,
    kinds_of,
)
from firm.training.batches import ImageTask
from firm.training.feature_batches import FeatureTask
from firm.training.patch_batches import CellSampler, PatchSet, PatchTask, ValidationImages
from firm.training.runs import Run
from firm.types import INLIER, OneClass, Scene, Statistics
from firm.views.registry import PatchPairs

Task = ImageTask | PatchTask | FeatureTask

HALF = Statistics((0.5,) * 3, (0.5,) * 3)
MEMORY = 6.0  # default memory budget of a fit, GB
FEWEST = 20  # good images that the memory must hold
LIBRARIES = 700e6  # bytes of the libraries, the network and a training step
PIXEL_COPIES, FEATURE_COPIES = 6, 3  # copies of an image's pixels and of its patch features held at the peak
CHUNK = 8  # images per embedding batch
VALIDATION_SHARE, VALIDATION_MOST = 0.1, 60  # good images held out of an adaptor's training to choose features on
VALIDATION_FROM = 40  # good images from which some are held out
EXTRA = 2  # values stored after the features of an outlier's cell: the altered fraction and the group


@dataclass(frozen=True)
class Prepared:
    """Good images ready for training."""

    recipe: Recipe
    data: OneClass  # the training images as read
    parts: Int[Tensor, " n"]  # which part each image shows
    aligned: Conditioned | None  # None: whole images without alignment
    typical: UInt8[Tensor, "c a b"] | None  # the median aligned image, to fill ignored pixels
    task: Task
    cells: Float[Tensor, "n r c d"] | None = None  # backbone features of the images

    def run(
        self,
        *,
        device: torch.device | str = "cpu",
        folder: Path | None = None,
        checkpoint_seconds: float = 30.0,
        log_every: int = 10,
    ) -> Run:
        """The training of the recipe, from initial weights or from the checkpoint in the folder."""
        return Run(
            self.task,
            self.recipe.method,
            self.task.network(self.recipe.encoder),
            digest=training_digest(self.recipe, self.task),
            device=device,
            folder=folder,
            checkpoint_seconds=checkpoint_seconds,
            log_every=log_every,
        )

    def subset(self, known: Int[Tensor, " k"]) -> Self:
        """Some of the images, for a model that must not see the others; nothing is aligned or embedded again."""
        assert not isinstance(self.task, ImageTask)
        data = replace(self.data, train=self.data.train[known], files=())
        aligned = None if self.aligned is None else self.aligned[known]
        cells = None if self.cells is None else self.cells[known]
        task = self.task.subset(known)
        return replace(self, data=data, parts=self.parts[known], aligned=aligned, task=task, cells=cells)

    def trained(self, run: Run) -> Network | Adapted:
        """The network of a run of this training, with its backbone if it has one."""
        return self.task.complete(run.state.network)


def training_digest(recipe: Recipe, task: Task) -> str:
    """A digest of everything that determines a training: recipe, seed, images and preprocessing."""
    preprocessing = asdict(task.preprocessing)
    for name in ("depth", "shape", "crop"):  # already in the fingerprint of the pixels
        del preprocessing[name]
    return digest(recipe, seed=task.seed, images=task.fingerprint, preprocessing=preprocessing)


def prepare(
    recipe: Recipe,
    data: OneClass,
    parts: Int[Tensor, " n"],
    *,
    seed: int,
    backbone: Backbone | None = None,
    masks: Bool[Tensor, "n h w"] | None = None,
    folder: Path | None = None,
    device: torch.device | str = "cpu",
    listener: Listener = SILENT,
) -> Prepared:
    """Align the images; with a backbone, embed them and their synthetic defects (cached in `folder`, resumable).

    The images that `outliers=sia` blends are made first, on the device.
    """
    frame = working_frame(recipe, data)
    if recipe.patchwise:
        recipe.grid.places(*frame)  # raises if the images are too small
    aligned = align(recipe, data, frame, masks)
    typical = None if aligned is None else aligned.typical()
    aligned = None if aligned is None else aligned.completed(typical)
    images = data.train if aligned is None else aligned.images
    recipe = generated(recipe, images, device=device, listener=listener)
    preprocessing = Preprocessing(
        min(frame), recipe.zoom, _statistics(recipe, data, images, backbone), data.train.shape[-1], data.depth,
        shape=frame if recipe.shape else (), crop=recipe.crop,
    )  # fmt: skip
    cells = None
    if backbone is None:
        task: Task = _image_task(recipe, data, aligned, preprocessing, seed=seed)
    elif not recipe.patchwise:
        whole = (recipe, images, parts, backbone, preprocessing)
        task = embed_images(*whole, seed=seed, name=data.name, folder=folder, listener=listener)
    else:
        assert aligned is not None
        assert isinstance(recipe.views, PatchPairs)
        check_cells(recipe.pretrained, recipe.grid, frame)
        validation = _validation_images(recipe, parts, seed=seed)
        embedder = Embedder(recipe, recipe.views, backbone, aligned, preprocessing, seed, validation)
        patches = _patch_task(embedder, folder=folder, listener=listener)
        task, cells = patches, patches.good.features
    return Prepared(recipe, data, parts, aligned, typical, task, cells)


def frozen_backbone(recipe: Recipe, device: torch.device | str = "cpu") -> Backbone | None:
    """Load the pretrained network that the recipe names, once for all steps; None if it names none."""
    if not recipe.pretrained.name:
        return None
    if recipe.patchwise != isinstance(recipe.views, PatchPairs):
        raise SettingError("frozen features need a grid of patches and views of patches (preset adapted), or neither")
    if not recipe.patchwise:
        return load_backbone(recipe.pretrained.name, deepest=max(recipe.pretrained.stages or (STAGES,))).to(device)
    known = FACTS[recipe.pretrained.name].stages if recipe.pretrained.name in FACTS else (3, 4)
    return load_backbone(recipe.pretrained.name, deepest=max(recipe.pretrained.stages or known)).to(device)


def read_side(recipe: Recipe) -> Size:
    """The size at which image files are read: the working size for patches, twice that for whole images."""
    if recipe.shape:
        return recipe.shape[0], recipe.shape[1]
    return recipe.size if recipe.patchwise and recipe.size else max(SIDE, 2 * recipe.size)


def working_frame(recipe: Recipe, data: OneClass) -> tuple[int, int]:
    """Height and width of the network's input images; of cells side by side, a whole number."""
    height, width = recipe.shape or (recipe.size or data.size,) * 2
    if recipe.patchwise:
        height, width = min(height, data.train.shape[-2]), min(width, data.train.shape[-1])
    cell = recipe.grid.stride if recipe.pretrained.name and recipe.patchwise else 1
    return height - height % cell, width - width % cell


def align(
    recipe: Recipe, data: OneClass, frame: tuple[int, int], masks: Bool[Tensor, "n h w"] | None = None
) -> Conditioned | None:
    """Normalise illumination and alignment; None for whole images that need neither."""
    if not recipe.patchwise and recipe.conditioning == Conditioning():
        return None
    images = resize(data.train, frame) if recipe.patchwise else data.train
    if masks is not None and masks.shape[1:] != images.shape[2:]:
        masks = None
    return recipe.conditioning(images, data.ignored, masks)


def _statistics(
    recipe: Recipe, data: OneClass, images: UInt8[Tensor, "n c h w"], backbone: Backbone | None
) -> Statistics:
    if backbone is not None and not recipe.patchwise:
        return Statistics(backbone.facts.mean, backbone.facts.std)
    if recipe.normalise == "half":
        return HALF
    if recipe.normalise == "published" and data.statistics is not None and recipe.conditioning.illumination == "none":
        return data.statistics  # published for unmodified pixels
    return inlier_statistics(images)


def check_recipe(recipe: Recipe, data: OneClass, references: int) -> None:
    """Raise before training what would fail after it."""
    check_ignore_mask(recipe, data.ignored)
    height, width = data.train.shape[-2:]
    if height != width and not recipe.shape:
        how = f"set shape to [{height}, {width}] for a grid of patches, or make them square (`resize`)"
        raise SettingError(f"images of {width} x {height} pixels are no square; {how}")
    if recipe.pretrained.name and recipe.patchwise:
        check_cells(recipe.pretrained, recipe.grid, working_frame(recipe, data))
    k = getattr(recipe.score.by, "k", 1)
    if k > references:
        raise SettingError(f"score.by.k is {k}, but there are only {references} training images; use a smaller k")


def check_ignore_mask(recipe: Recipe, ignored: Bool[Tensor, "a b"] | None) -> None:
    """Raise if the mask is not valid or the recipe compares whole images."""
    if ignored is not None and not recipe.patchwise:
        raise SettingError("a whole-image detector cannot ignore pixels; fit with --preset inspect")
    if ignored is not None:
        check_ignored(ignored)


def _image_task(
    recipe: Recipe, data: OneClass, aligned: Conditioned | None, preprocessing: Preprocessing, *, seed: int
) -> ImageTask:
    images, foreground, hidden = data.train, None, None
    if aligned is not None:
        images, foreground, hidden = aligned.images, aligned.foreground, aligned.hidden()
    frame = preprocessing.frame
    if images.shape[-2] > frame[0] or images.shape[-1] > frame[1]:  # views crop without antialiasing, so resize first
        images = resize(images, frame)
        if foreground is not None:
            foreground = torch.stack([resize_mask(mask.numpy(), frame) for mask in foreground])
        if hidden is not None:
            hidden = torch.stack([scaled(mask, *frame) for mask in hidden])
    if foreground is not None and is_grey(images):
        images = images[:, :1].contiguous()  # makes synthesis three times faster
    settings, masks = (recipe.outliers, recipe.views, recipe.training), (foreground, data.ignored, hidden)
    return ImageTask(images, preprocessing, *settings, seed, *masks)


def _validation_images(recipe: Recipe, parts: Int[Tensor, " n"], *, seed: int) -> Int[Tensor, " s"] | None:
    """Good images held out of an adaptor's training to choose its features on; None if not needed or too few."""
    chosen_later = "features" in recipe.automatic and recipe.memory.neighbourhood < 0  # see tune.choose_features
    if not chosen_later or len(parts) < VALIDATION_FROM or not recipe.training.epochs:
        return None
    return split_by_part(parts, min(VALIDATION_SHARE, VALIDATION_MOST / len(parts)), seed=seed)[1]


@dataclass(frozen=True)
class Embedder:
    """Aligned good images and the backbone that embeds them; `inliers` and `outliers` compute rows of the cache."""

    recipe: Recipe
    views: PatchPairs
    backbone: Backbone
    aligned: Conditioned
    preprocessing: Preprocessing
    seed: int
    validation: Int[Tensor, " s"] | None = None  # good images held out of the training

    @property
    def good(self) -> int:
        return len(self.aligned.images)

    @cached_property
    def hidden(self) -> Bool[Tensor, "n h w"] | None:
        return self.aligned.hidden()

    def key(self, *more: object) -> str:
        """A digest of everything that determines the features."""
        settings = {**asdict(self.recipe.pretrained), "hidden": (), "out": 0, "name": ""}
        for name in ("noise", "residual", "head", "views"):  # of the training, or of whole images
            del settings[name]
        text = [fingerprint(self.aligned.images), self.backbone.digest, settings, self.recipe.grid.stride, *more]
        if self.aligned.ignored is not None:
            text.append(fingerprint(self.aligned.ignored))
        return hashlib.sha256(json.dumps(text, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def features(self, images: UInt8[Tensor, "n k h w"]) -> Float[Tensor, "n r c d"]:
        return cell_features(self.backbone, self.recipe.pretrained, self.recipe.grid, images)

    def inliers(self, begin: int, end: int) -> Float[Tensor, "n r c d"]:
        return self.features(self.aligned.images[begin:end])

    def drawn(self, copies: int) -> Bool[Tensor, " m"] | None:
        """Which rows of `copies` of every good image are trained on; None: all."""
        if self.validation is None:
            return None
        return ~torch.isin(torch.arange(self.good * copies) % self.good, self.validation)

    def outliers(self, begin: int, end: int) -> Float[Tensor, "n r c e"]:
        """Rows of the outlier cache: the first outlier of every good image, then the second of each, ..."""
        rows = torch.arange(begin, end)
        which, copy = rows % self.good, rows // self.good
        scene = Scene(self.aligned.foreground, self.aligned.images, self.aligned.foreground, self.hidden)[which]
        rng = stream(self.seed, "outliers", begin)
        made = make_outliers(self.recipe.outliers, self.aligned.images[which], rng=rng, copy=copy, scene=scene)
        if made.where is None:
            raise SettingError("these outliers change whole images; use local ones, such as outliers=mixture")
        altered = self.recipe.grid.parts(made.where)
        group = made.group[:, None, None].expand_as(altered)
        return torch.cat([self.features(made.images), torch.stack([altered, group], dim=3)], dim=3)


def _patch_task(embedder: Embedder, *, folder: Path | None, listener: Listener) -> PatchTask:
    """Embed the training images; with a folder the features are cached and an interrupted embedding resumes."""
    recipe, views = embedder.recipe, embedder.views
    key, counted = embedder.key(), partial(listener.progress, "embedding good images", total=embedder.good)
    good = stored(folder, "good", key, embedder.good, embedder.inliers, chunk=CHUNK, on_rows=counted)
    rows = embedder.good * (recipe.outliers.per_inlier if recipe.training.epochs else 0)
    made_by = embedder.key(embedder.seed, to_json(recipe.outliers))
    share = recipe.grid.parts(embedder.aligned.foreground)
    sampler = CellSampler.at_least(share, views.min_foreground, embedder.drawn(1))
    groups, bad = torch.full((len(good),), INLIER), good[:0]
    outliers = PatchSet(bad, CellSampler(share[:0] > 0), groups[:0])
    if rows:
        counted = partial(listener.progress, "embedding synthetic defects", total=rows)
        bad = stored(folder, "outliers", made_by, rows, embedder.outliers, chunk=CHUNK, on_rows=counted)
        drawn, group = embedder.drawn(recipe.outliers.per_inlier), bad[:, 0, 0, -1].long()
        altered = CellSampler.at_least(bad[..., -EXTRA].float(), views.min_altered, drawn)
        outliers = PatchSet(bad[..., :-EXTRA], altered, group)
    validation = embedder.validation
    return PatchTask(
        PatchSet(good, sampler, groups),
        outliers,
        embedder.backbone,
        recipe.pretrained,
        embedder.preprocessing,
        views.min_overlap,
        recipe.training,
        embedder.seed,
        "-".join([key, made_by, *([] if validation is None else [fingerprint(validation)])]),
        None
        if validation is None
        else ValidationImages(validation, embedder.aligned.foreground, embedder.hidden, bad[..., -EXTRA].float()),
    )


def most_images(recipe: Recipe, side: Size, gigabytes: float, backbone: Backbone | None) -> int:
    """How many good images a fit can use within a memory budget."""
    per_image = _image_bytes(recipe, side, backbone)
    if (images := int((gigabytes * 1e9 - LIBRARIES) / per_image)) < FEWEST:
        least = (LIBRARIES + FEWEST * per_image) / 1e9
        raise MachineError(f"{gigabytes:g} GB of memory are too little for a fit; give {least:.1f} or more")
    return images


def feature_sizes(recipe: Recipe, backbone: Backbone | None) -> dict[str, int]:
    """The feature dimension of each kind for one patch."""
    grid, settings = recipe.grid, recipe.pretrained
    if backbone is not None:
        patch = torch.zeros(1, 3, settings.pool * grid.stride, settings.pool * grid.stride, dtype=torch.uint8)
        pixels = cell_pixels(grid, settings.pool, patch, grey=False).shape[-1]
        trained = {"encoder": settings.out, "projection": recipe.encoder.head.out}
        return trained | {"backbone": feature_count(settings, backbone.facts), "pixels": pixels}
    with torch.device("meta"):
        network = Network(recipe.encoder)
    kinds = kinds_of(recipe.features)
    extractor = EncoderFeatures(network.to_empty(device="cpu"), Preprocessing(grid.size), grid, kinds, grey=False)
    patch = torch.zeros(1, 3, grid.size, grid.size, dtype=torch.uint8)
    return {kind: features.shape[-1] for kind, features in extractor(patch).items()}


def _image_bytes(recipe: Recipe, side: Size, backbone: Backbone | None) -> float:
    height, width = height_and_width(side)
    pixels = PIXEL_COPIES * 3 * height * width
    if not recipe.patchwise:
        return pixels
    if isinstance(side, int):
        height = width = min(side, recipe.size or side)
    cell = recipe.grid.stride if recipe.pretrained.name else 1
    rows, columns = recipe.grid.shape(height - height % cell, width - width % cell)
    sizes = feature_sizes(recipe, backbone)
    return pixels + FEATURE_COPIES * 4 * rows * columns * sum(sizes[kind] for kind in kinds_of(recipe.features))
