"""The gate of whatever is learnt: plain pixels in the same light and pose, on the same patches, compared alike.

A detector that tells no more than they do has learnt nothing of use, however high its numbers are.
"""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Int
from torch import Tensor

from firm.adaptor import PIXELS
from firm.detector import Detector
from firm.fitting import looker_of
from firm.images import resize
from firm.localiser import fit_localiser, kinds_of
from firm.types import FirmError, OneClass


def learns(detector: Detector) -> bool:
    """Whether there is a gate to pass: patches are compared by more than their pixels."""
    return detector.localiser is not None and kinds_of(detector.recipe.features) != (PIXELS,)


def plain_rival(detector: Detector, good: OneClass, parts: Int[Tensor, " n"], *, seed: int) -> Detector:
    """A detector that differs in nothing but that it compares plain pixels with those of these good images.

    `parts` numbers the part each of them shows. What the rival decides is not calibrated.
    """
    if detector.localiser is None:
        raise FirmError("this detector looks at whole images, and plain pixels of patches are no measure for it")
    recipe = replace(detector.recipe, features=PIXELS)
    look = looker_of(recipe, detector.network, detector.preprocessing, grey=detector.origin["grey"])
    small = resize(good.train, detector.preprocessing.size)
    ready = recipe.conditioning(small, detector.ignored).completed(detector.usual)
    localiser = fit_localiser(look, ready, recipe.memory, seed=seed, parts=parts)
    return replace(detector, recipe=recipe, localiser=localiser, calibration=None)
