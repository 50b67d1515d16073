"""Photographs of one part are found whatever their order, light and pose; strangers stay strangers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import drawings
from firm import sisters as module
from firm.data.drawn import drawn
from firm.sisters import describe, sisters


def photographs(parts, of_each, *, seed=0, noise=1.0, light=0.0):
    """Parts with a smooth pattern of their own, several photographs of each in a row."""
    rng = torch.Generator().manual_seed(seed)
    pattern = torch.randn(parts, 1, 6, 6, generator=rng) * 30 + 128
    pixels = F.interpolate(pattern, size=48, mode="bilinear").repeat_interleave(of_each, 0)
    gain = 1 + light * (2 * torch.rand(len(pixels), 1, 1, 1, generator=rng) - 1)
    pixels = gain * pixels + noise * torch.randn(pixels.shape, generator=rng)
    return pixels.clamp(0, 255).to(torch.uint8)


@pytest.mark.parametrize("light", [0.0, 0.3])
def test_several_photographs_of_a_part_get_one_number_in_any_order(light):
    images = photographs(20, 6, light=light)
    assert torch.equal(sisters("images", images), torch.arange(20).repeat_interleave(6))
    order = torch.randperm(120, generator=torch.Generator().manual_seed(1))
    found, true = sisters("images", images[order]), order // 6
    assert torch.equal(found[:, None] == found, true[:, None] == true)


@pytest.mark.parametrize("of_each", [1, 2, 3, 12])
def test_any_number_of_photographs(of_each):
    images = photographs(40, of_each)
    found = sisters("images", images)
    assert int(found.max()) + 1 == pytest.approx(40, abs=2)


@pytest.mark.parametrize("product", ["plate", "weave", "label"])
def test_drawn_parts_are_strangers(product):
    images = drawn(product, good=100, seed=0)[0].train
    for count in (25, 40, 100):  # however few there are
        found = sisters(product, images[:count])
        assert len(found.unique()) >= count - 1
        assert describe(found) == ""


def test_long_parts_that_lie_alike_are_no_sisters():
    """Turned anyhow, two that happen to lie alike are nearer than others; in one pose they are not."""
    images = drawings.screws(60, turned=True).images
    assert len(sisters("images", images).unique()) >= 57
    assert len(sisters("images", images[:24]).unique()) >= 22
    apart = module._neighbours(module._thumbnails(images))[0]
    posed = module._neighbours(module._thumbnails(module._posed("images", images)))[0]
    assert (apart[:, 0] / apart[:, -1]).median() < (posed[:, 0] / posed[:, -1]).median()


def test_the_blocks_change_nothing(monkeypatch):
    images = photographs(15, 4, noise=6.0)
    whole = sisters("images", images)
    monkeypatch.setattr(module, "BLOCK", 7)
    assert torch.equal(sisters("images", images), whole)


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
@pytest.mark.parametrize("count", [25, 60, 200])
def test_strangers_that_differ_in_little_are_rarely_sisters(count, size):
    found = sisters("images", discs(count, seed=count, size=size))
    assert len(found.unique()) >= 0.9 * count
    assert int(found.bincount().max()) <= 4


def test_no_pair_that_a_gap_tells_is_lost_for_there_being_many(monkeypatch):
    """Pairs as far apart as a gap just allows, which are further than sisters are by the distance of strangers."""
    rng = torch.Generator().manual_seed(0)
    alone = F.normalize(torch.randn(30, 256, generator=rng), dim=1)
    other = F.normalize(alone + 0.82 * F.normalize(torch.randn(30, 256, generator=rng), dim=1), dim=1)
    both = torch.cat([alone, other])
    near, which = module._neighbours(both)
    first, second = module._mutual(which, module._before_a_gap(near, module.GAP))
    assert len(first) > 42  # most of the 60
    stranger = near[:, -1]
    nearer = near < module.NEAR * torch.minimum(stranger[:, None], stranger[which])
    assert len(module._mutual(which, nearer)[0]) < len(first)
    monkeypatch.setattr(module, "_thumbnails", lambda images: both)
    monkeypatch.setattr(module, "_posed", lambda name, images: images)
    found = sisters("images", torch.zeros(60, 1, 2, 2, dtype=torch.uint8))
    assert bool((found[first] == found[second]).all())
    assert len(found.unique()) >= 30


def test_a_few_sisters_among_strangers_are_found_and_nobody_else():
    images = torch.cat([photographs(60, 1), photographs(60, 1)[:3], photographs(60, 1, seed=1)[:2]])
    found = sisters("images", images)
    assert found.tolist() == [*range(60), 0, 1, 2, 60, 61]


@given(
    st.lists(st.lists(st.floats(0, 10), min_size=6, max_size=6).map(sorted), min_size=1, max_size=8).map(torch.tensor)
)
def test_what_lies_before_the_last_gap_by_definition(near):
    found = module._before_a_gap(near, 0.5)
    for row, said in zip(near, found, strict=True):
        gaps = [place for place in range(5) if row[place] < 0.5 * row[place + 1]]
        assert said.tolist() == [bool(gaps) and place <= gaps[-1] for place in range(6)]


@given(links=st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=30))
def test_linked_images_share_a_number_and_only_those(links):
    first, second = (torch.tensor([link[side] for link in links], dtype=torch.long) for side in (0, 1))
    found = module._joined(20, first, second).tolist()
    root = list(range(20))  # naive: merge one link after the other
    for a, b in links:
        old, new = max(root[a], root[b]), min(root[a], root[b])
        root = [new if one == old else one for one in root]
    names = {one: number for number, one in enumerate(sorted(set(root)))}
    assert found == [names[one] for one in root]


def test_few_images_are_all_strangers():
    same = photographs(1, 19)
    assert torch.equal(sisters("images", same), torch.arange(19))
    assert len(sisters("images", photographs(4, 6)).unique()) == 4
    assert len(sisters("images", photographs(24, 1)).unique()) >= 22


def test_blank_images_do_no_harm():
    blank = torch.full((40, 1, 16, 16), 90, dtype=torch.uint8)
    assert len(sisters("images", blank)) == 40


def test_what_is_told():
    assert describe(torch.arange(30)) == ""
    told = describe(torch.arange(30) // 3)
    assert told == (
        "sisters: 30 of the 30 good images seem to show a part that others show too, 10 parts in all; "
        "images of one part are kept together"
    )
