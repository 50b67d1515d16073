"""A heat map over the picture it belongs to, in one scale of colours for all pictures of a detector.

The scale runs from 0 to twice the threshold, or to `UNIT` above a threshold of 0 or less; its middle is the threshold.
The picture is grey, so that colour means heat whatever the part's own colour is. The colours grow lighter from purple
to yellow, away from every grey also for colour-blind people, and a line that shows on any ground surrounds the regions.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Float, UInt8

from firm.errors import ModelFileError
from firm.runtime.files import common_folder, shortened, write_atomically

Pixels = npt.NDArray[np.uint8]  # h, w, 3: RGB
Plane = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

OPACITY = 0.7  # of the colours from the threshold on; below it they fade
# of "inferno" from 0.3 to 0.95, evenly spaced: what is darker or paler would be lost on a dark or a white part
COLOURS = ((106, 23, 110), (160, 42, 99), (208, 69, 69), (241, 115, 29), (252, 174, 18), (241, 239, 117))
UNIT = 1.0  # from the middle of the scale to its end where the threshold is 0 or less: a deviation of good patches
LINE, EDGE = (255, 255, 255), (0, 0, 0)  # around regions: white, and black around it
STRIP = 64  # rows that are coloured at once: an overlay is as large as its picture
BAR, MARGIN, LABELS = 14, 8, 66  # widths beside the picture: the bar, the gaps, the numbers
LEAST, LONGEST = 96, 256  # heights of the bar
INK = (60, 60, 60)


def overlay(
    picture: UInt8[Pixels, "h w 3"],
    heat: Float[Plane, "r c"],
    threshold: float,
    *,
    marked: Bool[Mask, "r c"] | None = None,
) -> UInt8[Pixels, "h w 3"]:
    """The picture in grey, its heat map, which may be of any size, spread over it, and a line around the regions."""
    height, width = picture.shape[:2]
    shown = blend(grey(picture), levels(_spread(heat, height, width), threshold))
    if marked is not None and marked.any():
        inside = (_spread(marked, height, width) >= 0.5).astype(np.uint8)
        lines, _ = cv2.findContours(inside, cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
        width = max(1, round(max(picture.shape) / 400))
        cv2.drawContours(shown, lines, -1, EDGE, width + 2)
        cv2.drawContours(shown, lines, -1, LINE, width)
    return shown


def grey(picture: UInt8[Pixels, "h w 3"]) -> UInt8[Pixels, "h w 3"]:
    """The picture without its colours."""
    plane = cv2.cvtColor(np.ascontiguousarray(picture), cv2.COLOR_RGB2GRAY)
    return np.asarray(cv2.cvtColor(plane, cv2.COLOR_GRAY2RGB), np.uint8)


def _spread(values: npt.NDArray[np.generic], height: int, width: int) -> Plane:
    return np.asarray(cv2.resize(values.astype(np.float32), (width, height)), np.float32)


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
    """Colours over a picture: none at 0, in full from the middle of the scale on."""
    shown, places = np.empty_like(picture), np.linspace(0, 1, len(COLOURS))
    for begin in range(0, len(picture), STRIP):
        rows = slice(begin, begin + STRIP)
        colours = np.stack([np.interp(level[rows], places, channel) for channel in zip(*COLOURS, strict=True)], axis=-1)
        opacity = (OPACITY * np.clip(2 * level[rows], 0, 1))[..., None]
        shown[rows] = np.round((1 - opacity) * picture[rows] + opacity * colours)
    return shown


def scale_bar(threshold: float, length: int) -> UInt8[Pixels, "b l 3"]:
    """The scale from its low to its high end, in the colours it has over a grey part."""
    heat = np.linspace(*ends(threshold), length, dtype=np.float32)[None].repeat(BAR, axis=0)
    return blend(np.full((BAR, length, 3), 128, np.uint8), levels(heat, threshold))


def write_overlay(
    path: Path,
    picture: UInt8[Pixels, "h w 3"],
    heat: Float[Plane, "r c"],
    threshold: float,
    *,
    marked: Bool[Mask, "r c"] | None = None,
) -> None:
    """A PNG of the overlay in the picture's own pixels, the scale to its right."""
    shown = beside_scale(overlay(picture, heat, threshold, marked=marked), threshold)
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
