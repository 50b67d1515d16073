"""The images that `outliers=sia` blends: a diffusion model of the good images is trained, and sampled with strength.

They are kept in the cache (FIRM_CACHE), in a folder named by all that decides them, so that fits, folds and the rows of
a table share them, and an interrupted training or sampling goes on where it was.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from firm.diffusion.model import DiffusionModel, diffusers, sized, to_model
from firm.diffusion.sample import CARD, Sampling, write_samples
from firm.diffusion.train import LEARNING, Cost, Images, Learning, cost_of, learn_images
from firm.images.preprocess import fingerprint
from firm.outliers.registry import Sia
from firm.recipes.recipe import Recipe, change
from firm.runtime.files import cache_folder, folder_lock
from firm.runtime.listener import SILENT, Listener
from firm.training.runs import CHECKPOINT

PRODUCT = "part"
MODEL, RUN, DONE = "model.sia", "run", "done"
WAIT = 2.0  # seconds between looks at a folder that another process fills


def generated(
    recipe: Recipe,
    images: UInt8[Tensor, "n c h w"],
    *,
    seed: int,
    device: torch.device | str = "cpu",
    checkpoint_seconds: float = 30.0,
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
    good = to_model(images, settings.side)
    parts = [asdict(settings), asdict(learning), asdict(sampling), fingerprint(good), seed]
    name = Path("sia") / hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    place = cache_folder() / name
    with _own(place, listener):
        finished = place / f"{DONE}-{source.images}"
        if not finished.exists():
            if not (place / "images" / CARD).exists():  # the work has not begun, or only the training
                cost = cost_of(settings, learning, sampling, device=str(device))
                listener.say(described(cost, learning, source.images, settings.side))
            model = _model(place, good, source, learning, seed, str(device), checkpoint_seconds, listener)
            counted = listener.count("sampling anomalies", source.images)
            write_samples(model, place / "images", source.images, sampling, seed=seed, on_images=counted)
            finished.touch()
    return change(recipe, {"outliers.folder": (name / "images" / PRODUCT).as_posix()})


def learning_of(source: Sia) -> Learning:
    """How the diffusion model of a source is trained."""
    return replace(LEARNING[source.model], steps=source.steps) if source.steps else LEARNING[source.model]


def described(cost: Cost, learning: Learning, images: int, side: int) -> str:
    """What a generator costs, as a sentence."""
    minutes = cost.seconds(learning.steps, images) / 60
    took = f"{minutes / 60:.1f} hours" if minutes > 90 else f"{minutes:.1f} minutes"
    return (
        f"a diffusion model of {cost.parameters / 1e6:.1f} M parameters, {learning.steps:,} steps of "
        f"{learning.batch} images of {side} px, then {images:,} samples: about {took} on this machine"
    )


def _model(
    place: Path,
    good: Images,
    source: Sia,
    learning: Learning,
    seed: int,
    device: str,
    checkpoint_seconds: float,
    listener: Listener,
) -> DiffusionModel:
    """The trained model of a folder."""
    if (place / MODEL).exists():
        return DiffusionModel.load(place / MODEL, device)
    model = learn_images(
        good,
        torch.zeros(len(good), dtype=torch.long),
        sized(source.model, (PRODUCT,)),
        learning,
        seed=seed,
        folder=place / RUN,
        device=device,
        checkpoint_seconds=checkpoint_seconds,
        listener=listener,
    )
    model.save(place / MODEL)
    (place / RUN / CHECKPOINT).unlink(missing_ok=True)
    return model


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
