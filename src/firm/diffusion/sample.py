"""Sampling with strength (RealNet's SDAS): each step's noise is stronger than the model learnt, so anomalies appear.

Ancestral sampling on respaced steps, x_{t-1} = mu(x_t) + sigma_t sqrt(1 + s) eps: s = 0 gives normal images. The DDIM
variant is deterministic but for a term sigma_t sqrt(s) eps. Noise comes from streams named by class, batch and step.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import cv2
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from firm.diffusion.model import TIMES, DiffusionModel, Noised, alpha_bar, predict
from firm.errors import DataError, SettingError, named
from firm.runtime.files import write_atomically
from firm.runtime.random import stream

METHODS = ("ddpm", "ddim")
LEAST_VARIANCE = 1e-20
QUALITY = 95  # of JPEG files
CARD = "sia.json"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How images are drawn. For `ddim`, RealNet's strengths are 0.01 to 0.03."""

    strength: tuple[float, float] = (0.1, 0.2)  # s, drawn uniformly for each batch; 0: normal images
    steps: int = 20
    method: str = "ddpm"
    batch: int = 8

    def __post_init__(self) -> None:
        for name, allowed, fix in (
            ("strength", 0 <= self.strength[0] <= self.strength[1] < 10, "it must rise, from 0 or more"),
            ("steps", 1 <= self.steps <= TIMES, f"use 1 to {TIMES}"),
            ("method", self.method in METHODS, f"use one of {', '.join(METHODS)}"),
            ("batch", self.batch >= 1, "use 1 or more"),
        ):
            if not allowed:
                raise SettingError(f"{name} of the sampling is {getattr(self, name)!r}; {fix}")


def times(steps: int) -> list[int]:
    """The respaced noise levels, the noisiest first: 950, 900, ..., 0 for 20."""
    return [number * (TIMES // steps) for number in reversed(range(steps))]


def reverse_step(
    noisy: Noised,
    output: Float[Tensor, "b c s s"],
    noise: Noised,
    *,
    time: int,
    stride: int,
    strength: float,
    ddim: bool,
) -> Noised:
    """One step towards the image, from a noise level to the one `stride` below; the last step adds no noise."""
    before = alpha_bar()[time - stride] if time >= stride else torch.tensor(1.0)
    now = alpha_bar()[time]
    alpha = now / before
    predicted, learnt = output[:, :3], output[:, 3:]
    image = ((noisy - (1 - now) ** 0.5 * predicted) / now**0.5).clamp(-1, 1)
    variance = ((1 - before) / (1 - now) * (1 - alpha)).clamp(min=LEAST_VARIANCE)
    sigma = log_variance(learnt, variance, 1 - alpha).mul(0.5).exp() if learnt.shape[1] else variance**0.5
    if ddim:
        mean, factor = before**0.5 * image + (1 - before) ** 0.5 * predicted, strength**0.5
    else:
        mean = (before**0.5 * (1 - alpha)) / (1 - now) * image + alpha**0.5 * (1 - before) / (1 - now) * noisy
        factor = (1 + strength) ** 0.5
    return mean if time == 0 or not factor else mean + sigma * (noise if factor == 1 else factor * noise)


def log_variance(learnt: Tensor, least: Tensor, most: Tensor) -> Tensor:
    """The log variance that an output in -1..1 stands for: between that of the posterior and beta."""
    part = (learnt + 1) / 2
    return part * most.log() + (1 - part) * least.log()


@torch.no_grad()
def sample(
    model: DiffusionModel,
    count: int,
    sampling: Sampling,
    *,
    seed: int,
    label: int = 0,
    skip: Callable[[range], bool] = lambda _: False,
) -> Iterator[tuple[range, UInt8[Tensor, "b 3 s s"]]]:
    """Batches of images of a class with their numbers; those for which `skip` is true are not made.

    An image depends on seed, class, number and settings, so fewer images are the first of many.
    """
    device = next(model.network.parameters()).device
    shape = (sampling.batch, 3, model.settings.side, model.settings.side)
    for begin in range(0, count, sampling.batch):
        numbers, batch = range(begin, min(begin + sampling.batch, count)), begin // sampling.batch
        if skip(numbers):
            continue
        low, high = sampling.strength
        strength = low + (high - low) * float(torch.rand(1, generator=stream(seed, "sia strength", label, batch)))

        def noise(step: int, batch: int = batch, size: int = len(numbers)) -> Noised:
            return torch.randn(shape, generator=stream(seed, "sia noise", label, batch, step))[:size].to(device)

        noisy, labels = noise(sampling.steps), torch.full((len(numbers),), label, device=device)
        for step, time in enumerate(times(sampling.steps)):
            output = predict(model.network, noisy, torch.full_like(labels, time), labels)
            stride, ddim = TIMES // sampling.steps, sampling.method == "ddim"
            noisy = reverse_step(noisy, output, noise(step), time=time, stride=stride, strength=strength, ddim=ddim)
        yield numbers, ((noisy + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu()


def write_samples(
    model: DiffusionModel,
    folder: Path,
    count: int,
    sampling: Sampling,
    *,
    seed: int,
    classes: tuple[str, ...] = (),
    on_images: Callable[[int], None] = lambda _: None,
) -> list[Path]:
    """Write `count` images per class as FOLDER/CLASS/00000.jpg, RealNet's layout; images that are there are kept.

    A folder with images of another model or other settings is refused. Returns the folder of each class.
    """
    known = model.settings.classes
    if unknown := sorted(set(classes) - set(known)):
        raise SettingError(f"this model has no class {unknown[0]!r}; it has {', '.join(known)}")
    card = {"model": model.id, "seed": seed, **asdict(sampling), "strength": list(sampling.strength)}
    _check_card(folder, card)
    for name in (places := [folder / each for each in classes or known]):

        def is_there(numbers: range, place: Path = name) -> bool:
            there = all(_file(place, number).is_file() for number in numbers)
            if there:
                on_images(len(numbers))
            return there

        for numbers, images in sample(model, count, sampling, seed=seed, label=known.index(name.name), skip=is_there):
            for number, image in zip(numbers, images, strict=True):
                write_image(_file(name, number), image)
            on_images(len(numbers))
    return places


def _file(place: Path, number: int) -> Path:
    return place / f"{number:05d}.jpg"


def write_image(file: Path, image: UInt8[Tensor, "3 s s"]) -> None:
    """Write a JPEG file."""
    pixels = cv2.cvtColor(image.permute(1, 2, 0).contiguous().numpy(), cv2.COLOR_RGB2BGR)
    write_atomically(file, cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])[1].tobytes())


def _check_card(folder: Path, card: dict[str, object]) -> None:
    """Write what decides the images beside them; refuse a folder of others."""
    file = folder / CARD
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        write_atomically(file, (json.dumps(card, indent=1) + "\n").encode())
        return
    except (ValueError, RecursionError) as error:
        raise DataError(f"{named(file)} is damaged; remove the folder or name another one") from error
    if found != card:
        raise SettingError(f"{named(folder)} has images of another model or other settings; name another folder")
