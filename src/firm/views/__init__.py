"""One image in, a positive pair out: a family of interchangeable views."""

from __future__ import annotations

from firm.colour import Jitter
from firm.types import Views
from firm.views.augment import Augment
from firm.views.patches import PatchPairs
from firm.views.shift import Shift

VIEWS: dict[str, Views] = {
    "simclr": Augment(),
    "droc": Augment(
        crop=(0.5, 1.0), crop_by="side", flip=0.5, jitter=Jitter(additive_brightness=True), grey=0.2, blur=0.0
    ),
    "csi": Augment(
        crop=(0.08, 1.0),
        aspect=(3 / 4, 4 / 3),
        crop_first=False,
        flip=0.5,
        jitter=Jitter(hue=0.1, probability=0.8),
        grey=0.2,
        blur=0.0,
    ),
    "patches": PatchPairs(),
    "shift": Shift(),
}

__all__ = ["VIEWS", "Augment", "PatchPairs", "Shift"]
