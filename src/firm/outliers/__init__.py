"""Inliers in, synthetic outliers out: a family of interchangeable sources."""

from __future__ import annotations

from firm.outliers.cutpaste import CutPaste
from firm.outliers.exposure import Exposure
from firm.outliers.rotations import Rotations
from firm.types import OutlierSource

OUTLIERS: dict[str, OutlierSource] = {
    "rotations": Rotations(),
    "exposure": Exposure(),
    "exposure-rotated": Exposure(rotate=True),
    "cutpaste": CutPaste(variant="plain"),
    "cutpaste-scar": CutPaste(variant="scar"),
    "cutpaste-union": CutPaste(variant="union"),
}

__all__ = ["OUTLIERS", "CutPaste", "Exposure", "Rotations"]
