"""Decoding and firm's conditioning in NumPy and Pillow alone, for the runtime of an export; equal to firm's own."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Array = np.ndarray[Any, Any]
Run = tuple[int, int, int]  # row, begin, end

FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "WebP")
MAX_PIXELS = 80_000_000
LANES = 4  # products that torch adds without fusing, when it resizes
MIDDLE, WINDOW, WINDOW_SIDE, GAIN, FAINT = 128.0, 12.0, 256, 40.0, 4.0  # of evened illumination, as in firm
RULE_SIDE = 256  # image side for which the kernels of the foreground are given
GREYS = np.array([9798, 19235, 3735])  # red, green and blue in 2**15 parts of grey
TURNS = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
LEVELS = {"1": 255, "L;2": 85, "L;4": 17}  # grey levels per step of samples below 8 bits


class ExportError(Exception):
    """The folder, an image or the engine cannot be used; one sentence."""


# --- decoding ---


def decode(source: Any, whole: int, real: float) -> Array:
    """A file, its bytes, an array or a Pillow image as upright RGB; `whole` and `real` are white in deep samples."""
    try:
        if isinstance(source, np.ndarray):
            return _from_array(source, whole, real)
        content = source if isinstance(source, bytes) else b"" if isinstance(source, Image.Image) else _read(source)
        image = Image.open(io.BytesIO(content), formats=FORMATS) if content else source
        if image.width * image.height > MAX_PIXELS or getattr(image, "is_animated", False):
            raise ValueError(f"more than {MAX_PIXELS:,} pixels, or several images in one file")
        pixels = _pixels(image, content, whole, real)
        orientation = image.getexif().get(0x0112, 1)  # not before: asking loads the image
        if not 2 <= orientation <= 8:
            return pixels
        return np.array(Image.fromarray(pixels).transpose(Image.Transpose[TURNS[orientation - 2]]))
    except Exception as error:  # damaged files raise anything
        name = str(source) if isinstance(source, Path | str) else "the image"
        raise ExportError(f"{name} cannot be decoded ({' '.join(str(error).split())}); replace or remove it") from error


def _read(source: Path | str) -> bytes:
    return Path(source).read_bytes()


def _pixels(image: Any, content: bytes, whole: int, real: float) -> Array:
    tiles = getattr(image, "tile", ())
    layout = tiles[0][3] if tiles else ""
    layout = layout[0] if isinstance(layout, tuple) and layout else layout
    if image.mode.startswith(("I", "F")):
        return _from_samples(np.asarray(image), whole, real, image.info.get("transparency"))
    if ";16" in str(layout):
        return _from_samples(_deep_colours(image, content, str(layout)), whole, real, image.info.get("transparency"))
    if layout in LEVELS and isinstance(image.info.get("transparency"), int):
        image.info["transparency"] *= LEVELS[layout]
    image.load()
    image = image.convert("LA") if image.mode == "La" else image
    return _over_white(image) if image.has_transparency_data else np.array(image.convert("RGB"))


def _deep_colours(image: Any, content: bytes, layout: str) -> Array:
    """Pillow keeps the high bytes of 16-bit colours; read again in the other byte order they are the low ones."""
    if not content or layout[:-1] not in ("RGB;16", "RGBA;16", "RGBX;16"):
        raise ValueError("16-bit colours that cannot be read in full; give 8-bit or 16-bit RGB")
    other = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}[layout[-1]]
    again: Any = Image.open(io.BytesIO(content), formats=FORMATS)
    for each, kind in ((image, layout), (again, layout[:-1] + other)):
        args = [(kind, *tile.args[1:]) if isinstance(tile.args, tuple) else kind for tile in each.tile]
        each.tile = [tile._replace(args=own) for tile, own in zip(each.tile, args, strict=True)]
    return np.asarray(image).astype(np.uint16) << 8 | np.asarray(again)


def _from_array(samples: Array, whole: int, real: float) -> Array:
    channels = samples.shape[2] if samples.ndim == 3 else 1
    if samples.ndim not in (2, 3) or not 1 <= channels <= 4 or not samples.size or samples.dtype.kind not in "biuf":
        raise ValueError(f"an array of {samples.dtype} of shape {samples.shape} is no image")
    if samples.dtype not in (np.bool_, np.uint8):
        return _from_samples(samples, whole, real, None)
    flat = samples[..., 0] if samples.ndim == 3 and channels == 1 else samples
    image = Image.fromarray(np.ascontiguousarray(flat * np.uint8(255) if flat.dtype == np.bool_ else flat))
    return _over_white(image) if image.has_transparency_data else np.array(image.convert("RGB"))


def _from_samples(samples: Array, whole: int, real: float, transparent: Any) -> Array:
    samples = samples[..., None] if samples.ndim == 2 else samples
    colours, alpha = (samples, None) if samples.shape[2] % 2 else (samples[..., :-1], samples[..., -1])
    pixels = np.broadcast_to(_to_8_bits(colours, whole, real), (*colours.shape[:2], 3))
    if alpha is not None:
        pixels = _over_white(Image.fromarray(np.dstack([pixels, _to_8_bits(alpha, 65535, 1.0)])))
    pixels = np.array(pixels)
    pixels[(colours == np.asarray(np.nan if transparent is None else transparent)).all(axis=2)] = 255
    return pixels


def _to_8_bits(samples: Array, whole: int, real: float) -> Array:
    white = real if samples.dtype.kind == "f" else whole
    if not np.isfinite(samples).all() or samples.min() < 0 or samples.max() > white:
        raise ValueError(f"samples outside 0 to {white:g}, which is white for this detector")
    if samples.dtype.kind == "f":
        return np.floor(samples.astype(np.float32) * np.float32(255 / white) + np.float32(0.5)).astype(np.uint8)
    table: Array = ((np.arange(whole + 1) * 255 + whole // 2) // whole).astype(np.uint8)
    return table[samples]


def _over_white(image: Any) -> Array:
    image = image.convert("RGBA")
    return np.array(Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB"))


# --- one image, as firm prepares it ---


def fused(a: Array, b: Array, c: Array) -> Array:
    """a b + c in float32 with a single rounding, as processors fuse it."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


def resize(image: Array, side: int) -> Array:
    """(c, h, w) to a square, bilinear and antialiased: to the last bit what firm's resize gives."""
    if image.shape[1:] == (side, side):
        return image
    values = image.astype(np.float32)
    values = values if image.shape[2] == side else _resampled(values, side)
    if image.shape[1] != side:
        values = _resampled(np.ascontiguousarray(values.swapaxes(1, 2)), side).swapaxes(1, 2)
    return np.ascontiguousarray(np.clip(np.rint(values), 0, 255).astype(np.uint8))


def _resampled(values: Array, side: int) -> Array:
    """Along the last axis. The order of additions is torch's: four products at a time, the rest fused."""
    length, one, half = values.shape[-1], np.float32(1), np.float32(0.5)
    scale = np.float32(length) / np.float32(side)
    support, shrink = (scale, one / scale) if scale >= 1 else (one, one)
    centre = scale * (np.arange(side, dtype=np.float32) + half)
    first = np.maximum((centre - support + half).astype(np.int64), 0)
    count = np.minimum((centre + support + half).astype(np.int64), length) - first
    taps = np.arange(int(count.max()))
    away = ((taps + first[:, None]).astype(np.float32) - centre[:, None] + half) * shrink
    weights = np.maximum(one - np.abs(away), 0).astype(np.float32) * (taps < count[:, None])
    weights = weights / np.cumsum(weights, axis=1, dtype=np.float32)[:, -1:]
    total, whole = values[..., first] * weights[:, 0], (count - 1) // LANES * LANES
    for tap in taps[1:]:
        part, weight = values[..., np.minimum(first + tap, length - 1)], weights[:, tap]
        added = np.where(tap <= whole, total + part * weight, fused(part, weight, total))
        total = np.where(tap < count, added, total)
    return total


def foreground(image: Array, rule: dict[str, Any] | None) -> Array:
    """The object's pixels (h, w) by firm's rule; all of them where there is no rule, or no object by it."""
    everywhere = np.ones(image.shape[1:], bool)
    if rule is None:
        return everywhere
    plane = image[("red", "green", "blue").index(rule["channel"])] if rule["channel"] != "grey" else grey_of(image)
    count = np.bincount(plane.ravel(), minlength=256)
    limit = otsu(count) if rule["method"] == "otsu" else triangle(count)
    mask = plane > limit if rule["polarity"] == "bright" else plane <= limit
    for pixels, grow in ((rule["close"], True), (rule["open"], False)):
        width = max(1, round(pixels * min(plane.shape) / RULE_SIDE))
        if width > 1:
            anchor = width // 2
            mask = _spread(_spread(mask, width, anchor, grow), width, width - 1 - anchor, not grow)
    return mask if mask.any() else everywhere


def grey_of(image: Array) -> Array:
    """RGB (3, h, w) as grey."""
    return ((np.tensordot(GREYS, image.astype(np.int64), 1) + 2**14) >> 15).astype(np.uint8)


def otsu(count: Array) -> int:
    """The threshold that best splits a histogram into two."""
    part = count / count.sum()
    mean, below, share = float((np.arange(256) * part).sum()), 0.0, 0.0
    best, most, least = 0, 0.0, float(np.finfo(np.float32).eps)
    for level, own in enumerate(part.tolist()):
        below, share = below * share, share + own
        if min(share, 1 - share) < least or max(share, 1 - share) > 1 - least:
            continue
        below = (below + level * own) / share
        spread = share * (1 - share) * (below - (mean - share * below) / (1 - share)) ** 2
        if spread > most:
            best, most = level, spread
    return best


def triangle(count: Array) -> int:
    """The level farthest below the line from the histogram's peak to the end of its longer tail."""
    levels = np.flatnonzero(count)
    low, high = max(int(levels[0]) - 1, 0), min(int(levels[-1]) + 1, 255)
    peak = int(count.argmax())
    flipped = peak - low < high - peak
    if flipped:
        count, low, peak = count[::-1], 255 - high, 255 - peak
    along = np.arange(low + 1, peak + 1)
    below = int(count[peak]) * along.astype(np.float64) + (low - peak) * count[low + 1 : peak + 1]
    found = (int(along[below.argmax()]) if len(along) and below.max() > 0 else low) - 1
    return 255 - found if flipped else found


def _spread(mask: Array, width: int, anchor: int, grow: bool) -> Array:
    """Dilation, or erosion, by a square; beyond the border nothing counts."""
    result = mask if grow else ~mask
    for axis in (0, 1):
        length = result.shape[axis]
        total = np.insert(np.cumsum(result, axis=axis), 0, 0, axis=axis)
        places = np.arange(length) - anchor
        begin, end = np.clip(places, 0, length), np.clip(places + width, 0, length)
        result = np.take(total, end, axis) > np.take(total, begin, axis)
    return result if grow else ~result


def even_illumination(image: Array, how: str) -> Array:
    """Scale the median, or the local mean and deviation, to a standard value."""
    if how == "none":
        return image
    values = image.astype(np.float32)
    if how == "median":
        evened = values * (MIDDLE / max(1.0, float(np.median(values))))
    else:
        sigma = WINDOW * min(image.shape[1:]) / WINDOW_SIDE
        down, across = (_window(length, sigma) for length in image.shape[1:])
        centred = values - (down @ values.astype(np.float64) @ across.T).astype(np.float32)
        square = np.square(centred).transpose(1, 2, 0).mean(axis=2, dtype=np.float32)
        deviation = np.sqrt((down @ square.astype(np.float64) @ across.T).astype(np.float32))
        evened = (centred / (deviation + np.float32(FAINT)) * np.float32(GAIN) + np.float32(MIDDLE)).astype(np.float32)
    return np.clip(np.round(evened), 0, 255).astype(np.uint8)


def _window(length: int, sigma: float) -> Array:
    """A Gaussian along one side as a matrix; beyond the border the image is mirrored."""
    reach = (round(sigma * 8 + 1) | 1) // 2
    taps = np.exp(-0.5 * np.square(np.arange(-reach, reach + 1) / sigma))
    matrix = np.zeros((length, length))
    for offset, tap in zip(range(-reach, reach + 1), taps / taps.sum(), strict=True):
        place = (np.arange(length) + offset) % (2 * length)
        np.add.at(matrix, (np.arange(length), np.where(place < length, place, 2 * length - 1 - place)), tap)
    return matrix


def alignment(mask: Array) -> Array:
    """The matrix (2, 3) that turns the largest object's long axis horizontal, and centres it."""
    found = max(components(mask), key=lambda runs: sum(end - begin for _, begin, end in runs), default=None)
    chosen = np.ones_like(mask)
    if found is not None:
        chosen[:] = False
        for row, begin, end in found:
            chosen[row, begin:end] = True
    y, x = np.nonzero(chosen)
    points = np.stack([x, y], axis=1).astype(np.float64)
    centre = points.mean(axis=0)
    axis = np.linalg.eigh(np.cov((points - centre).T) if len(points) > 1 else np.eye(2))[1][:, 1]
    across, down = axis
    if third_moments(x, y) @ (across**3, 3 * across**2 * down, 3 * across * down**2, down**3) < 0:
        axis = -axis
    turn = np.array([axis, [-axis[1], axis[0]]])
    turned = (points - centre) @ turn.T
    height, width = mask.shape
    middle = (turned.min(axis=0) + turned.max(axis=0)) / 2
    shift = np.array([(width - 1) / 2, (height - 1) / 2]) - middle - turn @ centre
    return np.column_stack([turn, shift])


def third_moments(x: Array, y: Array) -> Array:
    """The sums of xxx, xxy, xyy and yyy about the centre, of whole numbers: exactly zero if points are symmetric."""
    powers = [(p, q) for p in range(4) for q in range(4 - p)]
    m = {power: int((x ** power[0] * y ** power[1]).sum()) for power in powers}
    n, a, b = m[0, 0], m[1, 0], m[0, 1]
    sums = (
        n * n * m[3, 0] - 3 * n * a * m[2, 0] + 2 * a**3,
        n * n * m[2, 1] - 2 * n * a * m[1, 1] - n * b * m[2, 0] + 2 * a * a * b,
        n * n * m[1, 2] - 2 * n * b * m[1, 1] - n * a * m[0, 2] + 2 * a * b * b,
        n * n * m[0, 3] - 3 * n * b * m[0, 2] + 2 * b**3,
    )
    return np.array(sums, float) / n**2


def inverse(frame: Array) -> Array:
    """The frame the other way round."""
    (a, b, c), (d, e, f) = frame.tolist()
    part = 1 / (a * e - b * d)
    a, b, d, e = e * part, -b * part, -d * part, a * part
    return np.array([[a, b, -a * c - b * f], [d, e, -d * c - e * f]])


def _places(frame: Array, height: int, width: int) -> tuple[Array, Array]:
    """Where each pixel comes from: columns and rows."""
    (a, b, c), (d, e, f) = frame.astype(np.float32)
    y, x = np.mgrid[:height, :width].astype(np.float32)
    return fused(np.full_like(x, a), x, b * y + c), fused(np.full_like(x, d), x, e * y + f)


def linear(values: Array, frame: Array) -> Array:
    """(h, w, c) moved, bilinear, the border repeated, in float32."""
    height, width = values.shape[:2]
    x, y = _places(frame, height, width)
    left, top = np.floor(x), np.floor(y)
    columns = [np.clip(left.astype(np.int64) + step, 0, width - 1) for step in (0, 1)]
    rows = [np.clip(top.astype(np.int64) + step, 0, height - 1) for step in (0, 1)]
    across, down = (x - left)[..., None], (y - top)[..., None]
    ends = []
    for row in rows:
        begin, end = (values[row, column].astype(np.float32) for column in columns)
        ends.append(fused(np.broadcast_to(across, begin.shape), end - begin, begin))
    return fused(np.broadcast_to(down, ends[0].shape), ends[1] - ends[0], ends[0])


def nearest(mask: Array, frame: Array, *, replicate: bool) -> Array:
    """A mask moved without interpolation; outside of it its border is repeated, or nothing is."""
    height, width = mask.shape
    x, y = (np.rint(place).astype(np.int64) for place in _places(frame, height, width))
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    moved = mask[np.clip(y, 0, height - 1), np.clip(x, 0, width - 1)]
    return moved if replicate else moved & inside


def warped_back(heat: Array, frame: Array) -> Array:
    """A map of the aligned image in the frame of the original one; 0 beyond the aligned image."""
    inside = nearest(np.ones(heat.shape, bool), frame, replicate=False)
    return np.where(inside, linear(heat[..., None], frame)[..., 0], np.float32(0))


# --- parts of a mask ---


def components(mask: Array) -> list[list[Run]]:
    """The 8-connected parts of a mask, each as runs (row, begin, end) from the top."""
    edges = np.diff(np.pad(mask.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    (rows, begins), (_, ends) = np.nonzero(edges == 1), np.nonzero(edges == -1)
    runs = list(zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True))
    owner, above = list(range(len(runs))), 0

    def root(run: int) -> int:
        while owner[run] != run:
            owner[run] = run = owner[owner[run]]
        return run

    for number, (row, begin, end) in enumerate(runs):
        while above < number and (runs[above][0] < row - 1 or (runs[above][0] == row - 1 and runs[above][2] < begin)):
            above += 1
        other = above
        while other < number and runs[other][0] == row - 1 and runs[other][1] <= end:
            first, second = sorted((root(other), root(number)))
            owner[second] = first
            other += 1
    parts: dict[int, list[Run]] = {}
    for number, run in enumerate(runs):
        parts.setdefault(root(number), []).append(run)
    return list(parts.values())
