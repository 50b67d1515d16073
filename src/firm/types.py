"""The core types and the protocols of each family. A higher score is always more anomalous."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from firm.errors import SettingError

Split = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]  # labelled images: (n, c, h, w) and (n,)
Scorer = Callable[[Float[Tensor, "n d"]], Float[Tensor, " n"]]  # fitted to normal embeddings
INLIER = 0  # group 0 is normal; any other group is a kind of outlier


@dataclass(frozen=True)
class Statistics:
    """Mean and deviation per channel of pixels scaled to 0..1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Depth:
    """The white level of images of more than 8 bits; one for all images of a detector, so that the scale is fixed."""

    whole: int = 65535  # of integer samples; 4095 for 12 bits
    real: float = 1.0  # of floating-point samples

    def __post_init__(self) -> None:
        if not 255 <= self.whole <= 65535:
            raise SettingError(f"depth.whole is {self.whole}; white lies between 255 (8 bit) and 65535 (16 bit)")
        if not 0 < self.real < math.inf:
            raise SettingError(f"depth.real is {self.real}; white must be a number above 0")


FULL_DEPTH = Depth()  # the full range of 16 bits, and 1 for floats


@dataclass(frozen=True)
class Truth:
    """Ground truth of test images: the kind of each and its defective pixels."""

    kinds: tuple[str, ...]  # "good" for a normal image
    masks: Bool[Tensor, "m h w"]  # the defective pixels, at the size of the images
    known: Bool[Tensor, " m"]  # good images, and defective ones with a mask that is not empty
    files: tuple[str, ...] = ()  # image names; may be empty


@dataclass(frozen=True)
class OneClass:
    """One normal class of a labelled data set: inliers for training, all classes for testing."""

    name: str  # such as "cifar10:bird"
    train: UInt8[Tensor, "n c h w"]
    test: UInt8[Tensor, "m c h w"]
    anomalous: Bool[Tensor, " m"]
    size: int  # image side in the paper
    statistics: Statistics | None = None  # published; None: those of the inliers
    truth: Truth | None = None
    depth: Depth = FULL_DEPTH  # white level of its files
    files: tuple[Path, ...] = ()  # of the training images, in order; may be empty
    ignored: Bool[Tensor, "a b"] | None = None  # ignored pixels, at any size


@dataclass(frozen=True)
class Batch:
    """A multiview batch: the two views of one image share a source (i+ in the paper)."""

    images: Float[Tensor, "b ..."]  # b, c, h, w; with a pretrained backbone patch features, b, d
    source: Int[Tensor, " b"]
    group: Int[Tensor, " b"]


@dataclass(frozen=True)
class Outliers:
    """Synthetic outliers, the kind of each, and the altered pixels (None: the whole image)."""

    images: UInt8[Tensor, "n c h w"]
    group: Int[Tensor, " n"]
    where: Bool[Tensor, "n h w"] | None = None


@dataclass(frozen=True)
class Scene:
    """Inputs of local outliers besides the inliers: foregrounds and donor images."""

    foreground: Bool[Tensor, "n h w"]  # of the inliers
    donors: UInt8[Tensor, "m c h w"]
    donor_foreground: Bool[Tensor, "m h w"]
    hidden: Bool[Tensor, "n h w"] | None = None  # ignored pixels of the inliers

    def __getitem__(self, which: Int[Tensor, " k"]) -> Scene:
        """A subset of the inliers, with all donors."""
        hidden = None if self.hidden is None else self.hidden[which]
        return Scene(self.foreground[which], self.donors, self.donor_foreground, hidden)


@dataclass(frozen=True)
class Focus:
    """Where to take patches: the object, and the altered pixels of an outlier."""

    foreground: Bool[Tensor, "n h w"]
    altered: Bool[Tensor, "n h w"]  # empty for an inlier


@runtime_checkable
class OutlierSource(Protocol):
    """Makes one outlier from each inlier (or in its place)."""

    @property
    def per_inlier(self) -> int:
        """Outliers per inlier in an epoch."""
        ...

    @property
    def kinds(self) -> int:
        """Number of outlier groups; Rot-SupCon needs more than one."""
        ...

    def __call__(
        self,
        inliers: UInt8[Tensor, "n c h w"],
        *,
        rng: torch.Generator,
        copy: Int[Tensor, " n"] | None = None,
        scene: Scene | None = None,
    ) -> Outliers:
        """`copy` in 0..per_inlier-1 selects the outlier of each inlier; None draws it.

        Without a scene the object is everywhere and the inliers are donors for each other.
        """
        ...


@runtime_checkable
class Views(Protocol):
    """Makes two independent views of each image: the positive pairs."""

    def __call__(
        self, images: UInt8[Tensor, "n c h w"], size: int, *, rng: torch.Generator, focus: Focus | None = None
    ) -> tuple[Float[Tensor, "n c p p"], Float[Tensor, "n c p p"]]:
        """`size` is that of the encoder's input; patches have their own."""
        ...


@runtime_checkable
class Tiling(Protocol):
    """Whether images are scored whole or by patches."""

    @property
    def patchwise(self) -> bool: ...


@runtime_checkable
class Score(Protocol):
    """The settings of a score; `fit` on normal embeddings returns the scorer."""

    def fit(self, normal: Float[Tensor, "m d"]) -> Scorer: ...
