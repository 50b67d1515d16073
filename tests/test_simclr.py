"""Colour changes against Pillow and the standard library, crops and blur against loops, and what every view keeps."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import contracts
import oracles
from firm import colour
from firm.colour import Jitter, jittered
from firm.types import FirmError
from firm.views import VIEWS, Augment, PatchPairs
from firm.views.augment import crop

OPERATIONS = {
    "brightness": colour.brightness,
    "contrast": colour.contrast,
    "saturation": colour.saturation,
    "hue": colour.turned_hue,
}
LEVEL = 1.5 / 255  # Pillow rounds to whole grey levels
PLAIN = Jitter(probability=0)
UNTOUCHED = Augment(crop=(1.0, 1.0), jitter=PLAIN, blur=0.0)


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


# --- colour ---


@pytest.mark.parametrize("what", ["brightness", "contrast", "saturation"])
@pytest.mark.parametrize("factor", [0.0, 0.6, 1.0, 1.4, 3.0])
def test_factors_mean_what_they_mean_to_pillow(what, factor):
    images = floats(seed=1)
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


@pytest.mark.parametrize("what", ["brightness", "contrast", "saturation"])
@pytest.mark.parametrize("limit", [0.1, 0.4])
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


# --- crop, flip and blur ---


@settings(max_examples=40)
@given(data=st.data())
def test_a_window_is_the_loops(data):
    height, width, size = (data.draw(st.integers(2, 9)) for _ in range(3))
    tall, wide = data.draw(st.integers(1, height)), data.draw(st.integers(1, width))
    top, left = data.draw(st.integers(0, height - tall)), data.draw(st.integers(0, width - wide))
    image = torch.rand(2, height, width, generator=contracts.generator(data.draw(st.integers(0, 99))))
    where = [torch.tensor([float(value)]) for value in (top, left, tall, wide)]
    expected = oracles.window(image.double().numpy(), top, left, tall, wide, size)
    np.testing.assert_allclose(crop(image[None], *where, size)[0].numpy(), expected, atol=1e-5)
    mirrored = crop(image[None], *where, size, torch.tensor([-1.0]))[0].numpy()
    np.testing.assert_allclose(mirrored, expected[..., ::-1], atol=1e-5)


def test_the_whole_image_is_itself():
    images = contracts.images_of(5, height=11, width=7)
    zero, tall, wide = torch.zeros(5), torch.full((5,), 11.0), torch.full((5,), 7.0)
    square = crop(contracts.images_of(5, height=9).float(), zero, zero, zero + 9, zero + 9, 9)
    torch.testing.assert_close(square, contracts.images_of(5, height=9).float(), rtol=0, atol=1e-3)
    first, second = UNTOUCHED(contracts.images_of(3, height=9), 9, rng=contracts.generator())
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(first, contracts.images_of(3, height=9) / 255, rtol=0, atol=1e-5)
    assert crop(images.float(), zero, zero, tall, wide, 16).shape == (5, 3, 16, 16)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("views", [Augment(jitter=PLAIN), Augment(jitter=PLAIN, aspect=(0.5, 2.0), flip=0.5)])
def test_a_constant_image_stays_constant(channels, views):
    images = torch.full((8, channels, 12, 12), 77, dtype=torch.uint8)
    for view in views(images, 10, rng=contracts.generator()):
        torch.testing.assert_close(view, torch.full_like(view, 77 / 255), rtol=0, atol=1e-6)


def seen_windows(views, n, height, width):
    """Top, left, height and width of the windows drawn, read from a ramp: what a view shows of it is where it was."""
    ramp = (
        torch.stack(torch.meshgrid(torch.arange(height).float(), torch.arange(width).float(), indexing="ij"))
        + torch.tensor([0.5, 0.5])[:, None, None]
    )
    size = 64
    shown = views._cropped(ramp.expand(n, -1, -1, -1), size, contracts.generator())
    inner = slice(size // 4, 3 * size // 4)  # clear of the repeated edges
    row, column = shown[:, 0, inner, 0], shown[:, 1, 0, inner]
    steps = size // 2 - 1
    tall = (row[:, -1] - row[:, 0]) / steps * size
    wide = (column[:, -1] - column[:, 0]) / steps * size
    top = row.mean(1) - tall / 2
    left = column.mean(1) - wide.abs() / 2
    return top, left, tall, wide


@pytest.mark.parametrize("aspect", [(1.0, 1.0), (3 / 4, 4 / 3)])
def test_windows_lie_inside_the_image(aspect):
    top, left, tall, wide = seen_windows(Augment(aspect=aspect, flip=0.5), 500, 32, 24)
    wide = wide.abs()
    for low, extent, limit in ((top, tall, 32), (left, wide, 24)):
        assert float(low.min()) > -1e-3
        assert float((low + extent).max()) < limit + 1e-3
        torch.testing.assert_close(low, low.round(), rtol=0, atol=1e-3)  # whole pixels
        torch.testing.assert_close(extent, extent.round(), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("by", "crop_range"), [("area", (0.25, 1.0)), ("side", (0.5, 1.0))])
def test_fractions_are_uniform_in_area_or_side(by, crop_range):
    _, _, tall, wide = seen_windows(Augment(crop=crop_range, crop_by=by), 2000, 64, 64)
    torch.testing.assert_close(tall, wide, rtol=0, atol=1e-3)
    fraction = (tall / 64).square() if by == "area" else tall / 64
    wanted = torch.linspace(*crop_range, len(fraction))
    assert float((fraction.sort().values - wanted).abs().max()) < 0.05


def test_places_are_uniform():
    top, left, tall, _ = seen_windows(Augment(), 2000, 64, 64)
    for low in (top, left):
        within = torch.rand(len(low), generator=contracts.generator(1))  # whole pixels made continuous
        place = ((low + within) / (64 - tall + 1)).sort().values
        assert float((place - torch.linspace(0, 1, len(place))).abs().max()) < 0.045


@pytest.mark.parametrize("flip", [0.0, 0.5, 1.0])
def test_so_many_are_mirrored(flip):
    _, _, tall, wide = seen_windows(Augment(flip=flip), 600, 32, 32)
    assert (tall > 0).all()  # never upside down
    assert float((wide < 0).float().mean()) == pytest.approx(flip, abs=0.07)


@pytest.mark.parametrize("sigma", [0.1, 0.7, 2.0])
@pytest.mark.parametrize("channels", [1, 3])
def test_blur_is_the_loops(sigma, channels):
    images = floats(2, channels, 6)
    found = Augment(blur=1.0, sigma=(sigma, sigma))._blurred(images, contracts.generator())
    for image, result in zip(images, found, strict=True):
        np.testing.assert_allclose(result.numpy(), oracles.blurred(image.double().numpy(), sigma), atol=1e-6)


def test_so_many_are_blurred():
    images = floats(400, 1, 4)
    found = Augment(blur=0.75)._blurred(images, contracts.generator())
    assert float((found != images).flatten(1).any(1).float().mean()) == pytest.approx(0.75, abs=0.07)
    single_pixel = floats(2, 3, 1)
    assert torch.equal(Augment(blur=1.0)._blurred(single_pixel, contracts.generator()), single_pixel)


def test_so_many_are_grey():
    first, _ = Augment(crop=(1.0, 1.0), jitter=PLAIN, blur=0.0, grey=0.2)(
        contracts.images_of(500, height=4), 4, rng=contracts.generator()
    )
    is_grey = (first.amax(1) - first.amin(1)).flatten(1).amax(1) < 1e-5
    assert float(is_grey.float().mean()) == pytest.approx(0.2, abs=0.06)


# --- the family ---


# patches have a size of their own, and keep the contract in test_patches
OF_WHOLE_IMAGES = {name: views for name, views in VIEWS.items() if not isinstance(views, PatchPairs)}


@pytest.mark.parametrize("views", OF_WHOLE_IMAGES.values(), ids=OF_WHOLE_IMAGES)
@pytest.mark.parametrize(("channels", "height", "size"), [(3, 16, 16), (1, 14, 16), (3, 12, 20)])
def test_every_member_keeps_the_contract(views, channels, height, size):
    contracts.check_views(views, contracts.images_of(6, channels, height), size)


def test_one_channel_and_its_three_copies_are_seen_alike():
    """Hue and saturation do nothing to a grey image, so colour outliers may stand beside grey inliers."""
    grey = contracts.images_of(6, 1, 12)
    single, _ = VIEWS["simclr"](grey, 12, rng=contracts.generator())
    triple, _ = VIEWS["simclr"](grey.expand(-1, 3, -1, -1), 12, rng=contracts.generator())
    torch.testing.assert_close(triple, single.expand(-1, 3, -1, -1), rtol=0, atol=1e-5)


def test_published_parameters():
    assert VIEWS["simclr"] == Augment() == Augment(
        crop=(0.25, 1.0), crop_by="area", aspect=(1.0, 1.0), flip=0.0, grey=0.0, blur=0.75, sigma=(0.1, 2.0),
        jitter=Jitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.4, probability=1.0),
    )  # fmt: skip


def test_impossible_settings_are_named():
    with pytest.raises(FirmError, match=r"views\.crop_by is 'volume'; use area or side"):
        Augment(crop_by="volume")
    for wrong in ((0.0, 1.0), (0.5, 0.2), (0.5, 1.5)):
        with pytest.raises(FirmError, match=r"views\.crop is .*; it must rise within 0\.\.1"):
            Augment(crop=wrong)
