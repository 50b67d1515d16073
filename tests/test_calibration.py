"""The threshold keeps its guarantee: exactly in small cases, on average in simulation."""

from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contracts import generator
from firm.decision.calibration import threshold_of
from firm.errors import DataError, SettingError


def test_exact_cases():
    for n, target, rank, guaranteed in [
        (19, 0.05, 19, 0.05),  # the smallest set that guarantees 5 %: 1 / 20
        (19, 0.10, 18, 0.10),
        (99, 0.05, 95, 0.05),
        (100, 0.05, 96, 5 / 101),
        (9, 0.05, 9, 0.1),  # nine images cannot guarantee less than 1 / 10
        (1, 0.5, 1, 0.5),
        (1, 0.01, 1, 0.5),
        (4, 0.5, 3, 0.4),
    ]:
        shuffled = torch.arange(1.0, n + 1)[torch.randperm(n, generator=generator())]
        value, found = threshold_of(shuffled, target)
        assert value == rank
        assert found.kept == pytest.approx(guaranteed)


def test_the_guarantee_is_exact_over_all_orders():
    """Of five distinct scores any four may have been held out: count how often the fifth is called."""
    for target in (0.2, 0.34, 0.8):
        calls = [
            scores[-1] > threshold_of(torch.tensor(scores[:-1]), target)[0]
            for scores in permutations([0.1, 0.5, 0.7, 2.0, 9.0])
        ]
        guaranteed = threshold_of(torch.arange(4.0), target)[1].kept
        assert sum(calls) / len(calls) == pytest.approx(guaranteed)
        assert guaranteed <= target


def test_the_guarantee_holds_on_average_in_simulation():
    rng = generator()
    target, trials, n = 0.1, 2000, 37
    held_out = torch.randn(trials, n, generator=rng).exp()
    future = torch.randn(trials, generator=rng).exp()
    found = [threshold_of(scores, target) for scores in held_out]
    called = sum(float(score) > one[0] for score, one in zip(future, found, strict=True)) / trials
    assert called == pytest.approx(found[0][1].kept, abs=0.02)
    assert found[0][1].kept <= target


@given(
    scores=st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    target=st.floats(0.001, 0.999),
)
def test_no_lower_threshold_could_guarantee_as_much(scores, target):
    values = torch.tensor(scores, dtype=torch.float32)
    n = len(scores)
    value, found = threshold_of(values, target)
    assert value in scores
    above = int((values > value).sum())
    assert (above + 1) / (n + 1) <= max(found.kept + 1e-9, 1 / (n + 1) + 1e-9)
    assert found.kept <= max(target, 1 / (n + 1)) + 1e-9
    # with one fewer below, the guarantee would break the wish: the threshold is the lowest
    assert found.kept + 1 / (n + 1) > target - 1e-6
    looser = threshold_of(values, min(0.999, target + 0.2))
    assert looser[0] <= value


def test_ties_and_extreme_targets():
    assert threshold_of(torch.tensor([1.0, 1.0, 1.0, 1.0]), 0.4)[0] == 1.0
    assert threshold_of(torch.tensor([0.1, 0.2, 0.3]), 1 - 1e-11)[0] == pytest.approx(0.1)  # the rank is never zero


def test_what_makes_no_threshold_is_refused():
    with pytest.raises(DataError, match="held-out good images"):
        threshold_of(torch.empty(0), 0.05)
    with pytest.raises(SettingError, match="not finite"):
        threshold_of(torch.tensor([0.1, float("nan"), 0.3]), 0.05)
    for wrong in (0.0, 1.0, -0.1, 2.0, float("nan")):
        with pytest.raises(SettingError, match=f"false_calls is {wrong}"):
            threshold_of(torch.zeros(3), wrong)


# --- several images of one part ---


def naive(scores, parts, target):
    """The definition: each part has the same weight, shared by its images, and one more such weight lies above all."""
    numbers = sorted(set(parts))
    weight = [1 / (parts.count(part) * (len(numbers) + 1)) for part in parts]
    for candidate in sorted(scores):
        if sum(w for w, s in zip(weight, scores, strict=True) if s <= candidate) >= 1 - target - 1e-9:
            return candidate
    return max(scores)


@given(
    data=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), min_size=1, max_size=30),
    target=st.floats(0.01, 0.9),
)
def test_parts_weigh_alike_however_many_images_they_have(data, target):
    scores, parts = [float(score) for score, _ in data], [part for _, part in data]
    value, found = threshold_of(torch.tensor(scores), target, torch.tensor(parts))
    assert value == naive(scores, parts, target)
    least = 1 / (len(set(parts)) + 1)
    assert least - 1e-9 <= found.kept <= max(target, least) + 1e-6


def test_images_of_their_own_parts_are_the_ordinary_case():
    scores = torch.randn(40, generator=generator())
    for target in (0.01, 0.05, 0.3):
        assert threshold_of(scores, target, torch.arange(40) * 7) == threshold_of(scores, target)


def test_the_guarantee_holds_for_new_parts_in_simulation():
    """Six images of each part score nearly alike; counted as strangers they would guarantee what they cannot keep."""
    rng = generator()
    trials, k, of_each, target = 1500, 8, 6, 0.05
    part = torch.randn(trials, k + 1, 1, generator=rng)
    scores = part + 0.05 * torch.randn(trials, k + 1, of_each, generator=rng)
    parts = torch.arange(k).repeat_interleave(of_each)
    known = [threshold_of(one[:k].flatten(), target, parts) for one in scores]
    naively = [threshold_of(one[:k].flatten(), target) for one in scores]
    calls, more = (
        sum(float(one[k, 0]) > bound[0] for one, bound in zip(scores, bounds, strict=True)) / trials
        for bounds in (known, naively)
    )
    assert known[0][1].kept == pytest.approx(1 / 9)  # the least that eight parts can guarantee
    assert calls <= 1 / 9 + 0.02
    assert naively[0][1].kept < 0.05
    assert more > 0.08
