"""The presets: `paper` is the text, `authors` their code where it differs, `fast` ours for a CPU."""

from __future__ import annotations

from firm.colour import Jitter
from firm.encoder import Encoder, Head
from firm.outliers import CutPaste
from firm.recipes.recipe import Recipe, change
from firm.scores import Knn, Scoring
from firm.training import Training
from firm.types import FirmError

PAPER = Recipe(training=Training(precision="float32"))

AUTHORS = change(
    PAPER,
    {
        "encoder.head": Head(hidden=(1024,) * 7, out=128, last_norm=True),
        "encoder.norm_momentum": 0.9,
        "training.layout": "pairwise",  # of FIRM and NT-Xent; their SupCon and Rot-SupCon are `concat`
        "training.schedule": "one-cycle",
    },
)

FAST = Recipe(
    encoder=Encoder(width=16, stem="3x3/2", head=Head(hidden=(512,), out=128)),
    training=Training(epochs=10, lr=0.05, warmup=0.05),
    score=Scoring(by=Knn(k=5)),
)

# whole images of parts: synthetic defects instead of rotations, and only the changes a camera makes
PARTS = change(
    FAST,
    {
        "outliers": CutPaste(variant="union", per_inlier=1),
        "views.crop": (0.8, 1.0),
        "views.jitter": Jitter(brightness=0.1, contrast=0.1, saturation=0.1, hue=0.02),
        "views.blur": 0.0,
        "training.epochs": 40,
        "zoom": 1.0,
        "normalise": "inliers",
        "score": Scoring(by=Knn(k=1)),
    },
)

PRESETS = {"paper": PAPER, "authors": AUTHORS, "fast": FAST, "parts": PARTS}


def recipe(preset: str, **changes: object) -> Recipe:
    """A preset by name, changed by path: `recipe("fast", **{"training.epochs": 20})`."""
    if preset not in PRESETS:
        raise FirmError(f"no preset {preset!r}; use one of {', '.join(PRESETS)}")
    return change(PRESETS[preset], changes)
