"""Image files written byte by byte, as their formats define them: also such as no program would write."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image

HERE = object()
COLOURS = {1: 0, 2: 4, 3: 2, 4: 6}  # PNG's number for grey, grey with alpha, RGB, RGBA


def encoded(image, kind="PNG", **options):
    """By Pillow, of an image or an array."""
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, kind, **options)
    return buffer.getvalue()


def exif(orientation):
    found = Image.Exif()
    found[0x0112] = orientation
    return found


def chunk(tag, data):
    return struct.pack(">I", len(data)) + tag + data + struct.pack(">I", zlib.crc32(tag + data))


def png(samples, bits=8, further=(), size=None):
    """(h, w, c) samples as a PNG of so many bits each; `size` is what the header claims instead of the truth."""
    height, width, channels = samples.shape
    if bits >= 8:
        rows = [row.astype(">u2" if bits == 16 else "u1").tobytes() for row in samples]
    else:
        rows = [packed(row[:, 0], bits) for row in samples]
    width, height = size or (width, height)
    head = struct.pack(">IIBBBBB", width, height, bits, COLOURS[channels], 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row for row in rows))
    middle = b"".join(chunk(tag, data) for tag, data in further)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + middle + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def packed(row, bits):
    """Samples of fewer than 8 bits side by side, the first one highest."""
    each = ((row[:, None] >> np.arange(bits)[::-1]) & 1).astype(np.uint8)
    return np.packbits(each.ravel()).tobytes()


def tiff(samples, order="<", further=None, deflate=False):
    """(h, w) or (h, w, c) samples as a TIFF of one strip; `further` adds tags (type, values), or takes one out (None).

    The value HERE is where the pixels begin, and (HERE, n) n bytes behind it.
    """
    height, width, *rest = samples.shape
    channels = rest[0] if rest else 1
    data = samples.astype(samples.dtype.newbyteorder(order)).tobytes()
    data = zlib.compress(data) if deflate else data
    tags = {
        256: (4, [width]),
        257: (4, [height]),
        258: (3, [8 * samples.dtype.itemsize] * channels),
        259: (3, [8 if deflate else 1]),
        262: (3, [2 if channels >= 3 else 1]),
        273: (4, [HERE]),
        277: (3, [channels]),
        278: (4, [height]),
        279: (4, [len(data)]),
        339: (3, [{"u": 1, "i": 2, "f": 3}[samples.dtype.kind]] * channels),
    } | (further or {})
    tags = {tag: value for tag, value in tags.items() if value is not None}
    ends = 8 + 2 + 12 * len(tags) + 4
    entries, beyond = b"", bytearray(data)  # the pixels come first of what lies behind the tags
    for tag, (kind, values) in sorted(tags.items()):
        values = [ends if value is HERE else ends + value[1] if isinstance(value, tuple) else value for value in values]
        content = struct.pack(order + {3: "H", 4: "I"}[kind] * len(values), *values)
        if len(content) > 4:
            content, place = struct.pack(order + "I", ends + len(beyond)), content
            beyond += place
        entries += struct.pack(order + "HHI", tag, kind, len(values)) + content.ljust(4, b"\0")
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, len(tags))
    return head + entries + struct.pack(order + "I", 0) + bytes(beyond)


def planes(samples, **options):
    """(h, w, c) samples as a TIFF of one strip per channel, without compression."""
    height, width, channels = samples.shape
    size = height * width * samples.itemsize
    strips = {273: (4, [(HERE, size * number) for number in range(channels)]), 279: (4, [size] * channels)}
    further = strips | {284: (3, [2])} | options.pop("further", {})
    return tiff(samples.transpose(2, 0, 1).reshape(samples.shape), further=further, **options)
