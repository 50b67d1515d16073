"""A rule is found on objects wherever they lie, and never on textures."""

import os
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import contracts
from cases import each
from firm.data.folder import read_files
from firm.drawn.render import draw, stack
from firm.images.foreground import RULES, Rule, automatic, foreground
from shapes import SHAPES, SIDE, R, X, Y, as_images, disc, grain, near, objects, overlap


@each("name", SHAPES)
@each("ground, level, polarity", [(60, 170, "bright"), (120, 90, "dark")])
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


@each("colour, channels", [((200, 70, 90), "red"), ((95, 100, 220), "blue"), ((75, 130, 75), "red green blue")])
def test_an_object_that_only_its_colour_shows_is_found(colour, channels):
    """Its grey is within a few levels of the ground's."""
    rng = np.random.default_rng(1)
    masks = [SHAPES["disc"](rng) for _ in range(8)]
    images = as_images([np.where(mask[..., None], colour, 108) + rng.normal(0, 4, (SIDE, SIDE, 3)) for mask in masks])
    rule = automatic(images)
    assert rule.channel in channels.split()
    assert overlap(foreground(images, rule), np.stack(masks)) > 0.9


@each("colour, channel", [((172, 165, 150), "grey"), ((220, 120, 110), "red")])
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


@each("name", ["disc", "cut by a side"])
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


@each("name", TEXTURES)
def test_a_texture_has_no_object(name):
    rng = np.random.default_rng(sum(map(ord, name)))
    images = as_images([TEXTURES[name](rng) for _ in range(12)])
    assert automatic(images) == Rule()
    assert automatic(255 - images) == Rule()


def plain(masks):
    rng = np.random.default_rng(0)
    return as_images([np.where(mask, 180, 60) + grain(rng, 4) for mask in masks])


@each(
    "masks, why",
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


@each("shape", [(400, 200), (48, 160)])
def test_large_and_long_images_are_looked_at_too(shape):
    images = objects("disc", count=3)[0]
    large = torch.nn.functional.interpolate(images.float(), shape, mode="bilinear").to(torch.uint8)
    rule = automatic(large)
    assert (rule.polarity, rule.channel) == ("bright", "grey")
    assert 0.1 < foreground(large, rule).float().mean() < 0.3


def test_large_images_are_searched_at_the_size_the_squares_are_made_for(monkeypatch):
    looked = []
    monkeypatch.setattr(
        "firm.images.foreground._measures", lambda image, rule: looked.append(tuple(image.shape)) or (0,) * 5
    )
    assert automatic(contracts.images_of(2, 3, 300, 500)) == Rule()
    assert set(looked) == {(3, 256, 256)}


@each("shape", [(1, 1), (1, 7), (2, 2), (3, 300)])
def test_tiny_images_do_not_break_the_search(shape):
    assert isinstance(automatic(contracts.images_of(3, 3, *shape)), Rule)


@each(
    "product, polarity",
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
