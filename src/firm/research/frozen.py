"""FIRM on frozen features of whole images: every row of one class shares its embeddings, and all classes the test's.

The features of a data set are kept in a folder beside the runs, so rows, classes and seeds embed nothing twice. A seed
decides the weights and batches of a training; views, outliers and the images kept back are those of one seed.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from firm.detector.embed_images import CHUNK, OUTLIER_VIEWS, ImageEmbedder, file_name
from firm.detector.fit import train
from firm.detector.frozen_floor import held_out_auroc, judging_outliers
from firm.detector.prepare import Prepared, frozen_backbone, prepare
from firm.detector.read import Options
from firm.metrics.image import auroc_interval
from firm.networks.adaptor import PIXELS, Adapted, AdaptedImages, small
from firm.recipes.recipe import Recipe, to_json
from firm.research.experiment import Experiment
from firm.research.probes import rounded
from firm.research.semantic import NEIGHBOURS, balanced_subset, pixel_scores
from firm.runtime.feature_cache import stored
from firm.runtime.files import folder_lock
from firm.runtime.listener import Listener
from firm.runtime.random import stream
from firm.scoring.image_scores import SCORINGS, WHOLE, Scoring, TestView, fit_scorings, transformed, with_k
from firm.training.feature_batches import FeatureTask
from firm.types import OneClass

Images = UInt8[Tensor, "n c h w"]
Measured = dict[str, Any]
Pooled = dict[TestView, Float[Tensor, "n d"]]

TURNS: list[TestView] = [(turn, WHOLE) for turn in range(4)]
PLAIN: dict[str, Scoring] = {
    "s_con k=1": SCORINGS["s_con"],
    "s_con k=5": with_k(SCORINGS["s_con"], 5),
    "s_shift": SCORINGS["s_shift"],
    "s_proto": SCORINGS["s_proto"],
}
ENSEMBLE = {"s_ens": SCORINGS["s_ens"]}
ENSEMBLE_IMAGES = 1000  # of the test: each is embedded 40 times
VIEWS_SEED = 0  # of what is embedded, for all seeds
TIMED = 256  # images that are embedded to measure how long one takes


@dataclass(frozen=True)
class Tested:
    """What all rows of a class are measured with: pooled features of its good images and of the test images."""

    references: list[Float[Tensor, "n d"]]  # one per turn
    whole: Pooled  # of all test images
    crops: Pooled  # of the subset
    subset: Int[Tensor, " k"]


def frozen(experiment: Experiment, data: OneClass, options: Options, listener: Listener) -> Measured:
    """Train on one class, and measure every score before and behind the head on all test images."""
    recipe, seed = experiment.recipe, options.seed
    if experiment.test_images:  # a smoke test
        chosen = balanced_subset(data.anomalous, experiment.test_images)
        few = data.train[: experiment.test_images]
        data = replace(data, train=few, test=data.test[chosen], anomalous=data.anomalous[chosen])
    backbone = frozen_backbone(recipe, options.device)
    assert backbone is not None
    parts = torch.arange(len(data.train))
    with _shared(options.folder, data.name, recipe.pretrained.name) as place:
        prepared = prepare(recipe, data, parts, seed=VIEWS_SEED, backbone=backbone, folder=place, listener=listener)
        assert isinstance(prepared.task, FeatureTask)
        prepared = replace(prepared, task=replace(prepared.task, seed=seed))
        tested = _tested(prepared, data, place)
        run = train(prepared, options, listener=listener)
        network, task = prepared.trained(run), prepared.task
        assert isinstance(network, Adapted)
        assert isinstance(task, FeatureTask)
        kinds = dict.fromkeys([recipe.features, *(("encoder", "projection") if recipe.pretrained.head else ())])
        began = time.process_time()
        if recipe.features == PIXELS and recipe.memory.metric == "l2":
            final = {PIXELS: _pixel_distances(tested, data)}
        else:
            final = {kind: _measure(_network(network, recipe, kind), tested, data) for kind in kinds}
        held_out = _held_out(prepared, network, VIEWS_SEED) if recipe.training.epochs else {}
    logged = [line for line in run.history.lines if "loss" in line]
    value = final[recipe.features]["s_con k=1"]["value"]
    return {
        "summary": f"s_con k=1 {100 * value:.1f}",
        "recipe": to_json(recipe),
        "steps": run.steps,
        "good_images": len(data.train),
        "test_images": len(data.test),
        "ensemble_images": len(tested.subset),
        "final": final,
        "held_out": held_out,
        "diagnostics": logged[-1] if logged else None,
        "cpu_seconds": _seconds(prepared, run.seconds, len(data.test)),
        "scoring_seconds": round(time.process_time() - began, 1),
    }


def _network(network: Adapted, recipe: Recipe, kind: str) -> AdaptedImages:
    return AdaptedImages(network.backbone, network.adaptor, recipe.pretrained, kind).eval()


@contextmanager
def _shared(folder: Path | None, name: str, backbone: str) -> Iterator[Path | None]:
    """The folder of the data set's features by a backbone, or that of the run while another process has it."""
    if folder is None:
        yield None
        return
    shared = folder.parents[1] / file_name("features", f"{name.partition(':')[0]}-{backbone}")
    with folder_lock(shared) as mine:
        yield shared if mine else folder


def _tested(prepared: Prepared, data: OneClass, folder: Path | None) -> Tested:
    """Embed the test images in all views, and the good ones turned; each once for all rows and seeds."""
    subset = torch.randperm(len(data.test), generator=stream(0, "ensemble"))[:ENSEMBLE_IMAGES].sort().values
    task, pixels = prepared.task, prepared.recipe.features == PIXELS
    assert isinstance(task, FeatureTask)
    turned = _views(prepared, data.train, TURNS[not pixels :], folder, file_name("turned", data.name))
    references = [*([] if pixels else [task.clean]), *turned.values()]
    whole = _views(prepared, data.test, TURNS, folder, "test")
    crops = {}
    if not pixels:
        crops = _views(prepared, data.test[subset], _all_views(ENSEMBLE), folder, "crops")
    return Tested(references, whole, crops, subset)


def _all_views(scorings: Mapping[str, Scoring]) -> list[TestView]:
    nothing = [torch.zeros(1, 1)] * len(TURNS)
    return [view for scoring in fit_scorings(scorings, nothing).values() for view in scoring.views()]


def _views(prepared: Prepared, images: Images, views: list[TestView], folder: Path | None, name: str) -> Pooled:
    """Pooled features of the images in each view; for plain pixels, the pixels."""
    task, recipe = prepared.task, prepared.recipe
    assert isinstance(task, FeatureTask)
    embedder = ImageEmbedder(recipe, task.backbone, images, task.preprocessing, 0)
    pixels = recipe.features == PIXELS

    def rows(begin: int, end: int) -> Float[Tensor, "n v d"]:
        ready = task.preprocessing.test_view(images[begin:end])
        seen = (transformed(ready, view) for view in views)
        return torch.stack([small(view) if pixels else embedder.pooled(view) for view in seen], dim=1)

    values = stored(None if pixels else folder, name, embedder.key(views), len(images), rows, chunk=CHUNK)
    return {view: values[:, number] for number, view in enumerate(views)}


@torch.no_grad()
def _measure(network: AdaptedImages, tested: Tested, data: OneClass) -> Measured:
    """AUROC of every score by features of one kind; s_ens on the subset."""

    def features(pooled: Float[Tensor, "n d"]) -> Float[Tensor, "n e"]:
        return network.from_pooled(pooled.float().to(network.adaptor.mean.device)).cpu()

    references = [features(pooled) for pooled in tested.references]
    everything = torch.arange(len(data.test))
    parts = [(PLAIN, tested.whole, everything), (ENSEMBLE, tested.crops, tested.subset)]
    measured = {}
    for scorings, pooled, images in parts:
        views = {view: features(values) for view, values in pooled.items()}
        for name, fitted in fit_scorings(scorings if views else {}, references).items():
            wanted = fitted.views()
            scores = torch.stack([fitted.scorers[view[0]](views[view]) for view in wanted]).mean(0)
            measured[name] = asdict(auroc_interval(scores, data.anomalous[images]))
    return dict(rounded(measured))


def _pixel_distances(tested: Tested, data: OneClass) -> Measured:
    """AUROC by the distance to the nearest good images, pixel by pixel."""
    good, test = tested.references[0].float(), tested.whole[TURNS[0]].float()
    scores = {f"s_con k={k}": pixel_scores(good, test, k, "l2") for k in NEIGHBOURS}
    return {name: rounded(asdict(auroc_interval(each, data.anomalous))) for name, each in scores.items()}


def _held_out(prepared: Prepared, network: Adapted, seed: int) -> Measured:
    """AUROC of images kept out of the training against kinds of outliers that it was not taught, by each feature."""
    task, recipe = prepared.task, prepared.recipe
    if not isinstance(task, FeatureTask) or task.validation is None:
        return {}
    images = prepared.data.train[task.validation]
    embedder = ImageEmbedder(recipe, task.backbone, images, task.preprocessing, seed)
    outliers = judging_outliers(embedder, recipe.outliers, seed=seed)
    kinds = ("backbone", "encoder", "projection")
    values = {kind: held_out_auroc(replace(recipe, features=kind), task, network, outliers) for kind in kinds}
    return dict(rounded(values))


def _seconds(prepared: Prepared, training: float, tested: int) -> dict[str, float]:
    """CPU seconds of a class alone: embedding as measured on some of its images, training, scoring by s_con."""
    task = prepared.task
    assert isinstance(task, FeatureTask)
    images = prepared.data.train[:TIMED]
    embedder, began = ImageEmbedder(prepared.recipe, task.backbone, images, task.preprocessing, 0), time.process_time()
    embedder.tested(images)
    each = (time.process_time() - began) / len(images)
    views = 1 + (task.good.features.shape[1] if training else 0)
    embedded = len(task.clean) * views + len(task.outliers.features) * OUTLIER_VIEWS
    seconds = {"per_image": each, "embedding": embedded * each, "training": training, "test": tested * each}
    return dict(rounded(seconds))
