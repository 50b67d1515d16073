"""The bank against loops over patches: scores, leave-one-out, statistics, weights."""

import itertools
import math
from functools import partial
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch.utils._python_dispatch import TorchDispatchMode

import contracts
import oracles
from banks import SETTINGS, features, fitted, kept, weighed, window
from firm.errors import DataError, ModelFileError, SettingError
from firm.scoring import coreset, knn
from firm.scoring import patch_bank as module
from firm.scoring.knn import nearest, unit
from firm.scoring.memory import METRICS, Memory
from firm.scoring.patch_bank import Bank, fit_bank, fit_prototype

# --- the same as loops ---


def mean_distance(query, keys, k):
    """The mean of the k least distances; the last number of a key belongs to the search."""
    return fmean(sorted(math.dist(query, key[:-1]) for key in keys)[:k])


def loops(bank, queries, leave=False):
    """Every patch against its window, one by one; `leave` leaves its own image out."""
    k, whose, known, vectors = bank.memory.k, bank.image.tolist(), bank.cell.tolist(), bank.vectors.tolist()
    one_by_one = oracles.s_con if bank.memory.metric != "l2" else mean_distance

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


@settings(max_examples=40)
@given(
    memory=SETTINGS, n=st.integers(2, 4), block=st.sampled_from([1, 3, 1024]), queries=st.sampled_from([1, 30, 4096])
)
def test_scores_are_those_of_loops(memory, n, block, queries):
    good, suspect = features(n, 2, 4, dim=4), features(2, 2, 4, dim=4, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        patch.setattr(knn, "BLOCK", block)
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
        patch.setattr(knn, "BLOCK", block)
        patch.setattr(module, "QUERIES", queries)
        bank = fit_bank(good, memory, rng=contracts.generator())
        if len(bank.image) - int(bank.image.bincount().max()) < memory.k:
            with pytest.raises(DataError, match=f"where k = {memory.k} are needed"):
                bank.leave_one_out(good)
            return
        scores = bank.leave_one_out(good)
    np.testing.assert_allclose(scores, loops(bank, good, leave=True), atol=1e-5)


def test_leaving_an_image_out_is_a_bank_without_it():
    good = features(5)
    scores = fitted(good, neighbourhood=1, k=2).leave_one_out(good)
    for i in range(5):
        rest = torch.cat([good[:i], good[i + 1 :]])
        torch.testing.assert_close(scores[i : i + 1], fitted(rest, neighbourhood=1, k=2).score(good[i : i + 1]))
    assert fitted(good).score(good).abs().max() < 1e-6  # not left out, every patch finds itself


@pytest.mark.parametrize("metric", METRICS)
def test_some_images_left_out_score_as_among_all(metric):
    good = features(40, 4, seed=3)
    memory = Memory(neighbourhood=1, metric=metric, sampling="coreset", sampling_ratio=0.5, standardise=True)
    bank, chosen = fit_bank(good, memory, rng=torch.Generator()), torch.tensor([38, 5])
    assert torch.equal(bank.leave_one_out(good, which=chosen), bank.leave_one_out(good)[chosen])


def test_a_bank_that_reaches_everywhere_is_the_plain_search():
    good, suspect = features(6), features(3, seed=1)
    expected = 1 - nearest(unit(suspect.flatten(0, 2)), unit(good.flatten(0, 2)), 1)
    for radius in (-1, 4, 99):
        found = fitted(good, neighbourhood=radius).score(suspect)
        torch.testing.assert_close(found.flatten(), expected.flatten(), atol=1e-6, rtol=0)


def test_a_good_thing_in_a_wrong_place_is_found_only_within_reach():
    """Every cell of a good image has its own direction; exchanging two far ones changes nothing without places."""
    good = torch.eye(12).reshape(1, 3, 4, 12).expand(3, -1, -1, -1)
    wrong = good[:1].clone()
    wrong[0, 0, 0], wrong[0, 2, 3] = good[0, 2, 3], good[0, 0, 0]
    expected = torch.zeros(1, 3, 4)
    assert torch.equal(fitted(good).score(wrong), expected)
    assert torch.equal(fitted(good, neighbourhood=3).score(wrong), expected)
    expected[0, 0, 0] = expected[0, 2, 3] = 1
    assert torch.equal(fitted(good, neighbourhood=2).score(wrong), expected)
    assert torch.equal(fitted(good, neighbourhood=0).score(wrong), expected)


def test_a_cell_without_patches_within_reach_reaches_further():
    """One row of five cells; patches are left at its ends only, and the middle is as far from both."""
    vectors, ones = torch.eye(2), torch.ones(1, 5)
    where = {"image": torch.tensor([0, 1]), "cell": torch.tensor([0, 4])}
    bank = Bank(Memory(neighbourhood=0), {"vectors": vectors, **where, "mean": 0 * ones, "deviation": ones})
    left, right = vectors[0].expand(1, 1, 5, 2), vectors[1].expand(1, 1, 5, 2)
    assert bank.score(left).tolist() == [[[0, 0, 0, 1, 1]]]
    assert bank.score(right).tolist() == [[[1, 1, 0, 0, 0]]]


def test_every_patch_is_searched_once_by_a_plan_made_once():
    bank = fitted(features(4), neighbourhood=1)
    plan = bank.search_plan
    bank.score(features(2, seed=1))
    assert bank.search_plan is plan
    assert sorted(itertools.chain(*(step.rows[~step.repeated].tolist() for step in plan.steps))) == list(range(48))


def test_scores_do_not_depend_on_company_or_scale():
    good, suspect = features(4), features(5, seed=1)
    for radius in (-1, 1):
        bank = fitted(good, neighbourhood=radius, k=2)
        together = bank.score(suspect)
        alone = torch.cat([bank.score(one[None]) for one in suspect])
        torch.testing.assert_close(alone, together, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(bank.score(7 * suspect), together, atol=1e-6, rtol=1e-5)
        longer, shorter = (
            fitted(factor * good, neighbourhood=radius, metric="l2").score(factor * suspect) for factor in (7, 1)
        )
        torch.testing.assert_close(longer, 7 * shorter, atol=1e-5, rtol=1e-5)
        assert bank.score(suspect[:0]).shape == (0, 3, 4)


# --- memory ---


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
    [
        {"sampling_ratio": 0.2, "sampling": "coreset"},
        {"standardise": True},
        {"neighbourhood": 1, "k": 3},
        {"neighbourhood": 1, "reweight": 9},
    ],
)
def test_memory_grows_with_the_patches_not_with_their_pairs(settings, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 128)
    monkeypatch.setattr(knn, "BLOCK", 128)
    monkeypatch.setattr(knn, "KEYS", 128)
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


# --- modules: devices and export ---


class OneDevice(TorchDispatchMode):
    """Refuses what a GPU would: operands on two devices, but for copies, indices and plain numbers."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        flat = itertools.chain(*(one if isinstance(one, list | tuple) else [one] for one in args))
        devices = {one.device.type for one in flat if isinstance(one, torch.Tensor) and one.dim()}
        assert len(devices) < 2 or name in ("index", "copy_", "_to_copy"), f"{name} on {devices}"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "memory", [Memory(standardise=True), Memory(neighbourhood=1, k=2, reweight=3), Memory(metric="l2", reweight=3)]
)
@pytest.mark.parametrize("fit", [fit_prototype, partial(fit_bank, rng=contracts.generator())])
def test_a_bank_is_a_module_that_moves_and_can_be_exported(memory, fit):
    good, suspect = features(4), features(2, seed=1)
    bank = fit(good, memory)
    scores = bank.score(suspect)
    assert set(bank.state_dict()) == {name for name, _ in bank.named_buffers()}
    exported = torch.export.export(bank, (suspect,)).module()
    assert torch.equal(exported(suspect), scores)
    if memory.reweight:
        bank.weights(suspect[0, 0], torch.arange(4))
    bank.to("meta")
    with OneDevice():
        assert bank.score(suspect.to("meta")).device.type == "meta"
        if memory.reweight:
            assert bank.weights(suspect[0, 0].to("meta"), torch.arange(4)).device.type == "meta"


# --- files, progress, sentences ---


@pytest.mark.parametrize("metric", METRICS)
def test_a_bank_survives_a_file(metric):
    good, suspect = features(12), features(2, seed=1)
    bank = fitted(good, sampling_ratio=0.5, neighbourhood=1, standardise=True, k=2, metric=metric)
    again = Bank(bank.memory, load(save(bank.state_dict())))
    assert again.shape == bank.shape == (3, 4)
    assert torch.equal(again.score(suspect), bank.score(suspect))
    heavy = fitted(good, sampling_ratio=0.5, neighbourhood=1, metric=metric, reweight=4)
    loaded = Bank(heavy.memory, load(save(heavy.state_dict())))
    assert torch.equal(weighed(loaded, suspect), weighed(heavy, suspect))
    with pytest.raises(ModelFileError, match="image, cell"):
        Bank(bank.memory, {name: bank.state_dict()[name] for name in ("vectors", "mean", "deviation")})


def test_a_bank_that_loads_another_state_searches_as_that_one():
    first, other = (fitted(features(6, seed=seed), seed, neighbourhood=0, sampling_ratio=0.4) for seed in (0, 1))
    queries = features(2, seed=5)
    assert not torch.equal(first.score(queries), other.score(queries))  # both have planned their search
    first.load_state_dict(other.state_dict())
    assert torch.equal(first.score(queries), other.score(queries))


def test_keep_is_the_share_of_patches_in_the_bank():
    assert fitted(features(5), sampling_ratio=0.3).vectors.shape[0] == Memory(sampling_ratio=0.3).kept(60) == 18


def test_wrong_settings_are_refused_by_name():
    for name, values in {
        "sampling_ratio": [0.0, 1.5, math.nan],
        "sampling": ["greedy"],
        "neighbourhood": [-2],
        "metric": ["l1"],
        "k": [0],
        "reweight": [1, -9],
    }.items():
        for value in values:
            with pytest.raises(SettingError, match=rf"memory\.{name} is {value!r}"):
                Memory(**{name: value})
    with pytest.raises(SettingError, match=r"memory\.reweight.*memory\.standardise"):
        Memory(reweight=9, standardise=True)


def test_what_cannot_be_compared_is_refused():
    good = features(3)
    with pytest.raises(DataError, match="at least 1 good image"):
        fitted(good[:0])
    for name, value in (("k", 5), ("reweight", 9)):
        with pytest.raises(SettingError, match=rf"memory\.{name} is {value}.* 4 patches are kept"):
            fitted(good, sampling_ratio=0.1, **{name: value})
    with pytest.raises(DataError, match="standardise"):
        fitted(good[:1], standardise=True)
    with pytest.raises(DataError, match="leaves 0 patches"):
        fitted(good[:1]).leave_one_out(good[:1])
    with pytest.raises(DataError, match="leaves 12 patches of others where k = 13"):
        fitted(good[:2], k=13).leave_one_out(good[:2])
    for other, metric in itertools.product((features(1, 4, 4), features(1, dim=7)), METRICS):
        with pytest.raises(SettingError, match=r"do not fit patches of \(3, 4, 6\)"):
            fitted(good, metric=metric).score(other)


# --- patches that no other part supports ---


@pytest.mark.parametrize("alike", [1, 2], ids=["one part", "two parts"])
@pytest.mark.parametrize("neighbourhood", [-1, 1])
def test_a_patch_that_no_other_part_supports_is_not_remembered(alike, neighbourhood):
    """It neither vouches for the same defect nor widens what is usual at its place; one that returns is normal."""
    clean = 1 + 0.1 * torch.rand(30, 6, 6, 8, generator=contracts.generator())
    dirty = clean.clone()
    dirty[:alike, 2, 3, :4] += 3
    settings = {"neighbourhood": neighbourhood, "standardise": True}
    bank, odd = fitted(dirty, **settings), {number * 36 + 2 * 6 + 3 for number in range(alike)}
    assert set(range(30 * 36)) - set(kept(bank)) == (odd if alike == 1 else set())
    assert len(fitted(clean, **settings).vectors) == 30 * 36
    assert len(fitted(dirty, neighbourhood=neighbourhood).vectors) == 30 * 36
    score = float(bank.score(dirty[:1])[0, 2, 3])
    assert (score > 20) == (alike == 1)
    if alike == 1:
        assert float(bank.deviation[2, 3]) < 2 * float(fitted(clean, **settings).deviation[2, 3])


def test_photographs_of_one_part_do_not_support_each_other():
    good = 1 + 0.1 * torch.rand(30, 6, 6, 8, generator=contracts.generator())
    good[:2, 2, 3, :4] += 3
    parts = torch.tensor([0, 0, *range(1, 29)])
    bank = fit_bank(good, Memory(standardise=True), rng=contracts.generator(), parts=parts)
    assert set(range(30 * 36)) - set(kept(bank)) == {15, 51}
