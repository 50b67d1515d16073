"""The industrial tables as values: objectives, outlier sources and floors on patches, and the curve over CPU time."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field

from firm.bank import Memory
from firm.conditioning import Conditioning
from firm.data.industrial import PUBLISHED
from firm.outliers import KINDS, Donor, Mixed
from firm.recipes.presets import ADAPTED, INSPECT, PATCHES, WAVES, WHOLE
from firm.recipes.recipe import Recipe, change, digest, sparse
from firm.types import FirmError

SCREW, TILE = "mvtec:screw", "magnetic_tile"
PARTS = ("drawn:plate", "drawn:weave", "drawn:label")
SCALES = ("smoke", "short", "paper")
STEPS = {"smoke": 20, "short": 600}  # of a reduced training, about two CPU minutes
MVTEC = tuple(f"mvtec:{name}" for name in PUBLISHED["mvtec"].categories)


@dataclass(frozen=True, kw_only=True)
class PatchExperiment:
    """One training on one product with one seed, and how it is looked at; all of it is in its name."""

    data: str
    row: str
    recipe: Recipe
    seed: int
    steps: int = 0  # of the training; 0: as many epochs as the recipe says
    probes: int = 1  # evenly spaced over the training, the last one at its end
    side: int = 256
    looks: dict[str, dict[str, object]] = field(default_factory=lambda: {"": {}})  # ways of scoring, on one training
    proof: bool = False  # some good images are kept back: synthetic defects on them are looked for, or they are judged

    @property
    def name(self) -> str:
        looked = {name: sparse(getattr(self.recipe, name)) for name in ("tiling", "memory", "features", "automatic")}
        text = json.dumps([looked, self.looks], sort_keys=True)
        further = {"data": self.data, "seed": self.seed, "steps": self.steps, "probes": self.probes, "side": self.side}
        further |= {"proof": True} if self.proof else {}
        trained = digest(self.recipe, **further, looked=hashlib.sha256(text.encode()).hexdigest())
        return f"{_readable(self.data)}-{_readable(self.row)}-{self.seed}-{trained}"


@dataclass(frozen=True, kw_only=True)
class PatchTable:
    """Rows of settings on some products."""

    title: str
    base: Recipe
    rows: dict[str, dict[str, object]]
    data: tuple[str, ...]
    special: dict[str, dict[str, dict[str, object]]] = field(default_factory=dict)  # row -> product -> settings
    looks: dict[str, dict[str, dict[str, object]]] = field(default_factory=dict)  # row -> way of scoring -> settings
    longer: dict[str, int] = field(default_factory=dict)  # row -> how often the usual steps of a scale
    unlooked: dict[str, tuple[str, ...]] = field(default_factory=dict)  # product -> ways of scoring that are left out
    proof: bool = False  # see PatchExperiment


# every row in one light, pose and reach: those the good images choose; outliers as the paper has them, or of six kinds
REDUCED = change(INSPECT, {"outliers": Donor(), "views.altered": 0.05, "training.epochs": 60, "features": "encoder"})
SIX_KINDS: dict[str, object] = {"outliers": Mixed(sources=KINDS, per_inlier=1), "views.altered": 0.3}
BOTH: dict[str, dict[str, object]] = {"": {}, "+ pixels": {"features": "both"}}  # the second as `inspect` compares
OBJECTIVES = PatchTable(
    title="Objectives, outlier sources and floors on patches",
    base=REDUCED,
    rows={
        "pixels": {"features": "pixels", "training.epochs": 0},
        "untrained": {"training.epochs": 0},
        "firm": {},
        "ntxent": {"positives": "ntxent"},
        "supcon": {"positives": "supcon"},
        "firm, nsa": {"outliers": "nsa"},
        "firm, cutpaste": {"outliers": "cutpaste-union", "outliers.per_inlier": 1},
        "firm, six kinds": SIX_KINDS,
        "firm, six kinds, three times as long": SIX_KINDS,
    },
    data=(SCREW, TILE, *PARTS),
    special={"firm, nsa": {SCREW: {"outliers": "nsa-screw"}}},
    looks=dict.fromkeys(("firm", "firm, six kinds", "firm, six kinds, three times as long"), BOTH),
    longer={"firm, six kinds, three times as long": 3},
)
# what the preset `inspect` teaches, chosen by the synthetic columns
TAUGHT = PatchTable(
    title="What pays for an encoder learnt from scratch",
    base=REDUCED,
    rows={
        "pixels": {"features": "pixels", "training.epochs": 0},
        "donors": {},
        "donors, three times as long": {},
        "six kinds, 5 % of a patch": SIX_KINDS | {"views.altered": 0.05},
        "six kinds": SIX_KINDS,
        "six kinds, three times as long": SIX_KINDS,
    },
    data=(SCREW, "drawn:weave"),
    longer=dict.fromkeys(("donors, three times as long", "six kinds, three times as long"), 3),
    proof=True,
)
LOOKS = PatchTable(
    title="Ways of looking at one trained encoder",
    base=REDUCED,
    rows={"firm": {}},
    data=(SCREW, TILE, "drawn:plate"),
    looks={
        "firm": {
            "stride 16": {},
            "stride 16, resized as the paper": {"tiling.register": "resize"},
            "stride 16, dense": {"tiling.dense": True},
            "stride 8": {"tiling.stride": 8, "memory.reach": 2},
            "stride 8, dense": {"tiling.stride": 8, "memory.reach": 2, "tiling.dense": True},
            "stride 16, everywhere": {"memory.reach": -1},
            "stride 16, everywhere, coreset 10 %": {"memory.reach": -1, "memory.keep": 0.1, "memory.choose": "coreset"},
            "stride 16, everywhere, random 10 %": {"memory.reach": -1, "memory.keep": 0.1},
            "stride 16, not standardised": {"memory.standardise": False},
            "stride 16, background counts": {"tiling.object": 0.0},
            "stride 16, five worst": {"tiling.worst": 5},
        }
    },
    # 600,000 patches take hours to compare; there all are compared everywhere anyway, and what is kept is a coreset
    unlooked={TILE: ("stride 8", "stride 8, dense", "stride 16, everywhere", "stride 16, everywhere, random 10 %")},
)
CURVE = PatchTable(
    title="Accuracy over CPU time",
    base=REDUCED,
    rows={"fast": {}, "paper-like": {}},
    data=(SCREW,),
    looks={"fast": {"": {}, "stride 8 + pixels": {"tiling.stride": 8, "memory.reach": 2, "features": "both"}}},
)
# what would be taught is fixed here, for it changes nothing and no result is to be made anew when a preset changes
UNTAUGHT: dict[str, object] = {
    "features": "backbone",
    "training.epochs": 0,
    "training.temperature": 0.2,
    "outliers": "mixed",
    "pretrained.noise": 0.0,
}
# all that is ours left out: one light and pose as they come, zeros at the border, every cell against a coreset of all
PLAIN: dict[str, object] = UNTAUGHT | {
    "pretrained.margin": 0,
    "tiling.object": 0.0,
    "memory": Memory(keep=0.1, choose="coreset", reweight=9),
    "conditioning": Conditioning(),
    "automatic": (),
}
UNADAPTED: dict[str, object] = UNTAUGHT | {"automatic": INSPECT.automatic}
SCORED: dict[str, dict[str, object]] = {"": {"features": "encoder"}, "+ unadapted": {}}
PRETRAINED = PatchTable(
    title="FIRM on pretrained features",
    base=ADAPTED,
    rows={
        "patchcore": PLAIN,
        "patchcore, coreset 2 %": PLAIN | {"memory.keep": 0.02},
        "unadapted": UNADAPTED,
        **{name: {"positives": name} for name in ("firm", "ntxent", "supcon")},
    },
    data=(SCREW, TILE, "drawn:plate"),
    special={"patchcore": {TILE: {"memory.keep": 0.005}}},  # a tenth of 731,136 cells takes too long to choose
    looks=dict.fromkeys(("firm", "ntxent", "supcon"), SCORED),
)
# the gate: plain pixels of the same patches in the same pose, in the light of wavelets and in the one that plain pixels
# choose for themselves (table `patches`), which wavelets are then given, too
EVENED = {SCREW: "median", TILE: "local", **dict.fromkeys(PARTS, "local")}
EVENLY: dict[str, dict[str, object]] = {data: {"conditioning.light": light} for data, light in EVENED.items()}
UNWAVED: dict[str, object] = {**UNADAPTED, "automatic": ("foreground", "align", "reach")}
WAVELETS = PatchTable(
    title="FIRM on wavelets: nothing pretrained",
    base=WAVES,
    rows={
        "pixels": UNWAVED | {"features": "pixels"},
        "unadapted": UNWAVED,
        **{name: {"positives": name} for name in ("firm", "ntxent", "supcon")},
        "pixels, evened light": UNWAVED | {"features": "pixels"},
        "firm, evened light": {},
    },
    data=(SCREW, TILE, *PARTS),
    special={"pixels, evened light": EVENLY, "firm, evened light": EVENLY},
    looks=dict.fromkeys(("firm", "ntxent", "supcon", "firm, evened light"), SCORED),
)
# each row changes one thing of the first; settings are chosen by the synthetic columns, never by the others
PRETRAINED_ABLATION = PatchTable(
    title="What pays on pretrained features compared before the head",
    base=change(ADAPTED, {"automatic": INSPECT.automatic, "pretrained.noise": 0.0}),  # compared before the head
    rows={
        "as it is": {},
        "behind the head": {"features": "projection+backbone"},
        "behind the head, noise 0.3": {"features": "projection+backbone", "pretrained.noise": 0.3},
        "before and behind the head": {"features": "encoder+projection+backbone"},
        "unadapted": UNADAPTED,
        "stages 4": {"pretrained.stages": (4,)},
        "stages 3 4 5": {"pretrained.stages": (3, 4, 5)},
        "defects drawn by cells": {"pretrained.evenly": "cells"},
        "stages 4, drawn by cells": {"pretrained.stages": (4,), "pretrained.evenly": "cells"},
        "hard defects first": {"pretrained.hard": 1.0},
        "adaptor 64 -> 32": {"pretrained.hidden": (64,), "pretrained.out": 32},
        "adaptor 512 -> 128": {"pretrained.hidden": (512,), "pretrained.out": 128},
        "donor only": {"outliers": Mixed(sources=("donor",))},
        "nsa only": {"outliers": Mixed(sources=("nsa",))},
        "cutpaste only": {"outliers": Mixed(sources=("cutpaste-union",))},
        "donor, nsa and cutpaste": {"outliers": Mixed()},
        "two versions": {"pretrained.versions": 2},
        "patches of 5 cells": {"pretrained.pool": 5},
        "patches of 7 cells": {"pretrained.pool": 7},
        "context of 7 cells": {"pretrained.context": 7},
        "context of 11 cells": {"pretrained.context": 11},
        "context of 7 cells, drawn by cells": {"pretrained.context": 7, "pretrained.evenly": "cells"},
        "temperature 0.2": {"training.temperature": 0.2},
        "noise 0.3": {"pretrained.noise": 0.3},
        "3 epochs": {"training.epochs": 3},
        "30 epochs": {"training.epochs": 30},
    },
    data=(SCREW, TILE, "drawn:plate"),
    proof=True,
)
# fitted as `firm fit` does it: a part of the good images is held out for the thresholds. Some more are KEPT_BACK and
# judged: those of a test may come from another day, these do not
KEPT_BACK = ", parts kept back"
PROMISED = {"pretrained": ADAPTED, "wavelets": WAVES, "from scratch": INSPECT}
PROMISES = PatchTable(
    title="Promised and realised false calls",
    base=ADAPTED,
    rows={name + judged: {} for judged in ("", KEPT_BACK) for name in PROMISED},
    data=(SCREW, TILE, *PARTS),
)
MAIN = PatchTable(title="AUROC results on MVTec-AD", base=PATCHES, rows={"firm": {}}, data=MVTEC)
ABLATION = PatchTable(
    title="Ablation study on MVTec-AD",
    base=WHOLE,
    rows={name: {"positives": name} for name in ("ntxent", "supcon", "firm")},
    data=MVTEC,
    special={
        row: {data: {"outliers": f"nsa-{data.partition(':')[2]}"} for data in MVTEC}
        for row in ("ntxent", "supcon", "firm")
    },
)
PATCH_TABLES = {
    "patches": OBJECTIVES,
    "patches-ablation": TAUGHT,
    "looks": LOOKS,
    "patch-curve": CURVE,
    "pretrained": PRETRAINED,
    "pretrained-ablation": PRETRAINED_ABLATION,
    "wavelets": WAVELETS,
    "promises": PROMISES,
    "mvtec": MAIN,
    "mvtec-ablation": ABLATION,
}


def patch_plan(table: PatchTable, scale: str, seeds: list[int]) -> list[PatchExperiment]:
    """The experiments of a table, seed by seed, so that an interrupted plan still compares like with like."""
    return [
        patch_experiment(table, data, row, scale, seed) for seed in seeds for data in table.data for row in table.rows
    ]


def patch_experiment(table: PatchTable, data: str, row: str, scale: str, seed: int) -> PatchExperiment:
    """One cell at a scale; only `paper` is the paper's protocol, the others are reduced and called so."""
    if scale not in SCALES:
        raise FirmError(f"no scale {scale!r}; use one of {', '.join(SCALES)}")
    changes = table.rows[row] | table.special.get(row, {}).get(data, {})
    side = 128 if data.startswith("drawn:") else 256
    unlooked = table.unlooked.get(data, ())
    looks = {name: way for name, way in table.looks.get(row, {"": {}}).items() if name not in unlooked}
    if table is CURVE:
        return _curve(data, row, changes, scale, seed)
    if table is PROMISES:
        recipe = PROMISED[row.removesuffix(KEPT_BACK)]
        recipe = change(recipe, {"training.epochs": 1}) if scale == "smoke" else recipe
        kept, looks = row.endswith(KEPT_BACK), {"promised": dict[str, object]()}
        return PatchExperiment(data=data, row=row, recipe=recipe, seed=seed, side=side, looks=looks, proof=kept)
    recipe = change(table.base, changes)
    if table.base.pretrained.name:  # minutes as it is
        recipe = change(recipe, {"training.epochs": 1}) if scale == "smoke" and recipe.training.epochs else recipe
        return PatchExperiment(data=data, row=row, recipe=recipe, seed=seed, side=side, looks=looks, proof=table.proof)
    if scale == "paper":
        recipe = change(recipe, {"training.epochs": recipe.training.epochs * table.longer.get(row, 1)})
        return PatchExperiment(data=data, row=row, recipe=recipe, seed=seed, probes=10, looks=looks, proof=table.proof)
    if table.base in (PATCHES, WHOLE):  # the paper's network would take days
        recipe = change(recipe, {"encoder": INSPECT.encoder, "training.lr": 0.1, "training.reuse": 16})
    steps = STEPS[scale] * table.longer.get(row, 1) if recipe.training.epochs else 0
    return PatchExperiment(
        data=data, row=row, recipe=recipe, seed=seed, steps=steps, side=side, looks=looks, proof=table.proof
    )


def _curve(data: str, row: str, changes: dict[str, object], scale: str, seed: int) -> PatchExperiment:
    """Two hours of one core: the fast recipe to its end, the paper's network as far as it gets."""
    recipe, steps, probes = change(REDUCED, changes), 40_000, 16
    if row == "paper-like":
        wide = {"encoder": PATCHES.encoder, "training": PATCHES.training, "training.reuse": 16, "views": PATCHES.views}
        recipe, steps, probes = change(recipe, wide), 2_400, 4  # a look costs as much as many steps
    steps = steps if scale == "short" else STEPS["smoke"] // 2
    looks = CURVE.looks.get(row, {"": {}})
    return PatchExperiment(data=data, row=row, recipe=recipe, seed=seed, steps=steps, probes=probes, looks=looks)


def _readable(name: str) -> str:
    return re.sub(r"[^\w.]+", "-", name).strip("-.")
