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
