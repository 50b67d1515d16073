"""Decode files, uploads, arrays and Pillow images to 8-bit RGB, or raise an ImageError that names the file.

The format is detected by content, the size is checked in the header, and samples of any depth are scaled to 8 bits.
"""

import contextlib
import ctypes
import io
import logging
import os
import re
import stat
import sys
import warnings
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, UInt8
from PIL import Image, UnidentifiedImageError, _imaging

from firm.errors import ImageError
from firm.images.blame import REPLACE, Refused, errors_named, load
from firm.types import FULL_DEPTH, Depth

Bytes = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]
Samples = npt.NDArray[Any]  # of more than 8 bits: (h, w) or (h, w, 2 to 4: grey or colours, then alpha)
File = Path | str | bytes  # a path or the content
Source = File | Samples | Image.Image
Pixel = TypeVar("Pixel", bound=np.generic)

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".tif", ".tiff", ".webp"})
FORMATS: dict[str, tuple[bytes, ...]] = {  # by their first bytes
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "JPEG": (b"\xff\xd8\xff",),
    "TIFF": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    "BMP": (b"BM",),
    "WebP": (b"RIFF",),
}
READABLE = "PNG, JPEG, TIFF, BMP or WebP"
HEAD = 32  # bytes that identify the format, and the depth of a PNG
MAX_BYTES = 2**30  # of a file: more than the largest image needs
MAX_PIXELS = 80_000_000  # below Pillow's own limit; each takes up to 26 bytes until it is resized
MAX_SIDE = 65_535  # of a JPEG; resizing a thin image widens all of its rows first
MAX_SCANNED = 1_000_000_000  # pixels, at least a million, times scans of a JPEG: ten scans are usual
SCAN = re.compile(rb"\xff\xda\x00(?:\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")  # begins a scan of one to four channels
BITS, PHOTOMETRIC, FILL_ORDER, PLANES, TILE_WIDTH, TILE_LENGTH, FORMAT = 258, 262, 266, 284, 322, 323, 339  # TIFF tags
WHITE_IS_0, LAB, SIGNED = 0, 8, 2  # values of them
LEVELS = {"1": 255, "L;2": 85, "L;4": 17}  # grey levels per step of samples below 8 bits
WHOLE, REAL = (255, 4095, 65535), (1.0, 255.0, 4095.0, 65535.0)  # white levels to choose from without --depth
DEEP_GREY = ("I", "F")  # prefixes of the grey modes above 8 bits; Pillow has no colour modes above 8 bits
ORIENTATION = 0x0112
TURNS = ["FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"]
UPRIGHT = {number: Image.Transpose[turn] for number, turn in enumerate(TURNS, start=2)}  # by EXIF orientation
SIDEWAYS = 5  # from this orientation on, width and height are swapped

# errors go into the exception; silence Pillow's log and libtiff
logging.getLogger("PIL").addHandler(logging.NullHandler())
with contextlib.suppress(OSError, AttributeError):  # not every build of Pillow exports libtiff
    _set_handler = ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler
    _set_handler.argtypes, _set_handler.restype = [ctypes.c_void_p], ctypes.c_void_p
    _set_handler(None)


def decode(source: Source, depth: Depth = FULL_DEPTH) -> UInt8[Bytes, "h w 3"]:
    """A file, its bytes, an array or a Pillow image as upright RGB, transparency over white."""
    with errors_named(source):
        if isinstance(source, np.ndarray):
            return _from_array(source, depth)
        image, deep = _loaded(source)
        return _upright(_rgb(image, deep, depth), image)


def decode_mask(source: File) -> Bool[Bools, "h w"]:
    """The marked pixels of a mask file: neither black nor transparent, at full depth."""
    with errors_named(source):
        image, deep = _loaded(source)
        return _upright(_marked(image, deep), image)


def turn_like(mask: Bool[Bools, "h w"], image: Path) -> Bool[Bools, "a b"]:
    """Turn a mask of the stored pixels upright, by the EXIF orientation of `image`."""
    with errors_named(image):
        return _upright(mask, _opened(_content(image)))  # not loaded: see _upright


def shape_of(source: File) -> tuple[int, int]:
    """Height and width of the upright image, from the file's header."""
    with errors_named(source):
        image = _opened(_content(source))
        return image.size if _orientation(image) >= SIDEWAYS else image.size[::-1]


def depth_of(files: Iterable[Source]) -> Depth:
    """The smallest usual white level that no sample of the readable images exceeds; warns if not their full range."""
    usual: dict[type, tuple[float, ...]] = {int: WHOLE, float: REAL}
    peaks: dict[type, list[float]] = {int: [], float: []}
    for file in files:
        with contextlib.suppress(ImageError):
            if (peak := _peak(file)) is not None and peak <= usual[type(peak)][-1]:  # else it cannot be decoded
                peaks[type(peak)].append(peak)
    whole, real = (next(white for white in usual[kind] if max(peaks[kind], default=0) <= white) for kind in usual)
    for kind, white, full in ((int, whole, FULL_DEPTH.whole), (float, real, FULL_DEPTH.real)):
        if peaks[kind] and white != full:
            deep = f"{len(peaks[kind])} of the training images have more than 8 bits and no sample above {white:g}"
            warnings.warn(f"{deep}, which is used as white; if that is wrong, set --depth", stacklevel=2)
    return Depth(int(whole), real)


def _peak(source: Source) -> int | float | None:
    """The largest sample of an image of more than 8 bits, None for 8 bits; reads only the head of most files."""
    with errors_named(source):
        if isinstance(source, np.ndarray):
            return None if source.dtype in (np.bool_, np.uint8) else _colours_and_alpha(source)[0].max().item()
        if isinstance(source, Image.Image):
            return None
        head = _content(source, HEAD)
        if not (head.startswith(FORMATS["TIFF"]) or (head.startswith(FORMATS["PNG"]) and head[24:25] == b"\x10")):
            return None
        content = _content(source)
        image = _opened(content)
        deep = _samples(image, content) if image.mode.startswith(DEEP_GREY) or ";16" in _layout(image) else None
        return None if deep is None else _colours_and_alpha(deep)[0].max().item()


# --- from a source to its bytes ---


def _content(source: File, first: int = -1) -> bytes:
    """The bytes of a regular file of limited size, not of a device or a pipe."""
    if isinstance(source, bytes):
        return source
    try:
        about = os.stat(source)
        if stat.S_ISDIR(about.st_mode):
            raise Refused("is a folder, not an image, or may not be listed; give the image files in it")
        if not stat.S_ISREG(about.st_mode):
            raise Refused("is a device or a pipe; give an image file")
        if about.st_size > MAX_BYTES:
            raise Refused(f"has {about.st_size:,} bytes, more than {MAX_BYTES:,}; crop or scale it down first")
        with open(source, "rb") as file:
            return file.read(about.st_size if first < 0 else min(first, about.st_size))  # /proc has files without end
    except FileNotFoundError:
        raise Refused("does not exist; check the path") from None
    except OSError as error:
        raise Refused(f"cannot be opened ({error.strerror}); check the path and its permissions") from None


def _loaded(source: File | Image.Image) -> tuple[Image.Image, Samples | None]:
    """The loaded image, and its samples if they have more than 8 bits."""
    if isinstance(source, Image.Image):
        return _checked(source), _samples(source, b"")
    content = _content(source)
    image = _opened(content)
    return image, _samples(image, content)


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(ORIENTATION, 1)
    except Exception:  # damaged EXIF raises anything; the pixels are still good
        return 1


def _upright(pixels: npt.NDArray[Pixel], image: Image.Image) -> npt.NDArray[Pixel]:
    """The pixels turned by the EXIF orientation; Pillow turns a TIFF itself on loading."""
    turn = UPRIGHT.get(_orientation(image))
    return pixels if turn is None else np.array(Image.fromarray(pixels.astype(np.uint8)).transpose(turn), pixels.dtype)


# --- the header, before any pixel is touched ---


def _opened(content: bytes) -> Image.Image:
    """Open an image and check its header; only the decoder of its format runs."""
    if not content:
        raise Refused(f"cannot be decoded: it is empty; {REPLACE}")
    kind = next((kind for kind, beginnings in FORMATS.items() if content.startswith(beginnings)), None)
    if kind is None or (kind == "WebP" and content[8:12] != b"WEBP"):
        raise Refused(f"cannot be decoded: its content is not {READABLE}; save it as one of these or remove it")
    if kind == "WebP":
        _check_size(*_webp_size(content))  # its decoder allocates all pixels at once
    try:
        image = Image.open(io.BytesIO(content), formats=(kind,))
    except Image.DecompressionBombError:
        raise Refused(f"has more than {MAX_PIXELS:,} pixels; crop or scale it down first") from None
    except UnidentifiedImageError:
        raise Refused(f"cannot be decoded: its {kind} header is damaged or unknown; {REPLACE}") from None
    pieces = max(len(getattr(image, "tag_v2", {}).get(tag, (0,))) for tag in (273, 324))  # strips, tiles
    most = pieces * (MAX_SCANNED // max(image.width * image.height, 1_000_000))
    if kind in ("JPEG", "TIFF") and next(islice(SCAN.finditer(content), most, None), None):
        raise Refused(f"has more than {most} scans for {image.width * image.height:,} pixels; save it plainly")
    return _checked(image)


def _checked(image: Image.Image) -> Image.Image:
    """The image, if it is safe to load."""
    if image.format is not None and image.format.upper() not in map(str.upper, (*FORMATS, "MPO")):
        raise Refused(f"cannot be decoded: {image.format} is not supported; save it as {READABLE} or remove it")
    _check_size(image.width, image.height)
    if getattr(image, "is_animated", False):
        raise Refused("holds more than one image; save one image per file")
    width, height = (getattr(image, "tag_v2", {}).get(tag, 1) for tag in (TILE_WIDTH, TILE_LENGTH))
    if not isinstance(width, int) or not isinstance(height, int):
        raise Refused(f"has tiles of no known size; {REPLACE}")
    _check_size(width, height, " in a tile")  # a tile is decoded whole, even if larger than the image
    covered = sum((right - left) * (low - top) for _, (left, top, right, low), *_ in getattr(image, "tile", ()))
    planes = len(image.getbands()) if _in_raw_planes(image) else 1
    if 0 < covered < image.width * image.height * planes:
        raise Refused(f"lacks a part of its pixels; {REPLACE}")
    return image


def _webp_size(content: bytes) -> tuple[int, int]:
    """Width and height from a WebP header, 0 x 0 if unknown."""
    head = content[12:30].ljust(18, b"\0")
    if head.startswith(b"VP8X"):
        return int.from_bytes(head[12:15], "little") + 1, int.from_bytes(head[15:18], "little") + 1
    if head.startswith(b"VP8L"):
        sides = int.from_bytes(head[9:13], "little")
        return (sides & 0x3FFF) + 1, (sides >> 14 & 0x3FFF) + 1
    if head.startswith(b"VP8 "):
        return int.from_bytes(head[14:16], "little") & 0x3FFF, int.from_bytes(head[16:18], "little") & 0x3FFF
    return 0, 0


def _check_size(width: int, height: int, where: str = "") -> None:
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        limit = f"{MAX_PIXELS:,}" if width * height > MAX_PIXELS else f"{MAX_SIDE:,} on a side"
        raise Refused(f"has {width} x {height} pixels{where}, more than {limit}; crop or scale it down first")


# --- from the file to samples ---


def _samples(image: Image.Image, content: bytes) -> Samples | None:
    """Load the image; its samples if they have more than 8 bits. `content` is empty for a Pillow image."""
    layout, tags = _layout(image), getattr(image, "tag_v2", {})
    if image.mode.startswith(DEEP_GREY):
        if tags.get(PHOTOMETRIC) == 0:
            raise Refused("stores white as 0 in more than 8 bits; save it with black as 0")
        load(image)
        return np.asarray(image)
    if _is_misread(image, tags):
        raise Refused("is a TIFF of signed samples or of planes that cannot be read; save it as 8-bit grey or RGB")
    # planar TIFF: Pillow would read 16-bit samples as 8-bit ones
    planes = tags.get(PLANES, 1) != 1 and max(tags.get(BITS, (1,))) > 8
    if ";16" in layout or planes:
        if not content or planes or (layout != "LA;16B" and layout[:-1] not in ("RGB;16", "RGBA;16", "RGBX;16")):
            raise Refused("has 16-bit colours that cannot be read in full; give 8-bit or 16-bit RGB or RGBA")
        return _deep_colours(image, content, layout)
    if layout in LEVELS and isinstance(image.info.get("transparency"), int):
        image.info["transparency"] *= LEVELS[layout]  # Pillow does not scale the transparent sample
    load(image)
    return None


def _in_raw_planes(image: Image.Image) -> bool:
    """Whether a TIFF stores one plane per channel without compression; Pillow then reads each as plain samples."""
    tiles = getattr(image, "tile", ())
    return getattr(image, "tag_v2", {}).get(PLANES, 1) != 1 and any(tile[0] == "raw" for tile in tiles)


def _is_misread(image: Image.Image, tags: Any) -> bool:
    """Whether Pillow would take the samples of a TIFF of up to 8 bits for others."""
    bits, photometric = max(tags.get(BITS, (1,))), tags.get(PHOTOMETRIC)
    turned = photometric == WHITE_IS_0 or tags.get(FILL_ORDER, 1) != 1 or 1 < bits < 8
    signed = bits == 8 and SIGNED in tags.get(FORMAT, ())
    return signed or (tags.get(PLANES, 1) != 1 and photometric == LAB) or (turned and _in_raw_planes(image))


def _layout(image: Image.Image) -> str:
    """Pillow's name of the file's pixel layout; empty once the image is loaded."""
    tiles = getattr(image, "tile", ())
    layout = tiles[0][3] if tiles else ""
    layout = layout[0] if isinstance(layout, tuple) and layout else layout
    return layout if isinstance(layout, str) else ""


def _deep_colours(image: Image.Image, content: bytes, layout: str) -> Samples:
    """16-bit colours. Pillow keeps the high bytes; reading again in the other byte order gives the low ones."""
    if layout == "LA;16B":
        parts = _reread(image, "RGBA")
        return parts[..., 0::2].astype(np.uint16) << 8 | parts[..., 1::2]
    other = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}[layout[-1]]
    low = _reread(_opened(content), layout[:-1] + other)
    return _reread(image, layout).astype(np.uint16) << 8 | low


def _reread(image: Any, layout: str) -> Bytes:
    """Load the image, an ImageFile, as if its pixels had this layout."""
    args = [(layout, *tile.args[1:]) if isinstance(tile.args, tuple) else layout for tile in image.tile]
    image.tile = [tile._replace(args=own) for tile, own in zip(image.tile, args, strict=True)]
    load(image)
    return np.asarray(image)


# --- from samples to pixels ---


def _rgb(image: Image.Image, deep: Samples | None, depth: Depth) -> UInt8[Bytes, "h w 3"]:
    if deep is not None:
        return _from_samples(deep, depth, image.info.get("transparency"))
    if image.mode == "La":
        image = image.convert("LA")  # its only conversion
    return _over_white(image) if image.has_transparency_data else np.array(image.convert("RGB"))


def _marked(image: Image.Image, deep: Samples | None) -> Bool[Bools, "h w"]:
    if deep is not None:
        colours, alpha = _colours_and_alpha(deep)
        opaque = ~_is_transparent(colours, image.info.get("transparency"))
        return (colours > 0).any(axis=2) & opaque & (True if alpha is None else alpha > 0)
    if not image.has_transparency_data:
        return np.asarray(image.convert("RGB")).max(axis=2) > 0
    rgba = np.asarray(image.convert("RGBA"))
    return (rgba[..., :3].max(axis=2) > 0) & (rgba[..., 3] > 0)


def _from_array(samples: Samples, depth: Depth) -> UInt8[Bytes, "h w 3"]:
    """Convert an array (h, w) or (h, w, 1 to 4) like a file with these samples."""
    channels = samples.shape[2] if samples.ndim == 3 else 1
    if not (samples.ndim in (2, 3) and 1 <= channels <= 4 and samples.size) or samples.dtype.kind not in "biuf":
        raise Refused(f"is {samples.dtype} of shape {samples.shape}; give numbers of shape (h, w) or (h, w, 1 to 4)")
    _check_size(samples.shape[1], samples.shape[0])
    if samples.dtype not in (np.bool_, np.uint8):
        return _from_samples(samples, depth)
    flat = samples[..., 0] if samples.ndim == 3 and channels == 1 else samples
    return _rgb(Image.fromarray(flat * np.uint8(255) if flat.dtype == np.bool_ else flat), None, depth)


def _from_samples(samples: Samples, depth: Depth, transparent: object = None) -> UInt8[Bytes, "h w 3"]:
    """Convert samples of more than 8 bits; `transparent` is the transparent sample of a PNG."""
    colours, alpha = _colours_and_alpha(samples)
    pixels = np.broadcast_to(to_8_bits(colours, depth), (*colours.shape[:2], 3))
    if alpha is not None:  # always full range
        pixels = _over_white(Image.fromarray(np.dstack([pixels, to_8_bits(alpha, FULL_DEPTH)])))
    pixels = np.array(pixels)
    pixels[_is_transparent(colours, transparent)] = 255
    return pixels


def to_8_bits(samples: Samples, depth: Depth) -> Bytes:
    """Scale 0..white to 0..255, rounded; samples outside are refused, never clipped."""
    real = samples.dtype.kind == "f"
    white = depth.real if real else depth.whole
    if real and not np.isfinite(samples).all():
        raise Refused("has samples that are not finite; save it as 8 or 16 bit")
    if samples.min() < 0:
        raise Refused(f"has samples down to {samples.min():g}; save it with black as 0, in 8 or 16 bit")
    if samples.max() > white:
        beyond = f"has samples up to {samples.max():g} where {white:g} is white"
        raise Refused(f"{beyond}; save it in the depth of the training images, or fit again with another --depth")
    if real:
        return np.floor(samples.astype(np.float32) * np.float32(255 / white) + np.float32(0.5)).astype(np.uint8)
    return ((np.arange(white + 1) * 255 + white // 2) // white).astype(np.uint8)[samples]


def _over_white(image: Image.Image) -> UInt8[Bytes, "h w 3"]:
    image = image.convert("RGBA")
    return np.array(Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB"))


def _colours_and_alpha(samples: Samples) -> tuple[Samples, Samples | None]:
    """Grey or colours (h, w, 1 or 3), and alpha if present."""
    samples = samples[..., None] if samples.ndim == 2 else samples
    return (samples, None) if samples.shape[2] % 2 else (samples[..., :-1], samples[..., -1])


def _is_transparent(colours: Samples, transparent: object) -> Bool[Bools, "h w"]:
    return (colours == np.asarray(np.nan if transparent is None else transparent)).all(axis=2)
