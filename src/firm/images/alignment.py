"""Normalise illumination and alignment of each image on its own, the same way for training and inspection."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import cv2
import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from firm.errors import SettingError
from firm.images.foreground import Rule, foreground
from firm.images.ignore_mask import fill_ignored, median_image, scaled

ILLUMINATION = ("none", "median", "local")
MIDDLE = 128.0  # target of the median: twice as bright still fits into a byte
SIDE = 256  # image side for which NEIGHBOURHOOD is given
NEIGHBOURHOOD = 12.0  # standard deviation of the Gaussian window of `local`
GAIN, FAINT = 40.0, 4.0  # grey levels per local deviation; deviations below FAINT are noise

LONG = 1.8  # axis ratio from which an object has a direction to align by
SAMPLE = 32  # images on which the ratio is measured
NOTHING = (128, 128, 128)  # where a moved picture shows nothing

Images = UInt8[Tensor, "n c h w"]
Masks = Bool[Tensor, "n h w"]
Picture = npt.NDArray[np.uint8]  # h, w, c
Plane = npt.NDArray[np.float32]
Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]  # 2, 3: from the image to its aligned frame


@dataclass(frozen=True, kw_only=True)
class Conditioning:
    """Settings of both; `align` turns the object horizontal and centres it."""

    illumination: str = "none"  # none | median (exposure) | local (contrast too)
    align: bool = False
    foreground: Rule = field(default_factory=Rule)

    def __post_init__(self) -> None:
        if self.illumination not in ILLUMINATION:
            raise SettingError(f"conditioning.illumination is {self.illumination!r}; use {', '.join(ILLUMINATION)}")
        if self.align and self.foreground.method == "ones":
            raise SettingError("conditioning.align needs an object on a background; set conditioning.foreground.method")

    def __call__(
        self, images: Images, ignored: Bool[Tensor, "a b"] | None = None, masks: Masks | None = None
    ) -> Conditioned:
        """Condition images; `ignored` pixels (camera frame) are filled and excluded, `masks` are known foregrounds."""
        masks = foreground(images, self.foreground) if masks is None else masks
        if ignored is not None:
            ignored = scaled(ignored, *images.shape[-2:])
            images = fill_ignored(images, ignored)
        if self.illumination != "none" and len(images):
            pictures = images.permute(0, 2, 3, 1).cpu().numpy()
            evened = [torch.from_numpy(even_illumination(picture, self.illumination)) for picture in pictures]
            images = torch.stack(evened).permute(0, 3, 1, 2).contiguous()
        frames = None
        if self.align:
            frames = torch.from_numpy(np.array([alignment(mask) for mask in masks.cpu().numpy()]).reshape(-1, 2, 3))
            images, masks = _warped(images, frames), _warped_masks(masks, frames)
        return Conditioned(images, masks.to(images.device), frames, ignored).visible()


@dataclass(frozen=True)
class Conditioned:
    """Conditioned images, where their objects are, and how each was moved."""

    images: UInt8[Tensor, "n c h w"]
    foreground: Bool[Tensor, "n h w"]
    frames: Float[Tensor, "n 2 3"] | None  # None: not moved
    ignored: Bool[Tensor, "h w"] | None = None  # pixels of the original images

    def hidden(self) -> Bool[Tensor, "n h w"] | None:
        """The ignored pixels in the frame of each conditioned image."""
        if self.ignored is None:
            return None
        everywhere = self.ignored.expand_as(self.foreground)
        return everywhere if self.frames is None else _warped_masks(everywhere, self.frames)

    def visible(self) -> Conditioned:
        """The same with foregrounds of visible pixels only: all of these where none of the object is visible."""
        if (hidden := self.hidden()) is None:
            return self
        visible = ~hidden.to(self.foreground.device)
        remaining = self.foreground & visible
        empty = ~remaining.flatten(1).any(1)
        remaining[empty] = visible[empty]
        return replace(self, foreground=remaining)

    def typical(self) -> UInt8[Tensor, "c h w"] | None:
        """The median of the aligned images; None if no pixel is hidden, or the same in all."""
        hidden = self.hidden()
        return None if hidden is None or self.frames is None else median_image(self.images, hidden)

    def completed(self, typical: UInt8[Tensor, "c h w"] | None) -> Conditioned:
        """Fill hidden pixels with the median image."""
        hidden = self.hidden()
        if typical is None or hidden is None:
            return self
        median = typical[: self.images.shape[1]].to(self.images.device)
        return replace(self, images=torch.where(hidden[:, None].to(median.device), median, self.images))

    def moved_alike(self, images: UInt8[Tensor, "n c h w"]) -> UInt8[Tensor, "n c h w"]:
        """Move the original images into the same frames, grey where they show nothing."""
        return images if self.frames is None else _warped(images, self.frames, border=cv2.BORDER_CONSTANT)

    def __getitem__(self, which: Int[Tensor, " k"] | slice) -> Conditioned:
        """A subset of the images."""
        frames = None if self.frames is None else self.frames[which]
        return Conditioned(self.images[which], self.foreground[which], frames, self.ignored)

    def back(self, maps: Float[Tensor, "n h w"]) -> Float[Tensor, "n h w"]:
        """Move maps back into the original frames; 0 at pixels that were ignored or outside the aligned image."""
        if self.frames is not None and len(maps):
            pairs = zip(maps.cpu().numpy(), self.frames.numpy(), strict=True)
            maps = torch.from_numpy(np.stack([_warped_back(heat, frame) for heat, frame in pairs]))
        return maps if self.ignored is None else maps.masked_fill(self.ignored.to(maps.device), 0.0)


def unmoved(images: Images, rule: Rule, ignored: Bool[Tensor, "a b"] | None, masks: Masks | None) -> Conditioned:
    """Images as they come, where their objects are (`masks`, if known) and which pixels are hidden."""
    masks = foreground(images, rule) if masks is None else masks
    hidden = None if ignored is None else scaled(ignored, *images.shape[-2:])
    return Conditioned(images, masks, None, hidden).visible()


def even_illumination(picture: Picture, illumination: str) -> Picture:
    """Scale the median, or the local mean and deviation, to a standard value."""
    values = picture.astype(np.float32)
    if illumination == "median":
        evened = values * (MIDDLE / max(1.0, float(np.median(values))))
    else:
        sigma = NEIGHBOURHOOD * min(picture.shape[:2]) / SIDE
        centred = values - _blurred(values, sigma)
        deviation = np.sqrt(_blurred(np.square(centred).mean(axis=2, dtype=np.float32), sigma))
        evened = (centred / (deviation + FAINT)[..., None] * GAIN + MIDDLE).astype(np.float32)
    return np.clip(np.round(evened), 0, 255).astype(np.uint8)


def alignment(mask: npt.NDArray[np.bool_]) -> Matrix:
    """The matrix that turns the largest object's long axis horizontal, its heavier end to one side, and centres it."""
    height, width = mask.shape
    shape = _largest_object(mask)
    count, centre, second, third = _moments(shape)
    axis = np.linalg.eigh(second if count > 1 else np.eye(2))[1][:, 1]
    x, y = axis
    if third @ (x**3, 3 * x * x * y, 3 * x * y * y, y**3) < 0:  # ambiguous for symmetric objects
        axis = -axis
    turn = np.array([axis, [-axis[1], axis[0]]])
    turned = (_row_ends(shape) - centre) @ turn.T
    middle = (turned.min(axis=0) + turned.max(axis=0)) / 2
    shift = np.array([(width - 1) / 2, (height - 1) / 2]) - middle - turn @ centre
    return np.column_stack([turn, shift])


def elongation(masks: Bool[Tensor, "n h w"]) -> float:
    """Median ratio of the objects' long to short axis."""
    ratios = []
    for mask in masks.cpu().numpy():
        count, _, second, _ = _moments(_largest_object(mask))
        spread = np.linalg.eigvalsh(second / (count - 1) if count > 2 else np.eye(2))
        ratios.append(float(np.sqrt(spread[1] / max(spread[0], 1e-9))))
    return float(np.median(ratios)) if ratios else 1.0


def has_direction(masks: Bool[Tensor, "n h w"]) -> bool:
    """Whether the objects are long enough to align, by a sample of the masks."""
    return elongation(masks[:: max(1, len(masks) // SAMPLE)]) >= LONG


def _largest_object(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """1 in the largest object; everywhere if the mask is empty."""
    count, labels, facts, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=8)
    if count < 2:
        return np.ones(mask.shape, np.uint8)
    return (labels == 1 + int(np.argmax(facts[1:, cv2.CC_STAT_AREA]))).astype(np.uint8)


def _moments(shape: npt.NDArray[np.uint8]) -> tuple[int, Vector, Vector, Vector]:
    """Pixels, their centre (x, y), and the sums of second (2, 2) and third powers (xxx, xxy, xyy, yyy) about it.

    Of whole numbers, so that a symmetric object has a third moment of exactly zero.
    """
    raw = {name: round(value) for name, value in cv2.moments(shape, binaryImage=True).items() if name[0] == "m"}
    n, x, y = raw["m00"], raw["m10"], raw["m01"]
    xx, xy, yy = raw["m20"], raw["m11"], raw["m02"]
    second = [[n * xx - x * x, n * xy - x * y], [n * xy - x * y, n * yy - y * y]]
    third = [
        n * n * raw["m30"] - 3 * n * x * xx + 2 * x**3,
        n * n * raw["m21"] - 2 * n * x * xy - n * y * xx + 2 * x * x * y,
        n * n * raw["m12"] - 2 * n * y * xy - n * x * yy + 2 * x * y * y,
        n * n * raw["m03"] - 3 * n * y * yy + 2 * y**3,
    ]
    return n, np.array([x, y]) / n, np.array(second, float) / n, np.array(third, float) / n**2


def _row_ends(shape: npt.NDArray[np.uint8]) -> Vector:
    """The first and the last pixel (x, y) of every row of an object: its extremes in any direction are among them."""
    rows = np.flatnonzero(shape.any(axis=1))
    first, last = shape[rows].argmax(axis=1), shape.shape[1] - 1 - shape[rows, ::-1].argmax(axis=1)
    return np.column_stack([np.concatenate([first, last]), np.concatenate([rows, rows])]).astype(np.float64)


def _warped(
    images: Images,
    frames: Float[Tensor, "n 2 3"],
    interpolation: int = cv2.INTER_LINEAR,
    border: int = cv2.BORDER_REPLICATE,
) -> Images:
    pictures = images.permute(0, 2, 3, 1).cpu().numpy().copy()
    size = (images.shape[3], images.shape[2])
    for picture, frame in zip(pictures, frames.numpy(), strict=True):
        moved = cv2.warpAffine(picture, frame, size, flags=interpolation, borderMode=border, borderValue=NOTHING)
        picture[:] = np.asarray(moved, np.uint8).reshape(picture.shape)
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous()


def _warped_masks(masks: Bool[Tensor, "n h w"], frames: Float[Tensor, "n 2 3"]) -> Bool[Tensor, "n h w"]:
    return _warped(masks[:, None].to(torch.uint8), frames, cv2.INTER_NEAREST)[:, 0] > 0


def _warped_back(heat: Plane, frame: Matrix) -> Plane:
    """Replicate the heat up to the edge of the aligned image, 0 beyond it."""
    size, inverse = heat.shape[::-1], cv2.WARP_INVERSE_MAP
    spread = cv2.warpAffine(heat, frame, size, flags=cv2.INTER_LINEAR | inverse, borderMode=cv2.BORDER_REPLICATE)
    inside = cv2.warpAffine(np.ones(heat.shape, np.uint8), frame, size, flags=cv2.INTER_NEAREST | inverse)
    return np.where(inside > 0, spread, np.float32(0))


def _blurred(values: Plane, sigma: float) -> Plane:
    blurred = cv2.GaussianBlur(values, (0, 0), sigma, borderType=cv2.BORDER_REFLECT)
    return np.asarray(blurred, np.float32).reshape(values.shape)
