"""The detector: fit on good images, score, predict, save and load; files that cannot be trusted are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import contracts
from firm.detector import Detector
from firm.fitting import as_data
from firm.foretelling import foretell
from firm.holdout import split, usual, wanted
from firm.model_folder import CARD, read_model, write_model
from firm.recipes.presets import ADAPTED, FAST, PARTS, WAVES
from firm.recipes.recipe import Recipe, change
from firm.scores import SCORINGS
from firm.sisters import sisters
from firm.types import FirmError, OneClass


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


@pytest.fixture(scope="module")
def detector() -> Detector:
    return Detector.fit(stripes(60, seed=0), recipe=SMALL, seed=0, holdout=0.34, false_calls=0.1)


def test_it_learns_and_calls(detector: Detector) -> None:
    good, bad = stripes(40, seed=1), stripes(40, seed=2, upright=False)
    assert detector.score(bad).median() > detector.score(good).median()
    assert (detector.predict(bad) == -1).float().mean() > 0.8
    assert (detector.predict(good) == 1).float().mean() > 0.7
    assert set(detector.predict(good).tolist()) <= {1, -1}


def test_predict_is_the_threshold(detector: Detector) -> None:
    images = torch.cat([stripes(10, seed=3), stripes(10, seed=4, upright=False)])
    called = detector.score(images) > detector.limit
    assert torch.equal(detector.predict(images) == -1, called)


def test_a_score_does_not_depend_on_its_company(detector: Detector) -> None:
    images = stripes(7, seed=5)
    alone = torch.cat([detector.score(image[None]) for image in images])
    torch.testing.assert_close(alone, detector.score(images), atol=1e-5, rtol=0)


def test_two_fits_with_one_seed_are_equal(detector: Detector) -> None:
    again = Detector.fit(stripes(60, seed=0), recipe=SMALL, seed=0, holdout=0.34, false_calls=0.1)
    images = stripes(5, seed=6)
    assert torch.equal(again.score(images), detector.score(images))
    assert again.decides == detector.decides


@pytest.mark.parametrize("name", SCORINGS)
def test_every_scoring_survives_the_file(name: str, detector: Detector, tmp_path: Path) -> None:
    recipe = change(SMALL, {"score": name, "training.epochs": 1})
    fitted = Detector.fit(stripes(20, seed=0), recipe=recipe)
    fitted.save(tmp_path / "model.firm")
    images = stripes(6, seed=7)
    assert torch.equal(Detector.load(tmp_path / "model.firm").score(images), fitted.score(images))


def test_load_gives_the_same_detector(detector: Detector, tmp_path: Path) -> None:
    detector.save(tmp_path / "model.firm")
    loaded = Detector.load(tmp_path / "model.firm")
    images = torch.cat([stripes(10, seed=8), stripes(10, seed=9, upright=False)])
    assert torch.equal(loaded.score(images), detector.score(images))
    assert torch.equal(loaded.predict(images), detector.predict(images))
    assert loaded.card() == detector.card()
    json.dumps(loaded.card())


def test_detectors_that_cannot_be_trusted_are_refused(detector: Detector, tmp_path: Path) -> None:
    path = tmp_path / "model.firm"
    detector.save(path)
    tensors, card = read_model(path)
    write_model(path, tensors, {k: v for k, v in card.items() if k != "recipe"})
    with pytest.raises(FirmError, match="not a complete detector"):
        Detector.load(path)

    detector.save(path)
    text = (path / CARD).read_text()
    assert '"zoom": 1.' in text
    (path / CARD).write_text(text.replace('"zoom": 1.', '"zoom": 2.'))
    with pytest.raises(FirmError, match="damaged or edited"):
        Detector.load(path)

    with pytest.raises(FirmError, match="there is no detector"):
        Detector.load(tmp_path / "nowhere.firm")


def test_wrong_images_are_refused_in_a_sentence(detector: Detector) -> None:
    with pytest.raises(FirmError, match="give uint8"):
        detector.score(torch.rand(2, 3, 16, 16))
    with pytest.raises(FirmError, match="give uint8"):
        Detector.fit(torch.zeros(4, 2, 8, 8, dtype=torch.uint8), recipe=SMALL)
    with pytest.raises(FirmError, match="too few"):
        Detector.fit(stripes(1, seed=0), recipe=SMALL)
    with pytest.raises(FirmError, match="fewer than one batch"):
        Detector.fit(stripes(4, seed=0), recipe=SMALL)


def test_what_would_fail_after_training_is_said_before(detector: Detector) -> None:
    with pytest.raises(FirmError, match="make them square"):
        Detector.fit(stripes(20, seed=0)[:, :, :20], recipe=SMALL)
    with pytest.raises(FirmError, match="use a smaller k"):
        Detector.fit(stripes(20, seed=0), recipe=change(SMALL, {"score.by.k": 19}))


def test_a_score_that_is_not_a_number_decides_nothing(detector: Detector, tmp_path: Path) -> None:
    detector.save(tmp_path / "model.firm")
    broken = Detector.load(tmp_path / "model.firm")
    with torch.no_grad():
        broken.network.encoder.conv1.weight.fill_(torch.nan)
    with pytest.raises(FirmError, match="not finite"):
        broken.predict(stripes(2, seed=1))


def test_collapse_is_said() -> None:
    recipe = change(SMALL, {"training.epochs": 1, "training.lr": 1e-12, "training.temperature": 1e6})
    with pytest.warns(UserWarning, match="collapsed to one point"):
        Detector.fit(stripes(20, seed=0), recipe=recipe)


# --- what is held out ---


@given(
    parts=st.lists(st.integers(0, 30), min_size=2, max_size=200),
    holdout=st.floats(0.001, 0.999),
    seed=st.integers(0, 99),
)
def test_images_of_one_part_stay_together(parts: list[int], holdout: float, seed: int) -> None:
    numbers = torch.tensor(parts).unique(return_inverse=True)[1]
    learn, held_out = split(numbers, holdout, seed=seed)
    wished = min(len(parts) - 1, max(1, round(holdout * len(parts))))
    assert sorted([*learn.tolist(), *held_out.tolist()]) == list(range(len(parts)))
    assert 1 <= len(held_out) <= wished
    shared = set(numbers[learn].tolist()) & set(numbers[held_out].tolist())
    if shared:  # only where no part is small enough to be held out as a whole
        assert int(numbers.bincount().min()) > wished
        assert len(shared) == 1


def test_strangers_are_held_out_at_random_and_as_many_as_wished() -> None:
    drawn = [split(torch.arange(50), 0.2, seed=seed)[1].tolist() for seed in range(60)]
    assert all(len(one) == 10 for one in drawn)
    assert {place for one in drawn for place in one} == set(range(50))
    assert drawn[0] == split(torch.arange(50), 0.2, seed=0)[1].tolist()
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("images", "false_calls", "held_out"),
    [
        (1000, 0.05, 100),
        (200, 0.05, 40),
        (400, 0.05, 40),
        (120, 0.05, 30),
        (12, 0.05, 3),
        (200, 0.2, 20),
        (5000, 0.01, 500),
    ],
)
def test_unasked_as_many_are_held_out_as_the_promise_takes_up_to_a_quarter(
    images: int, false_calls: float, held_out: int
) -> None:
    part = usual(images, false_calls)
    assert len(split(torch.arange(images), part, seed=0)[1]) == held_out


def test_enough_parts_are_held_out_for_the_promise_where_images_share_them() -> None:
    parts = torch.arange(600) // 6
    assert len(split(parts, 0.1, seed=0)[1]) == 60
    for least, expected in ((0, 10), (5, 10), (19, 19), (25, 25), (40, 25)):  # at most a quarter
        held_out = split(parts, 0.1, seed=0, least=least)[1]
        assert len(parts[held_out].unique()) == expected
        assert len(held_out) == 6 * expected
    for strangers in (torch.arange(600), torch.arange(600).clamp(max=560)):  # but for a few: as many as wished
        assert len(split(strangers, 0.01, seed=0, least=100)[1]) == 6
    assert [wanted(rate) for rate in (0.05, 0.01, 0.0, 1.0)] == [40, 200, 0, 0]


def photographs(parts: int, of_each: int, *, seed: int) -> Tensor:
    """Parts with a smooth pattern of their own, each photographed several times with hardly any noise, in any order."""
    rng = torch.Generator().manual_seed(seed)
    pattern = torch.randn(parts, 1, 4, 4, generator=rng) * 30 + 128
    pixels = F.interpolate(pattern, size=16, mode="bilinear").repeat_interleave(of_each, 0)
    pixels = (pixels + torch.randn(pixels.shape, generator=rng))[torch.randperm(len(pixels), generator=rng)]
    return pixels.clamp(0, 255).to(torch.uint8).expand(-1, 3, -1, -1).contiguous()


def realised(images: Tensor, fresh: Tensor, *, seed: int) -> tuple[float, float]:
    """The false calls an untrained detector promises, and those it makes among new parts."""
    untrained = change(SMALL, {"training.epochs": 0})
    fitted = Detector.fit(images, recipe=untrained, seed=seed, holdout=0.5, false_calls=0.2)
    return fitted.decides.reviewed.kept, float((fitted.predict(fresh) == -1).float().mean())


def test_the_promise_holds_for_new_parts_where_each_was_photographed_six_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sisters not looked for, the same photographs promise as much and call everything."""
    fresh = photographs(200, 1, seed=99)
    sets = [photographs(80, 6, seed=seed) for seed in range(8)]
    made = [realised(images, fresh, seed=seed) for seed, images in enumerate(sets)]
    monkeypatch.setattr("firm.detector.sisters", lambda name, images: torch.arange(len(images)))
    naive = [realised(images, fresh, seed=seed) for seed, images in enumerate(sets[:2])]
    assert all(0.15 < promise <= 0.2 for promise, _ in made)
    assert sum(calls for _, calls in made) / 8 == pytest.approx(0.2, abs=0.1)  # forty parts scatter by 0.07 each
    assert all(promise == pytest.approx(0.2, abs=0.005) and calls > 0.9 for promise, calls in naive)


def test_parts_that_are_known_are_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    images, untrained = photographs(12, 3, seed=0), change(SMALL, {"training.epochs": 0})
    found, told = Detector.fit(images, recipe=untrained), foretell(untrained, as_data(images))
    parts = sisters("images", images)
    assert len(parts.unique()) == 12
    monkeypatch.delattr("firm.detector.sisters")
    monkeypatch.delattr("firm.foretelling.sisters")
    given = Detector.fit(images, recipe=untrained, parts=parts)
    assert given.decides == found.decides
    assert torch.equal(given.score(images), found.score(images))
    assert foretell(untrained, as_data(images), parts=parts) == told


def test_grey_images_of_another_size_are_fine() -> None:
    fitted = Detector.fit(stripes(20, seed=0)[:, :1], recipe=change(SMALL, {"training.epochs": 1}))
    assert fitted.score(stripes(3, seed=1)[:, :1, :20, :20]).shape == (3,)
    assert fitted.score(stripes(0, seed=1)).shape == (0,)


@pytest.mark.parametrize("weights", [True, False])
def test_parts_are_learnt_as_the_command_learns_them(weights, monkeypatch, tmp_path):
    """Whatever they are given as; a class of a semantic set and bare tensors are looked at whole."""
    seen = []
    monkeypatch.setattr("firm.recipes.presets.installed", lambda name: weights)
    monkeypatch.setattr("firm.detector.most_images", lambda recipe, *_: seen.append(recipe) or 1 / 0)
    images = contracts.images_of(4, 3, 16)
    parts = OneClass(str(tmp_path), images, images[:0], torch.zeros(0, dtype=torch.bool), 16)
    birds = replace(parts, name="cifar10:bird")
    for good in (tmp_path, str(tmp_path), "mvtec:screw", parts, birds, "cifar10:bird", images):
        with pytest.raises(ZeroDivisionError):
            Detector.fit(good)
    assert seen == 4 * [ADAPTED if weights else WAVES] + 3 * [FAST]
