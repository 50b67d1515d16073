"""NSA: the published table, sources and blends of its outliers, which are always visible."""

import dataclasses

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import contracts
from firm.outliers import nsa
from firm.outliers.nsa import PRESETS
from firm.outliers.registry import OUTLIERS, Nsa
from firm.recipes.recipe import Recipe, change
from firm.types import Scene

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
    products = {product: member for product, member in PRESETS.items() if product != "uniform"}
    assert {product: facts(member) for product, member in products.items()} == PUBLISHED
    for product, member in products.items():
        assert (member.sizes, member.other, member.jitter, member.per_inlier) == ("gamma", 1.0, 0.0, 1)
        assert OUTLIERS[f"nsa-{product}"] == member


def test_the_variant_of_default_arguments():
    member = OUTLIERS["nsa-uniform"]
    assert facts(member) == ((0.05, 0.2), (0.05, 0.2), 1, (0, 0), 0, 0, "normal", (0.7, 1.3))
    assert (member.sizes, member.other, member.jitter) == ("uniform", 0.5, 0.1)


def test_a_product_of_ones_own_can_be_described():
    recipe = change(Recipe(), {"outliers": "nsa", "outliers.half_width": [0.05, 0.1], "outliers.background": [220, 40]})
    assert recipe.outliers == Nsa(half_width=(0.05, 0.1), background=(220.0, 40.0))


# --- objects of the scene ---


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
        (PRESETS["screw"], False, cv2.NORMAL_CLONE),
        (PRESETS["carpet"], True, cv2.MIXED_CLONE),
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
def test_outliers_are_visible_in_any_shape_of_image(name):
    for channels, height, width in ((3, 96, 96), (1, 96, 96), (3, 32, 80), (1, 80, 32)):
        inliers = parts(3, 96, channels)[0][:, :, :height, :width]
        made = contracts.check_outlier_source(OUTLIERS[name], inliers)
        assert made.images.shape == inliers.shape
        assert int(visible(made, inliers).min()) >= 16


@settings(max_examples=15)
@given(name=st.sampled_from(SOME), level=st.integers(0, 255), side=st.integers(32, 80), seed=st.integers(0, 2**32))
def test_a_blank_image_gets_an_inverted_rectangle(name, level, side, seed):
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


def texture(shape, seed=0):
    return draws(seed).integers(60, 180, (*shape, 3), dtype=np.uint8)


def test_jitter_changes_colours_a_little():
    patch = texture((20, 30))
    changed = [nsa._jittered(patch, 0.1, draws(seed)) for seed in range(5)]
    for one in changed:
        difference = np.abs(one.astype(int) - patch)
        assert one.shape == patch.shape
        assert 0 < difference.mean() < 50
    assert len({one.tobytes() for one in changed}) == 5
    assert np.array_equal(changed[0], nsa._jittered(patch, 0.1, draws(0)))
