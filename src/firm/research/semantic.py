"""The semantic protocol: one class is normal. Training with probes, then every score of the paper; or plain pixels.

Scoring is kept cheap: each view is embedded once for all scores, the ensembles are scored at the end only, and the
probes of a reduced test compare with few references.
"""

from collections.abc import Mapping
from dataclasses import asdict

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from firm.detector.fit import train
from firm.detector.prepare import Prepared, prepare
from firm.detector.read import Options
from firm.images.preprocess import Preprocessing
from firm.metrics.image import Interval, auroc, auroc_interval
from firm.networks.heads import Network
from firm.networks.resnet import ResNet
from firm.recipes.recipe import to_json
from firm.research.experiment import Experiment
from firm.research.probes import Measured, left_by, probing, properties, rounded
from firm.runtime.listener import Listener
from firm.runtime.random import stream
from firm.scoring.image_scores import SCORINGS, Scoring, fit_scorings, reference_features, score_images, with_k
from firm.scoring.knn import CHUNK, nearest, unit
from firm.training.runs import Run
from firm.types import OneClass

Images = UInt8[Tensor, "_ c h w"]
Scorings = Mapping[str, Scoring]

PROBES = {"s_con k=1": SCORINGS["s_con"], "s_con k=5": with_k(SCORINGS["s_con"], 5)}
FINAL: dict[str, Scoring] = {
    f"{name} k={k}": with_k(SCORINGS[name], k)
    for name in ("s_con", "s_con*", "s_shift", "s_shift*", "s_ens", "s_ens*")
    for k in (1, 5)
} | {name: SCORINGS[name] for name in ("s_proto", "kde")}
NEIGHBOURS = (1, 5)
REFERENCES = 1000  # good images that a probe of a reduced test compares with


def semantic(experiment: Experiment, data: OneClass, options: Options, listener: Listener) -> Measured:
    """Train on one class with probes, then measure every score of the paper; plain pixels are only compared."""
    prepared = prepare(experiment.recipe, data, torch.arange(len(data.train)), seed=options.seed)
    subset = balanced_subset(data.anomalous, experiment.test_images)
    if experiment.recipe.features == "pixels":
        return _pixels(experiment, prepared, data, subset)
    few, how = _references(len(data.train), experiment.test_images), prepared.task.preprocessing
    test, anomalous = data.test[subset], data.anomalous[subset]

    def encoder(run: Run) -> ResNet:
        network = prepared.trained(run)
        assert isinstance(network, Network)  # whole images are not described by a backbone
        return network.encoder

    def probe(run: Run) -> Measured:
        scores = scored(encoder(run), how, data.train[few], test, PROBES)
        return {name: {"value": rounded(auroc(values, anomalous))} for name, values in scores.items()}

    run = train(prepared, options, listener=listener, callbacks=[probing(experiment, probe)])
    measured = evaluate_scorings(encoder(run), how, data.train, test, anomalous, FINAL)
    final = {name: rounded(asdict(value)) for name, value in measured.items()}
    training = left_by(run, data)
    last = probe(run) if len(few) < len(data.train) else {name: {"value": final[name]["value"]} for name in PROBES}
    training["probes"].append({"step": run.steps, **last, **properties(run, run.steps)})
    return {
        "summary": f"s_con k=1 {100 * final['s_con k=1']['value']:.1f}",
        "recipe": to_json(experiment.recipe),
        **training,
        "test_images": len(subset),
        "final": final,
    }


def scored(
    encoder: ResNet, how: Preprocessing, good: Images, test: Images, scorings: Scorings
) -> dict[str, Float[Tensor, " m"]]:
    """The test images by every scoring, from one embedding of the good images and one of each view."""
    turns = max(scoring.turns for scoring in scorings.values())
    fitted = fit_scorings(scorings, reference_features(encoder, how, good, turns))
    return score_images(encoder, how, test, fitted)


def evaluate_scorings(
    encoder: ResNet, how: Preprocessing, good: Images, test: Images, anomalous: Bool[Tensor, " m"], scorings: Scorings
) -> dict[str, Interval]:
    """AUROC of every scoring with its interval."""
    scores = scored(encoder, how, good, test, scorings)
    return {name: auroc_interval(values, anomalous) for name, values in scores.items()}


def balanced_subset(anomalous: Bool[Tensor, " m"], images: int, *, seed: int = 0) -> Int[Tensor, " k"]:
    """Indices of a reduced test set, half normal and half anomalous where there are enough; 0 is all of it."""
    if not images or images >= len(anomalous):
        return torch.arange(len(anomalous))
    rng = stream(seed, "test subset")
    normal, wrong = ((anomalous == label).nonzero().squeeze(1) for label in (False, True))
    take = min(images // 2, len(normal))
    chosen = [side[torch.randperm(len(side), generator=rng)] for side in (normal, wrong)]
    return torch.cat([chosen[0][:take], chosen[1][: images - take]]).sort().values


def pixel_scores(good: Float[Tensor, "n d"], test: Float[Tensor, "m d"], k: int, metric: str) -> Float[Tensor, " m"]:
    """The floor of a table: the mean distance to the k nearest good images, pixel by pixel."""
    if metric == "cosine":
        return 1 - nearest(unit(test), unit(good), k).mean(1)
    chunks = test.split(max(1, CHUNK // len(good)))
    return torch.cat([torch.cdist(part, good).topk(k, dim=1, largest=False).values.mean(1) for part in chunks])


def _pixels(experiment: Experiment, prepared: Prepared, data: OneClass, subset: Int[Tensor, " k"]) -> Measured:
    """Nearest neighbours among the pixels that an encoder would be given."""
    view, metric = prepared.task.preprocessing.test_view, experiment.recipe.memory.metric
    good, test = (
        torch.cat([view(part).flatten(1) for part in images.split(256)]) for images in (data.train, data.test[subset])
    )
    scores = {f"s_con k={k}": pixel_scores(good, test, k, metric) for k in NEIGHBOURS}
    final = {name: rounded(asdict(auroc_interval(each, data.anomalous[subset]))) for name, each in scores.items()}
    return {
        "summary": f"pixels, {metric} k=1 {100 * final['s_con k=1']['value']:.1f}",
        "recipe": to_json(experiment.recipe),
        "steps": 0,
        "good_images": len(data.train),
        "probes": [],
        "diagnostics": None,
        "test_images": len(subset),
        "final": final,
    }


def _references(images: int, reduced: int) -> Int[Tensor, " r"]:
    """The good images that a probe compares with: a random choice where the test is reduced, else all."""
    if not reduced or images <= REFERENCES:
        return torch.arange(images)
    return torch.randperm(images, generator=stream(0, "probe references"))[:REFERENCES].sort().values
