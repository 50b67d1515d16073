"""FIRM: visual anomaly detection from good images alone. Higher scores are more anomalous, everywhere.

The map in flow order:

    data         images in: CIFAR-10/100, Fashion-MNIST, Cats-vs-Dogs, MVTec-AD and its like, folders, drawn parts
    foreground   where the object is;             conditioning  one light and one pose
    outliers     inliers -> synthetic outliers;   views         one image -> a positive pair, whole or of patches
    replay       outliers used several times;     batching      all of it -> Batch
    encoder      ResNet-18 and head;              objective     four positive sets, one loss
    training     the loop;                        memory        nearest neighbours
    scores       s_con, s_shift, s_ens and more;  tiling        images -> patches, their scores -> heat map
    bank         normal patches;                  localiser     patches of an image compared with them
    recipes      settings as values;              fitting       settings x images;   runs  a training's folder, resume
    calibration  thresholds and promises;         verdicts      PASS, REVIEW, FAIL, and where
    drift        has a batch moved as a whole;    leaks         copies of what was learnt
    watching     images decided as they appear
    examples     pictures of good parts;          model_folder  a detector on disk;   restoring  built again from it
    metrics      of images;                       localisation  of pixels
    choosing     settings by good images;         preferring    features by spared ones
    foretelling  what a fit will take;            doubting      of good images
    detector     fit, score, locate, inspect;     explaining    the good part most like an inspected one
    progressing  a training watched without defects, and how long it may take
    evaluate, bench, bench_patches, report, cli
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firm.data import load as load
    from firm.detector import Detector as Detector
    from firm.recipes.presets import recipe as recipe
    from firm.recipes.recipe import Recipe as Recipe
    from firm.recipes.recipe import change as change

__version__ = "0.1.0"
__all__ = ["Detector", "Recipe", "change", "load", "recipe"]

_HOME = {
    "Detector": "firm.detector",
    "Recipe": "firm.recipes.recipe",
    "change": "firm.recipes.recipe",
    "load": "firm.data",
    "recipe": "firm.recipes.presets",
}


def __getattr__(name: str) -> Any:
    """The public names, imported when first used: the command line's help must not wait for torch."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'firm' has no attribute {name!r}")
