"""Overlays: one scale for all pictures, heat at its place, the picture's own aspect, names that never collide."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firm.errors import MachineError, ModelFileError
from firm.images.decode import decode
from firm.report import heatmap as heat
from firm.report.heatmap import beside_scale, ends, grey, levels, overlay, places, write_overlay

GREY = np.full((40, 60, 3), 128, np.uint8)


def plane(value, height=40, width=60):
    return np.full((height, width), value, np.float32)


def naive(picture, warmth, threshold):
    """The overlay of a picture without regions, pixel by pixel."""
    shown, last = np.zeros_like(picture), len(heat.COLOURS) - 1
    for y in range(picture.shape[0]):
        for x in range(picture.shape[1]):
            level = min(1.0, max(0.0, warmth[y, x] / (2 * threshold)))
            before = min(int(level * last), last - 1)
            way = level * last - before
            opacity = heat.OPACITY * min(1.0, 2 * level)
            grey = picture[y, x] @ (0.299, 0.587, 0.114)
            for c in range(3):
                colour = (1 - way) * heat.COLOURS[before][c] + way * heat.COLOURS[before + 1][c]
                shown[y, x, c] = round((1 - opacity) * grey + opacity * colour)
    return shown


def test_the_colours_are_those_of_the_scale():
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (12, 17, 3), dtype=np.uint8)
    warmth = rng.uniform(-1, 3, (12, 17)).astype(np.float32)
    expected = naive(picture, warmth, 3.0)
    np.testing.assert_allclose(overlay(picture, warmth, 3.0).astype(int), expected, atol=1)


def test_no_heat_leaves_the_picture_in_grey():
    picture = np.random.default_rng(1).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    before = picture.copy()
    np.testing.assert_array_equal(overlay(picture, plane(0, 3, 3), 2.0), grey(picture))
    np.testing.assert_array_equal(overlay(picture, plane(-5, 3, 3), 2.0), grey(picture))
    overlay(picture, plane(9, 3, 3), 2.0, marked=plane(1, 3, 3) > 0)
    np.testing.assert_array_equal(picture, before)  # nothing is drawn into what was given


def test_beyond_twice_the_threshold_nothing_changes():
    np.testing.assert_array_equal(overlay(GREY, plane(4), 2.0), overlay(GREY, plane(400), 2.0))
    assert (overlay(GREY, plane(3.6), 2.0) != overlay(GREY, plane(4), 2.0)).any()


def test_the_scale_is_the_same_whatever_else_is_in_the_picture():
    """A scale stretched to each image's own range would make every good part look defective somewhere."""
    mild, hot = plane(0.5), plane(0.5)
    hot[:, 50:] = 100
    np.testing.assert_array_equal(overlay(GREY, mild, 1.0)[:, :45], overlay(GREY, hot, 1.0)[:, :45])


# Machado, Oliveira and Fernandes 2009, severity 1, on linear light
VISION = {
    "everyone": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
PARTS = {
    "blue": (40, 80, 170),
    "green": (40, 130, 60),
    "grey": (128, 128, 128),
    "black": (16, 16, 16),
    "white": (235,) * 3,
}


def lab(colour, vision):
    """CIELAB of sRGB as somebody sees it: distances of 10 and more are plain at a glance."""
    linear = np.asarray(colour, float) / 255
    linear = np.where(linear <= 0.04045, linear / 12.92, ((linear + 0.055) / 1.055) ** 2.4)
    xyz = np.clip(linear @ np.transpose(VISION[vision]), 0, 1) @ TO_XYZ.T / (0.9505, 1, 1.089)
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.stack([116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], -1)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("part", PARTS)
def test_heat_is_seen_on_any_part_by_anyone_and_more_heat_is_lighter(part, vision):
    picture = np.full((1, 21, 3), PARTS[part], np.uint8)
    warmth = np.linspace(1, 2, 21, dtype=np.float32)[None]
    seen, bare = (lab(each[0], vision) for each in (overlay(picture, warmth, 1.0), overlay(picture, 0 * warmth, 1.0)))
    assert np.linalg.norm(seen - bare, axis=-1).min() > 10
    assert (np.diff(seen[:, 0]) > 0.2).all()
    assert seen[-1, 0] - seen[0, 0] > 20


@pytest.mark.parametrize("shade", [0, 128, 255])
def test_a_line_that_shows_on_any_ground_goes_round_the_regions_only(shade):
    warmth, marked = plane(2.0), plane(0) > 0
    marked[10:20, 10:30] = True
    picture = np.full((40, 60, 3), shade, np.uint8)
    shown = overlay(picture, warmth, 1.0, marked=marked)
    lined, edged = ((shown == colour).all(2) for colour in (heat.LINE, heat.EDGE))
    assert lined[10, 10:30].all()
    assert lined[10:20, 29].all()
    assert edged[9, 10:30].all()
    assert not (lined | edged)[13:17, 13:27].any()
    assert not (lined | edged)[:8].any()
    assert not (lined | edged)[22:].any()
    np.testing.assert_array_equal(overlay(picture, warmth, 1.0, marked=plane(0) > 0), overlay(picture, warmth, 1.0))


def test_heat_of_another_size_lies_where_it_belongs():
    warmth = np.zeros((4, 4), np.float32)
    warmth[0, 3] = 5
    changed = (overlay(np.full((80, 200, 3), 128, np.uint8), warmth, 1.0) != 128).any(2)
    assert changed[:20, 150:].all()
    assert not changed[40:].any()
    assert not changed[:, :100].any()


@pytest.mark.parametrize("threshold", [np.inf, np.nan])
def test_a_threshold_without_a_scale_is_refused(threshold):
    with pytest.raises(ModelFileError, match=f"{threshold:g}"):
        overlay(GREY, plane(1), threshold)


@pytest.mark.parametrize("threshold", [0.0, -0.3])
def test_a_threshold_of_nothing_colours_only_what_is_above_it(threshold):
    """A good picture, of a heat of 0 throughout, stays as it is; the warm half of the scale is one score long."""
    for nothing in (threshold, threshold - 0.1, threshold - 50):
        np.testing.assert_array_equal(overlay(GREY, plane(nothing), threshold), GREY)
    for above in (0.001, 0.3, 0.9, 1.0, 7.0):
        inside = overlay(GREY, plane(threshold + above), threshold)[20, 30].astype(int)
        expected = naive(GREY[:1, :1], plane(1 + above, 1, 1), 1.0)[0, 0]  # as far above a threshold of 1
        np.testing.assert_allclose(inside, expected, atol=1)


def test_large_pictures_keep_their_pixels(tmp_path):
    picture = np.zeros((1500, 3000, 3), np.uint8)
    picture[:, :1500] = (200, 10, 60)
    write_overlay(tmp_path / "a.png", picture, plane(0, 8, 8), 1.0)
    written = decode(tmp_path / "a.png")
    extra = 2 * heat.MARGIN + heat.BAR + heat.LABELS
    assert written.shape == (1500, 3000 + extra, 3)
    np.testing.assert_array_equal(written[:, :3000], grey(picture))
    assert (written[heat.LONGEST + 1 :, 3000:] == 255).all()


def test_small_pictures_keep_their_pixels_beside_the_scale(tmp_path):
    picture = np.random.default_rng(2).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    write_overlay(tmp_path / "deep" / "down" / "a.png", picture, plane(0.7, 20, 30), 1.0)
    written = decode(tmp_path / "deep" / "down" / "a.png")
    np.testing.assert_array_equal(written[:20, :30], overlay(picture, plane(0.7, 20, 30), 1.0))
    assert len(written) == heat.LEAST
    assert [file.name for file in (tmp_path / "deep" / "down").iterdir()] == ["a.png"]  # nothing half-written


def test_the_scale_shows_what_the_colours_mean():
    """A row of the bar has the colour that a grey picture gets from the heat it stands for."""
    sheet = beside_scale(np.full((300, 50, 3), 90, np.uint8), 2.0)
    column = sheet[: heat.LONGEST, 50 + heat.MARGIN + heat.BAR // 2]
    for row in (0, 40, 100, 150, 200, heat.LONGEST - 1):
        value = 4 * (1 - row / (heat.LONGEST - 1))
        expected = naive(np.full((1, 1, 3), 128, np.uint8), plane(value, 1, 1), 2.0)[0, 0]
        np.testing.assert_allclose(column[row].astype(int), expected, atol=1)
    assert tuple(column[heat.LONGEST // 2]) == heat.INK  # the threshold is in the middle
    labels = sheet[:, 50 + heat.MARGIN + heat.BAR + 4 :]
    assert (labels < 128).any()
    assert (labels[:, -4:] == 255).all()  # and nothing is cut off


@pytest.mark.parametrize("threshold", [0.0, -0.3])
def test_the_scale_of_a_threshold_of_nothing_is_plain_below_it(threshold):
    sheet = beside_scale(np.full((300, 50, 3), 90, np.uint8), threshold)
    column = sheet[: heat.LONGEST, 50 + heat.MARGIN + heat.BAR // 2]
    middle = heat.LONGEST // 2
    assert (column[middle + 1 :] == 128).all()
    for row in (0, 40, 100):
        value = threshold + 1 - 2 * row / (heat.LONGEST - 1)
        np.testing.assert_array_equal(column[row], overlay(GREY, plane(value), threshold)[20, 30])
    labels = sheet[heat.LONGEST - 16 : heat.LONGEST, 50 + heat.MARGIN + heat.BAR + 4 :]
    assert (labels < 128).any()  # the lower end is named, too


@pytest.mark.parametrize("threshold", [0.0, 12.5, -0.3])
def test_the_ends_of_the_scale_are_as_far_from_the_threshold(threshold):
    low, high = ends(threshold)
    assert (low + high) / 2 == pytest.approx(threshold)
    assert levels(plane(high), threshold).max() == pytest.approx(1)
    assert levels(plane(low), threshold).max() == 0
    assert low == 0 or threshold <= 0


def test_long_numbers_fit_beside_the_scale():
    assert (beside_scale(GREY, 1.234e-12)[:, -2:] == 255).all()


def test_an_overlay_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError):
        write_overlay(tmp_path / "file" / "a.png", GREY, plane(0), 1.0)


def made(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return [folder / name for name in names]


def test_places_keep_the_sub_folders_of_what_was_given(tmp_path):
    files = made(tmp_path, "test/good/000.png", "test/dent/000.jpg")
    assert places(files, [tmp_path / "test"]) == [Path("good/000.png"), Path("dent/000.png")]
    assert places(files[:1], [tmp_path / "test"]) == [Path("good/000.png")]  # though good/ is the only one
    assert places(files, [tmp_path]) == [Path("test/good/000.png"), Path("test/dent/000.png")]


def test_places_of_several_folders_and_files_do_not_meet(tmp_path):
    files = made(tmp_path, "one/a.png", "two/a.png", "a.png")
    roots = [tmp_path / "one", tmp_path / "two", tmp_path / "a.png"]
    assert places(files, roots) == [Path("one/a.png"), Path("two/a.png"), Path("a.png")]


def test_places_are_below_the_folder_of_overlays_however_paths_are_written(tmp_path, monkeypatch):
    made(tmp_path, "here/a.png", "there/b.png")
    monkeypatch.chdir(tmp_path / "here")
    assert places([Path("a.png")], [Path("a.png")]) == [Path("a.png")]
    assert places([Path("a.png"), Path("../there/b.png")], [Path(), Path("../there")]) == [
        Path("here/a.png"),
        Path("there/b.png"),
    ]


@given(
    st.lists(st.sampled_from(["a.png", "a.jpg", "a.jpg.png", "a.png.png", "d/a.png", "d/a.b.png", "b.bmp"]), min_size=1)
)
def test_only_one_file_has_an_overlay_of_its_name(names):
    found = places([Path("/parts") / name for name in names], [Path("/parts/x.png")])
    assert len(set(zip(names, found, strict=True))) == len(set(found)) == len(set(names))
    assert {place.suffix for place in found} == {".png"}
