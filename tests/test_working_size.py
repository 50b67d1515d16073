"""The size at which images are encoded: their aspect, and as many pixels as small defects need."""

import numpy as np
import pytest
import torch

from firm.detector.detector import Detector
from firm.detector.prepare import frozen_backbone
from firm.detector.working_size import candidates, cropped, make_trial, sized
from firm.errors import ImageError, SettingError
from firm.images.crop import Crop
from firm.images.preprocess import Preprocessing
from firm.recipes.presets import recipe
from listening import Heard

WAVES = recipe("wavelets")


def surface(number, height=640, width=256, defect=None):
    """Even grain with stripes across; a defect is a dark spot of so many pixels."""
    rng = np.random.default_rng(number)
    picture = 120 + 20 * np.sin(np.arange(height) / 9)[:, None] + rng.normal(0, 6, (height, width))
    if defect:
        y, x = height // 3, width // 2
        picture[y : y + defect, x : x + defect] -= 70
    return np.repeat(picture.clip(0, 255).astype(np.uint8)[..., None], 3, 2)


SURFACES = [surface(number) for number in range(15)]


def sized_for(pictures, smallest=None, chosen=WAVES):
    heard = Heard()
    return sized(chosen, smallest, pictures, frozen_backbone(chosen), None, listener=heard), heard


@pytest.mark.parametrize(
    ("shapes", "sizes"),
    [
        ([(256, 256)] * 9, [(256, 256)]),
        ([(900, 1000)] * 9, [(256, 256)]),
        ([(1250, 500)] * 9, [(384, 160), (640, 256)]),
        ([(500, 1250)] * 9, [(160, 384), (256, 640)]),
        ([(200, 2000)] * 9, [(96, 960), (160, 1600)]),
        ([(400, 100), (100, 400)] * 9, [(256, 256)]),
        ([(60, 150)] * 9, [(160, 384)]),
    ],
)
def test_the_images_aspect_and_no_more_pixels_than_they_have(shapes, sizes):
    assert candidates(shapes) == sizes


def test_with_a_smallest_defect_squares_grow_up_to_the_images():
    assert candidates([(1024, 1024)] * 9, (1, 2, 4)) == [(256, 256), (352, 352), (512, 512)]
    assert candidates([(400, 400)] * 9, (1, 2, 4)) == [(256, 256), (352, 352)]


def test_squares_stay_as_they_are():
    squares = [surface(number, 256, 256) for number in range(6)]
    chosen, _ = sized_for(squares)
    assert chosen == WAVES


def test_what_is_set_by_hand_is_not_chosen():
    given = recipe("wavelets", **{"shape": [320, 128]})
    assert sized_for(SURFACES, chosen=given)[0].shape == (320, 128)
    with pytest.raises(SettingError, match="--smallest-defect"):
        sized_for(SURFACES, 8, chosen=given)


def test_a_rectangle_is_chosen_by_defects_and_the_smallest_is_heard():
    chosen, heard = sized_for(SURFACES)
    height, width = chosen.shape
    assert 2.2 < height / width < 2.8
    assert any("working size" in text and "px" in text for text in heard.lines)


def test_smaller_defects_need_more_pixels():
    areas = []
    for smallest in (64, 6):
        chosen, _ = sized_for([surface(number, 736, 288) for number in range(9)], smallest)
        areas.append(np.prod(chosen.shape))
    assert areas[0] <= areas[1]


def test_a_defect_of_the_trial_has_the_size_asked_for():
    trial = make_trial(SURFACES, Crop(), 16, seed=0)
    for good, altered in zip(trial.good, trial.altered, strict=True):
        rows, columns = np.nonzero((good != altered[0]).any(2))
        assert 8 <= max(np.ptp(rows), np.ptp(columns)) + 1 <= 40


def test_a_detector_of_rectangles_saves_loads_and_maps(tmp_path):
    fast = recipe("wavelets", **{"training.epochs": 1, "automatic": ["illumination"], "pretrained.hidden": [16]})
    detector = Detector.fit(SURFACES, recipe=fast, calibration="split", listener=Heard())
    shape = detector.recipe.shape
    assert detector.preprocessing.frame == shape
    good, bad = surface(100), surface(100, defect=24)
    examined = detector.examine(bad)
    assert tuple(examined.heat.shape) == shape
    assert examined.verdict.score > detector.inspect(good).score
    peak = np.unravel_index(int(examined.heat.argmax()), shape)
    assert abs(peak[0] * 640 / shape[0] - 225) < 40
    assert abs(peak[1] * 256 / shape[1] - 140) < 40
    detector.save(tmp_path / "d.firm")
    again = Detector.load(tmp_path / "d.firm")
    assert again.id == detector.id
    assert again.inspect(bad).score == examined.verdict.score


def test_a_small_part_is_found_cropped_and_its_defect_boxed(tmp_path):
    def view(number, defect=False):
        rng = np.random.default_rng(number)
        top, left = rng.integers(20, 240), rng.integers(20, 500)
        picture = rng.normal(30, 3, (360, 640))
        picture[top : top + 96, left : left + 96] = 150 + rng.normal(0, 4, (96, 96))
        if defect:
            picture[top + 40 : top + 52, left + 60 : left + 72] = 90
        return np.repeat(picture.clip(0, 255).astype(np.uint8)[..., None], 3, 2), (top + 46, left + 66)

    fast = recipe("wavelets", **{"training.epochs": 1, "automatic": ["foreground"], "pretrained.hidden": [16]})
    pictures, heard = [view(number)[0] for number in range(16)], Heard()
    Detector.fit(pictures, recipe=fast, calibration="split", listener=heard)
    assert any("--crop auto" in text for text in heard.warnings)
    detector = Detector.fit(pictures, recipe=fast, calibration="split", crop="auto", listener=Heard())
    bad, (y, x) = view(99, defect=True)
    examined = detector.examine(bad)
    assert examined.verdict.score > detector.inspect(view(98)[0]).score
    rows, columns = examined.heat.shape
    assert abs(rows / columns - 360 / 640) < 0.02
    peak = np.unravel_index(int(examined.heat.argmax()), (rows, columns))
    assert abs(peak[0] * 360 / rows - y) < 12
    assert abs(peak[1] * 640 / columns - x) < 12
    top, left, bottom, right = examined.verdict.regions[0].box
    assert top <= y <= bottom
    assert left <= x <= right
    detector.save(tmp_path / "d.firm")
    assert Detector.load(tmp_path / "d.firm").inspect(bad).score == examined.verdict.score


def test_an_image_of_another_aspect_is_refused():
    how = Preprocessing(128, shape=(320, 128))
    assert how.read(surface(0)).shape[-2:] == (320, 128)
    with pytest.raises(ImageError, match="256 x 256"):
        how.read(surface(0, 256, 256))


def test_crops_and_sizes_need_images_with_pixels_of_their_own():
    with pytest.raises(SettingError, match="--crop"):
        cropped(WAVES, "auto", [], None)
    with pytest.raises(SettingError, match="no object"):
        cropped(WAVES, "auto", SURFACES, None)


def test_ignored_pixels_of_rectangles_never_decide(tmp_path):
    ignored = torch.zeros(640, 256, dtype=torch.bool)
    ignored[180:260, 100:180] = True
    given = recipe(
        "wavelets", **{"shape": [320, 128], "training.epochs": 1, "automatic": [], "pretrained.hidden": [16]}
    )
    detector = Detector.fit(SURFACES[:12], recipe=given, calibration="split", ignored=ignored, listener=Heard())
    good, hidden = detector.examine(surface(100)), detector.examine(surface(100, defect=24))
    assert hidden.verdict.score == good.verdict.score
    assert hidden.light == pytest.approx(good.light, abs=0.01)
    assert not hidden.heat[95:125, 55:85].any()
