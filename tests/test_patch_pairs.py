"""Patch pairs: each condition of section 5 against plain loops, and every draw against the list of what it may give."""

from collections import Counter
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import contracts
from firm.errors import SettingError
from firm.types import Focus
from firm.views import patch_pairs as patches
from firm.views.patch_pairs import PatchPairs, cut
from firm.views.registry import VIEWS

MANY = 400  # candidates on an image with at most some 30 places: each is tried, but for one chance in a million


# --- oracles: loops over pixels and places ---


def inside(mask, place, size):
    """How many pixels of the mask a patch holds."""
    top, left = place
    return sum(bool(mask[y][x]) for y in range(top, top + size) for x in range(left, left + size))


def shared(first, second, size):
    """How many pixels two patches have in common."""
    one, other = ({(t + y, left + x) for y in range(size) for x in range(size)} for t, left in (first, second))
    return len(one & other)


def all_places(height, width, size):
    return list(product(range(height - size + 1), range(width - size + 1)))


def partners(first, height, width, size, over):
    """Every place the second patch may have."""
    return [
        place
        for place in all_places(height, width, size)
        if place != first and shared(first, place, size) >= over * size**2 - 1e-9
    ]


def pairs(places):
    return [(tuple(a), tuple(b)) for a, b in zip(places.first.tolist(), places.second.tolist(), strict=True)]


# --- what is drawn from ---


def focus_of(n, height, width, *, density=0.7, outliers=0.5, pixels=3, seed=0):
    """Random masks: objects of the given density, and in so many of the images a few altered pixels."""
    rng = contracts.generator(seed)
    foreground = torch.rand(n, height, width, generator=rng) < density
    altered = torch.zeros(n, height, width, dtype=torch.bool)
    for item in range(n):
        if torch.rand(1, generator=rng) < outliers:
            altered[item].flatten()[torch.randint(height * width, (pixels,), generator=rng)] = True
    return Focus(foreground, altered)


def one_place(seen, first, height, width, size):
    """A focus of many equal images whose first patch can only be this one."""
    foreground = torch.zeros(seen, height, width, dtype=torch.bool)
    foreground[:, first[0] : first[0] + size, first[1] : first[1] + size] = True
    return Focus(foreground, torch.zeros_like(foreground))


def repeated(foreground, altered, n):
    return Focus(foreground.expand(n, -1, -1), altered.expand(n, -1, -1))


def assert_drawn_as(seen, chances):
    """The outcomes are those with a chance, each as often as its chance says."""
    counts = Counter(seen)
    assert set(counts) <= set(chances)
    expected = np.array(list(chances.values())) * len(seen)
    found = np.array([counts[outcome] for outcome in chances])
    assert expected.min() > 5, "too few draws to judge"
    assert stats.chisquare(found, expected * (found.sum() / expected.sum())).pvalue > 1e-4


def even(outcomes):
    return dict.fromkeys(outcomes, 1 / len(outcomes))


shapes = st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(2, 6))  # room below, room aside, patch
seeds = st.integers(0, 2**32)


# --- the conditions ---


@settings(max_examples=80)
@given(shape=shapes, over=st.floats(0.01, 0.5), both=st.booleans(), altered=st.floats(0, 0.6), seed=seeds)
def test_pairs_lie_inside_overlap_and_differ(shape, over, both, altered, seed):
    below, aside, size = shape
    height, width = size + below, size + aside
    views = PatchPairs(sizes=(size,), min_overlap=over, both_altered=both, min_altered=altered, tries=5)
    found = views.places(focus_of(6, height, width, seed=seed), rng=contracts.generator(seed))
    assert found.size == size
    for first, second in pairs(found):
        for top, left in (first, second):
            assert 0 <= top <= below
            assert 0 <= left <= aside
        if below or aside:
            assert second != first
        assert shared(first, second, size) >= over * size**2 - 1e-9


@settings(max_examples=60)
@given(shape=shapes, fore=st.floats(0, 1), density=st.floats(0, 1), seed=seeds)
def test_a_good_image_is_accepted_if_and_only_if_its_patch_is_object(shape, fore, density, seed):
    below, aside, size = shape
    focus = focus_of(5, size + below, size + aside, density=density, outliers=0, seed=seed)
    found = PatchPairs(sizes=(size,), min_foreground=fore, tries=3).places(focus, rng=contracts.generator(seed))
    for mask, (first, _), accepted in zip(focus.foreground, pairs(found), found.accepted, strict=True):
        assert bool(accepted) == (inside(mask, first, size) >= fore * size**2 - 1e-9)


@settings(max_examples=40)
@given(below=st.integers(0, 4), aside=st.integers(0, 4), fore=st.floats(0.3, 1), seed=seeds)
def test_with_enough_tries_the_best_place_is_found(below, aside, fore, seed):
    height, width, size = 3 + below, 3 + aside, 3
    focus = focus_of(3, height, width, outliers=0, seed=seed)
    found = PatchPairs(sizes=(size,), min_foreground=fore, tries=MANY).places(focus, rng=contracts.generator(seed))
    for mask, (first, _), accepted in zip(focus.foreground, pairs(found), found.accepted, strict=True):
        best = max(inside(mask, place, size) for place in all_places(height, width, size))
        assert bool(accepted) == (best >= fore * 9 - 1e-9)
        assert bool(accepted) or inside(mask, first, size) == best


@settings(max_examples=40)
@given(fore=st.floats(0, 1), altered=st.floats(0, 1), both=st.booleans(), tries=st.integers(1, 6), seed=seeds)
def test_the_first_candidate_that_will_do_is_taken_else_the_best(fore, altered, both, tries, seed):
    size, focus = 3, focus_of(4, 8, 7, seed=seed, pixels=12)
    views = PatchPairs(sizes=(size,), min_foreground=fore, min_altered=altered, both_altered=both, tries=tries)
    with mock.patch.object(patches, "_chosen", wraps=patches._chosen) as chosen:
        views.places(focus, rng=contracts.generator(seed))
        rounds = [(call.args, patches._chosen._mock_wraps(*call.args)) for call in chosen.call_args_list]
    needed = {fore * 9, max(1.0, altered * 9)}
    for (candidates, masks, _, least), (taken, accepted) in rounds:
        assert candidates.shape in {(len(masks), tries, 2), (len(masks), 1, 2)}  # one will do for one altered pixel
        assert any(least - 1 < part - 1e-9 <= least for part in needed) or least == 0
        for mask, places, place, met in zip(masks, candidates, taken, accepted, strict=True):
            counts = [inside(mask, one, size) for one in places]
            enough = [count >= least for count in counts]
            assert bool(met) == any(enough)
            which = enough.index(True) if any(enough) else counts.index(max(counts))
            assert tuple(place) == tuple(places[which])


@settings(max_examples=60)
@given(shape=shapes, altered=st.sampled_from([0.0, 0.1, 0.3, 0.6]), both=st.booleans(), seed=seeds)
def test_outliers_show_what_was_altered_whatever_the_object(shape, altered, both, seed):
    below, aside, size = shape
    focus = focus_of(5, size + below, size + aside, density=0, outliers=1, pixels=8, seed=seed)
    views = PatchPairs(sizes=(size,), min_altered=altered, both_altered=both, tries=4)
    found = views.places(focus, rng=contracts.generator(seed))
    least = max(1, altered * size**2 - 1e-9)
    for mask, pair, accepted in zip(focus.altered, pairs(found), found.accepted, strict=True):
        counts = [inside(mask, place, size) for place in pair]
        assert counts[0] >= 1
        assert bool(accepted) == all(count >= least for count in counts[: 1 + both])


@settings(max_examples=30)
@given(altered=st.floats(0, 0.5), both=st.booleans(), seed=seeds)
def test_with_enough_tries_outliers_show_as_much_as_can_be(altered, both, seed):
    height, width, size = 6, 7, 3
    focus = focus_of(3, height, width, outliers=1, pixels=5, seed=seed)
    views = PatchPairs(sizes=(size,), min_altered=altered, both_altered=both, tries=MANY)
    found = views.places(focus, rng=contracts.generator(seed))
    least = max(1, altered * 9 - 1e-9)
    for mask, (first, second), accepted in zip(focus.altered, pairs(found), found.accepted, strict=True):
        best = max(inside(mask, place, size) for place in all_places(height, width, size))
        assert inside(mask, first, size) >= min(least, best)
        beside = max(inside(mask, place, size) for place in partners(first, height, width, size, views.min_overlap))
        if both:
            assert inside(mask, second, size) >= min(least, beside)
        assert bool(accepted) == (best >= least and (beside >= least or not both))


def test_one_altered_pixel_suffices_as_in_the_paper_and_both_asks_it_of_both():
    altered = torch.zeros(1, 12, 12, dtype=torch.bool)
    altered[0, 5, 6] = True
    focus = repeated(torch.ones_like(altered), altered, 300)
    for both in (False, True):
        found = PatchPairs(sizes=(4,), both_altered=both).places(focus, rng=contracts.generator())
        assert found.accepted.all()
        seconds = [inside(altered[0], second, 4) for _, second in pairs(found)]
        assert (min(seconds) > 0) == both


def test_thresholds_include_themselves_however_they_round():
    """0.07 of 100 pixels is 7.000000000000001 in floats; a patch with 7 of them has enough."""
    foreground = torch.zeros(1, 10, 10, dtype=torch.bool)
    foreground[0, 0, :7] = True
    focus = Focus(foreground, torch.zeros_like(foreground))
    for fore, accepted in ((0.07, True), (0.0701, False), (0.08, False)):
        found = PatchPairs(sizes=(10,), min_foreground=fore).places(focus, rng=contracts.generator())
        assert bool(found.accepted) == accepted


def test_the_only_place_there_is_serves_twice():
    found = PatchPairs(sizes=(5,)).places(focus_of(4, 5, 5, density=1), rng=contracts.generator())
    assert pairs(found) == [((0, 0), (0, 0))] * 4
    found = PatchPairs(sizes=(5,)).places(focus_of(4, 5, 6, density=1), rng=contracts.generator())
    assert all(set(pair) == {(0, 0), (0, 1)} for pair in pairs(found))


# --- the draws are uniform ---


def test_first_patches_are_uniform_over_the_image():
    focus = Focus(torch.ones(4000, 6, 7, dtype=torch.bool), torch.zeros(4000, 6, 7, dtype=torch.bool))
    found = PatchPairs(sizes=(3,)).places(focus, rng=contracts.generator())
    assert_drawn_as([first for first, _ in pairs(found)], even(all_places(6, 7, 3)))


def test_first_patches_are_uniform_over_the_object():
    """Not drawn to the middle of it: whatever holds enough of it is as good as any other."""
    foreground = focus_of(1, 8, 9, density=0.8, outliers=0, seed=3).foreground
    focus = repeated(foreground, torch.zeros_like(foreground), 4000)
    found = PatchPairs(sizes=(3,), min_foreground=0.85).places(focus, rng=contracts.generator())
    enough = [place for place in all_places(8, 9, 3) if inside(foreground[0], place, 3) >= 0.85 * 9]
    assert 5 < len(enough) < 40
    assert_drawn_as([first for first, _ in pairs(found)], even(enough))


@pytest.mark.parametrize(
    ("height", "width", "size", "over"), [(7, 6, 4, 0.15), (7, 6, 4, 0.5), (4, 12, 4, 0.15), (9, 3, 3, 0.5)]
)
def test_second_patches_are_uniform_over_all_that_overlap(height, width, size, over):
    """Wherever the first one is: in the middle, at a border, in a corner."""
    everywhere = torch.ones(6000, height, width, dtype=torch.bool)
    found = PatchPairs(sizes=(size,), min_overlap=over).places(
        Focus(everywhere, ~everywhere), rng=contracts.generator(1)
    )
    firsts = all_places(height, width, size)
    beside = {first: partners(first, height, width, size, over) for first in firsts}
    chances = {(one, other): 1 / len(firsts) / len(beside[one]) for one in firsts for other in beside[one]}
    assert_drawn_as(pairs(found), chances)


def test_patches_of_outliers_are_uniform_around_a_uniform_pixel():
    height, width, size = 7, 6, 3
    altered = torch.zeros(1, height, width, dtype=torch.bool)
    changed = [(0, 0), (3, 2), (3, 3), (6, 4)]
    for y, x in changed:
        altered[0, y, x] = True
    chances = Counter()
    for y, x in changed:
        holding = [
            (t, left) for t, left in all_places(height, width, size) if 0 <= y - t < size and 0 <= x - left < size
        ]
        for place in holding:
            chances[place] += 1 / len(changed) / len(holding)
    for settings_of in (PatchPairs(sizes=(size,)), PatchPairs(sizes=(size,), min_altered=0.01)):
        found = settings_of.places(repeated(altered, altered, 4000), rng=contracts.generator(2))
        assert_drawn_as([first for first, _ in pairs(found)], chances)


def test_second_patches_of_outliers_are_uniform_over_those_that_show_enough():
    height, width, size = 9, 9, 4
    altered = torch.zeros(1, height, width, dtype=torch.bool)
    altered[0, 3:5, 4] = True
    views = PatchPairs(sizes=(size,), min_altered=2 / 16, both_altered=True)
    found = views.places(repeated(altered, altered, 6000), rng=contracts.generator(3))
    seen = [second for first, second in pairs(found) if first == (2, 3)]
    showing = [place for place in partners((2, 3), height, width, size, 0.15) if inside(altered[0], place, size) == 2]
    assert_drawn_as(seen, even(showing))


def test_one_size_is_drawn_per_batch_and_each_in_turn():
    views, images = PatchPairs(sizes=(4, 6, 9)), contracts.images_of(3, 3, 12)
    seen = []
    for seed in range(150):
        first, second = views(images, 12, rng=contracts.generator(seed))
        assert first.shape == second.shape == (3, 3, first.shape[-1], first.shape[-1])
        seen.append(first.shape[-1])
    assert_drawn_as(seen, even([4, 6, 9]))


# --- the pixels ---


@settings(max_examples=30)
@given(shape=shapes, channels=st.sampled_from([1, 3]), seed=seeds)
def test_patches_are_the_very_pixels_of_their_places(shape, channels, seed):
    below, aside, size = shape
    images = contracts.images_of(5, channels, size + below, size + aside, seed=seed)
    focus, views = focus_of(5, size + below, size + aside, seed=seed), PatchPairs(sizes=(size,))
    first, second = views(images, 99, rng=contracts.generator(seed), focus=focus)
    found = views.places(focus, rng=contracts.generator(seed))
    for item, pair in enumerate(pairs(found)):
        for view, (top, left) in zip((first, second), pair, strict=True):
            window = images[item, :, top : top + size, left : left + size]
            assert torch.equal(view[item], window.float() / 255)


def test_cutting_needs_no_dense_images():
    images = contracts.images_of(4, 3, 12, 20)
    place = torch.tensor([[0, 1], [4, 2], [3, 3], [5, 0]])
    turned = images.transpose(2, 3)
    assert torch.equal(cut(turned, place.flip(1), 6), cut(images, place, 6).transpose(2, 3))


def test_masks_need_not_be_dense_and_stay_as_they_are():
    dense = focus_of(6, 12, 14, seed=5)
    strided = Focus(*(m.transpose(1, 2).contiguous().transpose(1, 2) for m in (dense.foreground, dense.altered)))
    before = (dense.foreground.clone(), dense.altered.clone())
    views = PatchPairs(sizes=(5,), min_altered=0.1, both_altered=True)
    one, other = (views.places(focus, rng=contracts.generator()) for focus in (dense, strided))
    assert pairs(one) == pairs(other)
    assert torch.equal(dense.foreground, before[0])
    assert torch.equal(dense.altered, before[1])


def test_without_a_focus_the_object_is_everywhere():
    images, views = contracts.images_of(8, 3, 20), PatchPairs(sizes=(7,))
    everywhere = Focus(torch.ones(8, 20, 20, dtype=torch.bool), torch.zeros(8, 20, 20, dtype=torch.bool))
    without = views(images, 20, rng=contracts.generator())
    given_one = views(images, 20, rng=contracts.generator(), focus=everywhere)
    assert torch.equal(without[0], given_one[0])
    assert torch.equal(without[1], given_one[1])


@settings(max_examples=20)
@given(both=st.booleans(), altered=st.sampled_from([0.0, 0.2]), seed=seeds)
def test_the_generator_decides_everything(both, altered, seed):
    views, focus = PatchPairs(sizes=(4, 5), both_altered=both, min_altered=altered), focus_of(8, 30, 30, seed=seed)
    one, same = (views.places(focus, rng=contracts.generator(seed)) for _ in range(2))
    other = views.places(focus, rng=contracts.generator(seed + 1))
    assert (one.size, pairs(one)) == (same.size, pairs(same))
    assert torch.equal(one.accepted, same.accepted)
    assert pairs(one) != pairs(other)


def test_places_are_pinned():
    """A change of these numbers is a change of every training with patches: say so in the changelog."""
    focus = focus_of(4, 40, 40, density=0.9, pixels=60)
    found = PatchPairs(sizes=(8,), min_altered=0.05, both_altered=True).places(focus, rng=contracts.generator())
    assert pairs(found) == [((17, 25), (13, 21)), ((19, 29), (17, 30)), ((19, 12), (13, 10)), ((26, 1), (29, 2))]
    assert found.accepted.tolist() == [True, True, True, True]


# --- the family ---


def test_no_images_make_no_patches():
    first, second = PatchPairs(sizes=(4,))(contracts.images_of(0, 3, 8), 8, rng=contracts.generator())
    assert first.shape == second.shape == (0, 3, 4, 4)


def test_accepted_are_those_that_reach_the_threshold():
    solid, thin = torch.ones(8, 16, 16, dtype=torch.bool), torch.zeros(8, 16, 16, dtype=torch.bool)
    thin[:, :, 7] = True
    nowhere = torch.zeros(16, 16, 16, dtype=torch.bool)
    views = PatchPairs(sizes=(8,))
    accepted = views.places(Focus(torch.cat([solid, thin]), nowhere), rng=contracts.generator()).accepted
    assert accepted.tolist() == [True] * 8 + [False] * 8


def test_the_paper_s_thresholds_are_the_default():
    assert (
        VIEWS["patches"]
        == PatchPairs()
        == PatchPairs(sizes=(32,), min_foreground=0.9, min_overlap=0.15, min_altered=0.0, both_altered=False)
    )


@pytest.mark.parametrize(("size", "over"), [(32, 31 / 32), (10, 0.9), (2, 0.5)])
def test_the_greatest_overlap_leaves_the_nearest_neighbours(size, over):
    side = size + 2
    found = PatchPairs(sizes=(size,), min_overlap=over).places(
        one_place(200, (1, 1), side, side, size), rng=contracts.generator()
    )
    near = [second for first, second in pairs(found) if first == (1, 1)]
    assert set(near) == {(0, 1), (2, 1), (1, 0), (1, 2)}


def test_patches_that_do_not_fit_are_refused():
    message = r"32 pixels .* 40 x 24; use views\.sizes of at most 24"
    for seed in range(4):  # whichever size would be drawn
        with pytest.raises(SettingError, match=message):
            PatchPairs(sizes=(8, 32))(contracts.images_of(2, 3, 40, 24), 24, rng=contracts.generator(seed))


def test_masks_of_other_images_are_refused():
    with pytest.raises(SettingError, match=r"\(2, 24, 24\).*\(2, 48, 48\)"):
        PatchPairs()(contracts.images_of(2, 3, 48), 48, rng=contracts.generator(), focus=focus_of(2, 24, 24))
