"""The published table, thresholds and squares to the pixel, and a rule found on objects but never on textures."""

import os
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import contracts
from firm.data.drawn import draw, stack
from firm.data.folder import read_files
from firm.foreground import RULES, Rule, automatic, foreground, rule_for
from firm.report.masks import draw_masks
from firm.types import FirmError

SPLITS = [Rule(method=method, polarity=side) for method in ("otsu", "triangle") for side in ("bright", "dark")]
RAW = {"close": 0, "open": 0}


def as_images(planes):
    """Grey levels (n, h, w), or colours (n, h, w, 3), as images."""
    pixels = np.clip(np.stack(planes), 0, 255).round().astype(np.uint8)
    return torch.from_numpy(pixels)[:, None] if pixels.ndim == 3 else torch.from_numpy(pixels).permute(0, 3, 1, 2)


def two_levels(mask, low=40, high=200):
    return as_images([np.where(mask, high, low)])


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


@pytest.mark.parametrize(
    ("name", "data", "category"),
    [
        ("mvtec:screw", "mvtec", "screw"),
        ("mvtec:metal-nut", "mvtec", "metal_nut"),
        ("mpdd:bracket_brown", "mpdd", "bracket_brown"),
        ("btad:02", "btad", "02"),
    ],
)
def test_a_published_name_has_its_published_rule(name, data, category):
    assert rule_for(name, contracts.images_of(2)) == RULES[data][category]


@pytest.mark.parametrize("name", ["parts/discs", "mvtec", "mvtec:disc", "own:screw", "cifar10:bird"])
def test_any_other_name_has_the_rule_found_on_its_images(name):
    assert rule_for(name, contracts.images_of(2)) == Rule()
    assert rule_for(name, objects("disc")[0]) == Rule(method="otsu")


@pytest.mark.parametrize(
    ("settings_", "named"),
    [
        ({"method": "mean"}, "ones, otsu, triangle"),
        ({"polarity": "left"}, "bright, dark"),
        ({"channel": "alpha"}, "grey, red, green, blue"),
        ({"close": -1}, "0 or more"),
        ({"open": -2}, "0 or more"),
    ],
)
def test_a_wrong_setting_names_the_right_ones(settings_, named):
    with pytest.raises(FirmError, match=named):
        Rule(**settings_)


# --- thresholds and squares ---


@pytest.mark.parametrize("rule", SPLITS, ids=str)
@pytest.mark.parametrize("side", [32, 64, 128, 256])
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


@pytest.mark.parametrize(
    ("height", "width", "close", "open_", "squares"),
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


@pytest.mark.parametrize(("channel", "number"), [("red", 0), ("green", 1), ("blue", 2)])
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


@pytest.mark.parametrize("rule", [Rule(), *SPLITS], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (2, 2), (5, 3), (3, 300), (40, 17)])
@pytest.mark.parametrize("channels", [1, 3])
def test_any_size_has_a_mask_and_none_is_empty(rule, shape, channels):
    images = contracts.images_of(4, channels, *shape)
    before = images.clone()
    masks = foreground(images, rule)
    assert masks.shape == (4, *shape)
    assert masks.dtype == torch.bool
    assert masks.flatten(1).any(1).all()
    assert torch.equal(images, before)


@pytest.mark.parametrize("rule", SPLITS, ids=str)
@pytest.mark.parametrize("level", [0, 77, 255])
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
    with pytest.raises(FirmError, match="4 channels"):
        foreground(contracts.images_of(1, 4), SPLITS[0])


# --- a rule found on good images ---

SIDE = 64
Y, X = np.mgrid[:SIDE, :SIDE] / SIDE - 0.5  # from the centre
R = np.hypot(Y, X)


def grain(rng, deviation, blur=0.0):
    """Noise of this deviation, smoothed over `blur` pixels."""
    plane = rng.standard_normal((SIDE, SIDE))
    plane = cv2.GaussianBlur(plane, (0, 0), blur) if blur else plane
    return deviation * plane / plane.std()


def disc(x, y, radius):
    return np.hypot(X - x, Y - y) < radius


def near(rng):
    return rng.uniform(-0.1, 0.1)


SHAPES = {
    "disc": lambda rng: disc(near(rng), near(rng), rng.uniform(0.22, 0.26)),
    "large": lambda rng: disc(0, 0, rng.uniform(0.44, 0.47)),
    "small": lambda rng: disc(4 * near(rng), 4 * near(rng), 0.07),
    "off centre": lambda rng: disc(-0.33, 0.3 + near(rng) / 4, 0.12),
    "cut by a side": lambda rng: disc(-0.5, near(rng), 0.3),
    "cut by a corner": lambda rng: disc(-0.45, -0.45, 0.4),
    "from side to side": lambda rng: np.abs(Y - near(rng)) < 0.15,
    "two": lambda rng: disc(-0.22, near(rng), 0.15) | disc(0.22, near(rng), 0.15),
    "four": lambda rng: disc(np.sign(X) * 0.25, np.sign(Y) * 0.25, 0.14),
    "ring": lambda rng: np.abs(R - 0.3) < 0.06,
    "thin": lambda rng: (np.abs(Y - 2 * near(rng) * X) < 0.03) & (np.abs(X) < 0.4),
}


def objects(name, count=8, ground=60, level=170, rough=10):
    """Images of a drawn object with soft edges on a slightly noisy ground, and where it is."""
    rng = np.random.default_rng(sum(map(ord, name)))
    masks = [SHAPES[name](rng) for _ in range(count)]
    planes = [
        cv2.GaussianBlur(np.where(mask, level, ground).astype(float), (0, 0), 0.5)
        + np.where(mask, grain(rng, rough, 1), grain(rng, 4))
        for mask in masks
    ]
    return as_images(planes), np.stack(masks)


def overlap(found, expected):
    found = np.asarray(found)
    return (found & expected).sum() / (found | expected).sum()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("ground", "level", "polarity"), [(60, 170, "bright"), (200, 100, "dark"), (120, 90, "dark")])
def test_an_object_is_found_wherever_it_lies(name, ground, level, polarity):
    images, expected = objects(name, ground=ground, level=level, rough=5)
    rule = automatic(images)
    assert (rule.polarity, rule.channel) == (polarity, "grey")
    assert overlap(foreground(images, rule), expected) > 0.8


def test_a_rough_object_on_a_plain_ground_is_found():
    images, expected = objects("disc", ground=30, level=120, rough=35)
    rule = automatic(images)
    assert rule.polarity == "bright"
    assert overlap(foreground(images, rule), expected) > 0.85


@pytest.mark.parametrize(
    ("colour", "channels"), [((200, 70, 90), "red"), ((95, 100, 220), "blue"), ((75, 130, 75), "red green blue")]
)
def test_an_object_that_only_its_colour_shows_is_found(colour, channels):
    """Its grey is within a few levels of the ground's."""
    rng = np.random.default_rng(1)
    masks = [SHAPES["disc"](rng) for _ in range(8)]
    images = as_images([np.where(mask[..., None], colour, 108) + rng.normal(0, 4, (SIDE, SIDE, 3)) for mask in masks])
    rule = automatic(images)
    assert rule.channel in channels.split()
    assert overlap(foreground(images, rule), np.stack(masks)) > 0.9


@pytest.mark.parametrize(("colour", "channel"), [((172, 165, 150), "grey"), ((220, 120, 110), "red")])
def test_a_colour_is_preferred_to_grey_only_for_clearly_more_contrast(colour, channel):
    rng = np.random.default_rng(2)
    masks = [SHAPES["disc"](rng) for _ in range(8)]
    images = as_images([np.where(mask[..., None], colour, 80) + rng.normal(0, 4, (SIDE, SIDE, 3)) for mask in masks])
    for channels in (channel, "grey"):  # either shows it
        assert overlap(foreground(images, Rule(method="otsu", channel=channels)), np.stack(masks)) > 0.9
    assert automatic(images) == Rule(method="otsu", channel=channel)


def test_grey_images_stored_in_three_channels_need_no_colour():
    images = objects("disc")[0]
    assert automatic(images.expand(-1, 3, -1, -1)) == automatic(images) == Rule(method="otsu")


@given(name=st.sampled_from(list(SHAPES)), shift=st.integers(-25, 45))
@settings(max_examples=25)
def test_brighter_or_darker_light_changes_no_rule(name, shift):
    images = objects(name, count=4)[0].clamp(30, 205)
    shifted = (images.int() + shift).to(torch.uint8)
    rule = automatic(images)
    assert rule.method != "ones"
    assert automatic(shifted) == rule
    assert torch.equal(foreground(shifted, rule), foreground(images, rule))


@pytest.mark.parametrize("name", ["disc", "cut by a side", "two"])
def test_the_negative_has_the_other_polarity(name):
    images = objects(name)[0]
    assert automatic(images) == Rule(method="otsu")
    assert automatic(255 - images) == Rule(method="otsu", polarity="dark")


def wood(rng):
    return 120 + 30 * grain(rng, 1) + cv2.GaussianBlur(grain(rng, 300), (0, 0), sigmaX=1, sigmaY=15)


def scattered(rng):
    plane = np.full((SIDE, SIDE), 170.0)
    for _ in range(rng.poisson(3)):
        plane[disc(*rng.uniform(-0.5, 0.5, 2), 0.05)] = 80
    return plane + grain(rng, 4)


def stripes(rng, period):
    return 128 + 60 * np.sign(np.sin(2 * np.pi * (SIDE / period * X + rng.random()))) + grain(rng, 5, 1)


def checks(rng, period):
    waves = [np.sin(2 * np.pi * (SIDE / period * axis + rng.random())) for axis in (X, Y)]
    return 128 + 60 * np.sign(waves[0] * waves[1]) + grain(rng, 5, 1)


TEXTURES = {
    "fine grain": lambda rng: 128 + grain(rng, 15),
    "grain": lambda rng: 128 + grain(rng, 20, 1),
    "coarse grain": lambda rng: 128 + grain(rng, 25, 4),
    "clouds": lambda rng: 128 + grain(rng, 25, 12),
    "fine marble": lambda rng: np.where(grain(rng, 1, 1) > 0, 170, 80) + grain(rng, 5),
    "marble": lambda rng: np.where(grain(rng, 1, 3) > 0, 170, 80) + grain(rng, 5),
    "coarse marble": lambda rng: np.where(grain(rng, 1, 8) > 0, 170, 80) + grain(rng, 5),
    "sparse marble": lambda rng: np.where(grain(rng, 1, 3) > 1.3, 170, 80) + grain(rng, 5),
    "wood": wood,
    "scattered": scattered,
    "fine stripes": lambda rng: stripes(rng, 4),
    "stripes": lambda rng: stripes(rng, 16),
    "wide stripes": lambda rng: stripes(rng, 25),
    "fine checks": lambda rng: checks(rng, 8),
    "checks": lambda rng: checks(rng, 25),
    "mesh": lambda rng: np.where(((X * SIDE) % 9 < 3) | ((Y * SIDE) % 9 < 3), 70, 180) + grain(rng, 5),
    "perforated": lambda rng: np.where(np.hypot((X * SIDE) % 12 - 6, (Y * SIDE) % 12 - 6) < 3, 60, 180) + grain(rng, 4),
    "vignette": lambda rng: 180 * (1 - R**2) * (1 + grain(rng, 0.08)),
    "strong vignette": lambda rng: 200 * (1 - 1.8 * R**2) * (1 + grain(rng, 0.08, 1)),
    "smooth vignette": lambda rng: 200 * (1 - 1.5 * R**2) + grain(rng, 1),
    "dark centre": lambda rng: 80 + 250 * R**2 + grain(rng, 4, 1),
    "light from a side": lambda rng: 128 + 120 * X + grain(rng, 4),
    "lamp": lambda rng: 80 + 150 * np.exp(-((X - near(rng)) ** 2 + (Y - near(rng)) ** 2) / 0.08) + grain(rng, 2),
    "nothing": lambda rng: np.full((SIDE, SIDE), 90),
}


@pytest.mark.parametrize("name", TEXTURES)
def test_a_texture_has_no_object(name):
    rng = np.random.default_rng(sum(map(ord, name)))
    images = as_images([TEXTURES[name](rng) for _ in range(12)])
    assert automatic(images) == Rule()
    assert automatic(255 - images) == Rule()


def plain(masks):
    rng = np.random.default_rng(0)
    return as_images([np.where(mask, 180, 60) + grain(rng, 4) for mask in masks])


@pytest.mark.parametrize(
    ("masks", "why"),
    [
        ([np.maximum(abs(X), abs(Y)) < 0.485] * 4, "nothing is left of the background"),
        ([disc(0, 0, 0.03)] * 4, "a speck is no object"),
        ([disc(0, 0, radius) for radius in (0.06, 0.1, 0.2, 0.4)], "good parts are of one size"),
        ([np.minimum(abs(X), abs(Y)) < 0.15] * 4, "an object leaves two sides of the image alone"),
        ([(np.hypot((X * 32) % 4 - 2, (Y * 32) % 4 - 2) < 1.2) & (abs(X) < 0.37) & (abs(Y) < 0.37)] * 4, "too many"),
    ],
)
def test_each_demand_on_an_object_counts(masks, why):
    assert automatic(plain(masks)) == Rule(), why
    assert automatic(plain([disc(0, 0, 0.2)] * 4)) == Rule(method="otsu")  # that such images are not refused anyway


def test_the_images_looked_at_are_spread_over_all():
    parts, texture = objects("disc", count=80)[0], contracts.images_of(240, 1, SIDE)
    assert automatic(parts) == Rule(method="otsu")
    assert automatic(torch.cat([parts, texture])) == Rule()


@pytest.mark.parametrize("shape", [(300, 300), (400, 200), (48, 160)])
def test_large_and_long_images_are_looked_at_too(shape):
    images = objects("disc", count=3)[0]
    large = torch.nn.functional.interpolate(images.float(), shape, mode="bilinear").to(torch.uint8)
    rule = automatic(large)
    assert (rule.polarity, rule.channel) == ("bright", "grey")
    assert 0.1 < foreground(large, rule).float().mean() < 0.3


def test_large_images_are_searched_at_the_size_the_squares_are_made_for(monkeypatch):
    looked = []
    monkeypatch.setattr("firm.foreground._look", lambda image, rule: looked.append(tuple(image.shape)) or (0,) * 5)
    assert automatic(contracts.images_of(2, 3, 300, 500)) == Rule()
    assert set(looked) == {(3, 256, 256)}


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (2, 2), (5, 3), (3, 300)])
def test_tiny_images_do_not_break_the_search(shape):
    assert isinstance(automatic(contracts.images_of(3, 3, *shape)), Rule)


@pytest.mark.parametrize(
    ("product", "polarity"),
    [("plate", "bright"), ("weave", None), ("label", None)],  # the band of the label is as dark as what is beside it
)
def test_drawn_parts(product, polarity):
    parts = [draw(product, index=index, size=64) for index in range(6)]
    images = stack(parts, 64)
    rule = automatic(images)
    if polarity is None:
        assert rule == Rule()
        return
    assert (rule.polarity, rule.channel) == (polarity, "grey")
    masks = foreground(images, rule)
    assert 0.38 < masks.float().mean() < 0.55
    assert masks[:, :, 0].float().mean() < 0.05  # a light speck of the ground may be taken for the part


DATA = Path(os.environ.get("FIRM_DATA", "/nowhere")).expanduser()


def real(name):
    folder = DATA / name / "train" / "good"
    if not folder.is_dir():
        pytest.skip(f"needs {name} in the folder named by FIRM_DATA")
    return read_files(sorted(folder.iterdir())[::12], 128)[0]


def test_real_screws_lie_dark_on_a_bright_ground():
    images = real("mvtec_screw")
    rule = automatic(images)
    assert rule == Rule(method="otsu", polarity="dark") == RULES["mvtec"]["screw"]
    fraction = foreground(images, rule).float().mean(dim=(1, 2))
    assert fraction.min() > 0.09
    assert fraction.max() < 0.2


def test_real_tiles_fill_their_images():
    assert automatic(real("magnetic_tile")) == Rule()


# --- the picture ---


@pytest.mark.parametrize(("count", "channels", "shown"), [(1, 1, 1), (30, 3, 12)])
def test_the_contact_sheet_is_a_picture_of_up_to_twelve(tmp_path, monkeypatch, count, channels, shown):
    drawn = []
    monkeypatch.setattr("firm.report.masks._image", lambda place, image, *_: drawn.append(image))
    images, path = contracts.images_of(count, channels, 24, 20), tmp_path / "new" / "masks.png"
    rule = SPLITS[0]
    draw_masks(images, foreground(images, rule), rule, path, "noise")
    assert len(drawn) == shown
    np.testing.assert_array_equal(drawn[-1], images[-1].permute(1, 2, 0))  # to the last of all
    assert [file.name for file in path.parent.iterdir()] == ["masks.png"]


@pytest.mark.parametrize("rule", [Rule(), SPLITS[1], RULES["mpdd"]["tubes"]], ids=str)
@pytest.mark.parametrize("channels", [1, 3])
def test_the_contact_sheet_dims_the_background(tmp_path, rule, channels):
    images = objects("disc", count=2, ground=250, level=20)[0].expand(-1, channels, -1, -1)
    masks, path = foreground(images, rule), tmp_path / "masks.png"
    path.write_bytes(b"an old one")
    draw_masks(images, masks, rule, path, "discs")
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert 300 < picture.width < 1500
        assert 200 < picture.height < 1500
        pixels = np.asarray(picture.convert("L"), float)
    dimmed = 250 * 0.35
    seen = (np.abs(pixels - dimmed) < 15).mean()
    assert (seen > 0.1) == (rule == SPLITS[1])  # dark is the object: the bright ground is dimmed, else it is not


def test_the_contact_sheet_says_the_rule_and_the_fraction(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("matplotlib.figure.Figure.suptitle", lambda figure, text, **_: said.append(text))
    images = contracts.images_of(4, 3, 16)
    masks = torch.zeros(4, 16, 16, dtype=torch.bool)
    masks[0] = True
    draw_masks(images, masks, RULES["mpdd"]["tubes"], tmp_path / "a.png", "tubes")
    draw_masks(images, masks, Rule(), tmp_path / "b.png", "cloth")
    assert said == [
        "tubes\notsu on blue, bright is foreground, close 6\nforeground: 25.0% of the pixels",
        "cloth\nno rule: all of the image is foreground\nforeground: 25.0% of the pixels",
    ]


def test_no_images_make_no_contact_sheet(tmp_path):
    with pytest.raises(FirmError, match="at least one"):
        draw_masks(contracts.images_of(0), torch.zeros(0, 16, 16, dtype=torch.bool), Rule(), tmp_path / "a.png", "none")
    assert not (tmp_path / "a.png").exists()
