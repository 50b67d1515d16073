"""What a detector is worth: every number is that of the metric itself, per kind, and trivial scores raise suspicion."""

from __future__ import annotations

import csv
import itertools
from dataclasses import dataclass, replace

import pytest
import torch

import contracts
import drawings
from firm.data.duplicates import thumbnails
from firm.decision.calibration import Calibration, Guarantee
from firm.decision.verdict import marked
from firm.detector.detector import Detector
from firm.detector.evaluation import IGNORED, SUSPICIOUS, Labelled, Trivial, evaluate, ious, trivial
from firm.errors import DataError
from firm.metrics.image import auroc, auroc_interval
from firm.metrics.pixel import aupro, localisation, pixel_auroc
from firm.recipes.presets import FAST, INSPECT
from firm.recipes.recipe import change
from firm.report.evaluation import roc, write_evaluation
from firm.scoring.models import Located
from firm.types import Truth

SIDE = 24


def evaluate_detector(detector, images, anomalous, truth):
    return evaluate(detector, Labelled(detector.locate(images), images, anomalous, truth))


def wholly_ignored(ignored, anomalous, truth):
    images, scores = torch.zeros(len(anomalous), 3, 4, 4, dtype=torch.uint8), torch.zeros(len(anomalous))
    return Labelled(Located(scores, torch.empty(len(scores), 0, 0)), images, anomalous, truth).under(ignored)


@dataclass
class Oracle:
    """A model that finds what it was given, in the order of the images; the first pixel of an image is its number."""

    located: Located
    has_maps: bool = True
    ignored: torch.Tensor | None = None

    def locate(self, images, on_chunk=None):
        if on_chunk is not None:
            on_chunk(len(images))
        number = images[:, 0, 0, 0].long()
        maps = self.located.maps[number]
        return Located(self.located.scores[number], maps if self.has_maps else maps[:, :0, :0])


def deciding_at(threshold, *, maps):
    """A calibration of one threshold for everything."""
    rate = Guarantee(None, 0.1)
    pixel, values = threshold if maps else None, {"reviewed": rate, "failed": rate, "marked": None}
    return Calibration(
        model="m", review=threshold, fail=threshold, pixel=pixel, images=10, parts=10, source="by hand", **values
    )


def oracle(said, *, patchwise=True, known=None, ignored=None):
    return Detector(
        recipe=None,
        model=Oracle(said, patchwise, ignored),
        origin={},
        thumbnails=thumbnails(known if known is not None else contracts.images_of(5, 3, SIDE)),
        calibration=deciding_at(0.5, maps=patchwise),
    )


@pytest.fixture
def tested():
    """Ten good images, six scratched, four dented; a dent has no mask, but for one."""
    rng = contracts.generator(7)
    kinds = ("good",) * 10 + ("scratch",) * 6 + ("dent",) * 4
    images = contracts.images_of(20, 3, SIDE)
    images[:, 0, 0, 0] = torch.arange(20)
    anomalous = torch.arange(20) >= 10
    masks = torch.zeros(20, SIDE, SIDE, dtype=torch.bool)
    for number in range(10, 17):
        masks[number, 4 : 6 + number % 5, 3:9] = True
    known = masks.flatten(1).any(1) | ~anomalous
    maps = torch.rand(20, SIDE, SIDE, generator=rng) + masks * torch.rand(20, 1, 1, generator=rng)
    scores = torch.rand(20, generator=rng) + 0.4 * anomalous
    return images, anomalous, Truth(kinds, masks, known), Located(scores, maps)


def test_all_numbers_are_those_of_the_metrics(tested):
    images, anomalous, truth, said = tested
    found = evaluate_detector(oracle(said), images, anomalous, truth)
    assert found.images == 20
    assert found.overall.images == 10
    assert found.overall.auroc == auroc_interval(said.scores, anomalous)
    known = truth.known
    assert int(known.sum()) == 17  # the dents without a mask count as images and not as pixels
    assert found.overall.localisation == localisation(said.maps[known], truth.masks[known])
    assert found.overall.localisation.pixel_auroc.value == pixel_auroc(said.maps[known], truth.masks[known])
    assert found.overall.localisation.aupro.value == aupro(said.maps[known], truth.masks[known])
    assert found.overall.localisation.regions == 7
    above = said.scores > 0.5
    assert found.caught == pytest.approx(float(above[10:].sum()) / 10)
    assert found.false_calls == pytest.approx(float(above[:10].sum()) / 10)
    assert 0 < found.false_calls < found.caught <= 1


def test_regions_are_compared_with_masks_on_images_that_do_not_pass(tested, tmp_path):
    images, anomalous, truth, said = tested
    by, wide = deciding_at(0.5, maps=True), 4 * said.maps.double() * truth.masks + 0.1
    said = Located(said.scores, wide.float())
    found = evaluate_detector(oracle(said), images, anomalous, truth)
    expected = [
        (marked(said.maps[i].numpy(), 0.5) & truth.masks[i].numpy()).sum()
        / (marked(said.maps[i].numpy(), 0.5) | truth.masks[i].numpy()).sum()
        for i in range(10, 17)
        if said.scores[i] > 0.5
    ]
    assert 0 < len(expected) < 7
    overlap = found.overall.overlap
    assert overlap.iou == pytest.approx(sum(expected) / len(expected))
    assert (overlap.images, overlap.of) == (len(expected), 7)
    assert found.kinds["dent"].overlap is None or found.kinds["dent"].overlap.of == 1
    by_image = ious(Labelled(said, images, anomalous, truth), by)
    assert int((~by_image.isnan()).sum()) == len(expected)
    assert by_image[:10].isnan().all()
    ignored = truth.masks[10:17].any(0)
    assert ious(Labelled(said, images, anomalous, truth), by, ignored).isnan().all()
    assert evaluate_detector(oracle(said, patchwise=False), images, anomalous, truth).overall.overlap is None
    write_evaluation(tmp_path, Labelled(said, images, anomalous, truth), by)
    with (tmp_path / "scores.csv").open(encoding="utf-8-sig") as file:
        cells = [row["iou"] for row in csv.DictReader(file)]
    assert [float(cell) for cell in cells if cell] == pytest.approx(expected)


def test_each_kind_is_told_from_all_good_images(tested):
    images, anomalous, truth, said = tested
    found = evaluate_detector(oracle(said), images, anomalous, truth).kinds
    assert list(found) == ["dent", "scratch"]
    for name, count, defective in (("scratch", 6, range(10, 16)), ("dent", 4, range(16, 20))):
        chosen = torch.tensor([*range(10), *defective])
        assert found[name].images == count
        assert found[name].auroc == auroc_interval(said.scores[chosen], anomalous[chosen])
        marked = chosen[truth.known[chosen]]
        assert found[name].localisation == localisation(said.maps[marked], truth.masks[marked])
    assert found["dent"].localisation.regions == 1


def test_unknown_masks_leave_the_image_measures(tested):
    images, anomalous, truth, said = tested
    unknown = Truth(truth.kinds, torch.zeros_like(truth.masks), ~anomalous)
    found = evaluate_detector(oracle(said), images, anomalous, unknown)
    assert found.overall.localisation is None
    assert all(kind.localisation is None for kind in found.kinds.values())
    assert found.overall.auroc.value == auroc(said.scores, anomalous)
    partly = Truth(truth.kinds, truth.masks, truth.known & (torch.arange(20) != 16))  # the only marked dent
    found = evaluate_detector(oracle(said), images, anomalous, partly).kinds
    assert found["dent"].localisation is None
    assert found["scratch"].localisation is not None
    other_side = Truth(truth.kinds, torch.ones(20, 5, 5, dtype=torch.bool), truth.known)
    assert evaluate_detector(oracle(said), images, anomalous, other_side).overall.localisation is None


def test_ignored_pixels_are_no_pixels_and_defects_under_them_no_misses(tested):
    images, anomalous, truth, said = tested
    ignored = torch.zeros(SIDE, SIDE, dtype=torch.bool)
    ignored[:8] = True  # covers the defects of 10, 11, 12, 15 and 16, and a part of those of 13 and 14
    under = torch.isin(torch.arange(20), torch.tensor([10, 11, 12, 15, 16]))
    assert torch.equal(wholly_ignored(ignored, anomalous, truth), under)
    detector = oracle(said, ignored=ignored)
    found = evaluate_detector(detector, images, anomalous, truth)
    assert (found.images, found.ignored, found.overall.images) == (15, 5, 5)
    assert found.overall.auroc == auroc_interval(said.scores[~under], anomalous[~under])
    known = truth.known & ~under
    assert found.overall.localisation == localisation(said.maps[known][:, 8:], truth.masks[known][:, 8:])
    assert found.kinds["scratch"].images == 2
    assert found.kinds["dent"].localisation is None  # the only marked one is not to be found
    assert found.caught == pytest.approx(float((said.scores > 0.5)[anomalous & ~under].float().mean()))
    assert {kind: sum(row.values()) for kind, row in found.confusion.items()} == {
        "good": 10, "scratch": 2, "dent": 3, IGNORED: 5,
    }  # fmt: skip
    for unknown in (None, Truth(truth.kinds, torch.zeros_like(truth.masks), ~anomalous)):
        whole = evaluate_detector(detector, images, anomalous, unknown)
        assert replace(whole, kinds={}) == replace(
            evaluate_detector(oracle(said), images, anomalous, unknown), kinds={}
        )
    marked = anomalous & truth.known | ~anomalous
    most = torch.arange(SIDE)[:, None].expand(SIDE, SIDE) < SIDE - 1
    with pytest.raises(DataError, match="ignored"):
        evaluate(oracle(said, ignored=most), Labelled(said, images, anomalous, truth)[marked])


def test_almost_all_of_a_defect_under_ignored_pixels_is_all_of_it():
    masks = torch.zeros(4, 20, 20, dtype=torch.bool)
    masks[1:, 0, :] = True
    masks[3, 1, 0] = True  # 19 of 21
    ignored = torch.zeros(20, 20, dtype=torch.bool)
    ignored[0, :19] = True
    truth = Truth(("good", "cut", "cut", "cut"), masks, torch.tensor([True, True, False, True]))
    anomalous = torch.tensor([False, True, True, True])
    assert wholly_ignored(ignored, anomalous, truth).tolist() == [False, True, False, False]
    assert not wholly_ignored(None, anomalous, truth).any()
    assert not wholly_ignored(ignored, anomalous, None).any()


def test_without_truth_there_are_no_kinds(tested):
    images, anomalous, _, said = tested
    found = evaluate_detector(oracle(said), images, anomalous, None)
    assert found.kinds == {}
    assert found.overall.localisation is None
    assert found.overall.auroc == auroc_interval(said.scores, anomalous)


def test_a_detector_of_whole_images_is_measured_by_its_scores_alone(tested):
    images, anomalous, truth, said = tested
    whole = oracle(said, patchwise=False)
    found = evaluate_detector(whole, images, anomalous, truth)
    assert found.overall.localisation is None
    assert found.kinds["scratch"].images == 6
    assert found.overall.auroc == auroc_interval(said.scores, anomalous)


def test_a_test_set_needs_both_kinds(tested):
    images, anomalous, _, said = tested
    with pytest.raises(DataError, match="both"):
        evaluate_detector(oracle(said), images[:10], anomalous[:10], None)


# --- trivial scores ---


def parts(n, *, light=0, seed=0):
    rng = contracts.generator(seed)
    return (100 + light + 30 * torch.rand(n, 3, 32, 32, generator=rng)).byte()


def test_trivial_scores_are_brightness_and_the_nearest_whole_image():
    good, images, anomalous = parts(6), torch.cat([parts(8, seed=1), parts(8, seed=2, light=3)]), torch.arange(16) >= 8
    found = trivial(images, anomalous, thumbnails(good))
    small = thumbnails(images).float()
    assert found.brightness == auroc(small.mean((1, 2)), anomalous)
    away = [min(float((one - other).norm()) for other in thumbnails(good).float()) for one in small]
    assert found.neighbour == auroc(torch.tensor(away), anomalous)
    assert thumbnails(good).shape == (6, 16, 16)


def test_defects_that_are_brighter_or_darker_raise_suspicion():
    for light in (-12, 12):
        images, anomalous = torch.cat([parts(20, seed=1), parts(20, seed=2, light=light)]), torch.arange(40) >= 20
        found = trivial(images, anomalous, thumbnails(parts(10)))
        assert found.suspicious
        assert max(found.brightness, 1 - found.brightness) > 0.99


def test_alike_images_raise_none():
    images, anomalous = torch.cat([parts(40, seed=1), parts(40, seed=2)]), torch.arange(80) >= 40
    found = trivial(images, anomalous, thumbnails(parts(10)))
    assert not found.suspicious
    assert trivial(images, anomalous, thumbnails(parts(10))[:0]).neighbour == 0.5  # nothing to compare with


def test_good_images_that_were_learnt_from_raise_suspicion():
    """A leak: the good half of the test set is the training set."""
    good = parts(10)
    images, anomalous = torch.cat([good, parts(10, seed=2)]), torch.arange(20) >= 10
    assert trivial(images, anomalous, thumbnails(good)).neighbour == 1.0


def test_suspicion_begins_at_three_quarters_on_either_side():
    for found, expected in (
        (Trivial(0.5, 0.5), False),
        (Trivial(SUSPICIOUS, 0.5), True),
        (Trivial(1 - SUSPICIOUS, 0.5), True),
        (Trivial(0.5, SUSPICIOUS), True),
        (Trivial(0.5, 1 - SUSPICIOUS), True),
        (Trivial(0.74, 0.26), False),
    ):
        assert found.suspicious == expected


# --- with real detectors ---


def test_an_untrained_detector_of_patches_is_evaluated():
    good, bad = drawings.screws(6, side=64, seed=1), drawings.screws(6, side=64, seed=2, defect=True)
    images, masks, anomalous = (
        torch.cat([good.images, bad.images]),
        torch.cat([good.masks, bad.masks]),
        torch.arange(12) >= 6,
    )
    tiny = {"encoder.width": 8, "encoder.head.hidden": (8,), "training.epochs": 0, "training.batch": 8, "size": 64}
    recipe = change(INSPECT, tiny | {"automatic": (), "tiling.stride": 16, "conditioning.illumination": "median"})
    detector = Detector.fit(drawings.screws(10, side=64).images, recipe=recipe)
    truth = Truth(("good",) * 6 + ("spot",) * 6, masks, torch.ones(12, dtype=torch.bool))
    found = evaluate_detector(detector, images, anomalous, truth)
    there = detector.locate(images)
    assert found.overall.auroc == found.kinds["spot"].auroc == auroc_interval(there.scores, anomalous)
    assert found.overall.localisation == found.kinds["spot"].localisation == localisation(there.maps, masks)
    assert found.overall.localisation.pixel_auroc.value > 0.8


def test_an_untrained_detector_of_whole_images_is_evaluated_too():
    recipe = change(FAST, {"encoder.width": 8, "encoder.head.hidden": (8,), "training.epochs": 0, "size": 16})
    detector = Detector.fit(parts(20), recipe=recipe)
    images, anomalous = torch.cat([parts(8, seed=1), parts(8, seed=2, light=60)]), torch.arange(16) >= 8
    found = evaluate_detector(detector, images, anomalous, None)
    assert found.overall.auroc.value == auroc(detector.score(images), anomalous)
    assert found.trivial.suspicious


def test_verdicts_are_counted_by_kind(tested):
    images, anomalous, truth, said = tested
    by = replace(deciding_at(0.5, maps=True), fail=0.9)
    found = evaluate_detector(replace(oracle(said), calibration=by), images, anomalous, truth)
    assert list(found.confusion) == ["good", "dent", "scratch"]
    for kind, counts in found.confusion.items():
        scores = [float(one) for one, is_kind in zip(said.scores, truth.kinds, strict=True) if is_kind == kind]
        low, high = (sum(one <= limit for one in scores) for limit in (0.5, 0.9))
        assert counts == {"PASS": low, "REVIEW": high - low, "FAIL": len(scores) - high}
    plain = evaluate_detector(oracle(said), images, anomalous, None).confusion
    assert {kind: sum(counts.values()) for kind, counts in plain.items()} == {"good": 10, "defective": 10}
    unset = evaluate_detector(replace(oracle(said), calibration=None), images, anomalous, truth)
    assert (unset.confusion, unset.caught, unset.false_calls) == ({}, 0.0, 0.0)


def test_learnt_images_in_the_test_set_are_counted(tested):
    _, anomalous, truth, said = tested
    smooth = torch.nn.functional.interpolate(torch.rand(40, 3, 3, 3) * 255, size=SIDE, mode="bilinear").byte()
    among = torch.cat([smooth[:5], smooth[20:35]])
    among[:, 0, 0, 0] = torch.arange(20)
    known = smooth[:20].clone()
    known[:5, 0, 0, 0] = torch.arange(5)
    assert evaluate_detector(oracle(said, known=known), among, anomalous, truth).copies == 5


def test_the_roc_is_that_of_every_threshold():
    rng = contracts.generator(3)
    scores = torch.randint(0, 8, (40,), generator=rng).double()  # with ties
    anomalous = torch.rand(40, generator=rng) < 0.4
    points = roc(scores, anomalous)
    assert points[0].tolist() == [0, 0]
    assert points[-1].tolist() == [1, 1]
    for (false, true), limit in zip(points[1:], sorted(set(scores.tolist()), reverse=True), strict=True):
        called = scores >= limit
        assert false == pytest.approx(float(called[~anomalous].double().mean()))
        assert true == pytest.approx(float(called[anomalous].double().mean()))
    area = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points))
    assert area == pytest.approx(auroc_interval(scores, anomalous).value)


# --- what was decided wrongly ---


def rows_of(table):
    with table.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def test_every_wrong_decision_is_named(tested, tmp_path):
    images, anomalous, truth, said = tested
    names = tuple(f"test/{kind}/{number:03}.png" for number, kind in enumerate(truth.kinds))
    names = (*names[:19], "=1+1.png")
    by = oracle(said).decides
    written = write_evaluation(tmp_path, Labelled(said, images, anomalous, replace(truth, files=names)), by)
    assert [file.name for file in written] == ["roc.png", "scores.csv", "misses.png", "false-calls.png", "wrong.csv"]
    assert [row["image"].removeprefix("'") for row in rows_of(tmp_path / "scores.csv")] == list(names)
    rows = rows_of(tmp_path / "wrong.csv")
    wrong = [i for i in range(20) if (float(said.scores[i]) > 0.5) != bool(anomalous[i])]
    assert sorted(row["image"].removeprefix("'") for row in rows) == sorted(names[i] for i in wrong)
    scores = [float(row["score"]) for row in rows]
    missed = sum(row["verdict"] == "PASS" for row in rows)
    assert missed == sum(i >= 10 for i in wrong)
    assert scores[:missed] == sorted(scores[:missed])
    assert scores[missed:] == sorted(scores[missed:], reverse=True)
    for row in rows:
        number = names.index(row["image"].removeprefix("'"))
        assert row["kind"] == truth.kinds[number]
        assert float(row["score"]) == float(said.scores[number])
        assert row["image"].startswith("'") == (number == 19)  # no spreadsheet computes it

    right = Located(anomalous.float(), said.maps)
    assert [file.name for file in write_evaluation(tmp_path, Labelled(right, images, anomalous, truth), by)] == [
        "roc.png",
        "scores.csv",
    ]
    assert {file.name for file in tmp_path.iterdir()} == {"roc.png", "scores.csv"}  # what was written before is gone


def test_images_without_names_are_numbered(tested, tmp_path):
    images, anomalous, truth, said = tested
    for known, kind in ((truth, "scratch"), (None, "defective")):
        write_evaluation(tmp_path, Labelled(said, images, anomalous, known), oracle(said).decides, name="drawn:plate")
        row = rows_of(tmp_path / "scores.csv")[11]
        assert (row["image"], row["kind"], float(row["score"])) == ("drawn:plate 11", kind, float(said.scores[11]))


def test_names_follow_the_images_that_are_looked_at(tested):
    images, anomalous, truth, said = tested
    named = replace(truth, files=tuple(map(str, range(20))))
    chosen = torch.arange(20) % 3 == 0
    assert Labelled(said, images, anomalous, named)[chosen].truth.files == tuple(str(i) for i in range(0, 20, 3))
    assert Labelled(said, images, anomalous, truth)[chosen].truth.files == ()
