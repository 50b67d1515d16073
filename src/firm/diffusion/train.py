"""Training a denoiser on good images, through the loop and the runs of every training here.

Adam on the squared error of the noise; where the variance is learnt, its bound is added (improved DDPM). The optimiser
clips the gradient, may sum it over several batches, and keeps the average of the weights that samples are drawn with.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from firm.diffusion.guided_weights import start_from
from firm.diffusion.model import TIMES, Denoiser, DiffusionModel, Noised, alpha_bar, build, predict
from firm.diffusion.sample import LEAST_VARIANCE, Sampling, log_variance, sample
from firm.errors import DataError, SettingError
from firm.images.preprocess import fingerprint
from firm.networks.weights import read_weights, tensors_digest
from firm.runtime.files import Card
from firm.runtime.listener import SILENT, Listener
from firm.runtime.random import stream
from firm.training.loop import PRECISIONS, start, train
from firm.training.methods import Diagnosis
from firm.training.runs import Run

SHEETS, SHOWN = 10, 8  # sheets of samples during a training, and images on each
TIMED = 2  # training steps to time, after one that warms up
BITS = math.log(2)

Images = UInt8[Tensor, "n 3 s s"]
Clock = Callable[[], float]
OnSamples = Callable[[int, Images], None]  # the step, and samples of the averaged weights at strength 0


class AveragedAdam(torch.optim.Adam):
    """Adam with clipped gradients, summed over `accumulate` batches, and a moving average of the weights."""

    def __init__(self, network: nn.Module, learning: "Learning") -> None:
        super().__init__(network.parameters(), lr=learning.lr)
        self.learning, self.turn = learning, 0
        for parameter in self.param_groups[0]["params"]:
            zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.state[parameter] = {"step": torch.tensor(0.0), "average": parameter.detach().clone(), **zeros}
            if learning.accumulate > 1:
                self.state[parameter]["sum"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One batch; the weights change with every `accumulate`-th."""
        parameters, parts = self.param_groups[0]["params"], self.learning.accumulate
        if parts > 1:
            for parameter in parameters:
                total = self.state[parameter]["sum"].add_(parameter.grad, alpha=1 / parts)
                parameter.grad.copy_(total)
            if (self.turn + 1) % parts:
                return
        nn.utils.clip_grad_norm_(parameters, self.learning.clip)
        super().step(closure)
        for parameter in parameters:
            own = self.state[parameter]
            made = float(own["step"])
            own["average"].lerp_(parameter, 1 - min(self.learning.average, (1 + made) / (10 + made)))
            if parts > 1:
                own["sum"].zero_()


@dataclass(frozen=True, kw_only=True)
class Learning:
    """How a denoiser is trained: the loop's `Optimisation`. Every step is one batch."""

    steps: int = 3000
    batch: int = 8
    accumulate: int = 1  # batches whose gradients are summed
    lr: float = 2e-4
    warmup: int = 100  # steps over which the learning rate rises
    average: float = 0.999  # decay of the moving average of the weights, less at the start
    clip: float = 1.0  # norm of the gradient
    precision: str = "auto"

    def __post_init__(self) -> None:
        for name, allowed, fix in (
            ("steps", self.steps >= 1, "use 1 or more"),
            ("batch", self.batch >= 1, "use 1 or more"),
            ("accumulate", self.accumulate >= 1, "use 1 or more"),
            ("lr", 0 < self.lr < math.inf, "it must be above 0"),
            ("warmup", self.warmup >= 0, "use 0 or more"),
            ("average", 0 <= self.average < 1, "use 0 or more, below 1"),
            ("clip", self.clip > 0, "it must be above 0"),
            ("precision", self.precision in PRECISIONS, f"use one of {', '.join(PRECISIONS)}"),
        ):
            if not allowed:
                raise SettingError(f"{name} of the diffusion training is {getattr(self, name)!r}; {fix}")

    @property
    def epochs(self) -> int:
        return self.steps

    def optimizer(self, network: nn.Module) -> AveragedAdam:
        return AveragedAdam(network, self)

    def set_rate(self, optimizer: torch.optim.Optimizer, step: int, steps: int) -> float:
        assert isinstance(optimizer, AveragedAdam)
        optimizer.turn = step
        rate = self.lr * min(1.0, (step + 1) / (self.warmup + 1))
        optimizer.param_groups[0]["lr"] = rate
        return rate


LEARNING = {  # for each of `firm.diffusion.model.SIZES`
    "tiny": Learning(),
    # RealNet: batches of 60 on four GPUs, Adam 1e-4, average .9999, 240 epochs of the 3,629 good images of MVTec-AD
    "paper": Learning(steps=240 * 3629 // 5, batch=5, accumulate=12, lr=1e-4, warmup=0, average=0.9999),
}


@dataclass(frozen=True)
class NoisyBatch:
    """Images with noise on them, and what the denoiser is to tell."""

    clean: Noised
    noise: Noised
    noisy: Noised
    times: Int[Tensor, " b"]
    labels: Int[Tensor, " b"]


@dataclass(frozen=True)
class DenoisingTask:
    """Good images of one or several products, and all else that decides the batches."""

    images: Images
    labels: Int[Tensor, " n"]
    training: Learning
    seed: int
    steps_per_epoch: int = 1

    def batch(self, step: int, device: torch.device | str = "cpu", *, rank: int = 0, world: int = 1) -> NoisyBatch:
        """Images in shuffled passes over all, each with noise of a uniformly drawn level."""
        size, count, seed = self.training.batch, len(self.images), self.seed
        places = [divmod(number, count) for number in range(step * size, (step + 1) * size)]
        orders = {each: torch.randperm(count, generator=stream(seed, "order", each)) for each in {p for p, _ in places}}
        which = torch.stack([orders[number][place] for number, place in places])
        drawn = torch.randint(TIMES, (size,), generator=stream(seed, "noise levels", step))
        clean = self.images[which].float() / 127.5 - 1
        noise = torch.randn(clean.shape, generator=stream(seed, "noise", step))
        left = alpha_bar()[drawn][:, None, None, None]
        values = (clean, noise, left.sqrt() * clean + (1 - left).sqrt() * noise, drawn, self.labels[which])
        return NoisyBatch(*(value[rank::world].to(device) for value in values))


@dataclass(frozen=True)
class Denoising:
    """The loss of a denoiser: a `Method` of the loop."""

    def loss(self, network: nn.Module, batch: NoisyBatch) -> tuple[Float[Tensor, ""], Tensor]:
        output = predict(network, batch.noisy, batch.times, batch.labels)
        noise, learnt = output[:, :3], output[:, 3:].float()
        loss = F.mse_loss(noise.float(), batch.noise)
        if learnt.shape[1]:
            loss = loss + variance_bound(batch, noise.detach().float(), learnt).mean()
        return loss, output

    def diagnose(self, outputs: Tensor, batch: NoisyBatch, loss: Float[Tensor, ""]) -> Diagnosis:
        return Diagnosis({"noise_error": float(F.mse_loss(outputs[:, :3].float(), batch.noise))})


def variance_bound(batch: NoisyBatch, noise: Noised, learnt: Noised) -> Float[Tensor, " b"]:
    """The variational bound of each image's step in bits per value, as a function of the learnt variance alone."""
    levels = alpha_bar().to(noise.device)
    now = levels[batch.times][:, None, None, None]
    before = F.pad(levels, (1, 0), value=1.0)[batch.times][:, None, None, None]
    alpha, beta = now / before, 1 - now / before
    first = levels[1]  # the posterior of the last step has no variance; it gets that of the step before it
    smallest = (1 - levels[0]) / (1 - first) * (1 - first / levels[0])
    posterior = torch.where(before == 1, smallest, (1 - before) / (1 - now) * beta).clamp(min=LEAST_VARIANCE)

    def mean(image: Noised) -> Noised:
        return before.sqrt() * beta / (1 - now) * image + alpha.sqrt() * (1 - before) / (1 - now) * batch.noisy

    log_model = log_variance(learnt, posterior, beta)
    predicted = mean((batch.noisy - (1 - now).sqrt() * noise) / now.sqrt())
    square = (mean(batch.clean) - predicted).square()
    divergence = 0.5 * (log_model - posterior.log() - 1 + (posterior + square) * (-log_model).exp())
    bits = torch.where(before == 1, -_log_likelihood(batch.clean, predicted, log_model), divergence)
    return bits.flatten(1).mean(1) / BITS


def _log_likelihood(clean: Noised, mean: Noised, log_variance: Noised) -> Noised:
    """Of the 8-bit value of each pixel under a Gaussian; the two extreme values reach to infinity."""
    deviation = (0.5 * log_variance).exp()
    upper = torch.special.ndtr((clean + 1 / 255 - mean) / deviation)
    lower = torch.special.ndtr((clean - 1 / 255 - mean) / deviation)
    upper = torch.where(clean > 0.999, 1.0, upper)
    lower = torch.where(clean < -0.999, 0.0, lower)
    return (upper - lower).clamp(min=1e-12).log()


def learn_images(
    images: Images,
    labels: Int[Tensor, " n"],
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
    """Train a denoiser on good images; with a folder, an interrupted training resumes bit-equal.

    `weights` is a public guided-diffusion checkpoint to start from. `on_samples` gets samples ten times.
    """
    if not len(images) or images.shape[1:] != (3, settings.side, settings.side):
        raise DataError(f"good images are {tuple(images.shape)}; give uint8 (n, 3, {settings.side}, {settings.side})")
    network = build(settings, seed=seed)
    started = {} if weights is None else read_weights(weights)
    if started:
        start_from(network, settings, started)
    origin: Card = {
        "seed": seed,
        "images": fingerprint(images),
        "labels": fingerprint(labels),
        "learning": asdict(replace(learning, precision="auto")),
        "weights": tensors_digest(started) if started else "",
        "torch": torch.__version__,
    }
    text = json.dumps([asdict(settings), origin], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    task = DenoisingTask(images, labels, learning, seed)
    how = {"device": device, "folder": folder, "checkpoint_seconds": checkpoint_seconds}
    run = Run(task, Denoising(), network, digest=digest, **how)  # type: ignore[arg-type]
    due = {round(learning.steps * (part + 1) / SHEETS) for part in range(SHEETS)}
    for progress in run:
        losses = [line["loss"] for line in run.history.lines[-5:]]
        note = f"loss {sum(losses) / len(losses):.4f}" if losses else ""
        listener.progress("training a diffusion model", progress.step, progress.steps, note)
        if on_samples is not None and progress.step in due:
            shown = Sampling(strength=(0.0, 0.0), batch=SHOWN)
            on_samples(progress.step, next(sample(averaged(run, settings, origin), SHOWN, shown, seed=seed))[1])
    return averaged(run, settings, origin)


def averaged(run: Run, settings: Denoiser, origin: Card) -> DiffusionModel:
    """The model of a run with the averaged weights; the run goes on with its own."""
    network = deepcopy(run.state.network).eval()
    here = dict(run.state.network.named_parameters())
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(run.state.optimizer.state[here[name]]["average"])
    return DiffusionModel(network, settings, origin)


@dataclass(frozen=True)
class Cost:
    """What a generator takes on this machine, from a few timed steps."""

    parameters: int
    step: float  # seconds of a training step
    image: float  # seconds of a sampled image

    def seconds(self, steps: int, images: int) -> float:
        return steps * self.step + images * self.image


LARGEST_TIMED = 50_000_000  # parameters


def cost_of(
    settings: Denoiser,
    learning: Learning,
    sampling: Sampling | None = None,
    *,
    device: str = "cpu",
    clock: Clock = time.perf_counter,
) -> Cost:
    """Times a few steps; a large model is not built: its time is that of `tiny` times the ratio of their operations."""
    sampling = sampling or Sampling()
    with torch.device("meta"):
        parameters = sum(each.numel() for each in build(settings, seed=0).parameters())
    large = parameters > LARGEST_TIMED
    timed = Denoiser() if large else settings
    ratio = _operations(settings) / _operations(timed) if large else 1.0
    step, one = (_timed(timed, learning.batch, device, clock, backward=backward) for backward in (True, False))
    return Cost(parameters, ratio * step, ratio * one / learning.batch * sampling.steps)


def _timed(settings: Denoiser, batch: int, device: str, clock: Clock, *, backward: bool) -> float:
    """Seconds of a step, with or without its backward pass."""
    learning, moments = Learning(batch=batch), list[float]()
    images = torch.zeros(batch, 3, settings.side, settings.side, dtype=torch.uint8)
    task = DenoisingTask(images, torch.zeros(batch, dtype=torch.long), learning, 0)
    state = start(build(settings, seed=0), learning, device)
    given, steps = task.batch(0, device), train(state, task, Denoising())
    for _ in range(TIMED + 1):
        with torch.set_grad_enabled(backward):
            value = (
                next(steps).loss if backward else predict(state.network, given.noisy, given.times, given.labels).sum()
            )
        float(value)  # waits for a GPU
        moments.append(clock())
    return (moments[-1] - moments[0]) / TIMED


def _operations(settings: Denoiser) -> int:
    """Multiplications of one pass of one image, counted without memory."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        network = build(settings, seed=0)
        image, one = torch.empty(1, 3, settings.side, settings.side), torch.zeros(1, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        predict(network, image, one, one)
    return counter.get_total_flops()
