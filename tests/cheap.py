"""A recipe of patches that is learnt in no time, for tests of what goes on around a training."""

from __future__ import annotations

from firm.recipes.presets import INSPECT
from firm.recipes.recipe import change

CHEAP = change(
    INSPECT,
    {"features": "pixels", "training.epochs": 4, "training.batch": 8, "encoder.width": 8, "size": 48,
     "encoder.head.hidden": (8,), "automatic": (), "memory.neighbourhood": 1, "tiling.size": 16, "tiling.stride": 16,
     "views.sizes": (16,)},
)  # fmt: skip
