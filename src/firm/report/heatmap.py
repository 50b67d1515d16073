"""A heat map over the picture it belongs to, in one scale of colours for all pictures of a detector.

The scale runs from 0 to twice the threshold, or to `UNIT` above a threshold of 0 or less; its middle is the threshold.
Low heat leaves the picture as it is, and a line is drawn around all heat above the threshold.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
from jaxtyping import Float, UInt8

from firm.errors import ModelFileError
from firm.runtime.files import common_folder, shortened, write_atomically

Pixels = npt.NDArray[np.uint8]  # h, w, 3: RGB
Plane = npt.NDArray[np.float32]

LARGEST = 1024  # pixels of an overlay's longer side
OPACITY = 0.6  # of the colours from the threshold on; below it they fade
COLD, COOL, WARM, HOT = (30, 60, 200), (0, 190, 220), (255, 225, 0), (200, 0, 0)  # at 0, below and at the middle, at 1
UNIT = 1.0  # from the middle of the scale to its end where the threshold is 0 or less: a deviation of good patches
LINE = (255, 255, 255)
BAR, MARGIN, LABELS = 14, 8, 66  # widths beside the picture: the bar, the gaps, the numbers
LEAST, LONGEST = 96, 256  # heights of the bar
INK = (60, 60, 60)


def overlay(picture: UInt8[Pixels, "h w 3"], heat: Float[Plane, "r c"], threshold: float) -> UInt8[Pixels, "h w 3"]:
    """The picture with its heat map, which may be of any size, spread over it."""
    height, width = picture.shape[:2]
    spread = cv2.resize(np.asarray(heat, np.float32), (width, height), interpolation=cv2.INTER_LINEAR)
    shown = blend(picture, levels(np.asarray(spread, np.float32), threshold))
    above = (spread > threshold).astype(np.uint8)
    if above.any():
        lines, _ = cv2.findContours(above, cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
        cv2.drawContours(shown, lines, -1, LINE, max(1, round(max(height, width) / 400)))
    return shown


def levels(heat: Float[Plane, "h w"], threshold: float) -> Float[Plane, "h w"]:
    """Heat as a place on the scale: 0 at 0 and below, a half at the threshold, 1 at twice the threshold and beyond.

    With a threshold of 0 or less a good picture may lie at it everywhere, so nothing up to it has a colour.
    """
    if not np.isfinite(threshold):
        raise ModelFileError(f"a threshold of {threshold:g} has no scale of colours; fit the detector again")
    if threshold > 0:
        return np.clip(heat / np.float32(2 * threshold), 0, 1)
    beyond = (heat - np.float32(threshold)) / np.float32(2 * UNIT)
    return np.where(beyond > 0, np.clip(beyond + np.float32(0.5), 0, 1), np.float32(0))


def ends(threshold: float) -> tuple[float, float]:
    """The scores at the two ends of the scale, as far below the threshold as above it."""
    half = threshold if threshold > 0 else UNIT
    return threshold - half, threshold + half


def blend(picture: UInt8[Pixels, "h w 3"], level: Float[Plane, "h w"]) -> UInt8[Pixels, "h w 3"]:
    """Colours over a picture: none at 0, full from the middle of the scale on, where cool ones become warm."""
    scale = np.array([COLD, COOL, WARM, HOT], float).T
    colours = np.stack([np.interp(level, (0, 0.45, 0.5, 1), channel) for channel in scale], axis=-1)
    opacity = (OPACITY * np.clip(2 * level, 0, 1))[..., None]
    return np.round((1 - opacity) * picture + opacity * colours).astype(np.uint8)


def scale_bar(threshold: float, length: int) -> UInt8[Pixels, "b l 3"]:
    """The scale from its low to its high end, in the colours it has over a grey part."""
    heat = np.linspace(*ends(threshold), length, dtype=np.float32)[None].repeat(BAR, axis=0)
    return blend(np.full((BAR, length, 3), 128, np.uint8), levels(heat, threshold))


def write_overlay(path: Path, picture: UInt8[Pixels, "h w 3"], heat: Float[Plane, "r c"], threshold: float) -> None:
    """A PNG of the overlay and its scale, in the picture's aspect and not larger than necessary."""
    small = thumbnail(picture, LARGEST) if max(picture.shape[:2]) > LARGEST else picture
    shown = beside_scale(overlay(small, heat, threshold), threshold)
    _, encoded = cv2.imencode(".png", cv2.cvtColor(shown, cv2.COLOR_RGB2BGR))
    write_atomically(path, encoded.tobytes())


def thumbnail(picture: UInt8[Pixels, "h w 3"], largest: int) -> Pixels:
    """The picture scaled so that its longer side is `largest`."""
    height, width = picture.shape[:2]
    factor = largest / max(height, width)
    size = (max(1, round(width * factor)), max(1, round(height * factor)))
    method = cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(np.ascontiguousarray(picture), size, interpolation=method), np.uint8)


def beside_scale(picture: UInt8[Pixels, "h w 3"], threshold: float) -> Pixels:
    """The picture on a white sheet with the scale to its right."""
    height, width = picture.shape[:2]
    tall = max(height, LEAST)
    sheet = np.full((tall, width + 2 * MARGIN + BAR + LABELS, 3), 255, np.uint8)
    sheet[:height, :width] = picture
    left, length = width + MARGIN, min(tall, LONGEST)
    sheet[:length, left : left + BAR] = scale_bar(threshold, length)[:, ::-1].transpose(1, 0, 2)
    (low, high), middle = ends(threshold), length // 2
    sheet[middle, left : left + BAR + 3] = INK
    labels = {6: f"{high:.3g}", middle: f"{threshold:.3g}", middle + 14: "threshold", length - 7: f"{low:.3g}"}
    for row, text in labels.items():
        where = (left + BAR + 6, row + 4)
        cv2.putText(sheet, text, where, cv2.FONT_HERSHEY_SIMPLEX, 0.38, INK, 1, cv2.LINE_AA)
    return sheet


def places(files: Sequence[Path], roots: Sequence[Path]) -> list[Path]:
    """Where the overlay of each file goes, below one folder: sub-folders as they are, the name's suffix replaced.

    Should two files differ only by their suffix, all keep it before the new one: no overlay replaces another.
    """
    home = common_folder(Path(os.path.abspath(root if root.is_dir() else root.parent)) for root in roots)
    below = [Path(os.path.relpath(os.path.abspath(file), home)) for file in files]
    short = [file.with_suffix(".png") for file in below]
    if len(set(short)) == len(set(below)):
        return short
    return [file.with_name(shortened(file.name, ".png")) for file in below]
