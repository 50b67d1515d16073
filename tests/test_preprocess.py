"""The door for pixels: what any file decodes to, and the one preprocessing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from cases import each
from firm.errors import FirmError
from firm.images import resize as images
from firm.images.decode import decode
from firm.images.preprocess import Preprocessing, inlier_statistics, resize, to_tensor
from firm.types import Statistics
from image_files import encoded

RGB = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)


def random_images(n, c, h, w, seed=0):
    return torch.randint(0, 256, (n, c, h, w), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@each("kind", ["PNG", "BMP", "TIFF"])
def test_lossless_rgb_comes_back_as_it_was(kind, tmp_path):
    content = encoded(Image.fromarray(RGB), kind)
    file = tmp_path / "part.img"  # the content decides, not the suffix
    file.write_bytes(content)
    for source in (content, file, str(file)):
        decoded = decode(source)
        assert decoded.dtype == np.uint8
        np.testing.assert_array_equal(decoded, RGB)


def test_damaged_files_are_named(tmp_path):
    content = encoded(Image.fromarray(np.tile(RGB, (20, 20, 1))), "JPEG")
    for name, damaged in {"cut.jpg": content[: len(content) // 2], "empty.jpg": b"", "text.png": b"hello"}.items():
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(FirmError, match=rf"{name} cannot be decoded.*; .* remove it"):
            decode(tmp_path / name)
    with pytest.raises(FirmError, match=r"nowhere.png does not exist"):
        decode(tmp_path / "nowhere.png")
    with pytest.raises(FirmError, match="the image cannot be decoded"):
        decode(b"\x89PNG")


@given(st.binary(max_size=200), st.sampled_from(["PNG", "JPEG", "WEBP", "TIFF", "BMP"]), st.integers(0, 400))
@settings(max_examples=150, deadline=None)
def test_no_bytes_crash_the_decoder(noise, kind, at):
    content = encoded(Image.fromarray(RGB), kind)
    try:
        decoded = decode(content[:at] + noise + content[at + len(noise) :])
    except FirmError:
        return
    assert decoded.ndim == 3
    assert decoded.shape[2] == 3
    assert decoded.dtype == np.uint8


@each("height, width, side", [(64, 64, 17), (40, 90, 32), (9, 6, 32), (33, 33, 32)])
def test_resize_agrees_with_pillow(height, width, side):
    batch = random_images(2, 3, height, width)
    expected = [
        np.asarray(Image.fromarray(b.permute(1, 2, 0).numpy()).resize((side, side), Image.Resampling.BILINEAR))
        for b in batch
    ]
    ours = resize(batch, side).permute(0, 2, 3, 1).numpy()
    assert ours.dtype == np.uint8
    assert np.abs(ours.astype(int) - np.stack(expected).astype(int)).max() <= 1


def test_resize_does_not_depend_on_its_company(monkeypatch):
    batch = random_images(7, 3, 20, 30)
    together = resize(batch, 16)
    monkeypatch.setattr(images, "runs_of", lambda some: [slice(i, i + 1) for i in range(len(some))])
    assert torch.equal(together, resize(batch, 16))
    assert resize(batch[:0], 16).shape == (0, 3, 16, 16)
    same = random_images(2, 1, 16, 16)
    assert torch.equal(resize(same, 16), same)


def test_a_grey_image_resized_has_the_same_three_channels_as_its_one():
    one = random_images(3, 1, 20, 30)
    assert torch.equal(resize(one.repeat(1, 3, 1, 1), 16), resize(one, 16).expand(-1, 3, -1, -1))


def test_runs_cover_every_image_once():
    for batch in (torch.empty(5, 3, 4000, 3000, dtype=torch.uint8), torch.empty(0, 3, 8, 8, dtype=torch.uint8)):
        covered = [i for run in images.runs_of(batch) for i in range(len(batch))[run]]
        assert covered == list(range(len(batch)))


def test_to_tensor_is_a_batch_of_one():
    assert torch.equal(to_tensor(RGB)[0, 2], torch.from_numpy(RGB[..., 2].copy()))


def test_without_zoom_the_test_view_only_normalises():
    statistics = Statistics((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    batch = random_images(3, 3, 8, 8)
    expected = torch.stack([(batch[:, c] / 255 - statistics.mean[c]) / statistics.std[c] for c in range(3)], 1)
    torch.testing.assert_close(Preprocessing(8, statistics=statistics).test_view(batch), expected)


def test_zoom_enlarges_then_crops_the_centre():
    batch = random_images(2, 3, 28, 28)
    view = Preprocessing(32, zoom=1.125).test_view(batch)
    enlarged = torch.nn.functional.interpolate(batch.float(), size=(36, 36), mode="bilinear", antialias=True) / 255
    torch.testing.assert_close(view, enlarged[..., 2:34, 2:34])


def test_grey_becomes_three_channels_and_grey_statistics_fit():
    batch = random_images(2, 1, 8, 8)
    grey = Preprocessing(8, statistics=Statistics((0.3,), (0.4,))).test_view(batch)
    colour = Preprocessing(8, statistics=Statistics((0.3,) * 3, (0.4,) * 3)).test_view(batch)
    assert grey.shape == (2, 3, 8, 8)
    assert torch.equal(grey, colour)
    assert torch.equal(grey[:, 0], grey[:, 2])


def test_the_view_of_nothing_is_nothing():
    assert Preprocessing(32, zoom=1.125).test_view(random_images(0, 3, 8, 8)).shape == (0, 3, 32, 32)


@each(
    "settings, fix",
    [
        ({"size": 0}, "size >= 1"),
        ({"size": 8, "zoom": 0.9}, "zoom >= 1"),
        ({"size": 8, "zoom": float("nan")}, "zoom >= 1"),
        ({"size": 8, "statistics": Statistics((0.0,) * 3, (1.0, 0.0, 1.0))}, "deviations > 0"),
        ({"size": 8, "statistics": Statistics((0.0,) * 2, (1.0,) * 2)}, "1 or 3 means"),
        ({"size": 8, "statistics": Statistics((0.0,) * 3, (1.0,))}, "as many deviations"),
    ],
)
def test_impossible_settings_name_the_fix(settings, fix):
    with pytest.raises(FirmError, match=fix):
        Preprocessing(**settings)


@given(st.integers(1, 6), st.sampled_from([1, 3]), st.integers(1, 9), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_inlier_statistics_are_those_of_numpy(n, channels, side, seed):
    batch = random_images(n, channels, side, side, seed)
    statistics = inlier_statistics(batch)
    pixels = batch.numpy().astype(np.float64) / 255
    np.testing.assert_allclose(statistics.mean, pixels.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(statistics.std, np.maximum(pixels.std((0, 2, 3)), 1 / 255), rtol=1e-9)


def test_a_constant_channel_does_not_divide_by_zero():
    statistics = inlier_statistics(torch.full((2, 3, 4, 4), 7, dtype=torch.uint8))
    assert statistics == Statistics((7 / 255,) * 3, (1 / 255,) * 3)
    assert Preprocessing(4, statistics=statistics).test_view(torch.full((1, 3, 4, 4), 8, dtype=torch.uint8)).max() < 1.1
    with pytest.raises(FirmError, match="empty"):
        inlier_statistics(random_images(0, 3, 4, 4))
