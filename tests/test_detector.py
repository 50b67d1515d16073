"""The detector of whole images end to end: it learns, decides as guaranteed, and refuses what it cannot work with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import contracts
from firm.data.duplicates import group_by_part
from firm.detector.detector import Detector
from firm.detector.model_folder import CARD, read_model, write_model
from firm.errors import DataError, MachineError, ModelFileError, SettingError
from firm.recipes.presets import ADAPTED, FAST, PARTS, WAVES
from firm.recipes.recipe import Recipe, change
from firm.runtime.files import folder_lock
from firm.scoring.image_scores import SCORINGS
from firm.types import OneClass


def stripes(n: int, *, seed: int, upright: bool = True) -> Tensor:
    """Noisy stripes of random phase; anomalies run the other way."""
    rng = torch.Generator().manual_seed(seed)
    phase = torch.rand(n, 1, 1, 1, generator=rng) * 6
    wave = torch.sin(torch.arange(24)[None, None, None, :] * 0.7 + phase).expand(n, 3, 24, 24)
    pixels = 128 + 90 * wave + 10 * torch.randn(n, 3, 24, 24, generator=rng)
    return (pixels if upright else pixels.transpose(2, 3)).clamp(0, 255).to(torch.uint8)


SMALL: Recipe = change(
    PARTS,
    {
        "encoder.width": 8,
        "encoder.head.hidden": (32,),
        "encoder.head.out": 16,
        "outliers": "rotations",
        "training.epochs": 6,
        "training.batch": 16,
        "size": 16,
    },
)
UNTRAINED = change(SMALL, {"training.epochs": 0})


@pytest.fixture(scope="module")
def detector() -> Detector:
    return Detector.fit(stripes(60, seed=0), recipe=SMALL, seed=0, holdout=0.34, false_calls=0.1)


def test_it_learns_and_decides(detector: Detector) -> None:
    good, bad = stripes(40, seed=1), stripes(40, seed=2, upright=False)
    assert detector.score(bad).median() > detector.score(good).median()
    assert (detector.predict(bad) == -1).float().mean() > 0.8
    assert (detector.predict(good) == 1).float().mean() > 0.7
    assert set(detector.predict(good).tolist()) <= {1, -1}


def test_two_fits_with_one_seed_are_equal(detector: Detector) -> None:
    torch.manual_seed(3)
    again = Detector.fit(stripes(60, seed=0), recipe=SMALL, seed=0, holdout=0.34, false_calls=0.1)
    images = stripes(5, seed=6)
    assert torch.equal(again.score(images), detector.score(images))
    assert again.decides == detector.decides


def test_every_score_survives_the_file(tmp_path: Path) -> None:
    images = stripes(6, seed=7)
    for name in SCORINGS:
        fitted = Detector.fit(stripes(20, seed=0), recipe=change(UNTRAINED, {"score": name}))
        fitted.save(tmp_path / "model.firm")
        assert torch.equal(Detector.load(tmp_path / "model.firm").score(images), fitted.score(images)), name


def test_detectors_that_cannot_be_trusted_are_refused(detector: Detector, tmp_path: Path) -> None:
    path = tmp_path / "model.firm"
    detector.save(path)
    tensors, card = read_model(path)
    for lost in ("recipe", "origin", "preprocessing"):
        write_model(path, tensors, {name: value for name, value in card.items() if name != lost})
        with pytest.raises(ModelFileError, match=lost):
            Detector.load(path)
    for lost in ("model.references_0", "model.network.encoder.conv1.weight", "thumbnails"):
        write_model(path, {name: value for name, value in tensors.items() if name != lost}, card)
        with pytest.raises(ModelFileError, match=lost.rsplit("network.", maxsplit=1)[-1].removeprefix("model.")):
            Detector.load(path)
    detector.save(path)
    text = (path / CARD).read_text()
    (path / CARD).write_text(text.replace('"zoom": 1.', '"zoom": 2.'))
    for edited in (path, tmp_path / "nowhere.firm"):
        with pytest.raises(ModelFileError, match=str(edited)):
            Detector.load(edited)


def test_what_cannot_be_learnt_from_is_refused_before_the_training() -> None:
    def fitted(images: Tensor, **changes: object) -> None:
        recipe = change(SMALL, changes)
        Detector.fit(images, recipe=recipe, on_progress=lambda *_: pytest.fail("the training has begun"))

    with pytest.raises(DataError, match="uint8"):
        fitted(torch.zeros(4, 2, 8, 8, dtype=torch.uint8))
    with pytest.raises(DataError, match="1 good image"):
        fitted(stripes(1, seed=0))
    with pytest.raises(DataError, match="batch of 16"):
        fitted(stripes(4, seed=0))
    with pytest.raises(SettingError, match="24 x 20"):
        fitted(stripes(20, seed=0)[:, :, :20])
    with pytest.raises(SettingError, match=r"score\.by\.k"):
        fitted(stripes(20, seed=0), **{"score.by.k": 19})


def test_a_collapse_is_warned_of() -> None:
    recipe = change(SMALL, {"training.epochs": 1, "training.lr": 1e-12, "training.temperature": 1e6})
    with pytest.warns(UserWarning, match="collapsed"):
        fitted = Detector.fit(stripes(20, seed=0), recipe=recipe)
    assert fitted.origin["collapsed"]


def test_one_process_works_in_a_folder(tmp_path: Path) -> None:
    with folder_lock(tmp_path), pytest.raises(MachineError, match=str(tmp_path)):
        Detector.fit(stripes(20, seed=0), recipe=UNTRAINED, folder=tmp_path)


# --- several photographs of each part ---


def photographs(parts: int, of_each: int, *, seed: int) -> Tensor:
    """Parts with a smooth pattern of their own, each photographed several times with hardly any noise, in any order."""
    rng = torch.Generator().manual_seed(seed)
    pattern = torch.randn(parts, 1, 4, 4, generator=rng) * 30 + 128
    pixels = F.interpolate(pattern, size=16, mode="bilinear").repeat_interleave(of_each, 0)
    pixels = (pixels + torch.randn(pixels.shape, generator=rng))[torch.randperm(len(pixels), generator=rng)]
    return pixels.clamp(0, 255).to(torch.uint8).expand(-1, 3, -1, -1).contiguous()


def false_calls(images: Tensor, fresh: Tensor, *, seed: int) -> tuple[float, float]:
    """The rate an untrained detector guarantees, and its rate among new parts."""
    fitted = Detector.fit(images, recipe=UNTRAINED, seed=seed, holdout=0.5, false_calls=0.2)
    return fitted.decides.reviewed.kept, float((fitted.predict(fresh) == -1).float().mean())


def test_the_guarantee_holds_for_new_parts_where_each_was_photographed_six_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With every photograph taken for a part of its own, the same images guarantee as much and call everything."""
    fresh = photographs(200, 1, seed=99)
    sets = [photographs(80, 6, seed=seed) for seed in range(5)]
    by_part = [false_calls(images, fresh, seed=seed) for seed, images in enumerate(sets)]
    monkeypatch.setattr("firm.detector.read.group_by_part", lambda name, images: torch.arange(len(images)))
    guarantee, calls = false_calls(sets[0], fresh, seed=0)
    assert all(0.15 < rate <= 0.2 for rate, _ in by_part)
    assert sum(rate for _, rate in by_part) / 5 == pytest.approx(0.2, abs=0.1)  # forty parts scatter by 0.07 each
    assert guarantee == pytest.approx(0.2, abs=0.005)
    assert calls > 0.9


def test_known_parts_are_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    images = photographs(12, 3, seed=0)
    found, parts = Detector.fit(images, recipe=UNTRAINED), group_by_part("images", images)
    assert len(parts.unique()) == 12
    monkeypatch.delattr("firm.detector.read.group_by_part")
    given = Detector.fit(images, recipe=UNTRAINED, parts=parts)
    assert given.decides == found.decides
    assert torch.equal(given.score(images), found.score(images))


# --- the recipe, where none is given ---


def test_parts_are_learnt_by_patches_and_classes_as_whole_images(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However the images are given; without installed weights patches are described by wavelets."""
    recipes = []
    monkeypatch.setattr("firm.detector.read.frozen_backbone", lambda recipe, device: recipes.append(recipe) or 1 / 0)
    images = contracts.images_of(4, 3, 16)
    parts = OneClass(str(tmp_path), images, images[:0], torch.zeros(0, dtype=torch.bool), 16)
    birds = replace(parts, name="cifar10:bird")
    for weights, usual in ((True, ADAPTED), (False, WAVES)):
        monkeypatch.setattr("firm.recipes.presets.installed", lambda name, weights=weights: weights)
        arrays = list(images.numpy())
        for good in (
            tmp_path,
            str(tmp_path),
            "mvtec:screw",
            parts,
            images,
            images.numpy(),
            arrays,
            birds,
            "cifar10:bird",
        ):
            with pytest.raises(ZeroDivisionError):
                Detector.fit(good)
        assert recipes == 7 * [usual] + 2 * [FAST]
        recipes.clear()


def test_a_whole_image_model_scores_from_its_buffers(detector):
    """Other references in the state dict, other scores: what is saved is what decides."""
    images, model = stripes(4, seed=9), detector.model
    before, state = model.score(images), {name: value.clone() for name, value in model.state_dict().items()}
    changed = {name: value.flip(1) if name.startswith("references") else value for name, value in state.items()}
    model.load_state_dict(changed)
    assert not torch.equal(model.score(images), before)
    model.load_state_dict(state)
    assert torch.equal(model.score(images), before)
