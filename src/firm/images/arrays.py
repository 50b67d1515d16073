"""Images in memory: one or several, in the layouts of NumPy, PyTorch and OpenCV."""

import os
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from firm.errors import SettingError

SOURCES = (str, bytes, os.PathLike, np.ndarray, Tensor, Image.Image, list, tuple)
CHANNELS = ("rgb", "bgr")
COLOURS = (1, 3, 4)  # numbers of channels


def is_batch(source: object) -> bool:
    """Whether these are several images: a list, or a stack of four dimensions."""
    return isinstance(source, list | tuple) or getattr(source, "ndim", 0) == 4


def images_in(source: object, channels: str = "rgb") -> list[Any]:
    """The images of a list or a stack, or the one alone; arrays and tensors as arrays (h, w) or (h, w, c), RGB.

    A stack is (n, h, w, c) or (n, c, h, w), a tensor has its channels first. Files and Pillow images, which know the
    order of their channels, stay as they are.
    """
    _check(channels)
    if not isinstance(source, SOURCES):
        raise SettingError(f"an image cannot be a {type(source).__name__}; give a file, an array, a tensor or an image")
    first = is_batch(source) and _channels_first(source)
    images: Any = source
    return [_array(image, channels, first) for image in (images if is_batch(source) else [images])]


def _channels_first(image: Any) -> bool:
    """Of an array or tensor, of one image or a stack."""
    shape: tuple[int, ...] = getattr(image, "shape", ())
    return len(shape) > 2 and shape[-3] in COLOURS and (isinstance(image, Tensor) or shape[-1] not in COLOURS)


def _array(image: Any, channels: str, first: bool) -> Any:
    if isinstance(image, Tensor):
        image, first = image.detach().cpu().numpy(), _channels_first(image)
    if not isinstance(image, np.ndarray):
        return image
    image = image.transpose(1, 2, 0) if first and image.ndim == 3 else image
    swap = channels == "bgr" and image.ndim == 3 and image.shape[2] in (3, 4)
    return image[..., [2, 1, 0, 3][: image.shape[2]]] if swap else image


def in_rgb(images: Any, channels: str) -> Any:
    """The same images with the channels of arrays and tensors in the order RGB."""
    _check(channels)
    if channels == "rgb" or not is_batch(images):
        return images
    return images.flip(1) if isinstance(images, Tensor) else images_in(images, channels)


def _check(channels: str) -> None:
    if channels not in CHANNELS:
        raise SettingError(f"channels is {channels!r}; use {' or '.join(CHANNELS)}")
