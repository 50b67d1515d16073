"""Which patches a bank keeps: greedy k-center against loops, and uniform samples."""

import itertools
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import contracts
from banks import features, fitted, kept
from firm.scoring import coreset
from firm.scoring.coreset import SAMPLERS, _greedy_by_place, greedy_coreset
from firm.scoring.knn import unit
from firm.scoring.memory import METRICS, Memory
from firm.scoring.patch_bank import fit_bank


def greedy(points, count, start):
    """Greedy k-center by loops: always the point farthest from those taken."""
    taken = [start]
    while len(taken) < count:
        left = [i for i in range(len(points)) if i not in taken]
        taken.append(max(left, key=lambda i: min(math.dist(points[i], points[j]) for j in taken)))
    return taken


def radius(points, centers):
    """How far the farthest point is from its nearest center."""
    return max(min(math.dist(point, points[j]) for j in centers) for point in points)


@settings(max_examples=60)
@given(
    n=st.integers(2, 25),
    part=st.floats(0.05, 0.95),
    seed=st.integers(0, 99),
    size=st.sampled_from([1, 2, 5, 128]),
    metric=st.sampled_from(METRICS),
)
def test_the_coreset_is_greedy_k_center_however_many_centers_are_found_at_once(n, part, seed, size, metric):
    flat, memory = features(n, 1, 1, seed=seed).flatten(0, 2), Memory(sampling_ratio=part, metric=metric)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coreset, "CANDIDATES", size)
        chosen = greedy_coreset(flat, memory.kept(n), metric, contracts.generator(seed))
    points = (unit(flat) if metric != "l2" else flat).double().tolist()
    assert chosen.tolist() == greedy(points, memory.kept(n), int(chosen[0]))


def test_many_centers_are_found_in_one_pass_over_the_patches():
    """That is what makes it matrix products; one pass for each would be right as well, and far slower."""
    with mock.patch.object(coreset, "_update", wraps=coreset._update) as update:
        chosen = greedy_coreset(features(800, 1, 1)[:, 0, 0], 200, "cosine", contracts.generator())
    assert len(chosen) == 200
    assert update.call_count < 200 / 8


def test_the_coreset_covers_at_most_twice_as_widely_as_the_best_selection():
    for seed in range(8):
        flat = features(11, 1, 1, dim=3, seed=seed)
        bank = fitted(flat, seed, sampling_ratio=4 / 11, sampling="coreset")
        points = unit(flat.flatten(0, 2)).double().tolist()
        best = min(radius(points, centers) for centers in itertools.combinations(range(11), 4))
        assert len(set(kept(bank))) == 4
        assert best <= radius(points, kept(bank)) <= 2 * best + 1e-6


@pytest.mark.parametrize("dim", [8, 200])  # 200: chosen in a projection
def test_the_coreset_covers_better_than_chance(dim):
    rng = contracts.generator()
    flat = torch.rand(20, dim, generator=rng)[torch.randint(20, (300,), generator=rng) ** 2 % 20]
    flat = (flat + 0.05 * torch.rand(300, dim, generator=rng)).reshape(300, 1, 1, dim)
    points = unit(flat.flatten(0, 2)).double().tolist()
    covered = [
        [radius(points, kept(fitted(flat, seed, sampling_ratio=0.1, sampling=choose))) for seed in range(5)]
        for choose in ("coreset", "random")
    ]
    assert max(covered[0]) < min(covered[1])


def test_copies_are_kept_once_each_and_only_when_nothing_else_is_left():
    flat = torch.eye(3).repeat(5, 1).reshape(15, 1, 1, 3)
    assert len({row % 3 for row in kept(fitted(flat, sampling_ratio=0.2, sampling="coreset"))}) == 3
    assert len(set(kept(fitted(flat, sampling_ratio=0.8, sampling="coreset")))) == 12


@pytest.mark.parametrize(("choose", "dim"), [("random", 6), ("coreset", 6), ("coreset", 200)])
def test_what_is_kept_is_decided_by_the_rng_alone(choose, dim):
    good = features(6, dim=dim)
    first, again, other = (fitted(good, seed, sampling_ratio=0.3, sampling=choose) for seed in (1, 1, 2))
    assert all(
        torch.equal(*pair) for pair in zip(first.state_dict().values(), again.state_dict().values(), strict=True)
    )
    assert kept(first) != kept(other)
    assert len(set(kept(first))) == len(first.vectors) == round(0.3 * 72)
    torch.testing.assert_close(first.vectors, unit(good.flatten(0, 2)[kept(first)]))
    assert first.cell.diff().ge(0).all()


def test_random_patches_are_kept_alike():
    times = torch.zeros(24)
    for seed in range(200):
        times[kept(fitted(features(2), seed, sampling_ratio=0.25))] += 1
    assert times.sum() == 200 * 6
    assert times.min() > 28
    assert times.max() < 75


def test_a_whole_bank_holds_every_patch_and_draws_nothing():
    good, rng = features(3), contracts.generator()
    state = rng.get_state()
    for choose in SAMPLERS:
        bank = fit_bank(good, Memory(sampling=choose), rng=rng)
        assert sorted(kept(bank)) == list(range(36))
    assert torch.equal(rng.get_state(), state)


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_places_keep_most_where_patches_differ_most_and_no_place_is_left_empty(metric):
    """Of a neighbourhood the coreset is one of each place: a copy of a kept patch is not worth a second one."""
    rng = contracts.generator()
    good = 1 + 0.3 * torch.rand(40, 3, 4, 6, generator=rng)
    good[:, 1, 2] += 3 * torch.rand(40, 6, generator=rng)
    memory = Memory(neighbourhood=0, sampling="coreset", sampling_ratio=0.25, metric=metric)
    bank = fit_bank(good, memory, rng=rng)
    each = bank.cell.bincount(minlength=12)
    assert each.sum() == pytest.approx(0.25 * 480, rel=0.1)
    assert each.argmax() == 6
    assert each.min() >= 1
    drawn = fit_bank(good, replace(memory, sampling="random"), rng=rng)
    assert float(bank.distances(good).amax()) < float(drawn.distances(good).amax())
    flat = fit_bank(good, memory, rng=rng, weight=(torch.arange(12) != 6).view(3, 4).float()).cell.bincount()
    assert flat[6] < each[6]


def test_the_coreset_of_a_place_is_greedy():
    """Against loops: from the patch nearest to the mean, always the farthest from those taken."""
    good = features(9, 1, 2)
    taken, gaps = _greedy_by_place(good.flatten(1, 2), torch.ones(9, 2, dtype=torch.bool), 5, "l2")
    for place in range(2):
        points = good[:, 0, place].double()
        order = [int((points - points.mean(0)).norm(dim=1).argmin())]
        while len(order) < 5:
            far = torch.cdist(points, points[order]).amin(1)
            assert float(gaps[place, len(order)]) == pytest.approx(float(far.max()), rel=1e-3)
            order.append(int(far.argmax()))
        assert taken[place].tolist() == order
