"""Verbs that show what a training would be given: masks, outliers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firm.cli.inputs import loaded, recipe_of, with_ignored
from firm.cli.options import AsJson, Data, Ignore, Picture, Seed, Settings
from firm.cli.terminal import show
from firm.errors import FirmError

if TYPE_CHECKING:
    from firm.recipes.recipe import Recipe
    from firm.types import OneClass

SOURCES = ("donor", "nsa", "cutpaste-union", "strokes", "shades", "pits")  # those a fit learns from unasked
SHOWN, DONORS = 12, 64  # good images made into outliers, and those they may take from


def masks(data: Data, out: Picture, settings: Settings = None, ignore: Ignore = None, as_json: AsJson = False) -> None:
    """Draw where the object is in the good images.

    By --set conditioning.foreground.method=otsu and the like, else by the category's rule, else by one found on them.
    """
    from firm.choosing import describe
    from firm.conditioning import Conditioning
    from firm.report.masks import draw_masks

    _check(out)
    recipe, images, left_out = _settled(data, settings, ignore)
    rule = recipe.conditioning.foreground
    ready = Conditioning(foreground=rule)(images.train, images.ignored)
    found = ready.foreground
    draw_masks(images.train, found, rule, out, images.name, ready.ignored)
    part = float(found.float().mean())
    show(
        {"picture": str(out), "rule": asdict(rule), "foreground": part, "images": len(found)},
        f"{images.name}: {describe(rule)}, {100 * part:.1f} % of the pixels of {len(found)} good images\nlook at {out}",
        as_json,
    )
    if left_out:
        raise typer.Exit(1)


def outliers(
    data: Data,
    out: Picture,
    source: Annotated[
        list[str] | None, typer.Option(help=f"A source of outliers; may be repeated. Else {', '.join(SOURCES)}.")
    ] = None,
    settings: Settings = None,
    ignore: Ignore = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Draw synthetic defects on the good images.

    A person then sees what a training would learn from: --set conditioning changes light, pose and foreground.
    """
    import torch

    from firm.outliers import OUTLIERS
    from firm.outliers.sparing import spared
    from firm.report.contact import draw_contact
    from firm.streams import stream
    from firm.types import Scene

    _check(out)
    sources = dict.fromkeys(source or SOURCES)
    for name in sources:
        if name not in OUTLIERS:
            raise FirmError(f"no source of outliers {name!r}; use one of {', '.join(OUTLIERS)}")
    recipe, images, left_out = _settled(data, settings, ignore)
    ready = recipe.conditioning(images.train[:DONORS], images.ignored)
    ready = ready.completed(ready.usual())
    shown = torch.arange(len(ready.images[:SHOWN]))
    originals, scene = ready.images[shown], Scene.among(ready.images, ready.foreground, ready.hidden(), shown)
    made = {name: spared(OUTLIERS[name], originals, rng=stream(seed, "sheet", name), scene=scene) for name in sources}
    out.parent.mkdir(parents=True, exist_ok=True)
    draw_contact(originals, made, out, images.name)
    show({"picture": str(out), "sources": list(made)}, f"{', '.join(made)} on {images.name}\nlook at {out}", as_json)
    if left_out:
        raise typer.Exit(1)


def _check(out: Path) -> None:
    if out.suffix.lower() != ".png" or out.is_dir():
        raise FirmError(f"{out} is not the name of a picture; give --out a file such as sheet.png")


def _settled(data: str, settings: list[str] | None, ignore: Path | None) -> tuple[Recipe, OneClass, list[str]]:
    """The recipe with its foreground rule, the images at its size, and what had to be left out."""
    from firm.choosing import choose
    from firm.fitting import side_for

    recipe = recipe_of("patches", settings)
    images, left_out = loaded(data, side_for(recipe))
    images = with_ignored(images, data, ignore)
    return choose(recipe, images, seed=0), images, left_out
