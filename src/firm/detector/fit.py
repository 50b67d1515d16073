"""Recipe x images -> Task: the settings of an experiment made concrete for the images at hand."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from firm.adaptor import Adapted, CellLooker
from firm.conditioning import Conditioned, Conditioning
from firm.data import files_to_learn, load
from firm.data.folder import SIDE, SIZE
from firm.encoder import Network
from firm.ignoring import check_ignored, scaled
from firm.images import Preprocessing, inlier_statistics, resize, resize_mask
from firm.localiser import Looker, Looks, check_dense, is_grey, kinds_of
from firm.recipes.recipe import Recipe
from firm.tiling import Grid
from firm.training import Task
from firm.types import FirmError, OneClass, Statistics

HALF = Statistics((0.5,) * 3, (0.5,) * 3)


def preprocessing_of(recipe: Recipe, data: OneClass) -> Preprocessing:
    """The one preprocessing of this recipe on these images; published statistics where there are any."""
    if recipe.normalise == "half":
        statistics = HALF
    elif recipe.normalise == "published" and data.statistics is not None:
        statistics = data.statistics
    else:
        statistics = inlier_statistics(data.train)
    side = data.train.shape[-1]
    size = recipe.size or data.size
    if recipe.tiling.patchwise:
        size = min(size, side)
    if recipe.pretrained.name and isinstance(recipe.tiling, Grid):
        size -= size % recipe.tiling.stride  # cells lie side by side
    return Preprocessing(size, recipe.zoom, statistics, side=side, depth=data.depth)


def conditioned(recipe: Recipe, data: OneClass) -> tuple[OneClass, Conditioned | None]:
    """The data with its good images in standard light and pose, and how they came to it; None: as they are."""
    if not recipe.tiling.patchwise and recipe.conditioning == Conditioning():
        return data, None
    size = recipe.size or data.size
    shrinks = recipe.tiling.patchwise and data.train.shape[-1] > size
    ready = recipe.conditioning(resize(data.train, size) if shrinks else data.train, data.ignored)
    ready = ready.completed(ready.usual())
    plain = recipe.conditioning.light == "none"
    return replace(data, train=ready.images, statistics=data.statistics if plain else None), ready


def task_of(recipe: Recipe, data: OneClass, *, seed: int) -> Task:
    """Everything that decides a training on this data."""
    data, ready = conditioned(recipe, data)
    preprocessing = preprocessing_of(recipe, data)
    images, foreground, hidden = data.train, None, None
    if ready is not None:
        foreground, hidden = ready.foreground, ready.hidden()
    if max(images.shape[-2:]) > preprocessing.size:  # the views crop without antialiasing, so shrink properly first
        images = resize(images, preprocessing.size)
        if foreground is not None:  # not found anew: what was lit or aligned already must not be so twice
            foreground = torch.stack([resize_mask(mask.numpy(), preprocessing.size) for mask in foreground])
        if hidden is not None:
            hidden = torch.stack([scaled(mask, preprocessing.size, preprocessing.size) for mask in hidden])
    if foreground is not None and is_grey(images):
        images = images[:, :1].contiguous()  # a third of the work of synthesis
    return Task(
        images=images,
        preprocessing=preprocessing,
        outliers=recipe.outliers,
        views=recipe.views,
        positives=recipe.positives,
        training=recipe.training,
        seed=seed,
        foreground=foreground,
        ignored=data.ignored,
        hidden=hidden,
    )


def looker_of(recipe: Recipe, network: Network | Adapted, preprocessing: Preprocessing, *, grey: bool) -> Looks:
    """How this recipe sees the patches of an image."""
    if not isinstance(recipe.tiling, Grid):
        raise FirmError("this recipe looks at whole images; set tiling=grid to look at patches")
    kinds = kinds_of(recipe.features)
    if isinstance(network, Adapted):
        return CellLooker(network, recipe.pretrained, recipe.tiling, kinds, grey)
    return Looker(network, preprocessing, recipe.tiling, kinds, grey)


def side_for(recipe: Recipe) -> int:
    """At which images are read: patches are cut from the very pixels, whole images are shrunk in two steps."""
    return recipe.size if recipe.tiling.patchwise and recipe.size else max(SIDE, 2 * recipe.size)


def check_before(recipe: Recipe, data: OneClass, references: int) -> None:
    """What would fail after the training is said before it."""
    check_ignoring(recipe, data.ignored)
    height, width = data.train.shape[-2:]
    if height != width:
        raise FirmError(f"images of {width} x {height} pixels cannot be learnt from; make them square (images.resize)")
    k = getattr(recipe.score.by, "k", 1)
    if k > references:
        raise FirmError(f"score.by.k is {k}, but only {references} good images are learnt from; use a smaller k")


def check_ignoring(recipe: Recipe, ignored: Bool[Tensor, "a b"] | None) -> None:
    """Only what decides patch by patch can leave pixels out."""
    if ignored is None:
        return
    if not isinstance(recipe.tiling, Grid):
        raise FirmError("this recipe looks at whole images and cannot ignore a part of them; fit with --preset inspect")
    check_ignored(ignored)


def check_tiles(recipe: Recipe, network: Network | Adapted, side: int) -> None:
    """What patches ask of the side of the images is said before the training, too."""
    if isinstance(recipe.tiling, Grid):
        recipe.tiling.places(side, side)
        if recipe.tiling.dense and isinstance(network, Network):
            check_dense(network.encoder, recipe.tiling, side, side)


def data_of(
    good: Path | str | UInt8[Tensor, "n c h w"] | OneClass,
    recipe: Recipe,
    ignored: Bool[Tensor, "a b"] | None = None,
    *,
    most: int = 0,
) -> OneClass:
    """Whatever is given to learn from; files are read at the side the recipe wants, at most so many of them (0: all).

    Some pixels may be ignored.
    """
    data = good if not isinstance(good, Path | str) else _read(str(good), side_for(recipe), most)
    data = data if isinstance(data, OneClass) else as_data(data)
    return data if ignored is None else replace(data, ignored=ignored)


def _read(name: str, side: int, most: int) -> OneClass:
    files = len(files_to_learn(name))
    if 0 < most < files:
        warnings.warn(
            f"{files:,} good images: {most:,} of them, drawn evenly, are read; give more memory for more", stacklevel=4
        )
    return load(name, side=side, most=most, tested=False)


def as_data(good: UInt8[Tensor, "n c h w"], ignored: Bool[Tensor, "a b"] | None = None) -> OneClass:
    """Bare good images as a data set without a test part."""
    check_images(good)
    size = min(SIZE, good.shape[-1])
    return OneClass("images", good, good[:0], torch.zeros(0, dtype=torch.bool), size, ignored=ignored)


def check_images(images: Tensor) -> None:
    """Pixels as they come from a file: uint8, channels first, at least one pixel."""
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] not in (1, 3) or not all(images.shape[2:]):
        raise FirmError(f"images are {images.dtype} of shape {tuple(images.shape)}; give uint8 (n, 1 or 3, h, w)")
