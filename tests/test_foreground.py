"""The published table of rules; thresholds and squares to the pixel."""

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import contracts
from cases import each
from firm.errors import ImageError, SettingError
from firm.images.foreground import RULES, Rule, automatic, foreground, rule_for
from shapes import as_images, objects, two_levels

SPLITS = [Rule(method=method, polarity=side) for method in ("otsu", "triangle") for side in ("bright", "dark")]
RAW = {"close": 0, "open": 0}


# --- the table ---

# data set, classes, method, polarity, channel, close, open: as published
TABLE = [
    ("mvtec", "carpet leather tile wood cable transistor", "ones", "bright", "grey", 6, 6),
    ("mvtec", "pill", "otsu", "bright", "grey", 6, 6),
    ("mvtec", "hazelnut metal_nut toothbrush", "triangle", "bright", "grey", 6, 6),
    ("mvtec", "bottle capsule grid screw zipper", "otsu", "dark", "grey", 6, 6),
    ("visa", "capsules", "ones", "bright", "grey", 6, 6),
    ("visa", "pcb1 pcb2 pcb3 pcb4", "triangle", "bright", "blue", 8, 3),
    ("visa", "candle cashew chewinggum fryum macaroni1 macaroni2 pipe_fryum", "otsu", "bright", "grey", 3, 3),
    ("mpdd", "bracket_black bracket_brown connector", "otsu", "dark", "green", 6, 0),
    ("mpdd", "bracket_white tubes", "otsu", "bright", "blue", 6, 0),
    ("mpdd", "metal_plate", "otsu", "dark", "grey", 6, 0),
    ("btad", "02", "ones", "bright", "grey", 6, 6),
    ("btad", "01 03", "otsu", "bright", "grey", 15, 6),
]


def test_the_table_is_the_published_one():
    found = {
        (data, name): (rule.method, rule.polarity, rule.channel, rule.close, rule.open)
        for data, rules in RULES.items()
        for name, rule in rules.items()
    }
    assert found == {(data, name): tuple(rule) for data, names, *rule in TABLE for name in names.split()}
    assert {data: len(rules) for data, rules in RULES.items()} == {"mvtec": 15, "visa": 12, "mpdd": 6, "btad": 3}


@each(
    "name, data, category",
    [
        ("mvtec:screw", "mvtec", "screw"),
        ("mvtec:metal-nut", "mvtec", "metal_nut"),
        ("mpdd:bracket_brown", "mpdd", "bracket_brown"),
        ("btad:02", "btad", "02"),
    ],
)
def test_a_published_name_has_its_published_rule(name, data, category):
    assert rule_for(name, contracts.images_of(2)) == RULES[data][category]


@each("name", ["parts/discs", "mvtec", "mvtec:disc", "own:screw", "cifar10:bird"])
def test_any_other_name_has_the_rule_found_on_its_images(name):
    assert rule_for(name, contracts.images_of(2)) == Rule()
    assert rule_for(name, objects("disc")[0]) == Rule(method="otsu")


@each("name, value", [("method", "mean"), ("polarity", "left"), ("channel", "alpha"), ("close", -1), ("open", -2)])
def test_a_wrong_setting_is_named(name, value):
    with pytest.raises(SettingError, match=rf"foreground\.{name} .*{value}"):
        Rule(**{name: value})


# --- thresholds and squares ---


@each("rule", SPLITS)
@each("side", [32, 64, 256])
def test_a_rectangle_is_found_to_the_pixel_without_its_dirt(rule, side):
    """Specks and pinholes narrower than the square vanish; the rectangle stays where it is."""
    unit = side // 32
    inside = np.zeros((side, side), bool)
    inside[8 * unit : 20 * unit, 6 * unit : 25 * unit] = True
    dirty = inside.copy()
    if side > 32:  # there the square is one pixel: nothing is narrower
        dirty[12 * unit, 12 * unit] = False
        dirty[3 * unit, 28 * unit] = True
    images = two_levels(dirty if rule.polarity == "bright" else ~dirty)
    np.testing.assert_array_equal(foreground(images, rule)[0], inside)


def closed(mask, width):
    """Everything but the squares, reaching over the border or not, that fit beside the mask."""
    return ~opened(~mask, width)


def opened(mask, width):
    """All the squares, anchored in the image, whose part in the image fits into the mask."""
    result = np.zeros_like(mask)
    for y in range(mask.shape[0]):
        for x in range(mask.shape[1]):
            top, left = y - width // 2, x - width // 2
            square = (slice(max(0, top), top + width), slice(max(0, left), left + width))
            if mask[square].all():
                result[square] = True
    return result


@each(
    "height, width, close, open_, squares",
    [
        (64, 64, 8, 0, (2, 1)),
        (64, 64, 0, 8, (1, 2)),
        (64, 64, 12, 8, (3, 2)),
        (64, 90, 16, 12, (4, 3)),  # the shorter side counts
        (90, 64, 8, 16, (2, 4)),
        (32, 40, 6, 6, (1, 1)),
        (128, 128, 8, 7, (4, 4)),  # 3.5 is nearer to 4 than to nothing
    ],
)
def test_closing_then_opening_equal_the_loops(height, width, close, open_, squares):
    seed = np.random.default_rng(height + close)
    mask = cv2.GaussianBlur(seed.standard_normal((height, width)), (0, 0), 1.2) > 0.05
    rule = Rule(method="otsu", close=close, open=open_)
    found = foreground(two_levels(mask), rule)[0].numpy()
    np.testing.assert_array_equal(found, opened(closed(mask, squares[0]), squares[1]))


@given(
    low=st.integers(10, 90),
    gap=st.integers(60, 120),
    top=st.integers(0, 20),
    left=st.integers(0, 30),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_inverting_the_image_swaps_the_polarity(low, gap, top, left, seed):
    plane = np.random.default_rng(seed).normal(low, 4, (48, 64))
    plane[top : top + 20, left : left + 25] += gap
    image = as_images([plane])
    for one, other in (("bright", "dark"), ("dark", "bright")):
        expected = foreground(image, Rule(method="otsu", polarity=one))
        assert torch.equal(foreground(255 - image, Rule(method="otsu", polarity=other)), expected)


def test_bright_and_dark_share_out_the_pixels():
    images = contracts.images_of(3, 1, 40)
    for method in ("otsu", "triangle"):
        bright, dark = (foreground(images, Rule(method=method, polarity=side, **RAW)) for side in ("bright", "dark"))
        assert torch.equal(bright, ~dark)


def test_otsu_cuts_between_the_masses_and_triangle_at_the_foot_of_the_peak():
    """A dim object beside a dark ground and a bright one: Otsu takes the bright, triangle both."""
    plane = np.random.default_rng(0).normal(30, 3, (64, 64))
    plane[10:30, 10:50], plane[40:50, 10:50] = np.linspace(200, 240, 40), np.linspace(70, 110, 40)
    images = as_images([plane])
    bright, both = np.zeros((2, 64, 64), bool)
    bright[10:30, 10:50] = both[10:30, 10:50] = both[40:50, 10:50] = True
    np.testing.assert_array_equal(foreground(images, Rule(method="otsu", **RAW))[0], bright)
    np.testing.assert_array_equal(foreground(images, Rule(method="triangle", **RAW))[0], both)


@each("channel, number", [("red", 0), ("green", 1), ("blue", 2)])
def test_a_rule_looks_at_its_own_channel(channel, number):
    inside = np.zeros((32, 32), bool)
    inside[8:20, 8:24] = True
    pixels = np.stack([np.where(inside, 60, 200)] * 3, axis=-1)  # dark, but in one channel bright
    pixels[..., number] = np.where(inside, 200, 60)
    found = foreground(as_images([pixels]), Rule(method="otsu", channel=channel))
    np.testing.assert_array_equal(found[0], inside)


def test_grey_weighs_the_colours_as_the_eye_does():
    inside = np.zeros((32, 32), bool)
    inside[8:20, 8:24] = True
    pixels = np.where(inside[..., None], [0, 0, 255], [0, 100, 0])  # luminance 29 on 59, mean 85 on 33
    found = foreground(as_images([pixels]), Rule(method="otsu", polarity="dark"))
    np.testing.assert_array_equal(found[0], inside)


def test_a_grey_image_has_one_channel_whatever_the_rule_says():
    images = objects("disc")[0][:2]
    expected = foreground(images, Rule(method="otsu"))
    for channel in ("red", "green", "blue"):
        assert torch.equal(foreground(images, Rule(method="otsu", channel=channel)), expected)
    assert torch.equal(foreground(images.expand(-1, 3, -1, -1), Rule(method="otsu")), expected)


def test_each_image_has_its_own_threshold():
    inside = objects("disc")[1][0]
    images = torch.cat([two_levels(inside, 10, 60), two_levels(inside, 120, 250)])
    masks = foreground(images, Rule(method="otsu", **RAW))
    assert torch.equal(masks[0], masks[1])
    np.testing.assert_array_equal(masks[0], inside)


@each("rule", [Rule(), SPLITS[0], SPLITS[3]])
@each("shape", [(1, 1), (1, 7), (2, 2), (3, 300)])
@each("channels", [1, 3])
def test_any_size_has_a_mask_and_none_is_empty(rule, shape, channels):
    images = contracts.images_of(4, channels, *shape)
    before = images.clone()
    masks = foreground(images, rule)
    assert masks.shape == (4, *shape)
    assert masks.dtype == torch.bool
    assert masks.flatten(1).any(1).all()
    assert torch.equal(images, before)


@each("rule", SPLITS)
@each("level", [0, 77, 255])
def test_a_constant_image_is_all_object(rule, level):
    assert foreground(torch.full((2, 3, 20, 30), level, dtype=torch.uint8), rule).all()


def test_a_mask_that_the_opening_empties_is_all_object_for_that_image_alone():
    speck, disc = np.zeros((64, 64), bool), objects("disc")[1][0]
    speck[5, 5] = True
    masks = foreground(torch.cat([two_levels(speck), two_levels(disc)]), Rule(method="otsu"))
    assert masks[0].all()
    assert 0.1 < masks[1].float().mean() < 0.4


def test_no_images_have_no_masks_and_no_rule():
    none = torch.empty(0, 3, 16, 16, dtype=torch.uint8)
    assert foreground(none, SPLITS[0]).shape == (0, 16, 16)
    assert automatic(none) == Rule()


def test_other_than_grey_or_rgb_is_refused():
    with pytest.raises(ImageError, match="4 channels"):
        foreground(contracts.images_of(1, 4), SPLITS[0])
