"""Ready-made images of a folder: of a generator, such as RealNet's SIA images or those of `firm sia sample`.

All are used; they are decoded when needed, and only KEPT stay in memory.
"""

import warnings
from functools import lru_cache
from pathlib import Path

import cv2
import numpy as np
from jaxtyping import Float, UInt8
from numpy.typing import NDArray

from firm.data.folder import folders_in, image_files
from firm.errors import DataError, FirmError
from firm.images.decode import decode
from firm.outliers.drawing import Levels, Pixels
from firm.runtime.files import cache_folder

Bytes = NDArray[np.uint8]

KEPT = 512  # images in memory, about 100 MB at 256 px


def generated_donor(folder: str, image: Pixels, rng: np.random.Generator) -> Float[Levels, "c h w"]:
    """A random image of the folder, at the size and with the channels of `image`; a damaged file gives way to the next.

    One with fewer pixels than `image` shows only what its resolution can: finer detail, such as grain, stays that of
    `image`. Otherwise blurred spots would give every outlier away.
    """
    files = _files(folder)
    first = int(rng.integers(len(files)))
    for number in range(first, first + len(files)):
        shown = _shown(files[number % len(files)], *image.shape)
        if shown is not None:
            break
    else:
        raise _empty(folder)
    height, width, coarse = *image.shape[1:], shown.shape[1:]
    if coarse[0] * coarse[1] >= height * width:
        return shown.astype(np.float32)
    own, other = (np.ascontiguousarray(each.transpose(1, 2, 0), np.float32) for each in (image, shown))
    seen = cv2.resize(own, (coarse[1], coarse[0]), interpolation=cv2.INTER_AREA).reshape(*coarse, -1)
    change = cv2.resize(other - seen, (width, height), interpolation=cv2.INTER_CUBIC).reshape(own.shape)
    return (own + change).clip(0, 255).transpose(2, 0, 1)


@lru_cache(maxsize=4)
def _files(folder: str) -> tuple[Path, ...]:
    """The images of a folder, also of one that the cache has by that name."""
    kept = cache_folder() / folder
    files = image_files(kept if kept.is_dir() and not Path(folder).is_dir() else Path(folder))
    if not files:
        raise _empty(folder)
    return tuple(files)


def _empty(folder: str) -> DataError:
    inner = list(folders_in(Path(folder)).values()) if Path(folder).is_dir() else []
    fix = f"name one of its classes, such as {inner[0]}" if inner else "put images of anomalies into it"
    return DataError(f"outliers.folder {folder} has no image that can be decoded; {fix}")


@lru_cache(maxsize=KEPT)
def _shown(file: Path, channels: int, height: int, width: int) -> UInt8[Bytes, "c a b"] | None:
    """An image with the channels wanted, at the size wanted unless it is smaller; None for a damaged file."""
    try:
        image = decode(file)
    except FirmError as error:
        warnings.warn(f"left out: {error}", stacklevel=2)
        return None
    shown = np.asarray(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY) if channels == 1 else image, np.uint8)
    if shown.shape[0] * shown.shape[1] >= height * width:
        shown = np.asarray(cv2.resize(shown, (width, height), interpolation=cv2.INTER_AREA), np.uint8)
    return shown.reshape(*shown.shape[:2], channels).transpose(2, 0, 1)
