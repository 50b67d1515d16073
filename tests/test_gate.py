"""The gate: plain pixels compared exactly as a detector compares what it learnt, and what is said of both."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from cheap import CHEAP
from commands import run
from firm.adaptor import PIXELS
from firm.data.drawn import drawn, write_folder
from firm.detector import Detector
from firm.gate import learns, plain_rival
from firm.metrics import auroc
from firm.plain import plain_cells, plain_pixels
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
    assert learns(detector)
    assert not learns(rival)
    assert replace(rival.recipe, features=detector.recipe.features) == detector.recipe
    assert (rival.usual is None) == (detector.usual is None)
    assert rival.calibration is None
    assert set(rival.localiser.banks) == {PIXELS}
    assert rival.localiser.grid == detector.localiser.grid
    assert rival.localiser.banks[PIXELS].memory == replace(detector.recipe.memory, metric="l2")
    assert torch.equal(rival.localiser.present, plain_rival(detector, good, torch.arange(20), seed=1).localiser.present)
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
    assert not learns(whole)
    with pytest.raises(FirmError, match="looks at whole images"):
        plain_rival(whole, plates, torch.arange(40), seed=0)


def test_the_proof_holds_both(detector, plates):
    prober = Prober(plates, torch.arange(40), holdout=0.25, seed=0)
    found = prober.proof(detector)
    images, defective = prober.inspected(detector.recipe)
    good, parts = prober._gated()
    assert len(good.train) == len(parts) == 30 <= GATED
    rival = plain_rival(detector, good, parts, seed=0)
    assert found["pixels_auroc"] == round(auroc(rival.score(images), defective), 5)


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
    ("value", "pixels", "passed"), [(0.9, 0.8, True), (0.9, 0.9, False), (0.8, 0.9, False), (1.0, 1.0, True)]
)
def test_what_does_not_beat_plain_pixels_is_warned_of(value, pixels, passed):
    told, *warned = proved(metrics(value, pixels))
    assert f"AUROC {100 * value:.1f} (" in told
    assert told.endswith(f"plain pixels in the same light and pose {100 * pixels:.1f}")
    assert bool(warned) != passed


def test_without_a_gate_only_the_proof_is_said():
    assert proved(metrics(0.9, None)) == ["synthetic defects on 30 held-out good images: AUROC 90.0 (80.0 to 90.0)"]


def test_a_fit_says_it_and_its_card_holds_it(tmp_path):
    write_folder(tmp_path / "plates", "plate", size=96, train=30, good=0, bad=0)
    settings = ["training.epochs=1", "size=96", "automatic=[]", "memory.reach=1", "training.batch=64"]
    command = ["fit", tmp_path / "plates", "-o", tmp_path / "a.firm", "--encoder=wavelets", "--json"]
    code, out, err = run(*command, *[f"--set={one}" for one in settings])
    assert code == 0, err
    found = json.loads(out)["origin"]["metrics"]
    assert 0 <= found["pixels_auroc"] <= 1
    assert proved(found)[0] in err.replace("\n", " ")
