"""Whole images as outliers: rotated inliers (section 3.4 (a)), images of other things (Outlier Exposure, (c)), or both.

`CutPerm` is for judging trainings that have seen the others.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int, Shaped, UInt8
from torch import Generator, Tensor

from firm.data.registry import data_root
from firm.errors import DataError, FirmError
from firm.images.decode import SUFFIXES, decode
from firm.images.preprocess import resize, to_tensor
from firm.outliers.drawing import Copy
from firm.types import Outliers, Scene

URL = "https://people.eecs.berkeley.edu/~hendrycks/300K_random_images.npy"
LAYOUT = f"give an .npy array (n, h, w, 3) of uint8 such as {URL}, or a folder of images"

Indices = Int[Tensor, " k"] | npt.NDArray[np.integer] | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Rotations:
    """Each inlier turned by 90, 180 and 270 degrees; the angle is the kind of outlier."""

    per_inlier = 3
    kinds = 3

    def __call__(self, inliers: Tensor, *, rng: Generator, copy: Copy = None, scene: Scene | None = None) -> Outliers:
        quarter = 1 + (torch.randint(3, (len(inliers),), generator=rng) if copy is None else copy)
        return Outliers(turned(inliers, quarter), quarter)


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """Every outlier is a random image of the pool, three per inlier."""

    path: str = ""  # an .npy array or a folder of images; empty: the exposure set under the data root
    rotate: bool = False  # turn each image by one of the three angles, which is then its kind ("OE (rot.)")
    per_inlier = 3

    @property
    def kinds(self) -> int:
        return 3 if self.rotate else 1

    def __call__(self, inliers: Tensor, *, rng: Generator, copy: Copy = None, scene: Scene | None = None) -> Outliers:
        n, _, height, width = inliers.shape
        if height != width:
            raise DataError(f"exposure needs square images, not {width} x {height} pixels; make them square")
        pool = pool_named(self.path)
        images = pool.take(torch.randint(len(pool), (n,), generator=rng), width)
        if not self.rotate:
            return Outliers(images, torch.ones(n, dtype=torch.long))
        quarter = torch.randint(1, 4, (n,), generator=rng)
        return Outliers(turned(images, quarter), quarter)


@dataclass(frozen=True, kw_only=True)
class RotationsAndExposure:
    """Of the four outliers of an inlier, two are the inlier turned at random and two are images of the pool."""

    path: str = ""  # of the pool, as in `Exposure`
    per_inlier = 4
    kinds = 4  # three angles, and the pool

    @property
    def sources(self) -> tuple[Rotations, Exposure]:
        return Rotations(), Exposure(path=self.path)

    def __call__(self, inliers: Tensor, *, rng: Generator, copy: Copy = None, scene: Scene | None = None) -> Outliers:
        number = torch.randint(4, (len(inliers),), generator=rng) if copy is None else copy
        rotated, exposed = (number < 2).nonzero().squeeze(1), (number >= 2).nonzero().squeeze(1)
        rotations, exposure = self.sources
        turns, others = rotations(inliers[rotated], rng=rng), exposure(inliers[exposed], rng=rng)
        images = others.images.new_empty(len(inliers), *others.images.shape[1:])
        images[rotated], images[exposed] = turns.images.expand(-1, images.shape[1], -1, -1), others.images
        group = torch.full((len(inliers),), 4)
        group[rotated] = turns.group
        return Outliers(images, group)


@dataclass(frozen=True, kw_only=True)
class CutPerm:
    """The four quarters of each inlier in another order: CSI's CutPerm."""

    per_inlier = 1
    kinds = 1

    def __call__(self, inliers: Tensor, *, rng: Generator, copy: Copy = None, scene: Scene | None = None) -> Outliers:
        high, wide = inliers.shape[-2] // 2, inliers.shape[-1] // 2
        places = [(top, left) for top in (0, high) for left in (0, wide)]
        quarters = torch.stack([inliers[..., y : y + high, x : x + wide] for y, x in places], dim=1)
        orders = torch.tensor(list(permutations(range(4)))[1:])  # the first changes nothing
        order = orders[torch.randint(len(orders), (len(inliers),), generator=rng)]
        images, numbers = inliers.clone(), torch.arange(len(inliers))
        for place, (y, x) in enumerate(places):
            images[..., y : y + high, x : x + wide] = quarters[numbers, order[:, place]]
        return Outliers(images, torch.ones(len(inliers), dtype=torch.long))


def turned(images: Shaped[Tensor, "n c h w"], quarters: Int[Tensor, " n"] | int) -> Shaped[Tensor, "n c h w"]:
    """Turn counter-clockwise by quarter turns, exactly: pixels move, none is interpolated."""
    if images.shape[-1] != images.shape[-2]:
        height, width = images.shape[-2:]
        raise DataError(f"images of {width} x {height} pixels cannot be turned in place; make them square first")
    if isinstance(quarters, int):
        return torch.rot90(images, quarters, dims=(2, 3))
    result = images.clone()
    for quarter in (1, 2, 3):
        chosen = (quarters % 4 == quarter).nonzero().squeeze(1)
        result[chosen] = torch.rot90(images[chosen], quarter, dims=(2, 3))
    return result


@dataclass(frozen=True)
class Array:
    """Images in one memory-mapped array, taken by index at any size: 300,000 of them cost no memory until then."""

    images: npt.NDArray[np.uint8]  # (n, h, w, 3)

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: Indices, size: int) -> UInt8[Tensor, "k 3 size size"]:
        taken = np.array(self.images[np.asarray(indices, dtype=np.int64)])
        return resize(torch.from_numpy(taken).permute(0, 3, 1, 2).contiguous(), size)


@dataclass(frozen=True)
class Folder:
    """Image files, decoded when taken; a damaged file is replaced by the next good one."""

    files: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.files)

    def take(self, indices: Indices, size: int) -> UInt8[Tensor, "k 3 size size"]:
        images = [self._image(int(i), size) for i in np.asarray(indices, dtype=np.int64)]
        return torch.cat([torch.empty(0, 3, size, size, dtype=torch.uint8), *images])

    def _image(self, number: int, size: int) -> UInt8[Tensor, "1 3 size size"]:
        if not -len(self) <= number < len(self):
            raise IndexError(f"exposure image {number} of {len(self)}")
        for step in range(len(self)):
            try:
                return resize(to_tensor(decode(self.files[(number + step) % len(self)])), size)
            except FirmError as error:
                warnings.warn(f"{error}; the next file replaces it", stacklevel=4)
        raise DataError(f"no file in {self.files[0].parent} can be decoded; {LAYOUT}")


def pool_named(path: str) -> Array | Folder:
    """The exposure set of a recipe, in whichever folder of data holds it."""
    return open_pool(path, data_root(holding=f"exposure/{path}"))


@lru_cache(maxsize=4)
def open_pool(path: str, root: Path) -> Array | Folder:
    """The exposure set: an .npy file or a folder, also by its name in root/exposure; "": the only .npy there."""
    home = root / "exposure"
    place = Path(path) if path else _only_array(home)
    if not place.exists():
        place = home / place
    if place.is_dir():
        files = [file for file in place.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file()]
        if not files:
            raise DataError(f"{place} holds no image file; {LAYOUT}")
        return Folder(tuple(sorted(files, key=lambda file: file.parts)))  # the same order on every system
    if not place.is_file():
        raise DataError(f"exposure images are not at {place}; {LAYOUT}")
    try:
        images = np.load(place, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{place} is not a readable array ({error}); {LAYOUT}") from error
    shape: tuple[int, ...] = getattr(images, "shape", ())
    dtype = getattr(images, "dtype", "an archive")
    if dtype != np.uint8 or len(shape) != 4 or shape[0] == 0 or shape[3] != 3:
        raise DataError(f"{place} holds {dtype} {shape}; {LAYOUT}")
    return Array(images)


def _only_array(folder: Path) -> Path:
    arrays = sorted(folder.glob("*.npy"))
    if len(arrays) > 1:
        raise DataError(f"{folder} holds {len(arrays)} arrays; give the path of the one to use")
    return arrays[0] if arrays else folder / Path(URL).name
