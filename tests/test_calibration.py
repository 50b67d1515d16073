"""The threshold keeps its promise: exactly in small cases, on average in simulation."""

from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contracts import generator
from firm.calibration import threshold_of
from firm.types import FirmError


@pytest.mark.parametrize(
    ("n", "wished", "rank", "promised"),
    [
        (19, 0.05, 19, 0.05),  # the smallest set that can promise 5 %: 1 / 20
        (19, 0.10, 18, 0.10),
        (99, 0.05, 95, 0.05),
        (100, 0.05, 96, 5 / 101),
        (9, 0.05, 9, 0.1),  # nine images cannot promise less than 1 / 10
        (1, 0.5, 1, 0.5),
        (1, 0.01, 1, 0.5),
        (4, 0.5, 3, 0.4),
    ],
)
def test_exact_cases(n, wished, rank, promised):
    shuffled = torch.arange(1.0, n + 1)[torch.randperm(n, generator=generator())]
    found = threshold_of(shuffled, wished)
    assert found.value == rank
    assert found.false_calls == pytest.approx(promised)
    assert found.images == n


@pytest.mark.parametrize("wished", [0.2, 0.34, 0.5, 0.8])
def test_the_promise_is_exact_over_all_orders(wished):
    """Of five distinct scores any four may have been held out: count how often the fifth is called."""
    calls = [
        scores[-1] > threshold_of(torch.tensor(scores[:-1]), wished).value
        for scores in permutations([0.1, 0.5, 0.7, 2.0, 9.0])
    ]
    promised = threshold_of(torch.arange(4.0), wished).false_calls
    assert sum(calls) / len(calls) == pytest.approx(promised)
    assert promised <= wished


def test_the_promise_holds_on_average_in_simulation():
    rng = generator()
    wished, trials, n = 0.1, 2000, 37
    held_out = torch.randn(trials, n, generator=rng).exp()
    future = torch.randn(trials, generator=rng).exp()
    found = [threshold_of(scores, wished) for scores in held_out]
    called = sum(float(score) > one.value for score, one in zip(future, found, strict=True)) / trials
    assert called == pytest.approx(found[0].false_calls, abs=0.02)
    assert found[0].false_calls <= wished


@given(
    scores=st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    wished=st.floats(0.001, 0.999),
)
def test_no_lower_threshold_could_promise_as_much(scores, wished):
    values = torch.tensor(scores, dtype=torch.float32)
    n = len(scores)
    found = threshold_of(values, wished)
    assert found.value in scores
    above = int((values > found.value).sum())
    assert (above + 1) / (n + 1) <= max(found.false_calls + 1e-9, 1 / (n + 1) + 1e-9)
    assert found.false_calls <= max(wished, 1 / (n + 1)) + 1e-9
    # with one fewer below, the promise would break the wish: the threshold is the lowest
    assert found.false_calls + 1 / (n + 1) > wished - 1e-6
    looser = threshold_of(values, min(0.999, wished + 0.2))
    assert looser.value <= found.value


def test_ties_only_make_it_safer():
    found = threshold_of(torch.tensor([1.0, 1.0, 1.0, 1.0]), 0.4)
    assert found.value == 1.0


def test_errors_name_the_fix():
    with pytest.raises(FirmError, match="needs held-out good images; set holdout above 0"):
        threshold_of(torch.empty(0), 0.05)
    for wrong in (0.0, 1.0, -0.1, 2.0, float("nan")):
        with pytest.raises(FirmError, match=r"false_calls is .*; it must lie between 0 and 1"):
            threshold_of(torch.zeros(3), wrong)


def test_a_score_that_is_not_a_number_makes_no_threshold():
    with pytest.raises(FirmError, match="not finite"):
        threshold_of(torch.tensor([0.1, float("nan"), 0.3]), 0.05)


def test_the_rank_is_never_zero():
    assert threshold_of(torch.tensor([0.1, 0.2, 0.3]), 1 - 1e-11).value == pytest.approx(0.1)


# --- several images of one part ---


def naive(scores, parts, wished):
    """The definition: each part has the same weight, shared by its images, and one more such weight lies above all."""
    numbers = sorted(set(parts))
    weight = [1 / (parts.count(part) * (len(numbers) + 1)) for part in parts]
    for candidate in sorted(scores):
        if sum(w for w, s in zip(weight, scores, strict=True) if s <= candidate) >= 1 - wished - 1e-9:
            return candidate
    return max(scores)


@given(
    data=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), min_size=1, max_size=30),
    wished=st.floats(0.01, 0.9),
)
def test_parts_weigh_alike_however_many_images_they_have(data, wished):
    scores, parts = [float(score) for score, _ in data], [part for _, part in data]
    found = threshold_of(torch.tensor(scores), wished, torch.tensor(parts))
    assert found.value == naive(scores, parts, wished)
    assert found.parts == len(set(parts))
    assert found.false_calls >= 1 / (found.parts + 1) - 1e-9
    assert found.false_calls <= max(wished, 1 / (found.parts + 1)) + 1e-6


def test_images_of_their_own_parts_are_the_ordinary_case():
    scores = torch.randn(40, generator=generator())
    for wished in (0.01, 0.05, 0.3):
        assert threshold_of(scores, wished, torch.arange(40) * 7) == threshold_of(scores, wished)


def test_the_promise_holds_for_new_parts_in_simulation():
    """Six images of each part score nearly alike; counted as strangers they would promise what they cannot keep."""
    rng = generator()
    trials, k, of_each, wished = 1500, 8, 6, 0.05
    part = torch.randn(trials, k + 1, 1, generator=rng)
    scores = part + 0.05 * torch.randn(trials, k + 1, of_each, generator=rng)
    parts = torch.arange(k).repeat_interleave(of_each)
    known = [threshold_of(one[:k].flatten(), wished, parts) for one in scores]
    naively = [threshold_of(one[:k].flatten(), wished) for one in scores]
    calls, more = (
        sum(float(one[k, 0]) > bound.value for one, bound in zip(scores, bounds, strict=True)) / trials
        for bounds in (known, naively)
    )
    assert known[0].false_calls == pytest.approx(1 / 9)  # the least that eight parts can promise
    assert calls <= 1 / 9 + 0.02
    assert naively[0].false_calls < 0.05
    assert more > 0.08
