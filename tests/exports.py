"""Small detectors of the recipes that export, on drawn parts, fitted once for the session."""

from __future__ import annotations

from functools import cache

import torch

import drawings
from firm.detector.detector import Detector
from firm.recipes.presets import recipe
from firm.recipes.recipe import Recipe, change

SIDE = 96
CHEAP = {"training.epochs": 0, "size": SIDE, "automatic": [], "pretrained.name": "wavelets", "pretrained.hidden": [8]}
OTSU = {"conditioning.foreground.method": "otsu"}
PATCHES = {
    "within 2 cells": {},
    "anywhere, with surroundings": {
        "memory.neighbourhood": -1, "memory.sampling_ratio": 0.3, "tiling.surroundings": 0.4,
        "features": "projection+backbone", "tiling.top_patches": 3, "memory.k": 2,
    },
    "aligned": {**OTSU, "conditioning.align": True},
    "object, two neighbours": {**OTSU, "memory.k": 2, "conditioning.illumination": "median", "features": "encoder"},
    "pixels too": {"features": "encoder+pixels", "memory.neighbourhood": 1},
}  # fmt: skip
RECIPES: dict[str, Recipe] = {name: recipe("wavelets", **{**CHEAP, **own}) for name, own in PATCHES.items()}
RECIPES["pretrained"] = change(RECIPES["within 2 cells"], {"pretrained.name": "efficientnet-lite0"})
RECIPES["ignored pixels"] = RECIPES["within 2 cells"]
RECIPES["encoder of patches"] = recipe(
    "inspect",
    **{"training.epochs": 0, "training.batch": 8, "size": SIDE, "automatic": [], "encoder.width": 8},
)
WHOLE = {**CHEAP, "size": 32, "outliers": "rotations"}
RECIPES["whole images"] = recipe("semantic", **WHOLE)
RECIPES["whole images, turned"] = recipe(
    "semantic", **{**WHOLE, "score": "s_shift*", "zoom": 1.125, "features": "backbone"}
)
RECIPES["trained from scratch"] = recipe(
    "fast", **{"training.epochs": 0, "size": 32, "encoder.width": 8, "encoder.head.hidden": [8], "score": "kde"}
)
GOOD = drawings.screws(16, turned=True, light=0.2, side=SIDE).images
BAD = drawings.screws(6, turned=True, light=0.2, side=SIDE, seed=1, defect=True).images


@cache
def fitted(name: str) -> Detector:
    """The detector of a recipe, its thresholds among the scores of good images."""
    ignored = None
    if name == "ignored pixels":
        ignored = torch.zeros(SIDE, SIDE, dtype=torch.bool)
        ignored[:12, :20] = True
    return Detector.fit(GOOD, recipe=RECIPES[name], seed=0, holdout=0.25, calibration="split", ignored=ignored)
