"""Segment the object by a threshold and morphology, with RealNet's rule of a category or one fitted on good images.

A wrong mask hides the part from training, no mask costs little: in doubt the rule is `ones`.
"""

from dataclasses import dataclass
from itertools import product

import cv2
import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from firm.errors import ImageError, SettingError
from firm.images.resize import resize

Plane = npt.NDArray[np.uint8]  # one channel of one image, or a mask of zeros and ones
METHODS = {"otsu": cv2.THRESH_OTSU, "triangle": cv2.THRESH_TRIANGLE}
POLARITIES = {"bright": cv2.THRESH_BINARY, "dark": cv2.THRESH_BINARY_INV}
CHANNELS = ("grey", "red", "green", "blue")
SIDE = 256  # image side for which the kernel sizes are given


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How to split an image into object and background; `ones` is all object."""

    method: str = "ones"  # ones | otsu | triangle
    polarity: str = "bright"  # bright | dark: which side of the threshold is the object
    channel: str = "grey"  # grey | red | green | blue
    close: int = 6  # kernel side of the closing, then of the opening, in pixels of a 256 px image; 0: none
    open: int = 6

    def __post_init__(self) -> None:
        allowed = {"method": ("ones", *METHODS), "polarity": tuple(POLARITIES), "channel": CHANNELS}
        for name, choices in allowed.items():
            if getattr(self, name) not in choices:
                raise SettingError(f"foreground.{name} is {getattr(self, name)!r}; use one of {', '.join(choices)}")
        if self.close < 0 or self.open < 0:
            raise SettingError(f"foreground.close is {self.close} and foreground.open {self.open}; use 0 or more")

    def __str__(self) -> str:
        if self.method == "ones":
            return "the whole image is object"
        return f"the {self.polarity} side of {self.method} on {self.channel}"


_OTSU, _TRIANGLE, _DARK = Rule(method="otsu"), Rule(method="triangle"), Rule(method="otsu", polarity="dark")
_PUBLISHED = {
    "mvtec": {
        "carpet leather tile wood cable transistor": Rule(),
        "pill": _OTSU,
        "hazelnut metal_nut toothbrush": _TRIANGLE,
        "bottle capsule grid screw zipper": _DARK,
    },
    "visa": {
        "capsules": Rule(),
        "pcb1 pcb2 pcb3 pcb4": Rule(method="triangle", channel="blue", close=8, open=3),
        "candle cashew chewinggum fryum macaroni1 macaroni2 pipe_fryum": Rule(method="otsu", close=3, open=3),
    },
    "mpdd": {
        "bracket_black bracket_brown connector": Rule(method="otsu", polarity="dark", channel="green", open=0),
        "bracket_white tubes": Rule(method="otsu", channel="blue", open=0),
        "metal_plate": Rule(method="otsu", polarity="dark", open=0),
    },
    "btad": {"02": Rule(), "01 03": Rule(method="otsu", close=15, open=6)},
}
RULES: dict[str, dict[str, Rule]] = {
    data: {name: rule for names, rule in rules.items() for name in names.split()} for data, rules in _PUBLISHED.items()
}


def rule_for(name: str, images: UInt8[Tensor, "n c h w"]) -> Rule:
    """The published rule of a category such as "mvtec:metal-nut", else one fitted on the good images."""
    data, _, category = name.replace("-", "_").partition(":")
    return RULES.get(data, {}).get(category) or automatic(images)


def foreground(images: UInt8[Tensor, "n c h w"], rule: Rule) -> Bool[Tensor, "n h w"]:
    """The object's pixels. No mask is empty: an image without an object by this rule is all object."""
    masks = np.ones((len(images), *images.shape[-2:]), np.uint8)
    if rule.method != "ones":
        for mask, image in zip(masks, images, strict=True):
            split = _split(_plane(image, rule.channel), rule)
            mask[:] = split if split.any() else 1
    return torch.from_numpy(masks.astype(bool)).to(images.device)


def _plane(image: UInt8[Tensor, "c h w"], channel: str) -> Plane:
    if len(image) not in (1, 3):
        raise ImageError(f"images of {len(image)} channels have no foreground rule; use grey or RGB images")
    if len(image) == 1 or channel != "grey":
        return np.ascontiguousarray(image[CHANNELS.index(channel) - 1 if len(image) == 3 else 0].cpu().numpy())
    return np.asarray(cv2.cvtColor(cv2.merge(list(image.cpu().numpy())), cv2.COLOR_RGB2GRAY), np.uint8)


def _split(plane: Plane, rule: Rule) -> Plane:
    """Threshold, closing, opening; kernels scale with the shorter side."""
    mask = np.asarray(cv2.threshold(plane, 0, 1, POLARITIES[rule.polarity] | METHODS[rule.method])[1], np.uint8)
    for pixels, first, second in ((rule.close, cv2.dilate, cv2.erode), (rule.open, cv2.erode, cv2.dilate)):
        width = max(1, round(pixels * min(plane.shape) / SIDE))
        if width > 1:
            square, anchor = np.ones((width, width), np.uint8), width // 2
            # mirrored anchors: with the same one, an even square would move the mask by a pixel
            wide = first(mask, square, anchor=(anchor, anchor))
            mask = np.asarray(second(wide, square, anchor=(width - 1 - anchor,) * 2), np.uint8)
    return mask


# Criteria of an object on a background, independent of image size. A texture fails at least one: fine grain has a long
# outline, coarse grain touches every side and varies between images, uneven illumination has no step at its outline.
SAMPLE = 64  # images, evenly spaced
AREA = (0.005, 0.9)  # fraction of the image that the object covers
UNSTEADY = 1 / 3  # relative deviation of the area over the images; n scattered grains have 1 / sqrt(n)
BORDER = 0.2  # coverage of the two emptier image sides, relative to the whole image; a texture has 1
OUTLINE = 3.0  # length relative to a square of the same area; n squares have sqrt(n)
PLAIN = 5.0  # difference of the two sides' means, in deviations of the background; a linear gradient has 2 sqrt(3)
BAND = 3  # pixels of a 256 px image on either side of the outline, where the contrast is measured
CONTRAST = 1.5  # step at the outline, in deviations of the background
MARGIN = 1.2  # factor by which a later candidate must exceed the contrast; favours Otsu on grey


def automatic(images: UInt8[Tensor, "n c h w"]) -> Rule:
    """Fit threshold, polarity and channel on good images; `ones` if no rule shows an object on a background."""
    if not len(images):
        return Rule()
    sample = images[torch.linspace(0, len(images) - 1, min(SAMPLE, len(images))).round().long()]
    sample = resize(sample, SIDE) if max(sample.shape[-2:]) > SIDE else sample
    coloured = bool((sample != sample[:, :1]).any())
    best, most = Rule(), 0.0
    for channel, method, polarity in product(CHANNELS if coloured else CHANNELS[:1], METHODS, POLARITIES):
        rule = Rule(method=method, polarity=polarity, channel=channel)
        contrast = _contrast(sample, rule)
        if contrast > most * MARGIN:
            best, most = rule, contrast
    return best


def _contrast(images: UInt8[Tensor, "n c h w"], rule: Rule) -> float:
    """Contrast between object and background; 0 if the masks are not those of an object."""
    measures = np.array([_measures(image, rule) for image in images])  # images, five numbers
    area, border = measures[:, :2].mean(axis=0)
    outline, plain, contrast = np.median(measures[:, 2:], axis=0)
    compact = AREA[0] <= area <= AREA[1] and border <= BORDER * area and outline <= OUTLINE
    steady = measures[:, 0].std() <= UNSTEADY * area
    return float(contrast) if compact and steady and plain >= PLAIN and contrast >= CONTRAST else 0.0


def _measures(image: UInt8[Tensor, "c h w"], rule: Rule) -> tuple[float, float, float, float, float]:
    """Area, border, outline, plainness and contrast of one image's mask."""
    plane = _plane(image, rule.channel)
    mask = _split(plane, rule)
    area = float(mask.mean())
    if area in (0.0, 1.0):
        return area, area, np.inf, 0.0, 0.0
    sides = sorted(float(side.mean()) for side in (mask[0], mask[-1], mask[:, 0], mask[:, -1]))
    length = np.count_nonzero(np.diff(mask, axis=0)) + np.count_nonzero(np.diff(mask, axis=1))
    channels = [np.ascontiguousarray(channel) for channel in image.cpu().numpy()]
    deviations = [float(cv2.meanStdDev(channel, mask=1 - mask)[1][0, 0]) for channel in channels]
    background = max(1.0, *deviations)  # at least one grey level, for noise-free drawings
    width = 2 * max(1, round(BAND * min(plane.shape) / SIDE)) + 1
    square = np.ones((width, width), np.uint8)
    inner, outer = np.asarray(cv2.erode(mask, square), np.uint8), np.asarray(cv2.dilate(mask, square), np.uint8)
    plain = _difference(plane, mask, 1 - mask) / background
    contrast = _difference(plane, mask - inner, outer - mask) / background
    return area, sum(sides[:2]) / 2, length / (4 * np.sqrt(area * mask.size)), plain, contrast


def _difference(plane: Plane, mask: Plane, other: Plane) -> float:
    return abs(cv2.mean(plane, mask=mask)[0] - cv2.mean(plane, mask=other)[0])
