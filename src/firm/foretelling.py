"""What a fit will take and has to work with, said before it begins."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from firm.adaptor import described
from firm.backbones import FACTS, load_backbone
from firm.bank import cost
from firm.batching import steps_per_epoch
from firm.cells import cell_steps
from firm.choosing import within
from firm.conditioning import Conditioning
from firm.embedding import disk_costs
from firm.encoder import Network
from firm.foreground import rule_for
from firm.holdout import split, wanted
from firm.images import Preprocessing, resize
from firm.localiser import MEANT, Looker, is_grey, kinds_of, remembering
from firm.plain import plain_cells
from firm.recipes.recipe import Recipe, to_json
from firm.sisters import sisters
from firm.streams import stream
from firm.tiling import Grid
from firm.types import FirmError, Focus, OneClass
from firm.views import PatchPairs

FORETOLD = 64  # good images in which patches are tried before a fit
MEMORY = 6.0  # GB a fit may take unless another amount is given
FEWEST = 20  # good images for which the memory must suffice
BASE = 700e6  # bytes of the libraries, the network and a step of training
PIXELS, FEATURES = 6, 3  # how often the pixels of an image, and the features of its patches, are held at the most


def foretell(
    recipe: Recipe,
    data: OneClass,
    *,
    holdout: float = 0.1,
    false_calls: float = 0.05,
    seed: int = 0,
    parts: Int[Tensor, " n"] | None = None,
) -> list[str]:
    """What a fit will take and has to work with, in sentences to be read before it; too few images are said at once.

    `parts` as in `Detector.fit`.
    """
    shown = sisters(data.name, data.train) if parts is None else parts
    learn, _ = split(shown, holdout, seed=seed, least=wanted(false_calls))
    told = [
        f"training: {len(learn)} good images, {recipe.training.epochs} epochs of {steps_of(recipe, len(learn))} steps"
    ]
    held = memory_of(recipe, data.train.shape[-1], len(data.train))
    told.append(f"memory: about {held:.1f} GB at the most")
    if isinstance(recipe.tiling, Grid):
        side = min(recipe.size or data.size, data.train.shape[-1])
        side -= side % recipe.tiling.stride if recipe.pretrained.name else 0  # as preprocessing_of
        told.append(_looks(recipe, recipe.tiling, side))
        small = resize(data.train[learn], side)
        numbers = numbers_of(recipe, recipe.tiling, grey=is_grey(small))
        if recipe.pretrained.name:
            seen = numbers["backbone"] * (2 if recipe.pretrained.context else 1)
            told += disk_costs(recipe, len(learn), (*recipe.tiling.shape(side, side), seen))
        told += _banks(recipe, recipe.tiling, small, numbers)
        if isinstance(recipe.views, PatchPairs) and not recipe.pretrained.name:
            told.append(_offered(recipe, recipe.views, replace(data, train=small), seed=seed))
    return told


def _looks(recipe: Recipe, grid: Grid, side: int) -> str:
    """What is compared, and what is learnt from beside the good images."""
    made = to_json(recipe.outliers)
    defects = ", ".join(made.get("sources", [made["kind"]])) if recipe.training.epochs else "none, nothing is trained"
    return f"patches of {grid.size} px every {grid.stride} px of {side} px; synthetic defects: {defects}"


def most_images(recipe: Recipe, side: int, gigabytes: float) -> int:
    """How many good images a fit within so much memory can learn from."""
    room = int((gigabytes * 1e9 - BASE) / _image_bytes(recipe, side))
    if room < FEWEST:
        least = (BASE + FEWEST * _image_bytes(recipe, side)) / 1e9
        raise FirmError(f"{gigabytes:g} GB of memory are too few to learn anything in; give {least:.1f} or more")
    return room


def memory_of(recipe: Recipe, side: int, images: int) -> float:
    """The gigabytes that a fit on so many good images holds at the most, about."""
    return (BASE + images * _image_bytes(recipe, side)) / 1e9


def _image_bytes(recipe: Recipe, side: int) -> float:
    pixels = PIXELS * 3 * side * side
    if not isinstance(recipe.tiling, Grid):
        return pixels
    worked = min(side, recipe.size or side)
    worked -= worked % recipe.tiling.stride if recipe.pretrained.name else 0
    rows, columns = recipe.tiling.shape(worked, worked)
    numbers = numbers_of(recipe, recipe.tiling, grey=False)
    held = sum(numbers[kind] for kind in kinds_of(recipe.features))
    return pixels + FEATURES * 4 * rows * columns * held


def steps_of(recipe: Recipe, images: int) -> int:
    """Of an epoch on so many good images."""
    if recipe.pretrained.name:
        return cell_steps(images * recipe.pretrained.versions, recipe.training.batch)
    settled = within(recipe, images) if recipe.automatic else recipe
    return steps_per_epoch(images, recipe.outliers.per_inlier, settled.training.batch)


def _banks(recipe: Recipe, grid: Grid, small: UInt8[Tensor, "n c h w"], numbers: dict[str, int]) -> list[str]:
    """The size of each bank of patches."""
    shape = grid.shape(*small.shape[-2:])
    told = []
    for kind in kinds_of(recipe.features):
        if kind == MEANT:
            told.append(f"{kind}: the mean of the good patches, {numbers[kind]} numbers")
            continue
        memory = remembering(recipe.memory, kind)
        told.append(f"{kind} {cost(len(small), *shape, memory.keys(torch.zeros(1, numbers[kind])).shape[1], memory)}")
    return told


def numbers_of(recipe: Recipe, grid: Grid, *, grey: bool) -> dict[str, int]:
    """How many numbers describe a patch: known of a backbone, and of an encoder told by a single patch."""
    kinds, settings = kinds_of(recipe.features), recipe.pretrained
    if settings.name:
        facts = FACTS.get(settings.name) or load_backbone(settings.name, deepest=1).facts
        projected = recipe.encoder.head.out
        patch = torch.zeros(1, 3, settings.pool * grid.stride, settings.pool * grid.stride, dtype=torch.uint8)
        plain = plain_cells(grid, settings.pool, patch, grey=grey).shape[-1]
        learnt = {"encoder": settings.out, "projection": projected}
        return learnt | {"backbone": described(settings, facts), "pixels": plain}
    with torch.device("meta"):
        network = Network(recipe.encoder)
    look = Looker(network.to_empty(device="cpu"), Preprocessing(grid.size), grid, kinds, grey)
    patch = torch.zeros(1, 3, grid.size, grid.size, dtype=torch.uint8)
    return {kind: features.shape[-1] for kind, features in look(patch).items()}


def _offered(recipe: Recipe, pairs: PatchPairs, data: OneClass, *, seed: int) -> str:
    """How many good images have a patch with enough of the object; a pose still to be chosen changes it little."""
    found = "foreground" in recipe.automatic
    rule = rule_for(data.name, data.train) if found else recipe.conditioning.foreground
    masks = Conditioning(foreground=rule)(data.train[:FORETOLD], data.ignored).foreground
    part = pairs.acceptance(Focus(masks, torch.zeros_like(masks)), rng=stream(seed, "acceptance"))
    enough = f"{100 * pairs.fore:g} % object (views.fore)"
    return f"patches: {100 * part:.0f} % of the good images offer one that is {enough}"
