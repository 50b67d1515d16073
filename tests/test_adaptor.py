"""FIRM on pretrained features: cells of a backbone, batches of them, and a detector that needs nothing installed."""

from __future__ import annotations

import math
import re

import pytest
import torch

import drawings
from firm.detector.detector import Detector
from firm.detector.prepare import prepare
from firm.detector.read import as_data
from firm.errors import SettingError
from firm.metrics.image import auroc
from firm.networks.adaptor import Adapted, Adaptor, Pretrained
from firm.networks.heads import Head
from firm.networks.weights import FACTS, load_backbone
from firm.recipes.presets import ADAPTED
from firm.recipes.recipe import change
from firm.scoring.memory import Memory
from firm.scoring.patch_features import (
    BackboneFeatures,
    cell_features,
    cell_pixels,
    check_cells,
    kinds_of,
    mirrored,
)
from firm.scoring.patch_grid import Grid
from listening import Heard

SIDE = 96
GRID = Grid(size=8, stride=8)
GOOD = drawings.screws(16, light=0.1).images
FRESH, BAD = drawings.screws(8, light=0.1, seed=1), drawings.screws(8, light=0.1, seed=2, defect=True)


@pytest.fixture(scope="module")
def recipe(resnet18_file):
    changes = {
        "pretrained.name": resnet18_file,
        "pretrained.stages": [2, 3],
        "pretrained.hidden": [32],
        "pretrained.out": 16,
        "outliers": "perlin-blend",
        "encoder.head.hidden": [16],
        "encoder.head.out": 8,
        "training.epochs": 2,
        "training.batch": 64,
        "size": SIDE,
        "conditioning.foreground.method": "otsu",
        "automatic": [],
    }
    return change(ADAPTED, changes)


@pytest.fixture(scope="module")
def backbone(resnet18_file):
    return load_backbone(resnet18_file, deepest=4)


@pytest.fixture(scope="module")
def detector(recipe):
    return Detector.fit(
        GOOD, recipe=recipe, seed=0, holdout=0.2, false_calls=0.25, keep_suspects=True, listener=Heard()
    )


# --- cells of a backbone ---


def test_a_cell_sees_its_own_surroundings_and_not_the_far_side(backbone):
    settings = Pretrained(name="x", stages=(2,), pool=3)
    plain = torch.full((1, 3, SIDE, SIDE), 90, dtype=torch.uint8)
    spot = plain.clone()
    spot[:, :, 40:48, 64:72] = 250  # cell 5, 8
    change_ = (cell_features(backbone, settings, GRID, spot) - cell_features(backbone, settings, GRID, plain)).norm(
        dim=3
    )[0]
    assert divmod(int(change_.argmax()), 12) == (5, 8)
    assert float(change_[:, :2].max()) == 0


def test_the_border_is_no_edge(backbone):
    """An even image has even features; zeros beyond the border would make an edge of it."""
    even = torch.full((1, 1, SIDE, SIDE), 120, dtype=torch.uint8)
    features = cell_features(backbone, Pretrained(name="x", stages=(2, 3)), GRID, even)
    assert features.shape == (1, 12, 12, 64 + 128)
    off = (features - features[:, 6:7, 6:7]).norm(dim=3)
    assert float(off.max()) < 0.01 * float(features[0, 6, 6].norm())
    bare = backbone.stages(backbone.normalise(even / 255))[2][0]
    assert float((bare[:, 0] - bare[:, 6]).norm()) > 0.1 * float(bare[:, 6].norm())  # what the margin is for


def test_images_are_mirrored_to_whole_steps():
    for height, width in ((96, 96), (104, 72)):
        image = torch.rand(1, 3, height, width)
        padded = mirrored(image, 32)
        assert padded.shape[-2] % 32 == padded.shape[-1] % 32 == 0
        assert torch.equal(padded[..., 32 : 32 + height, 32 : 32 + width], image)
        assert torch.equal(padded[..., 31, 32 : 32 + width], image[..., 1, :])


def test_without_a_margin_zeros_lie_beyond_the_border(backbone):
    """As PatchCore has it: its own outputs, pooled with zeros around them."""
    settings = Pretrained(name="x", stages=(3,), pool=3, margin=0)
    found = cell_features(backbone, settings, GRID, GOOD[:1])
    stage = backbone.stages(backbone.normalise(GOOD[:1] / 255))[2]
    around = torch.nn.functional.pad(stage, (1, 1, 1, 1))
    for row, column in [(0, 0), (0, 7), (11, 11), (5, 6)]:
        expected = around[0, :, row : row + 3, column : column + 3].sum(dim=(1, 2)) / 9
        torch.testing.assert_close(found[0, row, column], expected, rtol=1e-4, atol=1e-5)


def test_plain_pixels_stand_beside_the_features_of_the_same_patches(backbone):
    settings = Pretrained(name="x", stages=(2, 3))
    network = Adapted(backbone, Adaptor(192, settings, Head(hidden=(8,), out=4)))
    for grey in (False, True):
        extractor = BackboneFeatures(network, settings, GRID, ("backbone", "pixels"), grey)
        kinds = extractor(GOOD[:2])
        assert torch.equal(kinds["backbone"], cell_features(backbone, settings, GRID, GOOD[:2]))
        expected = torch.stack([cell_pixels(GRID, settings.pool, image[None], grey=grey) for image in GOOD[:2]])
        assert torch.equal(kinds["pixels"], expected)
        assert set(extractor.from_cells(kinds["backbone"])) == {"backbone"}


def test_every_stage_comes_to_the_cells_asked_for(backbone):
    for stride in (4, 16):
        grid = Grid(size=stride, stride=stride)
        features = cell_features(backbone, Pretrained(name="x", stages=(1, 2, 3, 4)), grid, GOOD[:1])
        assert features.shape == (1, SIDE // stride, SIDE // stride, 64 + 64 + 128 + 256)


def test_each_image_is_described_alone(backbone):
    settings = Pretrained(name="x", stages=(2, 3))
    together = cell_features(backbone, settings, GRID, GOOD[:3])
    alone = cell_features(backbone, settings, GRID, GOOD[1:2])
    torch.testing.assert_close(together[1:2], alone, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_is_refused():
    for grid, side, culprit in (
        (Grid(size=32, stride=16), 96, "32 and 16"),
        (Grid(size=12, stride=12), 96, "12 and 12"),
        (GRID, 100, "100 px"),
        (GRID, 64, "64 px"),
    ):
        with pytest.raises(SettingError, match=culprit):
            check_cells(Pretrained(name="x"), grid, (side, side))
    for wrong in ({"pool": 2}, {"pool": 0}, {"margin": 16}, {"margin": -32}, {"out": 0}, {"hidden": (0,)}):
        with pytest.raises(SettingError, match=f"pretrained.*{next(iter(wrong))}"):
            Pretrained(**wrong)
    for noise in (-0.1, 11.0, math.nan):
        with pytest.raises(SettingError, match=r"pretrained\.noise"):
            Pretrained(noise=noise)
    with pytest.raises(SettingError, match="stages"):
        Pretrained(stages=(6,)).stages_of(FACTS["resnet18"])
    assert kinds_of("encoder+backbone") == ("encoder", "backbone")
    for wrong in ("encoder+", "backbone+backbone", "both+pixels", "colour"):
        with pytest.raises(SettingError, match=re.escape(repr(wrong))):
            kinds_of(wrong)
    with pytest.raises(SettingError, match="standardise"):
        change(ADAPTED, {"memory.standardise": False})
    with pytest.raises(SettingError, match="pretrained"):
        change(ADAPTED, {"pretrained.name": ""})


# --- a detector ---


def test_it_tells_bad_from_good_and_where(detector):
    both = torch.cat([FRESH.images, BAD.images])
    found = detector.locate(both)
    assert auroc(found.scores, torch.arange(16) >= 8) > 0.9
    inside = [float(found.maps[8 + i][BAD.masks[i]].mean()) for i in range(8)]
    outside = [float(found.maps[8 + i][~BAD.masks[i]].mean()) for i in range(8)]
    assert sum(a > b for a, b in zip(inside, outside, strict=True)) >= 7


def test_a_saved_one_decides_the_same_without_the_weights_file(detector, tmp_path, monkeypatch):
    detector.save(tmp_path / "part.firm")
    for name in ("load_backbone", "read_weights"):
        monkeypatch.delattr(f"firm.networks.weights.{name}")
    loaded = Detector.load(tmp_path / "part.firm")
    assert torch.equal(loaded.score(BAD.images), detector.score(BAD.images))
    assert "licence" in loaded.card()["origin"]


def test_an_interrupted_fit_goes_on_to_the_same_detector(recipe, detector, tmp_path):
    options = {"recipe": recipe, "seed": 0, "holdout": 0.2, "false_calls": 0.25, "folder": tmp_path}
    options |= {"keep_suspects": True, "listener": Heard()}

    def die(progress, run):
        if progress.step == 20:
            run.save()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Detector.fit(GOOD, **options, on_progress=die)
    steps = []
    resumed = Detector.fit(GOOD, **options, on_progress=lambda progress, run: steps.append(progress.step))
    assert steps[0] == 21
    assert torch.equal(resumed.score(BAD.images), detector.score(BAD.images))
    assert resumed.decides == detector.decides


def test_the_plain_baseline_trains_nothing_and_makes_no_defects(recipe, tmp_path):
    plain = change(recipe, {"features": "backbone", "training.epochs": 0, "memory.standardise": False})
    fitted = Detector.fit(
        GOOD, recipe=plain, seed=0, holdout=0.2, false_calls=0.25, keep_suspects=True, listener=Heard(), folder=tmp_path
    )
    assert fitted.model.scorer.kinds == ("backbone",)
    assert fitted.model.scorer.banks["backbone"].memory.metric == "l2"
    assert [file.name for file in tmp_path.glob("*.f16")] == [next(tmp_path.glob("good*.f16")).name]


def test_reweighed_image_scores_are_those_of_the_file_and_maps_stay(recipe, tmp_path):
    """Fitted, saved and loaded, with the threshold set on weighed scores."""
    plain = change(
        recipe,
        {"features": "backbone", "training.epochs": 0, "pretrained.margin": 0, "memory": Memory(sampling_ratio=0.3)},
    )
    light, heavy = (
        Detector.fit(
            GOOD[:8], recipe=given, seed=0, holdout=0.2, false_calls=0.25, keep_suspects=True, listener=Heard()
        )
        for given in (plain, change(plain, {"memory.reweight": 9}))
    )
    bad = BAD.images[:4]
    here, there = light.locate(bad), heavy.locate(bad)
    assert torch.equal(here.maps, there.maps)
    assert torch.equal(heavy.score(bad), there.scores)
    weight = there.scores / here.scores
    assert float(weight.min()) >= 1 - 1 / 9 - 1e-6
    assert float(weight.max()) < 1
    assert len(weight.unique()) == 4
    bound = torch.tensor(heavy.limit)
    assert torch.isclose(heavy.score(GOOD[:8]), bound).any()
    assert not torch.isclose(light.score(GOOD[:8]), bound).any()
    heavy.save(tmp_path / "part.firm")
    assert torch.equal(Detector.load(tmp_path / "part.firm").score(bad), there.scores)


def test_only_the_adaptor_is_trained(recipe, backbone):
    prepared = prepare(recipe, as_data(GOOD), torch.arange(16), seed=0, backbone=backbone)
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    run = prepared.run()
    fresh = {name: value.clone() for name, value in run.state.network.state_dict().items()}
    for _ in run:
        pass
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())
    assert isinstance(run.state.network, Adaptor)
    assert not torch.equal(run.state.network.adapt[0].weight, fresh["adapt.0.weight"])
    assert torch.equal(run.state.network.mean, fresh["mean"])


def test_an_adaptor_knows_the_scale_of_the_features():
    torch.manual_seed(0)
    adaptor = Adaptor(4, Pretrained(hidden=(8,), out=3), Head(hidden=(5,), out=2)).eval()
    plain = torch.randn(6, 4)
    expected = adaptor.adapted(plain)
    adaptor.mean, adaptor.std = torch.full((4,), 7.0), torch.full((4,), 3.0)
    torch.testing.assert_close(adaptor.adapted(3 * plain + 7), expected, rtol=1e-4, atol=1e-5)
    assert adaptor(plain).shape == (6, 2)
