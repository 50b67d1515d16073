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
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from jaxtyping import UInt8
from torch import Tensor

from firm.data.registry import load
from firm.diffusion.model import Denoiser, DiffusionModel, diffusers, sized, to_model
from firm.diffusion.sample import CARD, Sampling, sample, write_image, write_samples
from firm.diffusion.train import LEARNING, Cost, Images, Learning, OnSamples, cost_of, learn_images
from firm.images.foreground import automatic
from firm.images.preprocess import fingerprint
from firm.outliers.registry import Sia, scene_of
from firm.recipes.recipe import Recipe, change
from firm.runtime.files import cache_folder, folder_lock
from firm.runtime.listener import SILENT, Listener
from firm.runtime.random import stream
from firm.training.runs import CHECKPOINT

PRODUCT = "part"
MODEL, RUN, DONE = "model.sia", "run", "done"
WAIT = 2.0  # seconds between looks at a folder that another process fills


def generated(
    recipe: Recipe,
    images: UInt8[Tensor, "n c h w"],
    *,
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
    parts = [asdict(settings), asdict(learning), asdict(sampling), fingerprint(good), source.seed]
    name = Path("sia") / hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    place = cache_folder() / name
    with _own(place, listener):
        finished = place / f"{DONE}-{source.images}"
        if not finished.exists():
            if not (place / "images" / CARD).exists():  # the work has not begun, or only the training
                cost = cost_of(settings, learning, sampling, device=str(device))
                listener.say(described(cost, learning, source.images, settings.side))
            model = _model(place, good, source, str(device), checkpoint_seconds, listener)
            counted = listener.count("sampling anomalies", source.images)
            write_samples(model, place / "images", source.images, sampling, seed=source.seed, on_images=counted)
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
        learning_of(source),
        seed=source.seed,
        folder=place / RUN,
        device=device,
        checkpoint_seconds=checkpoint_seconds,
        listener=listener,
    )
    model.save(place / MODEL)
    (place / RUN / CHECKPOINT).unlink(missing_ok=True)
    return model


def train_products(
    products: Sequence[str],
    settings: Denoiser,
    learning: Learning,
    *,
    seed: int,
    weights: Path | None = None,
    folder: Path | None = None,
    device: str = "cpu",
    checkpoint_seconds: float = 30.0,
    listener: Listener = SILENT,
    on_samples: OnSamples | None = None,
) -> DiffusionModel:
    """A diffusion model of the good images of each product, by name as `firm.data.registry.load` takes it."""
    good = [to_model(load(name, side=settings.side, with_test=False).train, settings.side) for name in products]
    labels = torch.cat([torch.full((len(images),), number) for number, images in enumerate(good)])
    return learn_images(
        torch.cat(good),
        labels,
        settings,
        learning,
        seed=seed,
        weights=weights,
        folder=folder,
        device=device,
        checkpoint_seconds=checkpoint_seconds,
        listener=listener,
        on_samples=on_samples,
    )


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
