"""What thresholds promise of good parts beside what came true: detectors fitted as users fit them, on unseen parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from firm.bench import origin
from firm.calibration import rate_of
from firm.data import load
from firm.data.drawn import drawn
from firm.detector import Detector
from firm.drift import Drift, LightDrift, brightness, drift, light_drift, one_of_each
from firm.evaluate import evaluation, look
from firm.holdout import split
from firm.recipes.industrial import PatchExperiment
from firm.recipes.recipe import to_json
from firm.sisters import sisters
from firm.types import OneClass

DRAWN = 400  # good parts of a drawn product
JUDGED = 0.2  # part of the good images that is kept back, where those are judged


def conduct_promise(
    experiment: PatchExperiment, work: Path, *, device: str = "cpu", tell: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Fit on the good images with the thresholds that a fit sets unasked, then judge good images it never saw.

    They are those of the test, or some that were kept back from the fit; whether they moved as a whole is noted.
    """
    data = load(experiment.data, side=experiment.side)
    if experiment.proof:
        learn, kept = split(sisters(data.name, data.train), JUDGED, seed=experiment.seed)
        data, unseen = replace(data, train=data.train[learn]), data.train[kept]
    else:
        unseen = _unseen(data, experiment.side)
    detector = Detector.fit(
        data, recipe=experiment.recipe, seed=experiment.seed, device=device, folder=work, on_choice=tell
    )
    found = evaluation(detector, look(detector, data.test), data.test, data.anomalous, data.truth)
    by, scores = detector.decides, detector.score(unseen)
    moved, lit = _moved(detector, unseen, scores, sisters(data.name, unseen))
    return {
        "data": experiment.data,
        "row": experiment.row,
        "seed": experiment.seed,
        "recipe": to_json(experiment.recipe),
        "good_images": detector.origin["good_images"],
        "calibration": {"images": by.images, "parts": by.parts},
        "promised": {"review": by.reviewed.kept, "fail": by.failed.kept},
        "surely": {"review": by.surely(by.review), "fail": by.surely(by.fail)},
        "realised": {
            name: asdict(rate_of(int((scores > limit).sum()), len(scores)))
            for name, limit in (("review", by.review), ("fail", by.fail))
        },
        "moved": {"scores": moved.direction, "light": lit.direction, "by": round(lit.change, 4)},
        "caught": {"share": found.caught, "of": int(data.anomalous.sum())},
        "auroc": asdict(found.overall.auroc),
        "origin": origin(device),
    }


def _moved(
    detector: Detector, images: UInt8[Tensor, "n c h w"], scores: Float[Tensor, " n"], parts: Int[Tensor, " n"]
) -> tuple[Drift, LightDrift]:
    """What an inspection would say of them as a whole."""
    by = detector.decides
    light, count, known = brightness(images, detector.ignored), len(images), torch.tensor(by.shown)
    good, lit = torch.tensor(by.scores, dtype=torch.float64), torch.tensor(by.light, dtype=torch.float64)
    return (
        drift(one_of_each(scores, parts), good, parts=known, images=count),
        light_drift(one_of_each(light, parts), lit, parts=known, images=count),
    )


def _unseen(data: OneClass, side: int) -> UInt8[Tensor, "n c h w"]:
    """Good images to judge: those of the test, and of a drawn product many more, for a few tell little of a rate."""
    family, _, product = data.name.partition(":")
    if family != "drawn":
        return data.test[~data.anomalous]
    return drawn(product, size=side, train=0, good=DRAWN, bad=0)[0].test


def promise_line(result: dict[str, Any]) -> str:
    """What came out of a run, in a few words."""
    promised, realised = result["promised"]["review"], result["realised"]["review"]
    return (
        f"{realised['count']} of {realised['of']} good parts do not PASS, at most {100 * promised:.1f} % promised; "
        f"{100 * result['caught']['share']:.1f} % of {result['caught']['of']} defects caught"
    )
