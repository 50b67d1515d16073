"""Every mode and depth an image file may have, and the very pixels it must become."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cases import each
from firm.data.folder import read_files
from firm.errors import FirmError, ImageError
from firm.images import decode as pixels
from firm.images.decode import decode, decode_mask, depth_of
from firm.images.preprocess import Preprocessing
from firm.types import FULL_DEPTH, Depth, Statistics
from image_files import encoded, exif, planes, png, tiff

TWELVE = Depth(4095)
DEEP = np.array([[0, 128, 129, 257, 32768, 65535]], np.uint16)
DEEP_8 = [0, 0, 1, 1, 128, 255]  # DEEP / 257, to the nearest
RNG = np.random.default_rng(0)
WIDE = RNG.integers(0, 65536, (2, 3, 4)).astype(np.uint16)


def palette(**options):
    """Red, green, blue by their numbers."""
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8))
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    return encoded(image, **options)


def mode(name, *pixels):
    image = Image.new(name, (len(pixels), 1))
    image.putdata(pixels)
    return image


def near(samples, white=65535):
    """The definition: each sample's part of white, in 255 steps, to the nearest."""
    return np.floor(samples.astype(np.float64) * 255 / white + 0.5).astype(int)


def over_white(samples):
    """Colours and then alpha, both of 8 bits."""
    alpha = samples[..., 3:] / 255
    return np.floor(samples[..., :3] * alpha + 255 * (1 - alpha) + 0.5)


GREY = [[0, 100, 255]]
COLOURED = [[[255, 0, 0], [0, 255, 0], [0, 0, 255]]]
CMYK = [(255, 0, 0, 0), (0, 0, 0, 255), (10, 20, 30, 40)]
CMYK_RGB = [[[0, 255, 255], [0, 0, 0], [207, 198, 190]]]
SEE_THROUGH = [(200, 100, 0, 0), (200, 100, 0, 51), (200, 100, 0, 255)]
SEE_THROUGH_RGB = [[[255, 255, 255], [244, 224, 204], [200, 100, 0]]]

# what is in the file, what is white in it, and a row of greys or of colours
GOLDEN = {
    "1 png": (encoded(mode("1", 0, 255, 255)), FULL_DEPTH, [[0, 255, 255]]),
    "1 tiff": (encoded(mode("1", 0, 255, 255), "TIFF", compression="group4"), FULL_DEPTH, [[0, 255, 255]]),
    "2 bit": (png(np.array([[[0], [1], [2], [3]]]), bits=2), FULL_DEPTH, [[0, 85, 170, 255]]),
    "L png": (encoded(mode("L", *GREY[0])), FULL_DEPTH, GREY),
    "L white is 0": (tiff(np.array(GREY, np.uint8), further={262: (3, [0])}), FULL_DEPTH, [[255, 155, 0]]),
    "L white is 0, deflated plane": (
        tiff(np.array(GREY, np.uint8), further={262: (3, [0]), 284: (3, [2])}, deflate=True),
        FULL_DEPTH,
        [[255, 155, 0]],
    ),
    "RGB planes": (planes(np.array(COLOURED, np.uint8)), FULL_DEPTH, COLOURED),
    "LA": (encoded(mode("LA", (0, 0), (0, 128), (9, 255))), FULL_DEPTH, [[255, 127, 9]]),
    "La": (
        tiff(np.array([[[0, 0], [60, 60], [30, 60]]], np.uint8), further={262: (3, [1]), 338: (3, [1])}),
        FULL_DEPTH,
        [[255, 255, 225]],  # already multiplied by alpha
    ),
    "RGB png": (encoded(mode("RGB", *map(tuple, COLOURED[0]))), FULL_DEPTH, COLOURED),
    "RGB bmp": (encoded(mode("RGB", *map(tuple, COLOURED[0])), "BMP"), FULL_DEPTH, COLOURED),
    "RGB webp": (encoded(mode("RGB", *map(tuple, COLOURED[0])), "WEBP", lossless=True), FULL_DEPTH, COLOURED),
    "RGB tiff": (encoded(mode("RGB", *map(tuple, COLOURED[0])), "TIFF", compression="tiff_lzw"), FULL_DEPTH, COLOURED),
    "RGB jpeg": (encoded(Image.new("RGB", (8, 8), (200, 200, 200)), "JPEG"), FULL_DEPTH, [[200] * 8] * 8),
    "RGBA png": (encoded(mode("RGBA", *SEE_THROUGH)), FULL_DEPTH, SEE_THROUGH_RGB),
    "RGBA tiff": (encoded(mode("RGBA", *SEE_THROUGH), "TIFF"), FULL_DEPTH, SEE_THROUGH_RGB),
    "RGBA webp": (encoded(mode("RGBA", *SEE_THROUGH), "WEBP", lossless=True, exact=True), FULL_DEPTH, SEE_THROUGH_RGB),
    "P": (palette(), FULL_DEPTH, COLOURED),
    "P, one clear": (palette(transparency=1), FULL_DEPTH, [[[255, 0, 0], [255, 255, 255], [0, 0, 255]]]),
    "P, each its own": (
        palette(transparency=bytes([255, 0, 51])),
        FULL_DEPTH,
        [[[255, 0, 0], [255, 255, 255], [204, 204, 255]]],
    ),
    "CMYK tiff": (encoded(mode("CMYK", *CMYK), "TIFF"), FULL_DEPTH, CMYK_RGB),
    "CMYK jpeg": (encoded(Image.new("CMYK", (8, 8)), "JPEG"), FULL_DEPTH, [[255] * 8] * 8),
    "clear grey": (png(np.array([[[0], [9]]]), further=[(b"tRNS", b"\0\x09")]), FULL_DEPTH, [[0, 255]]),
    "clear bit": (png(np.array([[[0], [1]]]), 1, [(b"tRNS", b"\0\0")]), FULL_DEPTH, [[255, 255]]),
    "clear 2 bit": (png(np.array([[[0], [1], [2]]]), 2, [(b"tRNS", b"\0\1")]), FULL_DEPTH, [[0, 255, 170]]),
    "clear 4 bit": (png(np.array([[[0], [1], [2]]]), 4, [(b"tRNS", b"\0\2")]), FULL_DEPTH, [[0, 17, 255]]),
    "I;16 png": (png(DEEP[..., None], 16), FULL_DEPTH, [DEEP_8]),
    "I;16 tiff": (tiff(DEEP), FULL_DEPTH, [DEEP_8]),
    "I;16 deflated": (tiff(DEEP, deflate=True), FULL_DEPTH, [DEEP_8]),
    "I;16B tiff": (tiff(DEEP, ">"), FULL_DEPTH, [DEEP_8]),
    "I;16, one clear": (png(DEEP[..., None], 16, [(b"tRNS", b"\1\1")]), FULL_DEPTH, [[0, 0, 1, 255, 128, 255]]),
    "I tiff": (tiff(DEEP.astype(np.int32)), FULL_DEPTH, [DEEP_8]),
    "I, 12 bit": (tiff(np.array([[0, 8, 9, 2048, 4095]], np.int32), ">"), TWELVE, [[0, 0, 1, 128, 255]]),
    "signed 16 bit": (tiff(np.array([[0, 32767]], np.int16)), FULL_DEPTH, [[0, 127]]),
    "12 in 16": (tiff(np.array([[0, 8, 9, 2048, 4095]], np.uint16)), TWELVE, [[0, 0, 1, 128, 255]]),
    "12 in 16 png": (png(np.array([[[0], [8], [9], [2048], [4095]]]), 16), TWELVE, [[0, 0, 1, 128, 255]]),
    "8 in 16": (tiff(np.array([[0, 77, 255]], np.uint16)), Depth(255), [[0, 77, 255]]),
    "F": (tiff(np.array([[0, 0.25, 0.5, 1]], np.float32)), FULL_DEPTH, [[0, 64, 128, 255]]),
    "F, big end first": (tiff(np.array([[0, 0.25, 0.5, 1]], np.float32), ">"), FULL_DEPTH, [[0, 64, 128, 255]]),
    "F to 255": (tiff(np.array([[0, 77.4, 77.5, 255]], np.float32)), Depth(real=255.0), [[0, 77, 78, 255]]),
    "RGB 16 png": (png(WIDE[..., :3], 16), FULL_DEPTH, near(WIDE[..., :3])),
    "RGB 12 png": (png(WIDE[..., :3] >> 4, 16), TWELVE, near(WIDE[..., :3] >> 4, 4095)),
    "RGB 16 tiff": (tiff(WIDE[..., :3]), FULL_DEPTH, near(WIDE[..., :3])),
    "RGB 16 tiff, big end first": (tiff(WIDE[..., :3], ">"), FULL_DEPTH, near(WIDE[..., :3])),
    "RGB 12 tiff, deflated": (tiff(WIDE[..., :3] >> 4, deflate=True), TWELVE, near(WIDE[..., :3] >> 4, 4095)),
    "RGB 16 png, one clear": (
        png(DEEP.reshape(1, 2, 3), 16, [(b"tRNS", DEEP[0, :3].astype(">u2").tobytes())]),
        FULL_DEPTH,
        [[[255, 255, 255], [1, 128, 255]]],
    ),
    "RGBA 16 png": (png(WIDE, 16), FULL_DEPTH, over_white(near(WIDE))),
    "RGBA 16 png, 12 bits of colour": (  # alpha is no colour: white or not, all is 65535
        png(np.dstack([WIDE[..., :3] >> 4, WIDE[..., 3]]), 16),
        TWELVE,
        over_white(np.dstack([near(WIDE[..., :3] >> 4, 4095), near(WIDE[..., 3])])),
    ),
    "RGBA 16 tiff": (tiff(WIDE, further={338: (3, [2])}), FULL_DEPTH, over_white(near(WIDE))),
    "LA 16 png": (png(WIDE[..., :2], 16), FULL_DEPTH, over_white(near(WIDE[..., [0, 0, 0, 1]]))),
}


@each("name", GOLDEN)
def test_the_pixels_of_every_mode(name):
    content, depth, expected = GOLDEN[name]
    expected = np.array(expected)
    expected = np.repeat(expected[..., None], 3, axis=2) if expected.ndim == 2 else expected
    found = decode(content, depth)
    assert (found.dtype, found.shape) == (np.uint8, expected.shape)
    slack = 1 if name.startswith(("RGBA 16", "LA 16")) else 0  # alpha is rounded to 8 bits before it is laid over white
    np.testing.assert_allclose(found, expected, atol=slack)


UNREAD = {
    "white is 0 in 16 bit": (tiff(DEEP, further={262: (3, [0])}), "stores white as 0 in more than 8 bits"),
    "16-bit CMYK": (tiff(WIDE, further={262: (3, [5])}), "16-bit colours"),
    "16-bit colours times alpha": (tiff(WIDE, further={338: (3, [1])}), "16-bit colours"),
    "16-bit planes": (planes(WIDE[..., :3]), "16-bit colours"),
    "one plane of three": (tiff(np.zeros((2, 3, 3), np.uint8), further={284: (3, [2])}), "lacks a part"),
    "white is 0 in a plane": (planes(np.uint8([GREY]).reshape(1, 3, 1), further={262: (3, [0])}), "planes"),
    "bits in a plane": (tiff(np.uint8([[160]]), further={258: (3, [1]), 262: (3, [0]), 284: (3, [2])}), "planes"),
    "Lab in planes": (planes(np.uint8([[[200, 10, 20]]]), further={262: (3, [8])}), "planes"),
    "signed 8 bit": (tiff(np.int8([[-1, 0, 127]])), "signed"),
    "signed 8 bit, deflated": (tiff(np.int8([[-1, 0, 127]]), deflate=True), "signed"),
    "five channels": (tiff(np.zeros((1, 1, 5), np.uint16)), "damaged or unknown"),
    "64-bit floats": (tiff(np.zeros((1, 1))), "damaged or unknown"),
    "above 16 bit": (tiff(np.array([[70000]], np.int32)), "samples up to 70000 where 65535 is white"),
    "below 0": (tiff(np.array([[-1]], np.int32)), "samples down to -1"),
    "a float above 1": (tiff(np.array([[1.5]], np.float32)), "samples up to 1.5 where 1 is white"),
    "a float below 0": (tiff(np.array([[-0.5]], np.float32)), "samples down to -0.5"),
    "no number": (tiff(np.array([[np.nan]], np.float32)), "samples that are not finite"),
    "no end": (tiff(np.array([[np.inf]], np.float32)), "samples that are not finite"),
}


@each("name", UNREAD)
def test_what_cannot_be_had_in_full_is_refused_not_guessed(name):
    content, reason = UNREAD[name]
    with pytest.raises(ImageError, match=reason):
        decode(content)


# orientation


SHOWN = RNG.integers(0, 256, (3, 5, 3), dtype=np.uint8)
STORED = {  # which corner of what is shown the first stored row and column are
    1: lambda shown: shown,
    2: lambda shown: shown[:, ::-1],
    3: lambda shown: shown[::-1, ::-1],
    4: lambda shown: shown[::-1],
    5: lambda shown: shown.swapaxes(0, 1),
    6: np.rot90,
    7: lambda shown: shown[::-1, ::-1].swapaxes(0, 1),
    8: lambda shown: np.rot90(shown, -1),
}
GREYS = SHOWN[..., 0]
TURNABLE = {
    "RGB png": lambda turn, o: encoded(turn(SHOWN), exif=exif(o)),
    "RGB webp": lambda turn, o: encoded(turn(SHOWN), "WEBP", lossless=True, exif=exif(o)),
    "RGB tiff": lambda turn, o: encoded(turn(SHOWN), "TIFF", exif=exif(o)),
    "RGB tiff, deflated": lambda turn, o: encoded(turn(SHOWN), "TIFF", exif=exif(o), compression="tiff_deflate"),
    "L png": lambda turn, o: encoded(turn(GREYS), exif=exif(o)),
    "I;16 png": lambda turn, o: encoded(turn(GREYS * np.uint16(257)), exif=exif(o)),
    "I;16 tiff": lambda turn, o: tiff(turn(GREYS * np.uint16(257)), further={274: (3, [o])}),
    "I;16B tiff": lambda turn, o: tiff(turn(GREYS * np.uint16(257)), ">", {274: (3, [o])}),
    "F tiff": lambda turn, o: tiff(turn(GREYS / np.float32(255)), further={274: (3, [o])}),
    "RGB 16 tiff": lambda turn, o: tiff(turn(SHOWN * np.uint16(257)), further={274: (3, [o])}),
    "RGB 16 png": lambda turn, o: png(turn(SHOWN * np.uint16(257)), 16, [(b"eXIf", exif(o).tobytes()[6:])]),
}


@each("orientation", STORED)
@each("name", TURNABLE)
def test_the_orientation_is_undone_once_in_every_depth(name, orientation):
    content = TURNABLE[name](lambda shown: np.ascontiguousarray(STORED[orientation](shown)), orientation)
    expected = SHOWN if name.startswith("RGB") else np.repeat(GREYS[..., None], 3, axis=2)
    np.testing.assert_array_equal(decode(content), expected)


@each("orientation", STORED)
def test_a_photograph_is_upright(orientation):
    shown = np.zeros((16, 24, 3), np.uint8)
    shown[:8, :8] = 255
    photo = encoded(np.ascontiguousarray(STORED[orientation](shown)), "JPEG", exif=exif(orientation), quality=95)
    assert np.abs(decode(photo).astype(int) - shown).max() < 30


# one depth for all images


def save(folder, **arrays):
    for name, samples in arrays.items():
        (folder / f"{name}.tif").write_bytes(tiff(np.asarray(samples)))
    return sorted(folder.iterdir())


@each(
    "arrays, depth, said",
    [
        ({"a": np.uint8([[7]])}, Depth(255), ""),
        ({"a": np.uint16([[255]])}, Depth(255), "1 of the training images .* no sample above 255,"),
        ({"a": np.uint16([[256]])}, Depth(4095), "no sample above 4095,"),
        ({"a": np.uint16([[4095]]), "b": np.uint16([[3]])}, Depth(4095), "2 of the training images .* above 4095,"),
        ({"a": np.uint16([[3]]), "b": np.uint16([[4096]])}, Depth(65535), ""),
        (
            {"a": np.uint16([[3]]), "b": np.int32([[70000]])},
            Depth(255),
            "1 of the training images",
        ),  # b will be refused
        ({"a": np.float32([[0.5]])}, Depth(255, 1.0), ""),
        (
            {"a": np.float32([[0.5]]), "b": np.float32([[99]])},
            Depth(255, 255.0),
            "2 of the training images .* above 255,",
        ),
        ({"a": np.float32([[0.5]]), "b": np.uint16([[9999]])}, Depth(65535, 1.0), ""),
        ({"a": np.float32([[np.nan]]), "b": np.float32([[0.2]])}, Depth(255, 1.0), ""),
        ({"a": np.uint16([[[1, 4000, 2]]])}, Depth(4095), "no sample above 4095,"),
        ({"a": np.uint16([[[1, 4000, 2, 65535]]])}, Depth(4095), "no sample above 4095,"),  # alpha has no voice
    ],
)
def test_the_depth_is_the_least_that_no_good_image_exceeds(tmp_path, arrays, depth, said):
    for file in tmp_path.iterdir():
        file.unlink()
    files = save(tmp_path, **arrays)
    (tmp_path / "damaged.tif").write_bytes(b"II*\0")
    files.append(tmp_path / "damaged.tif")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert depth_of(files) == depth_of(files[::-1]) == depth
    assert bool(caught) == bool(said)
    if said:
        with pytest.warns(UserWarning, match=said):
            depth_of(files)


def test_files_of_8_bits_are_known_by_their_first_bytes(tmp_path, monkeypatch):
    for suffix, kind in {"png": "PNG", "jpg": "JPEG", "bmp": "BMP", "webp": "WEBP"}.items():
        (tmp_path / f"a.{suffix}").write_bytes(encoded(SHOWN, kind))
    monkeypatch.setattr(pixels, "_opened", lambda _: pytest.fail("was opened"))
    assert depth_of(sorted(tmp_path.iterdir())) == Depth(255)


def test_a_dark_image_keeps_its_scale(tmp_path):
    """Alone it might be of 8 or 12 bits; its samples mean what they mean in the other images."""
    files = save(tmp_path, bright=np.uint16([[40000, 200]]), dark=np.uint16([[200, 100]]))
    depth = depth_of(files)
    assert decode(files[0], depth)[0, 1, 0] == decode(files[1], depth)[0, 0, 0] == 1


def test_an_image_beyond_the_depth_is_named_not_clipped(tmp_path):
    (file,) = save(tmp_path, a=np.uint16([[4096]]))
    with pytest.raises(ImageError, match=r"a\.tif has samples up to 4096 where 4095 is white; .* --depth") as found:
        decode(file, TWELVE)
    assert found.value.path == file
    assert isinstance(found.value, FirmError)


@each("whole, real", [(254, 1.0), (65536, 1.0), (255, 0.0), (255, np.inf), (255, np.nan)])
def test_impossible_depths_are_refused(whole, real):
    with pytest.raises(FirmError, match="white"):
        Depth(whole, real)


@given(st.integers(255, 65535), st.lists(st.integers(0, 65535), min_size=1, max_size=20))
def test_samples_go_to_the_nearest_of_255_steps(white, samples):
    found = [min(sample, white) for sample in samples]
    expected = [(2 * 255 * sample + white - white % 2) // (2 * white) for sample in found]
    assert pixels.to_8_bits(np.array(found, np.uint16), Depth(white)).tolist() == expected


# masks of more than 8 bits


@each(
    "content",
    [
        tiff(np.uint16([[0, 1]])),
        tiff(np.float32([[0, 1e-9]])),
        png(np.uint16([[[0, 0, 0], [0, 1, 0]]]), 16),
        png(np.uint16([[[9, 0], [1, 1]]]), 16),
        png(np.uint16([[[7], [1]]]), 16, [(b"tRNS", b"\0\7")]),
    ],
)
def test_the_faintest_mark_is_one(content):
    assert decode_mask(content).tolist() == [[False, True]]


# one preprocessing, whatever the image comes as


SAMPLES = {
    "bilevel": RNG.integers(0, 2, (9, 7)).astype(bool),
    "grey": RNG.integers(0, 256, (9, 7), dtype=np.uint8),
    "colour": RNG.integers(0, 256, (9, 7, 3), dtype=np.uint8),
    "see-through": RNG.integers(0, 256, (9, 7, 4), dtype=np.uint8),
    "deep": RNG.integers(0, 4096, (9, 7)).astype(np.uint16),
    "wide": RNG.integers(0, 4096, (9, 7, 3)).astype(np.uint16),
    "float": RNG.random((9, 7), dtype=np.float32),
}


@each("name", SAMPLES)
def test_file_bytes_array_and_pillow_image_give_the_same_bits(name, tmp_path):
    samples = SAMPLES[name]
    wide = samples.dtype == np.uint16 and samples.ndim == 3
    content = tiff(samples) if wide else encoded(samples, "TIFF")
    file = tmp_path / "a.tif"
    file.write_bytes(content)
    how = Preprocessing(4, 1.2, Statistics((0.4, 0.5, 0.6), (0.2,) * 3), side=8, depth=TWELVE)
    sources = [file, str(file), content, samples, *([] if wide else [Image.fromarray(samples), Image.open(file)])]
    learnt, files, _ = read_files([file], how.file_side, depth=how.depth)  # as `firm fit` and `firm inspect` read
    assert files == [file]
    for source in sources:
        read = how.read(source)
        assert (read.shape, read.numpy().tobytes()) == ((1, 3, 8, 8), learnt.numpy().tobytes())
        assert how.test_view(read).numpy().tobytes() == how.test_view(learnt).numpy().tobytes()


def test_one_channel_more_or_less_is_the_same_grey():
    grey = SAMPLES["grey"]
    np.testing.assert_array_equal(decode(grey), decode(grey[..., None]))
    np.testing.assert_array_equal(decode(grey), decode(np.dstack([grey, np.full_like(grey, 255)])))
    np.testing.assert_array_equal(decode(grey), decode(np.dstack([grey] * 3)))


@each("array", [np.zeros((2, 2, 5)), np.zeros((0, 2)), np.zeros(3), np.array([["a"]]), np.zeros((1, 1), complex)])
def test_arrays_that_are_no_image_are_refused(array):
    with pytest.raises(ImageError, match=r"the image is .* of shape .*; give numbers of shape"):
        decode(array)


def test_a_pillow_image_of_16_bit_colours_has_lost_half_of_them(tmp_path):
    (file,) = save(tmp_path, wide=WIDE[..., :3])
    with Image.open(file) as opened, pytest.raises(ImageError, match="16-bit colours"):
        decode(opened)
