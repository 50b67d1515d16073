"""What every outlier source and every view keeps: the contract, JSON and back, and errors that name the setting."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image

import contracts
from firm.errors import SettingError
from firm.outliers.registry import (
    KINDS,
    LOCAL,
    OUTLIERS,
    CutPaste,
    Mixture,
    Nsa,
    PerlinBlend,
    Scratches,
    Spots,
    stream_name,
)
from firm.recipes.recipe import Recipe, change, digest, from_json, to_json
from firm.types import Scene
from firm.views.registry import VIEWS, PatchPairs, SimCLR, Translation

NAN = float("nan")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The table, with a pool of images for exposure and a folder of generated ones for sia."""
    pool = tmp_path_factory.mktemp("pool") / "pool.npy"
    images = np.random.default_rng(0).integers(0, 256, (30, 8, 8, 3), dtype=np.uint8)
    np.save(pool, images)
    for number, image in enumerate(images):
        Image.fromarray(image).save(pool.parent / f"{number}.png")
    filled = {
        name: dataclasses.replace(each, path=str(pool)) for name, each in OUTLIERS.items() if hasattr(each, "path")
    }
    return OUTLIERS | filled | {"sia": dataclasses.replace(OUTLIERS["sia"], folder=str(pool.parent))}


@pytest.mark.parametrize("name", OUTLIERS)
def test_every_source_keeps_the_contract(name, sources):
    source = sources[name]
    for channels in (1, 3):
        made = contracts.check_outlier_source(source, contracts.images_of(12 * source.kinds, channels, 16))
        assert set(made.group.tolist()) == set(range(1, source.kinds + 1))  # every kind is made
        assert (made.where is not None) == (name in LOCAL or name in ("mixture", "sia"))
    if name in LOCAL:  # a scene that tells nothing is no scene
        inliers, ones = contracts.images_of(4, 3, 32), torch.ones(4, 32, 32, dtype=torch.bool)
        alone = source(inliers, rng=contracts.generator())
        made = source(inliers, rng=contracts.generator(), scene=Scene(ones, inliers, ones))
        assert torch.equal(alone.images, made.images)
        assert torch.equal(alone.group, made.group)
    nothing = source(contracts.images_of(0), rng=contracts.generator())
    assert (nothing.images.shape, nothing.group.shape) == ((0, 3, 16, 16), (0,))


@pytest.mark.parametrize("name", ["cutpaste-union", "perlin-blend", "nsa", "scratches", "spots", "mixture"])
def test_local_sources_take_images_of_any_shape(name):
    for height, width in ((16, 48), (33, 17), (40, 100)):
        contracts.check_outlier_source(OUTLIERS[name], contracts.images_of(5, 3, height, width, seed=4))


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_keeps_the_contract(name):
    for channels, height, size in ((3, 16, 16), (1, 14, 16), (3, 20, 12)):
        if isinstance(VIEWS[name], PatchPairs):  # patches have a size of their own
            contracts.check_views(PatchPairs(sizes=(size,)), contracts.images_of(6, channels, 2 * height), size)
        else:
            contracts.check_views(VIEWS[name], contracts.images_of(6, channels, height), size)


def test_every_member_comes_back_from_json():
    for family, table in (("outliers", OUTLIERS), ("views", VIEWS)):
        for name, member in table.items():
            recipe = change(Recipe(), {family: name})
            again = from_json(json.loads(json.dumps(to_json(recipe))))
            assert getattr(recipe, family) == member
            assert again == recipe
            assert digest(again) == digest(recipe)


WRONG = [
    (CutPaste, {"variant": "copy"}),
    (CutPaste, {"area": (0.2, 0.1)}),
    (CutPaste, {"aspect": 0.0}),
    (Mixture, {"sources": ()}),
    (Mixture, {"sources": ("perlin-blend", "scratch")}),
    (Mixture, {"sources": ("mixture",)}),
    (Mixture, {"sources": ("nsa", "exposure-rotated")}),
    (Mixture, {"sources": ("nsa", "perlin-blend", "nsa")}),
    (Nsa, {"blend": "seam"}),
    (Nsa, {"sizes": "big"}),
    (Nsa, {"half_height": (0.2, 0.1)}),
    (Nsa, {"half_height": (0.0, 0.1)}),
    (Nsa, {"half_width": (0.2, 0.5)}),
    (Nsa, {"half_width": (NAN, 0.4)}),
    (Nsa, {"resize": (0.0, 1.0)}),
    (Nsa, {"background": (300.0, 1.0)}),
    (Nsa, {"min_object": 1.0}),
    (Nsa, {"min_overlap": -0.1}),
    (Nsa, {"other": 1.5}),
    (Nsa, {"jitter": 0.6}),
    (Nsa, {"patches": 0}),
    (PerlinBlend, {"strength": -0.1}),
    (PerlinBlend, {"opacity": (0.0, 1.0)}),
    (PerlinBlend, {"opacity": (0.9, 0.5)}),
    (PerlinBlend, {"opacity": (0.5, 1.1)}),
    (PerlinBlend, {"least": 0}),
    (Scratches, {"length": (0.0, 1.0)}),
    (Scratches, {"width": (0.2, 0.1)}),
    (Spots, {"change": (-5.0, 5.0)}),
    (Spots, {"long": (2.0, 1.0)}),
    *((kind, {"per_inlier": 0}) for kind in (CutPaste, Mixture, Nsa, PerlinBlend, Scratches, Spots)),
    (SimCLR, {"crop_by": "volume"}),
    (SimCLR, {"crop": (0.0, 1.0)}),
    (SimCLR, {"crop": (0.5, 0.2)}),
    (SimCLR, {"blur": 1.5}),
    (SimCLR, {"sigma": (0.0, 1.0)}),
    (Translation, {"translate": 1.0}),
    (Translation, {"translate": NAN}),
    (PatchPairs, {"sizes": ()}),
    (PatchPairs, {"sizes": (32, 1)}),
    (PatchPairs, {"min_foreground": 1.1}),
    (PatchPairs, {"min_altered": -0.1}),
    (PatchPairs, {"illumination": 1.0}),
    (PatchPairs, {"tries": 0}),
    (PatchPairs, {"min_overlap": 0.0}),
    (PatchPairs, {"min_overlap": 0.97}),
    (PatchPairs, {"min_overlap": 0.6, "sizes": (32, 2)}),
    (PatchPairs, {"min_overlap": NAN}),
]


def test_a_wrong_setting_is_named():
    for kind, wrong in WRONG:
        family = "views" if kind in (SimCLR, Translation, PatchPairs) else "outliers"
        with pytest.raises(SettingError, match=rf"{family}\.{next(iter(wrong))} "):
            kind(**wrong)


def test_random_streams_keep_the_names_they_had():
    """A seed draws the same outliers as before the sources were renamed."""
    assert [stream_name(kind) for kind in KINDS] == ["donor", "nsa", "cutpaste-union", "strokes", "shades", "pits"]
