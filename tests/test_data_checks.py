"""What is said of good images before they are learnt from: nothing of sound ones, and of others what and which."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from firm.data.drawn import drawn
from firm.data.folder import load_folder
from firm.doubting import NEAR, OTHERS, SIDE, check_good, copied, doubts_about, unlike
from firm.types import FirmError, OneClass
from image_files import encoded


def parts(product: str = "plate", seed: int = 0, images: int = 40) -> Tensor:
    return drawn(product, size=48, seed=seed, train=images, good=1, bad=1)[0].train


def task(images: Tensor, files: tuple[Path, ...] = ()) -> OneClass:
    return OneClass("brackets", images, images[:0], torch.zeros(0, dtype=torch.bool), 32, files=files)


def saved_anew(images: Tensor, quality: int) -> Tensor:
    """As JPEG and back."""
    found = []
    for image in images:
        content = encoded(image.permute(1, 2, 0).numpy(), "JPEG", quality=quality)
        found.append(torch.from_numpy(np.array(Image.open(io.BytesIO(content)))).permute(2, 0, 1))
    return torch.stack(found)


def brighter(images: Tensor) -> Tensor:
    return (images.float() * 1.1 + 4).clamp(0, 255).to(torch.uint8)


@pytest.mark.parametrize("product", ["plate", "weave", "label"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_nothing_is_said_of_sound_images(product: str, seed: int) -> None:
    good = parts(product, seed, 60)
    check_good(task(good))
    for count in (20, 60):
        assert doubts_about(task(good[:count])) == []
    assert not unlike(good[:10], torch.ones(10, dtype=torch.bool)).any()


@pytest.mark.parametrize(
    ("count", "holdout", "promised", "takes"), [(2, 0.1, 50, 190), (19, 0.1, 33, 190), (12, 0.25, 25, 76)]
)
def test_few_images_are_told_what_they_can_promise(count: int, holdout: float, promised: int, takes: int) -> None:
    (told,) = doubts_about(task(parts(images=count)), holdout=holdout)
    assert told.startswith(f"{count} good images are few: ")
    assert f"{promised} % at best, and 5 % takes {takes} images" in told


@pytest.mark.parametrize(("holdout", "false_calls"), [(0.0, 0.05), (0.1, 0.0)])
def test_what_is_refused_later_is_no_crash_now(holdout: float, false_calls: float) -> None:
    (told,) = doubts_about(task(parts(images=5)), holdout=holdout, false_calls=false_calls)
    assert told.endswith("at best")


@pytest.mark.parametrize("again", [lambda images: images, lambda images: saved_anew(images, 80)])
def test_copies_are_counted_once_and_found_wherever_they_are(again: object) -> None:
    good = parts(images=46)
    mixed = torch.cat([good, again(good[:14])])  # type: ignore[operator]
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    (told,) = doubts_about(task(mixed[order]))
    assert told.startswith("14 of 60 good images are copies of others (for example number ")
    assert copied(mixed).nonzero().squeeze(1).tolist() == list(range(46, 60))  # the earlier one is the original


def test_many_copies_of_one_image_are_all_copies() -> None:
    good = parts(images=30)
    assert int(copied(torch.cat([good, good[:1].expand(OTHERS + 10, -1, -1, -1)])).sum()) == OTHERS + 10


def test_another_exposure_of_a_part_is_no_copy() -> None:
    good = parts(images=30)
    assert not copied(torch.cat([good, brighter(good)])).any()


def test_flat_textures_are_no_copies_of_each_other() -> None:
    rng = torch.Generator().manual_seed(0)
    flat = torch.randint(126, 130, (30, 3, 48, 48), generator=rng, dtype=torch.uint8)
    assert not copied(flat).any()
    assert doubts_about(task(flat)) == []


def test_copies_as_loops_say_it() -> None:
    good = parts(images=26)
    images = torch.cat([good, saved_anew(good[:4], 80), brighter(good[:3])])
    cells = images.double().mean(1).reshape(len(images), SIDE, 3, SIDE, 3).mean((2, 4)).flatten(1)
    apart = [[float((one - other).norm()) for other in cells] for one in cells]
    count = min(OTHERS, (len(images) - 1) // 2)
    stranger = [sorted(row)[count] for row in apart]  # itself is the first
    expected = [any(apart[i][j] < NEAR * min(stranger[i], stranger[j]) for j in range(i)) for i in range(len(images))]
    assert copied(images).tolist() == expected
    assert sum(expected) == 4


def test_strangers_are_named_by_file_or_number(tmp_path: Path) -> None:
    good = parts(images=40)
    good[7], good[21] = parts("label", images=1)[0], 0
    (told,) = doubts_about(task(good))
    assert told.startswith("2 of 40 good images look unlike all others (number 8, number 22)")
    for number, image in enumerate(good):
        (tmp_path / f"{number:02d}.png").write_bytes(encoded(image.permute(1, 2, 0).numpy()))
    (tmp_path / "03.png").write_bytes(b"no image")
    with pytest.warns(UserWarning, match="left out"):
        loaded = load_folder(tmp_path, 48)
    (told,) = doubts_about(loaded)
    assert "2 of 39 good images look unlike all others (07.png, 21.png)" in told


def test_at_most_three_are_named() -> None:
    good = parts(images=60)
    for number, level in ((3, 0), (9, 60), (12, 190), (40, 255)):
        good[number] = level
    (told,) = doubts_about(task(good))
    assert "4 of 60 good images look unlike all others (number 4, number 10, number 13);" in told


def test_copies_do_not_make_the_rest_look_unlike() -> None:
    """Where most images have copies the usual distance to the nearest is that of copies, and all others seem far."""
    good = parts(images=30)
    doubts = doubts_about(task(torch.cat([good, good[:20], saved_anew(good[:20], 80)])))
    assert [told[:40] for told in doubts] == ["40 of 70 good images are copies of other"]


def test_a_stranger_is_found_though_it_is_there_twice() -> None:
    good = parts(images=40)
    good[7] = good[8] = 0
    first, second = doubts_about(task(good))
    assert first.startswith("1 of 40 good images are copies of others (for example number 9)")
    assert second.startswith("1 of 40 good images look unlike all others (number 8)")


def test_what_nothing_can_be_learnt_from_is_refused() -> None:
    with pytest.raises(FirmError, match="brackets has 1 good image, which is too few; give at least 2"):
        check_good(task(parts(images=1)))
    with pytest.raises(FirmError, match="all 9 good images of brackets are the same picture, so nothing can be learnt"):
        check_good(task(parts(images=1).expand(9, -1, -1, -1)))
    nearly = parts(images=1).repeat(9, 1, 1, 1)
    nearly[8, 0, 0, 0] ^= 1
    check_good(task(nearly))
