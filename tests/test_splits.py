"""Images of one part stay on one side of a split, and enough of them are held out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firm.data.splits import default_holdout, parts_needed, split_by_part
from firm.errors import DataError, SettingError


@given(
    parts=st.lists(st.integers(0, 30), min_size=2, max_size=200),
    holdout=st.floats(0.001, 0.999),
    seed=st.integers(0, 99),
)
def test_images_of_one_part_stay_together(parts: list[int], holdout: float, seed: int) -> None:
    numbers = torch.tensor(parts).unique(return_inverse=True)[1]
    learn, held_out = split_by_part(numbers, holdout, seed=seed)
    asked = min(len(parts) - 1, max(1, round(holdout * len(parts))))
    assert sorted([*learn.tolist(), *held_out.tolist()]) == list(range(len(parts)))
    assert 1 <= len(held_out) <= asked
    shared = set(numbers[learn].tolist()) & set(numbers[held_out].tolist())
    if shared:  # only where no part is small enough to be held out as a whole
        assert int(numbers.bincount().min()) > asked
        assert len(shared) == 1


def test_different_parts_are_held_out_at_random() -> None:
    drawn = [split_by_part(torch.arange(50), 0.2, seed=seed)[1].tolist() for seed in range(60)]
    assert all(len(held_out) == 10 for held_out in drawn)
    assert set().union(*drawn) == set(range(50))
    assert drawn[0] == split_by_part(torch.arange(50), 0.2, seed=0)[1].tolist()
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("images", "false_calls", "held_out"),
    [
        (1000, 0.05, 100),
        (200, 0.05, 40),
        (120, 0.05, 30),
        (12, 0.05, 3),
        (200, 0.2, 20),
    ],
)
def test_the_default_holdout_is_what_the_rate_takes_up_to_a_quarter(
    images: int, false_calls: float, held_out: int
) -> None:
    part = default_holdout(images, false_calls)
    assert len(split_by_part(torch.arange(images), part, seed=0)[1]) == held_out


def test_enough_parts_are_held_out_where_images_share_them() -> None:
    parts = torch.arange(600) // 6
    assert len(split_by_part(parts, 0.1, seed=0)[1]) == 60
    for min_parts, expected in ((0, 10), (5, 10), (19, 19), (25, 25), (40, 25)):  # at most a quarter
        held_out = split_by_part(parts, 0.1, seed=0, min_parts=min_parts)[1]
        assert len(parts[held_out].unique()) == expected
        assert len(held_out) == 6 * expected
    for different in (torch.arange(600), torch.arange(600).clamp(max=560)):  # but for a few: as many as asked
        assert len(split_by_part(different, 0.01, seed=0, min_parts=100)[1]) == 6
    assert [parts_needed(rate) for rate in (0.05, 0.01, 0.0, 1.0)] == [40, 200, 0, 0]


def test_impossible_splits_are_rejected() -> None:
    with pytest.raises(DataError, match="1 good images"):
        split_by_part(torch.arange(1), 0.1, seed=0)
    for holdout in (0.0, 1.0, float("nan")):
        with pytest.raises(SettingError, match="holdout"):
            split_by_part(torch.arange(9), holdout, seed=0)
