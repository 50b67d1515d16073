"""SIA as a source of outliers: a folder of generated images, all of them, streamed; and folders of other generators."""

import dataclasses

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

import contracts
from firm.errors import SettingError
from firm.outliers import generated as module
from firm.outliers.generated import generated_donor
from firm.outliers.registry import Exposure, PerlinBlend, Sia
from firm.types import Scene


def save(folder, name, pixels):
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(folder / name)


@pytest.fixture
def screw(tmp_path):
    """Thirty images in the layout of RealNet's SIA: sdas/screw/*.jpg, 256 px there."""
    for number in range(30):
        level = np.full((32, 32, 3), 8 * number, np.uint8)
        save(tmp_path / "sdas" / "screw", f"{number}.png", level)
    return str(tmp_path / "sdas" / "screw")


def grainy(n=6, side=64):
    """Good images with grain."""
    rng = np.random.default_rng(0)
    pixels = 120 + rng.normal(0, 18, (n, 3, side, side))
    return torch.from_numpy(pixels.clip(0, 255).astype(np.uint8))


def test_it_keeps_the_contract_and_makes_the_blends_of_its_folder(screw):
    source = Sia(folder=screw, per_inlier=3)
    for channels in (1, 3):
        contracts.check_outlier_source(source, contracts.images_of(12, channels, 32))
    inliers = grainy(4, 32)
    here = Sia(folder=screw)(inliers, rng=contracts.generator())
    there = PerlinBlend(folder=screw)(inliers, rng=contracts.generator())
    assert torch.equal(here.images, there.images)


def test_it_stays_on_the_object(screw):
    inliers, foreground = grainy(8, 32), torch.zeros(8, 32, 32, dtype=torch.bool)
    foreground[:, 8:24, 8:24] = True
    scene = Scene(foreground, inliers, foreground)
    made = Sia(folder=screw)(inliers, rng=contracts.generator(), scene=scene)
    assert not (made.where & ~foreground).any()
    assert made.where.flatten(1).any(1).all()


def test_without_a_folder_it_says_who_makes_one():
    with pytest.raises(SettingError, match="no images yet"):
        Sia()(grainy(), rng=contracts.generator())


@pytest.mark.parametrize(
    "wrong",
    [{"model": "huge"}, {"steps": -1}, {"images": 0}, {"strength": (0.2, 0.1)}, {"opacity": (0.0, 1.0)}, {"least": 0}],
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(SettingError, match=next(iter(wrong))):
        dataclasses.replace(Sia(), **wrong)


def test_all_images_of_a_folder_are_used_and_few_are_kept(tmp_path, monkeypatch):
    """A folder much larger than what is held in memory."""
    assert module.KEPT == 512
    from functools import lru_cache

    small = lru_cache(maxsize=8)(module._shown.__wrapped__)
    monkeypatch.setattr(module, "_shown", small)
    for number in range(60):
        save(tmp_path, f"{number:03d}.png", np.full((16, 16, 3), 4 * number, np.uint8))
    rng, image = np.random.default_rng(0), np.zeros((3, 16, 16), np.uint8)
    seen = {int(generated_donor(str(tmp_path), image, rng)[0, 0, 0]) for _ in range(500)}
    assert seen == {4 * number for number in range(60)}
    assert small.cache_info().currsize == 8
    again = np.random.default_rng(0)
    assert generated_donor(str(tmp_path), image, again).shape == (3, 16, 16)


def sharpness(pixels, where):
    """Mean absolute Laplacian, as the eye sees grain."""
    lines = [cv2.Laplacian(channel.astype(np.float32), cv2.CV_32F) for channel in pixels]
    return float(np.abs(lines)[:, where].mean())


def test_a_coarse_image_keeps_the_grain_of_the_good_one(tmp_path):
    """A 16 px image in one of 64 px: enlarged alone it would be a smooth spot, which says nothing of defects."""
    inliers = grainy()
    coarse = np.random.default_rng(1).integers(80, 160, (16, 16, 3), dtype=np.uint8)
    save(tmp_path, "coarse.png", coarse)
    image = inliers[0].numpy()
    donor = generated_donor(str(tmp_path), image, np.random.default_rng(0))
    everywhere = np.ones((64, 64), bool)
    enlarged = cv2.resize(coarse, (64, 64), interpolation=cv2.INTER_CUBIC).transpose(2, 0, 1)
    assert sharpness(donor, everywhere) > 0.8 * sharpness(image, everywhere)
    assert sharpness(enlarged, everywhere) < 0.5 * sharpness(image, everywhere)
    shown = cv2.resize(donor.transpose(1, 2, 0), (16, 16), interpolation=cv2.INTER_AREA)
    assert np.abs(shown - coarse).mean() < 8  # what it shows at its own resolution is the generated image


def test_an_image_of_full_size_is_shown_as_it_is(tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    save(tmp_path, "full.png", pixels)
    donor = generated_donor(str(tmp_path), grainy()[0].numpy(), np.random.default_rng(0))
    assert np.array_equal(donor, pixels.transpose(2, 0, 1))


def test_a_folder_of_any_generator_is_a_donor_or_an_exposure_set(tmp_path):
    """DREAM-OOD and others come as images of any size and format."""
    rng = np.random.default_rng(2)
    for number, (height, width, suffix) in enumerate([(40, 60, "png"), (64, 64, "jpg"), (32, 48, "bmp")]):
        save(tmp_path / "dream", f"{number}.{suffix}", rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    inliers = grainy(6, 32)
    donor = Sia(folder=str(tmp_path / "dream"))(inliers, rng=contracts.generator())
    assert donor.where.flatten(1).any(1).all()
    whole = Exposure(path=str(tmp_path / "dream"))(inliers, rng=contracts.generator())
    assert whole.where is None
    assert whole.images.shape == inliers.shape
