"""One inspected image as an entry of the gallery: the picture, its heat map, boxes, and the nearest good part."""

import base64
from typing import Any

import cv2
from markupsafe import Markup

from firm.decision.verdict import Region
from firm.detector.inspection import InspectedImage
from firm.report.heatmap import Pixels, ends, overlay, scale_bar, thumbnail
from firm.report.html import SIGNS, render
from firm.report.ledger import worst_region

LARGEST = 256  # pixels of a thumbnail's longer side
CLOSE = 128  # of the worst region and its nearest good part
QUALITY = 85
MARGIN = 0.02  # of the longer side, between a region and its box: the box must not hide what it marks
CONTEXT = 0.15  # of the longer side, the least that is shown of the worst region
RANKS = {verdict: rank for rank, verdict in enumerate(SIGNS)}  # the worst verdict first


def entry(image: InspectedImage) -> Markup:
    """The list item of one image."""
    verdict, (height, width) = image.verdict, image.picture.shape[:2]
    small, region = thumbnail(image.picture, LARGEST), worst_region(verdict)
    place = (slice(None), slice(None)) if region is None else surroundings(region, height, width)
    return render(
        "entry.html",
        verdict=verdict,
        rank=RANKS[verdict.verdict],
        width=width,
        height=height,
        plain=_picture(small),
        heat=None if image.heat is None else _picture(overlay(small, image.heat, verdict.review, marked=image.marked)),
        boxes=[_box(region, image) for region in verdict.regions],
        peak=0.0 if region is None else region.peak,
        worst=None if region is None else _picture(thumbnail(image.picture[place], CLOSE)),
        nearest=None if image.nearest is None else _picture(thumbnail(image.nearest[place], CLOSE)),
    )


def scale(review: float) -> dict[str, object]:
    """The colours of all heat maps as a bar, and the scores at its ends and middle."""
    low, high = ends(review)
    return {"image": _picture(scale_bar(review, LARGEST), "png"), "low": low, "review": review, "high": high}


def surroundings(region: Region, height: int, width: int) -> tuple[slice, slice]:
    """A square around a region with some context, moved inside the picture where it would leave it."""
    top, left, bottom, right = region.box
    side = max(1.5 * (bottom - top), 1.5 * (right - left), CONTEXT * max(height, width))
    return _within((top + bottom) / 2, side, height), _within((left + right) / 2, side, width)


def _within(middle: float, side: float, length: int) -> slice:
    size = min(length, max(1, round(side)))
    start = min(max(0, round(middle - size / 2)), length - size)
    return slice(start, start + size)


def _picture(pixels: Pixels, kind: str = "jpeg") -> dict[str, Any]:
    """The pixels inside the page, as its templates show them."""
    settings = [cv2.IMWRITE_JPEG_QUALITY, QUALITY] if kind == "jpeg" else []
    _, encoded = cv2.imencode(f".{kind}", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), settings)
    source = Markup(f"data:image/{kind};base64,{base64.b64encode(encoded.tobytes()).decode()}")
    return {"source": source, "width": pixels.shape[1], "height": pixels.shape[0]}


def _box(region: Region, image: InspectedImage) -> tuple[str, ...]:
    """Left, top, width and height of a rectangle around a region, in pixels of the picture."""
    (top, left, bottom, right), (height, width) = region.box, image.picture.shape[:2]
    gap = MARGIN * max(height, width)
    x, y = max(0, left - gap), max(0, top - gap)
    return tuple(f"{v:.1f}" for v in (x, y, min(width, right + gap) - x, min(height, bottom + gap) - y))
