"""PASS, REVIEW and FAIL from held-out good images: guarantees kept in simulation, misses, and the file."""

import json
import math
import re
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta

from contracts import generator
from firm.decision.calibration import (
    FOLDS,
    Guarantee,
    Misses,
    TargetRates,
    beside,
    calibration_of,
    from_json,
    rate_at,
    read_calibration,
    summary_of,
    threshold_of,
    to_json,
    warnings_of,
    write_calibration,
)
from firm.errors import DataError, ModelFileError, SettingError
from firm.metrics.image import rate_of

GOOD = torch.arange(1.0, 201.0)


def calibrated(good=GOOD, model="m", **options):
    return calibration_of(good, model=model, **options)


# two thresholds


def test_both_thresholds_are_the_conformal_ones():
    found = calibrated()
    assert (found.fail, found.failed.wished, found.failed.kept) == (199, 0.01, pytest.approx(2 / 201))
    assert (found.review, found.reviewed.wished, found.reviewed.kept) == (191, 0.05, pytest.approx(10 / 201))
    assert (found.images, found.parts, found.source) == (200, 200, "from 200 held-out good images")
    assert (found.pixel, found.marked, found.misses) == (None, None, None)
    assert not found.failed.unmet


def test_a_score_at_a_threshold_is_on_the_mild_side():
    found = calibrated()
    assert [found.verdict(score) for score in (-math.inf, 191.0, 191.001, 199.0, 199.001, math.inf)] == [
        "PASS", "PASS", "REVIEW", "REVIEW", "FAIL", "FAIL",
    ]  # fmt: skip
    with pytest.raises(ModelFileError, match="not a number"):
        found.verdict(math.nan)


def test_too_few_images_guarantee_the_lowest_rate_they_can():
    found = calibrated(torch.arange(40.0))
    assert (found.fail, found.failed.kept) == (39, pytest.approx(1 / 41))
    assert not found.failed.unmet  # the default follows the number of parts
    assert calibrated(torch.arange(40.0), targets=TargetRates(fail=0.01)).failed.unmet
    few = calibrated(torch.arange(5.0))
    assert (few.review, few.fail) == (3, 4)
    assert (few.reviewed.kept, few.failed.kept) == (pytest.approx(2 / 6), pytest.approx(1 / 6))


@pytest.mark.parametrize(("parts", "spared"), [(5, 1), (10, 2), (16, 4), (20, 4), (40, 4), (60, 4), (200, 9)])
def test_few_good_images_leave_room_for_review(parts: int, spared: int):
    """One odd part sets FAIL and not what may PASS; with many the rates are 5 % and 1 %."""
    found = calibrated(torch.arange(float(parts)))
    assert found.review == parts - 1 - spared
    assert found.fail >= found.review
    assert found.reviewed.kept == pytest.approx((spared + 1) / (parts + 1))
    assert not warnings_of(found)


def test_rates_that_you_ask_for_are_used_however_few_the_images():
    found = calibrated(torch.arange(20.0), targets=TargetRates(false_calls=0.05, fail=0.05))
    assert found.review == found.fail == 19


def test_regions_are_measured_by_the_maxima_of_good_maps():
    peaks = torch.arange(200.0).flip(0) / 2
    found = calibrated(peaks=peaks)
    assert (found.pixel, found.marked) == threshold_of(peaks, 0.01)
    assert found.fail == 199


def test_both_guarantees_hold_on_average_in_simulation():
    rng = generator()
    trials, n = 900, 60
    asked = TargetRates(fail=0.05, false_calls=0.2)
    scores = torch.randn(trials, n + 1, generator=rng).exp()
    called = {"PASS": 0, "REVIEW": 0, "FAIL": 0}
    for one in scores:
        found = calibrated(one[:n], targets=asked)
        called[found.verdict(float(one[n]))] += 1
    assert called["FAIL"] / trials == pytest.approx(found.failed.kept, abs=0.02)
    assert (called["FAIL"] + called["REVIEW"]) / trials == pytest.approx(found.reviewed.kept, abs=0.035)
    assert found.failed.kept <= 0.05
    assert 0.05 < found.reviewed.kept <= 0.2


def test_both_guarantees_hold_for_new_parts_in_simulation():
    """Five images of each of twelve parts score nearly alike: it is parts that count."""
    rng = generator()
    trials, k, of_each = 600, 12, 5
    part = torch.randn(trials, k + 1, 1, generator=rng)
    scores = part + 0.05 * torch.randn(trials, k + 1, of_each, generator=rng)
    parts = torch.arange(k).repeat_interleave(of_each)
    reviewed = failed = 0
    for one in scores:
        found = calibrated(one[:k].flatten(), parts=parts, targets=TargetRates(false_calls=0.25))
        called = found.verdict(float(one[k, 0]))
        reviewed, failed = reviewed + (called != "PASS"), failed + (called == "FAIL")
    assert found.failed.kept == pytest.approx(1 / 13)  # the least that twelve parts can guarantee
    assert failed / trials <= 1 / 13 + 0.03
    assert 0.12 < reviewed / trials <= found.reviewed.kept + 0.04 <= 0.29
    assert found.source == "from 60 held-out good images of 12 parts"


@given(
    good=st.lists(st.integers(-4, 9), min_size=1, max_size=40),
    rates=st.tuples(st.floats(0.005, 0.9), st.floats(0.005, 0.9)),
    score=st.integers(-5, 10),
)
def test_review_is_never_above_fail_and_verdicts_grow_with_the_score(good, rates, score):
    low, high = sorted(rates)
    found = calibrated(torch.tensor(good).float(), targets=TargetRates(fail=low, false_calls=high))
    assert found.review <= found.fail
    assert found.review in good
    words = ["PASS", "REVIEW", "FAIL"]
    assert words.index(found.verdict(score)) <= words.index(found.verdict(score + 1))
    assert (found.verdict(score) == "FAIL") == (score > found.fail)
    assert (found.verdict(score) == "PASS") == (score <= found.review)
    above = sum(one > found.fail for one in good)
    assert found.failed.kept >= (above + 1) / (len(good) + 1) - 1e-9


# by hand


def test_a_threshold_by_hand_is_used_and_named():
    found = calibrated(targets=TargetRates(fail_at=250.0))
    assert (found.fail, found.review) == (250, 191)
    assert (found.failed.wished, found.failed.kept) == (None, pytest.approx(1 / 201))
    assert found.source == "from 200 held-out good images; fail set by hand"
    both = calibrated(targets=TargetRates(fail_at=100.5, review_at=50))
    assert both.failed.kept == pytest.approx(101 / 201)
    assert both.source.endswith("; fail and review set by hand")
    with pytest.raises(SettingError, match=r"review at 12 .* fail at 9"):
        TargetRates(fail_at=9, review_at=12)  # before any image is looked at
    with pytest.raises(SettingError, match=r"review at 191 .* fail at 150"):
        calibrated(targets=TargetRates(fail_at=150.0))
    with pytest.raises(ModelFileError, match="not finite"):
        calibrated(targets=TargetRates(fail_at=math.inf))


@given(
    data=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4)), min_size=1, max_size=25), value=st.floats(-1, 21)
)
def test_the_rate_at_a_value_counts_parts(data, value):
    scores, parts = [float(score) for score, _ in data], [part for _, part in data]
    k = len(set(parts))
    naive = 1 - sum(1 / (parts.count(p) * (k + 1)) for s, p in data if s <= value)
    assert rate_at(torch.tensor(scores), value, torch.tensor(parts)) == pytest.approx(naive)
    threshold, guarantee = threshold_of(torch.tensor(scores), 0.2, torch.tensor(parts))
    assert rate_at(torch.tensor(scores), threshold, torch.tensor(parts)) <= guarantee.kept + 1e-9


def test_the_confidence_bound_is_that_of_the_beta_distribution_of_its_order_statistic():
    for images, above in ((20, 0), (200, 9), (200, 1)):
        found = calibrated(torch.arange(float(images)))
        limit = images - 1.0 - above
        assert found.upper_bound(limit) == pytest.approx(beta.ppf(0.95, above + 1, images - above), abs=1e-9)
        photographs = calibrated(torch.arange(float(images)).repeat(3), parts=torch.arange(images).repeat(3))
        assert photographs.upper_bound(limit) == found.upper_bound(limit)
        assert replace(found, scores=(), shown=()).upper_bound(limit) is None


def test_nineteen_calibrations_of_twenty_keep_their_confidence_bound_in_simulation():
    """Of uniform scores the true rate above a limit is one less the limit."""
    rng, kept = generator(8), 0
    for _ in range(400):
        found = calibrated(torch.rand(40, generator=rng))
        kept += 1 - found.review <= found.upper_bound(found.review)
    assert 0.92 < kept / 400 < 0.98


# defects


def test_misses_are_counted_and_move_no_threshold():
    defects = torch.cat([torch.tensor([100.0, 195.0]), torch.full((38,), 500.0)])
    plain, found = calibrated(), calibrated(defects=defects, targets=TargetRates(misses=0.05))
    assert (found.review, found.fail) == (plain.review, plain.fail)
    assert found.misses.unfailed == rate_of(2, 40)
    assert found.misses.passed == rate_of(1, 40)
    assert not found.misses.too_many  # 2 of 40 are 5 %
    assert found.source == "from 200 held-out good images and 40 defects"


def test_a_target_that_is_not_reached_has_a_price():
    defects = torch.cat([torch.tensor([20.0, 100.0, 195.0]), torch.full((37,), 500.0)])
    missed = calibrated(defects=defects, targets=TargetRates(misses=0.05)).misses
    assert missed.too_many
    assert int((defects.double() <= missed.enough).sum()) == 2
    assert missed.enough == pytest.approx(195.0)
    assert missed.enough < 195.0
    assert missed.price == pytest.approx(7 / 201)  # 195 to 200 lie above, and the new one
    none = calibrated(defects=defects, targets=TargetRates(misses=0.0)).misses
    assert none.enough == pytest.approx(20.0)
    assert none.price == pytest.approx(182 / 201)
    assert calibrated(defects=defects).misses == Misses(None, rate_of(3, 40), rate_of(2, 40))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.floats(0, 0.99))
def test_enough_is_the_highest_threshold_that_misses_no_more(scores, wished):
    found = calibrated(
        torch.arange(30.0), defects=torch.tensor(scores).float(), targets=TargetRates(misses=wished)
    ).misses
    allowed = wished * len(scores) + 1e-9
    assert sum(score <= found.enough for score in scores) <= allowed
    assert sum(score <= found.enough + 1e-6 for score in scores) > allowed


def test_targets_and_scores_that_cannot_be_are_refused():
    for name, value in (("false_calls", 1.5), ("fail", 1.5), ("misses", 1.0)):
        with pytest.raises(SettingError, match=f"{name} is {value}"):
            TargetRates(**{name: value})
    few = calibrated(targets=TargetRates(false_calls=0.006))  # all that fails is called
    assert few.review == few.fail == 200
    assert few.failed.wished == 0.006
    with pytest.raises(DataError, match="labelled defects"):
        calibrated(targets=TargetRates(misses=0.1))
    for defects in (torch.empty(0), torch.tensor([1.0, math.nan])):
        with pytest.raises(DataError, match="image of a defect"):
            calibrated(defects=defects)
    with pytest.raises(DataError, match="held-out good images"):
        calibrated(torch.empty(0))


# in words


def test_the_summary_says_what_is_decided_and_guaranteed(full):
    numbers = [re.findall(r"\d+\.\d %", line) for line in summary_of(full)]
    assert numbers[1] == ["5.0 %", "1.0 %"]
    bounds = [full.upper_bound(limit) for limit in (full.review, full.fail)]
    assert numbers[2] == [f"{100 * bound:.1f} %" for bound in bounds]
    assert "2 of 3" in summary_of(full)[-1]
    assert len(summary_of(replace(full, scores=(), shown=(), misses=None, pixel=None))) == 2


def test_a_calibration_is_printed_without_its_scores():
    found = calibrated(files=[f"{number}.png" for number in range(len(GOOD))], light=GOOD / 200)
    assert len(repr(found)) < 1_000
    assert f"{found.fail}" in repr(found)


def test_targets_that_are_not_reached_are_warned_of(full):
    (missed,) = warnings_of(full)
    assert f"{full.misses.enough:.6g}" in missed
    few = warnings_of(calibrated(torch.arange(5.0), targets=TargetRates(false_calls=0.05, fail=0.01)))
    assert ["FAIL" in few[0], "99" in few[0], "REVIEW" in few[1], "19" in few[1], len(few)] == [True] * 4 + [3]
    asked = TargetRates(false_calls=0.05, fail=0.01)
    parts = warnings_of(calibrated(torch.arange(40.0), parts=torch.arange(40) // 4, targets=asked))
    assert parts[0].startswith("10 good parts ")
    assert warnings_of(calibrated()) == []


# the file


@pytest.fixture
def full():
    defects, light = torch.tensor([3.0, 400.0, 195.0]), GOOD / 1000
    named = [f"{number}.png" for number in range(len(GOOD))]
    return calibrated(
        peaks=GOOD / 3, light=light, defects=defects, files=named, basis=FOLDS, targets=TargetRates(misses=0.2)
    )


def test_it_comes_back_from_its_file_as_it_was(full, tmp_path):
    for number, one in enumerate((full, calibrated())):
        file = tmp_path / "below" / f"{number}.json"
        write_calibration(file, one)
        assert read_calibration(file, model="m") == one
        assert json.loads(file.read_text())["id"] == one.id
        json.dumps(to_json(one), allow_nan=False)
    assert beside("some/part.firm").as_posix() == "some/part.firm/calibration.json"


def test_the_id_names_all_that_is_said(full):
    assert full.id == replace(full).id
    changes = {"model": "n", "review": 1.0, "fail": 500.0, "pixel": None, "images": 3, "parts": 3, "source": "x"}
    changes |= {"reviewed": Guarantee(0.05, 0.1), "failed": Guarantee(None, 0.1), "marked": None, "misses": None}
    changes |= {"scores": (), "shown": (), "light": (), "files": ("a",), "basis": "held-out"}
    assert set(changes) == set(asdict(full))
    assert len({full.id, *(replace(full, **{name: value}).id for name, value in changes.items())}) == 17


def test_any_edit_is_refused(full):
    written = to_json(full)
    assert from_json(json.loads(json.dumps(written))) == full
    for name in asdict(full):
        for wrong in (None, 7, "x", [], {}, True, 10**400):
            if wrong != written[name]:
                with pytest.raises(ModelFileError, match="firm calibrate"):
                    from_json(written | {name: wrong})
        with pytest.raises(ModelFileError, match="firm calibrate"):
            from_json({key: value for key, value in written.items() if key != name})
    with pytest.raises(ModelFileError, match="further"):
        from_json(written | {"further": 1})


def test_foreign_files_are_refused_in_a_sentence(full, tmp_path):
    file = tmp_path / "part.firm.calibration.json"

    def refused(content, why, model="m"):
        file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        with pytest.raises(ModelFileError, match=why) as error:
            read_calibration(file, model=model)
        assert file.name in str(error.value)
        assert "\n" not in str(error.value)

    written = to_json(full)
    refused(written, "model m, not to other", model="other")
    refused(written | {"schema": 3}, "schema 3")
    refused(written | {"kind": "detector"}, "is no calibration")
    refused(written | {"fail": written["fail"] + 1}, "damaged or edited")
    refused([1], "is no calibration")
    refused(b"{", "cannot be read as JSON")
    refused(b"\xff\xfe\x00", "cannot be read as JSON")
    refused(json.dumps(written | {"fail": math.nan}).encode(), "not finite")
    refused(b"[" * 100_000, "cannot be read as JSON")
    with pytest.raises(ModelFileError, match=r"nowhere\.json"):
        read_calibration(tmp_path / "nowhere.json", model="m")
