"""The images that `outliers=sia` blends: a diffusion model of the good images is trained, and sampled with strength.

They are kept in the cache (FIRM_CACHE), in a folder named by all that decides them, so that fits, folds and the rows of
a table share them, and an interrupted training or sampling goes on where it was.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from firm.data.registry import load
from firm.diffusion.model import Denoiser, DiffusionModel, diffusers, sized, to_model
from firm.diffusion.sample import Sampling, sample, write_image, write_samples
from firm.diffusion.train import LEARNING, Cost, Images, Learning, cost_of, learn_images
from firm.images.foreground import automatic
from firm.images.preprocess import fingerprint
from firm.outliers.registry import Sia, scene_of
from firm.recipes.recipe import Recipe, change
from firm.runtime.files import cache_folder, folder_lock
from firm.runtime.listener import SILENT, Listener
from firm.runtime.random import stream
from firm.training.runs import CHECKPOINT

PRODUCT = "part"
MODEL, RUN = "model.sia", "run"
WAIT = 2.0  # seconds between looks at a folder that another process fills


def generated(
    recipe: Recipe,
    images: UInt8[Tensor, "n c h w"],
    *,
    device: torch.device | str = "cpu",
    listener: Listener = SILENT,
) -> Recipe:
    """The recipe with the folder of its SIA images, which are made first if they are not there; others are unchanged.

    The time it takes is estimated from a few timed steps and reported before the work begins.
    """
    source = recipe.outliers
    if not isinstance(source, Sia) or source.folder or not recipe.training.epochs:
        return recipe
    diffusers()  # a missing package is reported before anything is computed
    settings, learning, sampling = sized(source.model), learning_of(source), Sampling(strength=source.strength)
    good, count, seed = to_model(images, settings.side), source.images, source.seed
    parts = [asdict(settings), asdict(learning), asdict(sampling), fingerprint(good), seed]
    name = Path("sia") / hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    place, samples = cache_folder() / name, f"images-{count}"
    with _own(place, listener):
        if len([*(place / samples / PRODUCT).glob("*.jpg")]) < count:
            steps = 0 if (place / MODEL).exists() else learning.steps
            listener.say(described(cost_of(settings, learning, device=str(device)), learning, steps, count, settings))
            if steps:
                labels, learn = torch.zeros(len(good), dtype=torch.long), partial(learn_images, device=str(device))
                model = learn(good, labels, settings, learning, seed=seed, folder=place / RUN, listener=listener)
                model.save(place / MODEL)
                (place / RUN / CHECKPOINT).unlink(missing_ok=True)
            model = DiffusionModel.load(place / MODEL, device)
            counted = listener.count("sampling anomalies", count)
            write_samples(model, place / samples, count, sampling, seed=seed, on_images=counted)
    return change(recipe, {"outliers.folder": (name / samples / PRODUCT).as_posix()})


def learning_of(source: Sia) -> Learning:
    """How the diffusion model of a source is trained."""
    return replace(LEARNING[source.model], steps=source.steps) if source.steps else LEARNING[source.model]


def described(cost: Cost, learning: Learning, steps: int, images: int, settings: Denoiser) -> str:
    """What it costs to train a generator and to sample images, as a sentence."""
    minutes = cost.seconds(steps, images) / 60
    took = f"{minutes / 60:.1f} hours" if minutes > 90 else f"{minutes:.1f} minutes"
    work = [f"{steps:,} steps of {learning.batch} images"] if steps else []
    work += [f"{images:,} samples"] if images else []
    return (
        f"a diffusion model of {cost.parameters / 1e6:.1f} M parameters at {settings.side} px, {' and '.join(work)}: "
        f"about {took} on this machine"
    )


def good_images(products: Sequence[str], side: int) -> tuple[Images, Int[Tensor, " n"]]:
    """The good images of products by name, as `firm.data.registry.load` takes it, and the number of each one's."""
    good = [to_model(load(name, side=side, with_test=False).train, side) for name in products]
    return torch.cat(good), torch.cat([torch.full((len(each),), number) for number, each in enumerate(good)])


def sheet_of(
    model: DiffusionModel,
    product: str,
    strengths: Sequence[float],
    sampling: Sampling,
    *,
    seed: int,
    label: int = 0,
    shown: int = 8,
    listener: Listener = SILENT,
) -> dict[str, Images]:
    """Rows of a sheet: good images, samples of each strength, and good images with samples of 0.1 to 0.2 blended in."""
    good = load(product, with_test=False).train
    good = good[torch.linspace(0, len(good) - 1, min(shown, len(good))).round().long()]
    rows, sampling = {"normal": good}, replace(sampling, batch=min(sampling.batch, shown))
    counted = listener.count("sampling", shown * (len(strengths) + 1))

    def drawn(low: float, high: float) -> Images:
        made = list[Images]()
        for _, images in sample(model, shown, replace(sampling, strength=(low, high)), seed=seed, label=label):
            made.append(images)
            counted(len(images))
        return torch.cat(made)

    for strength in strengths:
        rows[f"s = {strength:g}"] = drawn(strength, strength)
    with TemporaryDirectory() as folder:
        for number, image in enumerate(drawn(*sorted(strengths)[1:3])):
            write_image(Path(folder) / f"{number}.jpg", image)
        scene = scene_of(good, good, None, rule=automatic(good))
        rows["blended"] = Sia(folder=folder)(good, rng=stream(seed, "sheet"), scene=scene).images
    return rows


@contextmanager
def _own(place: Path, listener: Listener) -> Iterator[None]:
    """Hold the lock of a folder; waits while another process fills it."""
    told = False
    while True:
        with folder_lock(place) as mine:
            if mine:
                yield
                return
        if not told:
            listener.say(f"another process makes these images in {place}; waiting for it")
            told = True
        time.sleep(WAIT)
