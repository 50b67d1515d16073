"""The presets, each built from another one by changed settings: `paper` is the text, `authors` their code."""

from collections.abc import Sequence

from firm.errors import SettingError
from firm.networks.weights import installed
from firm.outliers.registry import KINDS
from firm.recipes.recipe import Recipe, change, parse_settings

PAPER = change(Recipe(), {"training.precision": "float32"})

AUTHORS = change(
    PAPER,
    {
        "encoder.head": {"hidden": (1024,) * 7, "out": 128, "last_norm": True},
        "encoder.norm_momentum": 0.9,
        "training.layout": "pairwise",  # for FIRM and NT-Xent; SupCon and Rot-SupCon use `concat`
        "training.schedule": "one-cycle",
    },
)

# whole images on a CPU
FAST = change(
    Recipe(),
    {
        "encoder": {"width": 16, "stem": "3x3/2", "head": {"hidden": (512,), "out": 128}},
        "training": {"epochs": 10, "lr": 0.05, "warmup": 0.05},
        "score.by.k": 5,
    },
)

# whole images of parts: synthetic defects instead of rotations, and camera-like augmentation
PARTS = change(
    FAST,
    {
        "outliers": {"kind": "cutpaste", "variant": "union", "per_inlier": 1},
        "views.crop": (0.8, 1.0),
        "views.jitter": {"brightness": 0.1, "contrast": 0.1, "saturation": 0.1, "hue": 0.02},
        "views.blur": 0.0,
        "training.epochs": 40,
        "zoom": 1.0,
        "normalise": "inliers",
        "score.by.k": 1,
    },
)

# the industrial branch as the paper has it (section 5): patches of good images against local synthetic defects
PATCHES = change(
    PAPER,
    {
        "outliers": "perlin-blend",  # or the released synthetic images: outliers.folder
        "views": "patches",
        "training.batch": 32,  # 16 good images and 16 outliers
        "training.stratified": True,
        "tiling": "grid",
        "size": 256,
        "zoom": 1.0,
        "automatic": ("foreground",),
    },
)

# its ablation: whole images, NSA, translation and slight jitter; at 256 px the small stem would be 15 times slower
WHOLE = change(PATCHES, {"outliers": "nsa", "views": "translation", "encoder.stem": "7x7", "tiling": "whole"})

# patches on a CPU: a small network, normalised illumination and alignment, patches compared within a neighbourhood; six
# kinds of defects, one per good image, in patches that show them clearly, because faint ones are hardly learnt
INSPECT = change(
    PATCHES,
    {
        "outliers": {"kind": "mixture", "sources": KINDS, "per_inlier": 1},
        "encoder": {"width": 16, "stem": "3x3/2", "head": {"hidden": (256,), "out": 64}},
        "training": {"epochs": 180, "batch": 64, "stratified": True, "reuse": 16, "lr": 0.1, "warmup": 0.03},
        "views": {"kind": "patchpairs", "min_foreground": 0.3, "min_altered": 0.3, "illumination": 0.3},
        "views.both_altered": True,
        "normalise": "inliers",
        "tiling": {"kind": "grid", "min_foreground": 0.2, "layers": (1, 2, 3, 4)},
        "memory": {"neighbourhood": 1, "standardise": True},
        "features": "both",
        "automatic": ("foreground", "illumination", "align", "neighbourhood"),
    },
)

# minutes instead of hours: a frozen backbone embeds the cells, and FIRM trains an adaptor on the features
ADAPTED = change(
    INSPECT,
    {
        "pretrained": {"name": "efficientnet-lite0", "noise": 0.3},
        "outliers.per_inlier": len(KINDS),
        "views": {"kind": "patchpairs", "min_foreground": 0.3, "min_altered": 0.5, "illumination": 0.1},
        "training": {"epochs": 10, "batch": 512, "temperature": 0.1, "lr": 0.1, "warmup": 0.1},
        "tiling": {"kind": "grid", "size": 8, "stride": 8, "min_foreground": 0.2},
        "memory.neighbourhood": 2,
        "features": "encoder+backbone",
        "automatic": (*INSPECT.automatic, "features"),
    },
)

# the same without downloaded weights: wavelets, a wider adaptor and a longer training; illumination is not tuned,
# because it hardly changes log wavelet energies
WAVES = change(
    ADAPTED,
    {
        "pretrained": {"name": "wavelets", "hidden": (512,), "out": 128, "noise": 0.3},
        "training.epochs": 30,
        "automatic": ("foreground", "align", "neighbourhood", "features"),
    },
)

# whole images of one class, or of one kind of scene: a frozen backbone embeds them once, and FIRM trains a residual
# adaptor, which starts as the identity, on their features
SEMANTIC = change(
    FAST,
    {
        "outliers": "exposure",
        "pretrained": {"name": "efficientnet-lite0", "hidden": (512,), "residual": True, "head": False},
        "views.crop": (0.5, 1.0),
        "views.crop_first": False,  # colours change before small images are enlarged, which takes less time
        "views.flip": 0.5,
        "views.jitter.hue": 0.1,
        "views.blur": 0.0,
        "training": {"epochs": 15, "batch": 256, "temperature": 0.2, "lr": 0.05, "warmup": 0.1},
        "size": 160,
        "zoom": 1.0,
        "features": "encoder",
        "score.by.k": 1,
        "automatic": ("features",),
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
    "semantic": SEMANTIC,
}
BY_HAND = {  # what a preset leaves to be chosen -> the setting that decides it
    "foreground": "conditioning.foreground",
    "illumination": "conditioning.illumination",
    "align": "conditioning.align",
    "neighbourhood": "memory.neighbourhood",
    "features": "features",
}


def usual() -> Recipe:
    """The default for a folder of parts: pretrained features if their weights are installed, else wavelets."""
    return ADAPTED if installed(ADAPTED.pretrained.name) else WAVES


def recipe(preset: str, **changes: object) -> Recipe:
    """A preset by name, changed by path: `recipe("fast", **{"training.epochs": 20})`."""
    if preset not in PRESETS:
        raise SettingError(f"no preset {preset!r}; use one of {', '.join(PRESETS)}")
    return change(PRESETS[preset], changes)


def recipe_of(preset: str, settings: Sequence[str] | None) -> Recipe:
    """A preset with settings typed as `path=value`; what is set by hand is no longer chosen automatically."""
    changes = parse_settings(settings or ())
    left = [name for name in recipe(preset).automatic if not any(_concerns(path, BY_HAND[name]) for path in changes)]
    return recipe(preset, **({"automatic": left} | changes))


def _concerns(path: str, setting: str) -> bool:
    """Whether a change at the path sets the setting, a part of it, or something it is a part of."""
    return f"{path}.".startswith(f"{setting}.") or f"{setting}.".startswith(f"{path}.")
