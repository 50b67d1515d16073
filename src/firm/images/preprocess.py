"""The only door for pixels: safe decoding, and one preprocessing for training, scoring and serving.

Files and uploads become uint8 RGB here and nowhere else, so a part seen by the service is the part the detector learnt.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, UInt8
from PIL import Image
from torch import Tensor

from firm.errors import UnreadableImage, named
from firm.pixels import (
    HEAD,
    REPLACE,
    Picture,
    Unusable,
    checked,
    is_deep,
    loaded,
    marked,
    may_be_deep,
    of_array,
    opened,
    peak,
    rgb,
    turn_of,
)
from firm.types import FULL_DEPTH, Depth, FirmError, Statistics

File = Path | str | bytes  # on disk or just its bytes
Source = File | npt.NDArray[Any] | Image.Image
Pixel = TypeVar("Pixel", bound=np.generic)
Number = TypeVar("Number", int, float)

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".tif", ".tiff", ".webp"})
MAX_BYTES = 2**30  # of a file: more than the largest image needs
WHOLE, REAL = (255, 4095, 65535), (1.0, 255.0, 4095.0, 65535.0)  # what is taken for white where nobody says it

ASIDE = {  # turns that make height of width
    Image.Transpose.ROTATE_90,
    Image.Transpose.ROTATE_270,
    Image.Transpose.TRANSPOSE,
    Image.Transpose.TRANSVERSE,
}

_one_at_a_time = threading.Lock()  # how warnings are filtered is a matter of the whole process


def decode(source: Source, depth: Depth = FULL_DEPTH) -> npt.NDArray[np.uint8]:
    """A file, its bytes, an array or a Pillow image as (h, w, 3) uint8 RGB, upright, transparency over white.

    Whatever a camera, a scanner or an upload may hold ends in pixels or in an UnreadableImage, never in a crash.
    """
    if isinstance(source, np.ndarray):
        with _in_a_sentence(source):
            return of_array(source, depth)
    return _read(source, lambda picture: rgb(picture, depth))


def decode_mask(source: File) -> npt.NDArray[np.bool_]:
    """The marked pixels (h, w) of a mask file: neither black nor transparent, be they only one grey level from it.

    Not by way of RGB: 16-bit labels would round to nothing, and what is transparent would turn white.
    """
    return _read(source, marked)


def turn_like(mask: npt.NDArray[np.bool_], image: Path) -> npt.NDArray[np.bool_]:
    """A mask drawn on the pixels as `image` stores them, turned upright as `image` itself is."""
    with _in_a_sentence(image):
        return _turned(mask, turn_of(opened(_content(image))))  # not loaded: see _read


def shape_of(source: File) -> tuple[int, int]:
    """Height and width of an image file, upright, by its header."""
    with _in_a_sentence(source):
        image = opened(_content(source))
        width, height = image.size
        return (width, height) if turn_of(image) in ASIDE else (height, width)


def depth_of(files: Iterable[Path]) -> Depth:
    """Which sample is white in all these files: of the usual ones the least that none exceeds; without deep files 255.

    Where that is not the most a deep file can hold, it is said. One that cannot be read has no voice, and whoever
    decodes it is told why.
    """
    whole, real = list[int](), list[float]()
    for file in files:
        try:
            found = peak_of(file)
        except UnreadableImage:
            continue
        if isinstance(found, float) and found <= REAL[-1]:  # beyond that, or no number: its file will be refused
            real.append(found)
        elif isinstance(found, int) and found <= WHOLE[-1]:
            whole.append(found)
    depth = Depth(_white(whole, WHOLE), _white(real, REAL))
    for peaks, white, full in ((whole, depth.whole, FULL_DEPTH.whole), (real, depth.real, FULL_DEPTH.real)):
        if peaks and white != full:
            told = f"{len(peaks)} of the images to learn from have more than 8 bits and no sample above {white:g}"
            warnings.warn(f"{told}, which is white from now on; if it is not, say their bits (--depth)", stacklevel=2)
    return depth


def peak_of(source: File) -> int | float | None:
    """The largest sample of a file of more than 8 bits, a float if they are; None: it has 8 bits.

    Of most files that is told by the first bytes, so a large folder is not read twice.
    """
    with _in_a_sentence(source):
        if not may_be_deep(_content(source, HEAD)):
            return None
        content = _content(source)
        image = opened(content)
        return peak(loaded(image, content)) if is_deep(image) else None


def _white(peaks: Sequence[Number], usual: Sequence[Number]) -> Number:
    return next(white for white in usual if max(peaks, default=0) <= white)


def _read(source: File | Image.Image, look: Callable[[Picture], npt.NDArray[Pixel]]) -> npt.NDArray[Pixel]:
    with _in_a_sentence(source):
        content = b"" if isinstance(source, Image.Image) else _content(source)
        image = checked(source) if isinstance(source, Image.Image) else opened(content)
        pixels = look(loaded(image, content))
        return _turned(pixels, turn_of(image))  # asked after loading: Pillow turns a TIFF while it does so


def _turned(pixels: npt.NDArray[Pixel], turn: Image.Transpose | None) -> npt.NDArray[Pixel]:
    return pixels if turn is None else np.array(Image.fromarray(pixels.astype(np.uint8)).transpose(turn), pixels.dtype)


def _content(source: File, first: int = -1) -> bytes:
    """The bytes of a file of moderate size: never those of a device or a pipe, which may have no end."""
    if isinstance(source, bytes):
        return source
    try:
        about = os.stat(source)
        if stat.S_ISDIR(about.st_mode):
            raise Unusable("is a folder, not an image, or may not be listed; give the image files in it")
        if not stat.S_ISREG(about.st_mode):
            raise Unusable("is no file but a device or a pipe; give an image file")
        if about.st_size > MAX_BYTES:
            raise Unusable(f"has {about.st_size:,} bytes, more than {MAX_BYTES:,}; crop or scale it down first")
        with open(source, "rb") as file:
            return file.read(first)
    except FileNotFoundError:
        raise Unusable("does not exist; check the path") from None
    except OSError as error:
        raise Unusable(f"cannot be opened ({error.strerror}); check the path and its permissions") from None


@contextmanager
def _in_a_sentence(source: Source) -> Iterator[None]:
    """Whatever goes wrong is an UnreadableImage that names the file, and nothing is said beside it."""
    path = Path(source) if isinstance(source, Path | str) else None
    name = "the image" if path is None else named(path)
    try:
        with _one_at_a_time, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Unusable as reason:
        raise UnreadableImage(f"{name} {reason}", path) from None
    except Exception as error:  # decoders of damaged files raise anything from SyntaxError to struct.error
        why = " ".join(str(error).split()) or type(error).__name__
        raise UnreadableImage(f"{name} cannot be decoded as an image ({why}); {REPLACE}", path) from error


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
    depth: Depth = FULL_DEPTH  # of files of more than 8 bits, as of those that were learnt from

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

    @classmethod
    def from_card(cls, card: dict[str, Any]) -> Preprocessing:
        """What a detector's card says of it; one of before the depth was kept read files by the default."""
        statistics = Statistics(*(tuple(card["statistics"][name]) for name in ("mean", "std")))
        return cls(card["size"], card["zoom"], statistics, card["side"], Depth(**card.get("depth", {})))

    def read(self, source: Source) -> UInt8[Tensor, "1 3 side side"]:
        """An image as those that were learnt from were read, be it a file, an upload, an array or a Pillow image."""
        return resize(to_tensor(decode(source, self.depth)), self.file_side)

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
