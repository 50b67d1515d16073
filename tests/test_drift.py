"""Drift keeps its rate of false alarms: exactly over all orders of a few images, in simulation with more of them."""

import math
import re
from dataclasses import replace
from itertools import combinations
from math import comb

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import hypergeom

from contracts import generator
from firm.decision.drift import (
    SLIGHT,
    STRICTER,
    _never_reached,
    _places,
    _tails,
    chance_of,
    drift,
    images_needed,
    light_drift,
    one_of_each,
    surprise,
)
from firm.errors import DataError, SettingError

LEVEL = 0.01


def chance_of_higher(batches, references):
    return chance_of(surprise(batches, references), batches.shape[1], references.shape[1])


def orders(batch, reference):
    """Every order of the two as (ranks of the batch, ranks of the reference)."""
    everyone = range(batch + reference)
    taken = list(combinations(everyone, batch))
    left = [sorted(set(everyone) - set(some)) for some in taken]
    return torch.tensor(taken).double(), torch.tensor(left).double()


def naive_chances(batches, references):
    """The definition: tails of counts over all orders, the least of them, and how many orders have one as small."""
    rows = list(zip(batches.tolist(), references.tolist(), strict=True))
    n = len(rows[0][1])
    places = range(n // 10, n - n // 10)
    counts = [[sum(x > sorted(good)[place] for x in new) for place in places] for new, good in rows]
    tails = [
        [sum(other[k] >= one[k] for other in counts) for k in range(len(places))] for one in counts
    ]  # in orders, exactly
    least = [min(row) for row in tails]
    return [sum(other <= one for other in least) / len(rows) for one in least]


def test_the_chance_is_that_over_all_orders():
    for batch, reference in [(1, 1), (1, 6), (3, 2), (2, 10), (4, 5), (3, 8), (6, 1)]:
        found = chance_of_higher(*orders(batch, reference))
        assert found.tolist() == pytest.approx(naive_chances(*orders(batch, reference)), rel=1e-9)


@pytest.mark.parametrize("defects", [0, 1])
def test_the_rate_holds_over_all_draws_of_a_few_images_with_ties_and_with_a_defect(defects):
    """Any four of eight scores may be those of the batch; a fifth image may be a defect, however high it scores."""
    for values in ([0.1, 0.2, 0.3, 0.5, 0.7, 2.0, 3.0, 9.0], [1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 5.0], [4.0] * 8):
        pool, found = torch.tensor(values), []
        for some in combinations(range(len(values)), 4):
            rest = [i for i in range(len(values)) if i not in some]
            found.append(drift(torch.cat([pool[list(some)], torch.full((defects,), 99.0)]), pool[rest], level=0.2))
        chances = [one.p_value for one in found]
        for wished in {*chances, 0.2}:
            assert sum(chance <= wished for chance in chances) / len(chances) <= wished + 1e-12
        assert sum(one.moved for one in found) / len(found) <= 0.2


def draws(name, shape, rng):
    normal = torch.randn(shape, generator=rng, dtype=torch.float64)
    return {
        "normal": lambda: normal,
        "heavy": lambda: normal / torch.randn(shape, generator=rng, dtype=torch.float64),
        "skewed": lambda: normal.exp(),
        "rounded": lambda: (2 * normal).round(),
        "coin": lambda: (normal > 0).double(),
        "constant": lambda: torch.zeros(shape, dtype=torch.float64),
    }[name]()


def moved(batches, references, level=LEVEL):
    """Which way each row is called, as `drift` calls them one by one: 1 higher, -1 lower, 0 not at all."""
    kept = batches.shape[1] - math.ceil(batches.shape[1] / 5)
    higher = as_rare(batches.sort(dim=1).values[:, :kept], references, level / 2)
    return higher.long() - as_rare(-batches, -references, level / 2).long()


def as_rare(batches, references, level):
    """Whether the chance of each row is at most that; it is never below the surprise, so few have to be found."""
    rows = surprise(batches, references)
    some, which = rows[rows <= level].unique(return_inverse=True)
    rare = torch.zeros(len(rows), dtype=torch.bool)
    rare[rows <= level] = (chance_of(some, batches.shape[1], references.shape[1]) <= level)[which]
    return rare


def with_defects(batches, part):
    spoilt = batches.clone()
    spoilt[:, : int(part * batches.shape[1])] = 1e9
    return spoilt


def rate(calls):
    return float((calls != 0).double().mean())


def test_simulated_calls_are_those_of_drift():
    rng = generator()
    batches, references = draws("rounded", (60, 12), rng) + 2, draws("rounded", (60, 25), rng)
    batches[30:] -= 5
    words = {1: "higher", 0: "", -1: "lower"}
    calls = moved(batches, references).tolist()
    assert set(calls) == {-1, 0, 1}
    for new, good, call in zip(batches, references, calls, strict=True):
        assert drift(new, good).direction == words[call]


@pytest.mark.parametrize(
    ("name", "n", "m", "defects"),
    [
        ("normal", 20, 5, 0.2), ("normal", 40, 30, 0.0), ("heavy", 20, 100, 0.2), ("skewed", 40, 30, 0.2),
        ("rounded", 20, 100, 0.0), ("coin", 40, 30, 0.2), ("constant", 20, 5, 0.2),
    ],
)  # fmt: skip
def test_false_alarms_in_simulation(name, n, m, defects):
    rng, trials = generator(n + m), 3000
    references, batches = draws(name, (trials, n), rng), draws(name, (trials, m), rng)
    noise = 3 * math.sqrt(LEVEL * (1 - LEVEL) / trials)
    assert rate(moved(with_defects(batches, defects), references)) <= LEVEL + noise


def test_the_rate_is_not_kept_by_never_calling():
    """Of continuous scores each side is used up: with the most defects allowed, higher; without any, lower."""
    rng, trials = generator(), 4000
    references, batches = draws("normal", (trials, 40), rng), draws("normal", (trials, 100), rng)
    noise = 3 * math.sqrt(0.05 * 0.95 / trials)
    higher = float((moved(with_defects(batches, 0.2), references, 0.1) > 0).double().mean())
    lower = float((moved(batches, references, 0.1) < 0).double().mean())
    assert 0.04 <= higher <= 0.05 + noise
    assert 0.04 <= lower <= 0.05 + noise


@pytest.mark.parametrize(
    ("name", "shift", "power"),
    [("normal", 1, 0.83), ("normal", -1, 0.97), ("normal", 0.5, 0.11), ("skewed", 1, 1.0)],
)
def test_power_beside_forty_good_images(name, shift, power):
    """A hundred images, all by so many deviations of the good ones higher."""
    rng = generator()
    references, batches = draws(name, (2000, 40), rng), draws(name, (2000, 100), rng)
    calls = moved(batches + shift * references.std(), references)
    assert float((calls == math.copysign(1, shift)).double().mean()) == pytest.approx(power, abs=0.03)


@pytest.mark.parametrize(("defects", "called"), [(0.1, 0.004), (0.2, 0.005), (0.3, 0.03)])
def test_few_batches_with_defects_are_reported_as_drifted(defects, called):
    rng = generator()
    references, batches = draws("normal", (3000, 40), rng), draws("normal", (3000, 100), rng)
    assert rate(moved(with_defects(batches, defects), references)) == pytest.approx(called, abs=0.006)


def test_photographs_of_one_part_do_not_raise_the_rate():
    """Twenty parts seen five times are twenty; taken for a hundred they would raise many false alarms."""
    rng, trials = generator(), 3000
    part = torch.arange(20).repeat_interleave(5)[torch.randperm(100, generator=rng)]
    goods = draws("normal", (trials, 20), rng)[:, part] + 0.2 * draws("normal", (trials, 100), rng)
    batches = draws("normal", (trials, 60), rng) * math.sqrt(1.04)
    shown = one_of_each(torch.arange(100.0), part).long()
    assert rate(moved(batches, goods[:, shown])) <= LEVEL + 3 * math.sqrt(LEVEL * (1 - LEVEL) / trials)
    assert rate(moved(batches, goods)) > 5 * LEVEL
    for new, good in zip(batches[:5] + 2, goods, strict=False):
        assert drift(new, good, parts=part) == replace(drift(new, good[shown]), above=int((new > good.max()).sum()))


@given(st.lists(st.integers(-3, 5), min_size=1, max_size=30))
def test_one_photograph_of_each_part_in_turn(numbers):
    found = one_of_each(torch.arange(len(numbers)).double(), torch.tensor(numbers)).tolist()
    expected = []
    for turn, part in enumerate(sorted(set(numbers))):
        shown = [i for i, number in enumerate(numbers) if number == part]
        expected.append(shown[turn % len(shown)])
    assert found == expected


@pytest.mark.parametrize(("n", "g", "a"), [(500, 4000, 2050), (30, 8000, 5000)])
def test_orders_are_counted_where_they_exceed_floating_point(n, g, a):
    """With one place to reach, the two ways to the chance and the hypergeometric law agree."""
    place = int(_places(n)[len(_places(n)) // 2])
    bounds = torch.full((1, n), g + 1)
    bounds[0, place] = a
    law = hypergeom.sf(a - 1, n + g, g, a + n - 1 - place)
    assert float(_tails(torch.tensor([place]), n, g)[0, a]) == pytest.approx(law, rel=1e-6)
    assert 1 - float(_never_reached(bounds, g)) == pytest.approx(law, abs=1e-8)


def test_ten_thousand_images_beside_many():
    rng = generator()
    reference, batch = draws("skewed", (120,), rng), draws("skewed", (10000,), rng)
    assert drift(batch, reference).p_value > 0.05
    assert drift(batch * 3, reference).direction == "higher"
    assert drift(batch / 3, reference).direction == "lower"


SCORES = st.lists(st.integers(-20, 20), min_size=1, max_size=25)


def scores(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@settings(max_examples=60)
@given(SCORES, SCORES, st.integers(0, 2**31))
def test_only_the_order_of_scores_matters(batch, reference, seed):
    new, good, rng = scores(batch), scores(reference), generator(seed)
    found = drift(new, good)
    for change in (lambda x: x**3 + 5, lambda x: (x / 7).exp()):
        again = drift(change(new), change(good))
        assert (again.moved, again.direction, again.enough, again.above) == (
            (found.moved, found.direction, found.enough, found.above)
        )
        assert again.p_value == found.p_value
    mixed = drift(new[torch.randperm(len(new), generator=rng)], good[torch.randperm(len(good), generator=rng)])
    assert mixed == found


@settings(max_examples=60)
@given(SCORES, SCORES, st.integers(0, 24), st.integers(1, 9))
def test_a_higher_score_is_never_less_surprising(batch, reference, which, by):
    new, good = scores(batch), scores(reference)
    raised = new.clone()
    raised[which % len(batch)] += by
    before, after = (float(chance_of_higher(some[None], good[None])) for some in (new, raised))
    assert after <= before * (1 + 1e-9)


@settings(max_examples=60)
@given(SCORES, SCORES, st.integers(-30, 60), st.floats(0.001, 0.3))
def test_what_is_said_agrees_with_itself(batch, reference, shift, level):
    found = drift(scores(batch) + shift, scores(reference), level=level)
    assert 0 < found.p_value <= 1
    assert found.moved == (found.enough and found.p_value <= level)
    assert found.moved == (found.direction != "")
    assert found.enough == (len(batch) >= images_needed(len(reference), level))
    assert not found.foreign or (found.moved and found.direction == "higher" and found.above >= 0.9 * len(batch))
    assert bool(found.sentence) == (found.moved or not found.enough)
    assert "\n" not in found.sentence


@pytest.mark.parametrize("level", [0.001, 0.01, 0.1])
def test_the_images_needed_are_the_fewest_that_can_be_reported(level):
    for n in (1, 2, 3, 9, 10, 57):
        needed = images_needed(n, level)
        reference = torch.arange(float(n))
        for images, possible in ((needed, True), (needed - 1, False)):
            for extreme in (1e6, -1e6):
                found = drift(torch.full((images,), extreme), reference, level=level) if images else None
                assert found is None or (found.moved == found.enough == possible)


def test_a_single_image_never_makes_a_batch_that_moved():
    assert images_needed(10**5, 0.3) == 2
    assert not drift(torch.tensor([1e6]), torch.arange(1000.0), level=0.3).moved


def test_a_lone_defect_of_a_few_images_is_no_drift():
    assert not drift(torch.tensor([50.0, 51.0, 49.0, 1e6, 48.0]), torch.arange(100.0), level=0.1).moved


def test_the_message_names_what_has_changed_and_how_certain_that_is():
    reference = torch.arange(40.0)
    assert drift(reference[::3] + 0.5, reference).sentence == ""
    few = drift(torch.tensor([3.0]), reference).sentence
    assert re.findall(r"\d+", few) == ["1", "40", "4"]
    assert "250" in drift(reference, torch.zeros(1)).sentence
    for shift, direction in ((20, "higher"), (-20, "lower")):
        found = drift(reference + shift, reference)
        assert all(word in found.sentence for word in (direction, "(p ", "1 %"))
    assert "p below 0.000001" in drift(reference - 60, reference).sentence


def test_images_of_something_else_are_recognised():
    rng = generator()
    reference = draws("normal", (40,), rng)
    other = draws("normal", (50,), rng) + 12
    other[:2] = 0
    found = drift(other, reference)
    assert found.foreign
    assert "48 of 50" in found.sentence
    other[2:6] = 0  # fewer than nine of ten
    assert not drift(other, reference).foreign
    assert drift(other, reference).moved


def test_what_is_near_few_or_beside_few_is_not_called_something_else():
    reference = torch.arange(40.0)
    spread = 6 * 19.5
    assert drift(torch.full((5,), 19.5 + spread + 1), reference).foreign
    assert not drift(torch.full((5,), 19.5 + spread - 1), reference).foreign  # just above all of them
    assert not drift(torch.full((4,), 1e6), reference).foreign
    assert drift(torch.full((4,), 1e6), reference).moved
    assert not drift(torch.full((10,), 1e6), reference[:2]).foreign  # by chance one time in some sixty
    assert not drift(torch.full((10,), -1e6), reference).foreign


def test_every_photograph_of_the_calibration_must_lie_below_what_is_something_else():
    part = torch.arange(40).repeat_interleave(2)
    reference = torch.arange(40.0).repeat_interleave(2)
    assert drift(torch.full((9,), 200.0), reference, parts=part).foreign
    reference[1] = 300.0  # the second photograph of the first part, which is not compared with
    found = drift(torch.full((9,), 200.0), reference, parts=part)
    assert found.moved
    assert not found.foreign
    assert found.above == 0


def test_equal_scores_are_never_drift():
    assert drift(torch.zeros(1000), torch.zeros(50)).p_value == 1


def test_scores_of_another_precision_are_compared_as_they_are():
    new, good = torch.arange(30.0) + 7, torch.arange(50.0)
    assert drift(new, good.double()) == drift(new.double(), good)


def test_chance_of_no_image():
    assert chance_of_higher(torch.empty(2, 0), torch.zeros(2, 3)).tolist() == [1, 1]
    assert drift(torch.tensor([0.5]), torch.zeros(3)).p_value == 1


def test_least_chance_in_a_closed_form():
    """Five of five above all nine of nine: one order of all, and the other end is as likely."""
    found = drift(torch.full((5,), -1.0), torch.arange(9.0))
    assert found.p_value == pytest.approx(2 / comb(14, 5))
    assert found.direction == "lower"


def test_what_cannot_be_compared_is_refused():
    fine = torch.zeros(3)
    for wrong in (math.nan, math.inf):
        with pytest.raises(SettingError, match="batch is not finite"):
            drift(torch.tensor([0.0, wrong]), fine)
        with pytest.raises(SettingError, match="calibration is not finite"):
            drift(fine, torch.tensor([0.0, wrong]))
    with pytest.raises(DataError, match="batch holds no scores"):
        drift(torch.empty(0), fine)
    with pytest.raises(DataError, match="calibration holds no scores"):
        drift(fine, torch.empty(0))
    for level in (0.0, 1.0, math.nan):
        with pytest.raises(SettingError, match=f"level is {level}"):
            drift(fine, fine, level=level)


# --- light ---


@pytest.mark.parametrize(("defects", "odd"), [(0, 0.0), (1, 0.0), (1, 99.0)])
def test_the_rate_of_light_holds_over_all_draws_with_a_defect_of_any_brightness(defects, odd):
    pool, chances = torch.tensor([0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.85, 0.9]), []
    for some in combinations(range(8), 4):
        rest = [i for i in range(8) if i not in some]
        batch = torch.cat([pool[list(some)], torch.full((defects,), odd)])
        chances.append(light_drift(batch, pool[rest], level=0.2).p_value)
    for wished in {*chances, 0.2}:
        assert sum(chance <= wished for chance in chances) / len(chances) <= wished + 1e-12


@pytest.mark.parametrize(("factor", "direction"), [(0.92, "darker"), (1.08, "brighter"), (1.0, "")])
def test_another_light_is_told_although_a_fifth_is_defective(factor, direction):
    rng = generator()
    good = 0.7 + 0.01 * torch.randn(40, generator=rng)
    batch = factor * (0.7 + 0.01 * torch.randn(20, generator=rng))
    batch[:4] = 0.0 if factor > 1 else 1.0
    found = light_drift(batch, good)
    assert found.direction == direction
    assert found.moved == bool(direction)
    assert found.images == 20
    assert found.reference == 40


def test_a_slight_change_of_light_is_none_however_sure():
    good = torch.linspace(0.699, 0.701, 40)
    less, more = light_drift((1 + SLIGHT - 0.01) * good, good), light_drift((1 + SLIGHT + 0.01) * good, good)
    assert less.p_value < 0.01
    assert not less.moved
    assert less.sentence == ""
    assert more.moved
    assert all(word in more.sentence for word in ("6 % brighter", "1 %", "firm calibrate"))


def test_photographs_of_one_part_count_once_in_light_too():
    good, parts = torch.full((40,), 0.5), torch.arange(4).repeat_interleave(10)
    assert light_drift(torch.full((40,), 0.3), good).moved
    few = light_drift(torch.full((4,), 0.3), good, parts=parts)
    assert few.reference == 4
    assert not few.moved


def test_black_images_are_compared_without_dividing_by_their_light():
    assert light_drift(torch.full((40,), 0.3), torch.zeros(40)).change == 0.0


@pytest.mark.parametrize("compare", [drift, light_drift])
def test_a_fifth_of_the_images_may_be_defects_however_many_photographs_the_good_parts_have(compare):
    """48 good images of 4 parts count as 4, and each of the 12 defects as one: that is no batch that moved."""
    good = torch.linspace(0.69, 0.71, 40)
    batch = torch.cat([good[::12], torch.full((12,), 0.95)])
    assert not compare(batch, good, images=60).moved
    assert compare(batch, good).moved  # 16 images by themselves, 12 of them odd
    few = compare(batch[-3:], good, images=60)  # so few parts that all may be defects
    assert few.p_value == 1.0 or not few.moved


# --- references scored out of fold ---


def test_an_estimated_reference_takes_more_to_show_drift():
    rng = generator()
    reference, batch = (torch.randn(n, generator=rng, dtype=torch.float64) for n in (80, 60))
    slight, clear = batch + 0.8, batch + 3
    assert drift(slight, reference).direction == "higher"
    assert drift(slight, reference, estimated=True).direction == ""  # its median is within the middle half
    assert drift(clear, reference, estimated=True).direction == "higher"
    assert drift(batch - 3, reference, estimated=True).direction == "lower"
    assert "about" in drift(clear, reference, estimated=True).sentence
    assert "at most" in drift(clear, reference).sentence
    few = drift(batch[:8], reference[:8], estimated=True)
    assert drift(batch[:8], reference[:8]).enough
    assert not few.enough
    assert str(images_needed(8, few.level / STRICTER)) in few.sentence


def test_models_of_other_folds_rarely_raise_a_false_alarm():
    """Good parts are points, a score is the distance to the nearest learnt one: 3 % of such batches or fewer."""
    alarms, strict = 0, 0
    for seed in range(60):
        rng = generator(seed)
        learnt, new = (torch.randn(n, 4, generator=rng) for n in (40, 60))
        fold = torch.arange(40) % 5
        reference = torch.cdist(learnt, learnt).masked_fill(fold[:, None] == fold, torch.inf).amin(1)
        batch = torch.cdist(new, learnt).amin(1)
        alarms += drift(batch, reference).moved
        strict += drift(batch, reference, estimated=True).moved
    assert strict <= 2 <= alarms
