"""The gate: plain pixels compared exactly as a detector compares what it learnt, and what is said of both."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from cheap import CHEAP
from commands import run
from firm.data.drawn import drawn, write_folder
from firm.detector import Detector
from firm.gate import gated, plain_rival
from firm.metrics import auroc
from firm.plain import PIXELS, plain_cells, plain_pixels
from firm.progressing import GATED, Prober, proved
from firm.recipes.presets import FAST, WAVES
from firm.recipes.recipe import change
from firm.tiling import Grid
from firm.types import FirmError

WAVY = change(WAVES, {"training.epochs": 1, "size": 96, "automatic": (), "memory.reach": 1})


@pytest.fixture(scope="module")
def plates():
    return drawn("plate", size=96, train=40, good=8, bad=12)[0]


@pytest.fixture(scope="module", params=["encoder", "wavelets"])
def detector(request, plates):
    recipe = change(CHEAP, {"features": "both", "training.epochs": 1}) if request.param == "encoder" else WAVY
    return Detector.fit(plates, recipe=recipe, seed=0, holdout=0.25, parts=torch.arange(40))


def test_patches_of_cells_are_those_around_each_cell():
    """By hand: 24 px around every cell of 8, the image mirrored at its border, averaged over 2 x 2 pixels."""
    image = torch.randint(0, 256, (1, 3, 32, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = plain_cells(Grid(size=8, stride=8), 3, image, grey=True)
    padded = np.pad(image[0].numpy().astype(np.float64).mean(0), 8, mode="reflect")
    assert found.shape == (4, 5, 144)
    for row in range(4):
        for column in range(5):
            patch = padded[8 * row : 8 * row + 24, 8 * column : 8 * column + 24]
            means = patch.reshape(12, 2, 12, 2).mean(axis=(1, 3)).ravel() / 12
            np.testing.assert_allclose(found[row, column].numpy(), means, rtol=1e-5)


def test_a_patch_of_one_cell_is_the_patch_itself():
    image = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    grid = Grid(size=8, stride=8)
    assert torch.equal(plain_cells(grid, 1, image, grey=False), plain_pixels(grid, image, grey=False))


def test_the_rival_differs_in_nothing_but_its_features(detector, plates):
    good = replace(plates, train=plates.train[:20])
    rival = plain_rival(detector, good, torch.arange(20), seed=0)
    assert gated(detector)
    assert not gated(rival)
    assert replace(rival.recipe, features=detector.recipe.features) == detector.recipe
    assert (rival.usual is None) == (detector.usual is None)
    assert rival.calibration is None
    assert set(rival.localiser.banks) == {PIXELS}
    assert rival.localiser.grid == detector.localiser.grid
    assert rival.localiser.banks[PIXELS].memory == replace(detector.recipe.memory, metric="l2")
    marred = plates.train[20:].clone()
    marred[:, :, 40:64, 40:64] = 255
    assert bool((rival.score(marred) > rival.score(plates.train[20:])).all())


def test_plain_pixels_beside_a_backbone_are_those_of_the_rival(plates, tmp_path):
    """`features=pixels` of a fit remembers what the gate remembers, and is kept with the detector."""
    recipe = change(WAVY, {"features": PIXELS, "training.epochs": 0})
    fitted = Detector.fit(plates, recipe=recipe, seed=0, holdout=0.25, parts=torch.arange(40))
    learnt = plates.train[~torch.isin(torch.arange(40), torch.tensor(_held_out(plates)))]
    rival = plain_rival(fitted, replace(plates, train=learnt), torch.arange(len(learnt)), seed=0)
    assert torch.equal(rival.score(plates.test), fitted.score(plates.test))
    fitted.save(tmp_path / "pixels.firm")
    assert torch.equal(Detector.load(tmp_path / "pixels.firm").score(plates.test), fitted.score(plates.test))


def _held_out(plates):
    return Prober(plates, torch.arange(40), holdout=0.25, seed=0)._held.tolist()


def test_whole_images_have_no_gate(plates):
    whole = Detector.fit(plates, recipe=change(FAST, {"training.epochs": 1, "training.batch": 8}), seed=0)
    assert not gated(whole)
    with pytest.raises(FirmError, match="looks at whole images"):
        plain_rival(whole, plates, torch.arange(40), seed=0)


def test_the_proof_holds_both(detector, plates):
    prober = Prober(plates, torch.arange(40), holdout=0.25, seed=0)
    found = prober.proof(detector)
    images, defective = prober.inspected(detector.recipe)
    good, parts = prober._gated()
    assert len(good.train) == len(parts) == 30 <= GATED
    rival = plain_rival(detector, good, parts, seed=0)
    assert found["pixels_auroc"] == auroc(rival.score(images), defective)


def test_many_learnt_images_are_drawn_evenly(plates, monkeypatch):
    monkeypatch.setattr("firm.progressing.GATED", 7)
    prober = Prober(plates, torch.arange(40), holdout=0.25, seed=0)
    good, parts = prober._gated()
    assert len(parts.unique()) == 7
    assert torch.equal(good.train, plates.train[parts])
    assert set(parts.tolist()) <= set(prober._learn.tolist())
    places = torch.searchsorted(prober._learn, parts)
    assert int(places.diff().max()) - int(places.diff().min()) <= 1


def metrics(value, pixels):
    found = {"synthetic_auroc": {"value": value, "low": value - 0.1, "high": value}, "good_images": 30}
    return found if pixels is None else found | {"pixels_auroc": pixels}


@pytest.mark.parametrize(
    ("value", "pixels", "passed"),
    [(0.9, 0.8, True), (427 / 900, 427 / 900, False), (0.8, 0.9, False), (1.0, 1.0, True)],
)
def test_what_does_not_beat_plain_pixels_is_warned_of(value, pixels, passed):
    told, *warned = proved(metrics(value, pixels), backbone=True)
    assert f"AUROC {100 * value:.1f} (" in told
    assert told.endswith(f"plain pixels in the same light and pose {100 * pixels:.1f}")
    assert bool(warned) != passed
    assert len(proved(metrics(value, pixels) | {"good_images": 9}, backbone=True)) == 1  # chance alone


def test_the_advice_is_for_the_features_that_were_measured():
    alone, beside = (proved(metrics(0.8, 0.9), backbone=backbone)[1] for backbone in (False, True))
    assert alone.endswith("training: --preset inspect --set features=pixels --set training.epochs=0")
    assert beside.endswith("training: --set features=pixels --set training.epochs=0")


def test_without_a_gate_only_the_proof_is_said():
    assert proved(metrics(0.9, None), backbone=False) == [
        "synthetic defects on 30 held-out good images: AUROC 90.0 (80.0 to 90.0)"
    ]


def test_a_fit_says_it_and_its_card_holds_it(tmp_path):
    write_folder(tmp_path / "plates", "plate", size=96, train=30, good=0, bad=0)
    settings = ["training.epochs=1", "size=96", "automatic=[]", "memory.reach=1", "training.batch=64"]
    command = ["fit", tmp_path / "plates", "-o", tmp_path / "a.firm", "--encoder=wavelets", "--json"]
    code, out, err = run(*command, *[f"--set={one}" for one in settings])
    assert code == 0, err
    found = json.loads(out)["origin"]["metrics"]
    assert 0 <= found["pixels_auroc"] <= 1
    assert proved(found, backbone=True)[0] in err.replace("\n", " ")


def test_a_fit_that_does_not_pass_says_so(tmp_path, monkeypatch):
    write_folder(tmp_path / "plates", "plate", size=48, train=40, good=0, bad=0)
    settings = ["training.batch=8", "encoder.width=8", "encoder.head.hidden=[8]", "size=48", "automatic=[]"]
    settings += ["tiling.size=16", "tiling.stride=16", "views.sizes=[16]", "memory.reach=1", "training.epochs=1"]
    monkeypatch.setattr("firm.progressing.plain_rival", lambda detector, *_, **__: _Perfect())
    command = ["fit", tmp_path / "plates", "-o", tmp_path / "a.firm", "--preset=inspect", "--holdout=0.25"]
    code, _, err = run(*command, *[f"--set={one}" for one in settings])
    assert code == 0, err
    assert "warning: on these images the features tell no more than plain pixels" in err


class _Perfect:
    """Knows that the second half of what a proof inspects is defective."""

    def score(self, images):
        return torch.arange(len(images)).float()


def test_a_rival_that_cannot_be_had_costs_nothing(plates):
    """Behind the head nothing is searched, so a memory may be too small for plain pixels to be compared."""
    small = {"features": "projection", "memory.reach": -1, "memory.keep": 1e-4, "memory.standardise": False}
    recipe = change(WAVY, small | {"memory.reweight": 9})
    detector = Detector.fit(plates, recipe=recipe, seed=0, holdout=0.25, parts=torch.arange(40))
    found = Prober(plates, torch.arange(40), holdout=0.25, seed=0).proof(detector)
    assert "pixels_auroc" not in found
    assert len(proved(found, backbone=True)) == 1


def test_pixels_named_first_are_compared_first_and_after_loading_too(plates, tmp_path):
    """Features are added in the order in which they are named, so that a sum of three is the same to the last bit."""
    recipe = change(WAVY, {"features": "pixels+encoder+backbone"})
    fitted = Detector.fit(plates, recipe=recipe, seed=0, holdout=0.25, parts=torch.arange(40))
    assert list(fitted.localiser.banks) == ["pixels", "encoder", "backbone"]
    fitted.save(tmp_path / "three.firm")
    loaded = Detector.load(tmp_path / "three.firm")
    assert torch.equal(loaded.score(plates.test), fitted.score(plates.test))
    rival = plain_rival(fitted, plates, torch.arange(40), seed=0)
    assert rival.localiser.banks[PIXELS] is fitted.localiser.banks[PIXELS]


def test_sisters_are_no_neighbours_of_the_rival_either(plates):
    """Two photographs of each part: left out together, or deviations would be told from sisters."""
    twice = replace(plates, train=plates.train[:12].repeat_interleave(2, 0))
    detector = Detector.fit(plates, recipe=WAVY, seed=0, holdout=0.25, parts=torch.arange(40))
    apart, together = (
        plain_rival(detector, twice, parts, seed=0) for parts in (torch.arange(24), torch.arange(24) // 2)
    )
    deviations = [one.localiser.banks[PIXELS].mean for one in (apart, together)]
    assert float(deviations[0].max()) < 0.2 < float(deviations[1].min())  # a copy is as near as rounding leaves it


def test_patches_wider_than_the_image_are_had_all_the_same():
    image = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    found = plain_cells(Grid(size=16, stride=16), 5, image, grey=True)
    assert found.shape[:2] == (2, 2)
    assert bool(found.isfinite().all())
