"""Shapes in signatures are checked while the tests run; one thread, so that equal means equal on any machine."""

from __future__ import annotations

import torch
from hypothesis import settings
from jaxtyping import install_import_hook

torch.set_num_threads(1)
settings.register_profile("firm", deadline=None)  # tests must pass on a loaded machine
settings.load_profile("firm")

CHECKED = [
    f"firm.{name}"
    for name in (
        "bank",
        "batching",
        "calibration",
        "choosing",
        "colour",
        "conditioning",
        "coreset",
        "encoder",
        "evaluate",
        "foreground",
        "ignoring",
        "images",
        "localisation",
        "localiser",
        "memory",
        "metrics",
        "objective",
        "outliers",
        "replay",
        "scores",
        "search",
        "tiling",
        "training",
        "views",
    )
]
install_import_hook(CHECKED, "shape_check.checked")
