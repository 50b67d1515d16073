"""Which cells of stored features are drawn: by the stated chances, and as before where nothing is asked."""

from __future__ import annotations

import math
from statistics import median_low

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

import contracts
from firm import cells as module
from firm.cells import Cells, Choosable, changes, hard_first, overlapping

# three images: a scratch, a whole surface, scattered spots
ALLOWED = torch.zeros(3, 4, 5, dtype=torch.bool)
ALLOWED[0, 1, 1:4] = True
ALLOWED[1] = True
ALLOWED[2, ::2, ::3] = True
CHANCE = 0.1 + torch.rand(3, 4, 5, generator=contracts.generator(1)).double() ** 4
NUMBERED = torch.arange(60.0).view(3, 4, 5, 1)  # every cell is its own feature
OFFSETS = overlapping(3, 0.15)


def drawn(choosable, count=12, seed=7):
    """So many first views, each by the number of its cell among all."""
    cells = Cells(NUMBERED, choosable, torch.arange(3))
    first, second, group = cells.pairs(count, OFFSETS, rng=contracts.generator(seed))
    assert torch.equal(group, first[:, 0].long() // 20)  # partners and groups are of the same image
    assert torch.equal(group, second[:, 0].long() // 20)
    return first[:, 0].long(), second[:, 0].long()


def stated(choosable):
    """The chance of every cell of all images, by loops."""
    chance = torch.ones(3, 4, 5) if choosable.chance is None else choosable.chance
    result = [0.0] * 60
    listed = [(i, cell) for i in range(3) for cell in range(20) if choosable.allowed[i].flatten()[cell]]
    of_image = [sum(float(chance[i].flatten()[cell]) for i, cell in listed if i == image) for image in range(3)]
    for image, cell in listed:
        whole = sum(of_image) if choosable.evenly == "cells" else 3 * of_image[image]
        result[20 * image + cell] = float(chance[image].flatten()[cell]) / whole
    return result


WAYS = [
    Choosable(ALLOWED),
    Choosable(ALLOWED, CHANCE),
    Choosable(ALLOWED, evenly="cells"),
    Choosable(ALLOWED, CHANCE, evenly="cells"),
]


# --- as before ---


def test_without_chances_the_draws_are_those_there_were_before_chances():
    first, second = drawn(Choosable(ALLOWED))
    assert first.tolist() == [6, 24, 28, 43, 34, 6, 53, 40, 37, 43, 35, 33]
    assert second.tolist() == [8, 22, 23, 53, 29, 7, 43, 50, 34, 53, 36, 28]


def test_without_chances_a_cell_is_a_uniform_place_among_those_of_its_image():
    rng, again = contracts.generator(3), contracts.generator(3)
    images = Choosable(ALLOWED).draw_images(50, rng=rng)
    found = Choosable(ALLOWED).draw(images, rng=rng)
    parts = torch.randint(3, (50,), generator=again), torch.rand(50, generator=again)
    for image, part, cell in zip(*parts, found, strict=True):
        places = [i for i, allowed in enumerate(ALLOWED[image].flatten()) if allowed]
        assert int(cell) == places[int(part * len(places))]


# --- by their chances ---


@pytest.mark.parametrize("way", WAYS, ids=["images", "images, hard", "cells", "cells, hard"])
def test_draws_follow_the_stated_chances(way):
    expected = torch.tensor(stated(way), dtype=torch.float64)
    assert float(expected.sum()) == pytest.approx(1)
    times = drawn(way, 30_000)[0].bincount(minlength=60)
    assert times[expected == 0].sum() == 0
    possible = expected > 0
    assert chisquare(times[possible], 30_000 * expected[possible]).pvalue > 0.01


def test_the_ways_of_drawing_differ():
    """Else the test above could not tell them apart."""
    times = [drawn(way, 30_000)[0].bincount(minlength=60) for way in WAYS]
    for i, way in enumerate(WAYS):
        expected = torch.tensor(stated(way), dtype=torch.float64)
        for j, other in enumerate(times):
            if i != j:
                assert chisquare(other[expected > 0], 30_000 * expected[expected > 0]).pvalue < 1e-6


def test_a_drawn_number_leads_to_the_cell_whose_share_it_falls_into():
    """Walked along by loops, with the same numbers."""
    way, rng, again = Choosable(ALLOWED, CHANCE), contracts.generator(5), contracts.generator(5)
    images = way.draw_images(60, rng=rng)
    found = way.draw(images, rng=rng)
    parts = torch.randint(3, (60,), generator=again), torch.rand(60, generator=again, dtype=torch.float64)
    for image, part, cell in zip(*parts, found, strict=True):
        places = [i for i, allowed in enumerate(ALLOWED[image].flatten()) if allowed]
        shares = [float(CHANCE[image].flatten()[i]) for i in places]
        walked, left = 0, float(part) * sum(shares)
        while left >= shares[walked]:
            left -= shares[walked]
            walked += 1
        assert int(cell) == places[walked]


@settings(max_examples=30)
@given(
    n=st.integers(1, 400),
    uneven=st.integers(0, 30),
    evenly=st.sampled_from(["images", "cells"]),
    seed=st.integers(0, 99),
)
def test_whatever_the_chances_a_cell_is_allowed_and_of_its_image(n, uneven, evenly, seed):
    rng = contracts.generator(seed)
    part = torch.rand(n, 3, 3, generator=rng)
    choosable = Choosable(Choosable.at_least(part, 0.8).allowed, part**uneven, evenly)
    images = choosable.draw_images(500, rng=rng)
    cells = choosable.draw(images, rng=rng)
    assert bool(choosable.allowed.flatten(1)[images, cells].all())


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_rounding_leads_into_no_other_image(number, monkeypatch):
    """Thirds do not add up to whole numbers, and beside image 999 the largest number below one is one."""
    choosable = Choosable(torch.ones(1000, 1, 3, dtype=torch.bool), torch.full((1000, 1, 3), 1 / 3))
    whole = choosable.ends[2::3]
    assert (whole > torch.arange(1, 1001)).any() or (whole < torch.arange(1, 1001)).any()
    monkeypatch.setattr(torch, "rand", lambda count, **_: torch.full((count,), number, dtype=torch.float64))
    cells = choosable.draw(torch.arange(1000), rng=contracts.generator())
    assert cells.tolist() == [0 if number == 0 else 2] * 1000


def test_equal_chances_are_none():
    way, alike = (Choosable(ALLOWED, chance) for chance in (torch.full((3, 4, 5), 0.3), None))
    assert stated(way) == pytest.approx(stated(alike))
    assert way.ends.tolist() == pytest.approx([(i + 1) / 3 for i in range(3)] + [1 + (i + 1) / 20 for i in range(20)]
                                              + [2 + (i + 1) / 4 for i in range(4)])  # fmt: skip


# --- what a defect changed ---


def test_changes_are_distances_to_the_image_each_was_made_of(monkeypatch):
    monkeypatch.setattr(module, "ROWS", 2)
    rng = contracts.generator()
    good, bad = torch.randn(3, 2, 2, 5, generator=rng).half(), torch.randn(7, 2, 2, 5, generator=rng).half()
    deviation = torch.rand(5, generator=rng) + 0.5
    found = changes(bad, good, deviation)
    assert found.shape == (7, 2, 2)
    for outlier in range(7):
        for row in range(2):
            for column in range(2):
                one, other = bad[outlier, row, column].tolist(), good[outlier % 3, row, column].tolist()
                expected = math.hypot(*((a - b) / float(s) for a, b, s in zip(one, other, deviation, strict=True)))
                assert float(found[outlier, row, column]) == pytest.approx(expected, rel=1e-5)


class Watched:
    """Features of which it is noted how many images are read at once."""

    def __init__(self, features):
        self.features, self.read = features, []

    def __len__(self):
        return len(self.features)

    def __getitem__(self, rows):
        self.read.append(len(rows))
        return self.features[rows]


def test_not_all_features_are_read_at_once(monkeypatch):
    monkeypatch.setattr(module, "ROWS", 4)
    good, bad = Watched(torch.rand(3, 2, 2, 5)), Watched(torch.rand(10, 2, 2, 5).half())
    changes(bad, good, torch.ones(5))
    assert bad.read == good.read == [4, 4, 2]


def test_chances_by_hand():
    """The median change is 2; a tenth of it is the least that counts."""
    change = torch.tensor([[[1.0, 2.0, 4.0]], [[0.0, 2.0, 0.01]], [[7.0, 8.0, 9.0]]])
    allowed = torch.tensor([[[True] * 3], [[True] * 3], [[False] * 3]])
    assert hard_first(change, allowed, 1.0)[:2].flatten().tolist() == pytest.approx([2, 1, 0.5, 10, 1, 10])
    assert hard_first(change, allowed, 2.0)[:2].flatten().tolist() == pytest.approx([4, 1, 0.25, 100, 1, 100])
    assert hard_first(change, allowed, 0.5)[0].flatten().tolist() == pytest.approx([2**0.5, 1, 0.5**0.5])


@settings(max_examples=40)
@given(hard=st.floats(0.1, 10), scale=st.sampled_from([1e-3, 1.0, 1e4]), seed=st.integers(0, 99), still=st.floats(0, 1))
def test_chances_are_those_of_loops(hard, scale, seed, still):
    rng = contracts.generator(seed)
    change = scale * torch.rand(4, 2, 3, generator=rng) * (torch.rand(4, 2, 3, generator=rng) > still)
    allowed = torch.rand(4, 2, 3, generator=rng) < 0.7
    found = hard_first(change, allowed, hard).flatten().tolist()
    some = [one for one, may in zip(change.flatten().tolist(), allowed.flatten().tolist(), strict=True) if may and one]
    usual = median_low(some) if some else 1.0
    for chance, one in zip(found, change.flatten().tolist(), strict=True):
        assert chance == pytest.approx(max(one / usual, 0.1) ** -hard, rel=1e-5)
        assert 0 < chance <= 0.1**-hard * (1 + 1e-9)


def test_where_nothing_changed_all_cells_are_alike():
    assert len(hard_first(torch.zeros(2, 3, 3), torch.ones(2, 3, 3, dtype=torch.bool), 3.0).unique()) == 1
