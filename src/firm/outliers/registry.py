"""The local sources: each alters a part of the image and says which; what alters all of it stands beside them."""

from __future__ import annotations

from firm.outliers.cutpaste import CutPaste
from firm.outliers.donor import Donor
from firm.outliers.nsa import Nsa
from firm.outliers.nsa_classes import NSA_CLASSES, UNIFORM
from firm.outliers.shades import Shades
from firm.outliers.strokes import Strokes
from firm.types import OutlierSource

LOCAL: dict[str, OutlierSource] = {
    "cutpaste": CutPaste(variant="plain"),
    "cutpaste-scar": CutPaste(variant="scar"),
    "cutpaste-union": CutPaste(variant="union"),
    "donor": Donor(),
    "nsa": Nsa(),
    "nsa-uniform": UNIFORM,
    "strokes": Strokes(),
    "shades": Shades(),
    "pits": Shades(size=(0.008, 0.03), long=(1.0, 2.0), change=(25.0, 110.0)),  # 2 to 8 px of 256: pores, dust
    **{f"nsa-{product}": source for product, source in NSA_CLASSES.items()},
}

# one of each sort: by which detectors are tried, and what adaptors are taught, for what is not taught can be unlearnt
KINDS = ("donor", "nsa", "cutpaste-union", "strokes", "shades", "pits")
