"""The mask of ignored pixels: read from a file, resized, filled, and moved with the alignment of each image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import drawings
from cases import each
from firm.errors import SettingError
from firm.images.alignment import Conditioning
from firm.images.decode import shape_of
from firm.images.foreground import Rule
from firm.images.ignore_mask import check_ignored, fill_ignored, median_image, read_ignored, scaled
from firm.images.preprocess import resize

SIDE = 96
PLAIN = Conditioning(illumination="local")
ALIGNED = Conditioning(align=True, foreground=Rule(method="otsu"))
GOOD = drawings.screws(24).images
TURNED = drawings.screws(24, turned=True).images
CORNER = torch.zeros(SIDE, SIDE, dtype=torch.bool)
CORNER[:40, :44] = True


def test_every_ignored_pixel_becomes_its_nearest_free_neighbour() -> None:
    rng = torch.Generator().manual_seed(0)
    ignored = torch.rand(13, 17, generator=rng) < 0.8
    images = torch.randint(256, (3, 2, 13, 17), generator=rng).to(torch.uint8)
    after = fill_ignored(images, ignored)
    assert torch.equal(after[:, :, ~ignored], images[:, :, ~ignored])
    free = (~ignored).nonzero()
    for place in ignored.nonzero():
        away = (free - place).float().norm(dim=1)
        near = free[away <= away.min() * 1.05 + 0.05]  # the transform knows distances to a few percent
        candidates = [images[:, :, y, x].flatten().tolist() for y, x in near.tolist()]
        assert after[:, :, place[0], place[1]].flatten().tolist() in candidates
    assert torch.equal(fill_ignored(after, ignored), after)


@each("given, wanted", [((60, 90), (16, 16)), ((50, 31), (32, 32)), ((9, 40), (24, 24))])
def test_a_resized_mask_covers_whatever_an_ignored_pixel_has_a_part_in(
    given: tuple[int, int], wanted: tuple[int, int]
) -> None:
    ignored = torch.zeros(*given, dtype=torch.bool)
    ignored[given[0] // 3 : given[0] // 2, given[1] // 4 : given[1] // 2] = True
    there = scaled(ignored, *wanted)
    assert there.shape == wanted
    rng = torch.Generator().manual_seed(0)
    image = torch.randint(256, (1, 1, *given), generator=rng).to(torch.uint8)
    other = torch.where(ignored, 255 - image, image)
    touched = (resize(image, wanted[0]) != resize(other, wanted[0]))[0, 0]
    if min(given) >= wanted[0]:
        assert not (touched & ~there).any()
    over = F.adaptive_max_pool2d(ignored[None].float(), wanted)
    assert not (there & (F.max_pool2d(over, 3, 1, 1)[0] == 0)).any()  # and no further than a pixel beyond
    assert there[over[0] > 0].all()
    assert torch.equal(scaled(there, *wanted), there)


def test_what_cannot_be_meant_is_said() -> None:
    with pytest.raises(SettingError, match="marks every pixel"):
        check_ignored(torch.ones(4, 4, dtype=torch.bool))
    with pytest.raises(SettingError, match="marks no pixel"):
        check_ignored(torch.zeros(4, 4, dtype=torch.bool))
    with pytest.raises(SettingError, match="give bool"):
        check_ignored(torch.zeros(4, 4))
    nearly = torch.ones(64, 64, dtype=torch.bool)
    nearly[5, 5] = False
    with pytest.raises(SettingError, match="leaves no pixel"):
        scaled(nearly, 8, 8)


def test_a_file_must_lie_over_the_images(tmp_path: Path) -> None:
    Image.new("L", (80, 60)).save(tmp_path / "part.png")
    upright = Image.Exif()
    upright[0x0112] = 6
    Image.new("L", (60, 80)).save(tmp_path / "turned.jpg", exif=upright)
    assert shape_of(tmp_path / "part.png") == shape_of(tmp_path / "turned.jpg") == (60, 80)
    (tmp_path / "broken.png").write_bytes(b"nothing")
    images = [tmp_path / name for name in ("broken.png", "part.png", "turned.jpg")]

    def mask(width: int, height: int) -> Path:
        drawn = np.zeros((height, width), np.uint8)
        drawn[:10, :20] = 255
        Image.fromarray(drawn).save(tmp_path / "mask.png")
        return tmp_path / "mask.png"

    assert int(read_ignored(mask(81, 60), images).sum()) == 200
    assert read_ignored(mask(160, 120), images).shape == (120, 160)
    for width, height in ((60, 80), (83, 60), (80, 62)):
        with pytest.raises(SettingError, match=r"part\.png 80 x 60: the aspect differs"):
            read_ignored(mask(width, height), images)


# conditioning


def test_the_mask_stays_with_the_camera_and_leaves_the_pose_alone() -> None:
    plain, without = ALIGNED(TURNED[:6]), ALIGNED(TURNED[:6], CORNER)
    assert plain.frames is not None
    assert without.frames is not None
    assert torch.equal(plain.frames, without.frames)
    assert plain.ignored is plain.hidden() is None
    hidden = without.hidden()
    assert hidden is not None
    assert not (without.foreground & hidden).any()
    assert torch.equal(without.foreground, plain.foreground & ~hidden)
    for number in range(6):  # a pixel of the mask is found where the pose takes it
        to = without.frames[number] @ torch.tensor([22.0, 20.0, 1.0]).double()
        assert hidden[number, int(to[1].round().clamp(0, 95)), int(to[0].round().clamp(0, 95))]
    heat, anyway = without.back(torch.ones(6, SIDE, SIDE)), plain.back(torch.ones(6, SIDE, SIDE))
    assert not heat[:, CORNER].any()
    assert anyway[:, CORNER].any()
    assert torch.equal(heat[:, ~CORNER], anyway[:, ~CORNER])


def test_what_a_part_hides_looks_as_the_others_show_it() -> None:
    ready = ALIGNED(TURNED, CORNER)
    hidden, usual = ready.hidden(), ready.typical()
    assert hidden is not None
    assert usual is not None
    known = ~hidden.all(0)
    for y, x in ((48, 48), (40, 20), (50, 70), *known.nonzero()[::997].tolist()):
        shown = ready.images[~hidden[:, y, x], 0, y, x]
        assert usual[0, y, x] == shown.sort().values[(len(shown) - 1) // 2]
    after = ready.completed(usual)
    assert torch.equal(after.images, torch.where(hidden[:, None], usual, ready.images))
    assert torch.equal(after.foreground, ready.foreground)
    for still in (PLAIN(GOOD[:4], CORNER), ALIGNED(TURNED[:4])):
        assert still.typical() is None
        assert still.completed(None) is still
    away = torch.zeros(2, SIDE, SIDE, dtype=torch.bool)
    away[:, :, :50] = True
    assert torch.equal(
        median_image(GOOD[:2], away)[:, :, :51], median_image(GOOD[:2], away)[:, :, 50:51].expand(3, -1, 51)
    )


def test_an_object_that_is_ignored_as_a_whole_is_all_the_rest() -> None:
    everything = torch.ones(SIDE, SIDE, dtype=torch.bool)
    everything[:, 90:] = False
    left = Conditioning(foreground=Rule(method="otsu"))(GOOD[:2], everything)
    assert torch.equal(left.foreground, ~everything.expand(2, -1, -1))
