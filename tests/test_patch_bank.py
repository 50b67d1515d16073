"""The bank against loops over patches: scores, leave-one-out, statistics, and which patches are kept."""

import itertools
import math
from dataclasses import replace
from statistics import fmean, median, stdev

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch.utils._python_dispatch import TorchDispatchMode

import contracts
import oracles
from firm import bank as module
from firm import coreset, search
from firm.bank import METRICS, Bank, Memory, cost, fit_bank, leave_one_out, statistics
from firm.coreset import CHOICES
from firm.memory import nearest, unit
from firm.types import FirmError


def features(n, rows=3, columns=4, dim=6, seed=0):
    """Non-negative, as the encoder's features are, and of any length."""
    return 3 * torch.rand(n, rows, columns, dim, generator=contracts.generator(seed))


def fitted(good, seed=0, **settings):
    return fit_bank(good, Memory(**settings), rng=contracts.generator(seed))


def kept(bank):
    """Which patches of the good images are in the bank, as rows of the flattened features."""
    return (bank.image * math.prod(bank.shape) + bank.cell).tolist()


# --- the same as loops ---


def apart(first, second, columns):
    """Chebyshev distance of two cells."""
    return max(abs(first // columns - second // columns), abs(first % columns - second % columns))


def window(cell, known, memory, columns, enough):
    """Rows of the bank a cell is compared with: within reach, or in as little more as is enough."""
    if memory.reach < 0:
        return list(range(len(known)))
    for reach in itertools.count(memory.reach):
        found = [i for i, other in enumerate(known) if apart(cell, other, columns) <= reach]
        if enough(found) or len(found) == len(known):
            return found
    return None


def mean_distance(query, keys, k):
    """The mean of the k least distances; the last number of a key belongs to the search."""
    return fmean(sorted(math.dist(query, key[:-1]) for key in keys)[:k])


def loops(bank, queries, leave=False):
    """Every patch against its window, one by one; `leave` leaves its own image out."""
    k, whose, known, vectors = bank.memory.k, bank.image.tolist(), bank.cell.tolist(), bank.vectors.tolist()
    one_by_one = oracles.s_con if bank.memory.metric == "cosine" else mean_distance

    def others(found, image):
        return [i for i in found if whose[i] != image]

    def enough(found):
        return min(len(others(found, image)) for image in whose) >= k if leave else len(found) >= k

    result = np.empty(queries.shape[:3])
    for row, column in np.ndindex(bank.shape):
        found = window(row * bank.shape[1] + column, known, bank.memory, bank.shape[1], enough)
        for image, query in enumerate(queries[:, row, column].tolist()):
            compared = others(found, image) if leave else found
            result[image, row, column] = one_by_one(query, [vectors[i] for i in compared], k)
    return result


SETTINGS = st.builds(
    Memory,
    keep=st.sampled_from([0.2, 0.5, 1.0]),
    choose=st.sampled_from(list(CHOICES)),
    reach=st.sampled_from([-1, 0, 1, 2, 50]),
    k=st.integers(1, 3),
    metric=st.sampled_from(METRICS),
)


@settings(max_examples=40)
@given(
    memory=SETTINGS, n=st.integers(2, 4), block=st.sampled_from([1, 3, 1024]), queries=st.sampled_from([1, 30, 4096])
)
def test_scores_are_those_of_loops(memory, n, block, queries):
    good, suspect = features(n, 2, 4, dim=4), features(2, 2, 4, dim=4, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        patch.setattr(search, "BLOCK", block)
        patch.setattr(module, "QUERIES", queries)
        bank = fit_bank(good, memory, rng=contracts.generator())
        scores = bank.score(suspect)
    np.testing.assert_allclose(scores, loops(bank, suspect), atol=1e-5)


@settings(max_examples=40)
@given(
    memory=SETTINGS, n=st.integers(3, 5), block=st.sampled_from([1, 3, 1024]), queries=st.sampled_from([1, 30, 4096])
)
def test_leave_one_out_is_that_of_loops(memory, n, block, queries):
    good = features(n, 2, 4, dim=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        patch.setattr(search, "BLOCK", block)
        patch.setattr(module, "QUERIES", queries)
        bank = fit_bank(good, memory, rng=contracts.generator())
        if len(bank.image) - int(bank.image.bincount().max()) < memory.k:
            with pytest.raises(FirmError, match=f"where k = {memory.k} are needed; give more good images"):
                leave_one_out(bank, good)
            return
        scores = leave_one_out(bank, good)
    np.testing.assert_allclose(scores, loops(bank, good, leave=True), atol=1e-5)


def test_leaving_an_image_out_is_a_bank_without_it():
    good = features(5)
    scores = leave_one_out(fitted(good, reach=1, k=2), good)
    for i in range(5):
        rest = torch.cat([good[:i], good[i + 1 :]])
        torch.testing.assert_close(scores[i : i + 1], fitted(rest, reach=1, k=2).score(good[i : i + 1]))
    assert fitted(good).score(good).abs().max() < 1e-6  # not left out, every patch finds itself


@pytest.mark.parametrize("reach", [-1, 4, 99])
def test_a_bank_that_reaches_everywhere_is_the_plain_search(reach):
    good, suspect = features(6), features(3, seed=1)
    expected = 1 - nearest(unit(suspect.flatten(0, 2)), unit(good.flatten(0, 2)), 1)
    found = fitted(good, reach=reach).score(suspect)
    torch.testing.assert_close(found.flatten(), expected.flatten(), atol=1e-6, rtol=0)


def test_a_good_thing_in_a_wrong_place_is_found_only_within_reach():
    """Every cell of a good image has its own direction; exchanging two far ones changes nothing without places."""
    good = torch.eye(12).reshape(1, 3, 4, 12).expand(3, -1, -1, -1)
    wrong = good[:1].clone()
    wrong[0, 0, 0], wrong[0, 2, 3] = good[0, 2, 3], good[0, 0, 0]
    expected = torch.zeros(1, 3, 4)
    assert torch.equal(fitted(good).score(wrong), expected)
    assert torch.equal(fitted(good, reach=3).score(wrong), expected)
    expected[0, 0, 0] = expected[0, 2, 3] = 1
    assert torch.equal(fitted(good, reach=2).score(wrong), expected)
    assert torch.equal(fitted(good, reach=0).score(wrong), expected)


def test_a_cell_without_patches_within_reach_reaches_further():
    """One row of five cells; patches are left at its ends only, and the middle is as far from both."""
    vectors, ones = torch.eye(2), torch.ones(1, 5)
    bank = Bank(vectors, torch.tensor([0, 1]), torch.tensor([0, 4]), (1, 5), Memory(reach=0), 0 * ones, ones)
    left, right = vectors[0].expand(1, 1, 5, 2), vectors[1].expand(1, 1, 5, 2)
    assert bank.score(left).tolist() == [[[0, 0, 0, 1, 1]]]
    assert bank.score(right).tolist() == [[[1, 1, 0, 0, 0]]]


@pytest.mark.parametrize("reach", [-1, 1])
def test_what_is_visited_is_found_once_for_a_bank(reach):
    """As often as it is asked it is read as a whole; where it is read is the same every time."""
    bank = fitted(features(4), reach=reach)
    before = bank.visits
    first, again = bank.score(features(2, seed=1)), bank.score(features(2, seed=1))
    assert bank.visits is before
    assert torch.equal(first, again)
    read = [row for rows, _ in before for row in range(rows.start, rows.stop)]
    assert read == list(range(48))


def test_scores_do_not_depend_on_company_or_scale():
    good, suspect = features(4), features(5, seed=1)
    for reach in (-1, 1):
        bank = fitted(good, reach=reach, k=2)
        together = bank.score(suspect)
        alone = torch.cat([bank.score(one[None]) for one in suspect])
        torch.testing.assert_close(alone, together, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(bank.score(7 * suspect), together, atol=1e-6, rtol=1e-5)
        longer, shorter = (fitted(factor * good, reach=reach, metric="l2").score(factor * suspect) for factor in (7, 1))
        torch.testing.assert_close(longer, 7 * shorter, atol=1e-5, rtol=1e-5)
        assert bank.score(suspect[:0]).shape == (0, 3, 4)


# --- standardised scores ---


def place_statistics(scores):
    """Mean and deviation of each place by loops over the cells around it."""
    n, rows, columns = scores.shape
    series = {(i, j): [float(scores[m, i, j]) for m in range(n)] for i in range(rows) for j in range(columns)}
    deviation = {
        (i, j): math.sqrt(
            fmean(stdev(values) ** 2 for (y, x), values in series.items() if max(abs(y - i), abs(x - j)) <= 1)
        )
        for i, j in series
    }
    least = median(deviation.values()) / 2
    grid = lambda values: np.array([values[i, j] for i in range(rows) for j in range(columns)]).reshape(rows, columns)  # noqa: E731
    return grid({at: fmean(values) for at, values in series.items()}), grid(
        {at: max(value, least) for at, value in deviation.items()}
    )


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 3), (5, 6)])
def test_statistics_are_those_of_loops(rows, columns):
    rng = contracts.generator()
    spread = torch.linspace(0.01, 1, columns)  # so uneven that the floor acts
    scores = torch.rand(12, rows, columns, generator=rng) * spread + torch.rand(rows, columns, generator=rng)
    mean, deviation = statistics(scores)
    expected_mean, expected_deviation = place_statistics(scores)
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-5)
    np.testing.assert_allclose(deviation, expected_deviation, rtol=1e-4)


def test_half_the_median_deviation_is_the_least():
    scores = torch.randn(50, 9, 9, generator=contracts.generator())
    scores[:, :4, :4] *= 1e-4
    deviation = statistics(scores)[1]
    assert float(deviation.min()) == pytest.approx(float(deviation.median()) / 2)
    assert float(statistics(torch.ones(20, 3, 3))[1].min()) == pytest.approx(1e-6)


def test_few_images_share_one_mean_and_deviation():
    scores = torch.rand(9, 3, 4, generator=contracts.generator())
    mean, deviation = statistics(scores)
    assert mean.shape == deviation.shape == (3, 4)
    np.testing.assert_allclose(mean, np.full((3, 4), scores.double().mean()), rtol=1e-6)
    np.testing.assert_allclose(deviation, np.full((3, 4), scores.double().std()), rtol=1e-6)
    assert len(statistics(torch.cat([scores, scores[:1]]))[0].unique()) > 1


def test_places_that_are_seen_too_seldom_share_the_statistics_of_all():
    rng = contracts.generator()
    scores = torch.rand(14, 4, 5, generator=rng) + torch.rand(4, 5, generator=rng)
    seen = torch.rand(14, 4, 5, generator=rng) < 0.9
    seen[9:, :2, :2] = False  # nine images at most
    hidden = scores.masked_fill(~seen, 1e6)  # what is hidden has no part in anything
    mean, deviation = statistics(hidden, seen)
    series = {(i, j): scores[seen[:, i, j], i, j].double() for i in range(4) for j in range(5)}
    own = {at: values for at, values in series.items() if len(values) >= 10}
    assert 0 < len(own) < 20
    spread = {
        (i, j): math.sqrt(fmean(float(v.var()) for (y, x), v in own.items() if max(abs(y - i), abs(x - j)) <= 1))
        for i, j in own
    }
    least = median(spread.values()) / 2
    every = torch.cat(list(series.values()))
    for at, values in series.items():
        wanted = (values.mean(), max(spread[at], least)) if at in own else (every.mean(), every.std())
        np.testing.assert_allclose((mean[at], deviation[at]), [float(value) for value in wanted], rtol=1e-4)
    few = statistics(hidden[:9], seen[:9])
    np.testing.assert_allclose(few[0], np.full((4, 5), float(scores[:9][seen[:9]].mean())), rtol=1e-5)


@pytest.mark.parametrize("keep", [1.0, 0.5])
@pytest.mark.parametrize("choose", CHOICES)
def test_what_is_not_seen_is_neither_remembered_nor_part_of_a_mean(keep, choose):
    memory = Memory(keep=keep, choose=choose, reach=1, standardise=True)
    good, seen = features(12), torch.rand(12, 3, 4, generator=contracts.generator(3)) < 0.7
    wild = good.masked_fill(~seen[..., None], 1e4)
    banks = [fit_bank(some, memory, rng=contracts.generator(), seen=seen) for some in (good, wild)]
    for name, tensor in banks[0].tensors().items():
        assert torch.equal(tensor, banks[1].tensors()[name])
    assert seen.flatten()[kept(banks[0])].all()
    assert len(banks[0].vectors) == memory.kept(int(seen.sum()))
    everywhere = fit_bank(good, memory, rng=contracts.generator(), seen=torch.ones_like(seen))
    for name, tensor in fit_bank(good, memory, rng=contracts.generator()).tensors().items():
        assert torch.equal(tensor, everywhere.tensors()[name])
    with pytest.raises(FirmError, match="no good patches"):
        fit_bank(good, memory, rng=contracts.generator(), seen=torch.zeros_like(seen))


@settings(max_examples=15)
@given(memory=SETTINGS, n=st.sampled_from([4, 11]))
def test_standardised_scores_are_deviations_from_those_of_good_images(memory, n):
    good, suspect = features(n, 2, 3), features(2, 2, 3, seed=1)
    plain = fit_bank(good, memory, rng=contracts.generator())
    assume(len(plain.image) - int(plain.image.bincount().max()) >= memory.k)
    assert (plain.mean == 0).all()
    assert (plain.deviation == 1).all()
    bank = fit_bank(good, replace(memory, standardise=True), rng=contracts.generator())
    own = leave_one_out(plain, good)
    mean, deviation = statistics(own)
    torch.testing.assert_close((bank.mean, bank.deviation), (mean, deviation))
    torch.testing.assert_close(bank.score(suspect), (plain.score(suspect) - mean) / deviation)
    torch.testing.assert_close(leave_one_out(bank, good), own)  # raw in any case
    assert bank.standardised(own).mean().abs() < 1e-4


def test_standardising_makes_a_restless_place_count_less():
    """The left half of good images is noise, the right half is still; the same change stands out on the right only."""
    rng = contracts.generator()
    good = torch.ones(40, 4, 8, 16) + 0.01 * torch.rand(40, 4, 8, 16, generator=rng)
    good[:, :, :4] += torch.rand(40, 4, 4, 16, generator=rng)
    suspect = good[:1].clone()
    suspect[0, 1, [1, 6], :4] += 0.25
    rest = good[1:]
    raw, relative = (fitted(rest, reach=1, standardise=standardise).score(suspect)[0] for standardise in (False, True))
    assert raw.argmax() % 8 < 4
    assert relative.argmax() == 1 * 8 + 6


# --- how much the distance of a patch counts ---


def apart_by(metric, one, other):
    """The distance of two lists of features."""
    if metric == "l2":
        return math.dist(one, other)
    return 1 - math.fsum(a * b for a, b in zip(one, other, strict=True)) / (math.hypot(*one) * math.hypot(*other))


def naive_weight(bank, known, patch, cell):
    """PatchCore's weight of one patch by loops; `known` are the features of the bank's patches."""
    memory, cells = bank.memory, bank.cell.tolist()
    near = window(cell, cells, memory, bank.shape[1], lambda found: len(found) >= memory.k)
    nearest = min(near, key=lambda i: apart_by(memory.metric, patch, known[i]))
    around = sorted(range(len(known)), key=lambda i: (i != nearest, apart_by(memory.metric, known[nearest], known[i])))
    crowd = [math.exp(apart_by(memory.metric, patch, known[i])) for i in around[: memory.reweight]]
    return 1 - crowd[0] / sum(crowd)


def weighed(bank, suspect):
    """The weights of all patches of some images, one row of cells after the other."""
    cells = torch.arange(math.prod(bank.shape)).repeat(len(suspect))
    return bank.weights(suspect.flatten(0, 2), cells)


@settings(max_examples=40)
@given(
    memory=SETTINGS,
    reweight=st.integers(2, 5),
    n=st.integers(3, 4),
    block=st.sampled_from([1, 3, 1024]),
    seed=st.integers(0, 99),
)
def test_weights_are_those_of_loops(memory, reweight, n, block, seed):
    good, suspect = features(n, 2, 4, dim=4, seed=seed), features(2, 2, 4, dim=4, seed=seed + 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        patch.setattr(search, "BLOCK", block)
        bank = fit_bank(good, replace(memory, reweight=reweight), rng=contracts.generator())
        found = weighed(bank, suspect)
    known = good.flatten(0, 2)[kept(bank)].tolist()
    asked = suspect.flatten(0, 2).tolist()
    expected = [naive_weight(bank, known, patch, place % 8) for place, patch in enumerate(asked)]
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("reweight", "at", "sum_of"),
    [
        (2, -2.0, [2, 3]),  # nearest 0, beside it 1
        (2, 6.0, [2, 5]),  # nearest 4, beside it 1: alone, so the same distance counts more
        (2, 2.75, [1.25, 1.75]),  # nearest 4, and 1 beside it although on the other side
        (3, -2.0, [2, 3, 6]),
        (3, 0.0, [0, 1, 4]),
    ],
)
def test_weights_of_three_patches_by_hand(reweight, at, sum_of):
    """Patches at 0, 1 and 4 on a line."""
    line = torch.tensor([0.0, 1.0, 4.0]).view(3, 1, 1, 1)
    found = fitted(line, metric="l2", reweight=reweight).weights(torch.tensor([[at]]), torch.tensor([0]))
    assert float(found) == pytest.approx(1 - math.exp(sum_of[0]) / sum(map(math.exp, sum_of)), abs=1e-6)


def test_the_weight_of_the_first_of_them_in_figures():
    line = torch.tensor([0.0, 1.0, 4.0]).view(3, 1, 1, 1)
    bank = fitted(line, metric="l2", reweight=2)
    weights = bank.weights(torch.tensor([[-2.0], [6.0]]), torch.tensor([0, 0]))
    assert weights.tolist() == pytest.approx([0.7310586, 0.9525741], abs=1e-6)


@settings(max_examples=40)
@given(
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    reweight=st.integers(2, 9),
    metric=st.sampled_from(METRICS),
    reach=st.sampled_from([-1, 0]),
    seed=st.integers(0, 99),
)
def test_a_weight_is_a_part_and_rises_with_the_crowd(scale, reweight, metric, reach, seed):
    """Never below 1 - 1/b, since none of the b is nearer than the nearest; with places, one elsewhere may be."""
    bank = fitted(scale * features(4, 2, 3, seed=seed), metric=metric, reweight=reweight, reach=reach)
    found = weighed(bank, scale * features(2, 2, 3, seed=seed + 100))
    assert found.isfinite().all()  # exp(1000) is not
    assert float(found.max()) <= 1
    assert float(found.min()) >= (1 - 1 / reweight - 1e-5 if reach < 0 else 0)
    if scale <= 1:
        assert float(found.max()) < 1


def test_a_patch_is_weighed_alone_and_where_it_was_seen():
    bank = fitted(features(4), reach=0, reweight=3, metric="l2")
    suspect = features(3, seed=1).flatten(0, 2)
    cells = torch.arange(12).repeat(3)
    together = bank.weights(suspect, cells)
    alone = torch.cat([bank.weights(suspect[i : i + 1], cells[i : i + 1]) for i in range(36)])
    torch.testing.assert_close(together, alone)
    assert not torch.allclose(bank.weights(suspect, cells.flip(0)), together)
    assert bank.weights(suspect[:0], cells[:0]).shape == (0,)


def test_a_remembered_patch_counts_once_among_its_copies():
    """Seven copies of one patch and two others: the crowd of four is copies, of which none is taken twice."""
    line = torch.tensor([5.0] * 7 + [0.0, 9.0]).view(9, 1, 1, 1)
    found = fitted(line, metric="l2", reweight=4).weights(torch.tensor([[7.0]]), torch.tensor([0]))
    near = fitted(line, metric="l2", reweight=8).weights(torch.tensor([[6.0]]), torch.tensor([0]))
    assert float(found) == pytest.approx(1 - 1 / (1 + 3), abs=1e-6)
    assert float(near) == pytest.approx(1 - math.e / (7 * math.e + math.exp(3)), abs=1e-6)


def test_weighing_changes_no_score_of_a_patch():
    good, suspect = features(4), features(2, seed=1)
    assert torch.equal(fitted(good, reweight=9).score(suspect), fitted(good).score(suspect))


# --- which patches are kept ---


def greedy(points, count, start):
    """Greedy k-centre by loops: always the point farthest from those taken."""
    taken = [start]
    while len(taken) < count:
        left = [i for i in range(len(points)) if i not in taken]
        taken.append(max(left, key=lambda i: min(math.dist(points[i], points[j]) for j in taken)))
    return taken


def radius(points, centres):
    """How far the farthest point is from its nearest centre."""
    return max(min(math.dist(point, points[j]) for j in centres) for point in points)


@pytest.mark.parametrize("reach", [-1, 1])
def test_images_of_the_same_part_are_no_others(reach):
    good, parts = features(25, 2, 2), torch.arange(25) * 7 % 9
    scores = leave_one_out(fitted(good, reach=reach, metric="l2"), good, parts=parts)
    for image, cell in itertools.product(range(25), range(4)):
        known = good[parts != parts[image]].flatten(0, 2)
        expected = (known - good[image].flatten(0, 1)[cell]).norm(dim=1).min()
        assert float(scores[image].flatten()[cell]) == pytest.approx(float(expected), abs=1e-4)


def test_statistics_are_those_of_parts_and_one_part_alone_is_its_own_other():
    good = features(12, 2, 2).repeat_interleave(2, 0)  # every image twice: to a stranger of images all scores are 0
    memory, parts = Memory(standardise=True), torch.arange(12).repeat_interleave(2)
    naive, honest, one = (
        fit_bank(good, memory, rng=contracts.generator(), parts=some) for some in (None, parts, torch.zeros_like(parts))
    )
    assert naive.mean.abs().max() < 1e-5
    assert honest.mean.min() > 0.01
    torch.testing.assert_close(honest.mean, leave_one_out(naive, good, parts=parts).mean(0))
    assert torch.equal(one.mean, naive.mean)
    assert torch.equal(honest.image, naive.image)  # what is remembered stays the same


@settings(max_examples=60)
@given(
    n=st.integers(2, 25),
    part=st.floats(0.05, 0.95),
    seed=st.integers(0, 99),
    size=st.sampled_from([1, 2, 5, 128]),
    metric=st.sampled_from(METRICS),
)
def test_the_coreset_is_greedy_k_centre_however_many_centres_are_found_at_once(n, part, seed, size, metric):
    flat, memory = features(n, 1, 1, seed=seed).flatten(0, 2), Memory(keep=part, metric=metric)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coreset, "ROUND", size)
        chosen = CHOICES["coreset"](flat, memory.kept(n), metric, contracts.generator(seed), lambda done: None)
    points = (unit(flat) if metric == "cosine" else flat).double().tolist()
    assert chosen.tolist() == greedy(points, memory.kept(n), int(chosen[0]))


def test_many_centres_are_found_in_one_pass_over_the_patches():
    """That is what makes it matrix products; one pass for each would be right as well, and far slower."""
    passes = []
    chosen = CHOICES["coreset"](features(800, 1, 1)[:, 0, 0], 200, "cosine", contracts.generator(), passes.append)
    assert passes[-1] == len(chosen) == 200
    assert len(passes) < 200 / 8


@pytest.mark.parametrize("seed", range(8))
def test_the_coreset_covers_at_most_twice_as_widely_as_the_best_choice(seed):
    flat = features(11, 1, 1, dim=3, seed=seed)
    bank = fitted(flat, seed, keep=4 / 11, choose="coreset")
    points = unit(flat.flatten(0, 2)).double().tolist()
    best = min(radius(points, centres) for centres in itertools.combinations(range(11), 4))
    assert len(set(kept(bank))) == 4
    assert best <= radius(points, kept(bank)) <= 2 * best + 1e-6


@pytest.mark.parametrize("dim", [8, 200])  # 200: chosen in a projection
def test_the_coreset_covers_better_than_chance(dim):
    rng = contracts.generator()
    flat = torch.rand(20, dim, generator=rng)[torch.randint(20, (300,), generator=rng) ** 2 % 20]
    flat = (flat + 0.05 * torch.rand(300, dim, generator=rng)).reshape(300, 1, 1, dim)
    points = unit(flat.flatten(0, 2)).double().tolist()
    covered = [
        [radius(points, kept(fitted(flat, seed, keep=0.1, choose=choose))) for seed in range(5)]
        for choose in ("coreset", "random")
    ]
    assert max(covered[0]) < min(covered[1])


def test_copies_are_kept_once_each_and_only_when_nothing_else_is_left():
    flat = torch.eye(3).repeat(5, 1).reshape(15, 1, 1, 3)
    assert len({row % 3 for row in kept(fitted(flat, keep=0.2, choose="coreset"))}) == 3
    assert len(set(kept(fitted(flat, keep=0.8, choose="coreset")))) == 12


@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("dim", [6, 200])
def test_what_is_kept_is_decided_by_the_rng_alone(choose, dim):
    good = features(6, dim=dim)
    first, again, other = (fitted(good, seed, keep=0.3, choose=choose) for seed in (1, 1, 2))
    assert all(torch.equal(*pair) for pair in zip(first.tensors().values(), again.tensors().values(), strict=True))
    assert kept(first) != kept(other)
    assert len(set(kept(first))) == len(first.vectors) == round(0.3 * 72)
    torch.testing.assert_close(first.vectors, unit(good.flatten(0, 2)[kept(first)]))
    assert first.cell.diff().ge(0).all()


def test_random_patches_are_kept_alike():
    times = torch.zeros(24)
    for seed in range(200):
        times[kept(fitted(features(2), seed, keep=0.25))] += 1
    assert times.sum() == 200 * 6
    assert times.min() > 28
    assert times.max() < 75


def test_a_whole_bank_holds_every_patch_and_draws_nothing():
    good, rng = features(3), contracts.generator()
    state = rng.get_state()
    for choose in CHOICES:
        bank = fit_bank(good, Memory(choose=choose), rng=rng)
        assert sorted(kept(bank)) == list(range(36))
    assert torch.equal(rng.get_state(), state)


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest thing computed has."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


@pytest.mark.parametrize(
    "settings",
    [{"keep": 0.2, "choose": "coreset"}, {"standardise": True}, {"reach": 1, "k": 3}, {"reach": 1, "reweight": 9}],
)
def test_memory_grows_with_the_patches_not_with_their_pairs(settings, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 128)
    monkeypatch.setattr(search, "BLOCK", 128)
    monkeypatch.setattr(search, "KEYS", 128)
    monkeypatch.setattr(coreset, "BLOCK", 128)
    monkeypatch.setattr(coreset, "POINTS", 256)
    monkeypatch.setattr(module, "QUERIES", 256)
    good = features(16, 5, 10, dim=8)  # 800 patches: 6,400 numbers, 640,000 pairs
    with Largest() as largest:
        bank = fitted(good, **settings)
        bank.score(good)
        if bank.memory.reweight:
            weighed(bank, good)
    assert largest.numbers <= max(good.numel(), 128 * 128)


# --- files, progress, sentences ---


@pytest.mark.parametrize("metric", METRICS)
def test_a_bank_survives_a_file(metric):
    good, suspect = features(12), features(2, seed=1)
    bank = fitted(good, keep=0.5, reach=1, standardise=True, k=2, metric=metric)
    again = Bank.from_tensors(load(save(bank.tensors())), bank.memory)
    assert again.shape == bank.shape == (3, 4)
    assert torch.equal(again.score(suspect), bank.score(suspect))
    heavy = fitted(good, keep=0.5, reach=1, metric=metric, reweight=4)
    loaded = Bank.from_tensors(load(save(heavy.tensors())), heavy.memory)
    assert torch.equal(weighed(loaded, suspect), weighed(heavy, suspect))
    with pytest.raises(FirmError, match=r"the bank lacks image, cell; write it again with Bank.tensors"):
        Bank.from_tensors({name: bank.tensors()[name] for name in ("vectors", "mean", "deviation")}, bank.memory)


@pytest.mark.parametrize(
    ("settings", "total"),
    [
        ({"keep": 0.5}, None),
        ({"choose": "coreset"}, None),
        ({"keep": 0.5, "choose": "coreset"}, 240),
        ({"standardise": True}, 480),
        ({"keep": 0.5, "choose": "coreset", "standardise": True}, 480),
    ],
)
def test_progress_rises_to_its_total(settings, total, monkeypatch):
    monkeypatch.setattr(module, "QUERIES", 60)
    told = []
    fit_bank(features(40), Memory(**settings), rng=contracts.generator(), on_progress=lambda *step: told.append(step))
    if total is None:
        assert told == []
        return
    done = [one for one, _ in told]
    assert {whole for _, whole in told} == {total}
    assert done == sorted(done)
    assert done[-1] == total
    assert 0 < done[0] < total
    assert len(done) > 3


def test_the_cost_is_told_before():
    assert cost(711, 15, 15, 512, Memory()) == "bank: 159,975 patches x 512 = 328 MB"
    assert cost(711, 15, 15, 512, Memory(keep=0.1)) == "bank: 15,998 of 159,975 patches x 512 = 33 MB"
    assert cost(60, 15, 15, 128, Memory(keep=0.1)) == "bank: 1,350 of 13,500 patches x 128 = 0.7 MB"
    assert cost(60, 15, 15, 128, Memory(keep=0.1, choose="coreset")) == (
        "bank: 1,350 of 13,500 patches x 128 = 0.7 MB, found by 18,225,000 comparisons"
    )
    assert fitted(features(5), keep=0.3).vectors.shape[0] == Memory(keep=0.3).kept(60) == 18


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"keep": 0.0}, "memory.keep is 0.0; it is the part of the patches to keep"),
        ({"keep": 1.5}, "above 0 and at most 1"),
        ({"keep": math.nan}, "memory.keep is nan"),
        ({"choose": "greedy"}, "no way to choose patches 'greedy'; use one of random, coreset"),
        ({"reach": -2}, "memory.reach is -2; use -1 for every place or 0 and more cells"),
        ({"metric": "l1"}, "memory.metric is 'l1'; use one of cosine, l2"),
        ({"k": 0}, "memory.k is 0; a neighbour score needs k >= 1"),
        ({"reweight": 1}, "memory.reweight is 1; use 0 for none or 2 and more patches, 9 as PatchCore"),
        ({"reweight": -9}, "memory.reweight is -9; use 0"),
        ({"reweight": 9, "standardise": True}, "set memory.standardise=false or memory.reweight=0"),
    ],
)
def test_wrong_settings_are_refused(wrong, sentence):
    with pytest.raises(FirmError, match=sentence):
        Memory(**wrong)


def test_what_cannot_be_compared_is_refused():
    good = features(3)
    with pytest.raises(FirmError, match="give at least 1 good image"):
        fitted(good[:0])
    with pytest.raises(FirmError, match="k = 5 neighbours cannot be found among 4 kept patches; keep more or lower k"):
        fitted(good, keep=0.1, k=5)
    with pytest.raises(FirmError, match=r"memory\.reweight is 9, but only 4 patches are kept; keep more or lower it"):
        fitted(good, keep=0.1, reweight=9)
    with pytest.raises(FirmError, match=r"cannot be standardised by others; give 2 or set memory.standardise to False"):
        fitted(good[:1], standardise=True)
    with pytest.raises(FirmError, match=r"leaves 0 patches of others .* give more good images.*standardise to False"):
        leave_one_out(fitted(good[:1]), good[:1])
    with pytest.raises(FirmError, match=r"leaves 12 patches of others where k = 13 are needed"):
        leave_one_out(fitted(good[:2], k=13), good[:2])
    with pytest.raises(FirmError, match="the bank remembers image 2 but 2 are given; give all images it was fitted to"):
        leave_one_out(fitted(good), good[:2])
    for other, metric in itertools.product((features(1, 4, 4), features(1, dim=7)), METRICS):
        with pytest.raises(FirmError, match=r"do not fit a bank of \(3, 4, 6\); use the encoder, image size and"):
            fitted(good, metric=metric).score(other)
