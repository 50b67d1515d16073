"""The only door for pixels: safe decoding, and one preprocessing for training, scoring and serving.

Files and uploads become uint8 RGB here and nowhere else, so a part seen by the service is the part the detector learnt.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, UInt8
from PIL import Image
from torch import Tensor

from firm.types import FirmError, Statistics

Pixel = TypeVar("Pixel", bound=np.generic)

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".ppm", ".pgm"})
FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "GIF", "PPM")  # no format that runs an interpreter (EPS)
MAX_PIXELS = 80_000_000  # below Pillow's own limit, so ours speaks first
ORIENTATION = 0x0112
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(source: Path | str | bytes) -> npt.NDArray[np.uint8]:
    """An image file or its bytes as (h, w, 3) uint8 RGB, upright, transparency over white.

    Any file a camera, a scanner or an upload may hold ends in pixels or in a FirmError naming it, never in a crash.
    """
    return _decoded(source, _rgb)


def decode_mask(source: Path | str | bytes) -> npt.NDArray[np.bool_]:
    """The marked pixels (h, w) of a mask file: neither black nor transparent, be they only one grey level from it.

    Not by way of RGB: 16-bit labels would round to nothing, and what is transparent would turn white.
    """
    return _decoded(source, _marked)


def _decoded(source: Path | str | bytes, read: Callable[[Image.Image], npt.NDArray[Pixel]]) -> npt.NDArray[Pixel]:
    name = "the image" if isinstance(source, bytes) else str(source)
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
            _refuse_bomb(image, name)
            image.load()  # before asking for the orientation: Pillow turns a TIFF while loading it
            return read(_upright(image))
    except FirmError:
        raise
    except FileNotFoundError:
        raise FirmError(f"{name} does not exist; check the path") from None
    except Exception as error:  # decoders of damaged files raise anything from SyntaxError to struct.error
        raise FirmError(f"{name} cannot be decoded as an image ({error}); replace or remove it") from error


def _refuse_bomb(image: Image.Image, name: str) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise FirmError(
            f"{name} has {image.width} x {image.height} pixels, more than {MAX_PIXELS:,}; crop or scale it down first"
        )


def _upright(image: Image.Image) -> Image.Image:
    """Turned as its EXIF orientation asks; the pixels of a file with damaged EXIF are still good."""
    turn = _turn(image)
    return image if turn is None else image.transpose(turn)


def _turn(image: Image.Image) -> Image.Transpose | None:
    try:
        return UPRIGHT.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # see _decoded
        return None


def turn_like(mask: npt.NDArray[np.bool_], image: Path) -> npt.NDArray[np.bool_]:
    """A mask drawn on the pixels as `image` stores them, turned upright as `image` itself is."""
    with Image.open(image, formats=FORMATS) as opened:
        turn = _turn(opened)  # not loaded: see _decoded
    return mask if turn is None else np.array(Image.fromarray(mask.astype(np.uint8)).transpose(turn)) > 0


def _rgb(image: Image.Image) -> npt.NDArray[np.uint8]:
    if image.mode.startswith("I"):
        return _from_16_bit(np.asarray(image))
    if image.mode == "F":
        raise ValueError("floating-point pixels have no agreed scale: save as 8 or 16 bit")
    if _transparent(image):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.array(image.convert("RGB"))


def _marked(image: Image.Image) -> npt.NDArray[np.bool_]:
    if image.mode.startswith("I") or image.mode == "F":
        return np.asarray(image) > 0
    if not _transparent(image):
        return np.asarray(image.convert("RGB")).max(axis=2) > 0
    rgba = np.asarray(image.convert("RGBA"))
    return (rgba[..., :3].max(axis=2) > 0) & (rgba[..., 3] > 0)


def _transparent(image: Image.Image) -> bool:
    return "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa")


def _from_16_bit(grey: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """65535 becomes 255: dividing by 257, where Pillow's own conversion would clip everything above 255."""
    wide = grey.astype(np.int32)
    if wide.size and (wide.min() < 0 or wide.max() > 65535):
        raise ValueError("pixels outside 0..65535: save as 8 or 16 bit")
    return np.repeat(((wide + 128) // 257).astype(np.uint8)[:, :, None], 3, axis=2)


def to_tensor(image: npt.NDArray[np.uint8]) -> UInt8[Tensor, "1 3 h w"]:
    """A decoded image as a batch of one."""
    return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None]


def resize(images: UInt8[Tensor, "n c h w"], side: int) -> UInt8[Tensor, "n c side side"]:
    """The whole image in a square of `side`, bilinear and antialiased; images of that size pass untouched."""
    if images.shape[-2:] == (side, side):
        return images
    resized = images.new_empty(*images.shape[:2], side, side)
    for run in _runs(images):
        resized[run] = _resample(images[run].float(), side).round().clamp(0, 255).to(torch.uint8)
    return resized


def resize_mask(mask: Bool[np.ndarray, "h w"], side: int) -> Bool[Tensor, "side side"]:
    """The nearest pixel of the mask at each place; a mark that would vanish is kept wherever it is touched."""
    rows, columns = ((2 * np.arange(side) + 1) * length // (2 * side) for length in mask.shape)
    nearest = mask[np.ix_(rows, columns)]
    if nearest.any() or not mask.any():
        return torch.from_numpy(nearest)
    return F.adaptive_max_pool2d(torch.from_numpy(mask)[None].float(), side)[0] > 0


def _runs(images: Tensor) -> list[slice]:
    """Runs of images whose floats stay near 64 MB, however large the data set."""
    step = max(1, 2**24 // max(1, images[:1].numel()))
    return [slice(start, start + step) for start in range(0, len(images), step)]


def _resample(images: Float[Tensor, "n c h w"], side: int) -> Float[Tensor, "n c side side"]:
    return F.interpolate(images, size=(side, side), mode="bilinear", antialias=True, align_corners=False)


UNCHANGED = Statistics((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@dataclass(frozen=True)
class Preprocessing:
    """From stored pixels to what the encoder sees; kept with a detector, so serving cannot differ from training."""

    size: int
    zoom: float = 1.0  # > 1: enlarge, then crop the centre, as the paper does before testing
    statistics: Statistics = UNCHANGED
    side: int = 0  # at which files are read, as those that were learnt from; 0: at once as large as the view needs

    @property
    def file_side(self) -> int:
        """The side to which an image file is brought before anything else."""
        return self.side or int(self.zoom * self.size)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise FirmError(f"size {self.size} holds no pixel; use size >= 1")
        if not self.zoom >= 1:
            raise FirmError(f"zoom {self.zoom} leaves the centre crop larger than the image; use zoom >= 1")
        lengths = {len(self.statistics.mean), len(self.statistics.std)}
        if lengths not in ({1}, {3}) or not all(s > 0 for s in self.statistics.std):
            raise FirmError(f"{self.statistics} must hold 1 or 3 means and as many deviations > 0")

    def test_view(self, images: UInt8[Tensor, "n c h w"]) -> Float[Tensor, "n 3 size size"]:
        """The one deterministic view: enlarge by `zoom`, crop the centre, normalise."""
        side = int(self.zoom * self.size)
        pixels = images.float()
        if images.shape[-2:] != (side, side):
            pixels = _resample(pixels, side)
        start = (side - self.size) // 2
        return self.normalise(pixels[..., start : start + self.size, start : start + self.size] / 255)

    def normalise(self, images: Float[Tensor, "n c h w"]) -> Float[Tensor, "n 3 h w"]:
        """Pixels in 0..1 to zero mean and unit deviation per channel; grey fills all three."""
        mean, std = (images.new_tensor(values)[:, None, None] for values in (self.statistics.mean, self.statistics.std))
        return (images.expand(-1, 3, -1, -1) - mean) / std


def inlier_statistics(images: UInt8[Tensor, "n c h w"]) -> Statistics:
    """Mean and deviation per channel of the inliers alone, for data without published ones.

    A constant channel gets one grey level of deviation: it must not divide by zero, nor blow up noise seen later.
    """
    if images.numel() == 0:
        raise FirmError("statistics need at least one image; the set of inliers is empty")
    count = images.numel() // images.shape[1]
    total = torch.zeros(2, images.shape[1], dtype=torch.float64)
    for run in _runs(images):
        pixels = images[run].cpu().double()
        total += torch.stack([pixels.sum((0, 2, 3)), pixels.square().sum((0, 2, 3))])  # whole numbers, so exact
    mean, square = total / count
    std = (square - mean**2).clamp(min=0).sqrt().clamp(min=1)
    return Statistics(tuple((mean / 255).tolist()), tuple((std / 255).tolist()))


def fingerprint(images: Tensor) -> str:
    """Names images by their pixels."""
    shape = str(tuple(images.shape)).encode()
    return hashlib.sha256(shape + images.cpu().contiguous().numpy().tobytes()).hexdigest()[:16]
