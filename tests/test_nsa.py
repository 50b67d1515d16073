"""NSA: the table, the geometry of patches, blending to the pixel, and outliers that can always be seen."""

import dataclasses

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

import contracts
from firm.outliers import OUTLIERS, Nsa, nsa, nsa_for
from firm.outliers.nsa import Box
from firm.outliers.nsa_classes import NSA_CLASSES
from firm.recipes.recipe import Recipe, change, digest, from_json, to_json
from firm.types import FirmError, Scene

MEMBERS = [name for name in OUTLIERS if name.startswith("nsa")]
SOME = ["nsa", "nsa-uniform", "nsa-screw", "nsa-bottle", "nsa-tile"]


def draws(seed=0):
    return np.random.default_rng(seed)


def parts(n, side=96, channels=3, seed=0):
    """Rough dark discs on a light ground, a little different each; and where the discs are."""
    rng = draws(seed)
    row, column = np.mgrid[:side, :side]
    images = rng.integers(195, 206, (n, channels, side, side))
    discs = np.zeros((n, side, side), bool)
    for at in range(n):
        centre, radius = side * rng.uniform(0.4, 0.6, 2), side * rng.uniform(0.25, 0.35)
        discs[at] = np.hypot(row - centre[0], column - centre[1]) < radius
        images[at] = np.where(discs[at], rng.integers(20, 120, images[at].shape), images[at])
    return torch.from_numpy(images.astype(np.uint8)), torch.from_numpy(discs)


def scene_of(images, discs):
    return Scene(discs, images, discs)


def pixels(image):
    """One image of a batch as OpenCV holds it."""
    return image.permute(1, 2, 0).contiguous().numpy()


def visible(made, inliers):
    """How many pixels of each outlier differ by more than five grey levels."""
    change = (made.images.int() - inliers.int()).abs().float().mean(1)
    return (change > 5).flatten(1).sum(1)


# --- the table ---


# half-heights, half-widths, patches, background, of the patch, overlap, blend, resize: as published
PUBLISHED = {
    "bottle": ((0.03, 0.40), (0.03, 0.40), 3, (200, 60), 0.70, 0.25, "normal", (0.7, 1.3)),
    "cable": ((0.05, 0.40), (0.05, 0.40), 3, (0, 0), 0, 0, "normal", (0.7, 1.3)),
    "capsule": ((0.03, 0.15), (0.03, 0.40), 3, (200, 60), 0.70, 0.25, "normal", (0.7, 1.3)),
    "hazelnut": ((0.03, 0.35), (0.03, 0.35), 3, (20, 20), 0.70, 0.25, "normal", (0.7, 1.3)),
    "metal_nut": ((0.03, 0.40), (0.03, 0.40), 3, (20, 20), 0.50, 0.25, "normal", (0.7, 1.3)),
    "pill": ((0.03, 0.20), (0.03, 0.40), 3, (20, 20), 0.70, 0.25, "normal", (0.7, 1.3)),
    "screw": ((0.03, 0.12), (0.03, 0.12), 4, (200, 60), 0.50, 0.25, "normal", (0.7, 1.3)),
    "toothbrush": ((0.03, 0.40), (0.03, 0.20), 3, (20, 20), 0.25, 0.25, "normal", (0.7, 1.3)),
    "transistor": ((0.03, 0.40), (0.03, 0.40), 3, (0, 0), 0, 0, "normal", (0.7, 1.3)),
    "zipper": ((0.03, 0.40), (0.03, 0.20), 4, (200, 60), 0.70, 0.25, "normal", (0.7, 1.3)),
    "carpet": ((0.03, 0.40), (0.03, 0.40), 4, (0, 0), 0, 0, "mixed", (0.5, 2.0)),
    "grid": ((0.03, 0.40), (0.03, 0.40), 4, (0, 0), 0, 0, "mixed", (0.5, 2.0)),
    "leather": ((0.03, 0.40), (0.03, 0.40), 4, (0, 0), 0, 0, "mixed", (0.5, 2.0)),
    "tile": ((0.03, 0.40), (0.03, 0.40), 4, (0, 0), 0, 0, "mixed", (0.5, 2.0)),
    "wood": ((0.03, 0.40), (0.03, 0.40), 4, (0, 0), 0, 0, "mixed", (0.5, 2.0)),
}


def facts(member):
    names = ("half_height", "half_width", "patches", "background", "min_object", "min_overlap", "blend", "resize")
    return tuple(getattr(member, name) for name in names)


def test_the_table_is_the_published_one():
    assert {product: facts(member) for product, member in NSA_CLASSES.items()} == PUBLISHED
    for product, member in NSA_CLASSES.items():
        assert (member.sizes, member.other, member.jitter, member.per_inlier) == ("gamma", 1.0, 0.0, 1)
        assert OUTLIERS[f"nsa-{product}"] == member == nsa_for(product)


def test_the_variant_of_default_arguments():
    member = OUTLIERS["nsa-uniform"]
    assert facts(member) == ((0.05, 0.2), (0.05, 0.2), 1, (0, 0), 0, 0, "normal", (0.7, 1.3))
    assert (member.sizes, member.other, member.jitter) == ("uniform", 0.5, 0.1)


def test_an_unknown_product_gets_the_generic_settings():
    assert nsa_for("gearbox") == Nsa() == OUTLIERS["nsa"]


@pytest.mark.parametrize("name", MEMBERS)
def test_every_member_comes_back_from_json(name):
    recipe = change(Recipe(), {"outliers": name, "training.epochs": 3})
    assert from_json(to_json(recipe)) == recipe
    assert digest(from_json(to_json(recipe))) == digest(recipe)
    assert recipe.outliers == OUTLIERS[name]


def test_a_product_of_ones_own_can_be_described():
    recipe = change(Recipe(), {"outliers": "nsa", "outliers.half_width": [0.05, 0.1], "outliers.background": [220, 40]})
    assert recipe.outliers == Nsa(half_width=(0.05, 0.1), background=(220.0, 40.0))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"blend": "seam"}, "no blend 'seam'; use one of auto, normal, mixed"),
        ({"sizes": "big"}, "no distribution of sizes 'big'; use one of gamma, uniform"),
        ({"half_height": (0.2, 0.1)}, r"outliers\.half_height is 0\.2, 0\.1; it must rise within 0\.\.0\.5"),
        ({"half_height": (0.0, 0.1)}, r"outliers\.half_height is 0\.0, 0\.1"),
        ({"half_width": (0.2, 0.5)}, r"outliers\.half_width is 0\.2, 0\.5"),
        ({"half_width": (float("nan"), 0.4)}, r"outliers\.half_width is nan, 0\.4"),
        ({"resize": (0.0, 1.0)}, r"outliers\.resize is \(0\.0, 1\.0\); it must rise from above 0"),
        ({"background": (300.0, 1.0)}, r"outliers\.background is \(300\.0, 1\.0\); give brightness and distance"),
        ({"min_object": 1.0}, r"outliers\.min_object 1\.0 and outliers\.min_overlap 0\.25 must lie in 0\.\.1"),
        ({"min_overlap": -0.1}, r"outliers\.min_overlap -0\.1 must lie in 0\.\.1"),
        ({"other": 1.5}, r"outliers\.other 1\.5 must lie in 0\.\.1"),
        ({"jitter": 0.6}, r"outliers\.jitter 0\.6 in 0\.\.0\.5"),
        ({"patches": 0}, r"outliers\.patches 0 and outliers\.per_inlier 1 must be 1 or more"),
        ({"per_inlier": 0}, r"outliers\.per_inlier 0 must be 1 or more"),
    ],
)
def test_wrong_settings_are_named(wrong, message):
    with pytest.raises(FirmError, match=message):
        Nsa(**wrong)


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
    found = [nsa.draw_patch(nsa_for("bottle"), masks[at], masks[at + 1], (128, 96), draws(at)) for at in range(100)]
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


# --- objects ---


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


def test_patches_land_on_the_object_of_the_scene():
    images, discs = parts(20)
    member = Nsa(min_overlap=0.8, patches=1, half_height=(0.1, 0.3), half_width=(0.1, 0.3))
    made = member(images, rng=contracts.generator(), scene=scene_of(images, discs))
    on = (made.where & discs).flatten(1).sum(1) / made.where.flatten(1).sum(1)
    assert float(on.mean()) > 0.75
    without = member(images, rng=contracts.generator())
    assert float(((without.where & discs).flatten(1).sum(1) / without.where.flatten(1).sum(1)).mean()) < 0.6


def test_a_scene_filled_by_the_object_is_as_none():
    images, _ = parts(4)
    alone = Nsa()(images, rng=contracts.generator())
    for value in (True, False):  # filled, or the object was not found
        mask = torch.full((4, 96, 96), value)
        assert torch.equal(Nsa()(images, rng=contracts.generator(), scene=scene_of(images, mask)).images, alone.images)


def test_members_without_objects_and_those_with_a_background_do_not_ask_the_scene():
    images, discs = parts(4)
    for name in ("nsa-tile", "nsa-uniform", "nsa-cable", "nsa-screw"):
        with_scene = OUTLIERS[name](images, rng=contracts.generator(), scene=scene_of(images, discs))
        assert torch.equal(with_scene.images, OUTLIERS[name](images, rng=contracts.generator()).images)


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


@pytest.mark.parametrize("flag", [cv2.NORMAL_CLONE, cv2.MIXED_CLONE])
@pytest.mark.parametrize(("height", "width"), [(15, 22), (22, 15), (40, 40)])
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


@pytest.fixture
def flags(monkeypatch):
    """The modes in which OpenCV was asked to clone."""
    asked = []
    original = cv2.seamlessClone

    def recorded(patch, under, mask, centre, flag):
        asked.append(flag)
        return original(patch, under, mask, centre, flag)

    monkeypatch.setattr(cv2, "seamlessClone", recorded)
    return asked


@pytest.mark.parametrize(
    ("member", "with_scene", "flag"),
    [
        (nsa_for("screw"), False, cv2.NORMAL_CLONE),
        (nsa_for("transistor"), False, cv2.NORMAL_CLONE),
        (nsa_for("carpet"), True, cv2.MIXED_CLONE),
        (OUTLIERS["nsa-uniform"], False, cv2.NORMAL_CLONE),
        (Nsa(), True, cv2.NORMAL_CLONE),
        (Nsa(), False, cv2.MIXED_CLONE),
        (Nsa(blend="mixed"), True, cv2.MIXED_CLONE),
        (Nsa(blend="normal"), False, cv2.NORMAL_CLONE),
    ],
)
def test_the_blend_reaches_opencv(member, with_scene, flag, flags):
    images, discs = parts(4, side=128)
    member(images, rng=contracts.generator(), scene=scene_of(images, discs) if with_scene else None)
    assert set(flags) == {flag}


def test_as_many_patches_as_the_table_says(flags):
    images, _ = parts(40)
    Nsa(patches=1, half_height=(0.2, 0.3), half_width=(0.2, 0.3))(images, rng=contracts.generator())
    assert len(flags) == 40
    flags.clear()
    Nsa(patches=3, half_height=(0.2, 0.3), half_width=(0.2, 0.3))(images, rng=contracts.generator())
    assert 40 * 1.65 < len(flags) < 40 * 2.35


# --- outliers ---


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(("channels", "height", "width"), [(3, 96, 96), (1, 96, 96), (3, 32, 80), (1, 80, 32)])
def test_the_contract(name, channels, height, width):
    images, _ = parts(3, 96, channels)
    inliers = images[:, :, :height, :width]
    made = contracts.check_outlier_source(OUTLIERS[name], inliers)
    assert made.images.shape == inliers.shape
    assert int(visible(made, inliers).min()) >= 16


@settings(max_examples=15)
@given(name=st.sampled_from(SOME), level=st.integers(0, 255), side=st.integers(32, 80), seed=st.integers(0, 2**32))
def test_a_blank_image_is_struck(name, level, side, seed):
    """Neither blending nor pasting can change it."""
    blank = torch.full((2, 3, side, side), level, dtype=torch.uint8)
    made = OUTLIERS[name](blank, rng=contracts.generator(seed))
    assert torch.equal(made.where, (made.images != blank).any(1))
    assert int(visible(made, blank).min()) >= 16
    assert not made.where.flatten(1).all(1).any()
    assert set((made.images.int() - blank.int()).abs().unique().tolist()) == {0, 128}


def test_what_cannot_be_blended_is_pasted(monkeypatch):
    def refuse(*_):
        raise cv2.error("no")

    monkeypatch.setattr(cv2, "seamlessClone", refuse)
    images, discs = parts(5)
    made = Nsa()(images, rng=contracts.generator(), scene=scene_of(images, discs))
    assert int(visible(made, images).min()) >= 16
    for where in made.where:
        rows, columns = where.any(1).nonzero().squeeze(1), where.any(0).nonzero().squeeze(1)
        box = where[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert box.float().mean() > 0.8  # one filled rectangle
        assert discs[:, rows, :][:, :, columns].any()


def test_what_cannot_be_seen_is_drawn_again(monkeypatch):
    """Many pixels that hardly differ, then very different ones that are hardly any, then enough of both."""
    images, _ = parts(2)
    changes = iter([(20, 20, 1), (20, 20, 5), (1, 15, 128), (1, 16, 6)])

    def prepared(self, target, source, rng):
        height, width, levels = next(changes)
        image = target.pixels.copy()
        image[:height, :width] -= np.uint8(levels)
        return image

    monkeypatch.setattr(Nsa, "_blended", prepared)
    made = Nsa()(images[:1], rng=contracts.generator())
    assert next(changes, None) is None
    assert int(made.where.sum()) == 16


def test_patches_too_small_to_blend_in_a_small_image_are_pasted(flags):
    images, _ = parts(8, side=32)
    made = OUTLIERS["nsa-screw"](images, rng=contracts.generator())
    assert flags == []
    rows, columns = made.where.any(2).sum(1), made.where.any(1).sum(1)
    assert int(torch.maximum(rows, columns).max()) <= 2 * 4  # twice 12 % of the side
    assert int(visible(made, images).min()) >= 16


def test_grey_images_are_as_three_equal_channels():
    grey, discs = parts(5, channels=1)
    for name in ("nsa", "nsa-tile", "nsa-screw"):
        one = OUTLIERS[name](grey, rng=contracts.generator(), scene=scene_of(grey, discs))
        colour = grey.repeat(1, 3, 1, 1)
        three = OUTLIERS[name](colour, rng=contracts.generator(), scene=scene_of(colour, discs))
        assert torch.equal(one.images.repeat(1, 3, 1, 1), three.images)


def test_an_outlier_does_not_depend_on_the_inliers_beside_it():
    """Nor on how often they had to be drawn again."""
    images, discs = parts(6)
    both = Nsa()(images[:2], rng=contracts.generator(), scene=Scene(discs[:2], images[2:], discs[2:]))
    dot = torch.zeros_like(discs[0])
    dot[0, 0] = True  # hardly any patch finds a place on it
    beside = Scene(torch.stack([dot, discs[1]]), images[2:], discs[2:])
    other = Nsa()(images[:2], rng=contracts.generator(), scene=beside)
    assert not torch.equal(both.images[0], other.images[0])
    assert torch.equal(both.images[1], other.images[1])


@pytest.fixture
def pasting(monkeypatch):
    """Patches as they are instead of blended ones, so that their pixels tell where they came from."""

    def paste(image, patch, place, *, mixed):
        place.of(image)[:] = patch

    monkeypatch.setattr(nsa, "clone", paste)


def marked(n, levels=40):
    """Images of which each has grey levels of its own."""
    images = torch.randint(0, levels, (n, 3, 64, 64), generator=contracts.generator(), dtype=torch.uint8)
    return images + (torch.arange(n) * levels).to(torch.uint8)[:, None, None, None]


def origins(made, levels=40):
    """Whose grey levels stand where each image changed."""
    return [
        set((image[:, where] // levels).unique().tolist()) for image, where in zip(made.images, made.where, strict=True)
    ]


def test_the_source_is_another_image(pasting):
    images = marked(5)
    found = [origins(Nsa(patches=1)(images, rng=contracts.generator(seed))) for seed in range(12)]
    for at in range(5):
        seen = set().union(*(one[at] for one in found))
        assert seen == set(range(5)) - {at}
        assert all(len(one[at]) == 1 for one in found)  # all patches of an outlier from one image


def test_donors_of_the_scene_are_used_and_never_the_inlier_itself(pasting):
    images = marked(5)
    scene = Scene(torch.ones(2, 64, 64, dtype=torch.bool), images[1:], torch.ones(4, 64, 64, dtype=torch.bool))
    found = [origins(Nsa()(images[:2], rng=contracts.generator(seed), scene=scene)) for seed in range(12)]
    assert set().union(*(one[0] for one in found)) == {1, 2, 3, 4}
    assert set().union(*(one[1] for one in found)) == {2, 3, 4}


def test_patches_show_the_object_of_the_donor(pasting):
    """Which lies elsewhere than the inlier's."""
    left = torch.zeros(1, 64, 64, dtype=torch.bool)
    left[:, :, :32] = True
    inliers = torch.full((8, 3, 64, 64), 50, dtype=torch.uint8)
    donors = torch.where(left, 120, 200).to(torch.uint8).expand(2, 3, -1, -1)
    scene = Scene(~left.expand(8, -1, -1), donors, left.expand(2, -1, -1))
    made = Nsa(patches=1, min_object=0.9)(inliers, rng=contracts.generator(), scene=scene)
    for image, where in zip(made.images, made.where, strict=True):
        assert float((image[0][where] == 120).float().mean()) > 0.85  # resizing softens an edge


@pytest.mark.parametrize("donors", [0, 1])
def test_a_lone_inlier_is_its_own_source(pasting, donors):
    images = marked(3)[2:]
    ones = torch.ones(1, 64, 64, dtype=torch.bool)
    assert origins(Nsa()(images, rng=contracts.generator())) == [{2}]
    scene = Scene(ones, images[:donors], ones[:donors])
    assert origins(Nsa()(images, rng=contracts.generator(), scene=scene)) == [{2}]


def test_other_is_the_chance_of_another_image(pasting):
    images = marked(6)
    member = dataclasses.replace(OUTLIERS["nsa-uniform"], jitter=0.0)
    own = [
        at in one for seed in range(40) for at, one in enumerate(origins(member(images, rng=contracts.generator(seed))))
    ]
    assert np.mean(own) == pytest.approx(0.5, abs=0.12)
    always = dataclasses.replace(member, other=0.0)
    assert origins(always(images, rng=contracts.generator())) == [{at} for at in range(6)]


def test_only_patches_of_other_images_are_jittered(monkeypatch):
    jittered = []
    monkeypatch.setattr(nsa, "_jittered", lambda patch, strength, rng: jittered.append(strength) or patch)
    images, _ = parts(6)
    dataclasses.replace(OUTLIERS["nsa-uniform"], other=0.0)(images, rng=contracts.generator())
    Nsa()(images, rng=contracts.generator())
    assert jittered == []
    dataclasses.replace(OUTLIERS["nsa-uniform"], other=1.0)(images, rng=contracts.generator())
    assert set(jittered) == {0.1}
    assert len(jittered) >= 6


def test_jitter_changes_colours_a_little():
    patch = texture((20, 30))
    changed = [nsa._jittered(patch, 0.1, draws(seed)) for seed in range(5)]
    for one in changed:
        difference = np.abs(one.astype(int) - patch)
        assert one.shape == patch.shape
        assert 0 < difference.mean() < 50
    assert len({one.tobytes() for one in changed}) == 5
    assert np.array_equal(changed[0], nsa._jittered(patch, 0.1, draws(0)))
