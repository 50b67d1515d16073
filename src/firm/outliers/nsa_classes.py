"""What the authors of NSA chose for the products of MVTec-AD: sizes, patches, background, blending.

Half-sizes are parts of the image's side. Objects are blended normally, textures mixed: the wrong one leaves patches
of a texture that nobody can find. Products without a plain background have no object mask, hence `min_object` 0.
"""

from __future__ import annotations

from firm.outliers.nsa import Nsa

LIGHT = (200.0, 60.0)  # brightness of the background, and how far the object is from it
DARK = (20.0, 20.0)
NONE = (0.0, 0.0)
TEXTURE = Nsa(blend="mixed", patches=4, min_object=0.0, min_overlap=0.0, resize=(0.5, 2.0))


def _object(
    patches: int, height: float, width: float, background: tuple[float, float], min_object: float, least: float = 0.03
) -> Nsa:
    """A product on a plain background; the largest half-sizes differ, the least one seldom does."""
    return Nsa(
        blend="normal",
        patches=patches,
        half_height=(least, height),
        half_width=(least, width),
        background=background,
        min_object=min_object,
        min_overlap=0.25 if min_object else 0.0,
    )


#                      patches  height  width  background  of the patch
NSA_CLASSES: dict[str, Nsa] = {
    "bottle": _object(3, 0.40, 0.40, LIGHT, 0.70),
    "cable": _object(3, 0.40, 0.40, NONE, 0.0, least=0.05),
    "capsule": _object(3, 0.15, 0.40, LIGHT, 0.70),
    "hazelnut": _object(3, 0.35, 0.35, DARK, 0.70),
    "metal_nut": _object(3, 0.40, 0.40, DARK, 0.50),
    "pill": _object(3, 0.20, 0.40, DARK, 0.70),
    "screw": _object(4, 0.12, 0.12, LIGHT, 0.50),
    "toothbrush": _object(3, 0.40, 0.20, DARK, 0.25),
    "transistor": _object(3, 0.40, 0.40, NONE, 0.0),
    "zipper": _object(4, 0.40, 0.20, LIGHT, 0.70),
    "carpet": TEXTURE,
    "grid": TEXTURE,
    "leather": TEXTURE,
    "tile": TEXTURE,
    "wood": TEXTURE,
}

# the same generator with its default arguments, as the code of the FIRM authors calls it
UNIFORM = Nsa(
    blend="normal",
    sizes="uniform",
    half_height=(0.05, 0.2),
    half_width=(0.05, 0.2),
    patches=1,
    min_object=0.0,
    min_overlap=0.0,
    other=0.5,
    jitter=0.1,
)


def nsa_for(product: str) -> Nsa:
    """What was chosen for a product of the table; the generic settings for one that is not in it."""
    return NSA_CLASSES.get(product, Nsa())
