"""Verbs that show what a training would see: masks, outliers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from firm.cli.options import AsJson, Data, Ignore, Output, Picture, Seed, Settings
from firm.cli.terminal import reporting, show
from firm.errors import SettingError, named

if TYPE_CHECKING:
    from firm.detector.read import Good
    from firm.recipes.recipe import Recipe

SOURCES = ("perlin-blend", "nsa", "cutpaste-union", "scratches", "spots", "pits")  # those a fit uses by default
SHOWN, DONORS = 12, 64  # good images made into outliers, and those they may take from


def masks(
    data: Data,
    out: Picture,
    settings: Settings = None,
    ignore: Ignore = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Draw where the object is in the good images.

    By --set conditioning.foreground.method=otsu and the like, else by the category's rule, else by one found on them.
    """
    from firm.images.alignment import Conditioning
    from firm.report.sheets import draw_masks

    recipe, good = _tuned(data, out, settings, ignore)
    rule, images, name = recipe.conditioning.foreground, good.data.train, good.data.name
    conditioned = Conditioning(foreground=rule)(images, good.data.ignored)
    draw_masks(images, conditioned.foreground, rule, out, name, conditioned.ignored)
    share = float(conditioned.foreground.float().mean())
    show(
        {"picture": str(out), "rule": asdict(rule), "foreground": share, "images": len(images)},
        f"{name}: {rule}, {100 * share:.1f} % of the pixels of {len(images)} good images\nsee {named(out)}",
        as_json,
        good.left_out,
    )


def outliers(
    data: Data,
    out: Picture,
    source: Annotated[
        list[str] | None, Option(help=f"A source of outliers; may be repeated. By default {', '.join(SOURCES)}.")
    ] = None,
    settings: Settings = None,
    ignore: Ignore = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Draw synthetic defects on the good images, as a training would see them.

    --set conditioning.... changes illumination, alignment and foreground.
    """
    import torch

    from firm.outliers.registry import OUTLIERS, Sia, make_outliers, stream_name
    from firm.report.sheets import draw_outliers
    from firm.runtime.random import stream
    from firm.types import Scene

    sources = dict.fromkeys(source or SOURCES)
    for name in sources:
        if name not in OUTLIERS:
            raise SettingError(f"no source of outliers {name!r}; use one of {', '.join(OUTLIERS)}")
    recipe, good = _tuned(data, out, settings, ignore)
    ready = recipe.conditioning(good.data.train[:DONORS], good.data.ignored)
    ready = ready.completed(ready.typical())
    shown = torch.arange(len(ready.images[:SHOWN]))
    originals = ready.images[shown]
    scene = Scene(ready.foreground, ready.images, ready.foreground, ready.hidden())[shown]
    table = OUTLIERS | ({"sia": recipe.outliers} if isinstance(recipe.outliers, Sia) else {})  # it has a folder
    made = {
        name: make_outliers(table[name], originals, rng=stream(seed, "sheet", stream_name(name)), scene=scene)
        for name in sources
    }
    draw_outliers(originals, made, out, good.data.name)
    text = f"{', '.join(made)} on {good.data.name}\nsee {named(out)}"
    show({"picture": str(out), "sources": list(made)}, text, as_json, good.left_out)


def check_picture(out: Path) -> None:
    """Refuse what cannot be written as a picture before the long work begins."""
    if out.suffix.lower() != ".png" or out.is_dir():
        raise SettingError(f"{named(out)} is not the name of a picture; give --out a file such as sheet.png")


def _tuned(data: str, out: Path, settings: list[str] | None, ignore: Path | None) -> tuple[Recipe, Good]:
    """The recipe with the foreground rule that `firm fit` would use, and the good images at its size."""
    from firm.data.registry import shows_parts
    from firm.detector.fit import audit, split_good
    from firm.detector.read import Options, read_good
    from firm.detector.tune import choose
    from firm.networks.weights import WAVELETS
    from firm.recipes.presets import recipe_of, usual
    from firm.recipes.recipe import change
    from firm.runtime.files import check_writable

    check_picture(out)
    check_writable(out.parent)
    by_default = "wavelets" if usual().pretrained.name == WAVELETS else "adapted"
    recipe = recipe_of(by_default if shows_parts(data) else "patches", settings)
    automatic = [name for name in recipe.automatic if name == "foreground"]
    with reporting() as listener:
        good = read_good(data, change(recipe, {"automatic": automatic}), Options(ignored=ignore), listener)
        split = split_good(audit(good, listener)[0], listener)  # a fit finds the rule on the images to learn from
    return choose(good.recipe, split.learn, split.parts, seed=0).recipe, good
