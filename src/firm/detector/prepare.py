"""Recipe x images -> features of good images and of synthetic defects, embedded once -> the task of an adaptor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from firm.adaptor import Pretrained, cell_features, check_cells
from firm.backbones import FACTS, Backbone, load_backbone
from firm.cells import Cells, CellTask, Choosable, Spare, changes, good_groups, hard_first, spread
from firm.colour import Jitter, jittered
from firm.conditioning import Conditioned
from firm.fitting import conditioned, preprocessing_of, task_of
from firm.holdout import split
from firm.images import Preprocessing, fingerprint
from firm.localiser import object_part
from firm.outliers.sparing import spared
from firm.recipes.recipe import Recipe, to_json
from firm.sisters import sisters
from firm.store import cost, stored
from firm.streams import stream
from firm.tiling import Grid
from firm.training import Task
from firm.types import FirmError, OneClass, Scene
from firm.views import PatchPairs

CHUNK = 8  # images embedded at once
DRAWING = ("hard", "evenly", "noise")  # settings that decide what is drawn of the features, and not what they are
SPARED, MOST_SPARED = 0.1, 60  # part of the good images, and images, that are not learnt from but tried on
FEWEST = 40  # good images of which some can be spared
EXTRA = 2  # numbers stored behind the features of an outlier's cell: how much of it is altered, and its group

OnImages = Callable[[int, int, str], None]  # done, in all, what


@dataclass(frozen=True)
class Embedder:
    """Good images in standard light and pose, and the backbone that describes them."""

    recipe: Recipe
    grid: Grid
    views: PatchPairs
    backbone: Backbone
    ready: Conditioned
    preprocessing: Preprocessing
    seed: int
    spare: Int[Tensor, " s"] | None = None  # good images that are not learnt from

    @property
    def settings(self) -> Pretrained:
        return self.recipe.pretrained

    @property
    def good(self) -> int:
        return len(self.ready.images)

    @cached_property
    def hidden(self) -> Bool[Tensor, "n h w"] | None:
        return self.ready.hidden()

    def key(self, *more: object) -> str:
        """Names the features by all that decides them."""
        settings = {**asdict(self.settings), "hidden": (), "out": 0, "name": ""}
        for name in DRAWING if settings["context"] else (*DRAWING, "context"):
            del settings[name]
        text = [fingerprint(self.ready.images), self.backbone.digest, settings, self.grid.stride, *more]
        if self.ready.ignored is not None:
            text.append(fingerprint(self.ready.ignored))
        return hashlib.sha256(json.dumps(text, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def features(self, images: UInt8[Tensor, "n k h w"]) -> Float[Tensor, "n r c d"]:
        return cell_features(self.backbone, self.settings, self.grid, images)

    def versions(self, begin: int, end: int) -> Float[Tensor, "n r c d"]:
        """Rows of the store of good images: all as they are, then all again in another light."""
        rows = torch.arange(begin, end)
        images = self.ready.images[rows % self.good]
        for place in (rows >= self.good).nonzero().squeeze(1).tolist():
            images[place] = self._varied(images[place], int(rows[place]))
        return self.features(images)

    def _varied(self, image: UInt8[Tensor, "k h w"], row: int) -> UInt8[Tensor, "k h w"]:
        rng = stream(self.seed, "version", row)
        part = self.views.light
        change = Jitter(brightness=part, contrast=part, saturation=0.0, hue=0.0)
        varied = jittered(image[None].float() / 255, change, rng=rng)[0]
        return (varied.flip(self.mirrors(row)) * 255).round().clamp(0, 255).to(torch.uint8)

    def mirrors(self, row: int) -> list[int]:
        """The axes along which a row of the store of good images is mirrored, its cells as well as its pixels."""
        if row < self.good or not self.settings.flip:
            return []
        drawn = torch.rand(2, generator=stream(self.seed, "mirrored", row)) < 0.5
        return [axis for axis, mirror in zip((-2, -1), drawn.tolist(), strict=True) if mirror]

    def shown(self) -> Float[Tensor, "n r c"]:
        """How much of every cell is object, for each row of the store of good images."""
        part = object_part(self.grid, self.ready.foreground)
        rows = range(self.good * self.settings.versions)
        return torch.stack([part[row % self.good].flip(self.mirrors(row)) for row in rows])

    def drawn(self, copies: int) -> Bool[Tensor, " m"] | None:
        """Which rows of so many copies of every good image are learnt from; None: all."""
        if self.spare is None:
            return None
        return ~torch.isin(torch.arange(self.good * copies) % self.good, self.spare)

    def outliers(self, begin: int, end: int) -> Float[Tensor, "n r c e"]:
        """Rows of the store of outliers: the first of every good image, then the second of every one, ..."""
        rows = torch.arange(begin, end)
        which, copy = rows % self.good, rows // self.good
        scene = Scene.among(self.ready.images, self.ready.foreground, self.hidden, which)
        rng = stream(self.seed, "outliers", begin)
        made = spared(self.recipe.outliers, self.ready.images[which], rng=rng, copy=copy, scene=scene)
        if made.where is None:
            raise FirmError("these outliers change whole images; give local ones, such as outliers=mixed or donor")
        altered = object_part(self.grid, made.where)
        group = made.group[:, None, None].expand_as(altered)
        return torch.cat([self.features(made.images), torch.stack([altered, group], dim=3)], dim=3)


def embedder_of(recipe: Recipe, data: OneClass, *, seed: int, device: torch.device | str = "cpu") -> Embedder:
    """Load the backbone and condition the images; what does not fit together is said here."""
    if not isinstance(recipe.tiling, Grid) or not isinstance(recipe.views, PatchPairs):
        raise FirmError("pretrained features describe patches; start from the preset adapted")
    backbone = load_backbone(recipe.pretrained.name, deepest=deepest(recipe.pretrained)).to(device)
    preprocessing = preprocessing_of(recipe, data)
    check_cells(recipe.pretrained, recipe.tiling, preprocessing.size)
    ready = conditioned(replace(recipe, size=preprocessing.size), data)[1]
    assert ready is not None
    spare = spare_images(recipe, data, seed=seed)
    return Embedder(recipe, recipe.tiling, recipe.views, backbone, ready, preprocessing, seed, spare)


def spare_images(recipe: Recipe, data: OneClass, *, seed: int) -> Int[Tensor, " s"] | None:
    """Good images to try on what is learnt from the others, if a setting is to be chosen by that and they are many.

    Where places count there is nothing to choose (`preferring`), and all are learnt from.
    """
    images, chosen = len(data.train), "features" in recipe.automatic and recipe.memory.reach < 0
    if not chosen or images < FEWEST or not recipe.training.epochs:
        return None
    return split(sisters(data.name, data.train), min(SPARED, MOST_SPARED / images), seed=seed)[1]


def deepest(settings: Pretrained) -> int:
    known = FACTS[settings.name].stages if settings.name in FACTS else (3, 4)
    return max(settings.stages or known)


def cell_task(embedder: Embedder, *, folder: Path | None, on_images: OnImages | None = None) -> CellTask:
    """Embed what is to be learnt from; with a folder it is kept there and an interrupted embedding goes on."""
    recipe, settings = embedder.recipe, embedder.settings
    rows = embedder.good * settings.versions
    key = embedder.key(*_varied_by(embedder)) if settings.versions > 1 else embedder.key()
    good = stored(folder, "good", key, rows, embedder.versions, chunk=CHUNK, on_rows=_counted(on_images, rows, "good"))
    per_inlier = recipe.outliers.per_inlier if recipe.training.epochs else 0
    rows = embedder.good * per_inlier
    made_by = embedder.key(embedder.seed, to_json(recipe.outliers))
    bad = stored(
        folder, "outliers", made_by, rows, embedder.outliers, chunk=CHUNK,
        on_rows=_counted(on_images, rows, "synthetic defects"),
    ) if rows else good[:0]  # fmt: skip
    shown = embedder.shown()
    choosable = replace(Choosable.at_least(shown, embedder.views.fore), drawn=embedder.drawn(settings.versions))
    return CellTask(
        Cells(good, choosable, good_groups(len(good))),
        _outlier_cells(bad, good, embedder) if rows else Cells(bad, Choosable(shown[:0] > 0), good_groups(0)),
        embedder.backbone,
        settings,
        embedder.preprocessing,
        recipe.positives,
        embedder.views.over,
        recipe.training,
        embedder.seed,
        "-".join([key, made_by, *([] if embedder.spare is None else [fingerprint(embedder.spare)])]),
        _spare(embedder, bad),
    )


def _spare(embedder: Embedder, bad: Float[Tensor, "m r c e"]) -> Spare | None:
    if embedder.spare is None:
        return None
    return Spare(embedder.spare, embedder.ready.foreground, embedder.hidden, bad[..., -EXTRA].float())


def teaching(
    recipe: Recipe,
    data: OneClass,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    folder: Path | None = None,
    on_images: OnImages | None = None,
) -> Task | CellTask:
    """What the training of this recipe on these images needs: images, or the features of a pretrained backbone."""
    if not recipe.pretrained.name:
        return task_of(recipe, data, seed=seed)
    return cell_task(embedder_of(recipe, data, seed=seed, device=device), folder=folder, on_images=on_images)


def disk_costs(recipe: Recipe, images: int, row: tuple[int, int, int]) -> list[str]:
    """What the features of so many good images, each a row of cells, and of defects on them will take on disk."""
    told = [f"good {cost(images * recipe.pretrained.versions, row)}"]
    if recipe.training.epochs:
        told.append(f"outlier {cost(images * recipe.outliers.per_inlier, (*row[:2], row[2] + EXTRA))}")
    return told


def _varied_by(embedder: Embedder) -> list[object]:
    """What decides the further versions of good images beside the settings."""
    mirrored = [embedder.mirrors(row) for row in range(embedder.good * embedder.settings.versions)]
    return [embedder.views.light, embedder.seed, *([mirrored] if embedder.settings.flip else [])]


def _outlier_cells(stored_rows: Float[Tensor, "m r c e"], good: Float[Tensor, "n r c d"], embedder: Embedder) -> Cells:
    part, group = stored_rows[..., -EXTRA].float(), stored_rows[:, 0, 0, -1].long()
    features, settings = stored_rows[..., :-EXTRA], embedder.settings
    drawn = embedder.drawn(len(part) // embedder.good)
    choosable = replace(Choosable.at_least(part, embedder.views.altered), evenly=settings.evenly, drawn=drawn)
    if settings.hard:
        change = changes(features, good[: embedder.good], spread(good)[1])
        choosable = replace(choosable, chance=hard_first(change, choosable.allowed, settings.hard))
    return Cells(features, choosable, group)


def _counted(on_images: OnImages | None, rows: int, what: str) -> Callable[[int], None] | None:
    if on_images is None:
        return None
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        on_images(done, rows, what)

    return count
