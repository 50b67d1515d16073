"""Drawn parts: deterministic, varied, and different from the good part exactly in the mask."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from firm.drawn.render import PRODUCTS, DrawnPart, draw, draw_dataset, write_folder
from firm.errors import DataError, SettingError

KINDS = [(product, defect) for product, made in PRODUCTS.items() for defect in made.defects]


def same(left: DrawnPart, right: DrawnPart) -> bool:
    return np.array_equal(left.image, right.image) and np.array_equal(left.mask, right.mask)


def test_a_good_part_has_its_shape_and_no_mask() -> None:
    for product in PRODUCTS:
        part = draw(product, index=0, size=96)
        assert (part.image.shape, part.image.dtype) == ((96, 96, 3), np.uint8)
        assert (part.mask.shape, part.mask.dtype) == ((96, 96), np.bool_)
        assert not part.mask.any()
        assert part.defect is None


@pytest.mark.parametrize(("product", "defect"), KINDS)
def test_a_defect_changes_its_mask_and_nothing_else(product: str, defect: str) -> None:
    for index in range(4):
        good = draw(product, index=index, split="bad")
        bad = draw(product, index=index, split="bad", defect=defect)
        difference = np.abs(good.image.astype(int) - bad.image).max(axis=2)
        assert bad.defect == defect
        assert not difference[~bad.mask].any()
        assert difference.max() > 20  # a person sees it
        assert 0.0005 < bad.mask.mean() < 0.5
        assert (difference[bad.mask] > 2).mean() > 0.2  # the mask is the defect, not its surroundings
    assert same(bad, draw(product, index=3, split="bad", defect=defect))


@pytest.mark.parametrize("product", PRODUCTS)
def test_every_size_can_be_drawn(product: str) -> None:
    for size in (32, 100, 256):
        for defect in PRODUCTS[product].defects:
            part = draw(product, index=1, size=size, defect=defect)
            assert part.image.shape == (size, size, 3)
            assert part.mask.any()


def test_a_part_is_the_same_part_at_every_size() -> None:
    for product in PRODUCTS:
        small, large = draw(product, index=2, size=64).image, draw(product, index=2, size=128).image
        halved = large.reshape(64, 2, 64, 2, 3).mean(axis=(1, 3))
        assert np.abs(small - halved).mean() < 8


@pytest.mark.parametrize("product", PRODUCTS)
def test_good_parts_vary(product: str) -> None:
    images = np.stack([draw(product, index=index, size=64).image for index in range(6)]).astype(float)
    assert np.abs(images[:, None] - images[None]).mean(axis=(2, 3, 4))[~np.eye(6, dtype=bool)].min() > 2
    assert images.mean(axis=(1, 2, 3)).std() > 2  # the light does


def test_seed_and_split_give_other_parts() -> None:
    for product in PRODUCTS:
        part = draw(product, index=0, size=64)
        assert not same(part, draw(product, index=0, size=64, seed=1))
        assert not same(part, draw(product, index=0, size=64, split="good"))


def test_no_part_depends_on_how_many_are_drawn() -> None:
    few = draw_dataset("label", size=48, train=2, good=1, bad=2)
    many = draw_dataset("label", size=48, train=4, good=3, bad=7)
    assert torch.equal(few.train, many.train[:2])
    assert torch.equal(few.test, many.test[[0, 3, 4]])
    assert torch.equal(few.truth.masks, many.truth.masks[[0, 3, 4]])


def test_the_data_set_is_good_then_bad_and_cycles_through_the_defects() -> None:
    data = draw_dataset("plate", size=48, train=3, good=2, bad=7)
    assert data.name == "drawn:plate"
    assert data.train.shape == (3, 3, 48, 48)
    assert data.test.shape == (9, 3, 48, 48)
    assert data.train.dtype == data.test.dtype == torch.uint8
    assert data.anomalous.tolist() == [False] * 2 + [True] * 7
    assert (data.size, data.statistics) == (64, None)
    kinds = list(PRODUCTS["plate"].defects)
    assert data.truth.kinds == ("good", "good", *kinds, *kinds[:2])
    part = draw("plate", index=2, size=48, split="bad", defect=kinds[2])
    assert torch.equal(data.test[4], torch.from_numpy(part.image).permute(2, 0, 1))
    assert torch.equal(data.truth.masks[4], torch.from_numpy(part.mask))


def test_an_empty_part_of_the_data_set_is_empty() -> None:
    data = draw_dataset("weave", size=32, train=0, good=0, bad=0)
    assert data.train.shape == data.test.shape == (0, 3, 32, 32)
    assert data.anomalous.shape == (0,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"product": "gear"}, "plate, weave, label"),
        ({"product": "label", "defect": "missing hole"}, "misprint, scratch, stain, contamination"),
        ({"product": "plate", "size": 8}, "at least 32"),
    ],
)
def test_what_cannot_be_drawn_is_rejected_with_the_fix(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        draw(index=0, **settings)  # type: ignore[arg-type]


def test_a_folder_holds_the_same_pixels(tmp_path: Path) -> None:
    settings = {"seed": 5, "size": 48, "train": 2, "good": 2, "bad": 6}
    write_folder(tmp_path / "plate", "plate", **settings)
    data = draw_dataset("plate", **settings)
    parts = data.test.permute(0, 2, 3, 1).numpy()

    def read(name: str) -> np.ndarray:
        return np.array(Image.open(tmp_path / "plate" / name))

    written = sorted(str(path.relative_to(tmp_path / "plate")) for path in (tmp_path / "plate").rglob("*.png"))
    assert len(written) == 2 + 2 + 6 + 6
    assert np.array_equal(read("train/good/001.png"), data.train[1].permute(1, 2, 0).numpy())
    assert np.array_equal(read("test/good/001.png"), parts[1])
    assert np.array_equal(read("test/missing_hole/000.png"), parts[5])
    assert np.array_equal(read("ground_truth/missing_hole/000_mask.png") > 0, data.truth.masks[5].numpy())
    assert np.array_equal(read("test/scratch/001.png"), parts[7])
    assert "ground_truth/good" not in {str(Path(name).parent) for name in written}


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="not empty"):
        write_folder(tmp_path, "plate", train=1, good=0, bad=0)
