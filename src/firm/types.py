"""The core types: what flows between the stages, and the protocols every member of a family fits.

One sign holds everywhere: a higher score is more anomalous.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from firm.errors import FirmError as FirmError
from firm.errors import Stopped as Stopped

Split = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]  # labelled images: (n, c, h, w) and (n,)
INLIER = 0  # group 0 is normal; any other group is a kind of outlier


@dataclass(frozen=True)
class Statistics:
    """Mean and deviation per channel of pixels scaled to 0..1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Depth:
    """Which sample is white in images of more than 8 bits: one decision for all images of a detector.

    A dark 16-bit image cannot be told from a 12-bit one, so a guess per file would change the scale between images.
    """

    whole: int = 65535  # of samples that are whole numbers: 4095 is 12 bit in 16
    real: float = 1.0  # of floating-point samples

    def __post_init__(self) -> None:
        if not 255 <= self.whole <= 65535:
            raise FirmError(f"depth.whole is {self.whole}; white lies between 255 (8 bit) and 65535 (16 bit)")
        if not 0 < self.real < math.inf:
            raise FirmError(f"depth.real is {self.real}; white must be a number above 0")


FULL_DEPTH = Depth()  # white is the most that 16 bits hold, and 1 of floats


@dataclass(frozen=True)
class Truth:
    """What is known of test images beyond good or bad: the kind of each, and where it is defective."""

    kinds: tuple[str, ...]  # "good" for a normal image
    masks: Bool[Tensor, "m h w"]  # the defective pixels, at the size of the images
    known: Bool[Tensor, " m"]  # good images, and defective ones whose mask is there and not empty
    files: tuple[str, ...] = ()  # the name of every image; empty where they have none


@dataclass(frozen=True)
class OneClass:
    """One normal class of a labelled data set: only inliers to learn from, everything to be tested on."""

    name: str  # as a person writes it: "cifar10:bird"
    train: UInt8[Tensor, "n c h w"]
    test: UInt8[Tensor, "m c h w"]
    anomalous: Bool[Tensor, " m"]
    size: int  # the side at which the paper works on this data set
    statistics: Statistics | None = None  # published ones; None: take those of the inliers
    truth: Truth | None = None
    depth: Depth = FULL_DEPTH  # at which its files were read
    files: tuple[Path, ...] = ()  # of the images to learn from as they were read; empty where they have none
    ignored: Bool[Tensor, "a b"] | None = None  # pixels that must never decide, over any image of it, of any size


@dataclass(frozen=True)
class Batch:
    """A multiview batch: two views of one image share a source, and that is i+."""

    images: Float[Tensor, "b ..."]  # b, c, h, w; of a pretrained backbone the features of patches, b, d
    source: Int[Tensor, " b"]
    group: Int[Tensor, " b"]


@dataclass(frozen=True)
class Outliers:
    """Synthetic outliers, the kind of each, and the pixels that were altered (None: the whole image)."""

    images: UInt8[Tensor, "n c h w"]
    group: Int[Tensor, " n"]
    where: Bool[Tensor, "n h w"] | None = None


@dataclass(frozen=True)
class Scene:
    """What a local outlier may use beside its inlier: where the object is, and the other good images."""

    foreground: Bool[Tensor, "n h w"]  # of the inliers to be changed
    donors: UInt8[Tensor, "m c h w"]
    donor_foreground: Bool[Tensor, "m h w"]
    hidden: Bool[Tensor, "n h w"] | None = None  # of the inliers: where nothing counts (None: nowhere)

    @classmethod
    def among(
        cls,
        images: UInt8[Tensor, "m c h w"],
        foreground: Bool[Tensor, "m h w"],
        hidden: Bool[Tensor, "m h w"] | None,
        which: Int[Tensor, " n"],
    ) -> Scene:
        """That of some good images among others, all of which lend their pixels."""
        return cls(foreground[which], images, foreground, None if hidden is None else hidden[which])

    def some(self, at: Int[Tensor, " k"]) -> Scene:
        """That of some of the inliers."""
        hidden = None if self.hidden is None else self.hidden[at]
        return Scene(self.foreground[at], self.donors, self.donor_foreground, hidden)


@dataclass(frozen=True)
class Focus:
    """Where patches are to be taken from: the object, and in an outlier the pixels that were altered."""

    foreground: Bool[Tensor, "n h w"]
    altered: Bool[Tensor, "n h w"]  # nowhere in an inlier


@dataclass(frozen=True)
class Located:
    """What was found in each image: its score, and a score for every pixel."""

    scores: Float[Tensor, " n"]
    maps: Float[Tensor, "n h w"]


@runtime_checkable
class OutlierSource(Protocol):
    """Inliers in, as many outliers out, each made from the inlier in its place (or replacing it)."""

    @property
    def per_inlier(self) -> int:
        """How many outliers stand beside each inlier in an epoch."""
        ...

    @property
    def kinds(self) -> int:
        """How many groups the outliers fall into; Rot-SupCon needs more than one."""
        ...

    def __call__(
        self,
        inliers: UInt8[Tensor, "n c h w"],
        *,
        rng: torch.Generator,
        copy: Int[Tensor, " n"] | None = None,
        scene: Scene | None = None,
    ) -> Outliers:
        """`copy` in 0..per_inlier-1 says which of its outliers each inlier is to become; None draws it.

        Without a scene the object is everywhere and the inliers are each other's donors.
        """
        ...


@runtime_checkable
class Views(Protocol):
    """Images in, two independent views of each out: the positive pairs."""

    def __call__(
        self, images: UInt8[Tensor, "n c h w"], size: int, *, rng: torch.Generator, focus: Focus | None = None
    ) -> tuple[Float[Tensor, "n c p p"], Float[Tensor, "n c p p"]]:
        """`size` is that of the encoder's input; patches have a size of their own."""
        ...


@runtime_checkable
class Tiling(Protocol):
    """How an image is looked at: whole, or patch by patch."""

    @property
    def patchwise(self) -> bool: ...


@runtime_checkable
class PositiveSet(Protocol):
    """P(i) as row i of a mask; the diagonal is always False."""

    def __call__(self, source: Int[Tensor, " b"], group: Int[Tensor, " b"]) -> Bool[Tensor, "b b"]: ...


@runtime_checkable
class Scorer(Protocol):
    """A score fitted to normal embeddings. Higher = more anomalous, always."""

    def __call__(self, embeddings: Float[Tensor, "n d"]) -> Float[Tensor, " n"]: ...


@runtime_checkable
class Score(Protocol):
    """The settings of a score; fitting returns the scorer."""

    def fit(self, normal: Float[Tensor, "m d"]) -> Scorer: ...
