"""The steps of an export's runtime, NumPy alone, give what firm itself gives."""

from __future__ import annotations

import itertools
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cases import each
from firm.decision.verdict import regions_of as firm_regions
from firm.deploy import image_steps as steps
from firm.deploy.firm_runtime import regions_of
from firm.drawn.render import draw_dataset
from firm.errors import ImageError
from firm.images.alignment import Conditioning, alignment
from firm.images.decode import decode
from firm.images.foreground import CHANNELS, METHODS, POLARITIES, Rule, foreground
from firm.images.preprocess import resize, to_tensor
from firm.types import Depth

WHITE = {"whole": 65535, "real": 1.0}


@pytest.fixture(scope="module")
def parts() -> torch.Tensor:
    """Drawn parts of several kinds and sides."""
    drawn = [draw_dataset(product, size=96, train=2, good=1, bad=2).test for product in ("plate", "weave")]
    return torch.cat(drawn)


def as_rule(rule: Rule) -> dict[str, object] | None:
    return None if rule.method == "ones" else vars(rule)


@given(st.integers(5, 400), st.integers(5, 400), st.integers(8, 130), st.integers(0, 9))
def test_resizing_is_firms_to_the_last_bit(height: int, width: int, side: int, seed: int) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    expected = resize(to_tensor(image), side)[0].numpy()
    assert np.array_equal(steps.resize(np.ascontiguousarray(image.transpose(2, 0, 1)), side), expected)


@each("rule", [Rule(method=m, polarity=p, channel=c) for m, p, c in itertools.product(METHODS, POLARITIES, CHANNELS)])
def test_the_foreground_is_firms(parts: torch.Tensor, rule: Rule) -> None:
    noise = torch.randint(0, 256, (1, 3, 96, 96), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    images = torch.cat([parts, noise, noise[:, :1].expand(-1, 3, -1, -1)])
    for image, expected in zip(images, foreground(images, rule), strict=True):
        assert np.array_equal(steps.foreground(image.numpy(), as_rule(rule)), expected.numpy())


@each("side", [1, 2, 3, 7, 8])
def test_the_kernels_of_the_foreground_are_firms(side: int) -> None:
    images = torch.randint(0, 256, (4, 3, 256, 200), generator=torch.Generator().manual_seed(side), dtype=torch.uint8)
    rule = Rule(method="otsu", close=side, open=0 if side == 7 else side)
    for image, expected in zip(images, foreground(images, rule), strict=True):
        assert np.array_equal(steps.foreground(image.numpy(), as_rule(rule)), expected.numpy())


def test_alignment_moves_pixels_masks_and_maps_as_firm_does(parts: torch.Tensor) -> None:
    rule = Rule(method="otsu")
    aligned = Conditioning(align=True, foreground=rule)(parts)
    heat = parts[:, 0].float() / 255
    assert aligned.frames is not None
    for number, image in enumerate(parts.numpy()):
        mask = steps.foreground(image, as_rule(rule))
        frame = steps.alignment(mask)
        assert np.allclose(frame, aligned.frames[number].numpy(), atol=1e-9)
        back = steps.inverse(frame)
        moved = np.rint(steps.linear(image.transpose(1, 2, 0), back)).astype(np.uint8)
        assert np.array_equal(moved.transpose(2, 0, 1), aligned.images[number].numpy())
        assert np.array_equal(steps.nearest(mask, back, replicate=True), aligned.foreground[number].numpy())
    expected = aligned.back(heat).numpy()
    found = [steps.warped_back(each, frame) for each, frame in zip(heat.numpy(), aligned.frames.numpy(), strict=True)]
    assert np.allclose(np.stack(found), expected, atol=1e-6)


@pytest.mark.parametrize("angle", [0, 30, 90])
def test_rounding_does_not_turn_a_symmetric_object(angle):
    """Moved by whole pixels it keeps its direction, in a detector as in an export."""
    mask = np.zeros((96, 96), np.uint8)
    cv2.ellipse(mask, (48, 48), (30, 9), angle, 0, 360, 1, -1)
    mask |= mask[::-1, ::-1]
    masks = [np.roll(mask, shift, (0, 1)) > 0 for shift in ((0, 0), (5, 2), (-7, 3), (11, -4))]
    turns = np.array([frame(mask)[:, :2] for mask in masks for frame in (alignment, steps.alignment)])
    np.testing.assert_allclose(turns, np.broadcast_to(turns[0], turns.shape), atol=1e-12)


@each("how", ["none", "median", "local"])
def test_illumination_is_evened_as_firm_does(parts: torch.Tensor, how: str) -> None:
    expected = Conditioning(illumination=how)(parts).images.numpy().astype(int)
    found = np.stack([steps.even_illumination(image, how) for image in parts.numpy()]).astype(int)
    assert np.abs(found - expected).max() <= (how == "local")  # OpenCV's sums may round one grey level apart
    assert (found != expected).mean() < 1e-4


@given(st.integers(0, 999), st.integers(1, 40), st.integers(1, 40))
def test_regions_are_firms(seed: int, rows: int, columns: int) -> None:
    heat = np.random.default_rng(seed).random((rows, columns), dtype=np.float32)
    for threshold in (0.3, 0.6, 0.9, 2.0):
        found = [vars(region) for region in regions_of(heat, threshold, 3 * rows + 1, 50)]
        expected = firm_regions(torch.from_numpy(heat), threshold, 3 * rows + 1, 50)
        assert found == [vars(region) for region in expected]


def files(folder: Path) -> list[Path]:
    """Images of every sort that firm reads."""
    rng = np.random.default_rng(0)
    colour, grey = rng.integers(0, 256, (37, 53, 3), dtype=np.uint8), rng.integers(0, 256, (41, 29), dtype=np.uint8)
    alpha = np.dstack([colour, rng.integers(0, 256, (37, 53), dtype=np.uint8)])
    deep = rng.integers(0, 65536, (33, 35), dtype=np.uint16)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(colour).save(folder / "colour.png")
    Image.fromarray(colour).save(folder / "turned.jpg", exif=exif, quality=90)
    Image.fromarray(colour).save(folder / "colour.webp")
    Image.fromarray(colour).save(folder / "colour.bmp")
    Image.fromarray(grey).save(folder / "grey.png")
    Image.fromarray(grey).save(folder / "grey.tif")
    Image.fromarray(grey > 127).save(folder / "bits.png")
    Image.fromarray(colour).quantize(16).save(folder / "palette.png")
    Image.fromarray(alpha).save(folder / "alpha.png")
    Image.fromarray(deep).save(folder / "deep.png")
    Image.fromarray(deep).save(folder / "deep.tif")
    Image.fromarray((deep / 65535).astype(np.float32)).save(folder / "real.tif")
    return sorted(folder.iterdir())


def test_files_and_arrays_are_decoded_as_firm_does(tmp_path: Path) -> None:
    import cv2

    (tmp_path / "more").mkdir()
    rng = np.random.default_rng(1)
    cv2.imwrite(str(tmp_path / "more" / "deep colours.png"), rng.integers(0, 65536, (21, 23, 3), dtype=np.uint16))
    for file in [*files(tmp_path / "more")]:
        assert np.array_equal(steps.decode(file, **WHITE), decode(file)), file.name
        assert np.array_equal(steps.decode(file.read_bytes(), **WHITE), decode(file)), file.name
    deep = rng.integers(0, 4096, (9, 8), dtype=np.uint16)
    for array in (
        deep,
        deep[..., None],
        np.dstack([deep] * 4),
        rng.random((5, 6, 3)),
        deep > 99,
        deep.astype(np.uint8),
    ):
        assert np.array_equal(steps.decode(array, 4095, 1.0), decode(array, Depth(whole=4095)))


def test_what_firm_cannot_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    for source in (tmp_path / "broken.png", tmp_path / "missing.png", np.full((3, 3), 70000)):
        with pytest.raises(ImageError):
            decode(source)
        with pytest.raises(steps.ExportError):
            steps.decode(source, **WHITE)
