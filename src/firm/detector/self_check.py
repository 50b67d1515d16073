"""The gate of whatever is learnt: plain pixels in the same light and pose, on the same patches, compared alike.

A detector that tells no more than they do has learnt nothing of use, however high its numbers are.
"""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Int
from torch import Tensor

from firm.detector import Detector
from firm.fitting import looker_of
from firm.images import resize
from firm.localiser import fit_localiser, kinds_of
from firm.plain import PIXELS
from firm.types import FirmError, OneClass


def gated(detector: Detector) -> bool:
    """Whether there is a gate to pass: patches are compared by more than their pixels."""
    return detector.localiser is not None and kinds_of(detector.recipe.features) != (PIXELS,)


def plain_rival(detector: Detector, good: OneClass, parts: Int[Tensor, " n"], *, seed: int) -> Detector:
    """A detector that compares plain pixels with those of these good images, and is else the same; not calibrated.

    `parts` numbers the part each of them shows. Where a detector remembers plain pixels beside what it learnt, it is
    those that are taken.
    """
    if detector.localiser is None:
        raise FirmError("this detector looks at whole images, and plain pixels of patches are no measure for it")
    recipe, banks = replace(detector.recipe, features=PIXELS), detector.localiser.banks
    if PIXELS in banks:
        alone = replace(detector.localiser, banks={PIXELS: banks[PIXELS]})
        return replace(detector, recipe=recipe, localiser=alone, calibration=None)
    look = looker_of(recipe, detector.network, detector.preprocessing, grey=detector.origin["grey"])
    small = resize(good.train, detector.preprocessing.size)
    ready = recipe.conditioning(small, detector.ignored).completed(detector.usual)
    localiser = fit_localiser(look, ready, recipe.memory, seed=seed, parts=parts)
    return replace(detector, recipe=recipe, localiser=localiser, calibration=None)
