"""The patches of NSA: sizes, cuts and places by their published steps, object masks, and blending to the pixel."""

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from firm.outliers import nsa
from firm.outliers.nsa import PRESETS, Box
from firm.outliers.registry import OUTLIERS, Nsa

MEMBERS = [name for name in OUTLIERS if name.startswith("nsa")]


def draws(seed=0):
    return np.random.default_rng(seed)


# --- geometry ---


def test_one_patch_for_certain_and_each_further_one_by_a_coin():
    counts = np.bincount([nsa.patch_count(4, rng) for rng in [draws()] for _ in range(4000)], minlength=5) / 4000
    np.testing.assert_allclose(counts, [0, 1 / 8, 3 / 8, 3 / 8, 1 / 8], atol=0.025)
    assert {nsa.patch_count(1, draws(seed)) for seed in range(20)} == {1}


sides = st.tuples(st.integers(32, 300), st.integers(32, 300))


@settings(max_examples=40)
@given(name=st.sampled_from(MEMBERS), shape=sides, seed=st.integers(0, 2**32))
def test_half_sizes_keep_the_bounds_of_the_table(name, shape, seed):
    member = OUTLIERS[name]
    for half, side, (low, high) in zip(
        nsa.half_sizes(member, shape, draws(seed)), shape, (member.half_height, member.half_width), strict=True
    ):
        assert max(1, low * side - 0.5) <= half <= max(1, high * side + 0.5)


def test_half_sizes_follow_the_gamma_distribution():
    rng = draws()
    halves = np.array([nsa.half_sizes(Nsa(), (1000, 2000), rng) for _ in range(2500)]) / [1000, 2000]
    for x in (0.05, 0.08, 0.13, 0.2, 0.3):  # Gamma(2, 0.05) beyond x - 0.03
        beyond = np.exp(-(x - 0.03) / 0.05) * (1 + (x - 0.03) / 0.05)
        np.testing.assert_allclose((halves > x).mean(0), beyond, atol=0.03)
    assert abs(np.corrcoef(halves.T)[0, 1]) < 0.05  # height and width are drawn apart


def test_uniform_half_sizes_reach_both_bounds():
    rng = draws()
    halves = np.array([nsa.half_sizes(OUTLIERS["nsa-uniform"], (100, 200), rng) for _ in range(1500)])
    assert halves.min(0).tolist() == [5, 10]
    assert halves.max(0).tolist() == [20, 40]
    np.testing.assert_allclose(halves.mean(0), [12.5, 25], rtol=0.03)


def test_cuts_lie_about_centres_in_the_whole_image_and_are_clipped_to_it():
    rng = draws()
    member = Nsa(half_height=(0.1, 0.1), half_width=(0.2, 0.2))
    found = np.array([nsa.cut_box(member, None, (100, 60), rng) for _ in range(1500)])
    top, left, height, width = found.T
    assert (top.min(), (top + height).max()) == (0, 99)
    assert (left.min(), (left + width).max()) == (0, 59)
    assert set(height) == {20}  # centres in 10..89
    assert set(width) == {24}  # centres in 12..47
    wide = Nsa(half_height=(0.1, 0.3), half_width=(0.1, 0.3))
    boxes = [nsa.cut_box(wide, None, (100, 60), rng) for _ in range(500)]
    assert min(box.height for box in boxes) >= 2 * 10
    assert any(box.top == 0 and box.height % 2 for box in boxes)  # clipped
    assert all(box.top + box.height <= 100 and box.left + box.width <= 60 for box in boxes)


def rectangle_mask(shape, seed):
    """An object: a random rectangle of at least a third of each side."""
    rng = draws(seed)
    mask = np.zeros(shape, bool)
    (top, left), (height, width) = ((rng.uniform(0, 0.5, 2) * shape).astype(int), (rng.uniform(0.33, 0.5, 2) * shape))
    mask[top : top + int(height), left : left + int(width)] = True
    return mask


@settings(max_examples=60)
@given(name=st.sampled_from(MEMBERS), shape=sides, seed=st.integers(0, 2**32))
def test_patches_keep_every_condition(name, shape, seed):
    member = OUTLIERS[name]
    source, target = rectangle_mask(shape, seed), rectangle_mask(shape, seed + 1)
    found = nsa.draw_patch(member, source, target, shape, draws(seed + 2))
    if found is None:
        return
    cut, place = found
    for box in found:
        assert box.top >= 0
        assert box.left >= 0
        assert box.top + box.height <= shape[0]
        assert box.left + box.width <= shape[1]
    assert cut.of(source).mean() > member.min_object
    patch = cv2.resize(cut.of(source).astype(np.uint8), (place.width, place.height), interpolation=cv2.INTER_NEAREST)
    both = sum(bool(patch[y, x] and target[place.top + y, place.left + x]) for y, x in np.ndindex(patch.shape))
    assert patch.sum() / (place.height * place.width) > member.min_object
    assert both / patch.sum() > member.min_overlap
    for extent, side, (low, high) in zip(
        place[2:], shape, (member.half_height, member.half_width), strict=True
    ):  # the half-size bounds hold the whole patch
        assert max(1, round(low * side)) <= extent <= max(1, round(high * side))


def test_places_that_suit_are_found():
    """The conditions above would hold of a function that never finds anything."""
    masks = [rectangle_mask((128, 96), seed) for seed in range(101)]
    found = [nsa.draw_patch(PRESETS["bottle"], masks[at], masks[at + 1], (128, 96), draws(at)) for at in range(100)]
    assert sum(one is not None for one in found) > 90


def test_the_first_place_that_suits_is_taken():
    """As if tried one after another: a condition selects among the same candidates."""
    mask = rectangle_mask((64, 64), 3)
    strict, lax = Nsa(min_object=0.6), Nsa(min_object=0.0)
    for seed in range(30):
        any_box = nsa.cut_box(lax, None, (64, 64), draws(seed))
        good_box = nsa.cut_box(strict, mask, (64, 64), draws(seed))
        if any_box.of(mask).mean() > 0.6:
            assert good_box == any_box
        elif good_box is not None:
            assert good_box != any_box


def test_exactly_the_least_part_is_not_enough():
    """A product with 0.7 is often a little less than the number it stands for; a quotient is not."""
    stripes = np.tile(np.arange(100) % 10 < 7, (100, 1))  # seven tenths of any 30 columns
    for half in range(5, 41):
        member = Nsa(half_height=(half / 100, half / 100), half_width=(0.15, 0.15), min_object=0.7)
        assert nsa.cut_box(member, stripes, (100, 100), draws(half)) is None
        piece = stripes[:half, :30]
        member = Nsa(min_object=0.1, min_overlap=0.7)
        assert nsa.place_box(member, (half, 30), np.ones_like(piece), stripes, (100, 100), draws(half)) is None


def test_no_place_is_none():
    dot = np.zeros((64, 64), bool)
    dot[30, 30] = True
    assert nsa.cut_box(Nsa(min_object=0.5), dot, (64, 64), draws()) is None
    left, right = np.zeros((64, 64), bool), np.zeros((64, 64), bool)
    left[:, :2], right[:, -2:] = True, True
    assert nsa.draw_patch(Nsa(min_object=0.5), dot, dot, (64, 64), draws()) is None
    member = Nsa(min_object=0.01, min_overlap=0.9, half_width=(0.03, 0.05))
    assert nsa.place_box(member, (10, 10), np.eye(10, dtype=bool), np.zeros((64, 64), bool), (64, 64), draws()) is None
    assert nsa.place_box(member, (10, 10), np.zeros((10, 10), bool), np.ones((64, 64), bool), (64, 64), draws()) is None
    # everything lies on the object, yet the patch shows too little of it
    thin, full = np.eye(10, dtype=bool), np.ones((64, 64), bool)
    assert nsa.place_box(Nsa(min_object=0.1), (10, 10), thin, full, (64, 64), draws()) is None
    assert nsa.place_box(Nsa(min_object=0.09), (10, 10), thin, full, (64, 64), draws()) is not None


def test_patches_are_resized_with_their_aspect():
    member = Nsa(half_height=(0.03, 0.45), half_width=(0.03, 0.45), resize=(0.7, 1.3))
    rng = draws()
    sizes = np.array([nsa.resized(member, Box(0, 0, 200, 100), (1000, 1000), rng) for _ in range(2000)])
    scale = sizes[:, 0] / 200
    assert (scale.min(), scale.max()) == (0.7, 1.3)
    assert np.abs(sizes[:, 0] - 2 * sizes[:, 1]).max() <= 1
    # Normal(1, 0.5): beyond 0.6 deviations on either side lie 27.4 %, and they end on the bound
    np.testing.assert_allclose([(scale <= 0.7).mean(), (scale >= 1.295).mean()], 0.274, atol=0.03)


def test_a_patch_too_large_is_shrunk_with_its_aspect():
    member = Nsa(half_height=(0.03, 0.1), half_width=(0.03, 0.4), resize=(1.0, 1.0))
    assert nsa.resized(member, Box(0, 0, 20, 40), (100, 100), draws()) == (10, 20)
    member = Nsa(half_height=(0.03, 0.4), half_width=(0.03, 0.1), resize=(1.0, 1.0))
    assert nsa.resized(member, Box(0, 0, 20, 40), (100, 100), draws()) == (5, 10)


def test_patches_land_anywhere_they_fit():
    places = np.array([nsa.place_box(Nsa(), (20, 30), None, None, (64, 96), draws(seed)) for seed in range(600)])
    assert (places[:, 0].min(), places[:, 0].max()) == (0, 44)
    assert (places[:, 1].min(), places[:, 1].max()) == (0, 66)
    np.testing.assert_allclose(places[:, :2].mean(0), [22, 33], rtol=0.08)


# --- object masks ---


@pytest.mark.parametrize("side", [256, 300])
def test_the_object_is_what_differs_from_the_background(side):
    image = draws(1).integers(0, 256, (side, side + 9, 3), dtype=np.uint8)
    image[50:150, 60:200] = 200  # background
    far = np.abs(image.mean(axis=2) - 200) > 60
    expected = ndimage.median_filter(far.astype(np.uint8), size=7, mode="nearest") > 0
    np.testing.assert_array_equal(nsa.object_mask(image, 200, 60), expected)
    assert 0.1 < expected.mean() < 0.9


def test_the_median_shrinks_with_the_image():
    image = np.full((64, 64, 3), 200, np.uint8)
    image[20:22, 10:50] = 20
    assert np.array_equal(nsa.object_mask(image, 200, 60), image[..., 0] == 20)


# --- blending ---


def texture(shape, seed=0):
    return draws(seed).integers(60, 180, (*shape, 3), dtype=np.uint8)


@settings(max_examples=40)
@given(height=st.integers(10, 30), width=st.integers(10, 30), data=st.data(), mixed=st.booleans())
def test_a_patch_lands_exactly_where_it_was_meant_to(height, width, data, mixed):
    """A dark ground, a patch with one bright pixel: there, and nowhere else, the image is brightest."""
    top, left = data.draw(st.integers(0, 40 - height)), data.draw(st.integers(0, 50 - width))
    y, x = data.draw(st.integers(5, height - 5)), data.draw(st.integers(5, width - 5))
    image = np.full((40, 50, 3), 40, np.uint8)
    patch = np.full((height, width, 3), 90, np.uint8)
    patch[y, x] = 250
    nsa.clone(image, patch, Box(top, left, height, width), mixed=mixed)
    assert np.unravel_index(image[..., 1].argmax(), (40, 50)) == (top + y, left + x)


@pytest.mark.parametrize(
    ("flag", "height", "width"), [(cv2.NORMAL_CLONE, 15, 22), (cv2.MIXED_CLONE, 22, 15), (cv2.NORMAL_CLONE, 40, 40)]
)
def test_cloning_into_a_crop_is_cloning_into_the_image(flag, height, width):
    image, patch = texture((60, 70)), texture((height, width), 1)
    mask = np.zeros((height, width), np.uint8)
    mask[1:-1, 1:-1] = 255
    middle = (9 + 1 + (width - 2) // 2, 4 + 1 + (height - 2) // 2)
    expected = cv2.seamlessClone(patch, image.copy(), mask, middle, flag)
    found = image.copy()
    nsa.clone(found, patch, Box(4, 9, height, width), mixed=flag == cv2.MIXED_CLONE)
    np.testing.assert_array_equal(found, expected)
    assert (found != image).any()


def test_only_the_inside_of_the_patch_changes():
    image, patch = texture((60, 70)), texture((20, 30), 1)
    found = image.copy()
    nsa.clone(found, patch, Box(0, 40, 20, 30), mixed=False)
    changed = (found != image).any(2)
    assert changed[2:18, 42:68].mean() > 0.9
    changed[1:19, 41:69] = False
    assert not changed.any()


def test_blending_keeps_gradients_and_forgets_levels():
    image, patch = texture((60, 60)), draws(1).integers(60, 120, (30, 30, 3), dtype=np.uint8)
    one, other = image.copy(), image.copy()
    nsa.clone(one, patch, Box(10, 10, 30, 30), mixed=False)
    nsa.clone(other, patch + 80, Box(10, 10, 30, 30), mixed=False)
    assert np.abs(one.astype(int) - other).max() <= 1
    inside = one[18:32, 18:32].astype(int)  # away from the rim the patch's own gradients
    assert inside.min() > 0
    assert inside.max() < 255
    slopes = [np.diff(values, axis=1) for values in (inside, patch[8:22, 8:22].astype(int))]
    assert np.abs(slopes[0] - slopes[1]).max() <= 5
    assert np.abs(slopes[1]).max() > 40


def test_mixed_keeps_the_ground_where_the_patch_is_flat():
    image, flat = texture((60, 60)), np.full((30, 30, 3), 100, np.uint8)
    normal, mixed = image.copy(), image.copy()
    nsa.clone(normal, flat, Box(10, 10, 30, 30), mixed=False)
    nsa.clone(mixed, flat, Box(10, 10, 30, 30), mixed=True)
    assert normal[17:33, 17:33].std() < 0.5 * image[17:33, 17:33].std()
    assert np.abs(mixed.astype(int) - image).max() <= 1


def test_small_patches_are_left_out():
    image = texture((60, 60))
    for size in [(9, 9), (3, 51), (2, 40), (1, 1), (52, 3)]:
        found = image.copy()
        nsa.clone(found, texture(size, 1), Box(3, 3, *size), mixed=False)
        np.testing.assert_array_equal(found, image)
    found = image.copy()
    nsa.clone(found, texture((12, 12), 1), Box(3, 3, 12, 12), mixed=False)
    assert (found != image).any()
