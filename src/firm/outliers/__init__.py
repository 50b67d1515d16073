"""Inliers in, synthetic outliers out: a family of interchangeable sources."""

from __future__ import annotations

from firm.outliers.cutpaste import CutPaste
from firm.outliers.donor import Donor
from firm.outliers.exposure import Exposure
from firm.outliers.nsa import Nsa
from firm.outliers.nsa_classes import NSA_CLASSES, UNIFORM, nsa_for
from firm.outliers.rotations import Rotations
from firm.types import OutlierSource

OUTLIERS: dict[str, OutlierSource] = {
    "rotations": Rotations(),
    "exposure": Exposure(),
    "exposure-rotated": Exposure(rotate=True),
    "cutpaste": CutPaste(variant="plain"),
    "cutpaste-scar": CutPaste(variant="scar"),
    "cutpaste-union": CutPaste(variant="union"),
    "donor": Donor(),
    "nsa": Nsa(),
    "nsa-uniform": UNIFORM,
    **{f"nsa-{product}": source for product, source in NSA_CLASSES.items()},
}

__all__ = ["OUTLIERS", "CutPaste", "Donor", "Exposure", "Nsa", "Rotations", "nsa_for"]
