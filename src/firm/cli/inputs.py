"""From what was typed to a recipe and images."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from firm.cli.terminal import say
from firm.errors import FirmError, named

if TYPE_CHECKING:
    from firm.detector import Detector
    from firm.recipes.recipe import Recipe
    from firm.types import Depth, OneClass

BY_HAND = {  # what a preset leaves to be chosen -> the setting that a person may give instead
    "foreground": "conditioning.foreground",
    "light": "conditioning.light",
    "align": "conditioning.align",
    "reach": "memory.reach",
    "features": "features",
}


def preset_for(data: str) -> str:
    """Patches for parts, whole images where a class of a semantic set is the normal one."""
    from firm.data import shows_parts

    return "inspect" if shows_parts(data) else "fast"


def recipe_of(preset: str, settings: list[str] | None) -> Recipe:
    """The preset with what was set; a setting given by hand is no longer chosen automatically."""
    from firm.recipes.presets import recipe
    from firm.recipes.recipe import parse_settings

    changes = parse_settings(settings or [])
    left = [name for name in recipe(preset).automatic if not any(_concerns(path, BY_HAND[name]) for path in changes)]
    return recipe(preset, **({"automatic": left} | changes))


def _concerns(path: str, setting: str) -> bool:
    """Whether a change at the path sets the setting, a part of it, or all that it is a part of."""
    return f"{path}.".startswith(f"{setting}.") or f"{setting}.".startswith(f"{path}.")


def depth_of(bits: int | None) -> Depth | None:
    """The depth that was declared; None: it is to be found."""
    from firm.types import Depth

    return None if bits is None else Depth(2**bits - 1)


def loaded(
    data: str, side: int, *, depth: Depth | None = None, strict: bool = False, most: int = 0, tested: bool = True
) -> tuple[OneClass, list[str]]:
    """The images, every doubt about them said, and those of the doubts that cost a file; see `firm.data.load`."""
    from firm.data import load

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        images = load(data, side=side, depth=depth, strict=strict, most=most, tested=tested)
    doubts = [str(one.message) for one in caught]
    for doubt in doubts:
        say(f"warning: {doubt}")
    return images, [doubt for doubt in doubts if doubt.startswith("left out")]


def at_most(data: str, most: int, why: str) -> int:
    """So many good images are to be read; that others are left unread is said."""
    from firm.data import files_to_learn

    files = len(files_to_learn(data))
    if files > most:
        say(f"{files:,} good images: {most:,} of them, drawn evenly, are read; {why}")
    return most


def with_ignored(images: OneClass, data: str, ignore: Path | None) -> OneClass:
    """The images with the mask of what to ignore in them, if one is given; how much that is, is said."""
    from dataclasses import replace

    from firm.data import files_to_learn
    from firm.ignoring import read_ignored

    if ignore is None:
        return images
    mask = read_ignored(ignore, files_to_learn(data))
    say(f"ignored: {100 * float(mask.float().mean()):.1f} % of the pixels, by {named(ignore)}")
    return replace(images, ignored=mask)


def deciding(model: Path, device: str) -> Detector:
    """The detector, which must have thresholds to decide by."""
    from firm.calibration_file import beside
    from firm.detector import Detector

    detector = Detector.load(model, device=device)
    if detector.calibration is None:
        raise FirmError(f"{named(beside(model))} is missing; copy it again, or run firm calibrate with good images")
    return detector


def refuse_mixing(folder: Path | None, paths: list[Path]) -> None:
    """What is written among the images would replace them, or be taken for images the next time."""
    if folder is None:
        return
    home = folder.resolve()
    for path in paths:
        if path.resolve() in (home, *home.parents) if path.is_dir() else path.resolve().parent == home:
            raise FirmError(f"{named(folder)} lies among the images of {named(path)}; name a folder apart from them")
