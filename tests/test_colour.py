"""Colour changes against Pillow and the standard library."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import contracts
import oracles
from firm.images import colour
from firm.images.colour import Jitter, jittered

OPERATIONS = {
    "brightness": colour.brightness,
    "contrast": colour.contrast,
    "saturation": colour.saturation,
    "hue": colour.turned_hue,
}
LEVEL = 1.5 / 255  # Pillow rounds to whole grey levels


def floats(n=4, channels=3, side=8, seed=0):
    return contracts.images_of(n, channels, side, seed=seed).float() / 255


def as_pillow(image):
    """(3, h, w) floats in 0..1 as (h, w, 3) uint8."""
    return (image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()


def as_tensor(image):
    """(h, w, 3) floats in 0..255 as (3, h, w) in 0..1."""
    return torch.from_numpy(image / 255).float().permute(2, 0, 1)


def applied(image, what, amount):
    oracle = oracles.hue_turned if what == "hue" else lambda x, a: oracles.enhanced(x, what, a)
    return as_tensor(oracle(as_pillow(image), amount))


@pytest.mark.parametrize("what", ["brightness", "contrast", "saturation"])
def test_factors_mean_what_they_mean_to_pillow(what):
    images = floats(seed=1)
    for factor in (0.0, 0.6, 1.0, 1.4, 3.0):
        found = OPERATIONS[what](images, torch.full((len(images),), factor))
        for image, result in zip(images, found, strict=True):
            torch.testing.assert_close(result, applied(image, what, factor), rtol=0, atol=LEVEL)


@settings(max_examples=60)
@given(turn=st.floats(-0.5, 0.5), seed=st.integers(0, 2**32))
def test_hue_is_turned_as_the_standard_library_turns_it(turn, seed):
    image = floats(1, side=3, seed=seed)
    found = colour.turned_hue(image, torch.tensor([turn]))
    torch.testing.assert_close(found[0], applied(image[0], "hue", turn), rtol=0, atol=1e-5)


@given(pixel=st.tuples(*[st.sampled_from([0.0, 0.5, 1.0])] * 3), turn=st.sampled_from([0, 1 / 3, -1 / 3, 0.5]))
def test_hue_of_greys_and_pure_colours(pixel, turn):
    image = torch.tensor(pixel).view(1, 3, 1, 1)
    found = colour.turned_hue(image, torch.tensor([turn])).flatten()
    if len(set(pixel)) == 1 or turn == 0:
        torch.testing.assert_close(found, torch.tensor(pixel), rtol=0, atol=1e-6)
    if abs(turn) == 1 / 3:  # a third of the circle exchanges the channels
        torch.testing.assert_close(found, torch.tensor(pixel).roll(1 if turn > 0 else -1), rtol=0, atol=1e-6)


def test_strength_is_per_image():
    images = floats(3)
    factors = torch.tensor([0.5, 1.0, 1.5])
    for operation in OPERATIONS.values():
        amounts = factors - 1 if operation is colour.turned_hue else factors
        alone = torch.cat([operation(images[i : i + 1], amounts[i : i + 1]) for i in range(3)])
        torch.testing.assert_close(operation(images, amounts), alone)


def test_additive_brightness_shifts():
    found = colour.shifted_brightness(torch.tensor([0.1, 0.5, 0.9]).view(1, 1, 1, 3), torch.tensor([1.3]))
    torch.testing.assert_close(found.flatten(), torch.tensor([0.4, 0.8, 1.0]))


def test_grey_is_the_usual_luminance():
    assert sum(colour.LUMA) == pytest.approx(1)
    pure = torch.eye(3).view(3, 3, 1, 1)
    torch.testing.assert_close(colour.grey(pure).flatten(), torch.tensor([0.299, 0.587, 0.114]))
    single = floats(channels=1)
    assert torch.equal(colour.grey(single), single)


def test_saturation_and_hue_leave_one_channel_alone():
    single = floats(channels=1)
    assert torch.equal(colour.saturation(single, torch.zeros(4)), single)
    assert torch.equal(colour.turned_hue(single, torch.full((4,), 0.3)), single)
    found = jittered(single, Jitter(brightness=0, contrast=0), rng=contracts.generator())
    assert torch.equal(found, single)


def replayed(image, number, jitter, rng_seed, n):
    """The four changes of one image of a batch, one after the other, by the oracles."""
    rng = contracts.generator(rng_seed)
    strength = torch.rand(4, n, generator=rng) * 2 - 1
    order = torch.rand(n, 4, generator=rng).argsort(dim=1)
    names = ("brightness", "contrast", "saturation", "hue")
    for which in order[number].tolist():
        amount = float(strength[which, number]) * getattr(jitter, names[which])
        image = applied(image, names[which], amount if which == 3 else 1 + amount)
    return image


def test_jitter_is_the_four_changes_in_an_order_of_its_own_for_every_image():
    images = floats(12, side=6, seed=3)
    jitter = Jitter()
    found = jittered(images, jitter, rng=contracts.generator(5))
    for number, image in enumerate(images):
        # Pillow rounds down to whole levels in each step, and the hue of a dark pixel magnifies that
        expected = replayed(image, number, jitter, 5, len(images))
        assert (found[number] - expected).abs().mean() < 2 * LEVEL
        assert (found[number] - expected).abs().max() < 12 * LEVEL


@pytest.mark.parametrize(("what", "limit"), [("brightness", 0.1), ("contrast", 0.4), ("saturation", 0.4)])
def test_factors_fill_the_range_and_stay_in_it(what, limit):
    """A factor is read back from the image: the change is linear in it."""
    n = 400
    image = torch.tensor([[0.3, 0.4], [0.5, 0.4], [0.4, 0.4]]).view(1, 3, 1, 2).repeat(n, 1, 1, 1)
    silent = dict.fromkeys(("brightness", "contrast", "saturation", "hue"), 0.0)
    found = jittered(image, Jitter(**(silent | {what: limit})), rng=contracts.generator())
    doubled = OPERATIONS[what](image[:1], torch.tensor([2.0])) - image[:1]
    factors = 1 + (found - image)[:, 0, 0, 0] / doubled[0, 0, 0, 0]
    assert float(factors.min()) >= 1 - limit - 1e-4
    assert float(factors.max()) <= 1 + limit + 1e-4
    assert float(factors.mean()) == pytest.approx(1, abs=0.1 * limit)
    assert float(factors.std()) == pytest.approx(limit / math.sqrt(3), rel=0.1)


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_jitter_changes_so_many_images(probability):
    images = floats(300, side=4)
    before = images.clone()
    found = jittered(images, Jitter(probability=probability), rng=contracts.generator())
    assert torch.equal(images, before)
    changed = float((found != images).flatten(1).any(1).float().mean())
    assert changed == pytest.approx(probability, abs=0.09)
