"""Outlier exposure: a large set of diverse natural images without labels, held as a file and read as needed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from firm.data.download import data_root
from firm.images import SUFFIXES, decode, resize, to_tensor
from firm.types import FirmError

URL = "https://people.eecs.berkeley.edu/~hendrycks/300K_random_images.npy"
LAYOUT = f"wanted: an .npy array (n, h, w, 3) of uint8 such as {URL}, or a folder of images"

Indices = Int[Tensor, " k"] | npt.NDArray[np.integer] | Sequence[int]


@runtime_checkable
class Pool(Protocol):
    """A set of outside images, taken by number at the size asked for."""

    def __len__(self) -> int: ...

    def take(self, indices: Indices, size: int) -> UInt8[Tensor, "k 3 size size"]: ...


@dataclass(frozen=True)
class Array:
    """Images in one array, left on disk: 300,000 of them cost no memory until taken."""

    images: npt.NDArray[np.uint8]  # (n, h, w, 3)

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: Indices, size: int) -> UInt8[Tensor, "k 3 size size"]:
        """The numbered images, resized to `size` where they differ."""
        taken = np.array(self.images[np.asarray(indices, dtype=np.int64)])
        return resize(torch.from_numpy(taken).permute(0, 3, 1, 2).contiguous(), size)


@dataclass(frozen=True)
class Folder:
    """Image files, decoded when taken."""

    files: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.files)

    def take(self, indices: Indices, size: int) -> UInt8[Tensor, "k 3 size size"]:
        """The numbered images at `size`; the next good file stands in for a damaged one."""
        images = [self._image(int(i), size) for i in np.asarray(indices, dtype=np.int64)]
        return torch.cat([torch.empty(0, 3, size, size, dtype=torch.uint8), *images])

    def _image(self, number: int, size: int) -> UInt8[Tensor, "1 3 size size"]:
        if not -len(self) <= number < len(self):
            raise IndexError(f"exposure image {number} of {len(self)}")
        for step in range(len(self)):
            try:
                return resize(to_tensor(decode(self.files[(number + step) % len(self)])), size)
            except FirmError as error:
                warnings.warn(f"{error}; the next file stands in for it", stacklevel=4)
        raise FirmError(f"no file in {self.files[0].parent} can be decoded; {LAYOUT}")


def exposure(path: Path | None = None, root: Path | None = None) -> Pool:
    """The exposure set at `path` (.npy or folder), else the .npy in root/exposure."""
    path = Path(path) if path is not None else _default(root)
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        raise FirmError(f"exposure images are not at {path}; {LAYOUT}")
    return _array(path)


def _default(root: Path | None) -> Path:
    folder = data_root(root) / "exposure"
    arrays = sorted(folder.glob("*.npy"))
    if len(arrays) > 1:
        raise FirmError(f"{folder} holds {len(arrays)} arrays; name the exposure file you mean")
    return arrays[0] if arrays else folder / Path(URL).name


def _array(file: Path) -> Array:
    try:
        images = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise FirmError(f"{file} is not a readable array ({error}); {LAYOUT}") from error
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        found = f"{images.dtype} {images.shape}" if isinstance(images, np.ndarray) else "an archive"
        raise FirmError(f"{file} holds {found}; {LAYOUT}")
    if len(images) == 0:
        raise FirmError(f"{file} holds no image; {LAYOUT}")
    return Array(images)


def _folder(folder: Path) -> Folder:
    files = tuple(sorted(f for f in folder.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file()))
    if not files:
        raise FirmError(f"{folder} holds no image file; {LAYOUT}")
    return Folder(files)
