"""A detector calibrated anew on good images it never saw, without training again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from firm.calibration import Calibration, Wishes, calibration_of
from firm.detector import Detector, check_images, thumbnails
from firm.sisters import describe, sisters
from firm.types import FirmError


def calibrate(
    detector: Detector,
    good: UInt8[Tensor, "n c h w"],
    *,
    name: str = "images",
    defects: UInt8[Tensor, "m c h w"] | None = None,
    wishes: Wishes | None = None,
    on_doubt: Callable[[str], None] | None = None,
    on_image: Callable[[int], None] | None = None,
) -> Calibration:
    """Thresholds for this detector from good images, and what they miss of defects; `name` is that of the images.

    Images that were learnt from are left out, for they score too low. Sisters among the others count as one part.
    """
    told = on_doubt or (lambda sentence: None)
    fresh = good[~learnt(detector, good)]
    if len(fresh) < len(good):
        told(f"{len(good) - len(fresh)} of the {len(good)} good images were learnt from and are left out")
    if not len(fresh):
        raise FirmError("there is no good image that was not learnt from; give others of new parts")
    parts = sisters(name, fresh)
    if describe(parts):
        told(describe(parts))
    scores, peaks = measured(detector, fresh, on_image)
    wrong = None if defects is None else measured(detector, defects, on_image)[0]
    return calibration_of(scores, model=detector.id, peaks=peaks, parts=parts, defects=wrong, wishes=wishes)


def learnt(detector: Detector, images: UInt8[Tensor, "n c h w"]) -> Bool[Tensor, " n"]:
    """Which of the images the detector has learnt from, as far as the small copies it keeps tell."""
    check_images(images)
    known = {small.numpy().tobytes() for small in detector.thumbnails}
    return torch.tensor([small.numpy().tobytes() in known for small in thumbnails(images)], dtype=torch.bool)


def measured(
    detector: Detector, images: UInt8[Tensor, "n c h w"], on_image: Callable[[int], None] | None = None
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"] | None]:
    """The score of each image and the maximum of its map, None without maps.

    One at a time, as they are inspected: so the images of a calibration lie exactly on their side of its thresholds.
    """
    scores, peaks = [], []
    for image in images:
        if detector.localiser is None:
            scores.append(detector.score(image[None], on_image))
        else:
            found = detector.locate(image[None], on_image)
            scores.append(found.scores)
            peaks.append(found.maps.amax(dim=(1, 2)))
    return torch.cat(scores), torch.cat(peaks) if peaks else None
