"""How well a training tells good parts from synthetic defects as it goes on, and how long it may go on.

The measure needs no defect: images that were held out of the training are inspected as they are and with synthetic
defects on them. It says which of two trainings goes further, not how many real defects will be found.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from firm.choosing import within
from firm.detector import Detector
from firm.gate import gated, plain_rival
from firm.holdout import split, wanted
from firm.metrics import auroc, auroc_interval
from firm.outliers.sparing import spared
from firm.recipes.recipe import Recipe, change
from firm.runs import Run
from firm.streams import stream
from firm.timing import duration
from firm.training import Progress
from firm.trial import seen_by_the_camera
from firm.types import FirmError, OneClass

KNOWN, INSPECTED = 60, 30  # learnt images to compare with at a probe, held-out ones that are inspected
PROBES = 8  # evenly spaced over a training
LEAST = 5  # epochs, however little time there is
GATED = 200  # learnt images whose plain pixels are to be beaten
TELLING = 10  # held-out images below which nobody is warned: chance alone decides
ADAPTED_MOST = 30  # epochs of an adaptor: it learns nothing from more


@dataclass
class Prober:
    """Watches a training through `on_progress`: probes are lines of the run's history, so that a resumed one has all.

    `parts` numbers the part each good image shows; held out are those that `Detector.fit` holds out with the same
    arguments.
    """

    data: OneClass
    parts: Tensor
    holdout: float = 0.1
    false_calls: float = 0.05
    seed: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)  # the probes of the run as far as it is seen
    _learn: Tensor = field(init=False)
    _held: Tensor = field(init=False)

    def __post_init__(self) -> None:
        found = split(self.parts, self.holdout, seed=self.seed, least=wanted(self.false_calls))
        self._learn, self._held = found

    def __call__(self, progress: Progress, run: Run) -> None:
        due = {progress.steps * number // PROBES for number in range(1, PROBES + 1)}
        if progress.step in due:
            few = replace(self.data, train=self.data.train[self._learn[:KNOWN]])
            detector = Detector.remember(
                run.recipe, run, few, {}, seed=self.seed, parts=self.parts[self._learn[:KNOWN]]
            )
            images, defective = self.inspected(run.recipe)
            found = auroc(detector.score(images), defective)
            run.history.write(
                {"step": progress.step, "synthetic_auroc": round(found, 5), "seconds": round(run.seconds, 2)}
            )
            self.lines = [line for line in run.history.lines if "synthetic_auroc" in line]

    def inspected(self, recipe: Recipe) -> tuple[UInt8[Tensor, "m c h w"], Bool[Tensor, " m"]]:
        """Held-out images as they are and with synthetic defects of the recipe's source, and which have one."""
        good = self.data.train[self._held[:INSPECTED]]
        others = self.data.train[self._learn[:KNOWN]]
        scene = seen_by_the_camera(good, others, recipe.conditioning.foreground, self.data.ignored)
        source = recipe.outliers
        copy = torch.arange(len(good)) % source.per_inlier
        bad = spared(source, good, rng=stream(self.seed, "proof"), copy=copy, scene=scene).images
        return torch.cat([good, bad]), torch.arange(2 * len(good)) >= len(good)

    def proof(self, detector: Detector) -> dict[str, Any]:
        """What the whole detector reaches, with its interval, for its card."""
        images, defective = self.inspected(detector.recipe)
        found = auroc_interval(detector.score(images), defective)
        told = {"synthetic_auroc": asdict(found), "good_images": len(defective) // 2}
        if gated(detector):
            with suppress(FirmError):  # settings of the memory under which plain pixels cannot be compared
                rival = plain_rival(detector, *self._gated(), seed=self.seed)
                told["pixels_auroc"] = auroc(rival.score(images), defective)
        return told

    def _gated(self) -> tuple[OneClass, Tensor]:
        """Learnt images with which plain pixels are compared, drawn evenly, and the part each shows."""
        count = len(self._learn)
        some = self._learn[torch.arange(min(GATED, count)) * count // min(GATED, count)]
        return replace(self.data, train=self.data.train[some]), self.parts[some]


def proved(metrics: dict[str, Any], *, backbone: bool) -> list[str]:
    """What a proof says, in sentences; the second is a warning, where the gate is not passed and that is no chance."""
    found, pixels = metrics["synthetic_auroc"], metrics.get("pixels_auroc")
    told = (
        f"synthetic defects on {metrics['good_images']} held-out good images: AUROC {100 * found['value']:.1f} "
        f"({100 * found['low']:.1f} to {100 * found['high']:.1f})"
    )
    if pixels is None:
        return [told]
    told = f"{told}; plain pixels in the same light and pose {100 * pixels:.1f}"
    if found["value"] > pixels or found["value"] == 1 or metrics["good_images"] < TELLING:
        return [told]
    start = "" if backbone else "--preset inspect "  # with a backbone it is the same fit and these settings
    return [
        told,
        "on these images the features tell no more than plain pixels, which need no training: "
        f"{start}--set features=pixels --set training.epochs=0",
    ]


def lasting(recipe: Recipe, minutes: float, data: OneClass, *, seed: int, device: torch.device | str = "cpu") -> Recipe:
    """The recipe with as many epochs as some minutes on this machine are expected to hold, all else included.

    What follows depends on the number of epochs alone, and is the same on any machine.
    """
    took = duration(recipe, data, held_out=2 * INSPECTED, seed=seed, device=device)
    probing = PROBES * (KNOWN + 2 * INSPECTED) * took.thresholds / (2 * INSPECTED)
    room = (60 * minutes - took.fixed - probing) / max(took.epoch, 1e-9)
    most = ADAPTED_MOST if recipe.pretrained.name else room
    return change(within(recipe, len(data.train)), {"training.epochs": max(LEAST, int(min(room, most)))})
