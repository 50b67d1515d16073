"""What the bytes of an image mean: formats told by content, sizes capped by the header, samples of any depth to RGB.

`firm.images` is the door in front of it, where a reason gets the name of its file.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, UInt8
from PIL import Image, UnidentifiedImageError, _imaging

from firm.types import FULL_DEPTH, Depth

Bytes = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]
Numbers = npt.NDArray[Any]

FORMATS: dict[str, tuple[bytes, ...]] = {  # by their first bytes; none of them runs an interpreter, as EPS does
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "JPEG": (b"\xff\xd8\xff",),
    "TIFF": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    "BMP": (b"BM",),
    "WebP": (b"RIFF",),
}
READ = "PNG, JPEG, TIFF, BMP or WebP"
HEAD = 32  # bytes from which a format is known, and the depth of a PNG
MAX_PIXELS = 80_000_000  # below Pillow's own limit, so ours speaks first
BITS, PHOTOMETRIC, PLANES, TILE_WIDTH, TILE_LENGTH = 258, 262, 284, 322, 323  # tags of TIFF
LEVELS = {"1": 255, "L;2": 85, "L;4": 17}  # grey levels between two steps of samples of so few bits
ORIENTATION = 0x0112
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
REPLACE = "replace or remove it"


def _silence() -> None:
    """What is wrong with a file is said in its exception, not on the terminal by Pillow's log and by libtiff."""
    logging.getLogger("PIL").addHandler(logging.NullHandler())
    with contextlib.suppress(OSError, AttributeError):  # a Pillow that holds libtiff otherwise may go on talking
        handler = ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler
        handler.argtypes, handler.restype = [ctypes.c_void_p], ctypes.c_void_p
        handler(None)


_silence()


class Unusable(ValueError):
    """Why an image cannot be used: the rest of a sentence that begins with its name."""


@dataclass(frozen=True)
class Picture:
    """An image whose pixels are loaded: as Pillow holds it, and its samples where they have more than 8 bits."""

    image: Image.Image
    deep: Numbers | None = None  # (h, w) or (h, w, 2 to 4: grey or colours, then alpha)


# before any pixel is touched


def opened(content: bytes) -> Image.Image:
    """The image with its header read and found harmless; no other reader than that of its format ever runs."""
    kind = _kind(content)
    if kind == "WebP":
        _cap(*_canvas(content))  # its reader takes memory for the canvas at once
    try:
        image = Image.open(io.BytesIO(content), formats=(kind,))
    except Image.DecompressionBombError:
        raise Unusable(f"has more than {MAX_PIXELS:,} pixels; crop or scale it down first") from None
    except UnidentifiedImageError:
        raise Unusable(
            f"cannot be decoded: its header begins as {kind} and is damaged or of an unknown kind; {REPLACE}"
        ) from None
    return checked(image)


def checked(image: Image.Image) -> Image.Image:
    """The image itself, or why it must not be loaded."""
    if image.format is not None and image.format.upper() not in map(str.upper, (*FORMATS, "MPO")):
        raise Unusable(f"cannot be decoded: {image.format} is not read; save it as {READ} or remove it")
    _cap(image.width, image.height)
    if getattr(image, "is_animated", False):
        raise Unusable("holds more than one image; save the one that is meant as a file of its own")
    width, height = (getattr(image, "tag_v2", {}).get(tag, 1) for tag in (TILE_WIDTH, TILE_LENGTH))
    if not isinstance(width, int) or not isinstance(height, int):
        raise Unusable(f"has tiles of no known size; {REPLACE}")
    _cap(width, height, " in a tile")  # which is held whole while it is read, whatever the size of the image
    covered = sum((right - left) * (low - top) for _, (left, top, right, low), *_ in getattr(image, "tile", ()))
    if 0 < covered < image.width * image.height:
        raise Unusable(f"lacks a part of its pixels; {REPLACE}")
    return image


def _kind(content: bytes) -> str:
    if not content:
        raise Unusable(f"cannot be decoded: it is empty; {REPLACE}")
    for kind, beginnings in FORMATS.items():
        if content.startswith(beginnings) and (kind != "WebP" or content[8:12] == b"WEBP"):
            return kind
    raise Unusable(f"cannot be decoded: it is no {READ} file, whatever its name; save it as one or remove it")


def _canvas(webp: bytes) -> tuple[int, int]:
    """Width and height as a WebP file states them, 0 x 0 where it does not."""
    head = webp[12:30].ljust(18, b"\0")
    if head.startswith(b"VP8X"):
        return int.from_bytes(head[12:15], "little") + 1, int.from_bytes(head[15:18], "little") + 1
    if head.startswith(b"VP8L"):
        sides = int.from_bytes(head[9:13], "little")
        return (sides & 0x3FFF) + 1, (sides >> 14 & 0x3FFF) + 1
    if head.startswith(b"VP8 "):
        return int.from_bytes(head[14:16], "little") & 0x3FFF, int.from_bytes(head[16:18], "little") & 0x3FFF
    return 0, 0


def _cap(width: int, height: int, where: str = "") -> None:
    if width * height > MAX_PIXELS:
        raise Unusable(f"has {width} x {height} pixels{where}, more than {MAX_PIXELS:,}; crop or scale it down first")


# from the file to samples


def loaded(image: Image.Image, content: bytes) -> Picture:
    """The picture of an image just opened; `content` are its bytes, none of an image that was opened elsewhere."""
    layout = _layout(image)
    if _single(image):
        if getattr(image, "tag_v2", {}).get(PHOTOMETRIC) == 0:
            raise Unusable("stores white as 0 in more than 8 bits; save it with black as 0")
        image.load()
        return Picture(image, np.asarray(image))
    if ";16" in layout or _deep_planes(image):
        return Picture(image, _wide(image, content, layout))
    if layout in LEVELS and isinstance(image.info.get("transparency"), int):
        image.info["transparency"] *= LEVELS[layout]  # Pillow scales the samples and forgets the one that is clear
    image.load()
    return Picture(image)


def may_be_deep(head: bytes) -> bool:
    """Whether a file that begins so may have samples of more than 8 bits: a PNG says it at once, a TIFF anywhere."""
    return head.startswith(FORMATS["TIFF"]) or (head.startswith(FORMATS["PNG"]) and head[24:25] == b"\x10")


def is_deep(image: Image.Image) -> bool:
    """Whether an image just opened has samples of more than 8 bits."""
    return _single(image) or ";16" in _layout(image)


def _single(image: Image.Image) -> bool:
    """Grey of more than 8 bits; colours of so many are none of Pillow's modes."""
    return image.mode.startswith("I") or image.mode == "F"


def _deep_planes(image: Image.Image) -> bool:
    """A TIFF that stores one colour after the other: Pillow would take 16-bit ones for 8-bit ones."""
    tags = getattr(image, "tag_v2", {})
    return tags.get(PLANES, 1) != 1 and max(tags.get(BITS, (1,))) > 8


def _layout(image: Image.Image) -> str:
    """How the file holds a pixel, in Pillow's words; empty once the image is loaded."""
    tiles = getattr(image, "tile", ())
    how = tiles[0][3] if tiles else ""
    how = how[0] if isinstance(how, tuple) and how else how
    return how if isinstance(how, str) else ""


def _wide(image: Image.Image, content: bytes, layout: str) -> Numbers:
    """The samples of 16-bit colours, of which Pillow keeps the high bytes: the low ones come by a second reading.

    That one takes the file to be of the other byte order, and grey with alpha for four bytes.
    """
    plain = layout == "LA;16B" or layout[:-1] in ("RGB;16", "RGBA;16", "RGBX;16")
    if not content or not plain or _deep_planes(image):
        raise Unusable("has 16-bit colours that cannot be had in full; give a file of 8 bit, or of 16-bit RGB or RGBA")
    if layout == "LA;16B":
        parts = _reread(image, "RGBA")
        return parts[..., 0::2].astype(np.uint16) << 8 | parts[..., 1::2]
    other = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}[layout[-1]]
    low = _reread(opened(content), layout[:-1] + other)
    return _reread(image, layout).astype(np.uint16) << 8 | low


def _reread(image: Image.Image, layout: str) -> Bytes:
    """The image loaded as if the file held its pixels in that layout."""
    tiles = image.tile  # type: ignore[attr-defined]  # of an image of a file
    image.tile = [  # type: ignore[attr-defined]
        tile._replace(args=(layout, *tile.args[1:]) if isinstance(tile.args, tuple) else layout) for tile in tiles
    ]
    image.load()
    return np.asarray(image)


def turn_of(image: Image.Image) -> Image.Transpose | None:
    """How EXIF asks for the image to be turned; the pixels of a file with damaged EXIF are still good."""
    try:
        return UPRIGHT.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # decoders of damaged files raise anything
        return None


# from samples to pixels


def rgb(picture: Picture, depth: Depth) -> UInt8[Bytes, "h w 3"]:
    """8 bits for each of three colours, transparency over white."""
    image = picture.image
    if picture.deep is not None:
        return of_samples(picture.deep, depth, image.info.get("transparency"))
    if image.mode == "La":
        image = image.convert("LA")  # the only way out of it
    return over_white(image) if _transparent(image) else np.array(image.convert("RGB"))


def marked(picture: Picture) -> Bool[Bools, "h w"]:
    """The pixels of a mask: neither black nor transparent."""
    image, deep = picture.image, picture.deep
    if deep is not None:
        colours, alpha = _parted(deep)
        seen = _clear(colours, image.info.get("transparency")) ^ True
        return (colours > 0).any(axis=2) & seen & (True if alpha is None else alpha > 0)
    if not _transparent(image):
        return np.asarray(image.convert("RGB")).max(axis=2) > 0
    rgba = np.asarray(image.convert("RGBA"))
    return (rgba[..., :3].max(axis=2) > 0) & (rgba[..., 3] > 0)


def peak(picture: Picture) -> int | float | None:
    """The largest sample of more than 8 bits, a float if they are; None: the image has 8 bits."""
    return None if picture.deep is None else _parted(picture.deep)[0].max().item()


def of_array(samples: Numbers, depth: Depth) -> UInt8[Bytes, "h w 3"]:
    """The pixels of an array (h, w) or (h, w, 1 to 4), by the rules of a file with these samples."""
    channels = samples.shape[2] if samples.ndim == 3 else 1
    fits = samples.ndim in (2, 3) and 1 <= channels <= 4 and samples.size
    if not fits or samples.dtype.kind not in "biuf":
        raise Unusable(f"is {samples.dtype} of shape {samples.shape}; give numbers of shape (h, w) or (h, w, 1 to 4)")
    _cap(samples.shape[1], samples.shape[0])
    if samples.dtype not in (np.bool_, np.uint8):
        return of_samples(samples, depth)
    flat = samples[..., 0] if samples.ndim == 3 and channels == 1 else samples
    return rgb(Picture(Image.fromarray(flat * np.uint8(255) if flat.dtype == np.bool_ else flat)), depth)


def of_samples(samples: Numbers, depth: Depth, clear: object = None) -> UInt8[Bytes, "h w 3"]:
    """Pixels of samples of more than 8 bits; `clear` is the sample that a PNG calls transparent."""
    colours, alpha = _parted(samples)
    pixels = np.broadcast_to(scaled(colours, depth), (*colours.shape[:2], 3))
    if alpha is not None:  # a part of the whole, whatever is white
        pixels = over_white(Image.fromarray(np.dstack([pixels, scaled(alpha, FULL_DEPTH)])))
    pixels = np.array(pixels)
    pixels[_clear(colours, clear)] = 255
    return pixels


def scaled(samples: Numbers, depth: Depth) -> Bytes:
    """0 to 0 and white to 255, in between to the nearest; what lies outside is refused, never clipped."""
    real = samples.dtype.kind == "f"
    white = depth.real if real else depth.whole
    if real and not np.isfinite(samples).all():
        raise Unusable("has samples that are no numbers; save it as 8 or 16 bit")
    if samples.min() < 0:
        raise Unusable(f"has samples down to {samples.min():g}; save it with black as 0, in 8 or 16 bit")
    if samples.max() > white:
        raise Unusable(
            f"has samples up to {samples.max():g} where {white:g} is white; save it in the depth of the images learnt "
            "from, in 8 or 16 bit, or fit again with another --depth"
        )
    if real:
        return np.floor(samples.astype(np.float32) * np.float32(255 / white) + np.float32(0.5)).astype(np.uint8)
    steps = (np.arange(white + 1) * 255 + white // 2) // white
    return steps.astype(np.uint8)[samples]


def over_white(image: Image.Image) -> UInt8[Bytes, "h w 3"]:
    image = image.convert("RGBA")
    return np.array(Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB"))


def _parted(samples: Numbers) -> tuple[Numbers, Numbers | None]:
    """The grey or the colours (h, w, 1 or 3), and alpha if there is one."""
    if samples.ndim == 2:
        return samples[..., None], None
    even = samples.shape[2] % 2 == 0
    return (samples[..., :-1], samples[..., -1]) if even else (samples, None)


def _clear(colours: Numbers, clear: object) -> Bool[Bools, "h w"]:
    """Where all samples of a pixel are those that are called transparent."""
    return np.zeros(colours.shape[:2], bool) if clear is None else (colours == np.asarray(clear)).all(axis=2)


def _transparent(image: Image.Image) -> bool:
    return "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa")
