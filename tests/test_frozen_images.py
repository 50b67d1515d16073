"""Whole images on frozen features: pooling, the residual adaptor, pairs of views, folds, resume, the floor, files."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import contracts
from firm.detector import embed_images, frozen_floor
from firm.detector import fit as pipeline
from firm.detector.detector import Detector
from firm.detector.prepare import frozen_backbone, prepare
from firm.detector.read import Options, as_data, read_good
from firm.drawn.render import draw_dataset
from firm.errors import SettingError, Stopped
from firm.images.preprocess import Preprocessing
from firm.networks.adaptor import AdaptedImages, Adaptor, Pretrained, pooled_features
from firm.networks.heads import Encoder
from firm.networks.weights import load_backbone
from firm.outliers.registry import CutPerm, Exposure, Rotations, RotationsAndExposure
from firm.recipes.presets import recipe as preset
from firm.training.feature_batches import FeatureSet
from listening import Heard
from random_networks import pictures, random_backbone

SMALL = {"pretrained.name": "wavelets", "size": 32, "training.epochs": 1, "outliers": "rotations", "automatic": []}
SMALL |= {"pretrained.hidden": [8], "pretrained.views": 2, "training.batch": 16}
RECIPE = preset("semantic", **SMALL)
PLATES = draw_dataset("plate", size=32, train=24, good=6, bad=6)
DATA = as_data(PLATES.train)
TAUGHT = {"rotations": Rotations(), "both": RotationsAndExposure(), "cutperm": CutPerm(), "exposure": Exposure()}


@pytest.fixture(scope="module", autouse=True)
def few_outliers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embed_images, "FEWEST_OUTLIERS", 24)
        yield


@pytest.fixture(scope="module")
def backbone():
    return load_backbone("wavelets")


@pytest.fixture(scope="module")
def prepared(backbone):
    return prepare(RECIPE, DATA, torch.arange(24), seed=0, backbone=backbone)


# --- features ---


def test_each_stage_is_averaged_and_scaled_to_unit_length():
    network, images = random_backbone("efficientnet-lite0"), pictures(2)
    found, stages = pooled_features(network, (4, 5), images), network.stages(images)
    for image in range(2):
        parts = []
        for stage in (3, 4):
            mean = np.array([channel.numpy().mean() for channel in stages[stage][image]])
            parts.append(mean / np.sqrt((mean**2).sum()))
        np.testing.assert_allclose(found[image], np.concatenate(parts), rtol=1e-4, atol=1e-6)


def test_a_residual_adaptor_starts_as_the_identity_and_learns():
    settings = Pretrained(residual=True, hidden=(16,), head=False)
    statistics, features = (torch.zeros(6), torch.ones(6)), torch.randn(8, 6, generator=contracts.generator())
    adaptor = Adaptor.build(statistics, settings, Encoder(), rng=contracts.generator())
    assert torch.equal(adaptor.adapted(features), features)
    assert torch.equal(adaptor(features), features)  # without a head the loss sees the adapted features
    adaptor(features).square().sum().backward()
    assert any(bool(each.grad.any()) for each in adaptor.parameters() if each.grad is not None)


def test_scores_use_the_kind_of_features_that_is_asked_for(prepared, backbone):
    adaptor = prepared.task.network(RECIPE.encoder)
    images = prepared.task.preprocessing.test_view(PLATES.train[:3])
    kinds = {kind: AdaptedImages(backbone, adaptor, RECIPE.pretrained, kind).eval() for kind in ("backbone", "pixels")}
    for kind, network in kinds.items():
        assert network(images).shape == (3, network.dim), kind
    torch.testing.assert_close(kinds["backbone"](images), prepared.task.clean[:3].float(), atol=1e-3, rtol=1e-3)


# --- batches ---


def test_a_pair_is_two_views_of_one_image_that_is_drawn():
    features = torch.arange(24.0).view(6, 4, 1)  # image i has the views 4 i .. 4 i + 3
    views = FeatureSet(features, torch.arange(6), torch.tensor([0, 2, 5]))
    first, second, group = views.pairs(400, rng=contracts.generator())
    assert torch.equal(first[:, 0] // 4, second[:, 0] // 4)
    assert torch.equal(group, (first[:, 0] // 4).long())
    assert bool((first != second).all())
    assert set(group.tolist()) == {0, 2, 5}
    assert len(set(first[:, 0].tolist())) == 12  # every view is used


def test_batches_are_half_outliers_and_a_function_of_seed_and_step(prepared):
    task = prepared.task
    batch, again = task.batch(3), task.batch(3)
    assert torch.equal(batch.images, again.images)
    assert not torch.equal(batch.images, task.batch(4).images)
    assert int((batch.group == 0).sum()) == len(batch.group) // 2
    ranks = [task.batch(3, rank=rank, world=2).images for rank in (0, 1)]
    assert sorted(map(tuple, torch.cat(ranks).tolist())) == sorted(map(tuple, batch.images.tolist()))


def test_a_fold_sees_neither_the_images_left_out_nor_their_outliers(prepared):
    known = torch.arange(0, 24, 2)
    task = prepared.subset(known).task
    assert torch.equal(task.good.drawn, known)
    assert not bool((task.outliers.drawn % 24 % 2).any())
    assert torch.equal(task.references, prepared.task.clean[known])
    assert task.fingerprint != prepared.task.fingerprint


# --- outliers ---


@pytest.mark.parametrize("channels", [1, 3])
def test_exposure_has_no_colour_beside_grey_images_and_is_the_same_for_all_of_a_shape(backbone, tmp_path, channels):
    np.save(tmp_path / "pool.npy", np.random.default_rng(0).integers(0, 256, (30, 8, 8, 3), dtype=np.uint8))
    source, shape = Exposure(path=str(tmp_path / "pool.npy")), (4, channels, 8, 8)
    first, second = (torch.full(shape, level, dtype=torch.uint8) for level in (3, 9))
    how = (Preprocessing(32), 0)
    embedders = [embed_images.ImageEmbedder(RECIPE, backbone, images, *how) for images in (first, second)]
    made = [each.make(source, each.images, rng=contracts.generator()).images for each in embedders]
    assert made[0].shape == shape
    assert bool((made[0] == made[0][:, :1]).all())
    assert torch.equal(*made)
    assert embedders[0].key(of=source) == embedders[1].key(of=source)
    assert embedders[0].key(of=Rotations()) != embedders[1].key(of=Rotations())
    colour = contracts.images_of(4, 3, 8)
    coloured = embed_images.ImageEmbedder(RECIPE, backbone, colour, *how)
    assert coloured.key(of=source) != embedders[0].key(of=source)
    assert not bool((coloured.make(source, colour, rng=contracts.generator()).images == made[0][:, :1]).all())


def test_cutperm_moves_quarters_and_never_returns_the_image():
    images = contracts.images_of(40, 3, 8)
    made = CutPerm()(images, rng=contracts.generator()).images
    for before, after in zip(images, made, strict=True):
        quarters = [
            sorted(each[:, y : y + 4, x : x + 4].flatten().tolist() for y in (0, 4) for x in (0, 4))
            for each in (before, after)
        ]
        assert quarters[0] == quarters[1]
        assert not torch.equal(before, after)


def test_rotations_and_exposure_are_both_made_and_told_apart(tmp_path):
    np.save(tmp_path / "pool.npy", np.full((5, 8, 8, 3), 7, dtype=np.uint8))
    source, images = RotationsAndExposure(path=str(tmp_path / "pool.npy")), contracts.images_of(80, 1, 8)
    made = source(images, rng=contracts.generator(), copy=torch.arange(80) % 4)
    exposed = made.group == 4
    assert exposed.tolist() == [number % 4 >= 2 for number in range(80)]
    assert bool((made.images[exposed] == 7).all())
    for image, rotated, quarter in zip(images[~exposed], made.images[~exposed], made.group[~exposed], strict=True):
        np.testing.assert_array_equal(rotated[:1], np.rot90(image, int(quarter), axes=(1, 2)))


# --- the pipeline ---


def test_a_detector_is_calibrated_by_folds_and_comes_back_from_its_file(tmp_path):
    detector = Detector.fit(DATA, recipe=RECIPE)
    assert detector.decides.basis == "folds"
    scores = detector.score(PLATES.test)
    detector.save(tmp_path / "plate.firm")
    again = Detector.load(tmp_path / "plate.firm")
    assert torch.equal(again.score(PLATES.test), scores)
    assert again.origin["backbone"]["name"] == "wavelets"
    assert again.inspect(PLATES.test[0].permute(1, 2, 0).numpy()).verdict in ("PASS", "REVIEW", "FAIL")
    assert torch.equal(Detector.fit(DATA, recipe=RECIPE).score(PLATES.test), scores)  # one seed, one detector


def test_a_split_and_every_score_work():
    for score in ("s_shift", "s_proto"):
        recipe = preset("semantic", **SMALL | {"score": score, "training.epochs": 1})
        detector = Detector.fit(DATA, recipe=recipe, calibration="split")
        assert bool(detector.score(PLATES.test[:2]).isfinite().all())


def test_a_stopped_fit_goes_on_where_it_was(tmp_path, monkeypatch):
    whole = pipeline.fit(read_good(DATA, RECIPE, Options(folder=tmp_path / "whole")))
    options = Options(folder=tmp_path / "stopped", checkpoint_seconds=0.0)

    def stop(progress, _):
        if progress.step == 7:
            raise Stopped(2, "stopped")

    with pytest.raises(Stopped):
        pipeline.fit(read_good(DATA, RECIPE, options), on_progress=stop)
    embedded = len(list((tmp_path / "stopped").glob("*.f16")))
    resumed = pipeline.fit(read_good(DATA, RECIPE, options))
    assert embedded == 2
    assert resumed.id == whole.id


@pytest.mark.parametrize("better", [False, True])
def test_frozen_features_stay_where_the_adaptor_is_not_better(better, monkeypatch):
    def auroc(recipe, *_):
        return {"cutperm": 0.8 if (recipe.features == "encoder") == better else 0.6}

    monkeypatch.setattr(frozen_floor, "held_out_auroc", auroc)
    heard, recipe = Heard(), preset("semantic", **SMALL | {"automatic": ["features"]})
    many = as_data(torch.cat([PLATES.train, PLATES.train.flip(3)]))
    fitted = pipeline.fit(read_good(many, recipe, Options(parts=torch.arange(48))), heard)
    assert fitted.recipe.features == ("encoder" if better else "backbone")
    assert any("frozen features" in text for text in heard.warnings) != better


def test_the_floor_is_measured_on_kinds_that_were_not_taught(prepared, backbone):
    how = (PLATES.train[:4], prepared.task.preprocessing, 0)
    embedder = embed_images.ImageEmbedder(RECIPE, backbone, *how)
    untaught = {name: set(frozen_floor.judging_outliers(embedder, taught, seed=0)) for name, taught in TAUGHT.items()}
    assert all({"cutpaste", "perlin-blend"} <= judges for judges in untaught.values())
    for taught in ("rotations", "both", "cutperm"):  # rearranged parts are kin to rotations
        assert not {"rotations", "cutperm"} & untaught[taught]
    assert {"rotations", "cutperm"} <= untaught["exposure"]
    assert not {"exposure"} & (untaught["exposure"] | untaught["both"])


def test_wrong_settings_are_refused(backbone):
    with pytest.raises(SettingError, match="features"):
        preset("semantic", **SMALL | {"features": "encoder+backbone", "memory.standardise": True})
    with pytest.raises(SettingError, match="views"):
        Pretrained(views=1)
    with pytest.raises(SettingError, match="noise"):
        prepare(
            preset("semantic", **SMALL | {"pretrained.noise": 0.1}), DATA, torch.arange(24), seed=0, backbone=backbone
        )
    with pytest.raises(SettingError, match="patches"):
        frozen_backbone(preset("semantic", **SMALL | {"views": "patches"}))
