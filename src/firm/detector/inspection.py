"""A batch of files inspected one by one: verdicts, what could not be read, whether the batch as a whole has moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from firm.detector import Detector
from firm.drift import Drift, LightDrift, drift, light_drift, one_of_each
from firm.errors import UnreadableImage
from firm.explaining import most_similar
from firm.images import resize
from firm.promises import sentences
from firm.report.entry import Shown, surroundings
from firm.report.heat import ends
from firm.report.ledger import worst
from firm.report.page import GALLERY, write_page
from firm.sisters import ENOUGH, sisters
from firm.verdicts import Verdict

COMPARED = 2000  # images among which photographs of one part are looked for: a hundred megabytes


@dataclass
class Inspection:
    """What is remembered of a batch: verdicts and small copies, never a picture."""

    detector: Detector
    strict: bool = False  # stop at the first file that cannot be used
    verdicts: list[Verdict] = field(default_factory=list)
    quarantined: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what is to be said of all of them together, once all are judged
    on_image: Callable[[int], None] | None = None
    _small: list[Tensor] = field(default_factory=list)
    _light: list[float] = field(default_factory=list)
    _parts: Int[Tensor, " n"] = field(default_factory=lambda: torch.empty(0, dtype=torch.long))  # found once

    def __call__(self, files: Iterable[Path], *, explain: bool = True) -> Iterator[Shown]:
        """Each file judged as it is asked for; one that cannot be used is put aside with the reason."""
        for file in files:
            shown = self._judged(file, explain)
            if self.on_image is not None:
                self.on_image(1)
            if shown is not None:
                yield shown
        moved, lit = self.drift(), self.light_drift()
        if moved is not None and moved.sentence:
            self.notes.append(moved.sentence)
        if lit is not None and lit.sentence and not (moved is not None and moved.foreign):  # of what is something else
            self.notes.append(lit.sentence)

    def _judged(self, file: Path, explain: bool) -> Shown | None:
        try:
            found = self.detector.examine(file)
        except UnreadableImage as error:
            if self.strict:
                raise
            self.quarantined.append((str(file), str(error)))
            return None
        self.verdicts.append(found.verdict)
        self._light.append(found.light)
        if len(self._small) < COMPARED:
            self._small.append(resize(self.detector.preprocessing.read(found.picture), ENOUGH))
        nearest = most_similar(self.detector, found) if explain else None
        region = worst(found.verdict)
        if nearest is not None and region is not None:  # the same place of both is shown side by side
            nearest = nearest[surroundings(region, *nearest.shape[:2])]
        cold = np.full((1, 1), ends(found.verdict.review)[0], np.float32)
        return Shown(found.verdict, found.picture, cold if found.heat is None else found.heat.numpy(), nearest)

    def counts(self) -> dict[str, int]:
        """How many images have each verdict, worst first."""
        words = [one.verdict for one in self.verdicts]
        return {word: words.count(word) for word in ("FAIL", "REVIEW", "PASS")}

    def drift(self) -> Drift | None:
        """The batch against the calibration; None where one of the two has no scores.

        Of several photographs of one part one counts, as far as they are looked for: else a few parts seem many.
        """
        by = self.detector.decides
        if not self.verdicts or not by.scores:
            return None
        scores = self._one_of_each([one.score for one in self.verdicts])
        good, count = torch.tensor(by.scores, dtype=torch.float64), len(self.verdicts)
        return drift(scores, good, parts=torch.tensor(by.shown), images=count)

    def light_drift(self) -> LightDrift | None:
        """The same of the light; None where the calibration does not know its own."""
        by = self.detector.decides
        if not self.verdicts or not by.light:
            return None
        light = self._one_of_each(self._light)
        good, count = torch.tensor(by.light, dtype=torch.float64), len(self.verdicts)
        return light_drift(light, good, parts=torch.tensor(by.shown), images=count)

    def _one_of_each(self, values: list[float]) -> Float[Tensor, " k"]:
        found = torch.tensor(values, dtype=torch.float64)
        if len(found) > len(self._small):
            return found
        if len(self._parts) < len(found):
            self._parts = sisters("inspected", torch.cat(self._small))
        return one_of_each(found, self._parts)

    def write(
        self, folder: Path, judged: Iterable[Shown], *, model: str, gallery: int = GALLERY, when: str = ""
    ) -> Path:
        """The report of what is judged meanwhile; `when` is the day and time it is to bear."""
        by = self.detector.decides
        return write_page(
            folder,
            judged,
            title=f"Inspection by {model}",
            good_scores=by.scores,
            quarantined=self.quarantined,
            card={"promises": [f"thresholds {by.source}", *sentences(by)], **self.detector.card()},
            notes=self.notes,  # the last of them come with the last image
            gallery=gallery,
            when=when,
        )
