"""Warnings about good images before training: none about sound ones, otherwise how many and which."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from firm.data.duplicates import COPY, NEIGHBOURS, THUMBNAIL_SIDE, check_good, duplicated, isolated, warnings_about
from firm.data.folder import Reading, load_folder
from firm.drawn.render import draw_dataset
from firm.errors import DataError
from firm.types import OneClass
from image_files import encoded


def parts(product: str = "plate", seed: int = 0, images: int = 40) -> Tensor:
    return draw_dataset(product, size=48, seed=seed, train=images, good=1, bad=1).train


def task(images: Tensor, files: tuple[Path, ...] = ()) -> OneClass:
    return OneClass("brackets", images, images[:0], torch.zeros(0, dtype=torch.bool), 32, files=files)


def reencoded(images: Tensor, quality: int) -> Tensor:
    """As JPEG and back."""
    found = []
    for image in images:
        content = encoded(image.permute(1, 2, 0).numpy(), "JPEG", quality=quality)
        found.append(torch.from_numpy(np.array(Image.open(io.BytesIO(content)))).permute(2, 0, 1))
    return torch.stack(found)


def brighter(images: Tensor) -> Tensor:
    return (images.float() * 1.1 + 4).clamp(0, 255).to(torch.uint8)


@pytest.mark.parametrize("product", ["plate", "weave", "label"])
def test_sound_images_give_no_warning(product: str) -> None:
    good = parts(product, 1, 60)
    check_good(task(good))
    for count in (20, 60):
        assert warnings_about(task(good[:count])) == []
    assert not isolated(good[:10], torch.ones(10, dtype=torch.bool)).any()


@pytest.mark.parametrize(
    ("count", "holdout", "rate", "needed"), [(2, 0.1, 50, 190), (19, 0.1, 33, 190), (12, 0.25, 25, 76)]
)
def test_few_images_get_the_best_possible_guarantee(count: int, holdout: float, rate: int, needed: int) -> None:
    (warning,) = warnings_about(task(parts(images=count)), holdout=holdout)
    assert warning.startswith(f"{count} good images are few: ")
    assert f"{rate} % at best, and 5 % takes {needed} images" in warning


@pytest.mark.parametrize(
    ("count", "shown", "fail", "rate"), [(10, 10, 0.0, 9), (10, 10, 0.3, 30), (12, 6, 0.0, 14), (25, 12, 0.0, 8)]
)
def test_few_parts_in_folds_get_the_rate_that_they_support(count: int, shown: int, fail: float, rate: int) -> None:
    (warning,) = warnings_about(task(parts(images=count)), holdout=1, parts=shown, fail=fail)
    assert f"{shown} good" in warning
    assert f"about {rate} %" in warning
    assert warnings_about(task(parts(images=25)), holdout=1, parts=25) == []


@pytest.mark.parametrize(("holdout", "false_calls"), [(0.0, 0.05), (0.1, 0.0)])
def test_settings_that_are_rejected_later_do_not_crash(holdout: float, false_calls: float) -> None:
    (warning,) = warnings_about(task(parts(images=5)), holdout=holdout, false_calls=false_calls)
    assert warning.endswith("at best")


@pytest.mark.parametrize("again", [lambda images: images, lambda images: reencoded(images, 80)])
def test_copies_are_counted_once_and_found_wherever_they_are(again: object) -> None:
    good = parts(images=46)
    mixed = torch.cat([good, again(good[:14])])  # type: ignore[operator]
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    (warning,) = warnings_about(task(mixed[order]))
    assert warning.startswith("14 of 60 good images are copies of others (for example number ")
    assert duplicated(mixed).nonzero().squeeze(1).tolist() == list(range(46, 60))  # the earlier one is the original


def test_many_copies_of_one_image_are_all_copies() -> None:
    good = parts(images=30)
    assert int(duplicated(torch.cat([good, good[:1].expand(NEIGHBOURS + 10, -1, -1, -1)])).sum()) == NEIGHBOURS + 10


def test_another_exposure_of_a_part_is_no_copy() -> None:
    good = parts(images=30)
    assert not duplicated(torch.cat([good, brighter(good)])).any()


def test_flat_textures_are_no_copies_of_each_other() -> None:
    rng = torch.Generator().manual_seed(0)
    flat = torch.randint(126, 130, (30, 3, 48, 48), generator=rng, dtype=torch.uint8)
    assert not duplicated(flat).any()
    assert warnings_about(task(flat)) == []


def test_copies_are_the_loops() -> None:
    good = parts(images=26)
    images = torch.cat([good, reencoded(good[:4], 80), brighter(good[:3])])
    cells = images.double().mean(1).reshape(len(images), THUMBNAIL_SIDE, 3, THUMBNAIL_SIDE, 3).mean((2, 4)).flatten(1)
    apart = [[float((one - other).norm()) for other in cells] for one in cells]
    count = min(NEIGHBOURS, (len(images) - 1) // 2)
    other = [sorted(row)[count] for row in apart]  # itself is the first
    expected = [any(apart[i][j] < COPY * min(other[i], other[j]) for j in range(i)) for i in range(len(images))]
    assert duplicated(images).tolist() == expected
    assert sum(expected) == 4


def test_isolated_images_are_named_by_file_or_number(tmp_path: Path) -> None:
    good = parts(images=40)
    good[7], good[21] = parts("label", images=1)[0], 0
    (warning,) = warnings_about(task(good))
    assert warning.startswith("2 of 40 good images look unlike all others (number 8, number 22)")
    for number, image in enumerate(good):
        (tmp_path / f"{number:02d}.png").write_bytes(encoded(image.permute(1, 2, 0).numpy()))
    (tmp_path / "03.png").write_bytes(b"no image")
    with pytest.warns(UserWarning, match="left out"):
        loaded = load_folder(tmp_path, Reading(48))
    (warning,) = warnings_about(loaded)
    assert "2 of 39 good images look unlike all others (07.png, 21.png)" in warning


def test_at_most_three_are_named() -> None:
    good = parts(images=60)
    for number, level in ((3, 0), (9, 60), (12, 190), (40, 255)):
        good[number] = level
    (warning,) = warnings_about(task(good))
    assert "4 of 60 good images look unlike all others (number 4, number 10, number 13);" in warning


def test_copies_do_not_isolate_the_rest() -> None:
    """Where most images have copies the usual distance to the nearest is that of copies, and all others seem far."""
    good = parts(images=30)
    warnings = warnings_about(task(torch.cat([good, good[:20], reencoded(good[:20], 80)])))
    assert [warning[:40] for warning in warnings] == ["40 of 70 good images are copies of other"]


def test_an_isolated_image_is_found_even_twice() -> None:
    good = parts(images=40)
    good[7] = good[8] = 0
    first, second = warnings_about(task(good))
    assert first.startswith("1 of 40 good images are copies of others (for example number 9)")
    assert second.startswith("1 of 40 good images look unlike all others (number 8)")


def test_too_few_or_equal_images_are_rejected() -> None:
    with pytest.raises(DataError, match="brackets has 1 good image"):
        check_good(task(parts(images=1)))
    with pytest.raises(DataError, match="all 9 good images of brackets are the same picture"):
        check_good(task(parts(images=1).expand(9, -1, -1, -1)))
    nearly = parts(images=1).repeat(9, 1, 1, 1)
    nearly[8, 0, 0, 0] ^= 1
    check_good(task(nearly))
