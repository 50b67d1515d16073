"""How many images fit into a memory budget, and how many epochs into a time budget."""

import time

import torch

from firm.detector.prepare import Prepared
from firm.detector.self_check import INSPECTED, KNOWN, PROBES
from firm.errors import MachineError
from firm.images.preprocess import Preprocessing
from firm.networks.backbone import Backbone
from firm.networks.heads import Network
from firm.recipes.recipe import Recipe
from firm.scoring.models import BY_MEAN
from firm.scoring.patch_features import EncoderFeatures, cell_pixels, feature_count, kinds_of
from firm.training.loop import start, train

MEMORY = 6.0  # default memory budget of a fit, GB
FEWEST = 20  # good images that the memory must hold
LIBRARIES = 700e6  # bytes of the libraries, the network and a training step
PIXEL_COPIES, FEATURE_COPIES = 6, 3  # copies of an image's pixels and of its patch features held at the peak
TIMED = 4  # training steps to time
LEAST_EPOCHS = 5  # even if the time is too short
MOST_ADAPTOR_EPOCHS = 30  # an adaptor gains nothing from more
MATRIX = 1024  # side of the matrices whose product measures the speed of this machine
SEARCH_SPEED = 0.5  # speed of a neighbour search relative to a matrix product


def most_images(recipe: Recipe, side: int, gigabytes: float, backbone: Backbone | None) -> int:
    """How many good images a fit can use within a memory budget."""
    per_image = _image_bytes(recipe, side, backbone)
    if (images := int((gigabytes * 1e9 - LIBRARIES) / per_image)) < FEWEST:
        least = (LIBRARIES + FEWEST * per_image) / 1e9
        raise MachineError(f"{gigabytes:g} GB of memory are too little for a fit; give {least:.1f} or more")
    return images


def epochs_within(
    minutes: float, elapsed: float, prepared: Prepared, backbone: Backbone | None, *, held_out: int, device: str
) -> int:
    """How many epochs fit into the minutes less the elapsed seconds: times a few steps on a throw-away network."""
    recipe, task = prepared.recipe, prepared.task
    state, moments = start(task.network(recipe.encoder), task.training, device), list[float]()
    for _ in train(state, task, recipe.method):
        moments.append(time.perf_counter())
        if len(moments) > TIMED:  # the first step warms up and is not timed
            break
    step = (moments[-1] - moments[0]) / max(1, len(moments) - 1)
    scored = held_out + 2 * INSPECTED + PROBES * (KNOWN + 2 * INSPECTED)
    after = _search_seconds(recipe, prepared, backbone) * (1 + scored / len(prepared.data.train))
    epochs = (60 * minutes - elapsed - after) / max(step * task.steps_per_epoch, 1e-9)
    return max(LEAST_EPOCHS, int(min(epochs, MOST_ADAPTOR_EPOCHS) if backbone is not None else epochs))


def feature_sizes(recipe: Recipe, backbone: Backbone | None) -> dict[str, int]:
    """The feature dimension of each kind for one patch."""
    grid, settings = recipe.grid, recipe.pretrained
    if backbone is not None:
        patch = torch.zeros(1, 3, settings.pool * grid.stride, settings.pool * grid.stride, dtype=torch.uint8)
        pixels = cell_pixels(grid, settings.pool, patch, grey=False).shape[-1]
        trained = {"encoder": settings.out, "projection": recipe.encoder.head.out}
        return trained | {"backbone": feature_count(settings, backbone.facts), "pixels": pixels}
    with torch.device("meta"):
        network = Network(recipe.encoder)
    kinds = kinds_of(recipe.features)
    extractor = EncoderFeatures(network.to_empty(device="cpu"), Preprocessing(grid.size), grid, kinds, grey=False)
    patch = torch.zeros(1, 3, grid.size, grid.size, dtype=torch.uint8)
    return {kind: features.shape[-1] for kind, features in extractor(patch).items()}


def _image_bytes(recipe: Recipe, side: int, backbone: Backbone | None) -> float:
    pixels = PIXEL_COPIES * 3 * side * side
    if not recipe.patchwise:
        return pixels
    working = min(side, recipe.size or side)
    working -= working % recipe.grid.stride if recipe.pretrained.name else 0
    rows, columns = recipe.grid.shape(working, working)
    sizes = feature_sizes(recipe, backbone)
    return pixels + FEATURE_COPIES * 4 * rows * columns * sum(sizes[kind] for kind in kinds_of(recipe.features))


def _search_seconds(recipe: Recipe, prepared: Prepared, backbone: Backbone | None) -> float:
    """Estimated time to select a coreset and to compare every good patch with its neighbourhood."""
    if not recipe.patchwise:
        return 0.0
    side, memory, sizes = prepared.task.preprocessing.size, recipe.memory, feature_sizes(recipe, backbone)
    rows, columns = recipe.grid.shape(side, side)
    patches = len(prepared.data.train) * rows * columns
    kept = memory.kept(patches)
    coreset = kept if memory.sampling == "coreset" and kept < patches else 0
    near = 1.0 if memory.neighbourhood < 0 else min(1.0, (2 * memory.neighbourhood + 1) ** 2 / (rows * columns))
    numbers = sum(sizes[kind] for kind in kinds_of(recipe.features) if kind != BY_MEAN)
    matrix = torch.ones(MATRIX, MATRIX)
    matrix @ matrix  # warm-up
    began = time.perf_counter()
    matrix @ matrix
    products_per_second = MATRIX**3 / max(1e-9, time.perf_counter() - began)
    return numbers * patches * (coreset + kept * near) / (SEARCH_SPEED * products_per_second)
