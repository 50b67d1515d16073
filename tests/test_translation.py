"""Translation views against plain loops, their range and evenness."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import contracts
from firm.images.colour import Jitter, jittered
from firm.images.preprocess import resize
from firm.types import Focus
from firm.views.registry import VIEWS, Translation
from firm.views.simclr import moved

STILL = Jitter(brightness=0, contrast=0, saturation=0, hue=0)


def shifted(image, down, right):
    """Loops over pixels: each is the bilinear mean of the four around (y - down, x - right), black outside."""
    _, height, width = image.shape
    result = np.zeros(image.shape)
    for y in range(height):
        for x in range(width):
            top, left = math.floor(y - down), math.floor(x - right)
            low, aside = y - down - top, x - right - left
            for row, part_of_row in ((top, 1 - low), (top + 1, low)):
                for column, part_of_column in ((left, 1 - aside), (left + 1, aside)):
                    if 0 <= row < height and 0 <= column < width:
                        result[:, y, x] += part_of_row * part_of_column * image[:, row, column]
    return result


@settings(max_examples=40)
@given(down=st.floats(-0.9, 0.9), right=st.floats(-0.9, 0.9), seed=st.integers(0, 2**32))
def test_moving_is_the_loops(down, right, seed):
    image = contracts.images_of(1, 3, 6, 8, seed=seed).float() / 255
    found = moved(image, torch.tensor([[down, right]]))
    np.testing.assert_allclose(found[0], shifted(image[0].double().numpy(), down * 6, right * 8), atol=1e-5)


def test_whole_pixels_are_kept_and_black_moves_in():
    image = contracts.images_of(1, 3, 10).float() / 255
    found = moved(image, torch.tensor([[0.2, -0.3]]))  # two down, three to the left
    torch.testing.assert_close(found[..., 2:, :7], image[..., :8, 3:], rtol=0, atol=1e-5)
    assert found[..., :2, :].abs().max() < 1e-5
    assert found[..., 7:].abs().max() < 1e-5


def seen_parts(translate, n=3000, size=20):
    """By what part of the side each view moved: a ramp inside a white image tells its own place."""
    ramp = torch.arange(size, dtype=torch.float32).mul(4).to(torch.uint8)
    images = torch.stack([ramp[:, None].expand(-1, size), ramp[None].expand(size, -1), ramp.new_zeros(size, size)])
    views = Translation(translate=translate, jitter=STILL)(
        images.expand(n, -1, -1, -1), size, rng=contracts.generator()
    )
    middle = size // 2
    for view in views:
        value = view[:, :2, middle, middle] * 255 / 4
        yield (middle - value) / size


def test_translations_are_uniform_along_each_axis_for_each_view():
    parts = torch.cat(list(seen_parts(0.1)), dim=1)  # down and right of the first, then of the second view
    assert float(parts.abs().max()) <= 0.1 + 1e-4
    wanted = torch.linspace(-0.1, 0.1, len(parts))
    assert float((parts.sort(dim=0).values - wanted[:, None]).abs().max()) < 0.2 * 0.03
    related = np.corrcoef(parts.T.numpy()) - np.eye(4)
    assert np.abs(related).max() < 0.06  # the axes and the two views have draws of their own


def test_translation_comes_in_parts_of_the_side():
    down, right = (torch.cat(parts) for parts in zip(*(p.unbind(1) for p in seen_parts(0.3, 500)), strict=True))
    for parts in (down, right):
        assert 0.28 < float(parts.abs().max()) <= 0.3 + 1e-4


def test_images_of_another_size_are_resized():
    images = contracts.images_of(3, 3, 20, 30)
    first, _ = Translation(translate=0.0, jitter=STILL)(images, 16, rng=contracts.generator())
    torch.testing.assert_close(first, resize(images, 16).float() / 255, rtol=0, atol=1e-5)
    images = contracts.images_of(3, 3, 16)
    for view in Translation(translate=0.0, jitter=STILL)(images, 16, rng=contracts.generator()):
        torch.testing.assert_close(view, images.float() / 255, rtol=0, atol=1e-5)


def test_colour_changes_after_the_translation():
    images = contracts.images_of(4, 3, 12)
    rng = contracts.generator(3)
    part = 0.1 * (2 * torch.rand(8, 2, generator=rng) - 1)
    twice = torch.cat([images, images]).float() / 255
    expected = jittered(moved(twice, part), VIEWS["translation"].jitter, rng=rng)
    found = torch.cat(VIEWS["translation"](images, 12, rng=contracts.generator(3)))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_focus_changes_nothing():
    images = contracts.images_of(3, 3, 12)
    mask = torch.ones(3, 12, 12, dtype=torch.bool)
    with_focus = Translation()(images, 12, rng=contracts.generator(), focus=Focus(mask, mask))
    without = Translation()(images, 12, rng=contracts.generator())
    assert torch.equal(with_focus[0], without[0])
    assert torch.equal(with_focus[1], without[1])


def test_the_authors_values_are_the_default():
    light = Jitter(brightness=0.1, contrast=0.1, saturation=0.1, hue=0.1, probability=1.0)
    assert VIEWS["translation"] == Translation() == Translation(translate=0.1, jitter=light)
