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
from firm.report.heatmap import beside_scale, ends, levels, overlay, places, write_overlay

GREY = np.full((40, 60, 3), 128, np.uint8)


def plane(value, height=40, width=60):
    return np.full((height, width), value, np.float32)


def naive(picture, warmth, threshold):
    """The overlay of a picture without anything above the threshold, pixel by pixel."""
    shown = np.zeros_like(picture)
    for y in range(picture.shape[0]):
        for x in range(picture.shape[1]):
            level = min(1.0, max(0.0, warmth[y, x] / (2 * threshold)))
            if level <= 0.45:
                way, one, other = level / 0.45, heat.COLD, heat.COOL
            elif level <= 0.5:
                way, one, other = (level - 0.45) / 0.05, heat.COOL, heat.WARM
            else:
                way, one, other = (level - 0.5) / 0.5, heat.WARM, heat.HOT
            opacity = heat.OPACITY * min(1.0, 2 * level)
            for c in range(3):
                colour = (1 - way) * one[c] + way * other[c]
                shown[y, x, c] = round((1 - opacity) * int(picture[y, x, c]) + opacity * colour)
    return shown


def test_the_colours_are_those_of_the_scale():
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (12, 17, 3), dtype=np.uint8)
    warmth = rng.uniform(-1, 3, (12, 17)).astype(np.float32)
    expected = naive(picture, warmth, 3.0)
    np.testing.assert_allclose(overlay(picture, warmth, 3.0).astype(int), expected, atol=1)


def test_no_heat_leaves_the_picture():
    picture = np.random.default_rng(1).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    before = picture.copy()
    np.testing.assert_array_equal(overlay(picture, plane(0, 3, 3), 2.0), picture)
    np.testing.assert_array_equal(overlay(picture, plane(-5, 3, 3), 2.0), picture)
    overlay(picture, plane(9, 3, 3), 2.0)
    np.testing.assert_array_equal(picture, before)  # nothing is drawn into what was given


def test_beyond_twice_the_threshold_nothing_changes():
    np.testing.assert_array_equal(overlay(GREY, plane(4), 2.0), overlay(GREY, plane(400), 2.0))
    assert (overlay(GREY, plane(3.6), 2.0) != overlay(GREY, plane(4), 2.0)).any()


def test_the_scale_is_the_same_whatever_else_is_in_the_picture():
    """A scale stretched to each image's own range would make every good part look defective somewhere."""
    mild, hot = plane(0.5), plane(0.5)
    hot[:, 50:] = 100
    np.testing.assert_array_equal(overlay(GREY, mild, 1.0)[:, :45], overlay(GREY, hot, 1.0)[:, :45])


def test_cool_below_the_threshold_warm_above():
    below, above = overlay(GREY, plane(0.85), 1.0)[20, 30].astype(int), overlay(GREY, plane(1.05), 1.0)[20, 30]
    assert below[2] > below[0] + 60
    assert above[0] > int(above[2]) + 60


def test_a_line_goes_round_what_is_above_the_threshold_only():
    warmth = plane(0.0)
    warmth[10:20, 10:30] = 1.2
    lined = (overlay(GREY, warmth, 1.0) == heat.LINE).all(2)
    assert lined[10, 10:30].all()
    assert lined[10:20, 29].all()
    assert not lined[12:18, 12:28].any()
    assert not lined[:9].any()
    assert not lined[21:].any()
    warmth[10:20, 10:30] = 0.95
    assert not (overlay(GREY, warmth, 1.0) == heat.LINE).all(2).any()


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


@pytest.mark.parametrize("threshold", [1e-3, -0.3])
def test_a_line_goes_round_whatever_is_called(threshold):
    warmth = plane(threshold)
    assert not (overlay(GREY, warmth, threshold) == heat.LINE).all(2).any()
    warmth[10:20, 10:30] = np.nextafter(np.float32(threshold), np.float32(9))
    lined = (overlay(GREY, warmth, threshold) == heat.LINE).all(2)
    assert lined[10, 10:30].all()
    assert not lined[12:18, 12:28].any()
    assert not lined[21:].any()


@pytest.mark.parametrize(("height", "width", "shown"), [(3000, 1500, (1024, 512)), (600, 1024, (600, 1024))])
def test_large_pictures_are_shrunk_in_their_aspect(tmp_path, height, width, shown):
    picture = np.zeros((height, width, 3), np.uint8)
    picture[:, : width // 2] = (200, 10, 60)
    write_overlay(tmp_path / "a.png", picture, plane(0, 8, 8), 1.0)
    written = decode(tmp_path / "a.png")
    extra = 2 * heat.MARGIN + heat.BAR + heat.LABELS
    assert written.shape == (shown[0], shown[1] + extra, 3)
    assert written[5, 5].tolist() == [200, 10, 60]  # red stays red
    assert written[5, shown[1] - 5].tolist() == [0, 0, 0]
    assert (written[heat.LONGEST + 1 :, shown[1] :] == 255).all()


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
