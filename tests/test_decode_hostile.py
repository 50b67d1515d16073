"""Files that lie, are damaged, or are no images: every one ends in pixels or in one sentence that names it."""

import os
import re
import struct
import threading
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

import firm
from cases import each
from firm.errors import FirmError, ImageError, named
from firm.images import decode as pixels
from firm.images.decode import _peak, decode, decode_mask, depth_of
from image_files import HERE, chunk, encoded, exif, png, tiff

RGB = np.random.default_rng(0).integers(0, 256, (7, 9, 3), dtype=np.uint8)
PHOTO = Image.fromarray(RGB)
DEEP = RGB[..., 0] * np.uint16(257)
SEEDS = {
    "png": encoded(PHOTO),
    "turned.png": encoded(PHOTO, exif=exif(6)),
    "palette.png": encoded(PHOTO.quantize(16), transparency=3),
    "deep.png": png(DEEP[..., None], 16),
    "wide.png": png(np.dstack([DEEP, DEEP, DEEP, DEEP]), 16),
    "la.png": encoded(PHOTO.convert("LA")),
    "animated.png": encoded(PHOTO, save_all=True, append_images=[PHOTO.rotate(180)]),
    "jpg": encoded(PHOTO, "JPEG", exif=exif(6)),
    "progressive.jpg": encoded(PHOTO, "JPEG", progressive=True),
    "grey.jpg": encoded(PHOTO.convert("L"), "JPEG"),
    "cmyk.jpg": encoded(PHOTO.convert("CMYK"), "JPEG"),
    "tif": encoded(PHOTO, "TIFF"),
    "lzw.tif": encoded(PHOTO, "TIFF", compression="tiff_lzw"),
    "deflate.tif": encoded(PHOTO, "TIFF", compression="tiff_deflate", exif=exif(6)),
    "jpeg.tif": encoded(PHOTO, "TIFF", compression="jpeg"),
    "bilevel.tif": encoded(PHOTO.convert("1"), "TIFF", compression="group4"),
    "packbits.tif": encoded(DEEP, "TIFF", compression="packbits"),
    "float.tif": encoded(RGB[..., 0] / np.float32(255), "TIFF"),
    "wide.tif": tiff(np.dstack([DEEP, DEEP, DEEP]), ">"),
    "tiles.tif": tiff(
        np.zeros((16, 16), np.uint8),
        further={
            256: (4, [9]),
            257: (4, [7]),
            322: (3, [16]),
            323: (3, [16]),
            324: (4, [HERE]),
            325: (4, [256]),
            273: None,
        },
    ),
    "bmp": encoded(PHOTO, "BMP"),
    "palette.bmp": encoded(PHOTO.quantize(16), "BMP"),
    "bilevel.bmp": encoded(PHOTO.convert("1"), "BMP"),
    "webp": encoded(PHOTO, "WEBP"),
    "lossless.webp": encoded(PHOTO, "WEBP", lossless=True),
    "clear.webp": encoded(PHOTO.convert("RGBA"), "WEBP", exif=exif(6)),
}


def refused(source, reason):
    """One sentence, on one line, naming the file."""
    with pytest.raises(ImageError) as found:
        decode(source)
    sentence = str(found.value)
    name = named(source) if isinstance(source, str | Path) else "the image"
    assert re.match(rf"{re.escape(name)} .*{reason}", sentence), sentence
    assert re.fullmatch(r"[^\n]+; [^\n]+", sentence), sentence
    assert found.value.path == (Path(source) if isinstance(source, str | Path) else None)


# what a file is, is told by its content


@each(
    "content",
    [
        b"hello\n",
        b"\x89PN",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"RIFF\0\0\0\0AVI ",
        b"P6 1 1 255 abc",
        encoded(PHOTO.quantize(16), "GIF"),
        encoded(PHOTO, "EPS"),
        encoded(PHOTO, "ICO"),
        encoded(PHOTO, "TGA"),
        encoded(PHOTO, "PDF"),
    ],
)
def test_other_formats_are_refused_whatever_their_name(content, tmp_path, monkeypatch):
    for kind in Image.OPEN:
        monkeypatch.setitem(Image.OPEN, kind, (lambda *_: pytest.fail("was run"), lambda _: pytest.fail("was asked")))
    file = tmp_path / "part.png"
    file.write_bytes(content)
    refused(file, "content is not PNG, JPEG, TIFF, BMP or WebP")


@each("name", [name for name in SEEDS if name != "animated.png"])
def test_only_the_reader_of_its_own_format_is_run(name):
    own = {"tif": "TIFF", "jpg": "JPEG"}.get(name.rpartition(".")[2], name.rpartition(".")[2].upper())
    Image.init()
    with pytest.MonkeyPatch.context() as patch:
        for kind in set(Image.OPEN) - {own}:
            patch.setitem(Image.OPEN, kind, (lambda *_: pytest.fail("was run"), lambda _: pytest.fail("was asked")))
        assert decode(SEEDS[name]).shape in ((7, 9, 3), (9, 7, 3))  # the content decides, and bytes have no name at all


def test_a_pillow_image_of_another_format_is_not_loaded(monkeypatch):
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("was loaded"))
    with Image.open(Path(firm.__file__).parent.parent.parent / "docs" / "demo.png") as opened:
        opened.format = "EPS"
        refused(opened, "EPS is not supported")


def test_empty_absent_and_strange_files_are_named(tmp_path):
    (tmp_path / "empty.png").write_bytes(b"")
    refused(tmp_path / "empty.png", "it is empty")
    refused(tmp_path / "absent.png", "does not exist")
    (tmp_path / "folder.png").mkdir()
    refused(tmp_path / "folder.png", "is a folder, not an image")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    refused(tmp_path / "loop.png", r"cannot be opened \(Too many levels of symbolic links\)")
    (tmp_path / "nowhere.png").symlink_to(tmp_path / "gone")
    refused(tmp_path / "nowhere.png", "does not exist")
    os.mkfifo(tmp_path / "pipe.png")
    refused(tmp_path / "pipe.png", "is a device or a pipe")  # and is not waited for
    refused(tmp_path / ("long" * 100 + ".png"), "cannot be opened")
    refused("nul\0.png", "embedded null byte")


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(SEEDS["png"])

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pixels, "open", denied, raising=False)
    refused(tmp_path / "a.png", r"cannot be opened \(Permission denied\); check the path and its permissions")


@each("name", ["two\nlines.png", "bell\a.png", "\x1b[31mred.png", b"latin-\xe9.png", "Größe 中.png"])
def test_odd_names_are_read_and_shown_on_one_line(name, tmp_path):
    file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + (name if isinstance(name, bytes) else name.encode())))
    file.write_bytes(SEEDS["png"])
    np.testing.assert_array_equal(decode(file), RGB)
    file.write_bytes(b"damaged")
    with pytest.raises(ImageError) as found:
        decode(file)
    assert str(found.value).isprintable()
    str(found.value).encode()
    assert found.value.path == file
    assert "Größe 中.png" not in file.name or file.name in str(found.value)


# too much


HUGE = (60_000, 60_000)
BOMBS = {
    "png": (png(np.zeros((1, 1, 1), np.uint8), 1, size=HUGE), "more than 80,000,000"),
    "middling.png": (png(np.zeros((1, 1, 1), np.uint8), 1, size=(10_000, 9_000)), "10000 x 9000 pixels"),
    "tif": (tiff(np.zeros((1, 1), np.uint8), further={256: (4, [60_000]), 257: (4, [60_000])}), "more than 80,000,000"),
    "middling.tif": (tiff(np.zeros((1, 1), np.uint8), further={256: (4, [2**27])}), "134217728 x 1 pixels"),
    "tiles.tif": (
        tiff(
            np.zeros((16, 16), np.uint8),
            further={273: None, 322: (4, [HUGE[0]]), 323: (4, [HUGE[1]]), 324: (4, [HERE]), 325: (4, [20])},
            deflate=True,
        ),
        "60000 x 60000 pixels in a tile",
    ),
    "bmp": (
        encoded(PHOTO, "BMP")[:18] + struct.pack("<ii", *HUGE) + encoded(PHOTO, "BMP")[26:],
        "more than 80,000,000",
    ),
    "upside.bmp": (SEEDS["bmp"][:18] + struct.pack("<ii", 20_000, -5_000) + SEEDS["bmp"][26:], "20000 x 5000"),
    "vp8x.webp": (
        SEEDS["clear.webp"][:24] + (59_999).to_bytes(3, "little") * 2 + SEEDS["clear.webp"][30:],
        "60000 x 60000 pixels",
    ),
    "vp8l.webp": (
        SEEDS["lossless.webp"][:21] + (9_999 | 9_999 << 14).to_bytes(4, "little") + SEEDS["lossless.webp"][25:],
        "10000 x 10000 pixels",
    ),
    "vp8.webp": (SEEDS["webp"][:26] + struct.pack("<HH", 16_383, 16_383) + SEEDS["webp"][30:], "16383 x 16383 pixels"),
    "jpg": (
        re.sub(rb"(\xff\xc0..\x08)....", lambda m: m[1] + struct.pack(">HH", 60_000, 60_000), SEEDS["jpg"], flags=re.S),
        "more than 80,000,000",
    ),
}


@each("name", BOMBS)
def test_huge_images_are_refused_by_their_header_alone(name):
    content, reason = BOMBS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image.core, "new", lambda *_: pytest.fail("memory was taken for its pixels"))
        patch.setattr(Image.core, "fill", lambda *_: pytest.fail("memory was taken for its pixels"))
        if name.endswith("webp"):
            patch.setattr(pixels.Image, "open", lambda *_, **__: pytest.fail("its reader was run"))
        refused(content, reason)


def test_the_limit_itself_is_read(monkeypatch):
    monkeypatch.setattr(pixels, "MAX_PIXELS", 63)
    assert decode(SEEDS["png"]).shape == (7, 9, 3)
    assert decode(RGB).shape == (7, 9, 3)
    monkeypatch.setattr(pixels, "MAX_PIXELS", 62)
    for source in (SEEDS["png"], SEEDS["webp"], PHOTO, RGB):
        refused(source, "has 9 x 7 pixels, more than 62")


def test_a_file_of_too_many_bytes_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(SEEDS["png"])
    monkeypatch.setattr(pixels, "MAX_BYTES", len(SEEDS["png"]))
    decode(tmp_path / "a.png")
    monkeypatch.setattr(pixels, "MAX_BYTES", len(SEEDS["png"]) - 1)
    monkeypatch.setattr(pixels, "open", lambda *_: pytest.fail("was read"), raising=False)
    refused(tmp_path / "a.png", "bytes, more than")


def test_text_that_unpacks_without_end_is_refused():
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(5_000_000)))
    refused(SEEDS["png"][:33] + text + SEEDS["png"][33:], "cannot be decoded")


# more than one


@each("kind", ["PNG", "TIFF", "WEBP", "MPO"])
def test_files_of_several_images_are_refused(kind):
    several = encoded(PHOTO, kind, save_all=True, append_images=[PHOTO.rotate(180)])
    refused(several, "holds more than one image")
    assert decode(encoded(PHOTO, kind, save_all=True)).shape == RGB.shape  # one alone is an image like any other


# damaged


@each("name", SEEDS)
def test_a_file_cut_short_is_never_taken_for_whole(name):
    """At any byte; what is cut may be padding or a trailer, and only then are there pixels, the same ones."""
    content = SEEDS[name]
    for end in range(len(content)):
        try:
            found = decode(content[:end])
        except ImageError:
            continue
        assert end > 0.6 * len(content)
        np.testing.assert_array_equal(found, decode(content))


def test_missing_strips_are_missed():
    strips = tiff(np.zeros((8, 4), np.uint8), further={278: (4, [2])})  # one of the four is listed
    refused(strips, "lacks a part of its pixels")


def test_damaged_exif_costs_no_pixels():
    broken = SEEDS["turned.png"].replace(b"MM\0*", b"MM\0?")
    assert broken != SEEDS["turned.png"]
    fixed = bytearray(broken)
    at = broken.index(b"eXIf")
    (length,) = struct.unpack(">I", broken[at - 4 : at])
    fixed[at + 4 + length : at + 8 + length] = struct.pack(">I", zlib.crc32(broken[at : at + 4 + length]))
    np.testing.assert_array_equal(decode(bytes(fixed)), RGB)


def test_what_pillow_only_warns_of_is_read_in_silence():
    harmless = SEEDS["png"][:33] + chunk(b"acTL", bytes(8)) + SEEDS["png"][33:]  # an animation of no frames
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(decode(harmless), RGB)


def swapped(content, rng):
    """Two neighbouring pieces in each other's place, be they chunks, tags, strips or anything."""
    begin, middle = sorted(rng.integers(0, len(content), 2))
    end = min(len(content), 2 * middle - begin)
    return content[:begin] + content[middle:end] + content[begin:middle] + content[end:]


def edited(content, rng):
    """A number in the header replaced by an unlikely one, in either order of bytes."""
    at, number = rng.integers(min(len(content), 64)), rng.choice([0, 1, 255, 60_000, 65_535, 2**31 - 1, 2**32 - 1])
    return content[:at] + int(number).to_bytes(4, ("big", "little")[rng.integers(2)]) + content[at + 4 :]


def flipped(content, rng):
    at = rng.integers(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.integers(8)]) + content[at + 1 :]


def cut(content, rng):
    return content[: rng.integers(1, len(content) + 1)]


def doubled(content, rng):
    at, length = rng.integers(len(content)), rng.integers(1, 40)
    return content[: at + length] + content[at:]


MUTATIONS = (swapped, edited, flipped, cut, doubled)


def most_memory(reset=False):
    """The most this process has had in memory since the last reset, in megabytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="memory is watched by way of Linux")
@pytest.mark.parametrize("numbers", [range(2_000), pytest.param(range(2_000, 14_000), marks=pytest.mark.slow)])
def test_thousands_of_damaged_files_end_in_pixels_or_in_a_sentence(numbers, monkeypatch, capfd):
    """None crashes, talks, warns (warnings are errors here), or takes more memory than the cap on pixels allows."""
    monkeypatch.setattr(pixels, "MAX_PIXELS", 1_000_000)
    seeds, reasons, read = list(SEEDS.values()), [], 0
    before = most_memory(reset=True)
    for number in numbers:
        rng = np.random.default_rng(number)
        content = seeds[number % len(seeds)]
        for mutation in rng.choice(len(MUTATIONS), rng.integers(1, 4)):
            content = MUTATIONS[mutation](content, rng)
        try:
            found = decode(content)
        except ImageError as error:
            reasons.append(str(error))
            continue
        assert (found.dtype, found.ndim, found.shape[2]) == (np.uint8, 3, 3), number
        assert found.size <= 3_000_000
        read += 1
    assert 0.1 < read / len(numbers) < 0.5
    assert all(re.fullmatch(r"the image [^\n]+; [^\n]+", reason) for reason in reasons)
    assert most_memory() - before < 64
    assert capfd.readouterr() == ("", "")


@each("what", [decode_mask, _peak])
def test_whatever_is_read_of_damaged_files_ends_so(what, monkeypatch):
    monkeypatch.setattr(pixels, "MAX_PIXELS", 1_000_000)
    seeds = list(SEEDS.values())
    for number in range(len(seeds) * 8):
        rng = np.random.default_rng(number)
        content = MUTATIONS[number % len(MUTATIONS)](seeds[number % len(seeds)], rng)
        try:
            what(content)
        except ImageError:
            continue


# the door


def test_nobody_else_decodes_images():
    root = Path(firm.__file__).parent
    elsewhere = re.compile(r"Image\.open|imread|imdecode|VideoCapture|plt\.imread|from PIL import .*ImageFile")
    found = [path.name for path in sorted(root.rglob("*.py")) if elsewhere.search(path.read_text())]
    assert found == ["image_steps.py", "decode.py"]  # the runtime of an export stands alone


def test_warnings_are_as_they_were_and_threads_agree():
    before, results = list(warnings.filters), []
    threads = [threading.Thread(target=lambda: results.append(decode(SEEDS["tif"]))) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(results) == 8
    assert all(np.array_equal(RGB, found) for found in results)
    with pytest.raises(FirmError):
        decode(b"")
    assert list(warnings.filters) == before
    assert depth_of([]).whole == 255
