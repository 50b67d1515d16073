"""Self-check: AUROC on held-out good images with and without synthetic defects, next to a baseline of plain pixels.

It compares trainings; it does not predict how many real defects are detected.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from firm.detector.prepare import Prepared
from firm.detector.remember import fit_model
from firm.errors import FirmError
from firm.images.alignment import Conditioned
from firm.metrics.image import auroc, auroc_interval
from firm.outliers.registry import make_outliers, scene_of
from firm.recipes.recipe import Recipe
from firm.runtime.random import stream
from firm.scoring.models import Model
from firm.training.loop import Progress
from firm.training.runs import Run

KNOWN, INSPECTED = 60, 30  # training images used as references in a probe, held-out images inspected
PROBES = 8  # evenly spaced over a training
BASELINE = 200  # training images used for the pixel baseline
ENOUGH = 10  # held-out images needed for a warning


@dataclass(frozen=True)
class CheckImages:
    """Held-out images without and with synthetic defects of the kinds used in training."""

    images: UInt8[Tensor, "m c h w"]
    defective: Bool[Tensor, " m"]

    @classmethod
    def of(
        cls, recipe: Recipe, prepared: Prepared, held_out: UInt8[Tensor, "n c h w"], *, seed: int, fold: int = 0
    ) -> CheckImages:
        good, others, known, masks = held_out[:INSPECTED], prepared.data.train[:KNOWN], prepared.aligned, None
        if known is not None and known.frames is None and known.images.shape[2:] == others.shape[2:]:
            masks = known.foreground[:KNOWN]
        rule = recipe.conditioning.foreground
        scene = scene_of(good, others, prepared.data.ignored, rule=rule, masks=(None, masks))
        copy = torch.arange(len(good)) % recipe.outliers.per_inlier
        rng = stream(seed, "proof", fold) if fold else stream(seed, "proof")
        bad = make_outliers(recipe.outliers, good, rng=rng, copy=copy, scene=scene).images
        return cls(torch.cat([good, bad]), torch.arange(2 * len(good)) >= len(good))


class Checked(NamedTuple):
    """Scores of images without and with synthetic defects, by a model and by its pixel baseline."""

    scores: Float[Tensor, " m"]
    pixels: Float[Tensor, " m"]  # empty if plain pixels are not compared
    defective: Bool[Tensor, " m"]


def check_model(model: Model, recipe: Recipe, prepared: Prepared, check: CheckImages, *, seed: int) -> Checked:
    """Score the images by a model that has not seen them."""
    aligned, pixels = model.align(check.images), torch.empty(0)
    with suppress(FirmError):  # some memory settings cannot compare pixels
        if (baseline := pixel_baseline(recipe, model, prepared, seed=seed)) is not None:
            pixels = baseline.score_aligned(aligned)
    return Checked(model.score_aligned(aligned), pixels, check.defective)


def self_check(checked: Sequence[Checked]) -> dict[str, Any]:
    """AUROC on the synthetic defects with its interval, and of the pixel baseline, for the card."""
    scores, pixels, defective = (torch.cat(values) for values in zip(*checked, strict=True))
    interval = auroc_interval(scores, defective)
    metrics = {"synthetic_auroc": asdict(interval), "good_images": len(defective) // 2}
    return metrics | ({"pixels_auroc": auroc(pixels, defective)} if len(pixels) == len(scores) else {})


def pixel_baseline(recipe: Recipe, model: Model, prepared: Prepared, *, seed: int) -> Model | None:
    """The same model on the plain pixels of evenly spaced good images; None where there is no other."""
    count = len(prepared.parts)
    chosen = torch.arange(min(BASELINE, count)) * count // min(BASELINE, count)
    aligned = None if prepared.aligned is None else prepared.aligned[chosen]
    return model.baseline(recipe.memory, aligned, prepared.parts[chosen], seed=seed)


def summary(metrics: dict[str, Any]) -> str:
    """The result of a self-check as a sentence."""
    interval, pixels = metrics["synthetic_auroc"], metrics.get("pixels_auroc")
    value, low, high = (100 * interval[name] for name in ("value", "low", "high"))
    on = f"synthetic defects on {metrics['good_images']} images that the scoring model has not seen"
    text = f"self-check: AUROC {value:.1f} ({low:.1f} to {high:.1f}) on {on}"
    return text if pixels is None else f"{text}; pixel baseline {100 * pixels:.1f}"


def warning(metrics: dict[str, Any], *, backbone: bool) -> str | None:
    """A warning if the features do not beat the pixel baseline on enough images."""
    value, pixels = metrics["synthetic_auroc"]["value"], metrics.get("pixels_auroc")
    if pixels is None or value > pixels or value == 1 or metrics["good_images"] < ENOUGH:
        return None
    start = "" if backbone else "--preset inspect "  # with a backbone the preset stays
    return (
        "on these images the features do not beat plain pixels, which need no training; you can use "
        f"{start}--set features=pixels --set training.epochs=0"
    )


@dataclass
class Prober:
    """Training callback: at each probe, add the AUROC of the self-check to the run's history."""

    prepared: Prepared
    check: CheckImages
    seed: int
    lines: list[dict[str, Any]] = field(default_factory=list)  # the probes of the run so far, resumed ones included
    _aligned: Conditioned | None = None

    def __call__(self, progress: Progress, run: Run) -> None:
        due = {progress.steps * number // PROBES for number in range(1, PROBES + 1)}
        if progress.step not in due:
            return
        model = fit_model(self.prepared.recipe, self.prepared, self.prepared.trained(run), seed=self.seed, first=KNOWN)
        self._aligned = self._aligned or model.align(self.check.images)
        value = round(auroc(model.score_aligned(self._aligned), self.check.defective), 5)
        run.history.write({"step": progress.step, "synthetic_auroc": value, "seconds": round(run.seconds, 2)})
        self.lines = [line for line in run.history.lines if "synthetic_auroc" in line]
