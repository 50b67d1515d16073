"""The views by name: one image in, a positive pair out."""

from firm.types import Views
from firm.views.patch_pairs import PatchPairs as PatchPairs
from firm.views.simclr import CSI, DROC
from firm.views.simclr import SimCLR as SimCLR
from firm.views.simclr import Translation as Translation

VIEWS: dict[str, Views] = {
    "simclr": SimCLR(),
    "droc": DROC,
    "csi": CSI,
    "patches": PatchPairs(),
    "translation": Translation(),
}
