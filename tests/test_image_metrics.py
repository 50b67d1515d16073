"""AUROC against counting pairs and scikit-learn, intervals of it and of rates against simulation, learning curves."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta
from sklearn.metrics import roc_auc_score

import oracles
from contracts import generator
from firm.errors import DataError, SettingError
from firm.metrics.image import aulc, auroc, auroc_interval, mean_std, rate_of

# few distinct values make ties, the floats make extremes
scores = st.one_of(st.integers(-3, 3).map(float), st.floats(-1e30, 1e30))
tables = st.lists(st.tuples(scores, st.booleans()), min_size=2, max_size=30).filter(
    lambda rows: len({label for _, label in rows}) == 2
)


def columns(rows):
    return np.array([score for score, _ in rows]), np.array([label for _, label in rows])


@given(rows=tables)
def test_auroc_counts_pairs(rows):
    values, labels = columns(rows)
    found = auroc(values, labels)
    assert found == pytest.approx(oracles.auroc(values.tolist(), labels.tolist()), abs=1e-12)
    assert found == pytest.approx(roc_auc_score(labels, values), abs=1e-12)
    assert auroc(torch.from_numpy(values), torch.from_numpy(labels)) == found


@given(rows=tables)
def test_auroc_turns_round_with_the_sign_and_is_never_flipped(rows):
    values, labels = columns(rows)
    assert auroc(-values, labels) == pytest.approx(1 - auroc(values, labels), abs=1e-12)


@given(rows=tables, seed=st.integers(0, 99))
def test_auroc_knows_ranks_only(rows, seed):
    values, labels = columns(rows)
    ranks = np.unique(values, return_inverse=True)[1].astype(float)
    order = np.random.default_rng(seed).permutation(len(values))
    assert auroc(ranks[order], labels[order]) == pytest.approx(auroc(values, labels), abs=1e-12)


def test_auroc_of_known_cases():
    labels = np.array([False, False, True, True])
    assert auroc(np.array([0.0, 1, 2, 3]), labels) == 1  # anomalies score higher
    assert auroc(np.array([3.0, 2, 1, 0]), labels) == 0
    assert auroc(np.zeros(4), labels) == 0.5
    assert auroc(np.array([0.0, 2, 1, 3]), labels) == 0.75


@settings(max_examples=20)
@given(rows=tables)
def test_interval_holds_its_value(rows):
    values, labels = columns(rows)
    found = auroc_interval(values, labels, resamples=200)
    assert found.value == auroc(values, labels)
    # the percentiles of few resamples of a handful of images may just miss the value itself
    assert 0 <= found.low <= found.high <= 1
    assert found.low <= found.value + 1e-9 or found.high - found.low < 0.05
    assert found.high >= found.value - 1e-9 or found.high - found.low < 0.05


def drawn(rng, normal=60, wrong=40, shift=1.0):
    """Normal and shifted scores; their true AUROC is Phi(shift / sqrt 2)."""
    values = np.concatenate([rng.normal(size=normal), rng.normal(shift, size=wrong)])
    return values, np.arange(normal + wrong) >= normal


def test_interval_covers_the_truth_about_as_often_as_it_says():
    truth = 0.5 * (1 + math.erf(1.0 / 2))
    rng = np.random.default_rng(0)
    found = [auroc_interval(*drawn(rng), resamples=200, seed=trial) for trial in range(200)]
    covered = np.mean([one.low <= truth <= one.high for one in found])
    assert 0.89 <= covered <= 0.985


def test_interval_is_deterministic_and_narrows_with_images_and_confidence():
    values, labels = drawn(np.random.default_rng(1))
    wide = auroc_interval(values, labels)
    assert auroc_interval(values, labels) == wide
    assert auroc_interval(values, labels, seed=1) != wide
    less = auroc_interval(values, labels, confidence=0.5)
    assert wide.low < less.low < less.value < less.high < wide.high
    many = auroc_interval(np.tile(values, 16), np.tile(labels, 16))
    assert many.value == pytest.approx(wide.value)
    assert many.high - many.low == pytest.approx((wide.high - wide.low) / 4, rel=0.2)


def test_interval_resamples_each_side_by_itself():
    """One anomaly among many: resampling both sides together would often leave none."""
    found = auroc_interval(np.r_[np.zeros(50), 1.0], np.r_[np.zeros(50, bool), True], resamples=50)
    assert (found.value, found.high) == (1, 1)


@pytest.mark.parametrize(("normal", "wrong", "least"), [(1, 1, 0.025), (1, 40, 0.025), (40, 12, 0.735)])
def test_classes_that_separate_perfectly_have_the_interval_of_so_many_pairs(normal, wrong, least):
    """As wide as Clopper and Pearson's for so many of so many: without width it would claim certainty."""
    values, labels = np.r_[np.arange(normal), 100.0 + np.arange(wrong)], np.arange(normal + wrong) >= normal
    for sign, value, ends in ((1, 1.0, (least, 1.0)), (-1, 0.0, (0.0, 1 - least))):
        found = auroc_interval(sign * values, labels, resamples=50)
        assert found.value == value
        assert (found.low, found.high) == pytest.approx(ends, abs=5e-4)
    tied = auroc_interval(np.zeros(2), np.array([False, True]), resamples=50)
    assert (tied.low, tied.value, tied.high) == (0, 0.5, 1)


def test_a_large_test_set_is_resampled_in_chunks():
    values, labels = drawn(np.random.default_rng(1), 3000, 2000)
    found = auroc_interval(values, labels, resamples=1000)  # more numbers than one chunk holds
    half_width = 1.96 * math.sqrt(found.value * (1 - found.value) / 2000)
    assert found.low < found.value < found.high
    assert found.high - found.low < 2 * half_width


@given(curve=st.lists(st.floats(0, 1), min_size=2, max_size=20))
def test_aulc_is_the_trapezoid_over_0_to_1(curve):
    x = np.linspace(0, 1, len(curve))
    expected = sum((x[i + 1] - x[i]) * (curve[i] + curve[i + 1]) / 2 for i in range(len(curve) - 1))
    found = aulc(curve)
    assert found == pytest.approx(expected, abs=1e-12)
    assert found == pytest.approx(np.trapezoid(curve, x), abs=1e-12)
    assert min(curve) - 1e-12 <= found <= max(curve) + 1e-12


def test_aulc_is_on_the_scale_of_the_auroc():
    assert aulc([0.8] * 7) == pytest.approx(0.8)
    assert aulc([0.5, 1.0]) == pytest.approx(0.75)
    assert aulc([0.9]) == 0.9
    assert isinstance(aulc([0.5, 1.0]), float)
    with pytest.raises(SettingError, match="probe"):
        aulc([])


def test_mean_and_sample_deviation():
    mean, deviation = mean_std([0.9, 0.8, 1.0])
    assert mean == pytest.approx(0.9)
    assert deviation == pytest.approx(0.1)
    mean, deviation = mean_std([0.7])
    assert mean == 0.7
    assert math.isnan(deviation)


def test_what_cannot_be_measured_is_refused():
    for values, labels, kind, culprit in [
        ([0.0, 1.0], [True, True], DataError, "both normal and anomalous"),
        ([0.0, 1.0], [False, False], DataError, "both normal and anomalous"),
        ([], [], DataError, "both normal and anomalous"),
        ([0.0, float("nan")], [True, False], SettingError, "not finite"),
        ([0.0, float("inf")], [True, False], SettingError, "not finite"),
        ([0.0, 1.0, 2.0], [True, False], SettingError, r"\(3,\) scores .* \(2,\) labels"),
        ([[0.0, 1.0]], [[True, False]], SettingError, r"\(1, 2\) scores"),
    ]:
        for measure in (auroc, auroc_interval):
            with pytest.raises(kind, match=culprit):
                measure(np.array(values), np.array(labels, dtype=bool))


@given(st.integers(1, 60).flatmap(lambda of: st.tuples(st.integers(0, of), st.just(of))), st.floats(0.5, 0.995))
def test_intervals_are_those_of_the_beta_distribution(counted, confidence):
    count, of = counted
    tail = (1 - confidence) / 2
    found = rate_of(count, of, confidence)
    low = 0.0 if count == 0 else beta.ppf(tail, count, of - count + 1)
    high = 1.0 if count == of else beta.ppf(1 - tail, count + 1, of - count)
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-9), pytest.approx(high, abs=1e-9))


def test_intervals_of_many_images_do_not_overflow():
    found = rate_of(300, 5000)
    assert found.low == pytest.approx(beta.ppf(0.025, 300, 4701), abs=1e-9)
    assert found.high == pytest.approx(beta.ppf(0.975, 301, 4700), abs=1e-9)
    for count, of in ((1, 0), (-1, 3), (4, 3), (0, 0)):
        with pytest.raises(SettingError, match=f"{count} of {of} "):
            rate_of(count, of)


def test_the_interval_holds_the_true_rate_as_often_as_it_says():
    drawn = torch.binomial(torch.full((2000,), 25.0), torch.full((2000,), 0.15), generator=generator())
    known = {count: rate_of(count, 25) for count in range(26)}
    held = [known[int(count)].low <= 0.15 <= known[int(count)].high for count in drawn]
    assert sum(held) / 2000 >= 0.95
