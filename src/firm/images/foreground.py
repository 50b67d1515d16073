"""Where the object is: a threshold and a little morphology, by a category's own rule or by one found on good images.

The tables are those of the synthetic anomalies the paper trains on (RealNet's), so that a defect never hangs in the air
beside the part. A wrong mask hides the part from training while none costs little: in doubt the rule is `ones`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import cv2
import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from firm.images import resize
from firm.types import FirmError

Plane = npt.NDArray[np.uint8]  # one channel of one image, or a mask of zeros and ones
METHODS = {"otsu": cv2.THRESH_OTSU, "triangle": cv2.THRESH_TRIANGLE}
POLARITIES = {"bright": cv2.THRESH_BINARY, "dark": cv2.THRESH_BINARY_INV}
CHANNELS = ("grey", "red", "green", "blue")
SIDE = 256  # at which the sizes of the squares are given


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How an image is split into object and background; `ones` takes all of it for the object."""

    method: str = "ones"  # ones | otsu | triangle
    polarity: str = "bright"  # bright | dark: which side of the threshold is the object
    channel: str = "grey"  # grey | red | green | blue
    close: int = 6  # side of the square of the closing, then of the opening, in pixels of a 256 px image; 0: without
    open: int = 6

    def __post_init__(self) -> None:
        for value, choices in (
            (self.method, ("ones", *METHODS)),
            (self.polarity, tuple(POLARITIES)),
            (self.channel, CHANNELS),
        ):
            if value not in choices:
                raise FirmError(f"a foreground rule has no {value!r}; use one of {', '.join(choices)}")
        if self.close < 0 or self.open < 0:
            raise FirmError(f"foreground squares of {self.close} and {self.open} pixels cannot be; use 0 or more")


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, dict[str, Rule]] = {
    "mvtec": {
        **_each("carpet leather tile wood cable transistor", Rule()),
        **_each("pill", Rule(method="otsu")),
        **_each("hazelnut metal_nut toothbrush", Rule(method="triangle")),
        **_each("bottle capsule grid screw zipper", Rule(method="otsu", polarity="dark")),
    },
    "visa": {
        **_each("capsules", Rule()),
        **_each("pcb1 pcb2 pcb3 pcb4", Rule(method="triangle", channel="blue", close=8, open=3)),
        **_each("candle cashew chewinggum fryum macaroni1 macaroni2 pipe_fryum", Rule(method="otsu", close=3, open=3)),
    },
    "mpdd": {
        **_each("bracket_black bracket_brown connector", Rule(method="otsu", polarity="dark", channel="green", open=0)),
        **_each("bracket_white tubes", Rule(method="otsu", channel="blue", open=0)),
        **_each("metal_plate", Rule(method="otsu", polarity="dark", open=0)),
    },
    "btad": {
        **_each("02", Rule()),
        **_each("01 03", Rule(method="otsu", close=15, open=6)),
    },
}


def rule_for(name: str, images: UInt8[Tensor, "n c h w"]) -> Rule:
    """The published rule of "mvtec:metal-nut" and its like; of anything else the one found on its good images."""
    data, _, category = name.replace("-", "_").partition(":")
    return RULES.get(data, {}).get(category) or automatic(images)


def foreground(images: UInt8[Tensor, "n c h w"], rule: Rule) -> Bool[Tensor, "n h w"]:
    """The object's pixels; the squares shrink and grow with the shorter side, to no less than one pixel.

    No mask is empty: an image without a second grey level, or without an object by this rule, is all object.
    """
    masks = np.ones((len(images), *images.shape[-2:]), np.uint8)
    if rule.method != "ones":
        for mask, image in zip(masks, images, strict=True):
            found = _split(_plane(image, rule.channel), rule)
            mask[:] = found if found.any() else 1
    return torch.from_numpy(masks.astype(bool)).to(images.device)


def _plane(image: UInt8[Tensor, "c h w"], channel: str) -> Plane:
    """The channel to be split; a grey image has only one."""
    if len(image) == 1:
        return np.ascontiguousarray(image[0].cpu().numpy())
    if len(image) != 3:
        raise FirmError(f"images of {len(image)} channels have no foreground rule; use grey or RGB images")
    if channel != "grey":
        return np.ascontiguousarray(image[CHANNELS.index(channel) - 1].cpu().numpy())
    return np.asarray(cv2.cvtColor(cv2.merge(list(image.cpu().numpy())), cv2.COLOR_RGB2GRAY), np.uint8)


def _split(plane: Plane, rule: Rule) -> Plane:
    """The threshold's side, closed, then opened; of a constant plane all or nothing."""
    _, side = cv2.threshold(plane, 0, 1, POLARITIES[rule.polarity] | METHODS[rule.method])
    mask = np.asarray(side, np.uint8)
    for pixels, first, second in ((rule.close, cv2.dilate, cv2.erode), (rule.open, cv2.erode, cv2.dilate)):
        width = max(1, round(pixels * min(plane.shape) / SIDE))
        if width > 1:
            square, anchor = np.ones((width, width), np.uint8), width // 2
            # the second pass mirrors the first: with one anchor for both, an even square moves the mask by a pixel
            wide = first(mask, square, anchor=(anchor, anchor))
            mask = np.asarray(second(wide, square, anchor=(width - 1 - anchor,) * 2), np.uint8)
    return mask


# What an object on a background looks like, in numbers that hold at any size. A texture, which every threshold splits
# somehow, misses at least one: fine grain has too much outline, coarse grain lies on every side and differs from image
# to image, uneven light (a vignette, a lamp's spot) has no plain background and no step at its outline.
IMAGES = 64  # looked at, evenly spaced
AREA = (0.005, 0.9)  # part of the image that the object covers
UNSTEADY = 1 / 3  # its deviation over the images, as part of its mean; n scattered grains have 1 / sqrt(n)
BORDER = 0.2  # how full the two emptier sides of the image are, against the whole; a texture has 1
OUTLINE = 3.0  # its length, against that of a square of the same area; n squares have sqrt(n)
PLAIN = 5.0  # difference of the two sides' means, in deviations of the background; an even gradient has 2 sqrt(3)
BAND = 3  # pixels of a 256 px image on either side of the outline, between which the step is taken
CONTRAST = 1.5  # that step, in deviations of the background
MARGIN = 1.2  # how many times the contrast a later candidate must have: Otsu on grey unless there is a reason


def automatic(images: UInt8[Tensor, "n c h w"]) -> Rule:
    """The threshold, polarity and channel that show an object on a background on good images; `ones` if none does."""
    if not len(images):
        return Rule()
    some = images[torch.linspace(0, len(images) - 1, min(IMAGES, len(images))).round().long()]
    some = resize(some, SIDE) if max(some.shape[-2:]) > SIDE else some
    best, most = Rule(), 0.0
    for channel, method, polarity in product(_channels(some), METHODS, POLARITIES):
        rule = Rule(method=method, polarity=polarity, channel=channel)
        contrast = _contrast(some, rule)
        if contrast > most * MARGIN:
            best, most = rule, contrast
    return best


def _channels(images: UInt8[Tensor, "n c h w"]) -> tuple[str, ...]:
    """The colours are worth a look only where they differ."""
    return CHANNELS if bool((images != images[:, :1]).any()) else CHANNELS[:1]


def _contrast(images: UInt8[Tensor, "n c h w"], rule: Rule) -> float:
    """How clearly the rule's masks stand out from the background; 0 where they are not those of an object."""
    looks = np.array([_look(image, rule) for image in images])  # images, five numbers
    area, border = looks[:, :2].mean(axis=0)
    outline, plain, contrast = np.median(looks[:, 2:], axis=0)
    compact = AREA[0] <= area <= AREA[1] and border <= BORDER * area and outline <= OUTLINE
    steady = looks[:, 0].std() <= UNSTEADY * area
    return float(contrast) if compact and steady and plain >= PLAIN and contrast >= CONTRAST else 0.0


def _look(image: UInt8[Tensor, "c h w"], rule: Rule) -> tuple[float, float, float, float, float]:
    """Area, border, outline, plainness and contrast of one image's mask; one that splits nothing is no object."""
    plane = _plane(image, rule.channel)
    mask = _split(plane, rule)
    area = float(mask.mean())
    if area in (0.0, 1.0):
        return area, area, np.inf, 0.0, 0.0
    sides = sorted(float(side.mean()) for side in (mask[0], mask[-1], mask[:, 0], mask[:, -1]))
    length = np.count_nonzero(np.diff(mask, axis=0)) + np.count_nonzero(np.diff(mask, axis=1))
    deviation = max(_deviation(np.ascontiguousarray(channel), 1 - mask) for channel in image.cpu().numpy())
    return (
        area,
        sum(sides[:2]) / 2,
        length / (4 * np.sqrt(area * mask.size)),
        _difference(plane, mask, 1 - mask) / deviation,
        _step(plane, mask) / deviation,
    )


def _step(plane: Plane, mask: Plane) -> float:
    """How far apart the two sides of the outline are, close to it."""
    reach = max(1, round(BAND * min(plane.shape) / SIDE))
    square = np.ones((2 * reach + 1,) * 2, np.uint8)
    inner, outer = np.asarray(cv2.erode(mask, square), np.uint8), np.asarray(cv2.dilate(mask, square), np.uint8)
    return _difference(plane, mask - inner, outer - mask)


def _difference(plane: Plane, one: Plane, other: Plane) -> float:
    return abs(cv2.mean(plane, mask=one)[0] - cv2.mean(plane, mask=other)[0])


def _deviation(plane: Plane, mask: Plane) -> float:
    """At least a grey level: a drawn background has none of its own."""
    return max(1.0, float(cv2.meanStdDev(plane, mask=mask)[1][0, 0]))
