"""What a plan costs on this machine: a few timed steps of each network, times the steps that its trainings take.

On frozen features embedding is the cost: one image is timed, and what runs share is counted once.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

import torch

from firm.data.registry import DATASETS
from firm.detector.embed_images import FEWEST_OUTLIERS, OUTLIER_VIEWS, ImageEmbedder
from firm.detector.generate import learning_of
from firm.detector.prepare import frozen_backbone
from firm.diffusion.model import sized
from firm.diffusion.train import LEARNING, Cost, cost_of
from firm.errors import FirmError
from firm.images.preprocess import Preprocessing
from firm.networks.adaptor import Adaptor, Pretrained
from firm.networks.heads import Encoder, build
from firm.outliers.registry import Exposure, RotationsAndExposure, Sia
from firm.recipes.presets import SEMANTIC
from firm.recipes.recipe import Recipe
from firm.research.experiment import Experiment
from firm.research.frozen import ENSEMBLE_IMAGES, TURNS
from firm.research.semantic import REFERENCES
from firm.research.tables import stored
from firm.runtime.random import stream
from firm.training.batches import steps_per_epoch
from firm.training.feature_batches import STEPS
from firm.training.loop import Training, start
from firm.views.registry import PatchPairs, SimCLR, Translation

TIMED = 3  # steps, after one that warms up
TIMED_BATCH = 64  # a larger one is taken to last longer in proportion
TIMED_IMAGES = 16  # that a frozen backbone embeds
VIEWS = 44  # of a test image that all scores embed: 4 rotations, and 10 crops of each
TEST_IMAGES = 10_000  # of a whole semantic test

Embedding = tuple[object, ...]  # names what is embedded once for all runs that need it


def good_images(data: str) -> int:
    """How many good images a class of a published set has; 0 where that is not known."""
    family, _, name = data.partition(":")
    numbers = DATASETS[family].classes.get(name, ()) if family in DATASETS else ()
    return stored("tables")["good_images"].get(family) or (numbers[0] if numbers else 0)


def hours(experiments: Iterable[Experiment]) -> tuple[float, int]:
    """CPU hours of the runs whose cost can be told, and the number of those whose cost cannot."""
    costs, shared = list[float | None](), dict[Embedding, float]()
    for experiment in experiments:
        shared |= _generators(experiment)
        if experiment.protocol != "frozen":
            costs.append(_seconds(experiment))
            continue
        try:
            shared |= _embeddings(experiment)
            costs.append(_adaptor_seconds(experiment.recipe))
        except FirmError:  # its weights are not here
            costs.append(None)
    return (sum(shared.values()) + sum(cost or 0 for cost in costs)) / 3600, costs.count(None)


def _seconds(experiment: Experiment) -> float | None:
    """Training, and on semantic sets scoring; None for frozen patches and sets of unknown size."""
    recipe, count = experiment.recipe, good_images(experiment.data)
    if recipe.pretrained.name or experiment.protocol in ("guarantees", "few") or not count:
        return None
    steps = recipe.training.epochs * steps_per_epoch(count, recipe.outliers.per_inlier, recipe.training.batch)
    side = _side(recipe, experiment.data)
    batch = min(recipe.training.batch, TIMED_BATCH)
    step, embed = step_seconds(recipe.encoder, batch, side)
    if isinstance(recipe.views, SimCLR | Translation):
        step += views_seconds(recipe.views, batch, side)
    step *= recipe.training.batch / batch
    if experiment.protocol != "semantic":
        return (experiment.steps or steps) * step
    if recipe.features == "pixels":
        return 0.0
    test = experiment.test_images or TEST_IMAGES
    probed = min(count, REFERENCES) if experiment.test_images else count
    return steps * step + embed * (experiment.probes * (probed + test) + len(TURNS) * count + VIEWS * test)


def _generators(experiment: Experiment) -> dict[Embedding, float]:
    """Seconds of the diffusion model behind `outliers=sia` and its samples; rows and seeds share those of one class."""
    source = experiment.recipe.outliers
    if not isinstance(source, Sia) or source.folder or not experiment.recipe.training.epochs:
        return {}
    seconds = generator_cost(source.model).seconds(learning_of(source).steps, source.images)
    return {("sia", experiment.data, source.model, source.steps, source.images, source.strength, source.seed): seconds}


@cache
def generator_cost(model: str) -> Cost:
    """CPU seconds of a step and a sample of a diffusion model."""
    return cost_of(sized(model), LEARNING[model], clock=time.process_time)


def _side(recipe: Recipe, data: str) -> int:
    if isinstance(recipe.views, PatchPairs):
        return max(recipe.views.sizes)
    return recipe.size or DATASETS[data.partition(":")[0]].size


@cache
def step_seconds(settings: Encoder, batch: int, side: int) -> tuple[float, float]:
    """Seconds of a training step with two views of each item, and of the embedding of one image."""
    state = start(build(settings, rng=stream(0, "weights")), Training())
    images = torch.rand(2 * batch, 3, side, side, generator=stream(0, "pixels"))

    def step() -> None:
        state.network(images).square().mean().backward()
        state.optimizer.step()

    each = _timed(step)
    encoder = state.network.eval().get_submodule("encoder")
    with torch.no_grad():
        return each, _timed(lambda: encoder(images)) / len(images)


@cache
def views_seconds(views: SimCLR | Translation, batch: int, side: int) -> float:
    """Seconds of the views of a batch; views of patches, and outliers, are not timed."""
    images = torch.randint(256, (batch, 3, side, side), dtype=torch.uint8, generator=stream(0, "pixels"))
    return _timed(lambda: views(images, side, rng=stream(0, "views")))


def _embeddings(experiment: Experiment) -> dict[Embedding, float]:
    """Seconds of all features that a run needs, by what decides them: rows, classes and seeds share what is equal."""
    recipe, data, few = experiment.recipe, experiment.data, experiment.test_images
    good, test = few or good_images(data), few or TEST_IMAGES
    made, taught = max(good, FEWEST_OUTLIERS), recipe.outliers
    sources = taught.sources if isinstance(taught, RotationsAndExposure) else (taught,)
    images: dict[Embedding, int] = {
        ("test", data.partition(":")[0]): len(TURNS) * test + (VIEWS - len(TURNS)) * min(test, ENSEMBLE_IMAGES),
        ("turned", data): (len(TURNS) - 1) * good,
        ("good", data): (1 + recipe.pretrained.views) * good,
    }
    if recipe.training.epochs:
        family = data.partition(":")[0]  # exposure is the same for all classes of a size
        images |= {(each, family if isinstance(each, Exposure) else data): OUTLIER_VIEWS * made for each in sources}
    each, _ = embedding(recipe.pretrained, recipe.size)
    how = (recipe.pretrained.name, recipe.pretrained.stages, recipe.size, few)
    return {(*what, *how): count * each for what, count in images.items()}


@cache
def embedding(pretrained: Pretrained, size: int) -> tuple[float, int]:
    """Seconds that a frozen backbone takes for one image, and how many numbers it describes it by."""
    recipe = replace(SEMANTIC, pretrained=pretrained, size=size)
    backbone = frozen_backbone(recipe)
    assert backbone is not None
    images = torch.zeros(TIMED_IMAGES, 3, size, size, dtype=torch.uint8)
    embedder = ImageEmbedder(recipe, backbone, images, Preprocessing(size), 0)
    return _timed(lambda: embedder.tested(images)) / len(images), embedder.tested(images[:1]).shape[1]


def _adaptor_seconds(recipe: Recipe) -> float:
    if not recipe.training.epochs:
        return 0.0
    _, features = embedding(recipe.pretrained, recipe.size)
    step = adaptor_step_seconds(recipe.pretrained, recipe.encoder, recipe.training.batch, features)
    return recipe.training.epochs * STEPS * step


@cache
def adaptor_step_seconds(pretrained: Pretrained, encoder: Encoder, batch: int, features: int) -> float:
    """Seconds of a step of training an adaptor on pairs of features."""
    statistics = torch.zeros(features), torch.ones(features)
    network = Adaptor.build(statistics, pretrained, encoder, rng=stream(0, "weights"))
    inputs = torch.rand(2 * batch, features, generator=stream(0, "features"))
    return _timed(lambda: network(inputs).square().mean().backward())


def _timed(work: Callable[[], object]) -> float:
    """CPU seconds of one call, after one that warms up."""
    work()
    started = time.process_time()
    for _ in range(TIMED):
        work()
    return (time.process_time() - started) / TIMED
