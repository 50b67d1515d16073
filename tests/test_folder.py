"""A folder of your own: three layouts, any image a camera writes, and masks in every state."""

import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from firm.data import folder as module
from firm.data.folder import Reading, load_folder, read_files, read_test
from firm.data.registry import load
from firm.drawn.render import draw_dataset, write_folder
from firm.errors import DataError, ImageError
from firm.images import preprocess as images
from firm.images.decode import ORIENTATION, UPRIGHT, decode_mask
from firm.images.resize import resize_mask

RNG = np.random.default_rng(0)


def pixels(*shape):
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def save(file, image=(10, 12), **options):
    """Write an array, an image, or noise of a shape; return what was written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(image, tuple):
        image = pixels(*image, 3)
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, **options)
    return image


def square(shape, top, left, size=1, value=255, dtype=np.uint8):
    mask = np.zeros(shape, dtype)
    mask[top : top + size, left : left + size] = value
    return mask


def mvtec(root, *defects, kind="scratch", shape=(16, 16)):
    """A good part to learn from, a good one to test on, and the defective ones."""
    for file in ("train/good/000.png", "test/good/000.png", *(f"test/{kind}/{name}.png" for name in defects)):
        save(root / file, shape)
    return root


def loaded(root, side=16, warned=()):
    """The data set, after a check that exactly these warnings were given."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        task = load_folder(root, Reading(side))
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == len(warned), texts
    for text, expected in zip(sorted(texts), sorted(warned), strict=True):
        assert text.startswith(expected)
    return task


# layouts


def test_good_images_alone(tmp_path):
    for i in range(3):
        save(tmp_path / f"{i}.png", (20 + i, 30))
    save(tmp_path / "elsewhere" / "bad.png")  # what lies deeper is not known to be good
    task = load(str(tmp_path))
    assert task.train.shape == (3, 3, 128, 128)
    assert task.test.shape == (0, 3, 128, 128)
    assert (task.anomalous.dtype, task.anomalous.shape) == (torch.bool, (0,))
    assert (task.size, task.statistics, task.truth) == (64, None, None)


def test_the_layout_of_mvtec(tmp_path):
    for place in ("train/good", "test/good", "test/scratch", "test/dent"):
        for i in range(2):
            save(tmp_path / place / f"{i:03}.png")
    task = loaded(tmp_path, 32)
    assert task.train.shape == (2, 3, 32, 32)
    assert task.anomalous.tolist() == [True, True, False, False, True, True]
    assert task.truth.kinds == ("dent", "dent", "good", "good", "scratch", "scratch")
    assert task.size == 32


def test_good_and_bad(tmp_path):
    save(tmp_path / "good" / "a.jpg")
    task = load_folder(tmp_path)
    assert (len(task.test), task.truth) == (0, None)
    save(tmp_path / "bad" / "b.bmp", (16, 16))
    save(tmp_path / "ground_truth" / "bad" / "b.png", square((16, 16), 3, 4))
    task = loaded(tmp_path)
    assert (len(task.train), task.anomalous.tolist(), task.truth.kinds) == (1, [True], ("bad",))
    assert task.truth.masks.nonzero().tolist() == [[0, 3, 4]]
    test = read_test(tmp_path, 16)  # to be evaluated, the good ones count too
    assert (test.truth.kinds, test.truth.known.tolist()) == (("good", "bad"), [True, True])
    assert test.truth.masks.nonzero().tolist() == [[1, 3, 4]]


def test_a_damaged_file_never_costs_the_good_ones(tmp_path):
    image = save(tmp_path / "a.png", (16, 16))
    (tmp_path / "b.png").write_bytes(b"damaged")
    (tmp_path / "._c.png").write_bytes(b"hidden")
    save(tmp_path / "E.PNG", (16, 16))
    found, files, skipped = read_files([tmp_path], 16)
    assert [file.name for file in files] == ["E.PNG", "a.png"]
    np.testing.assert_array_equal(found[1].permute(1, 2, 0), image)
    assert [file.name for file, _ in skipped] == ["b.png"]
    assert len(loaded(tmp_path, warned=[f"left out: {tmp_path}/b.png cannot be decoded"]).train) == 2


def test_a_damaged_test_image_leaves_the_others_their_masks(tmp_path):
    mvtec(tmp_path, "000", "002")
    (tmp_path / "test" / "scratch" / "001.png").write_bytes(b"damaged")
    for i in range(3):
        save(tmp_path / "ground_truth" / "scratch" / f"00{i}_mask.png", square((16, 16), i, 5))
    task = loaded(tmp_path, warned=[f"left out: {tmp_path}/test/scratch/001.png"])
    assert task.truth.kinds == ("good", "scratch", "scratch")
    assert task.truth.masks.nonzero().tolist() == [[1, 0, 5], [2, 2, 5]]


def test_a_test_kind_without_usable_images_is_left_out(tmp_path):
    save(tmp_path / "train" / "good" / "a.png")
    (tmp_path / "test" / "scratch").mkdir(parents=True)
    task = load_folder(tmp_path, Reading(16))
    assert (len(task.test), task.truth) == (0, None)


def test_hidden_folders_are_no_kind_of_defect(tmp_path):
    mvtec(tmp_path, "000")
    save(tmp_path / "test" / ".ipynb_checkpoints" / "000.png")
    save(tmp_path / "ground_truth" / ".ipynb_checkpoints" / "000.png")
    save(tmp_path / "ground_truth" / "scratch" / "000_mask.png", square((16, 16), 0, 0))
    assert loaded(tmp_path).truth.kinds == ("good", "scratch")


def test_no_usable_image_is_an_error(tmp_path):
    with pytest.raises(DataError, match="has no usable image"):
        load_folder(tmp_path)
    (tmp_path / "a.png").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"has no usable image \(.*a.png cannot be decoded"):
        load_folder(tmp_path)
    for wrong, what in ((tmp_path / "absent", "not a folder"), (tmp_path / "a.png", "one file")):
        with pytest.raises(DataError, match=f"is {what}"):
            load(str(wrong))
    (tmp_path / "train" / "good").mkdir(parents=True)
    with pytest.raises(DataError, match=r"train/good has no usable image \(it holds no"):
        load_folder(tmp_path)


def test_the_test_part_alone_can_be_read(tmp_path):
    mvtec(tmp_path, "000", "001")
    (tmp_path / "test" / "scratch" / "002.png").write_bytes(b"damaged")
    save(tmp_path / "ground_truth" / "scratch" / "001_mask.png", square((16, 16), 1, 2))
    (tmp_path / "train" / "good" / "000.png").unlink()
    with pytest.warns(UserWarning, match="defective images without a mask: 1,"):
        test = read_test(tmp_path, 16)
    names = [f"{file.parent.name}/{file.stem}" for file in test.files]
    assert names == ["good/000", "scratch/000", "scratch/001"]
    assert test.truth.known.tolist() == [True, False, True]
    assert [file.name for file, _ in test.skipped] == ["002.png"]


@pytest.mark.parametrize("kind", ["good", "scratch"])
def test_one_sort_of_test_image_cannot_be_evaluated(tmp_path, kind):
    save(tmp_path / "test" / kind / "000.png")
    with pytest.raises(DataError, match="no test images of both kinds"):
        read_test(tmp_path, 16)
    with pytest.raises(DataError, match="no test images of both kinds"):
        read_test(tmp_path / "test", 16)  # neither a test/ nor good/ and bad/


def test_a_written_folder_is_the_drawn_data_set(tmp_path):
    settings = {"seed": 3, "size": 48, "train": 1, "good": 1, "bad": 5}
    write_folder(tmp_path / "plate", "plate", **settings)
    task, data = loaded(tmp_path / "plate", 48), draw_dataset("plate", **settings)
    order = [task.truth.kinds.index(kind.replace(" ", "_")) for kind in data.truth.kinds]
    assert sorted(order) == list(range(6))
    assert torch.equal(task.test[order], data.test)
    assert torch.equal(task.truth.masks[order], data.truth.masks)
    assert (task.truth.known & data.truth.known).all()
    assert data.truth.kinds[0] == "good"
    assert torch.equal(data.truth.masks.flatten(1).any(1), data.anomalous)


# whatever a camera writes

RGB = pixels(20, 30, 3)
PALETTE = Image.fromarray(RGB[..., 0] // 64)
PALETTE.putpalette([200, 0, 0, 0, 100, 0, 0, 0, 50, 9, 9, 9])
EXIF = Image.Exif()
EXIF[ORIENTATION] = 6
CAMERA = {
    "grey.png": (Image.fromarray(RGB[..., 0]), {}, np.repeat(RGB[..., :1], 3, axis=2)),
    "colour.bmp": (Image.fromarray(RGB), {}, RGB),
    "clear.png": (Image.fromarray(np.dstack([RGB, np.full((20, 30), 255, np.uint8)])), {}, RGB),
    "palette.tif": (PALETTE, {}, np.array(PALETTE.convert("RGB"))),
    "deep.png": (Image.fromarray(RGB[..., 0].astype(np.uint16) * 257), {}, np.repeat(RGB[..., :1], 3, axis=2)),
    "deep.tif": (Image.fromarray(RGB[..., 1].astype(np.uint16) * 257), {}, np.repeat(RGB[..., 1:2], 3, axis=2)),
    "bilevel.png": (Image.fromarray(RGB[..., 0] > 99), {}, np.repeat((RGB[..., :1] > 99) * np.uint8(255), 3, axis=2)),
    "turned.png": (Image.fromarray(RGB), {"exif": EXIF}, np.rot90(RGB, -1)),
    "wide.bmp": (Image.fromarray(RGB[:1]), {}, RGB[:1]),
    "dot.webp": (Image.fromarray(RGB[:1, :1]), {"lossless": True}, RGB[:1, :1]),
}


def test_any_image_can_be_trained_on_and_tested_on(tmp_path):
    for name, (image, options, _) in CAMERA.items():
        for place in ("train/good", "test/good", "test/dent"):
            save(tmp_path / place / name, image, **options)
    task = loaded(tmp_path)
    shown = [CAMERA[name][2] for name in sorted(CAMERA)]
    expected = torch.cat([images.resize(images.to_tensor(np.ascontiguousarray(one)), 16) for one in shown])
    assert torch.equal(task.train, expected)
    assert torch.equal(task.test, expected.repeat(2, 1, 1, 1))


# masks


def test_a_mask_is_found_by_the_name_of_its_image(tmp_path):
    mvtec(tmp_path, "000", "001", "002", "003")
    for name in ("000_mask.png", "001.png", "002_mask.PNG", "003.BMP"):
        save(tmp_path / "ground_truth" / "scratch" / name, square((16, 16), 2, 3, 4))
    truth = loaded(tmp_path).truth
    assert truth.known.all()
    for mask in truth.masks[1:]:
        np.testing.assert_array_equal(mask, square((16, 16), 2, 3, 4) > 0)
    assert not truth.masks[0].any()


def test_the_mask_called_so_wins(tmp_path):
    mvtec(tmp_path, "000")
    save(tmp_path / "ground_truth" / "scratch" / "000_mask.png", square((16, 16), 2, 3))
    save(tmp_path / "ground_truth" / "scratch" / "000.png", square((16, 16), 9, 9))
    assert loaded(tmp_path).truth.masks.nonzero().tolist() == [[1, 2, 3]]


def coloured(mode):
    """The mask with its pixel (2, 3) marked as faintly as the mode can."""
    if mode == "P":
        image = Image.fromarray(1 - square((16, 16), 2, 3, value=1))  # 0 is the mark: what counts is the colour
        image.putpalette([0, 0, 1, 0, 0, 0])
        return image
    if mode == "RGBA":
        return Image.fromarray(np.dstack([np.full((16, 16, 3), 255, np.uint8), square((16, 16), 2, 3, value=1)]))
    if mode == "LA":
        return Image.merge("LA", [Image.fromarray(square((16, 16), 2, 3, value=1)), Image.new("L", (16, 16), 255)])
    if mode == "RGB":
        return Image.fromarray(square((16, 16, 3), 2, 3, value=[0, 1, 0]))
    kinds = {"1": (bool, 1), "I;16": (np.uint16, 1), "F": (np.float32, 0.1)}
    dtype, value = kinds[mode]
    return Image.fromarray(square((16, 16), 2, 3, value=value, dtype=dtype))


def test_a_mask_of_any_mode_is_what_is_not_black(tmp_path):
    modes = ("1", "P", "RGB", "RGBA", "LA", "I;16", "F")
    mvtec(tmp_path, *(f"{number:03}" for number in range(len(modes))))
    for number, mode in enumerate(modes):
        image = coloured(mode)
        assert image.mode == mode
        suffix = "tif" if mode == "F" else "png"
        save(tmp_path / "ground_truth" / "scratch" / f"{number:03}_mask.{suffix}", image)
    expected = [[number, 2, 3] for number in range(1, 1 + len(modes))]
    assert loaded(tmp_path).truth.masks.nonzero().tolist() == expected


def test_without_ground_truth_there_is_nothing_to_say(tmp_path):
    truth = loaded(mvtec(tmp_path, "000", "001")).truth
    assert truth.known.tolist() == [True, False, False]
    assert truth.kinds == ("good", "scratch", "scratch")
    assert not truth.masks.any()


def test_missing_masks_are_counted(tmp_path):
    mvtec(tmp_path, "000", "001", "002")
    save(tmp_path / "ground_truth" / "scratch" / "001_mask.png", square((16, 16), 2, 3))
    first = tmp_path / "test" / "scratch" / "000.png"
    truth = loaded(tmp_path, warned=[f"defective images without a mask: 2, for example {first}; their pixels"]).truth
    assert truth.known.tolist() == [True, False, True, False]


def test_empty_and_unreadable_masks_are_unknown(tmp_path):
    mvtec(tmp_path, "000", "001", "002", "003")
    masks = tmp_path / "ground_truth" / "scratch"
    save(masks / "000_mask.png", np.zeros((16, 16), np.uint8))
    save(masks / "002_mask.png", np.zeros((16, 16), np.uint8))
    (masks / "001_mask.png").write_bytes(b"damaged")
    save(masks / "003_mask.png", square((16, 16), 2, 3))
    warned = [
        f"masks of defective images that mark no pixel: 2, for example {masks}/000_mask.png;",
        f"masks that cannot be read: 1, for example {masks}/001_mask.png cannot be decoded",
    ]
    task = loaded(tmp_path, warned=warned)
    assert len(task.test) == 5
    assert task.truth.known.tolist() == [True, False, False, False, True]
    assert task.truth.masks.nonzero().tolist() == [[4, 2, 3]]


def test_masks_without_an_image_are_ignored(tmp_path):
    mvtec(tmp_path, "000")
    masks = tmp_path / "ground_truth"
    for name in ("scratch/000_mask.png", "scratch/001_mask.png", "dent/000_mask.png", "good/000.png"):
        save(masks / name, square((16, 16), 2, 3))
    truth = loaded(tmp_path, warned=[f"masks without an image: 2, for example {masks}/dent/000_mask.png; they"]).truth
    assert truth.masks.nonzero().tolist() == [[1, 2, 3]]  # none for the good one, whatever its file says


def test_a_mask_of_another_size_is_scaled_to_its_image(tmp_path):
    mvtec(tmp_path, "000", "001", shape=(32, 64))
    masks = tmp_path / "ground_truth" / "scratch"
    save(masks / "000_mask.png", square((8, 4), 2, 1))
    save(masks / "001_mask.png", square((64, 32), 8, 8, 8))  # across, and no EXIF says why
    warned = f"masks of another size than their image: 2, for example {masks}/000_mask.png (4 x 8, the image 64 x 32);"
    truth = loaded(tmp_path, warned=[warned]).truth
    assert truth.known.all()
    expected = np.zeros((2, 16, 16), bool)
    expected[0, 4:6, 4:8] = expected[1, 2:4, 4:8] = True
    np.testing.assert_array_equal(truth.masks[1:], expected)


@pytest.mark.parametrize(
    ("orientation", "kind"), [(1, "PNG"), (3, "TIFF"), (5, "PNG"), (6, "TIFF"), (7, "TIFF"), (8, "PNG")]
)
def test_a_mask_follows_the_exif_of_its_image_only_when_it_must(tmp_path, orientation, kind):
    """Drawn on what one sees it fits as it is; drawn on the pixels as stored, its size gives it away."""
    mvtec(tmp_path)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    shown = np.zeros((16, 8, 3), np.uint8)
    shown[3, 1] = 255
    across = orientation >= 5
    undo = UPRIGHT.get({6: 8, 8: 6}.get(orientation, orientation))
    stored = Image.fromarray(shown) if undo is None else Image.fromarray(shown).transpose(undo)
    assert stored.size == ((16, 8) if across else (8, 16))
    for name, mask in {"seen": Image.fromarray(shown[..., 0]), "stored": stored.convert("L")}.items():
        if name == "stored" and not across:
            continue  # nothing tells it from one drawn on what is seen
        save(tmp_path / "test" / "scratch" / f"{name}.tif", stored, format=kind, exif=exif)
        save(tmp_path / "ground_truth" / "scratch" / f"{name}_mask.png", mask)
    task = loaded(tmp_path)
    for image, mask in zip(task.test[1:], task.truth.masks[1:], strict=True):
        assert image[0].argmax() == 3 * 16 + 2  # the bright pixel lies where the mask says
        assert mask.nonzero().tolist() == [[3, 2], [3, 3]]


def test_a_small_defect_never_vanishes(tmp_path):
    mvtec(tmp_path, "000", shape=(160, 160))
    save(tmp_path / "ground_truth" / "scratch" / "000_mask.png", square((160, 160), 31, 49))
    assert loaded(tmp_path).truth.masks.nonzero().tolist() == [[1, 3, 4]]


@given(st.data())
def test_a_small_mask_is_the_nearest_pixel_or_every_pixel_touched(data):
    height, width, side = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40)), data.draw(st.integers(1, 24))
    marks = data.draw(st.lists(st.tuples(st.integers(0, height - 1), st.integers(0, width - 1)), max_size=4))
    mask = np.zeros((height, width), bool)
    for mark in marks:
        mask[mark] = True
    near, touched = np.zeros((side, side), bool), np.zeros((side, side), bool)
    for row in range(side):
        for column in range(side):
            near[row, column] = mask[int((row + 0.5) * height / side), int((column + 0.5) * width / side)]
            for y, x in marks:
                covers = row * height < (y + 1) * side and y * side < (row + 1) * height
                across = column * width < (x + 1) * side and x * side < (column + 1) * width
                touched[row, column] |= covers and across
    small = resize_mask(mask, side)
    np.testing.assert_array_equal(small, near if near.any() else touched)
    assert bool(small.any()) == bool(marks)


def test_nearest_is_pillows_nearest():
    mask = pixels(37, 53) > 127
    expected = np.array(Image.fromarray(mask.astype(np.uint8)).resize((20, 20), Image.Resampling.NEAREST)) > 0
    np.testing.assert_array_equal(resize_mask(mask, 20), expected)


def test_a_huge_mask_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    save(tmp_path / "mask.png", square((16, 16), 1, 1))
    monkeypatch.setattr("firm.images.decode.MAX_PIXELS", 255)
    with pytest.raises(ImageError, match="16 x 16 pixels, more than 255"):
        decode_mask(tmp_path / "mask.png")


# memory


def test_full_size_pixels_never_lie_in_memory_together(tmp_path, monkeypatch):
    mvtec(tmp_path, *map(str, range(20)), shape=(8, 8))
    monkeypatch.setattr(module, "decode", lambda *_: np.zeros((500, 500, 3), np.uint8))  # 0.75 MB each
    tracemalloc.start()
    assert len(load_folder(tmp_path, Reading(8)).test) == 21
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * 750_000
