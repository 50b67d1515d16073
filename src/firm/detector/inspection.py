"""Inspect a batch of files one by one: verdicts, files left out, and drift of the whole batch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import cv2
import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from firm.data.duplicates import ALIGNMENT_SIDE, group_by_part, thumbnails
from firm.decision.calibration import FAIL, FOLDS, PASS, REVIEW
from firm.decision.drift import Drift, LightDrift, drift, light_drift, one_of_each
from firm.decision.verdict import Verdict
from firm.detector.detector import Detector, Examined
from firm.errors import ImageError
from firm.images.alignment import NOTHING

COMPARED = 2000  # images that are grouped by part: 33 MB

Pixels = npt.NDArray[np.uint8]
Result = TypeVar("Result", Drift, LightDrift)


@dataclass(frozen=True)
class InspectedImage:
    """A verdict with the images that explain it."""

    verdict: Verdict
    picture: UInt8[Pixels, "h w 3"]  # the decoded image
    heat: Float[npt.NDArray[np.float32], "r c"] | None  # anomaly map of the whole picture, at any resolution
    nearest: UInt8[Pixels, "h w 3"] | None = None  # the good part most similar at the worst patch, aligned
    marked: Bool[npt.NDArray[np.bool_], "r c"] | None = None  # the regions, in the pixels of the map


@dataclass
class Inspection:
    """The state of a batch: verdicts and small grey copies, never a full picture."""

    detector: Detector
    strict: bool = False  # stop at the first unusable file
    verdicts: list[Verdict] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)  # file, reason
    notes: list[str] = field(default_factory=list)  # warnings about the whole batch, complete after the last image
    on_image: Callable[[int], None] | None = None
    # one array: small ones between the buffers of the images would keep the heap from being used again
    _small: UInt8[Tensor, "n s s"] = field(
        default_factory=lambda: torch.empty(COMPARED, ALIGNMENT_SIDE, ALIGNMENT_SIDE, dtype=torch.uint8)
    )
    _brightness: list[float] = field(default_factory=list)
    _parts: Int[Tensor, " n"] = field(default_factory=lambda: torch.empty(0, dtype=torch.long))  # computed once

    def __call__(self, files: Iterable[Path], *, explain: bool = True) -> Iterator[InspectedImage]:
        """Inspect the files lazily; an unusable one is left out with the reason."""
        for file in files:
            image = self._inspect(file, explain)
            if self.on_image is not None:
                self.on_image(1)
            if image is not None:
                yield image
            del image  # frees it before the next one is made
        scores, light = self.drift(), self.light_drift()
        if scores is not None and scores.sentence:
            self.notes.append(scores.sentence)
        if light is not None and light.sentence and not (scores is not None and scores.foreign):  # another product
            self.notes.append(light.sentence)

    def _inspect(self, file: Path, explain: bool) -> InspectedImage | None:
        try:
            examined = self.detector.examine(file)
        except ImageError as error:
            if self.strict:
                raise
            self.left_out.append((str(file), str(error)))
            return None
        self.verdicts.append(examined.verdict)
        self._brightness.append(examined.light)
        if len(self.verdicts) <= len(self._small):
            self._small[len(self.verdicts) - 1] = thumbnails(examined.pixels, ALIGNMENT_SIDE)[0]
        nearest = most_similar(self.detector, examined) if explain else None
        heat = None if examined.heat is None else examined.heat.numpy()
        return InspectedImage(examined.verdict, examined.picture, heat, nearest, examined.marked)

    def counts(self) -> dict[str, int]:
        """How many images have each verdict, worst first."""
        verdicts = [verdict.verdict for verdict in self.verdicts]
        return {name: verdicts.count(name) for name in (FAIL, REVIEW, PASS)}

    def drift(self) -> Drift | None:
        """The scores of the batch, one per part, against the calibration; None if either has none."""
        by = self.detector.decides
        test = partial(drift, estimated=by.basis == FOLDS)
        return self._compare(test, [verdict.score for verdict in self.verdicts], by.scores)

    def light_drift(self) -> LightDrift | None:
        """The same for brightness; None if the calibration has none."""
        return self._compare(light_drift, self._brightness, self.detector.decides.light)

    def _compare(self, test: Callable[..., Result], values: list[float], good: Sequence[float]) -> Result | None:
        if not values or not good:
            return None
        batch, reference = (torch.tensor(each, dtype=torch.float64) for each in (values, good))
        if len(batch) <= len(self._small):
            if len(self._parts) < len(batch):
                self._parts = group_by_part("inspected", self._small[: len(batch), None])
            batch = one_of_each(batch, self._parts)
        return test(batch, reference, parts=torch.tensor(self.detector.decides.shown), images=len(self.verdicts))


def most_similar(detector: Detector, examined: Examined) -> UInt8[Pixels, "h w 3"] | None:
    """The good part with the patch nearest to the worst one, moved into the picture's frame; None if there is none."""
    neighbour = detector.model.nearest(examined.examination)
    good = None if neighbour is None else detector.examples.picture(neighbour.image)
    if neighbour is None or good is None:
        return None
    across, down = neighbour.shift
    shift = np.array([[1.0, 0.0, across], [0.0, 1.0, down], [0.0, 0.0, 1.0]])
    frame = np.eye(3) if neighbour.frame is None else np.vstack([neighbour.frame.numpy(), [0.0, 0.0, 1.0]])
    height, width = good.shape[:2]
    back = (np.linalg.inv(frame) @ shift)[:2]
    moved = cv2.warpAffine(good, back, (width, height), borderMode=cv2.BORDER_CONSTANT, borderValue=NOTHING)
    return np.asarray(cv2.resize(moved, examined.picture.shape[1::-1], interpolation=cv2.INTER_LINEAR), np.uint8)
