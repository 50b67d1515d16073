"""Decisions from few good images: thresholds of a split and of folds, on random subsets of one product.

Settings are tuned and features computed once for all subsets of a run. A subset of 5 is part of the one of 10, and so
on. Both ways of calibrating go through `detector.fit.learn`.
"""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from firm.data.duplicates import group_by_part
from firm.data.splits import default_holdout, parts_needed
from firm.decision.calibration import FAIL, FALSE_CALLS, PASS, REVIEW, Calibration
from firm.decision.drift import drift
from firm.detector.fit import FOLDS, learn
from firm.detector.prepare import Prepared, frozen_backbone, prepare
from firm.detector.read import Options
from firm.detector.split import by_folds, by_holdout
from firm.detector.tune import choose, coreset_ratio
from firm.drawn.render import draw_dataset
from firm.images.preprocess import fingerprint
from firm.metrics.image import auroc
from firm.networks.backbone import Trunk
from firm.recipes.recipe import change, to_json
from firm.research.experiment import Experiment
from firm.runtime.listener import Listener
from firm.runtime.random import stream
from firm.types import OneClass

SIZES = (5, 10, 20, 40, 80)
SIDE = 256  # px of drawn parts
GOOD, DEFECTIVE = 40, 40  # test images, at most


def few(experiment: Experiment, data: OneClass, options: Options, listener: Listener) -> dict[str, Any]:
    """Both ways of calibrating on nested subsets of the good images, judged on test images."""
    recipe, seed = experiment.recipe, options.seed
    family, _, product = data.name.partition(":")
    if family == "drawn":  # other parts for every seed, so that no test image counts twice
        data = draw_dataset(product, seed=seed, size=SIDE, train=max(SIZES), good=GOOD, bad=DEFECTIVE)
    pool = _pool(group_by_part(data.name, data.train), seed)
    test = _test_images(data)
    data = replace(data, train=data.train[pool], files=(), test=data.test[test], anomalous=data.anomalous[test])
    parts, backbone = torch.arange(len(pool)), frozen_backbone(recipe, options.device)  # one image of each part
    tuned = choose(recipe, data, parts, seed=seed, backbone=backbone, listener=listener)
    prepared = prepare(
        tuned.recipe,
        data,
        parts,
        seed=seed,
        backbone=backbone,
        masks=tuned.masks,
        folder=options.folder,
        listener=listener,
    )
    assert backbone is not None
    backbone.trunk = _Once(backbone.trunk)  # ten models score the same test images
    sizes = [size for size in SIZES if size <= len(pool)]
    measured = {str(size): _both(prepared.subset(torch.arange(size)), data, seed) for size in sizes}
    best = measured[str(sizes[-1])]["folds"]["auroc"]
    return {
        "summary": f"image AUROC {100 * best:.1f} from {sizes[-1]} good images",
        "recipe": to_json(tuned.recipe),
        "good_images": len(pool),
        "test_images": len(data.test),
        "final": measured,
    }


class _Once(Trunk):
    """A trunk that sees no portion of images twice."""

    def __init__(self, trunk: Trunk) -> None:
        super().__init__()
        self.trunk = trunk
        self.seen = dict[str, list[Tensor]]()

    def stages(self, images: Float[Tensor, "n 3 h w"]) -> list[Tensor]:
        key = fingerprint(images)
        if key not in self.seen:
            self.seen[key] = self.trunk.stages(images)
        return self.seen[key]

    def finished(self, stage: int, averaged: Float[Tensor, "n c r s"]) -> Float[Tensor, "n c r s"]:
        return self.trunk.finished(stage, averaged)


def _both(prepared: Prepared, data: OneClass, seed: int) -> dict[str, Any]:
    good, parts, options = prepared.data, prepared.parts, Options(seed=seed)
    count = len(parts)
    holdout = default_holdout(count, FALSE_CALLS)
    split = by_holdout(good, torch.arange(count), holdout, seed=seed, min_parts=parts_needed(FALSE_CALLS))
    held = torch.isin(torch.arange(count), split.held_out_parts)
    learnt = _sampled(prepared.subset((~held).nonzero().squeeze(1)))
    split_rates = replace(options, false_calls=FALSE_CALLS, fail=0.01)  # the former defaults
    ways = {
        "split": learn(learnt, split, split_rates, {}, check=False),
        "folds": learn(_sampled(prepared), by_folds(good, parts, FOLDS, seed=seed), options, {}, check=False),
    }
    values = {}
    for way, fitted in ways.items():
        assert fitted.calibration is not None
        scores = fitted.model.score(data.test)
        values[way] = _judged(fitted.calibration, scores, data.anomalous)
    return values


def _sampled(prepared: Prepared) -> Prepared:
    """The coreset as large as in a fit to these images."""
    assert prepared.aligned is not None
    if prepared.recipe.memory.sampling_ratio == 1:
        return prepared
    ratio = coreset_ratio(prepared.recipe, prepared.aligned.images)
    return replace(prepared, recipe=change(prepared.recipe, {"memory.sampling_ratio": ratio}))


def _judged(by: Calibration, scores: Float[Tensor, " m"], anomalous: Bool[Tensor, " m"]) -> dict[str, Any]:
    """Verdicts on good and defective test images, what was stated of the good ones, and what the ranking allows."""
    good, defects = scores[~anomalous], scores[anomalous]
    verdicts = {"good": list(map(by.verdict, good.tolist())), "defects": list(map(by.verdict, defects.tolist()))}
    counts = {name: {kind: found.count(kind) for kind in (PASS, REVIEW, FAIL)} for name, found in verdicts.items()}
    ideal = good.quantile(1 - by.reviewed.kept)  # the threshold that keeps the stated rate on these very images
    moved = drift(good, torch.tensor(by.scores, dtype=torch.float64), estimated=by.basis == "folds")
    return counts | {
        "stated": {"review": by.reviewed.kept, "fail": by.failed.kept},
        "ideal_passes": int((defects <= ideal).sum()),
        "drift": moved.direction,
        "auroc": round(auroc(scores, anomalous), 5),
    }


def _pool(parts: Int[Tensor, " n"], seed: int) -> Int[Tensor, " k"]:
    """One random image of each of as many parts as the largest subset has, in random order."""
    order = torch.randperm(len(parts), generator=stream(seed, "few"))
    first = dict[int, int]()
    for number in order.tolist():
        first.setdefault(int(parts[number]), number)
    return torch.tensor(list(first.values())[: max(SIZES)])


def _test_images(data: OneClass) -> Int[Tensor, " k"]:
    """Good and defective test images, a fixed number of them."""
    chosen = []
    for label, most in ((False, GOOD), (True, DEFECTIVE)):
        side = (data.anomalous == label).nonzero().squeeze(1)
        chosen.append(side[torch.randperm(len(side), generator=stream(0, "few test", label))[:most]])
    return torch.cat(chosen).sort().values
