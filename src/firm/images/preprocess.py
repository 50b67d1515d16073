"""The same preprocessing for training, scoring and serving."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from firm.errors import DataError, SettingError
from firm.images.crop import Crop, part_of
from firm.images.decode import Source, decode
from firm.images.resize import Size, resample, runs_of
from firm.images.resize import resize as resize
from firm.images.resize import to_tensor as to_tensor
from firm.types import FULL_DEPTH, Depth, Statistics

BRIGHTNESS_SIDE = 64  # px at which brightness is measured, and images per batch

UNCHANGED = Statistics((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@dataclass(frozen=True)
class Preprocessing:
    """From stored pixels to the encoder's input; saved with a detector, so serving equals training."""

    size: int
    zoom: float = 1.0  # > 1: enlarge, then crop the centre, as the paper does for testing
    statistics: Statistics = UNCHANGED
    side: int = 0  # at which files are read; 0: as large as the view needs
    depth: Depth = FULL_DEPTH  # of files of more than 8 bits
    shape: tuple[int, ...] = ()  # height and width of rectangular images; `size` is then the shorter of them
    crop: Crop = field(default_factory=Crop)  # the part of a file that is read

    @property
    def frame(self) -> tuple[int, int]:
        """Height and width of the images that are encoded."""
        return (self.shape[0], self.shape[1]) if self.shape else (self.size, self.size)

    @property
    def file_side(self) -> Size:
        """The size to which image files are resized first."""
        return self.frame if self.shape else self.side or int(self.zoom * self.size)

    def __post_init__(self) -> None:
        check_shape(self.shape)
        if self.size < 1:
            raise SettingError(f"size {self.size} holds no pixel; use size >= 1")
        if not self.zoom >= 1:
            raise SettingError(f"zoom {self.zoom} leaves the centre crop larger than the image; use zoom >= 1")
        lengths = {len(self.statistics.mean), len(self.statistics.std)}
        if lengths not in ({1}, {3}) or not all(s > 0 for s in self.statistics.std):
            raise SettingError(f"{self.statistics} must hold 1 or 3 means and as many deviations > 0")

    @classmethod
    def from_card(cls, card: dict[str, Any]) -> Preprocessing:
        """Read it from a detector's card."""
        statistics = Statistics(*(tuple(card["statistics"][name]) for name in ("mean", "std")))
        read = (card["size"], card["zoom"], statistics, card["side"], Depth(**card.get("depth", {})))
        return cls(*read, tuple(card.get("shape", ())), Crop.from_card(card.get("crop", {})))

    def read(self, source: Source) -> UInt8[Tensor, "1 3 h w"]:
        """Read a file, an upload, an array or a Pillow image like the training images."""
        return part_of(decode(source, self.depth), self.crop, self.file_side, "the image")[0]

    def test_view(self, images: UInt8[Tensor, "n c h w"]) -> Float[Tensor, "n 3 size size"]:
        """The one deterministic view: enlarge by `zoom`, crop the centre, normalise."""
        side, pixels = int(self.zoom * self.size), images.float()
        if images.shape[-2:] != (side, side):
            pixels = resample(pixels, (side, side))
        start = (side - self.size) // 2
        return self.normalise(pixels[..., start : start + self.size, start : start + self.size] / 255)

    def normalise(self, images: Float[Tensor, "n c h w"]) -> Float[Tensor, "n 3 h w"]:
        """Scale pixels in 0..1 to zero mean and unit deviation per channel; grey becomes three channels."""
        mean, std = (images.new_tensor(values)[:, None, None] for values in (self.statistics.mean, self.statistics.std))
        return (images.expand(-1, 3, -1, -1) - mean) / std


def check_shape(shape: tuple[int, ...]) -> None:
    """Refuse what is not the height and width of images."""
    if shape and (len(shape) != 2 or min(shape) < 1):
        raise SettingError(f"shape is {list(shape)}; give height and width in pixels, or [] for a square of `size`")


def inlier_statistics(images: UInt8[Tensor, "n c h w"]) -> Statistics:
    """Mean and deviation per channel; the deviation is at least one grey level, so that noise is not amplified."""
    if images.numel() == 0:
        raise DataError("statistics need at least one image; the set of inliers is empty")
    count = images.numel() // images.shape[1]
    total = torch.zeros(2, images.shape[1], dtype=torch.float64)
    for run in runs_of(images):
        pixels = images[run].cpu().double()
        total += torch.stack([pixels.sum((0, 2, 3)), pixels.square().sum((0, 2, 3))])  # whole numbers, so exact
    mean, square = total / count
    std = (square - mean**2).clamp(min=0).sqrt().clamp(min=1)
    return Statistics(tuple((mean / 255).tolist()), tuple((std / 255).tolist()))


def fingerprint(images: Tensor) -> str:
    """A digest of the pixels."""
    pixels = images.cpu().contiguous().numpy().tobytes()
    return hashlib.sha256(str(tuple(images.shape)).encode() + pixels).hexdigest()[:16]


def brightness(images: UInt8[Tensor, "n c h w"], ignored: Bool[Tensor, "a b"] | None = None) -> Float[Tensor, " n"]:
    """Mean grey level of each image, 0 to 1, without ignored pixels."""
    counting = torch.ones(BRIGHTNESS_SIDE, BRIGHTNESS_SIDE, dtype=torch.bool) if ignored is None else ~ignored.cpu()
    parts = images.split(BRIGHTNESS_SIDE) if len(images) else ()
    size = (counting.shape[0], counting.shape[1])
    levels = [resize(part, size).cpu().float().mean(1)[:, counting].mean(1) / 255 for part in parts]
    return torch.cat([torch.empty(0), *levels])
