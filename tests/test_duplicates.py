"""Photographs of one part are found in any order, exposure and pose; different parts stay apart."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import drawings
from firm.data import duplicates as module
from firm.data.duplicates import describe_parts, group_by_part
from firm.drawn.render import draw_dataset


def photographs(parts, of_each, *, seed=0, noise=1.0, exposure=0.0):
    """Parts with a smooth pattern of their own, several photographs of each in a row."""
    rng = torch.Generator().manual_seed(seed)
    pattern = torch.randn(parts, 1, 6, 6, generator=rng) * 30 + 128
    pixels = F.interpolate(pattern, size=48, mode="bilinear").repeat_interleave(of_each, 0)
    gain = 1 + exposure * (2 * torch.rand(len(pixels), 1, 1, 1, generator=rng) - 1)
    pixels = gain * pixels + noise * torch.randn(pixels.shape, generator=rng)
    return pixels.clamp(0, 255).to(torch.uint8)


@pytest.mark.parametrize("exposure", [0.0, 0.3])
def test_several_photographs_of_a_part_get_one_number_in_any_order(exposure):
    images = photographs(20, 6, exposure=exposure)
    assert torch.equal(group_by_part("images", images), torch.arange(20).repeat_interleave(6))
    order = torch.randperm(120, generator=torch.Generator().manual_seed(1))
    found, true = group_by_part("images", images[order]), order // 6
    assert torch.equal(found[:, None] == found, true[:, None] == true)


@pytest.mark.parametrize("of_each", [1, 2, 12])
def test_any_number_of_photographs(of_each):
    images = photographs(40, of_each)
    found = group_by_part("images", images)
    assert int(found.max()) + 1 == pytest.approx(40, abs=2)


@pytest.mark.parametrize("product", ["plate", "weave", "label"])
def test_drawn_parts_are_different_parts(product):
    images = draw_dataset(product, train=100, good=0, bad=0).train
    for count in (25, 100):  # however few there are
        found = group_by_part(product, images[:count])
        assert len(found.unique()) >= count - 1
        assert describe_parts(found) == ""


def test_elongated_parts_in_the_same_pose_are_different_parts():
    """In any pose, two that happen to be turned alike are nearer than others; aligned they are not."""
    images = drawings.screws(60, turned=True).images
    assert len(group_by_part("images", images).unique()) >= 57
    assert len(group_by_part("images", images[:24]).unique()) >= 22
    turned, aligned = (distances(unit(module.grey_thumbnails(i)))[0] for i in (images, module._aligned("x", images)))
    assert (turned[:, 0] / turned[:, -1]).median() < (aligned[:, 0] / aligned[:, -1]).median()


def unit(rows):
    return F.normalize(rows - rows.mean(1, keepdim=True), dim=1)


def distances(rows):
    products, which = module.nearest(rows, rows, 20, lambda some, others: -(some @ others.T))
    return (2 + 2 * products).clamp(min=0).sqrt(), which


def test_blocks_change_nothing(monkeypatch):
    images = photographs(15, 4, noise=6.0)
    whole = group_by_part("images", images)
    monkeypatch.setattr(module, "BLOCK", 7)
    assert torch.equal(group_by_part("images", images), whole)


def discs(count, *, seed, size=0.0):
    """Parts that differ in nothing but where they lie, and how large they are."""
    rng = torch.Generator().manual_seed(seed)
    at, radius = (
        20 + 24 * torch.rand(count, 2, 1, 1, generator=rng),
        12 + size * torch.randn(count, 1, 1, generator=rng),
    )
    down, across = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    pixels = 60 + 140 * torch.sigmoid(radius - torch.hypot(down - at[:, 0], across - at[:, 1]))
    return (pixels + torch.randn(pixels.shape, generator=rng)).clamp(0, 255).to(torch.uint8)[:, None]


@pytest.mark.parametrize("size", [0.0, 3.0])
@pytest.mark.parametrize("count", [25, 200])
def test_parts_that_differ_in_little_are_rarely_confused(count, size):
    found = group_by_part("images", discs(count, seed=count, size=size))
    assert len(found.unique()) >= 0.9 * count
    assert int(found.bincount().max()) <= 4


def test_pairs_found_by_a_gap_are_kept_where_there_are_many(monkeypatch):
    """Pairs as far apart as a gap just allows, which is farther than `SAME_PART` allows."""
    rng = torch.Generator().manual_seed(0)
    alone = unit(torch.randn(30, 256, generator=rng))
    rows = torch.cat([alone, unit(alone + 0.82 * unit(torch.randn(30, 256, generator=rng)))])
    near, which = distances(rows)
    by_gap = module._connected(which, module._before_gap(near, module.GAP))
    by_distance = module._connected(which, module._much_nearer(near, which, module.SAME_PART))
    assert module._in_groups_of(2, by_gap) > 42  # of 60
    assert module._in_groups_of(2, by_distance) < module._in_groups_of(2, by_gap)
    monkeypatch.setattr(module, "grey_thumbnails", lambda images: rows)
    monkeypatch.setattr(module, "_aligned", lambda name, images: images)
    parts = group_by_part("images", torch.zeros(60, 1, 2, 2, dtype=torch.uint8))
    same = by_gap[:, None] == by_gap
    assert bool((parts[:, None] == parts)[same].all())
    assert len(parts.unique()) >= 30


def test_a_few_shared_parts_among_many_are_found():
    images = torch.cat([photographs(60, 1), photographs(60, 1)[:3], photographs(60, 1, seed=1)[:2]])
    assert group_by_part("images", images).tolist() == [*range(60), 0, 1, 2, 60, 61]


@given(
    st.lists(st.lists(st.floats(0, 10), min_size=6, max_size=6).map(sorted), min_size=1, max_size=8).map(torch.tensor)
)
def test_neighbours_before_the_last_gap_are_the_loops(near):
    found = module._before_gap(near, 0.5)
    for row, before in zip(near, found, strict=True):
        gaps = [place for place in range(5) if row[place] < 0.5 * row[place + 1]]
        assert before.tolist() == [bool(gaps) and place <= gaps[-1] for place in range(6)]


@given(links=st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=30))
def test_connected_images_and_only_those_share_a_number(links):
    near = torch.zeros(20, 20, dtype=torch.bool)
    label = list(range(20))  # naive: merge one link after the other
    for a, b in links:
        near[a, b] = near[b, a] = True
        old, new = max(label[a], label[b]), min(label[a], label[b])
        label = [new if number == old else number for number in label]
    one_way = near.clone()
    one_way[0, 19] |= not near[19, 0]  # a pair must be near both ways
    numbers = {value: number for number, value in enumerate(sorted(set(label)))}
    for pairs in (near, one_way) if not near[19, 0] else (near,):
        found = module._connected(torch.arange(20).expand(20, 20), pairs)
        assert found.tolist() == [numbers[value] for value in label]


def test_few_images_are_all_different_parts():
    assert torch.equal(group_by_part("images", photographs(1, 19)), torch.arange(19))
    assert len(group_by_part("images", photographs(4, 6)).unique()) == 4
    assert len(group_by_part("images", torch.full((40, 1, 16, 16), 90, dtype=torch.uint8))) == 40  # blank


def test_shared_parts_are_reported_where_they_are_many():
    assert describe_parts(torch.arange(30)) == ""
    line = describe_parts(torch.arange(30) // 3)
    assert "30 of the 30 good images" in line
    assert "10 parts" in line
