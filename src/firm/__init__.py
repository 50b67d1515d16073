"""FIRM: visual anomaly detection from good images alone. Higher scores are more anomalous, everywhere.

The map. A folder is a stage of the flow; a module imports only from stages above its own (a test reads this list):

    errors      what can go wrong, in kinds
    types       what flows between the stages, and the protocols of the families
    runtime     random streams, files, feature cache, platform: nothing about images
    images      one image before any network: decoding, preprocessing, foreground, alignment
    drawn       the built-in products: parts that are drawn, with their defects
    data        sets of images: folders, published data sets, duplicates, splits, checks
    outliers    inliers in, synthetic outliers out
    views       one image in, a positive pair out
    networks    encoders, frozen backbones, heads, adaptors
    training    positive sets, methods, batches, the loop, runs
    diffusion   a diffusion model of good images, sampled with strength: SIA
    scoring     neighbours, image scores, patch banks, anomaly maps, the two models
    metrics     AUROC, pixel measures, intervals
    decision    scores in, PASS, REVIEW or FAIL out
    recipes     all settings as one value, and the presets
    detector    fit (the one pipeline), tune, self-check, save, inspect, evaluate
    report      pages and pictures
    deploy      a detector on the line
    research    the paper's experiments, tables and figures
    cli         the command line

`losses` is a public face: the four losses as modules for anybody's training loop.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firm.data.registry import load as load
    from firm.detector.detector import Detector as Detector
    from firm.losses import FirmLoss as FirmLoss
    from firm.losses import NTXentLoss as NTXentLoss
    from firm.losses import RotSupConLoss as RotSupConLoss
    from firm.losses import SupConLoss as SupConLoss
    from firm.recipes.presets import recipe as recipe
    from firm.recipes.recipe import Recipe as Recipe
    from firm.recipes.recipe import change as change

__version__ = "0.1.0"
__all__ = ["Detector", "FirmLoss", "NTXentLoss", "Recipe", "RotSupConLoss", "SupConLoss", "change", "load", "recipe"]

_HOME = {
    "Detector": "firm.detector.detector",
    "FirmLoss": "firm.losses",
    "NTXentLoss": "firm.losses",
    "Recipe": "firm.recipes.recipe",
    "RotSupConLoss": "firm.losses",
    "SupConLoss": "firm.losses",
    "change": "firm.recipes.recipe",
    "load": "firm.data.registry",
    "recipe": "firm.recipes.presets",
}


def __getattr__(name: str) -> Any:
    """The public names, imported when first used: the command line's help must not wait for torch."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'firm' has no attribute {name!r}")
