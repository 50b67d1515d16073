"""Images in memory: a fit and an inspection give what they give for files, whatever the layout and the colours."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cheap import CHEAP
from firm.detector.detector import Detector
from firm.drawn.render import draw_dataset
from firm.errors import DataError, SettingError
from firm.images.arrays import images_in
from firm.recipes import presets
from firm.recipes.presets import recipe
from firm.recipes.recipe import change
from listening import Heard

QUICK = {
    "size": 48,
    "pretrained.margin": 0,
    "training.epochs": 0,
    "automatic": [],
    "outliers": "spots",
}  # of the default recipe


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Coloured parts, not square, of several sizes."""
    folder = tmp_path_factory.mktemp("data") / "good"
    folder.mkdir()
    drawn = draw_dataset("plate", size=64, train=16, good=0, bad=0).train.permute(0, 2, 3, 1).numpy()
    for number, image in enumerate(drawn):
        tinted = (image * np.array([1.0, 0.6, 0.2])).astype(np.uint8)
        height, width = (72, 64) if number % 2 else (64, 60)
        Image.fromarray(tinted).resize((width, height)).save(folder / f"{number:02d}.png")
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def arrays(parts: list[Path]) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(Image.open(file)) for file in parts]


@pytest.fixture(scope="module")
def detector(parts: list[Path]) -> Detector:
    return Detector.fit(parts[0].parent, recipe=CHEAP, holdout=0.25, listener=Heard())


def same(one: Detector, other: Detector) -> None:
    """The same detector, but for the name of its images."""
    assert (one.recipe, one.preprocessing, one.id) == (other.recipe, other.preprocessing, other.id)
    assert replace(one.decides, files=()) == replace(other.decides, files=())


def test_images_in_memory_give_the_detector_of_their_folder(
    parts: list[Path], arrays: list[np.ndarray[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the default recipe, whichever way they are given."""
    monkeypatch.setattr(presets, "usual", lambda: recipe("wavelets", **QUICK))
    folder = Detector.fit(parts[0].parent, holdout=0.25, listener=Heard())
    assert folder.recipe.patchwise
    given = Detector.fit(list(map(str, parts)), holdout=0.25, listener=Heard())
    same(given, folder)
    assert given.origin == folder.origin
    same(Detector.fit(arrays, holdout=0.25, listener=Heard()), folder)
    same(Detector.fit([image[..., ::-1] for image in arrays], holdout=0.25, listener=Heard(), channels="bgr"), folder)

    stack = np.stack([np.asarray(Image.fromarray(image).resize((70, 50))) for image in arrays])
    first = Detector.fit(stack, holdout=0.25, listener=Heard())
    assert first.preprocessing.file_side == 48
    tensor = torch.from_numpy(stack).permute(0, 3, 1, 2)
    for images in (stack.transpose(0, 3, 1, 2), tensor):
        same(Detector.fit(images, holdout=0.25, listener=Heard()), first)
    for images in (stack[..., ::-1], tensor.flip(1)):
        same(Detector.fit(images, holdout=0.25, listener=Heard(), channels="bgr"), first)


def test_grey_arrays_are_learnt_from(arrays: list[np.ndarray[Any, Any]]) -> None:
    grey = [image[..., 0] for image in arrays]
    same(
        Detector.fit(grey, recipe=CHEAP, holdout=0.25, listener=Heard()),
        Detector.fit([np.dstack([image] * 3) for image in grey], recipe=CHEAP, holdout=0.25, listener=Heard()),
    )


def test_arrays_of_more_than_8_bits_are_scaled_like_files(arrays: list[np.ndarray[Any, Any]]) -> None:
    deep = [image.astype(np.uint16) * 16 for image in arrays]
    with pytest.warns(UserWarning, match="4095"):
        detector = Detector.fit(deep, recipe=CHEAP, holdout=0.25, listener=Heard())
    assert detector.preprocessing.depth.whole == 4095
    assert detector.inspect(deep[0]).verdict == "PASS"


def test_a_tensor_with_a_recipe_of_its_own_keeps_its_pixels() -> None:
    images = draw_dataset("plate", size=48, train=12, good=0, bad=0).train
    assert Detector.fit(images, recipe=CHEAP, holdout=0.25, listener=Heard()).preprocessing.file_side == 48
    whole = change(presets.FAST, {"encoder.width": 8, "training.epochs": 0, "size": 16})
    assert Detector.fit(images, recipe=whole, holdout=0.25, listener=Heard()).recipe == whole


def test_what_is_no_image_is_refused(arrays: list[np.ndarray[Any, Any]]) -> None:
    with pytest.raises(DataError, match="no good images"):
        Detector.fit([], recipe=CHEAP)
    with pytest.raises(DataError, match="1 good image"):
        Detector.fit(arrays[0], recipe=CHEAP)
    for call in (lambda: Detector.fit(arrays, channels="grb"), lambda: images_in(arrays, "BGR")):
        with pytest.raises(SettingError, match="channels"):
            call()


# --- inspection ---


def test_single_in_single_out_and_a_list_for_a_list(
    detector: Detector, parts: list[Path], arrays: list[np.ndarray[Any, Any]]
) -> None:
    alone = [detector.inspect(file) for file in parts[:3]]
    assert detector.inspect(parts[:3]) == alone
    scores = [verdict.score for verdict in alone]
    for given in (arrays[:3], tuple(arrays[:3]), [Image.fromarray(image) for image in arrays[:3]]):
        assert [verdict.score for verdict in detector.inspect(given)] == scores
    stack = np.stack(arrays[1:6:2])
    scores = [detector.inspect(image).score for image in stack]
    first = torch.from_numpy(stack).permute(0, 3, 1, 2)
    for images in (stack, stack.transpose(0, 3, 1, 2), first):
        found = detector.inspect(images, name="frame")
        assert [verdict.score for verdict in found] == scores
        assert [verdict.image for verdict in found] == ["frame 0", "frame 1", "frame 2"]
    assert detector.inspect(first[0]).score == scores[0]
    assert len(detector.inspect(stack[:1])) == 1
    assert detector.inspect([]) == []
    with pytest.raises(SettingError, match="several images"):
        detector.examine(stack)


def test_frames_of_opencv_are_read_as_bgr(detector: Detector, arrays: list[np.ndarray[Any, Any]]) -> None:
    expected, frame = detector.inspect(arrays[0]), np.ascontiguousarray(arrays[0][..., ::-1])
    assert detector.inspect(frame, channels="bgr") == expected
    assert detector.examine(frame, channels="bgr").verdict == expected
    assert detector.inspect([frame], channels="bgr") == [expected]
    alpha = np.dstack([frame, np.full(frame.shape[:2], 255, np.uint8)])
    assert detector.inspect(alpha, channels="bgr") == expected
    assert detector.inspect(frame[..., 0], channels="bgr").score == detector.inspect(frame[..., 0]).score


def test_swapped_channels_are_hinted_at_once(
    detector: Detector, parts: list[Path], arrays: list[np.ndarray[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = np.ascontiguousarray(arrays[0][..., ::-1])
    assert detector.inspect(arrays[0]).verdict == "PASS"
    again = Detector.of(detector)
    with pytest.warns(UserWarning, match='channels="bgr"'):
        assert again.inspect(frame).verdict != "PASS"
    again.inspect(frame)  # a second warning would be an error here
    other = Detector.of(detector)
    other.inspect(arrays[0])
    other.inspect(255 - arrays[0][..., 0])  # grey: nothing to swap
    other.inspect(Image.fromarray(frame))  # knows its channels
    other.inspect(frame, channels="bgr")
    other.inspect(parts[0])
    odd = 255 - arrays[0]
    score = detector.score(torch.tensor(odd).permute(2, 0, 1)[None])
    assert float(score) > detector.decides.review
    monkeypatch.setattr(type(detector.model), "score", lambda *_: 0.9 * score)  # lower, and not far lower
    assert Detector.of(detector).inspect(odd).verdict != "PASS"


@pytest.mark.parametrize("wrong", [5, None, object()])
def test_what_cannot_be_an_image_is_refused_by_its_type(detector: Detector, wrong: object) -> None:
    with pytest.raises(SettingError, match=type(wrong).__name__):
        detector.inspect(wrong)  # type: ignore[arg-type]


# --- what a notebook shows ---


def test_a_detector_is_described_in_a_line_and_in_a_table(detector: Detector, parts: list[Path]) -> None:
    line, table = repr(detector), detector._repr_html_()
    assert "\n" not in line
    assert len(line) < 300
    for fact in (str(parts[0].parent), "from scratch", str(detector.origin["good_images"]), f"{detector.limit:.4g}"):
        assert fact in line
        assert fact in table
    bare = Detector.of(detector)
    bare.calibration, bare.origin = None, {"data": "<script>"}
    assert "<script>" not in bare._repr_html_()
    assert "none" in repr(bare)


def test_a_verdict_is_plotted(detector: Detector, parts: list[Path], arrays: list[np.ndarray[Any, Any]]) -> None:
    """For a file and for an array; the picture, its boxes and the heat map."""
    defect = arrays[0].copy()
    defect[20:40, 20:40] = 255 - defect[20:40, 20:40]
    for source in (defect, Image.fromarray(defect), parts[0]):
        verdict = detector.inspect(source)
        figure = verdict.plot()
        picture, heat, *_ = figure.axes
        np.testing.assert_array_equal(picture.images[0].get_array(), detector.examine(source).picture)
        assert len(picture.patches) == len(verdict.regions)
        np.testing.assert_array_equal(heat.images[1].get_array(), detector.examine(source).heat)
        height, width = verdict.map.shape
        assert verdict.mask.shape == (height, width) == detector.examine(source).picture.shape[:2]
        inside = np.zeros((height, width), bool)
        for top, left, bottom, right in (region.box for region in verdict.regions):
            inside[top:bottom, left:right] = True
        assert (inside | ~verdict.mask).all()
        assert verdict.mask.any() == bool(verdict.regions)
        assert tuple(heat.images[1].get_extent()) == (-0.5, 59.5, 63.5, -0.5)
        figure.canvas.draw()
    assert detector.inspect(defect).regions
    assert len(detector.examine(defect).plot().axes) == 3
    assert [len(each.plot().axes) for each in detector.inspect([defect, parts[0]])] == [3, 3]


def test_a_verdict_without_an_image_says_so_and_its_value_is_unchanged(detector: Detector, parts: list[Path]) -> None:
    verdict = detector.inspect(parts[0])
    restored = copy.deepcopy(verdict)
    assert restored == verdict == detector.examine(parts[0]).verdict
    with pytest.raises(SettingError, match="inspect"):
        restored.plot()


def test_a_detector_of_whole_images_is_plotted_without_a_heat_map(arrays: list[np.ndarray[Any, Any]]) -> None:
    whole = change(presets.PARTS, {"encoder.width": 8, "training.epochs": 0, "size": 16, "training.batch": 4})
    detector = Detector.fit(arrays, recipe=whole, holdout=0.25, listener=Heard())
    assert len(detector.inspect(Image.fromarray(arrays[0])).plot().axes) == 1
