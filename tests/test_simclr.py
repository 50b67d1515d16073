"""SimCLR views: crops, mirroring and blur against loops, and their distributions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import contracts
import oracles
from firm.images.colour import Jitter
from firm.views.registry import VIEWS, SimCLR
from firm.views.simclr import crop

PLAIN = Jitter(probability=0)
UNTOUCHED = SimCLR(crop=(1.0, 1.0), jitter=PLAIN, blur=0.0)


def floats(n=4, channels=3, side=8, seed=0):
    return contracts.images_of(n, channels, side, seed=seed).float() / 255


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


def test_a_constant_image_stays_constant():
    views = SimCLR(jitter=PLAIN, aspect=(0.5, 2.0), flip=0.5)
    for channels in (1, 3):
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
    top, left, tall, wide = seen_windows(SimCLR(aspect=aspect, flip=0.5), 500, 32, 24)
    wide = wide.abs()
    for low, extent, limit in ((top, tall, 32), (left, wide, 24)):
        assert float(low.min()) > -1e-3
        assert float((low + extent).max()) < limit + 1e-3
        torch.testing.assert_close(low, low.round(), rtol=0, atol=1e-3)  # whole pixels
        torch.testing.assert_close(extent, extent.round(), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("by", "crop_range"), [("area", (0.25, 1.0)), ("side", (0.5, 1.0))])
def test_fractions_are_uniform_in_area_or_side(by, crop_range):
    _, _, tall, wide = seen_windows(SimCLR(crop=crop_range, crop_by=by), 2000, 64, 64)
    torch.testing.assert_close(tall, wide, rtol=0, atol=1e-3)
    fraction = (tall / 64).square() if by == "area" else tall / 64
    wanted = torch.linspace(*crop_range, len(fraction))
    assert float((fraction.sort().values - wanted).abs().max()) < 0.05


def test_places_are_uniform():
    top, left, tall, _ = seen_windows(SimCLR(), 2000, 64, 64)
    for low in (top, left):
        within = torch.rand(len(low), generator=contracts.generator(1))  # whole pixels made continuous
        place = ((low + within) / (64 - tall + 1)).sort().values
        assert float((place - torch.linspace(0, 1, len(place))).abs().max()) < 0.045


@pytest.mark.parametrize("flip", [0.0, 0.5, 1.0])
def test_so_many_are_mirrored(flip):
    _, _, tall, wide = seen_windows(SimCLR(flip=flip), 600, 32, 32)
    assert (tall > 0).all()  # never upside down
    assert float((wide < 0).float().mean()) == pytest.approx(flip, abs=0.07)


@pytest.mark.parametrize(("sigma", "channels"), [(0.1, 3), (0.7, 1), (2.0, 3)])
def test_blur_is_the_loops(sigma, channels):
    images = floats(2, channels, 6)
    found = SimCLR(blur=1.0, sigma=(sigma, sigma))._blurred(images, contracts.generator())
    for image, result in zip(images, found, strict=True):
        np.testing.assert_allclose(result.numpy(), oracles.blurred(image.double().numpy(), sigma), atol=1e-6)


def test_so_many_are_blurred():
    images = floats(400, 1, 4)
    found = SimCLR(blur=0.75)._blurred(images, contracts.generator())
    assert float((found != images).flatten(1).any(1).float().mean()) == pytest.approx(0.75, abs=0.07)
    single_pixel = floats(2, 3, 1)
    assert torch.equal(SimCLR(blur=1.0)._blurred(single_pixel, contracts.generator()), single_pixel)


def test_so_many_are_grey():
    first, _ = SimCLR(crop=(1.0, 1.0), jitter=PLAIN, blur=0.0, grey=0.2)(
        contracts.images_of(500, height=4), 4, rng=contracts.generator()
    )
    is_grey = (first.amax(1) - first.amin(1)).flatten(1).amax(1) < 1e-5
    assert float(is_grey.float().mean()) == pytest.approx(0.2, abs=0.06)


# --- the family ---


def test_one_channel_and_its_three_copies_are_seen_alike():
    """Hue and saturation do nothing to a grey image, so colour outliers may stand beside grey inliers."""
    grey = contracts.images_of(6, 1, 12)
    single, _ = VIEWS["simclr"](grey, 12, rng=contracts.generator())
    triple, _ = VIEWS["simclr"](grey.expand(-1, 3, -1, -1), 12, rng=contracts.generator())
    torch.testing.assert_close(triple, single.expand(-1, 3, -1, -1), rtol=0, atol=1e-5)


def test_published_parameters():
    assert VIEWS["simclr"] == SimCLR() == SimCLR(
        crop=(0.25, 1.0), crop_by="area", aspect=(1.0, 1.0), flip=0.0, grey=0.0, blur=0.75, sigma=(0.1, 2.0),
        jitter=Jitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.4, probability=1.0),
    )  # fmt: skip
