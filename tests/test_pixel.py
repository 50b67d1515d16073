"""Pixel AUROC and AUPRO against flood fill and every threshold in turn; their intervals against explicit resamples."""

import itertools
import math

import cv2
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jaxtyping import config
from scipy import ndimage
from sklearn.metrics import f1_score, roc_auc_score

import oracles
from firm.errors import DataError, SettingError
from firm.metrics import pixel as module
from firm.metrics.pixel import Localisation, aupro, localisation, pixel_auroc


def regions_of(mask):
    """Sets of (y, x) that hang together, also over corners, by flood fill."""
    left = {(y, x) for y, x in np.ndindex(mask.shape) if mask[y, x]}
    found = []
    while left:
        edge = [left.pop()]
        region = set(edge)
        while edge:
            y, x = edge.pop()
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            region |= near
            edge += near
        found.append(region)
    return found


def slow_aupro(maps, masks, limit=0.3):
    """Every distinct score as threshold, every region by itself; trapezoids up to the limit, the last one cut."""
    regions = [(i, region) for i, mask in enumerate(masks) for region in regions_of(mask)]
    normal = [maps[at] for at in np.ndindex(maps.shape) if not masks[at]]
    points = [(0.0, 0.0)]
    for threshold in sorted(set(maps.ravel().tolist()), reverse=True):
        fpr = sum(score >= threshold for score in normal) / len(normal)
        overlaps = [sum(maps[i][at] >= threshold for at in region) / len(region) for i, region in regions]
        points.append((fpr, math.fsum(overlaps) / len(overlaps)))
    area = 0.0
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 < limit and x1 > x0:
            end = min(x1, limit)
            area += (end - x0) * (y0 + y0 + (y1 - y0) * (end - x0) / (x1 - x0)) / 2
    return area / limit


def slow_best_f1(maps, masks):
    """F1 at every distinct score, counted; the highest threshold of the best."""
    found = []
    for threshold in sorted(set(maps.ravel().tolist())):
        called = maps >= threshold
        found.append((2 * (called & masks).sum() / (called.sum() + masks.sum()), threshold))
    return max(found)


@st.composite
def cases(draw, most=3):
    """A few small maps with many ties (or none) and masks of which some may be empty or full."""
    n, height, width = draw(st.integers(1, most)), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scores = rng.integers(-3, draw(st.sampled_from([-2, 1, 9, 10**6])), (n, height, width)).astype(np.float32)
    masks = rng.random((n, height, width)) < rng.choice([0, 0.15, 0.4, 0.8, 1], size=(n, 1, 1))
    assume(masks.any() and not masks.all())
    return scores, masks


def tensors(maps, masks):
    return torch.from_numpy(maps), torch.from_numpy(masks)


@given(case=cases())
def test_pixel_auroc_counts_pairs(case):
    found = pixel_auroc(*tensors(*case))
    scores, labels = (part.ravel() for part in case)
    assert found == pytest.approx(oracles.auroc(scores.tolist(), labels.tolist()), abs=1e-12)
    assert found == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


@given(case=cases(), limit=st.sampled_from([0.01, 0.05, 0.3, 0.77, 1.0]))
def test_aupro_tries_every_threshold_on_every_region(case, limit):
    found = aupro(*tensors(*case), limit=limit)
    assert found == pytest.approx(slow_aupro(*case, limit), abs=1e-12)
    assert 0 <= found <= 1
    assert aupro(*tensors(*case)) == pytest.approx(slow_aupro(*case), abs=1e-12)


@settings(max_examples=50)
@given(case=cases())
def test_best_f1_tries_every_threshold(case):
    found = localisation(*tensors(*case), resamples=1)
    assert (found.best_f1, found.best_f1_threshold) == slow_best_f1(*case)
    called = case[0] >= found.best_f1_threshold
    assert found.best_f1 == pytest.approx(f1_score(case[1].ravel(), called.ravel()), abs=1e-12)


@settings(max_examples=50)
@given(case=cases())
def test_the_summary_holds_the_values_and_counts(case):
    found = localisation(*tensors(*case), resamples=3)
    assert isinstance(found, Localisation)
    assert found.pixel_auroc.value == pixel_auroc(*tensors(*case))
    assert found.aupro.value == aupro(*tensors(*case))
    assert found.images == len(case[0])
    assert found.regions == sum(len(regions_of(mask)) for mask in case[1])


def test_of_one_region_aupro_is_the_partial_area_of_the_roc():
    """scikit-learn's partial area, with its rescaling by McClish undone."""
    rng = np.random.default_rng(0)
    masks = np.zeros((4, 20, 20), bool)
    masks[2, 5:14, 8:] = True  # reaches the border
    maps = (rng.normal(size=masks.shape) + masks).round(1).astype(np.float32)
    for limit in (0.05, 0.3):
        scaled = roc_auc_score(masks.ravel(), maps.ravel(), max_fpr=limit)
        lowest = limit**2 / 2
        area = (2 * scaled - 1) * (limit - lowest) + lowest
        assert aupro(*tensors(maps, masks), limit=limit) == pytest.approx(area / limit, abs=1e-12)
    assert aupro(*tensors(maps, masks), limit=1.0) == pytest.approx(pixel_auroc(*tensors(maps, masks)), abs=1e-12)


def region_weight(mask):
    """How much of the AUPRO the first pixel marked decides, when it alone is found: 1 / its region / regions."""
    maps = np.zeros((2, *mask.shape), np.float32)
    masks = np.stack([np.zeros_like(mask), mask])
    maps[1][tuple(np.argwhere(mask)[0])] = 1
    rest = 0.15  # what the limit gives to pixels tied with all normal ones
    return (aupro(*tensors(maps, masks)) - rest) / (1 - rest)


def test_regions_are_eight_connected():
    for drawing, weight in [
        ("#... .#.. ..## ....", 1 / 4),  # corners join: one region of four
        ("#.#. .... ...# ....", 1 / 3),  # three regions, the first of a pixel
        ("##.# ##.# ...# ####", 1 / 4 / 2),  # two regions, both at the border
        ("#### #..# #..# ####", 1 / 12),  # a ring; its hole is normal
        ("..## .... #... ....", 1 / 2 / 2),  # the border does not wrap
    ]:
        mask = np.array([[sign == "#" for sign in row] for row in drawing.split()])
        assert region_weight(mask) == pytest.approx(weight, abs=1e-12)


def test_regions_agree_with_scipy_on_intricate_masks():
    rng = np.random.default_rng(0)
    masks = np.stack([cv2.GaussianBlur(rng.normal(size=(64, 64)), (0, 0), sigma) > 0 for sigma in (0.5, 1.0, 2.0)])
    labels = [ndimage.label(mask, structure=np.ones((3, 3))) for mask in masks]
    maps = rng.normal(size=masks.shape)
    regions = [maps[i][label == k] for i, (label, count) in enumerate(labels) for k in range(1, count + 1)]
    normal = maps[~masks]
    areas = [np.clip(1 - (normal > score).mean() / 0.3, 0, 1) for region in regions for score in region]
    weights = [1 / len(region) for region in regions for _ in region]
    assert aupro(*tensors(maps, masks)) == pytest.approx(np.average(areas, weights=weights), abs=1e-12)
    assert localisation(*tensors(maps, masks), resamples=1).regions == len(regions)


@settings(max_examples=50)
@given(case=cases(), shift=st.floats(-5, 5))
def test_only_the_order_of_scores_counts(case, shift):
    maps, masks = case
    values, ranks = np.unique(maps, return_inverse=True)
    steps = np.cumsum(np.exp(np.sin(np.arange(len(values)) + shift))) - 3  # any increasing values
    bent = steps[ranks].reshape(maps.shape)
    found, other = (localisation(*tensors(one, masks), resamples=20) for one in (maps, bent))
    for name in ("pixel_auroc", "aupro"):
        one, two = getattr(found, name), getattr(other, name)
        assert (one.value, one.low, one.high) == pytest.approx((two.value, two.low, two.high), abs=1e-12)
    assert found.best_f1 == other.best_f1


@settings(max_examples=50)
@given(case=cases(), seed=st.integers(0, 99))
def test_the_order_of_images_does_not_count(case, seed):
    order = np.random.default_rng(seed).permutation(len(case[0]))
    turned = [np.ascontiguousarray(part[order].transpose(0, 2, 1)) for part in case]  # nor which way they lie
    assert pixel_auroc(*tensors(*turned)) == pytest.approx(pixel_auroc(*tensors(*case)), abs=1e-12)
    assert aupro(*tensors(*turned)) == pytest.approx(aupro(*tensors(*case)), abs=1e-12)


@settings(max_examples=50)
@given(case=cases())
def test_a_perfect_map_gives_exactly_1_and_its_negative_0(case):
    maps, masks = tensors(case[1].astype(np.float32), case[1])
    found = localisation(maps, masks, resamples=20)
    for interval in (found.pixel_auroc, found.aupro):
        assert (interval.low, interval.value, interval.high) == (1, 1, 1)
    assert (found.best_f1, found.best_f1_threshold) == (1, 1)
    assert pixel_auroc(-maps, masks) == 0
    assert aupro(-maps, masks) == 0


@settings(max_examples=50)
@given(case=cases(), limit=st.sampled_from([0.1, 0.3, 1.0]))
def test_a_constant_map_is_chance(case, limit):
    """Calling nothing or everything: the line between them is FPR itself, whose mean up to the limit is half of it."""
    maps, masks = tensors(np.full_like(case[0], 7), case[1])
    assert pixel_auroc(maps, masks) == pytest.approx(0.5, abs=1e-12)
    assert aupro(maps, masks, limit=limit) == pytest.approx(limit / 2, abs=1e-12)
    assert aupro(maps, masks) == pytest.approx(0.15, abs=1e-12)


def test_known_values():
    """Four normal pixels, a region of two and one of one; the limit cuts the second normal pixel at a fifth."""
    masks = torch.tensor([[[True, True, False, True, False, False, False]]])
    maps = torch.tensor([[[6.0, 4, 5, 2, 3, 1, 0]]])
    # FPR 0: half of the first region; from 1/4: all of it; from 2/4: the second too
    assert aupro(maps, masks) == pytest.approx((0.25 * 0.25 + 0.05 * 0.5) / 0.3)
    assert pixel_auroc(maps, masks) == pytest.approx((4 + 3 + 2) / 12)
    found = localisation(maps, masks)
    assert (found.best_f1, found.best_f1_threshold) == (0.75, 2)
    assert (found.images, found.regions) == (1, 2)


def test_a_good_image_counts_as_normal_pixels():
    maps = torch.tensor([[[2.0, 1.0]], [[3.0, 0.0]]])
    masks = torch.tensor([[[True, False]], [[False, False]]])
    assert pixel_auroc(maps[:1], masks[:1]) == 1
    assert pixel_auroc(maps, masks) == pytest.approx(2 / 3)
    assert aupro(maps[:1], masks[:1]) == 1
    assert aupro(maps, masks) == 0  # the first false call costs a third of the normal pixels, more than the limit


def test_any_precision_is_read_as_it_is():
    maps, masks = tensors(*drawn(np.random.default_rng(0), 6, 4))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        rounded = maps.to(dtype)
        assert pixel_auroc(rounded, masks) == pixel_auroc(rounded.double(), masks)
        assert aupro(rounded, masks) == aupro(rounded.double(), masks)


def test_double_maps_are_not_rounded_into_ties():
    maps = torch.tensor([[[1.0, 1.0 + 1e-12]]], dtype=torch.float64)
    assert pixel_auroc(maps, torch.tensor([[[False, True]]])) == 1


def test_maps_may_be_views_and_carry_gradients():
    maps, masks = tensors(*drawn(np.random.default_rng(0), 6, 4))
    kept = maps.clone()
    expected = aupro(maps.transpose(1, 2).contiguous(), masks.transpose(1, 2).contiguous())
    assert aupro(maps.transpose(1, 2).requires_grad_(), masks.transpose(1, 2)) == expected
    assert torch.equal(maps, kept)  # the sort leaves the maps alone


# --- intervals ---


def drawn(rng, good=8, defective=6, side=16, shift=1.5):
    """Smooth maps that are higher in the defects, some images by more than others."""
    n = good + defective
    masks = np.zeros((n, side, side), bool)
    maps = np.empty((n, side, side), np.float32)
    for i in range(n):
        for _ in range(rng.integers(1, 3) if i >= good else 0):
            y, x = rng.integers(0, side - 3, 2)
            masks[i, y : y + rng.integers(2, side // 2), x : x + rng.integers(2, side // 2)] = True
        noise = cv2.GaussianBlur(rng.normal(size=(side, side)), (0, 0), 1) * 3 + rng.normal(0, 0.5)
        maps[i] = noise + masks[i] * max(0.0, rng.normal(shift, 0.7))
    return maps, masks


def explicit(maps, masks, rng):
    """One resample as a person would make it: images repeated as often as drawn, defective ones drawn first."""
    times = np.zeros(len(maps), int)
    for side in (masks.any((1, 2)), ~masks.any((1, 2))):
        if side.any():
            times[side] = rng.multinomial(side.sum(), np.full(side.sum(), 1 / side.sum()))
    return np.repeat(maps, times, axis=0), np.repeat(masks, times, axis=0)


@settings(max_examples=40)
@given(case=cases(most=6), seed=st.integers(0, 2**32))
def test_a_resample_takes_whole_images_with_their_regions(case, seed):
    """Few pixels have a bin each, so even the bins are exact."""
    maps, masks = explicit(*case, np.random.default_rng(seed))
    assume(not masks.all())
    found = localisation(*tensors(*case), resamples=1, seed=seed)
    assert found.pixel_auroc.low == found.pixel_auroc.high
    assert found.pixel_auroc.low == pytest.approx(pixel_auroc(*tensors(maps, masks)), abs=1e-12)
    assert found.aupro.low == pytest.approx(aupro(*tensors(maps, masks)), abs=1e-12)


def test_interval_is_the_percentiles_of_explicit_resamples():
    case = drawn(np.random.default_rng(0))
    rng = np.random.default_rng(1)
    sets = [tensors(*explicit(*case, rng)) for _ in range(400)]
    whole = localisation(*tensors(*case), confidence=0.8, resamples=1000)
    for found, measure in ((whole.pixel_auroc, pixel_auroc), (whole.aupro, aupro)):
        low, high = np.quantile([measure(*one) for one in sets], [0.1, 0.9])
        assert found.low == pytest.approx(low, abs=(high - low) * 0.12)
        assert found.high == pytest.approx(high, abs=(high - low) * 0.12)
        assert found.low < found.value < found.high


def test_interval_is_as_wide_as_the_values_of_new_images_spread():
    """Pixels taken as independent would give a small part of this width; a little is lost to few, unlike defects."""
    rng = np.random.default_rng(1)
    trials = [localisation(*tensors(*drawn(rng, 30, 40)), resamples=60, seed=trial) for trial in range(30)]
    for found in ([one.pixel_auroc for one in trials], [one.aupro for one in trials]):
        spread = np.std([one.value for one in found], ddof=1)
        width = np.mean([one.high - one.low for one in found])
        assert 0.75 <= width / (2 * 1.96 * spread) <= 1.25


def test_interval_is_deterministic_and_widens_with_confidence():
    case = tensors(*drawn(np.random.default_rng(2)))
    wide = localisation(*case)
    assert localisation(*case) == wide
    assert localisation(*case, seed=1) != wide
    less = localisation(*case, confidence=0.5)
    for name in ("pixel_auroc", "aupro"):
        one, two = getattr(wide, name), getattr(less, name)
        assert one.low < two.low < two.value < two.high < one.high


def test_chunks_change_nothing(monkeypatch):
    case = tensors(*drawn(np.random.default_rng(3)))
    whole = localisation(*case)
    monkeypatch.setattr(module, "CHUNK", 2**13)
    parts = localisation(*case)
    for name in ("pixel_auroc", "aupro"):
        one, two = getattr(whole, name), getattr(parts, name)
        assert (one.low, one.high) == pytest.approx((two.low, two.high), abs=1e-12)


def tied_at_zero(rng, masks):
    """Half of all pixels exactly 0, as a clipped map has them."""
    return np.maximum(rng.normal(size=masks.shape) + masks, 0)


def tied_and_close(rng, masks):
    """Most pixels share one value, the others crowd just above it."""
    return np.where(rng.random(masks.shape) < 0.9 - 0.4 * masks, 0, 1e-6 * rng.random(masks.shape) + 1e-6 * masks)


SCORES = {
    "very heavy tails": lambda rng, masks: np.exp(4 * rng.normal(size=masks.shape) + 6 * masks),
    "eight bits": lambda rng, masks: np.round(255 * np.clip(rng.gamma(2, 0.1, masks.shape) + 0.3 * masks, 0, 1)),
    "tied at zero": tied_at_zero,
    "tied and close": tied_and_close,
    "smooth": lambda rng, masks: np.stack(
        [cv2.GaussianBlur(rng.normal(size=m.shape) + 0.3 * m, (0, 0), 4) for m in masks]
    ),
}


@pytest.mark.parametrize("scores", SCORES)
def test_the_bins_of_the_interval_blur_by_less_than_1e_4(scores):
    """One image of each kind: every resample is the set itself, so the ends of the interval are the binned value."""
    masks = np.zeros((2, 400, 400), bool)
    for y, x, size in ((0, 0, 5), (40, 50, 30), (200, 100, 60), (300, 390, 10)):
        masks[1, y : y + size, x : x + size] = True
    maps = SCORES[scores](np.random.default_rng(0), masks).astype(np.float32)
    found = localisation(*tensors(maps, masks), resamples=2)
    for interval in (found.pixel_auroc, found.aupro):
        assert interval.low == interval.high
        assert interval.low == pytest.approx(interval.value, abs=1e-4)
    assert found.pixel_auroc.value == pytest.approx(roc_auc_score(masks.ravel(), maps.ravel()), abs=1e-9)


def test_a_lone_pixel_just_above_a_frequent_score_is_not_taken_for_tied_with_it():
    """It weighs as much as the large region whose quantiles pass it by."""
    rng = np.random.default_rng(0)
    masks = np.zeros((2, 400, 400), bool)
    masks[1, 50:350, 50:350] = masks[1, 0, 0] = True
    rare = rng.random(masks.shape) < np.where(masks, 0.5, 0.05)
    maps = np.where(rare, 1 + rng.random(masks.shape), 0).astype(np.float32)
    maps[1, 0, 0] = 1e-3
    found = localisation(*tensors(maps, masks), resamples=1)
    assert found.regions == 2
    assert found.aupro.low == pytest.approx(found.aupro.value, abs=1e-4)


def test_without_good_images_the_normal_pixels_of_defective_ones_serve():
    maps, masks = drawn(np.random.default_rng(4), good=0, defective=8)
    found = localisation(*tensors(maps, masks))
    assert found.aupro.low < found.aupro.value < found.aupro.high


def test_a_draw_without_normal_pixels_is_the_set_itself():
    """All normal pixels lie in one of two images; a quarter of the draws miss it."""
    masks = torch.tensor([[[True, True]], [[True, False]]])
    found = localisation(torch.tensor([[[0.0, 2.0]], [[2.0, 1.0]]]), masks, resamples=100, confidence=0.99)
    assert found.pixel_auroc.value == pytest.approx(2 / 3)
    assert (found.pixel_auroc.low, found.pixel_auroc.high) == pytest.approx((2 / 3, 1))


# --- refusals ---


def test_what_cannot_be_measured_is_refused(monkeypatch):
    monkeypatch.setattr(config, "jaxtyping_disable", True)  # a user has no checker of shapes
    for maps, masks, kind, culprit in [
        ([[[0.0, 1.0]]], [[[False, False]]], DataError, "no anomalous pixel"),
        ([[[0.0, 1.0]]], [[[True, True]]], DataError, "every pixel as anomalous"),
        ([[[0.0, 1.0]], [[0.0, math.nan]]], [[[False, True]]] * 2, SettingError, "image 1 is not finite"),
        ([[[0.0, -math.inf]]], [[[False, True]]], SettingError, "image 0 is not finite"),
        ([[[0.0, 1.0, 2.0]]], [[[False, True]]], SettingError, r"\(1, 1, 3\) maps .* \(1, 1, 2\) masks"),
        ([[0.0, 1.0]], [[False, True]], SettingError, r"\(1, 2\) maps"),
        ([], [], SettingError, r"\(0,\) maps"),
    ]:
        for measure in (pixel_auroc, aupro, localisation):
            with pytest.raises(kind, match=culprit):
                measure(torch.tensor(maps), torch.tensor(masks, dtype=torch.bool))


def test_numbers_out_of_range_are_refused():
    case = torch.rand(1, 2, 2), torch.eye(2, dtype=torch.bool)[None]
    for limit in (0.0, -0.1, 1.1, math.nan):
        with pytest.raises(SettingError, match=f"limit is {limit}"):
            aupro(*case, limit=limit)
    for confidence, resamples in ((0.0, 10), (1.0, 10), (math.nan, 10), (0.9, 0)):
        with pytest.raises(SettingError, match=f"confidence {confidence} .* resamples {resamples}"):
            localisation(*case, confidence=confidence, resamples=resamples)
    with pytest.raises(DataError, match="no anomalous pixel"):
        aupro(torch.zeros(0, 4, 4), torch.zeros(0, 4, 4, dtype=torch.bool))


def test_ignored_pixels_are_left_out():
    """As if they were cut off; a region that they part in two stays one."""
    rng = torch.Generator().manual_seed(5)
    masks = torch.zeros(6, 12, 14, dtype=torch.bool)
    masks[:3, 2:7, 3:9] = True
    masks[1, 10, 11] = True
    maps = torch.rand(6, 12, 14, generator=rng) + 0.5 * masks
    ignored = torch.zeros(12, 14, dtype=torch.bool)
    ignored[:, :5] = True
    assert localisation(maps, masks, ignored=ignored) == localisation(maps[..., 5:], masks[..., 5:])
    assert pixel_auroc(maps, masks, ignored) == pixel_auroc(maps[..., 5:], masks[..., 5:])
    across = torch.zeros(12, 14, dtype=torch.bool)
    across[4] = True
    found = localisation(maps, masks, ignored=across)
    assert found.regions == 4
    joined = torch.cat([maps[:, :4], maps[:, 5:]], 1), torch.cat([masks[:, :4], masks[:, 5:]], 1)
    assert found == localisation(*joined)
    with pytest.raises(DataError, match="no anomalous pixel"):
        localisation(maps, masks, ignored=masks[:3].any(0))
