"""Held-out good images with synthetic defects: AUROC of the detector and of plain pixels, while it trains and after."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from cheap import CHEAP
from firm.detector import self_check as module
from firm.detector.detector import Detector
from firm.detector.fit import fit, split_good
from firm.detector.prepare import prepare
from firm.detector.read import Options, read_good
from firm.detector.remember import remember
from firm.detector.self_check import (
    PROBES,
    CheckImages,
    Prober,
    check_model,
    pixel_baseline,
    self_check,
    summary,
    warning,
)
from firm.drawn.render import draw_dataset
from firm.images.decode import decode
from firm.metrics.image import auroc
from firm.recipes.presets import FAST
from firm.recipes.presets import recipe as preset
from firm.recipes.recipe import change
from firm.report.evaluation import draw_progress
from firm.scoring.models import PatchModel, PatchScorer
from firm.scoring.patch_features import PIXELS, cell_pixels, pixel_features
from firm.scoring.patch_grid import Grid
from firm.training.runs import HISTORY
from listening import Heard

WAVY = preset(
    "wavelets",
    **{"training.epochs": 1, "size": 64, "pretrained.margin": 0, "automatic": (), "memory.neighbourhood": 1,
       "training.batch": 64},
)  # fmt: skip
ENCODER = change(CHEAP, {"features": "both", "training.epochs": 1})


@pytest.fixture(scope="module")
def plates():
    return draw_dataset("plate", size=64, train=40, good=4, bad=4)


class Steps:
    """The steps of one fit, for tests that need what lies between them."""

    def __init__(self, recipe, data, parts=None):
        options = Options(holdout=0.25, parts=torch.arange(len(data.train)) if parts is None else parts)
        self.good = read_good(data, recipe, options)
        self.split = split_good(self.good)
        self.prepared = prepare(recipe, self.split.learn, self.split.parts, seed=0, backbone=self.good.backbone)
        run = self.prepared.run()
        for _ in run:
            pass
        self.fitted = remember(recipe, self.prepared, self.prepared.trained(run), {}, seed=0)
        self.check = CheckImages.of(recipe, self.prepared, self.split.held_out, seed=0)


@pytest.fixture(scope="module")
def wavy(plates):
    return Steps(WAVY, plates)


@pytest.fixture(scope="module")
def encoder(plates):
    return Steps(ENCODER, plates)


# --- plain pixels of the patches around cells ---


def test_patches_of_cells_are_those_around_each_cell():
    """By hand: 24 px around every cell of 8, the image mirrored at its border, averaged over 2 x 2 pixels."""
    image = torch.randint(0, 256, (1, 3, 32, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pixels = cell_pixels(Grid(size=8, stride=8), 3, image, grey=True)
    padded = np.pad(image[0].numpy().astype(np.float64).mean(0), 8, mode="reflect")
    assert pixels.shape == (4, 5, 144)
    for row in range(4):
        for column in range(5):
            patch = padded[8 * row : 8 * row + 24, 8 * column : 8 * column + 24]
            means = patch.reshape(12, 2, 12, 2).mean(axis=(1, 3)).ravel() / 12
            np.testing.assert_allclose(pixels[row, column].numpy(), means, rtol=1e-5)
    square, cells = image[..., :32], Grid(size=8, stride=8)
    assert torch.equal(cell_pixels(cells, 1, square, grey=False), pixel_features(cells, square, grey=False))
    wide = cell_pixels(Grid(size=16, stride=16), 5, square, grey=True)  # patches wider than the image
    assert wide.shape[:2] == (2, 2)
    assert bool(wide.isfinite().all())


# --- the images of a check ---


def test_half_of_the_checked_images_have_a_defect_and_all_were_held_out(encoder):
    good, bad = encoder.check.images.chunk(2)
    assert torch.equal(good, encoder.split.held_out)
    assert encoder.check.defective.tolist() == [False] * len(good) + [True] * len(good)
    assert all((one != other).any() for one, other in zip(good, bad, strict=True))
    again = CheckImages.of(ENCODER, encoder.prepared, encoder.split.held_out, seed=0)
    assert torch.equal(again.images, encoder.check.images)


# --- the pixel baseline ---


@pytest.mark.parametrize("steps", ["encoder", "wavy"])
def test_the_baseline_differs_in_nothing_but_its_features(steps, request):
    steps = request.getfixturevalue(steps)
    model, prepared, recipe = steps.fitted.model, steps.prepared, steps.fitted.recipe
    baseline = pixel_baseline(recipe, model, prepared, seed=0)
    assert baseline.scorer.kinds == (PIXELS,)
    assert baseline.scorer.grid == model.scorer.grid
    assert baseline.scorer.banks[PIXELS].memory == replace(recipe.memory, metric="l2")
    assert (baseline.conditioning, baseline.preprocessing) == (model.conditioning, model.preprocessing)
    metrics = self_check([check_model(steps.fitted.model, steps.fitted.recipe, prepared, steps.check, seed=0)])
    images, defective = steps.check.images, steps.check.defective
    assert metrics["synthetic_auroc"]["value"] == pytest.approx(auroc(model.score(images), defective))
    assert metrics["pixels_auroc"] == auroc(baseline.score(images), defective)
    assert metrics["good_images"] == len(defective) // 2
    assert metrics["synthetic_auroc"]["low"] <= metrics["synthetic_auroc"]["value"]
    assert 0 <= metrics["pixels_auroc"] <= 1


def test_the_baseline_is_the_detector_of_plain_pixels(wavy, plates):
    """`features=pixels` remembers what the baseline remembers; as one of several kinds, its bank is the baseline's."""
    pixels = Steps(change(WAVY, {"features": PIXELS, "training.epochs": 0}), plates)
    baseline = pixel_baseline(WAVY, wavy.fitted.model, wavy.prepared, seed=0)
    assert torch.equal(pixels.fitted.model.score(plates.test), baseline.score(plates.test))
    assert "pixels_auroc" not in self_check(
        [check_model(pixels.fitted.model, pixels.fitted.recipe, pixels.prepared, pixels.check, seed=0)]
    )
    three = change(WAVY, {"features": "pixels+encoder+backbone"})
    fitted = remember(three, wavy.prepared, wavy.fitted.model.network, {}, seed=0)
    assert fitted.model.scorer.kinds == ("pixels", "encoder", "backbone")  # summed in the order they are named
    own = pixel_baseline(three, fitted.model, wavy.prepared, seed=0)
    assert own.scorer.banks[PIXELS] is fitted.model.scorer.banks[PIXELS]


def test_the_baseline_is_of_evenly_drawn_images_and_knows_which_show_one_part(wavy, plates, monkeypatch):
    monkeypatch.setattr(module, "BASELINE", 7)
    seen = []
    fit_scorer = PatchScorer.fit
    monkeypatch.setattr(
        PatchScorer,
        "fit",
        lambda *arguments, parts, **options: seen.append(parts) or fit_scorer(*arguments, parts=parts, **options),
    )
    pixel_baseline(WAVY, wavy.fitted.model, wavy.prepared, seed=0)
    assert seen[0].tolist() == [number * 30 // 7 for number in range(7)]
    monkeypatch.setattr(module, "BASELINE", 24)
    twice = replace(plates, train=plates.train[:12].repeat_interleave(2, 0))
    prepared = prepare(WAVY, twice, torch.arange(24), seed=0, backbone=wavy.prepared.task.backbone)
    means = []
    for parts in (torch.arange(24), torch.arange(24) // 2):
        baseline = pixel_baseline(WAVY, wavy.fitted.model, replace(prepared, parts=parts), seed=0)
        means.append(baseline.scorer.banks[PIXELS].mean)
    assert float(means[0].max()) < 0.2 < float(means[1].min())  # a copy is as near as rounding leaves it


def test_a_baseline_that_cannot_be_had_is_left_out(wavy):
    """Behind the head nothing is searched, so a bank may be too small for plain pixels to be compared."""
    small = {"memory.neighbourhood": -1, "memory.sampling_ratio": 1e-4, "memory.standardise": False}
    recipe = change(WAVY, small | {"features": "projection", "memory.reweight": 9})
    fitted = remember(recipe, wavy.prepared, wavy.fitted.model.network, {}, seed=0)
    metrics = self_check([check_model(fitted.model, fitted.recipe, wavy.prepared, wavy.check, seed=0)])
    assert "synthetic_auroc" in metrics
    assert "pixels_auroc" not in metrics


def test_whole_images_are_not_checked(plates):
    small = {"training.epochs": 0, "training.batch": 8, "encoder.width": 8, "encoder.head.hidden": (8,), "size": 16}
    fitted = Detector.fit(plates, recipe=change(FAST, small), seed=0)
    assert "metrics" not in fitted.origin


# --- what is said of it ---


def metrics_of(value, pixels):
    metrics = {"synthetic_auroc": {"value": value, "low": value - 0.1, "high": value}, "good_images": 30}
    return metrics if pixels is None else metrics | {"pixels_auroc": pixels}


def test_features_that_do_not_beat_plain_pixels_are_warned_of():
    for value, pixels, passed in ((0.9, 0.8, True), (427 / 900, 427 / 900, False), (0.8, 0.9, False), (1.0, 1.0, True)):
        metrics = metrics_of(value, pixels)
        assert f"{100 * value:.1f}" in summary(metrics)
        assert f"{100 * pixels:.1f}" in summary(metrics)
        assert (warning(metrics, backbone=True) is None) == passed
        assert warning(metrics | {"good_images": 9}, backbone=True) is None  # chance decides
    assert warning(metrics_of(0.9, None), backbone=False) is None
    scratch, beside = (warning(metrics_of(0.8, 0.9), backbone=backbone) for backbone in (False, True))
    assert scratch.endswith("--preset inspect --set features=pixels --set training.epochs=0")
    assert beside.endswith(" --set features=pixels --set training.epochs=0")
    assert "preset" not in beside


def test_a_fit_reports_its_check_and_its_card_holds_it(plates, monkeypatch):
    monkeypatch.setattr(PatchModel, "score_aligned", perfect_pixels(PatchModel.score_aligned))
    heard = Heard()
    detector = Detector.fit(plates, recipe=ENCODER, holdout=0.25, parts=torch.arange(40), listener=heard)
    metrics = detector.card()["origin"]["metrics"]
    assert metrics["pixels_auroc"] == 1
    assert summary(metrics) in heard.lines
    assert warning(metrics, backbone=False) in heard.warnings


def perfect_pixels(score):
    """Plain pixels score the second half of the checked images highest, as if they were always right."""

    def scored(model, aligned, *_):
        if model.extractor.kinds == (PIXELS,):
            return torch.arange(len(aligned.images)).float()
        return score(model, aligned)

    return scored


# --- probes during the training ---


@pytest.fixture(scope="module")
def probed(plates, tmp_path_factory):
    """A fit of some minutes, the run it was, and its folder."""
    folder, runs = tmp_path_factory.mktemp("run"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firm.detector.fit.epochs_within", lambda *_, **__: 4)
        options = Options(holdout=0.25, parts=torch.arange(40), minutes=1.0, folder=folder)
        fitted = fit(read_good(plates, CHEAP, options), on_progress=lambda progress, run: runs.append(run))
    return fitted, runs[-1], folder


def test_probes_are_evenly_spaced_and_change_nothing(probed, plates):
    fitted, run, folder = probed
    probes = fitted.probes
    assert [line["step"] for line in probes] == [run.steps * number // PROBES for number in range(1, PROBES + 1)]
    assert all(0 <= line["synthetic_auroc"] <= 1 for line in probes)
    assert [line["seconds"] for line in probes] == sorted(line["seconds"] for line in probes)
    assert (folder / HISTORY).read_text().count('"synthetic_auroc"') == PROBES
    unwatched = Detector.fit(plates, recipe=CHEAP, holdout=0.25, parts=torch.arange(40))
    assert Detector.of(fitted).id == unwatched.id
    assert fitted.calibration == unwatched.calibration
    assert fitted.origin["metrics"] == unwatched.origin["metrics"]


def test_a_collapse_is_remembered_behind_a_probe(probed, plates):
    _, run, folder = probed
    lines = [json.loads(line) for line in (folder / HISTORY).read_text().splitlines()]
    assert "synthetic_auroc" in lines[-1]
    lines[-2]["collapsed"] = True
    (folder / HISTORY).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert type(run)(run.task, run.method, run.state.network, digest=run.digest, folder=folder).collapsed


def test_whole_images_are_probed_too(plates):
    small = {"training.epochs": 1, "training.batch": 8, "encoder.width": 8, "encoder.head.hidden": (8,), "size": 16}
    recipe = change(FAST, small)
    split = split_good(read_good(plates, recipe, Options(holdout=0.25, parts=torch.arange(40))))
    prepared = prepare(recipe, split.learn, split.parts, seed=0)
    prober = Prober(prepared, CheckImages.of(recipe, prepared, split.held_out, seed=0), 0)
    run = prepared.run()
    for progress in run:
        prober(progress, run)
    assert prober.lines[-1]["step"] == run.steps


def test_the_curve_is_drawn(tmp_path):
    lines = [{"step": n, "synthetic_auroc": 0.5 + 0.05 * n, "seconds": 6.0 * n} for n in range(1, 9)]
    draw_progress(lines, tmp_path / "curve.png")
    assert decode(tmp_path / "curve.png").std() > 5
