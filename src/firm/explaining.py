"""Why an image was judged so: the good part that is most like it where it is worst."""

from __future__ import annotations

import cv2
import numpy as np
import numpy.typing as npt
from jaxtyping import UInt8

from firm.bank import Bank
from firm.detector import Detector
from firm.verdicts import Examined

Pixels = npt.NDArray[np.uint8]


def most_similar(detector: Detector, found: Examined) -> UInt8[Pixels, "h w 3"] | None:
    """The good part whose patch is nearest to the worst one, moved so that it lies as the picture does.

    None of a detector that looks at whole images or remembers no patches, and where the picture of that part was not
    kept.
    """
    if detector.localiser is None or found.look is None:
        return None
    banks = {kind: one for kind, one in detector.localiser.banks.items() if isinstance(one, Bank)}
    if not banks:
        return None
    kind, bank = next(iter(banks.items()))
    worst = int(found.look.cells.flatten().argmax())
    image, cell = bank.nearest(found.look.seen[kind][0].flatten(0, 1)[worst], worst)
    good = detector.examples.picture(image)
    if good is None:
        return None
    columns, stride = bank.shape[1], detector.localiser.grid.stride
    across, down = (worst % columns - cell % columns) * stride, (worst // columns - cell // columns) * stride
    shift = np.array([[1.0, 0.0, across], [0.0, 1.0, down], [0.0, 0.0, 1.0]])
    frames = found.look.ready.frames
    frame = np.eye(3) if frames is None else np.vstack([frames[0].numpy(), [0.0, 0.0, 1.0]])
    height, width = good.shape[:2]
    moved = cv2.warpAffine(good, (np.linalg.inv(frame) @ shift)[:2], (width, height), borderMode=cv2.BORDER_REPLICATE)
    return np.asarray(cv2.resize(moved, found.picture.shape[1::-1], interpolation=cv2.INTER_LINEAR), np.uint8)
