"""Recipe x good images -> a task: sizes, statistics, aligned images, features embedded once and named."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
import torch

import contracts
import drawings
from firm.detector.prepare import (
    CHUNK,
    EXTRA,
    HALF,
    VALIDATION_FROM,
    VALIDATION_MOST,
    Embedder,
    _validation_images,
    prepare,
    read_side,
)
from firm.detector.read import as_data
from firm.errors import SettingError
from firm.images.preprocess import fingerprint, inlier_statistics, resize
from firm.networks.adaptor import Pretrained
from firm.networks.weights import load_backbone
from firm.recipes.presets import ADAPTED, FAST, INSPECT, PRESETS
from firm.recipes.recipe import change
from firm.scoring.patch_features import cell_features
from firm.scoring.patch_grid import Grid
from firm.types import OneClass, Statistics

PUBLISHED = Statistics((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
SIDE, SCREWS = 96, drawings.screws(8, turned=True, light=0.2).images
PATCHES = change(
    INSPECT,
    {"encoder.width": 8, "training.batch": 16, "size": 64, "conditioning.illumination": "median",
     "conditioning.align": True, "conditioning.foreground.method": "otsu", "automatic": ()},
)  # fmt: skip


def data_of(statistics=PUBLISHED, side=12):
    images = contracts.images_of(10, 3, side)
    return OneClass("some:class", images, images, torch.zeros(10, dtype=torch.bool), 12, statistics)


def task_of(recipe, data, seed=0):
    return prepare(recipe, data, torch.arange(len(data.train)), seed=seed).task


# --- an encoder from scratch ---


def test_pixels_are_normalised_as_the_recipe_says():
    own = inlier_statistics(data_of().train)
    for normalise, published, expected in (
        ("published", PUBLISHED, PUBLISHED),
        ("published", None, own),
        ("inliers", PUBLISHED, own),
        ("half", PUBLISHED, HALF),
    ):
        task = task_of(change(FAST, {"normalise": normalise, "training.batch": 8}), data_of(published))
        assert task.preprocessing.statistics == expected


def test_a_task_is_what_the_recipe_says():
    recipe = change(FAST, {"training.batch": 8, "outliers": "cutpaste", "zoom": 1.0})
    data = data_of()
    task = task_of(recipe, data, seed=3)
    assert torch.equal(task.images, data.train)
    assert (task.outliers, task.views, task.training, task.seed) == (
        recipe.outliers,
        recipe.views,
        recipe.training,
        3,
    )
    assert (task.preprocessing.size, task.preprocessing.zoom) == (12, 1.0)
    assert task.steps_per_epoch == 10 * 4 // 8


def test_larger_images_are_shrunk_before_the_views_crop_them():
    recipe = change(FAST, {"training.batch": 8})
    for side, expected in ((30, 12), (8, 8)):
        assert task_of(recipe, data_of(side=side)).images.shape == (10, 3, expected, expected)
    assert task_of(change(recipe, {"size": 20}), data_of(side=30)).images.shape[-1] == 20


def test_files_are_read_at_the_side_that_patches_are_cut_from():
    assert read_side(PRESETS["inspect"]) == read_side(PRESETS["patches"]) == 256
    assert read_side(change(INSPECT, {"size": 96})) == 96
    assert read_side(PRESETS["whole"]) == 512
    assert read_side(PRESETS["fast"]) == read_side(change(PRESETS["parts"], {"size": 32})) == 128


def test_patches_are_learnt_from_aligned_images():
    task = task_of(PATCHES, as_data(SCREWS))
    aligned = PATCHES.conditioning(resize(SCREWS, 64))
    assert task.images.shape == (8, 1, 64, 64)  # no colour, so a third of the work
    assert torch.equal(task.images.expand(-1, 3, -1, -1), aligned.images)
    assert torch.equal(task.foreground, aligned.foreground)
    tinted = SCREWS.clone()
    tinted[0, 0, 40:50, 40:50] = 255
    assert task_of(PATCHES, as_data(tinted)).images.shape == (8, 3, 64, 64)
    large = task_of(change(PATCHES, {"size": 200}), as_data(SCREWS))  # patches never show enlarged pixels
    assert large.images.shape[-1] == large.preprocessing.size == SIDE


def test_whole_images_are_aligned_and_shrunk_with_their_objects():
    recipe = change(
        PATCHES, {"tiling": "whole", "views": "translation", "size": 48, "conditioning.illumination": "local"}
    )
    task = task_of(recipe, as_data(SCREWS))
    aligned = recipe.conditioning(SCREWS)
    assert torch.equal(task.images.expand(-1, 3, -1, -1), resize(aligned.images, 48))
    enlarged = task.foreground.repeat_interleave(2, 1).repeat_interleave(2, 2)
    overlap = (enlarged & aligned.foreground).sum((1, 2)) / (enlarged | aligned.foreground).sum((1, 2))
    assert float(overlap.min()) > 0.85


# --- features of a frozen backbone ---


GOOD = drawings.screws(6, light=0.1).images
GRID = Grid(size=8, stride=8)


@pytest.fixture(scope="module")
def backbone(resnet18_file):
    return load_backbone(resnet18_file, deepest=2)


@pytest.fixture(scope="module")
def recipe(resnet18_file):
    """One stage of a ResNet-18, two defects on each of six screws."""
    changes = {
        "pretrained": Pretrained(name=resnet18_file, stages=(2,), margin=0, hidden=(16,), out=8),
        "outliers": "perlin-blend",
        "outliers.per_inlier": 2,
        "encoder.head.hidden": [8],
        "encoder.head.out": 8,
        "training.epochs": 1,
        "training.batch": 32,
        "size": SIDE,
        "conditioning.foreground.method": "otsu",
        "automatic": [],
    }
    return change(ADAPTED, changes)


@pytest.fixture(scope="module")
def embedded(recipe, backbone):
    return prepare(recipe, as_data(GOOD), torch.arange(6), seed=0, backbone=backbone)


def embedder(prepared, recipe=None, validation=None):
    recipe, task = recipe or prepared.recipe, prepared.task
    return Embedder(recipe, recipe.views, task.backbone, prepared.aligned, task.preprocessing, 0, validation)


def test_what_is_embedded_is_what_is_learnt_from(embedded, backbone):
    task, aligned = embedded.task, embedded.aligned
    assert task.good.features.shape == (6, 12, 12, 64)
    expected = cell_features(backbone, embedded.recipe.pretrained, GRID, aligned.images)
    torch.testing.assert_close(task.good.features.float(), expected, rtol=2e-3, atol=1e-3)  # stored in half precision
    assert len(task.outliers.features) == 12
    assert bool((task.outliers.group > 0).all())
    shown = GRID.parts(aligned.foreground)
    assert bool((shown[task.good.sampler.allowed] >= 0.3).all())
    assert task.validation is task.good.sampler.drawn is None


def test_altered_cells_are_where_the_defect_was_painted(embedded):
    rows = embedder(embedded).outliers(0, 6)
    altered, moved = rows[..., -EXTRA], (rows[..., :-EXTRA] - embedded.task.good.features.float()).norm(dim=3)
    assert float(moved[altered > 0.5].mean()) > 3 * float(moved[altered == 0].mean())


def test_a_batch_is_a_function_of_seed_and_step(embedded):
    first, again, other = embedded.task.batch(3), embedded.task.batch(3), embedded.task.batch(4)
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, other.images)
    assert first.images.shape == (64, 64)
    assert first.group[:16].eq(0).all()
    assert first.group[16:32].gt(0).all()
    assert torch.equal(first.source[:32], first.source[32:])


def test_features_are_named_by_all_that_decides_them_and_by_nothing_else(embedded):
    """The name by hand, so that features of earlier fits are found again."""
    settings = {"name": "", "stages": (2,), "pool": 3, "margin": 0, "hidden": (), "out": 0}
    made = embedder(embedded)
    text = json.dumps([fingerprint(made.aligned.images), made.backbone.digest, settings, 8, 5], sort_keys=True)
    assert made.key(5) == hashlib.sha256(text.encode()).hexdigest()[:16]
    same = {"pretrained.hidden": [64], "pretrained.noise": 0.5, "training.epochs": 9, "positives": "supcon"}
    assert embedder(embedded, change(embedded.recipe, same)).key() == made.key()
    for changes in ({"pretrained.pool": 5}, {"pretrained.stages": [1]}, {"tiling": Grid(size=16, stride=16)}):
        assert embedder(embedded, change(embedded.recipe, changes)).key() != made.key()
    fewer = replace(embedded, aligned=embedded.aligned[1:])
    assert embedder(fewer).key() != made.key()


def test_noise_is_another_training_on_the_same_stored_features(recipe, backbone, tmp_path):
    names, written = {}, set()
    for changes in ({}, {"pretrained.noise": 0.3}):
        noisy = change(recipe, changes)
        prepared = prepare(noisy, as_data(GOOD), torch.arange(6), seed=0, backbone=backbone, folder=tmp_path)
        names[prepared.run().digest] = prepared.task.fingerprint
        written |= {(file.name, file.stat().st_mtime_ns) for file in tmp_path.iterdir()}
    assert len(names) == 2
    assert len(set(names.values())) == 1
    assert len(written) == 4  # two stores and their cards, never written again
    for name, rows, numbers in (("good", 6, 64), ("outlier", 12, 64 + EXTRA)):
        (file,) = tmp_path.glob(f"{name}*.f16")
        assert file.stat().st_size == 2 * rows * 12 * 12 * numbers


def test_whole_image_outliers_are_refused(recipe, backbone):
    rotated = change(recipe, {"outliers": "rotations"})
    with pytest.raises(SettingError, match="outliers"):
        prepare(rotated, as_data(GOOD), torch.arange(6), seed=0, backbone=backbone)


# --- validation images ---


def test_validation_images_and_their_defects_are_never_drawn(recipe, backbone, embedded, monkeypatch):
    monkeypatch.setattr("firm.detector.prepare.VALIDATION_FROM", 6)
    monkeypatch.setattr("firm.detector.prepare.VALIDATION_SHARE", 0.34)
    later = change(recipe, {"automatic": ["features"], "memory.neighbourhood": -1})
    task = prepare(later, as_data(GOOD), torch.arange(6), seed=0, backbone=backbone).task
    kept_out = task.validation.images
    assert len(kept_out) == 2
    learnt = ~torch.isin(torch.arange(6), kept_out)
    assert torch.equal(task.good.sampler.drawn, learnt)
    assert torch.equal(task.outliers.sampler.drawn, learnt.repeat(2))
    assert torch.equal(task.good.features, embedded.task.good.features)
    assert task.fingerprint != embedded.task.fingerprint  # one training is never resumed as the other
    altered = torch.cat([embedder(embedded).outliers(*rows)[..., -EXTRA] for rows in ((0, CHUNK), (CHUNK, 12))])
    torch.testing.assert_close(task.validation.altered, altered.half().float())


def test_a_tenth_of_many_images_is_kept_for_validation_and_none_of_few(recipe):
    later = change(recipe, {"automatic": ["features"], "memory.neighbourhood": -1})
    for changes in ({"automatic": []}, {"training.epochs": 0}, {"memory.neighbourhood": 1}):
        assert _validation_images(change(later, changes), torch.arange(VALIDATION_FROM), seed=0) is None
    assert _validation_images(later, torch.arange(VALIDATION_FROM - 1), seed=0) is None
    for images, kept in ((VALIDATION_FROM, VALIDATION_FROM // 10), (20 * VALIDATION_MOST, VALIDATION_MOST)):
        assert len(_validation_images(later, torch.arange(images), seed=0)) == kept
