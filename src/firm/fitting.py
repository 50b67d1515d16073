"""Recipe x images -> Task: the settings of an experiment made concrete for the images at hand."""

from __future__ import annotations

from firm.images import Preprocessing, inlier_statistics, resize
from firm.recipes.recipe import Recipe
from firm.training import Task
from firm.types import OneClass, Statistics

HALF = Statistics((0.5,) * 3, (0.5,) * 3)


def preprocessing_of(recipe: Recipe, data: OneClass) -> Preprocessing:
    """The one preprocessing of this recipe on these images; published statistics where there are any."""
    if recipe.normalise == "half":
        statistics = HALF
    elif recipe.normalise == "published" and data.statistics is not None:
        statistics = data.statistics
    else:
        statistics = inlier_statistics(data.train)
    return Preprocessing(recipe.size or data.size, recipe.zoom, statistics, side=data.train.shape[-1])


def task_of(recipe: Recipe, data: OneClass, *, seed: int) -> Task:
    """Everything that decides a training on this data."""
    preprocessing = preprocessing_of(recipe, data)
    images = data.train
    if max(images.shape[-2:]) > preprocessing.size:  # the views crop without antialiasing, so shrink properly first
        images = resize(images, preprocessing.size)
    return Task(
        images=images,
        preprocessing=preprocessing,
        outliers=recipe.outliers,
        views=recipe.views,
        positives=recipe.positives,
        training=recipe.training,
        seed=seed,
    )
