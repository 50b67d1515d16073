"""Sheets of pictures: outliers outlined exactly where they were altered, masks with a dim background."""

import numpy as np
import pytest
import torch

import contracts
from firm.errors import SettingError
from firm.images.decode import decode
from firm.images.foreground import RULES, Rule
from firm.outliers.registry import CutPaste, PerlinBlend, Rotations
from firm.report import sheets
from firm.report.sheets import DIMMED, IGNORED, draw_masks, draw_outliers, masked
from firm.types import Outliers


def made_of(group, where=None, channels=3, side=24):
    images = torch.full((len(group), channels, side, side), 128, dtype=torch.uint8)
    return Outliers(images, torch.tensor(group), where)


def outlined(path):
    """Which pixels of the sheet have the colour of the outline."""
    colour = np.array([int(sheets.ALTERED_LINE[i : i + 2], 16) for i in (1, 3, 5)])
    return (np.abs(decode(path).astype(int) - colour) < 40).all(2)


@pytest.fixture
def sheet(tmp_path, monkeypatch):
    """Draw a sheet and say what its panels hold: title, label, picture and outline of each."""
    figures = []
    save = sheets.save_figure
    monkeypatch.setattr(sheets, "save_figure", lambda figure, path: figures.append(figure) or save(figure, path))

    def draw(originals, outliers, title="outliers"):
        draw_outliers(originals, outliers, tmp_path / "sheet.png", title)
        return figures[-1]

    return draw


def rows_of(figure):
    """The axes in rows, those with a picture only."""
    grid = figure.axes[0].get_subplotspec().get_gridspec()
    places = np.array(figure.axes).reshape(grid.nrows, grid.ncols)
    return [[place for place in line if place.images] for line in places]


def pictures(line):
    return [place.images[0].get_array() for place in line]


def test_each_example_is_shown_before_after_and_outlined(sheet, tmp_path):
    inliers = contracts.images_of(2, 3, 32)
    made = PerlinBlend()(inliers, rng=contracts.generator())
    figure = sheet(inliers, {"perlin-blend": made}, title="two parts")
    (line,) = rows_of(figure)
    assert len(line) == 6
    for i in range(2):
        before, after, again = pictures(line[3 * i : 3 * i + 3])
        np.testing.assert_array_equal(before, inliers[i].permute(1, 2, 0))
        np.testing.assert_array_equal(after, made.images[i].permute(1, 2, 0))
        np.testing.assert_array_equal(again, after)
        assert [len(place.collections) for place in line[3 * i : 3 * i + 3]] == [0, 0, 1]  # a contour
    assert figure.get_suptitle() == "two parts"
    assert [place.get_title() for place in line] == ["original", "outlier", "altered"] * 2
    assert decode(tmp_path / "sheet.png").shape[2] == 3


def test_kinds_have_rows_of_their_own_with_at_most_four_examples(sheet):
    inliers = contracts.images_of(9, 3, 24)
    plain, union = made_of([1] * 9), made_of([2, 1, 2, 1, 2, 1, 2, 2, 2])
    union.images[:] = torch.arange(9, dtype=torch.uint8)[:, None, None, None]
    figure = sheet(inliers, {"plain": plain, "union": union})
    lines = rows_of(figure)
    labels = [line[0].texts[0].get_text() for line in lines]
    assert labels == ["plain", "union 1", "union 2"]
    assert [len(line) for line in lines] == [12, 9, 12]
    assert [int(picture[0, 0, 0]) for picture in pictures(lines[1])[1::3]] == [1, 3, 5]
    assert [int(picture[0, 0, 0]) for picture in pictures(lines[2])[1::3]] == [0, 2, 4, 6]
    np.testing.assert_array_equal(pictures(lines[1])[0], inliers[1].permute(1, 2, 0))


def test_the_outline_runs_between_altered_and_other_pixels(sheet):
    where = torch.zeros(2, 24, 24, dtype=torch.bool)
    where[0, 5:9, 10:20] = True
    where[1, 2:4, 3:7] = True
    (line,) = rows_of(sheet(contracts.images_of(2, 3, 24), {"some": made_of([1, 1], where)}))
    first, second = (place.collections[0].get_paths()[0].vertices for place in line[2::3])
    assert (first.min(0).tolist(), first.max(0).tolist()) == ([9.5, 4.5], [19.5, 8.5])
    assert (second.min(0).tolist(), second.max(0).tolist()) == ([2.5, 1.5], [6.5, 3.5])


@pytest.mark.parametrize("where", [None, torch.ones(1, 24, 24, dtype=torch.bool)])
def test_an_image_altered_everywhere_is_framed(sheet, where, tmp_path):
    ((_, _, place),) = rows_of(sheet(made_of([1]).images, {"some": made_of([1], where)}))
    (path,) = place.collections[0].get_paths()
    assert path.vertices.min(0).tolist() == [-0.5, -0.5]
    assert path.vertices.max(0).tolist() == [23.5, 23.5]
    assert outlined(tmp_path / "sheet.png").any()


def test_nothing_is_outlined_where_nothing_was_altered(sheet, tmp_path):
    sheet(made_of([1]).images, {"some": made_of([1], torch.zeros(1, 24, 24, dtype=torch.bool))})
    assert not outlined(tmp_path / "sheet.png").any()


def test_grey_and_oblong_images_are_drawn_too(sheet):
    inliers = contracts.images_of(3, 1, 20, 40)
    outliers = {
        "perlin-blend": PerlinBlend()(inliers, rng=contracts.generator()),
        "cutpaste": CutPaste()(inliers, rng=contracts.generator()),
    }
    lines = rows_of(sheet(inliers, outliers))
    np.testing.assert_array_equal(pictures(lines[0])[0][..., 2], inliers[0, 0])


def test_a_source_may_colour_grey_images(sheet):
    inliers = contracts.images_of(2, 1, 24)
    lines = rows_of(
        sheet(inliers, {"exposure": made_of([1, 1]), "rotations": Rotations()(inliers, rng=contracts.generator())})
    )
    assert pictures(lines[0])[1].shape == (24, 24, 3)


def test_a_sheet_of_nothing_is_refused(tmp_path):
    for empty in ({}, {"perlin-blend": made_of([])}):
        with pytest.raises(SettingError):
            draw_outliers(contracts.images_of(1), empty, tmp_path / "sheet.png", "none")
    assert not (tmp_path / "sheet.png").exists()


# masks


@pytest.mark.parametrize(("count", "channels", "shown"), [(1, 1, 1), (30, 3, 12)])
def test_masks_are_drawn_of_up_to_twelve_images(tmp_path, monkeypatch, count, channels, shown):
    drawn = []
    monkeypatch.setattr(sheets, "masked", lambda image, *_: drawn.append(image) or masked(image, *_))
    images, path = contracts.images_of(count, channels, 24, 20), tmp_path / "new" / "masks.png"
    draw_masks(images, images[:, 0] > 128, Rule(method="otsu"), path, "noise")
    assert len(drawn) == shown
    assert torch.equal(drawn[-1], images[-1])  # to the last of all
    assert [file.name for file in path.parent.iterdir()] == ["masks.png"]
    assert decode(path).std() > 10


@pytest.mark.parametrize("channels", [1, 3])
def test_the_background_is_dimmed_and_ignored_pixels_are_red(channels):
    image = contracts.images_of(1, channels, 8, 6)[0]
    mask, ignored = np.zeros((2, 8, 6), bool)
    mask[2:5, 1:4], ignored[6, 5] = True, True
    pixels = image.expand(3, -1, -1).permute(1, 2, 0).numpy()
    shown = masked(image, mask, ignored)
    np.testing.assert_array_equal(shown[mask], pixels[mask])
    np.testing.assert_array_equal(shown[0, 0], (pixels[0, 0] * DIMMED).astype(np.uint8))
    np.testing.assert_array_equal(shown[6, 5], ((pixels[6, 5] * DIMMED).astype(np.uint8) + np.array(IGNORED)) // 2)


def test_the_heading_names_the_rule_and_the_fraction(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr("matplotlib.figure.Figure.suptitle", lambda figure, text, **_: titles.append(text))
    images, masks = contracts.images_of(4, 3, 16), torch.zeros(4, 16, 16, dtype=torch.bool)
    masks[0] = True
    draw_masks(images, masks, RULES["mpdd"]["tubes"], tmp_path / "a.png", "tubes")
    draw_masks(images, masks, Rule(), tmp_path / "b.png", "cloth")
    for title, words in zip(titles, (("tubes", "otsu", "blue", "25.0%"), ("cloth", "25.0%")), strict=True):
        assert all(word in title for word in words)


def test_a_sheet_of_no_masks_is_refused(tmp_path):
    with pytest.raises(SettingError):
        draw_masks(contracts.images_of(0), torch.zeros(0, 16, 16, dtype=torch.bool), Rule(), tmp_path / "a.png", "none")
    assert not (tmp_path / "a.png").exists()
