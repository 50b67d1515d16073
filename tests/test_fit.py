"""From a recipe and images to a task: which size, which statistics, which settings."""

import pytest
import torch

import contracts
from firm.fitting import HALF, preprocessing_of, task_of
from firm.images import inlier_statistics
from firm.recipes.presets import FAST
from firm.recipes.recipe import change
from firm.types import OneClass, Statistics

PUBLISHED = Statistics((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def data_of(statistics=PUBLISHED, side=12):
    images = contracts.images_of(10, 3, side)
    return OneClass("some:class", images, images, torch.zeros(10, dtype=torch.bool), 12, statistics)


@pytest.mark.parametrize(
    ("normalise", "published", "expected"),
    [
        ("published", PUBLISHED, PUBLISHED),
        ("published", None, inlier_statistics(data_of().train)),
        ("inliers", PUBLISHED, inlier_statistics(data_of().train)),
        ("half", PUBLISHED, HALF),
    ],
)
def test_statistics(normalise, published, expected):
    found = preprocessing_of(change(FAST, {"normalise": normalise}), data_of(published))
    assert found.statistics == expected


def test_size_and_zoom():
    own = preprocessing_of(FAST, data_of())
    assert (own.size, own.zoom) == (12, 1.125)
    asked = preprocessing_of(change(FAST, {"size": 20, "zoom": 1.0}), data_of())
    assert (asked.size, asked.zoom) == (20, 1.0)


def test_a_task_carries_the_recipe():
    recipe = change(FAST, {"positives": "supcon", "training.batch": 8, "outliers": "cutpaste"})
    data = data_of()
    task = task_of(recipe, data, seed=3)
    assert torch.equal(task.images, data.train)
    assert (task.positives, task.training, task.seed) == ("supcon", recipe.training, 3)
    assert (task.outliers, task.views) == (recipe.outliers, recipe.views)
    assert task.preprocessing == preprocessing_of(recipe, data)
    assert task.steps_per_epoch == 10 * 4 // 8
    assert task.steps == 5 * recipe.training.epochs


def test_larger_images_are_shrunk_before_the_views_crop_them():
    task = task_of(FAST, data_of(side=30), seed=0)
    assert task.images.shape == (10, 3, 12, 12)
    assert task_of(FAST, data_of(side=8), seed=0).images.shape == (10, 3, 8, 8)
