"""Which cells of cached features are drawn, how pairs overlap, and batches as a function of seed, step and rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

import contracts
from cases import each
from firm.images.preprocess import Preprocessing
from firm.networks.adaptor import Pretrained
from firm.networks.heads import Encoder, Head
from firm.networks.weights import load_backbone
from firm.training.loop import Training
from firm.training.patch_batches import CellSampler, PatchSet, PatchTask, feature_statistics, overlapping_offsets

# three images: a scratch, a whole surface, scattered spots
ALLOWED = torch.zeros(3, 4, 5, dtype=torch.bool)
ALLOWED[0, 1, 1:4] = True
ALLOWED[1] = True
ALLOWED[2, ::2, ::3] = True
NUMBERED = torch.arange(60.0).view(3, 4, 5, 1)  # every cell is its own feature
OFFSETS = overlapping_offsets(3, 0.15)


def drawn(sampler, count=12, seed=7):
    """First and second views, each by the number of its cell among all."""
    patches = PatchSet(NUMBERED, sampler, torch.arange(3))
    first, second, group = patches.pairs(count, OFFSETS, rng=contracts.generator(seed))
    assert torch.equal(group, first[:, 0].long() // 20)  # partners and groups are of the same image
    assert torch.equal(group, second[:, 0].long() // 20)
    return first[:, 0].long(), second[:, 0].long()


def test_golden_draws():
    first, second = drawn(CellSampler(ALLOWED))
    assert first.tolist() == [6, 24, 28, 43, 34, 6, 53, 40, 37, 43, 35, 33]
    assert second.tolist() == [8, 22, 23, 53, 29, 7, 43, 50, 34, 53, 36, 28]


def test_every_image_is_drawn_alike_and_every_allowed_cell_of_it():
    expected = torch.zeros(3, 20, dtype=torch.float64)
    for image, allowed in enumerate(ALLOWED.flatten(1)):
        expected[image, allowed] = 1 / 3 / int(allowed.sum())
    times, expected = drawn(CellSampler(ALLOWED), 30_000)[0].bincount(minlength=60), expected.flatten()
    assert times[expected == 0].sum() == 0
    assert chisquare(times[expected > 0], 30_000 * expected[expected > 0]).pvalue > 0.01


def test_images_kept_out_are_never_drawn():
    chosen = torch.arange(10) % 3 > 0
    sampler = CellSampler(torch.ones(10, 2, 2, dtype=torch.bool), chosen)
    times = sampler.draw_images(2_000, rng=contracts.generator()).bincount(minlength=10)
    assert ((times > 0) == chosen).all()
    assert times[chosen].float().std() < 40  # about 333 of each


@each("pool, over", [(3, 0.15), (3, 0.5), (5, 0.3), (1, 0.15)])
def test_patches_overlap_as_much_as_asked(pool, over):
    expected = set()
    for y in range(-9, 10):
        for x in range(-9, 10):
            rows = set(range(pool)) & set(range(y, y + pool))
            columns = set(range(pool)) & set(range(x, x + pool))
            if (y, x) != (0, 0) and len(rows) * len(columns) / pool**2 >= over:
                expected.add((y, x))
    assert {tuple(pair) for pair in overlapping_offsets(pool, over).tolist()} == (expected or {(0, 0)})


@given(st.integers(0, 2**31), st.floats(0.05, 0.95))
def test_drawn_cells_and_partners_are_allowed_and_near(seed, least):
    rng = torch.Generator().manual_seed(seed)
    part = torch.rand(5, 6, 7, generator=rng) * torch.tensor([1, 1, 0.04, 0, 1.0])[:, None, None]
    sampler = CellSampler.at_least(part, least)
    images = torch.randint(5, (200,), generator=rng)
    first = sampler.draw(images, rng=rng)
    second = sampler.partners(images, first, OFFSETS, rng=rng)
    flat = part.flatten(1)
    best = flat.amax(1)[images]
    assert bool((flat[images, first] >= torch.minimum(best, torch.tensor(least))).all())
    assert bool(sampler.allowed.flatten(1)[images, second].all())
    moved = torch.stack([second // 7 - first // 7, second % 7 - first % 7], dim=1)
    permitted = {tuple(pair) for pair in OFFSETS.tolist()} | {(0, 0)}
    assert all(tuple(pair) in permitted for pair in moved.tolist())


def test_a_cell_is_its_own_partner_only_without_an_allowed_neighbour():
    allowed = torch.zeros(1, 5, 5, dtype=torch.bool)
    allowed[0, 2, 2] = True
    images, cells = torch.zeros(50, dtype=torch.long), torch.full((50,), 12)
    rng = contracts.generator()
    assert bool((CellSampler(allowed).partners(images, cells, OFFSETS, rng=rng) == 12).all())
    allowed[0, 2, 3] = True
    assert bool((CellSampler(allowed).partners(images, cells, OFFSETS, rng=rng) == 13).all())


def test_statistics_are_those_of_all_cells():
    features = torch.randn(70, 3, 2, 4, generator=contracts.generator()) * torch.tensor([1, 5, 0.1, 0])
    features += torch.tensor([0, 10, -1, 3.0])
    mean, deviation = feature_statistics(features)
    flat = features.flatten(0, 2)
    torch.testing.assert_close(mean, flat.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(deviation[:3], flat.std(0, unbiased=False)[:3], rtol=1e-4, atol=1e-5)
    assert float(deviation[3]) == 1


# --- the task ---


def task_with(*, seed=0, noise=0.0, batch=10):
    rng = contracts.generator(5)
    good, bad = torch.randn(6, 4, 4, 3, generator=rng).half(), torch.randn(4, 4, 4, 3, generator=rng).half()
    everywhere = CellSampler(torch.ones(6, 4, 4, dtype=torch.bool))
    return PatchTask(
        PatchSet(good, everywhere, torch.zeros(6, dtype=torch.long)),
        PatchSet(bad, CellSampler.at_least(torch.rand(4, 4, 4, generator=rng), 0.5), torch.arange(1, 5)),
        load_backbone("wavelets"),
        Pretrained(name="x", hidden=(8,), out=4, noise=noise),
        Preprocessing(32),
        0.15,
        Training(epochs=2, batch=batch),
        seed,
        "features",
    )


def same(one, other):
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("images", "source", "group"))


def test_a_batch_is_a_function_of_seed_and_step():
    task = task_with(noise=0.3)
    before = task.batch(3)
    torch.manual_seed(4)
    assert same(before, task_with(noise=0.3).batch(3))
    assert not same(before, task.batch(4))
    assert not same(before, task_with(seed=1, noise=0.3).batch(3))
    assert before.group[:5].eq(0).all()
    assert before.group[5:10].gt(0).all()
    assert torch.equal(before.source[:10], before.source[10:])


@pytest.mark.parametrize("world", [2, 3])
def test_the_parts_of_all_ranks_are_the_whole_batch(world):
    task = task_with(noise=0.3)
    whole = task.batch(3)
    parts = [task.batch(3, rank=rank, world=world) for rank in range(world)]
    order = torch.cat([part.source[: len(part.source) // 2] for part in parts])
    assert sorted(order.tolist()) == list(range(10))
    for part in parts:
        at = torch.cat([part.source[: len(part.source) // 2], 10 + part.source[len(part.source) // 2 :]])
        assert torch.equal(part.images, whole.images[at])
        assert torch.equal(part.group, whole.group[at])


def test_noise_has_the_deviation_of_its_setting_and_changes_no_draw():
    plain, noisy = task_with(batch=64), task_with(batch=64, noise=0.5)
    added = [(noisy.batch(step).images - plain.batch(step).images) / plain.statistics[1] for step in range(60)]
    every = torch.stack(added)
    assert float(every.mean().abs()) < 0.01
    assert float((every.flatten(0, 1).std(0) - 0.5).abs().max()) < 0.02  # each number by its own deviation
    assert not torch.equal(added[0], added[1])
    assert torch.equal(noisy.batch(3).group, plain.batch(3).group)


def test_a_new_adaptor_is_a_function_of_the_seed_and_has_the_statistics():
    encoder = Encoder(head=Head(hidden=(5,), out=2))
    one, again, other = (task_with(seed=seed).network(encoder) for seed in (0, 0, 1))
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), again.parameters(), strict=True))
    assert not torch.equal(one.adapt[0].weight, other.adapt[0].weight)
    mean, deviation = feature_statistics(task_with().good.features)
    assert torch.equal(one.mean, mean)
    assert torch.equal(one.std, deviation)


def test_an_epoch_shows_64_cells_of_every_good_image_and_as_many_of_outliers():
    assert task_with().steps_per_epoch == 6 * 64 * 2 // 10
    assert replace(task_with(), training=Training(batch=4096)).steps_per_epoch == 1
