"""Read the good images of a fit: decoded once, validated, with the settings of the fit beside them."""

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from firm.data.duplicates import check_good, group_by_part
from firm.data.folder import SIZE, Reading, find_files, load_files
from firm.data.registry import load, shows_parts, training_files
from firm.data.splits import check_holdout, compiled, parts_by_name
from firm.decision.calibration import TargetRates
from firm.detector.estimate import LEAST_EPOCHS
from firm.detector.prepare import MEMORY, check_ignore_mask, frozen_backbone, most_images, read_side
from firm.errors import DataError, SettingError
from firm.images.arrays import images_in
from firm.images.decode import decode, depth_of
from firm.images.ignore_mask import read_ignored
from firm.images.preprocess import fingerprint, resize, to_tensor
from firm.networks.backbone import Backbone
from firm.recipes import presets
from firm.recipes.recipe import Recipe, change, sparse
from firm.runtime.listener import SILENT, Listener
from firm.types import Depth, OneClass

Images = Path | str | UInt8[Tensor, "n c h w"] | OneClass | npt.NDArray[Any] | Sequence[Any]  # files or arrays
LEFT_OUT = "left out"  # prefix of the warning about an unusable file


@dataclass(frozen=True, kw_only=True)
class Options:
    """Arguments of a fit besides the recipe; see `Detector.fit`."""

    seed: int = 0
    device: str = "cpu"
    folder: Path | None = None
    holdout: float | None = None
    false_calls: float | None = None
    fail: float | None = None
    minutes: float | None = None
    memory: float = MEMORY
    depth: Depth | None = None
    strict: bool = False
    ignored: Path | Bool[Tensor, "a b"] | None = None
    parts: Int[Tensor, " n"] | None = None
    keep_suspects: bool = False
    checkpoint_seconds: float = 30.0
    calibration: str | None = None
    group_by: str | None = None

    def __post_init__(self) -> None:
        if self.calibration not in (None, "split", "folds"):
            raise SettingError(f"calibration is {self.calibration!r}; use split or folds")
        TargetRates(false_calls=self.false_calls, fail=self.fail)  # refuses wrong rates before anything is read
        check_holdout(0.5 if self.holdout is None else self.holdout)
        compiled(self.group_by or "")


@dataclass(frozen=True)
class Good:
    """Validated good images, and the settings of the fit."""

    data: OneClass
    recipe: Recipe
    options: Options
    backbone: Backbone | None
    left_out: tuple[str, ...] = ()  # one message per unusable file

    @property
    def parts(self) -> Int[Tensor, " n"]:
        """The part that each good image shows: by name, as given, or found."""
        if self.options.group_by is not None:
            return parts_by_name(self.data.files, self.options.group_by)
        return group_by_part(self.data.name, self.data.train) if self.options.parts is None else self.options.parts

    @property
    def key(self) -> str:
        """A digest of everything that determines the detector; stored in it, so an identical fit can be recognised."""
        by, ignored = self.options, self.data.ignored
        rates = (by.holdout, by.false_calls, by.fail, by.minutes, by.calibration, by.group_by, by.keep_suspects)
        hidden = None if ignored is None else fingerprint(ignored)
        content = [fingerprint(self.data.train), asdict(self.data.depth), by.seed, rates, hidden]
        return hashlib.sha256(json.dumps([sparse(self.recipe), *content], sort_keys=True).encode()).hexdigest()[:16]


def read_good(
    images: Images, recipe: Recipe | None = None, options: Options | None = None, listener: Listener = SILENT
) -> Good:
    """Decode and validate the good images before any training."""
    options, as_files = options or Options(), recipe is None
    recipe, files = recipe or default_recipe(images), _files(images)
    if options.minutes is not None:  # a time budget replaces the epochs; enough steps to time
        recipe = change(recipe, {"training.epochs": max(recipe.training.epochs, LEAST_EPOCHS)})
    ignored = _ignored(images, files, options.ignored)
    check_ignore_mask(recipe, ignored)
    backbone = frozen_backbone(recipe, options.device)
    left_out: list[str] = []
    if isinstance(images, OneClass):
        data = images
    elif isinstance(images, Tensor) and not as_files:
        data = as_data(images)
    elif files or isinstance(images, Path | str):
        data, left_out = _load(files or str(images), recipe, options, backbone, listener)
    else:
        data = _resized(images, read_side(recipe), options.depth)
    check_good(data)
    data = data if ignored is None else replace(data, ignored=ignored)
    return Good(data, recipe, options, backbone, tuple(left_out))


def default_recipe(images: Images) -> Recipe:
    """Patches for parts, also for bare images; whole images for semantic classes."""
    name = images.name if isinstance(images, OneClass) else str(images) if isinstance(images, Path | str) else "images"
    return presets.usual() if shows_parts(name) else presets.FAST


def as_data(good: UInt8[Tensor, "n c h w"], ignored: Bool[Tensor, "a b"] | None = None) -> OneClass:
    """Bare good images as a data set without test images."""
    check_images(good)
    size = min(SIZE, good.shape[-1])
    return OneClass("images", good, good[:0], torch.zeros(0, dtype=torch.bool), size, ignored=ignored)


def _files(images: Images) -> list[Path]:
    """The files of a list of paths; none if it is something else."""
    if isinstance(images, list | tuple) and images and all(isinstance(each, Path | str) for each in images):
        return find_files([Path(each) for each in images])
    return []


def _resized(images: Any, side: int, depth: Depth | None) -> OneClass:
    """Good images in memory, of any size and layout, as if they were read from files."""
    if not (arrays := images_in(images)):
        raise DataError("there are no good images in the list; give at least 2, better 50 or more")
    depth = depth or depth_of(arrays)
    pixels = torch.cat([resize(to_tensor(decode(image, depth)), side) for image in arrays])
    return replace(as_data(pixels), depth=depth)


def check_images(images: Tensor) -> None:
    """Accept uint8, channels first, at least one pixel."""
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] not in (1, 3) or not all(images.shape[2:]):
        raise DataError(f"images are {images.dtype} of shape {tuple(images.shape)}; give uint8 (n, 1 or 3, h, w)")


def _ignored(
    images: Images, files: list[Path], ignored: Path | Bool[Tensor, "a b"] | None
) -> Bool[Tensor, "a b"] | None:
    """The mask of what to ignore, read and compared with the images before these are decoded."""
    if isinstance(ignored, Path):
        listed = training_files(str(images)) if isinstance(images, Path | str) else getattr(images, "files", files)
        return read_ignored(ignored, listed)
    return images.ignored if ignored is None and isinstance(images, OneClass) else ignored


def _load(
    name: str | list[Path], recipe: Recipe, options: Options, backbone: Backbone | None, listener: Listener
) -> tuple[OneClass, list[str]]:
    """Read a folder or data set, at most as many images as fit in memory; also returns why files were left out."""
    side = read_side(recipe)
    most = most_images(recipe, side, options.memory, backbone)
    files = len(training_files(name) if isinstance(name, str) else name)
    if files > most:
        listener.warn(f"{files:,} good images: reading {most:,}, sampled uniformly; raise --memory to read more")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if isinstance(name, str):
            data = load(name, side=side, depth=options.depth, strict=options.strict, max_images=most, with_test=False)
        else:
            data = load_files(name, Reading(side, options.depth, options.strict, most, with_test=False))
    messages = [str(caught_warning.message) for caught_warning in caught]
    for text in messages:
        listener.warn(text)
    return data, [text for text in messages if text.startswith(LEFT_OUT)]
