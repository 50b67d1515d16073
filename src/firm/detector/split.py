"""Which good images a model learns from, and which it must not have seen because they set the thresholds."""

from dataclasses import dataclass, replace

from jaxtyping import Int, UInt8
from torch import Tensor

from firm.data.splits import folds_by_part, split_by_part
from firm.detector.prepare import Prepared
from firm.types import OneClass


@dataclass(frozen=True)
class HeldOut:
    """Good images, and what a model that must not have seen them may learn from."""

    prepared: Prepared
    images: UInt8[Tensor, "m c h w"]
    stored: Prepared | None = None  # the images as prepared, if the detector learns from them


@dataclass(frozen=True)
class Split:
    """Good images to learn from, and those that set the thresholds: held out of them, or the same ones fold by fold."""

    learn: OneClass
    parts: Int[Tensor, " n"]  # the part that each of them shows, from 0 without gaps
    held_out: UInt8[Tensor, "m c h w"]  # empty with folds
    held_out_parts: Int[Tensor, " k"]  # of all images that set the thresholds, fold by fold
    files: tuple[str, ...]  # their names; empty if unknown
    fold: Int[Tensor, " n"] | None = None  # the fold of each image to learn from

    def __str__(self) -> str:
        if self.fold is None:
            return f"{len(self.learn.train)} to learn from, {len(self.held_out)} held out"
        return f"all to learn from and, in {self.folds} folds, to set the thresholds"

    @property
    def folds(self) -> int:
        """How many there are; 0 if images are held out."""
        return 0 if self.fold is None else int(self.fold.max()) + 1

    @property
    def fewest(self) -> int:
        """Images that the smallest model learns from."""
        return len(self.learn.train) - (0 if self.fold is None else int(self.fold.bincount().max()))

    def held_out_from(self, prepared: Prepared, number: int) -> HeldOut:
        """The held-out images, or those of a fold."""
        if self.fold is None:
            return HeldOut(prepared, self.held_out)
        others, own = ((self.fold != number).nonzero().squeeze(1), (self.fold == number).nonzero().squeeze(1))
        return HeldOut(prepared.subset(others), self.learn.train[own], prepared.subset(own))


def by_holdout(data: OneClass, parts: Int[Tensor, " n"], holdout: float, *, seed: int, min_parts: int) -> Split:
    """A share of the parts is held out: their scores by the detector guarantee the rates."""
    learn, held_out = split_by_part(parts, holdout, seed=seed, min_parts=min_parts)
    numbers = parts[learn].unique(return_inverse=True)[1]
    files = _names(data, held_out)
    return Split(replace(data, train=data.train[learn]), numbers, data.train[held_out], parts[held_out], files)


def by_folds(data: OneClass, parts: Int[Tensor, " n"], folds: int, *, seed: int) -> Split:
    """All images are learnt from; each is scored by a model of the other folds."""
    numbers = parts.unique(return_inverse=True)[1]
    fold = folds_by_part(numbers, folds, seed=seed)
    order = fold.argsort(stable=True)  # as the folds are scored
    return Split(data, numbers, data.train[:0], parts[order], _names(data, order), fold)


def _names(data: OneClass, chosen: Int[Tensor, " k"]) -> tuple[str, ...]:
    return tuple(data.files[number].name for number in chosen.tolist()) if data.files else ()
