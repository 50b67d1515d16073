"""The part of each image that is read, and maps back in the whole image."""

import numpy as np
import pytest
import torch

from firm.errors import SettingError
from firm.images.crop import Crop, crop_around, like_window, placed
from firm.images.foreground import Rule
from firm.images.preprocess import Preprocessing

BRIGHT = Rule(method="otsu")


def frame(top, left, side=60, height=240, width=400):
    picture = np.random.default_rng(0).integers(20, 24, (height, width, 3)).astype(np.uint8)
    picture[top : top + side, left : left + side] = 200
    return picture


def test_a_window_typed_in_pixels_is_cut_exactly():
    crop = Crop.parse("40,30,100,80", 240, 400)
    rows, columns = crop.window(frame(0, 0))
    assert (rows.start, rows.stop, columns.start, columns.stop) == (30, 110, 40, 140)
    assert crop.cut(frame(0, 0)).shape == (80, 100, 3)
    assert Preprocessing(80, crop=crop).read(frame(30, 40)).float().mean() > 60


def test_of_an_image_of_another_scale_the_same_part_is_read():
    rows, columns = Crop.parse("40,30,100,80", 240, 400).window(np.zeros((480, 800, 3), np.uint8))
    assert (rows.start, rows.stop, columns.start, columns.stop) == (60, 220, 80, 280)


@pytest.mark.parametrize("text", ["somewhere", "1,2,3", "0,0,500,10", "-1,0,5,5", "0,0,0,5"])
def test_a_window_outside_the_image_is_refused(text):
    with pytest.raises(SettingError, match="--crop"):
        Crop.parse(text, 240, 400)


def test_the_window_follows_the_object():
    pictures = [frame(20, 30), frame(150, 300), frame(100, 200)]
    crop = crop_around(pictures, BRIGHT)
    for picture in (*pictures, frame(170, 5)):
        cut = crop.cut(picture)
        assert cut.shape == crop.cut(pictures[0]).shape
        assert (cut > 100).sum() == (picture > 100).sum()
        assert (cut > 100).mean() > 0.4


def test_without_an_object_the_window_is_in_the_middle():
    crop = crop_around([frame(20, 30)], BRIGHT)
    rows, columns = crop.window(np.full((240, 400, 3), 9, np.uint8))
    assert abs(rows.start + rows.stop - 240) <= 2
    assert abs(columns.start + columns.stop - 400) <= 2


def test_a_map_of_the_window_lies_where_the_window_was():
    picture, crop = frame(150, 300), crop_around([frame(20, 30)], BRIGHT)
    window = crop.window(picture)
    heat = placed(np.ones((256, 256), np.float32), window, picture)
    assert heat.shape == (240, 400)
    inside = np.zeros((240, 400), bool)
    inside[window] = True
    assert np.array_equal(heat > 0, inside)


def test_a_coarse_map_stays_coarse():
    picture, crop = np.zeros((2400, 4000, 3), np.uint8), Crop(x=0.25, y=0.25, width=0.5, height=0.5)
    heat = placed(np.ones((120, 200), np.float32), crop.window(picture), picture)
    assert heat.shape == (240, 400)
    assert heat.sum() == 120 * 200


def test_a_mask_is_cut_like_its_image():
    window = Crop.parse("100,60,200,120", 240, 400).window(frame(0, 0))
    mask = np.zeros((120, 200), bool)
    mask[30:90, 50:150] = True
    assert like_window(mask, window, (240, 400)).all()
    assert like_window(mask, window, (240, 400)).sum() == mask.sum()


def test_a_fixed_window_cuts_the_ignore_mask_and_a_moving_one_refuses_it():
    mask = torch.zeros(240, 400, dtype=torch.bool)
    mask[30:110, 40:140] = True
    assert Crop.parse("40,30,100,80", 240, 400).mask(mask).all()
    with pytest.raises(SettingError, match="--ignore"):
        crop_around([frame(20, 30)], BRIGHT).mask(mask)
    assert torch.equal(Crop().mask(mask), mask)
