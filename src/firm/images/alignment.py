"""One light and one pose for every image, before anything is learnt from it or said of it.

Exposure changes from shift to shift and parts lie as they fall; neither is a defect. Every image is conditioned by
itself alone, so a part on the line is treated as the parts that were learnt from.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import cv2
import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from firm.foreground import Rule, foreground
from firm.ignoring import filled, scaled, usual_look
from firm.types import FirmError

LIGHTS = ("none", "median", "local")
MIDDLE = 128.0  # where the median goes: twice as bright still fits into a byte
SIDE = 256  # at which the neighbourhood of `local` is given
NEIGHBOURHOOD = 12.0  # standard deviation of the Gaussian window of `local`
GAIN, FAINT = 40.0, 4.0  # grey levels to a local deviation; deviations below FAINT are noise and are not blown up

LONG = 1.8  # ratio of an object's axes from which it has a direction to align by
SOME = 32  # images that tell it

Pixels = npt.NDArray[np.uint8]  # h, w, c
Plane = npt.NDArray[np.float32]
Matrix = npt.NDArray[np.float64]  # 2, 3: from the image to its aligned frame


@dataclass(frozen=True, kw_only=True)
class Conditioning:
    """`light`: none, `median` (exposure) or `local` (contrast too); `align` turns the object upright and centres it."""

    light: str = "none"
    align: bool = False
    foreground: Rule = field(default_factory=Rule)

    def __post_init__(self) -> None:
        if self.light not in LIGHTS:
            raise FirmError(f"conditioning.light is {self.light!r}; use one of {', '.join(LIGHTS)}")
        if self.align and self.foreground.method == "ones":
            raise FirmError("conditioning.align needs an object on a background; set conditioning.foreground.method")

    def __call__(self, images: UInt8[Tensor, "n c h w"], ignored: Bool[Tensor, "a b"] | None = None) -> Conditioned:
        """`ignored` pixels, in the frame of the camera, show nothing and are no object; the pose is found as ever."""
        masks = foreground(images, self.foreground)
        if ignored is None:
            return self._applied(images, masks)
        here = scaled(ignored, *images.shape[-2:])
        return self._applied(filled(images, here), masks).without(here)

    def _applied(self, images: UInt8[Tensor, "n c h w"], masks: Bool[Tensor, "n h w"]) -> Conditioned:
        if self.light == "none" and not self.align:
            return Conditioned(images, masks, None)
        pixels, objects = images.permute(0, 2, 3, 1).cpu().numpy().copy(), masks.cpu().numpy().copy()
        frames = np.zeros((len(pixels), 2, 3))
        for picture, mask, frame in zip(pixels, objects, frames, strict=True):
            picture[:] = lit(picture, self.light)
            if self.align:
                frame[:] = pose(mask)
                picture[:] = _moved(picture, frame, cv2.INTER_LINEAR)
                mask[:] = _moved(mask.astype(np.uint8), frame, cv2.INTER_NEAREST)
        return Conditioned(
            torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(),
            torch.from_numpy(objects),
            torch.from_numpy(frames) if self.align else None,
        )


@dataclass(frozen=True)
class Conditioned:
    """Images ready to learn from, where their objects are, and how each was moved (None: not at all).

    `ignored` are pixels of the images as they came (None: no pixels).
    """

    images: UInt8[Tensor, "n c h w"]
    foreground: Bool[Tensor, "n h w"]
    frames: Float[Tensor, "n 2 3"] | None
    ignored: Bool[Tensor, "h w"] | None = None

    def without(self, ignored: Bool[Tensor, "h w"]) -> Conditioned:
        """The same with nothing of the object there; an object that is ignored as a whole is all that is not."""
        marked = replace(self, ignored=ignored)
        hidden = marked.hidden()
        assert hidden is not None
        seen = ~hidden.to(self.foreground.device)
        left = self.foreground & seen
        gone = ~left.flatten(1).any(1)
        left[gone] = seen[gone]
        return replace(marked, foreground=left)

    def hidden(self) -> Bool[Tensor, "n h w"] | None:
        """What is ignored, in the frame of each conditioned image."""
        if self.ignored is None:
            return None
        if self.frames is None:
            return self.ignored.expand_as(self.foreground)
        still = self.ignored.cpu().numpy().astype(np.uint8)
        moved = [_moved(still, frame.numpy(), cv2.INTER_NEAREST) for frame in self.frames]
        return torch.from_numpy(np.stack(moved) > 0) if moved else self.foreground

    def usual(self) -> UInt8[Tensor, "c h w"] | None:
        """What these images usually show at each place of their pose; None where all hide the same, or nothing."""
        hidden = self.hidden()
        return None if hidden is None or self.frames is None else usual_look(self.images, hidden)

    def completed(self, usual: UInt8[Tensor, "c h w"] | None) -> Conditioned:
        """The same with the usual look where an image hides it: so a part is no other for having lain under the mask.

        The nearest pixels would do where every image hides the same; a part that is hidden elsewhere each time would
        differ from the others by them more than by a defect.
        """
        hidden = self.hidden()
        if usual is None or hidden is None:
            return self
        shown = usual[: self.images.shape[1]].to(self.images.device)
        return replace(self, images=torch.where(hidden[:, None].to(shown.device), shown, self.images))

    def back(self, maps: Float[Tensor, "n h w"]) -> Float[Tensor, "n h w"]:
        """Maps of the conditioned images in the frames of the images as they came.

        What is ignored has no heat, nor has a corner that turning took out of an aligned image: nobody looked there.
        """
        moved = self._back(maps)
        return moved if self.ignored is None else moved.masked_fill(self.ignored.to(moved.device), 0.0)

    def _back(self, maps: Float[Tensor, "n h w"]) -> Float[Tensor, "n h w"]:
        if self.frames is None:
            return maps
        moved = [_moved_back(one.numpy(), frame.numpy()) for one, frame in zip(maps.cpu(), self.frames, strict=True)]
        return torch.from_numpy(np.stack(moved)) if moved else maps


def lit(picture: Pixels, light: str) -> Pixels:
    """The picture in standard light."""
    if light == "none":
        return picture
    values = picture.astype(np.float32)
    if light == "median":
        return _bytes(values * (MIDDLE / max(1.0, float(np.median(values)))))
    sigma = NEIGHBOURHOOD * min(picture.shape[:2]) / SIDE
    centred = values - _blurred(values, sigma)
    spread = np.sqrt(_blurred(np.square(centred).mean(axis=2, dtype=np.float32), sigma))
    return _bytes((centred / (spread + FAINT)[..., None] * GAIN + MIDDLE).astype(np.float32))


def pose(mask: npt.NDArray[np.bool_]) -> Matrix:
    """Turns the largest object's long axis level, its heavier end to one side, its box to the middle of the frame.

    The ends are told apart by the third moment along the axis; a symmetric object may come out either way round.
    """
    height, width = mask.shape
    y, x = np.nonzero(_largest(mask))
    points = np.stack([x, y], axis=1).astype(np.float64)
    centre = points.mean(axis=0)
    along = np.linalg.eigh(np.cov((points - centre).T) if len(points) > 1 else np.eye(2))[1][:, 1]
    if float((((points - centre) @ along) ** 3).mean()) < 0:
        along = -along
    turn = np.array([along, [-along[1], along[0]]])
    seen = (points - centre) @ turn.T
    middle = (seen.min(axis=0) + seen.max(axis=0)) / 2
    shift = np.array([(width - 1) / 2, (height - 1) / 2]) - middle - turn @ centre
    return np.column_stack([turn, shift])


def elongation(masks: Bool[Tensor, "n h w"]) -> float:
    """Median ratio of the objects' long to short axis: near 1 there is no direction to align by."""
    ratios = []
    for mask in masks.cpu().numpy():
        y, x = np.nonzero(_largest(mask))
        spread = np.linalg.eigvalsh(np.cov(np.stack([x, y])) if len(x) > 2 else np.eye(2))
        ratios.append(float(np.sqrt(spread[1] / max(spread[0], 1e-9))))
    return float(np.median(ratios)) if ratios else 1.0


def has_direction(images: UInt8[Tensor, "n c h w"], rule: Rule) -> bool:
    """Whether the object is long enough to be aligned; some images tell."""
    if rule.method == "ones":
        return False
    return elongation(foreground(images[:: max(1, len(images) // SOME)], rule)) >= LONG


def _largest(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    count, labels, facts, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=8)
    if count < 2:
        return np.ones_like(mask)
    return np.asarray(labels == 1 + int(np.argmax(facts[1:, cv2.CC_STAT_AREA])))


def _moved(picture: Pixels, frame: Matrix, flags: int) -> Pixels:
    height, width = picture.shape[:2]
    moved = cv2.warpAffine(picture, frame, (width, height), flags=flags, borderMode=cv2.BORDER_REPLICATE)
    return np.asarray(moved, np.uint8).reshape(picture.shape)


def _moved_back(heat: Plane, frame: Matrix) -> Plane:
    """The nearest heat up to the edge of the aligned image, and none beyond it."""
    size = heat.shape[::-1]
    spread = cv2.warpAffine(
        heat, frame, size, flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP, borderMode=cv2.BORDER_REPLICATE
    )
    inside = cv2.warpAffine(np.ones(heat.shape, np.uint8), frame, size, flags=cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP)
    return np.where(inside > 0, spread, np.float32(0))


def _blurred(values: Plane, sigma: float) -> Plane:
    return np.asarray(cv2.GaussianBlur(values, (0, 0), sigma, borderType=cv2.BORDER_REFLECT), np.float32).reshape(
        values.shape
    )


def _bytes(values: Plane) -> Pixels:
    return np.clip(np.round(values), 0, 255).astype(np.uint8)
