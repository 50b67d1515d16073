"""The part of each image that is read: a fixed window, or one that follows the object in the frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from firm.errors import ImageError, SettingError
from firm.images.foreground import Rule, foreground
from firm.images.resize import Size, resize, to_tensor

Picture = npt.NDArray[np.uint8]  # h, w, c
Window = tuple[slice, slice]  # rows and columns of a picture

SEARCHED = 512  # px of the longer side at which the object is searched for
PIECE = 0.05  # of the largest piece of a foreground: smaller ones are specks
MARGIN = 0.1  # of the object's extent, on every side of it
SQUARE = 1.25  # ratio of the sides up to which a window becomes a square


@dataclass(frozen=True, kw_only=True)
class Crop:
    """A window in parts of an image's width and height; with a rule it is centred on the object, whatever x and y."""

    x: float = 0.0
    y: float = 0.0
    width: float = 1.0
    height: float = 1.0
    follow: Rule = field(default_factory=Rule)  # how the object is found; ones: the window does not move

    def __post_init__(self) -> None:
        sides = ((self.x, self.width), (self.y, self.height))
        if not all(0 <= begin < 1 and 0 < length <= 1 and begin + length <= 1 + 1e-9 for begin, length in sides):
            raise SettingError(f"crop {self.x:g},{self.y:g},{self.width:g},{self.height:g} is not inside the image")

    @classmethod
    def from_card(cls, card: dict[str, Any]) -> Crop:
        """Read it from a detector's card."""
        return cls(**{**card, "follow": Rule(**card["follow"])}) if card else cls()

    @classmethod
    def parse(cls, text: str, height: int, width: int) -> Crop:
        """`x,y,w,h` as typed, in pixels of an image of this size."""
        try:
            x, y, wide, tall = (int(part) for part in text.split(","))
        except ValueError:
            form = "auto or x,y,w,h in pixels, such as 400,200,640,480"
            raise SettingError(f"--crop is {text!r}; give {form}") from None
        if x < 0 or y < 0 or wide < 1 or tall < 1 or x + wide > width or y + tall > height:
            raise SettingError(f"--crop {text} is not inside images of {width} x {height} px; give x,y,w,h within them")
        return cls(x=x / width, y=y / height, width=wide / width, height=tall / height)

    @property
    def whole(self) -> bool:
        """Whether all of an image is read."""
        return self.width == self.height == 1.0

    @property
    def moves(self) -> bool:
        """Whether the window follows the object."""
        return self.follow.method != "ones"

    def window(self, picture: Picture) -> Window:
        """The rows and columns of a picture that are read."""
        height, width = picture.shape[:2]
        tall, wide = max(1, round(self.height * height)), max(1, round(self.width * width))
        top, left = round(self.y * height), round(self.x * width)
        if self.moves:
            rows, columns = object_box(picture, self.follow)
            top, left = round(sum(rows) * height / 2) - tall // 2, round(sum(columns) * width / 2) - wide // 2
        top, left = max(0, min(top, height - tall)), max(0, min(left, width - wide))
        return slice(top, top + tall), slice(left, left + wide)

    def mask(self, ignored: Bool[Tensor, "a b"]) -> Bool[Tensor, "c d"]:
        """The part of a mask of the whole view that is read."""
        if self.moves:
            raise SettingError("a window that follows the object cannot ignore pixels of the view; leave out --ignore")
        return ignored if self.whole else ignored[self.window(ignored.cpu().numpy().view(np.uint8))]

    def cut(self, picture: Picture) -> Picture:
        """The part of a picture that is read."""
        return picture if self.whole else picture[self.window(picture)]


def part_of(picture: Picture, crop: Crop, size: Size, name: str) -> tuple[UInt8[Tensor, "1 3 a b"], Window]:
    """The part of a picture that is read, at its size, and where it lies; a rectangle refuses another aspect."""
    window = crop.window(picture)
    part = picture[window]
    if not isinstance(size, int):
        off = part.shape[0] * size[1] / (part.shape[1] * size[0])
        if max(off, 1 / off) > SQUARE:
            form = f"is {part.shape[1]} x {part.shape[0]} px, and the others are about {size[1]} to {size[0]}"
            raise ImageError(f"{name} {form}; turn or crop it like them, or fit with --set size=256")
    return resize(to_tensor(part), size), window


def like_window(mask: npt.NDArray[np.bool_], window: Window, shape: tuple[int, int]) -> npt.NDArray[np.bool_]:
    """The part of a mask, of any size, that covers a window of an image of this height and width."""
    rows, columns = (
        slice(of.start * side // length, max(of.start * side // length + 1, -(-of.stop * side // length)))
        for of, side, length in zip(window, mask.shape, shape, strict=True)
    )
    return mask[rows, columns]


def object_box(picture: Picture, rule: Rule) -> tuple[tuple[float, float], tuple[float, float]]:
    """First and last row, first and last column of the object, in parts of the picture; all of it if none is found."""
    height, width = picture.shape[:2]
    scale = min(1.0, SEARCHED / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    small = picture if scale == 1.0 else np.asarray(cv2.resize(picture, size, interpolation=cv2.INTER_AREA), np.uint8)
    mask = foreground(to_tensor(small), rule)[0].numpy().astype(np.uint8)
    count, _, facts, _ = cv2.connectedComponentsWithStats(mask, connectivity=8)
    if count < 2:
        return (0.0, 1.0), (0.0, 1.0)
    areas = facts[:, cv2.CC_STAT_AREA]
    large = [number for number in range(1, count) if areas[number] >= PIECE * areas[1:].max()]
    tops, lefts = facts[large, cv2.CC_STAT_TOP], facts[large, cv2.CC_STAT_LEFT]
    bottoms, rights = tops + facts[large, cv2.CC_STAT_HEIGHT], lefts + facts[large, cv2.CC_STAT_WIDTH]
    (tall, wide) = mask.shape
    down, across = (tops.min() / tall, bottoms.max() / tall), (lefts.min() / wide, rights.max() / wide)
    return (float(down[0]), float(down[1])), (float(across[0]), float(across[1]))


def crop_around(pictures: Sequence[Picture], rule: Rule) -> Crop:
    """A window that follows the object and holds the largest of these objects with a margin."""
    height, width = np.median([each.shape[:2] for each in pictures], axis=0).tolist()
    extents = np.array([[last - first for first, last in object_box(each, rule)] for each in pictures])
    tall, wide = (extents.max(0) * (1 + 2 * MARGIN) * (height, width)).tolist()
    if max(tall, wide) <= SQUARE * min(tall, wide):
        tall = wide = max(tall, wide)
    return Crop(height=min(1.0, tall / height), width=min(1.0, wide / width), follow=rule)


def placed(heat: Float[npt.NDArray[np.float32], "r c"], window: Window, picture: Picture) -> npt.NDArray[np.float32]:
    """A map of a window, as a map of the whole picture: nothing hot around it, and no finer than the picture."""
    rows, columns = window
    tall, wide = rows.stop - rows.start, columns.stop - columns.start
    scale = min(1.0, heat.shape[0] / tall, heat.shape[1] / wide)
    height, width = (max(1, round(side * scale)) for side in picture.shape[:2])
    whole = np.full((height, width), min(0.0, float(heat.min())), np.float32)
    top, left = round(rows.start * scale), round(columns.start * scale)
    inside = min(height - top, max(1, round(tall * scale))), min(width - left, max(1, round(wide * scale)))
    whole[top : top + inside[0], left : left + inside[1]] = cv2.resize(heat, inside[::-1])
    return whole
