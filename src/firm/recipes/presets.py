"""The presets: `paper` is the text, `authors` their code where it differs, `fast` ours for a CPU."""

from __future__ import annotations

from firm.adaptor import Pretrained
from firm.backbones import installed
from firm.bank import Memory
from firm.colour import Jitter
from firm.encoder import Encoder, Head
from firm.outliers import KINDS, CutPaste, Donor, Mixed
from firm.recipes.recipe import Recipe, change
from firm.scores import Knn, Scoring
from firm.tiling import Grid
from firm.training import Training
from firm.types import FirmError
from firm.views import PatchPairs, Shift

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

# the industrial branch as the paper has it (section 5): patches of good images against local synthetic defects
PATCHES = change(
    PAPER,
    {
        "outliers": Donor(),  # or the released synthetic images: outliers.folder
        "views": PatchPairs(),
        "training.batch": 32,  # 16 good images and 16 outliers
        "training.stratified": True,
        "tiling": Grid(),
        "size": 256,
        "zoom": 1.0,
        "automatic": ("foreground",),
    },
)

# its ablation: whole images, NSA, translation and light jitter; at 256 px the small stem would be 15 times dearer
WHOLE = change(
    PATCHES,
    {"outliers": "nsa", "views": Shift(), "encoder.stem": "7x7", "tiling": "whole", "score": Scoring(by=Knn(k=1))},
)

# patches on a CPU: a small network, one light, one pose, and each place compared with its like. It is taught six kinds
# of defects, one to a good image, in patches that show them plainly: from faint examples it learns late or not at all
INSPECT = change(
    PATCHES,
    {
        "outliers": Mixed(sources=KINDS, per_inlier=1),
        "encoder": Encoder(width=16, stem="3x3/2", head=Head(hidden=(256,), out=64)),
        "training": Training(epochs=180, batch=64, stratified=True, reuse=16, lr=0.1, warmup=0.03),
        "views": PatchPairs(fore=0.3, altered=0.3, both=True, light=0.3),
        "normalise": "inliers",
        "tiling": Grid(object=0.2, layers=(1, 2, 3, 4)),
        "memory": Memory(reach=1, standardise=True),
        "features": "both",
        "automatic": ("foreground", "light", "align", "reach"),
    },
)

# minutes instead of hours: a frozen backbone describes the cells, and FIRM trains an adaptor on their features
ADAPTED = change(
    INSPECT,
    {
        "pretrained": Pretrained(name="efficientnet-lite0", noise=0.3),
        "outliers": Mixed(sources=KINDS, per_inlier=len(KINDS)),
        "views": PatchPairs(fore=0.3, altered=0.5, light=0.1),
        "training": Training(epochs=10, batch=512, temperature=0.1, lr=0.1, warmup=0.1),
        "tiling": Grid(size=8, stride=8, object=0.2),
        "memory": Memory(reach=2, standardise=True),
        "features": "encoder+backbone",
        "automatic": (*INSPECT.automatic, "features"),
    },
)

# the same where no weights are at hand: wavelets describe the cells, and a wider adaptor and a longer training make up
# for some of what they do not know
WAVES = change(
    ADAPTED,
    {
        "pretrained": Pretrained(name="wavelets", hidden=(512,), out=128, noise=0.3),
        "training.epochs": 30,
        "automatic": tuple(name for name in ADAPTED.automatic if name != "light"),  # logarithms are calm in any light
    },
)

PRESETS = {
    "paper": PAPER,
    "authors": AUTHORS,
    "fast": FAST,
    "parts": PARTS,
    "patches": PATCHES,
    "whole": WHOLE,
    "inspect": INSPECT,
    "adapted": ADAPTED,
    "wavelets": WAVES,
}


def usual() -> Recipe:
    """What a folder of parts is learnt with unasked: pretrained features if their weights are there, or wavelets."""
    return ADAPTED if installed(ADAPTED.pretrained.name) else WAVES


def recipe(preset: str, **changes: object) -> Recipe:
    """A preset by name, changed by path: `recipe("fast", **{"training.epochs": 20})`."""
    if preset not in PRESETS:
        raise FirmError(f"no preset {preset!r}; use one of {', '.join(PRESETS)}")
    return change(PRESETS[preset], changes)
