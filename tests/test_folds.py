"""Thresholds from folds of all good images: no model scores a part it has seen, and names say what sets a threshold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firm.cli.evaluate import _broken
from firm.data.splits import folds_by_part, parts_by_name
from firm.decision.calibration import FOLDS, HELD_OUT, TargetRates, calibration_of, summary_of, warnings_of
from firm.detector import fit as pipeline
from firm.detector.detector import Detector
from firm.detector.evaluation import kept_rates
from firm.detector.prepare import Prepared, prepare
from firm.detector.read import Options, as_data, read_good
from firm.detector.split import by_folds
from firm.drawn.render import draw_dataset, save_png
from firm.errors import DataError, SettingError
from firm.images.preprocess import fingerprint
from firm.networks.weights import load_backbone
from firm.recipes.presets import recipe as preset
from listening import Heard

SMALL = {"size": 64, "training.epochs": 1, "pretrained.margin": 0, "automatic": []}
RECIPE = preset("wavelets", **SMALL)
PLATES = draw_dataset("plate", size=64, train=12, good=1, bad=1).train


# --- folds ---


@given(st.lists(st.integers(0, 30), min_size=2, max_size=60), st.integers(2, 6), st.integers(0, 3))
def test_images_of_one_part_are_in_one_fold_and_folds_are_even(shown: list[int], folds: int, seed: int):
    parts = torch.tensor(shown).unique(return_inverse=True)[1]
    fold = folds_by_part(parts, folds, seed=seed)
    assert all(len(fold[parts == part].unique()) == 1 for part in parts.unique())
    sizes, largest = fold.bincount(), int(parts.bincount().max())
    assert len(sizes) == min(folds, len(parts.unique()))
    assert int(sizes.max() - sizes.min()) <= largest


def test_no_fold_model_has_seen_what_it_scores(monkeypatch: pytest.MonkeyPatch):
    learnt, scored, real, measure = [], [], pipeline.fit_model, pipeline.measure

    def watched_fit(recipe, prepared, network, **options):
        learnt.append(set(map(fingerprint, prepared.data.train)))
        return real(recipe, prepared, network, **options)

    def watched_measure(model, images, *rest):
        scored.append(set(map(fingerprint, images)))
        return measure(model, images, *rest)

    monkeypatch.setattr(pipeline, "fit_model", watched_fit)
    monkeypatch.setattr(pipeline, "measure", watched_measure)
    parts = torch.arange(12) // 2
    fitted = pipeline.fit(read_good(as_data(PLATES), RECIPE, Options(parts=parts)), Heard())
    everything = set(map(fingerprint, PLATES))
    assert len(learnt) == len(scored) == 5
    for known, new in zip(learnt, scored, strict=True):
        assert not known & new
        assert known | new == everything
    assert set.union(*scored) == everything
    assert (fitted.calibration.basis, fitted.calibration.images, fitted.calibration.parts) == (FOLDS, 12, 6)


@pytest.mark.parametrize("product", ["plate", "weave"])
def test_what_is_embedded_already_scores_as_in_inspection(product: str):
    """The features of a fit are stored as 16-bit floats, hence the tolerance."""
    data = as_data(draw_dataset(product, size=64, train=12, good=1, bad=1).train)
    aligned = {"conditioning.foreground.method": "otsu", "conditioning.align": True} if product == "plate" else {}
    recipe = preset("wavelets", **SMALL | aligned)
    split = by_folds(data, torch.arange(12), 3, seed=0)
    prepared = prepare(recipe, data, split.parts, seed=0, backbone=load_backbone("wavelets"))
    held_out, counted = split.held_out_from(prepared, 1), list[int]()
    model = pipeline.fold_model(recipe, held_out.prepared, 1, 3, Options(), Heard(), None)
    each = pipeline.measure(model, held_out.images)
    stored = pipeline.measure(model, held_out.images, counted.append, held_out.stored)
    spread = float(each.scores.max() - each.scores.min())
    assert torch.allclose(stored.scores, each.scores, rtol=0, atol=0.01 * spread)
    assert torch.allclose(stored.peaks, each.peaks, rtol=0, atol=0.01 * spread)
    assert torch.equal(stored.light, each.light)
    assert counted[-1] == len(held_out.images)


@pytest.mark.parametrize(
    ("epochs", "minutes", "folds"), [(15, None, 15), (30, None, 10), (60, None, 20), (30, 5.0, 30)]
)
def test_long_trainings_are_cut_for_the_folds(
    epochs: int, minutes: float | None, folds: int, monkeypatch: pytest.MonkeyPatch
):
    """They score good images, and all of them together cost little more than one training; minutes are a budget."""
    run, trained = Prepared.run, list[int]()

    def short_run(prepared, **options):
        trained.append(prepared.recipe.training.epochs)
        assert prepared.task.training == prepared.recipe.training
        return run(pipeline._trained_for(prepared, 0), **options)

    monkeypatch.setattr(Prepared, "run", short_run)
    recipe = preset("wavelets", **SMALL | {"training.epochs": epochs})
    data = as_data(PLATES)
    split = by_folds(data, torch.arange(12), 3, seed=0)
    prepared = prepare(recipe, data, split.parts, seed=0, backbone=load_backbone("wavelets"))
    held_out = split.held_out_from(prepared, 0)
    pipeline.fold_model(recipe, held_out.prepared, 0, 3, Options(minutes=minutes), Heard(), None)
    assert trained == [folds]


def test_a_split_is_used_if_asked_for_or_if_an_encoder_is_learnt():
    held_out = Detector.fit(PLATES, recipe=RECIPE, calibration="split", listener=Heard())
    assert held_out.decides.basis == HELD_OUT
    assert Detector.fit(PLATES, recipe=RECIPE, holdout=0.5, listener=Heard()).decides.basis == HELD_OUT
    scratch = preset("fast", **{"training.epochs": 1, "encoder.width": 4, "size": 32})
    assert Detector.fit(PLATES, recipe=scratch, listener=Heard()).decides.basis == HELD_OUT
    with pytest.raises(SettingError, match="frozen"):
        Detector.fit(PLATES, recipe=scratch, calibration="folds", listener=Heard())


def test_rates_of_folds_are_called_estimated_and_held_out_ones_guaranteed():
    scores = torch.arange(30.0)
    stated = {basis: summary_of(calibration_of(scores, model="m", basis=basis))[1] for basis in (FOLDS, HELD_OUT)}
    assert "estimate" in stated[FOLDS]
    assert "guarantee" not in stated[FOLDS]
    assert "guarantee" in stated[HELD_OUT]


# --- parts by name ---


def test_parts_are_named_by_a_regular_expression(tmp_path: Path):
    files = [tmp_path / f"part{number // 3}_{number % 3}.png" for number in range(12)]
    assert parts_by_name(files, r"(part\d+)_").tolist() == [number // 3 for number in range(12)]
    for file, image in zip(files, PLATES, strict=True):
        save_png(file, image)
    detector = Detector.fit(tmp_path, recipe=RECIPE, group_by=r"(part\d+)_", listener=Heard())
    assert (detector.decides.parts, detector.decides.images) == (4, 12)
    assert set(detector.decides.files) == {file.name for file in files}


def test_a_pattern_that_does_not_fit_is_refused(tmp_path: Path):
    with pytest.raises(SettingError):
        parts_by_name([tmp_path / "a.png"], "(")
    with pytest.raises(DataError, match=r"a\.png"):
        parts_by_name([tmp_path / "a.png"], r"part(\d+)")
    with pytest.raises(DataError, match=r"a\.png"):
        parts_by_name([tmp_path / "a.png"], r"(part\d+)?")  # an empty name would make one part of many
    with pytest.raises(SettingError):
        parts_by_name([], r"(\d+)")
    with pytest.raises(SettingError):
        Options(group_by="(")  # before an image is read


# --- what a user is told ---


@pytest.mark.parametrize(("basis", "about"), [("folds", "in about"), ("held-out", "in at most")])
def test_estimates_are_not_called_guarantees(basis, about):
    good = torch.arange(20.0)
    by = calibration_of(good, model="m", peaks=good, basis=basis, targets=TargetRates(false_calls=0.01))
    assert any(about in text for text in summary_of(by) if text.startswith("regions"))
    (unmet, *_) = warnings_of(by)  # one: the rate of FAIL was not asked for
    assert "4.8 %" in unmet
    assert not any("guarantee" in text for text in warnings_of(by))


def test_the_load_of_one_part_is_singular():
    (line,) = [text for text in summary_of(calibration_of(torch.arange(5.0), model="m")) if "more good images" in text]
    assert "about 1 of 5 good part goes" in line


def test_the_image_that_alone_sets_a_threshold_is_named():
    scores = torch.cat([torch.arange(19.0) / 10, torch.tensor([8.05])])
    files = [f"{number}.jpg" for number in range(20)]
    assert any("19.jpg" in text for text in warnings_of(calibration_of(scores, model="m", files=files)))
    even = calibration_of(torch.arange(20.0), model="m", files=files)
    assert not any(".jpg" in text for text in warnings_of(even))


def test_a_rate_that_is_not_kept_is_said_with_the_drift_beside():
    by = calibration_of(torch.arange(100.0), model="m", targets=TargetRates(false_calls=0.1, fail=0.02))
    parts, same = torch.arange(100), torch.full((100,), 0.5)
    kept = kept_rates(torch.arange(100.0), parts, by)
    assert [(each.realised.value, each.broken) for each in kept] == [(0.09, False), (0.01, False)]
    assert _broken(kept, by, torch.arange(100.0), same, parts) == []
    moved = kept_rates(torch.arange(100.0) + 60, parts, by)
    assert [each.broken for each in moved] == [True, True]
    (text,) = _broken(moved, by, torch.arange(100.0) + 60, same, parts)
    assert "drifted" in text
    light = torch.linspace(0.5, 0.6, 100)
    lit = calibration_of(torch.arange(100.0), model="m", light=light)
    (text,) = _broken(kept, lit, torch.arange(100.0), light * 0.6, parts)  # said even where the rates are kept
    assert "darker" in text
    assert kept_rates(torch.empty(0), torch.empty(0, dtype=torch.long), by) == []


def test_what_is_realised_counts_parts_as_what_is_stated_does():
    """One odd part of ten does not break 20 %, however often it is photographed."""
    by = calibration_of(torch.arange(20.0), model="m", targets=TargetRates(false_calls=0.2, fail=0.1))
    parts = torch.cat([torch.arange(9), torch.full((30,), 9)])
    scores = torch.cat([torch.arange(9.0), torch.full((30,), 99.0)])
    for each in kept_rates(scores, parts, by):
        assert (each.realised.value, each.parts, each.images) == (pytest.approx(0.1), 10, 39)
        assert not each.broken
    assert kept_rates(scores, torch.arange(39), by)[0].broken  # 30 parts of 39 would
    half = kept_rates(torch.tensor([0.0, 99.0, 0.0, 99.0]), torch.tensor([4, 4, 7, 7]), by)[1]
    assert (half.realised.value, half.parts) == (0.5, 2)
    light = torch.full((39,), 0.5)
    lit = calibration_of(torch.arange(20.0), model="m", light=torch.full((20,), 0.5) + torch.arange(20.0) / 1000)
    dark = torch.where(parts == 9, 0.1, light)  # many photographs of one part are no drift of the light
    assert _broken([], lit, scores, dark, parts) == []
    assert _broken([], lit, scores, dark, torch.arange(39)) != []
