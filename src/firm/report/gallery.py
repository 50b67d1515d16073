"""One inspected image as an entry of the gallery: the picture, its heat map, boxes, and the nearest good part."""

from __future__ import annotations

import base64
import html
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt
from jaxtyping import Float, UInt8

from firm.errors import FirmError, named
from firm.report.heat import blend, ends, levels, overlay
from firm.report.ledger import worst
from firm.verdicts import Region, Verdict

Pixels = npt.NDArray[np.uint8]
Plane = npt.NDArray[np.float32]

LARGEST = 256  # pixels of a thumbnail's longer side
CLOSE = 128  # of the worst region and its nearest good part
QUALITY = 85
MARGIN = 0.02  # of the longer side, between a region and its box: the box must not hide what it marks
CONTEXT = 0.15  # of the longer side, the least that is shown of the worst region
SIGNS = {"FAIL": "✕", "REVIEW": "!", "PASS": "✓"}  # worst first; a sign and a word beside every colour


@dataclass(frozen=True)
class Shown:
    """A verdict with what the page shows of it: the image as it came, its heat, the good part nearest to the worst."""

    verdict: Verdict
    picture: UInt8[Pixels, "h w 3"]
    heat: Float[Plane, "r c"]  # over all of the picture, of whatever size
    nearest: UInt8[Pixels, "p q 3"] | None = None

    def __post_init__(self) -> None:
        height, width = self.picture.shape[:2]
        for one in self.verdict.regions:
            top, left, bottom, right = one.box
            if not (0 <= top < bottom <= height and 0 <= left < right <= width):
                name = named(self.verdict.image)
                raise FirmError(
                    f"the box {one.box} of {name} does not lie in its picture of {height} x {width}; show it whole"
                )


def escaped(text: object) -> str:
    """Any text as a page may hold it, inside an attribute too: printable, on one line, without a meaning in HTML."""
    return html.escape(named(str(text)), quote=True)


def entry(shown: Shown, rank: int) -> str:
    """The list item of one image; `rank` is its place among the verdicts, the worst 0."""
    verdict = shown.verdict
    name, kind = escaped(verdict.image), verdict.verdict
    small = thumbnail(shown.picture, LARGEST)
    hot = overlay(small, shown.heat, verdict.review)
    count = len(verdict.regions)
    places = f"{count} region{'' if count == 1 else 's'}" if count else "no region"
    return f"""<li class="entry {kind.lower()}" data-score="{verdict.score!r}" data-rank="{rank}" data-name="{name}">
<label class="look" title="show the heat map"><input type="checkbox" aria-label="heat map of {name}">
<span class="stack">{_picture(small, f"{name} as it came")}
{_picture(hot, f"heat map of {name}", "hot")}
{_boxes(verdict, shown.picture.shape[0], shown.picture.shape[1])}</span></label>
<p class="what"><strong class="mark {kind.lower()}"><span aria-hidden="true">{SIGNS[kind]}</span> {kind}</strong>
<span class="score">{verdict.score:.4g}</span> <span class="count">{places}</span></p>
<p class="name" title="{name}">{name}</p>
{_beside(shown)}</li>
"""


def scale(threshold: float) -> str:
    """The colours of all heat maps as a bar with the scores at its ends and middle."""
    low, high = ends(threshold)
    level = levels(np.linspace(low, high, LARGEST, dtype=np.float32)[None].repeat(14, axis=0), threshold)
    bar = _data(blend(np.full((14, LARGEST, 3), 128, np.uint8), level), ".png")
    return (
        f'<figure class="scale"><img src="{bar}" alt="from cool to warm colours" width="{LARGEST}" height="14">'
        f"<figcaption><span>{low:.3g}</span><span>review {threshold:.3g}</span><span>{high:.3g}</span></figcaption>"
        "</figure>"
    )


def thumbnail(picture: UInt8[Pixels, "h w 3"], largest: int) -> Pixels:
    """The longer side becomes `largest`, of a small picture too: so that all entries are equally large."""
    height, width = picture.shape[:2]
    factor = largest / max(height, width)
    size = (max(1, round(width * factor)), max(1, round(height * factor)))
    way = cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(picture, size, interpolation=way), np.uint8)


def surroundings(region: Region, height: int, width: int) -> tuple[slice, slice]:
    """A square around a region with some context, moved inside the picture where it would leave it."""
    top, left, bottom, right = region.box
    side = max(1.5 * (bottom - top), 1.5 * (right - left), CONTEXT * max(height, width))
    return _within((top + bottom) / 2, side, height), _within((left + right) / 2, side, width)


def _within(middle: float, side: float, length: int) -> slice:
    size = min(length, max(1, round(side)))
    start = min(max(0, round(middle - size / 2)), length - size)
    return slice(start, start + size)


def _picture(pixels: Pixels, alt: str, kind: str = "plain") -> str:
    height, width = pixels.shape[:2]
    size = f'width="{width}" height="{height}"'
    return f'<img class="{kind}" src="{_data(pixels)}" alt="{alt}" {size} loading="lazy" decoding="async">'


def _data(pixels: Pixels, suffix: str = ".jpg") -> str:
    settings = [cv2.IMWRITE_JPEG_QUALITY, QUALITY] if suffix == ".jpg" else []
    _, encoded = cv2.imencode(suffix, cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), settings)
    kind = "jpeg" if suffix == ".jpg" else "png"
    return f"data:image/{kind};base64,{base64.b64encode(encoded.tobytes()).decode()}"


def _boxes(verdict: Verdict, height: int, width: int) -> str:
    """Rectangles over the picture in its own pixels, a line outside of each region."""
    gap = MARGIN * max(height, width)
    drawn = []
    for one in verdict.regions:
        top, left, bottom, right = one.box
        x, y = max(0, left - gap), max(0, top - gap)
        wide, tall = min(width, right + gap) - x, min(height, bottom + gap) - y
        drawn.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}"/>')
    return f'<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" aria-hidden="true">{"".join(drawn)}</svg>'


def _beside(shown: Shown) -> str:
    """The worst region next to the good part most like it, as far as they are known."""
    region, name = worst(shown.verdict), escaped(shown.verdict.image)
    shots = []
    if region is not None:
        rows, columns = surroundings(region, *shown.picture.shape[:2])
        near = thumbnail(np.ascontiguousarray(shown.picture[rows, columns]), CLOSE)
        shots.append((_picture(near, f"worst region of {name}"), f"worst region, peak {region.peak:.4g}"))
    if shown.nearest is not None:
        near = thumbnail(np.ascontiguousarray(shown.nearest), CLOSE)
        shots.append((_picture(near, f"good part most similar to {name}"), "most similar good part"))
    figures = "".join(f"<figure>{image}<figcaption>{said}</figcaption></figure>" for image, said in shots)
    return f'<div class="beside">{figures}</div>\n' if figures else ""
