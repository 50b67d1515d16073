"""Inliers in, synthetic outliers out: a family of interchangeable sources."""

from __future__ import annotations

from firm.outliers.cutpaste import CutPaste
from firm.outliers.donor import Donor
from firm.outliers.exposure import Exposure
from firm.outliers.local import KINDS, LOCAL
from firm.outliers.mixed import Mixed
from firm.outliers.nsa import Nsa
from firm.outliers.nsa_classes import nsa_for
from firm.outliers.rotations import Rotations
from firm.outliers.shades import Shades
from firm.outliers.strokes import Strokes
from firm.types import OutlierSource

OUTLIERS: dict[str, OutlierSource] = {
    "rotations": Rotations(),
    "exposure": Exposure(),
    "exposure-rotated": Exposure(rotate=True),
    **LOCAL,
    "mixed": Mixed(),
}

__all__ = [
    "KINDS",
    "LOCAL",
    "OUTLIERS",
    "CutPaste",
    "Donor",
    "Exposure",
    "Mixed",
    "Nsa",
    "Rotations",
    "Shades",
    "Strokes",
    "nsa_for",
]
