"""Standardised scores and PatchCore's weights against loops, and what images of one part have to do with them."""

import itertools
import math
from dataclasses import replace
from statistics import fmean, stdev

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import contracts
from banks import SETTINGS, features, fitted, kept, weighed, window
from firm.errors import DataError
from firm.scoring import knn
from firm.scoring import patch_bank as module
from firm.scoring.coreset import TOGETHER
from firm.scoring.memory import METRICS, Memory
from firm.scoring.patch_bank import fit_bank
from firm.scoring.place_statistics import statistics

# --- standardised scores ---


def all_visible(scores):
    return statistics(scores, torch.ones_like(scores, dtype=torch.bool))


def place_statistics(scores, visible):
    """Mean and deviation of each place by loops over the cells around it; the pooled variance counts as ten images."""
    n, rows, columns = scores.shape
    places = list(itertools.product(range(rows), range(columns)))
    series = {(i, j): [float(scores[m, i, j]) for m in range(n) if visible[m, i, j]] for i, j in places}
    several = {at: values for at, values in series.items() if len(values) > 1}
    squares = sum(stdev(values) ** 2 * (len(values) - 1) for values in several.values())
    pooled = squares / sum(len(values) - 1 for values in several.values())
    deviation = {}
    for (i, j), values in series.items():
        near = [stdev(v) ** 2 for (y, x), v in several.items() if max(abs(y - i), abs(x - j)) <= 1]
        around = fmean(near) if near else pooled
        deviation[i, j] = math.sqrt((len(values) * around + 10 * pooled) / (len(values) + 10))
    middle = sorted(deviation.values())
    least = float(np.quantile(middle, 0.5)) / 2
    every = fmean(itertools.chain(*series.values()))
    means = [[fmean(series[i, j]) if series[i, j] else every for j in range(columns)] for i in range(rows)]
    return np.array(means), np.array([[max(deviation[i, j], least) for j in range(columns)] for i in range(rows)])


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 6)])
def test_statistics_are_those_of_loops(rows, columns):
    rng = contracts.generator()
    spread = torch.linspace(0.01, 1, columns)  # so uneven that the floor acts
    scores = torch.rand(12, rows, columns, generator=rng) * spread + torch.rand(rows, columns, generator=rng)
    expected = place_statistics(scores, torch.ones_like(scores, dtype=torch.bool))
    np.testing.assert_allclose(torch.stack(all_visible(scores)), expected, rtol=1e-4)


def test_half_the_median_deviation_is_the_least():
    scores = torch.randn(50, 9, 9, generator=contracts.generator())
    scores[:, :4, :4] *= 1e-4
    deviation = all_visible(scores)[1]
    assert float(deviation.min()) == pytest.approx(float(deviation.median()) / 2)
    assert float(all_visible(torch.ones(20, 3, 3))[1].min()) == pytest.approx(1e-6)


@pytest.mark.parametrize("n", [2, 9, 14])
def test_hidden_scores_have_no_part_in_the_statistics(n):
    rng = contracts.generator()
    scores = torch.rand(14, 4, 5, generator=rng) + torch.rand(4, 5, generator=rng)
    visible = torch.rand(14, 4, 5, generator=rng) < 0.9
    visible[:, :2, :2] = False  # never seen, nor most of what is around it
    hidden = scores.masked_fill(~visible, 1e6)
    np.testing.assert_allclose(
        torch.stack(statistics(hidden[:n], visible[:n])), place_statistics(scores[:n], visible[:n]), rtol=1e-4
    )


def test_one_more_image_hardly_moves_the_scale():
    rng = contracts.generator()
    scores = torch.rand(11, 6, 6, generator=rng) * torch.rand(6, 6, generator=rng)
    for n in range(5, 11):
        ratio = all_visible(scores[: n + 1])[1] / all_visible(scores[:n])[1]
        assert 0.7 < float(ratio.min()) <= float(ratio.max()) < 1.4


@pytest.mark.parametrize(("keep", "choose"), [(1.0, "random"), (0.5, "random"), (0.5, "coreset")])
def test_what_is_not_seen_is_neither_remembered_nor_part_of_a_mean(keep, choose):
    memory = Memory(sampling_ratio=keep, sampling=choose, neighbourhood=1, standardise=True)
    good, visible = features(12), torch.rand(12, 3, 4, generator=contracts.generator(3)) < 0.7
    wild = good.masked_fill(~visible[..., None], 1e4)
    banks = [fit_bank(some, memory, rng=contracts.generator(), visible=visible) for some in (good, wild)]
    for name, tensor in banks[0].state_dict().items():
        assert torch.equal(tensor, banks[1].state_dict()[name])
    assert visible.flatten()[kept(banks[0])].all()
    assert len(banks[0].vectors) == pytest.approx(memory.kept(int(visible.sum())), abs=TOGETHER)
    everywhere = fit_bank(good, memory, rng=contracts.generator(), visible=torch.ones_like(visible))
    for name, tensor in fit_bank(good, memory, rng=contracts.generator()).state_dict().items():
        assert torch.equal(tensor, everywhere.state_dict()[name])
    with pytest.raises(DataError, match="no good patches"):
        fit_bank(good, memory, rng=contracts.generator(), visible=torch.zeros_like(visible))


@settings(max_examples=15)
@given(memory=SETTINGS, n=st.sampled_from([4, 11]))
def test_standardised_scores_are_deviations_from_those_of_good_images(memory, n):
    good, suspect = features(n, 2, 3), features(2, 2, 3, seed=1)
    plain = fit_bank(good, memory, rng=contracts.generator())
    assume(len(plain.image) - int(plain.image.bincount().max()) >= memory.k)
    assert (plain.mean == 0).all()
    assert (plain.deviation == 1).all()
    bank = fit_bank(good, replace(memory, standardise=True), rng=contracts.generator())
    own = plain.leave_one_out(good)
    mean, deviation = all_visible(own)
    torch.testing.assert_close((bank.mean, bank.deviation), (mean, deviation))
    torch.testing.assert_close(bank.score(suspect), (plain.score(suspect) - mean) / deviation)
    torch.testing.assert_close(bank.leave_one_out(good), own)  # raw in any case
    assert bank.standardised(own).mean().abs() < 1e-4


def test_standardising_makes_a_restless_place_count_less():
    """The left half of good images is noise, the right half is still; the same change stands out on the right only."""
    rng = contracts.generator()
    good = torch.ones(40, 4, 8, 16) + 0.01 * torch.rand(40, 4, 8, 16, generator=rng)
    good[:, :, :4] += torch.rand(40, 4, 4, 16, generator=rng)
    suspect = good[:1].clone()
    suspect[0, 1, [1, 6], :4] += 0.25
    rest = good[1:]
    raw, relative = (
        fitted(rest, neighbourhood=1, standardise=standardise).score(suspect)[0] for standardise in (False, True)
    )
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
        patch.setattr(knn, "BLOCK", block)
        bank = fit_bank(good, replace(memory, reweight=reweight), rng=contracts.generator())
        found = weighed(bank, suspect)
    known = good.flatten(0, 2)[kept(bank)].tolist()
    asked = suspect.flatten(0, 2).tolist()
    expected = [naive_weight(bank, known, patch, place % 8) for place, patch in enumerate(asked)]
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_weights_of_three_patches_by_hand():
    """Patches at 0, 1 and 4 on a line."""
    line = torch.tensor([0.0, 1.0, 4.0]).view(3, 1, 1, 1)
    for reweight, at, distances in [
        (2, -2.0, [2, 3]),  # nearest 0, beside it 1: 0.7310586
        (2, 6.0, [2, 5]),  # nearest 4, beside it 1: isolated, so the same distance counts more
        (2, 2.75, [1.25, 1.75]),  # nearest 4, and 1 beside it although on the other side
        (3, -2.0, [2, 3, 6]),
        (3, 0.0, [0, 1, 4]),
    ]:
        found = fitted(line, metric="l2", reweight=reweight).weights(torch.tensor([[at]]), torch.tensor([0]))
        assert float(found) == pytest.approx(1 - math.exp(distances[0]) / sum(map(math.exp, distances)), abs=1e-6)


@settings(max_examples=40)
@given(
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    reweight=st.integers(2, 9),
    metric=st.sampled_from(METRICS),
    radius=st.sampled_from([-1, 0]),
    seed=st.integers(0, 99),
)
def test_a_weight_is_a_part_and_rises_with_the_crowd(scale, reweight, metric, radius, seed):
    """Never below 1 - 1/b, since none of the b is nearer than the nearest; with places, one elsewhere may be."""
    bank = fitted(scale * features(4, 2, 3, seed=seed), metric=metric, reweight=reweight, neighbourhood=radius)
    found = weighed(bank, scale * features(2, 2, 3, seed=seed + 100))
    assert found.isfinite().all()  # exp(1000) is not
    assert float(found.max()) <= 1
    assert float(found.min()) >= (1 - 1 / reweight - 1e-5 if radius < 0 else 0)
    if scale <= 1:
        assert float(found.max()) < 1


def test_a_patch_is_weighed_alone_and_where_it_was_seen():
    bank = fitted(features(4), neighbourhood=0, reweight=3, metric="l2")
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


# --- images of one part ---


@pytest.mark.parametrize("radius", [-1, 1])
def test_images_of_the_same_part_are_no_others(radius):
    good, parts = features(25, 2, 2), torch.arange(25) * 7 % 9
    scores = fitted(good, neighbourhood=radius, metric="l2").leave_one_out(good, parts)
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
    torch.testing.assert_close(honest.mean, naive.leave_one_out(good, parts=parts).mean(0))
    assert torch.equal(one.mean, naive.mean)
    assert torch.equal(honest.image, naive.image)  # what is remembered stays the same
