"""Schedule, step, and the loop: one visible function that yields what happened.

Everything random in a step is drawn from streams named by the step (see `streams`), so the state of a run is
the network, the optimiser's momenta and a step number: exact resume needs nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from firm import storage
from firm.batching import make_batch, steps_per_epoch
from firm.encoder import Encoder, Network, build
from firm.images import Preprocessing, fingerprint
from firm.objective import LAYOUTS, POSITIVES, Diagnostics, contrastive_loss, diagnose
from firm.replay import Replay
from firm.streams import stream
from firm.types import Batch, FirmError, OutlierSource, Views

SCHEDULES = ("cosine", "one-cycle")
PRECISIONS = ("float32", "bfloat16", "auto")


@dataclass(frozen=True, kw_only=True)
class Training:
    """The paper's optimisation (appendix A); the authors' schedule is the other value of `schedule`."""

    epochs: int = 2000  # 0 leaves the network as it was initialised
    batch: int = 32  # items, outliers included; every item gives two views
    temperature: float = 0.2
    layout: str = "concat"
    lr: float = 0.01
    momentum: float = 0.9  # `one-cycle` cycles it between 0.95 and 0.85 instead
    weight_decay: float = 3e-4  # on every parameter, batch norm included
    warmup: float = 0.01  # part of all steps: 20 of 2000 epochs
    schedule: str = "cosine"
    stratified: bool = False
    reuse: int = 1  # how often a synthetic outlier is used; more keep slow synthesis from holding up training
    precision: str = "auto"  # bfloat16 on CUDA, float32 elsewhere

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("layout", self.layout, LAYOUTS),
            ("schedule", self.schedule, SCHEDULES),
            ("precision", self.precision, PRECISIONS),
        ):
            if value not in allowed:
                raise FirmError(f"training.{name} is {value!r}; use one of {', '.join(allowed)}")
        if self.epochs < 0 or self.batch < 2 or not 0 < self.temperature < math.inf or not 0 <= self.warmup < 1:
            raise FirmError("training needs epochs >= 0, batch >= 2, temperature > 0 and warmup in 0..1")
        if self.reuse < 1:
            raise FirmError(f"training.reuse is {self.reuse}; an outlier is used at least once")
        if not (0 < self.lr < math.inf and 0 <= self.momentum < 1 and 0 <= self.weight_decay < math.inf):
            raise FirmError("training needs lr > 0, momentum in 0..1 and weight_decay >= 0")


class Teaching:
    """What a training needs to know: how long, with which batches, and the network they are for."""

    training: Training
    positives: str
    seed: int
    preprocessing: Preprocessing

    @property
    def steps_per_epoch(self) -> int:
        raise NotImplementedError

    @property
    def steps(self) -> int:
        return self.steps_per_epoch * self.training.epochs

    @property
    def fingerprint(self) -> str:
        """Names what is learnt from, so that a run is never resumed on something else."""
        raise NotImplementedError

    def batch(self, step: int, device: torch.device | str = "cpu") -> Batch:
        raise NotImplementedError

    def fresh(self, encoder: Encoder) -> nn.Module:
        """A new network; its weights depend on the seed only."""
        raise NotImplementedError


@dataclass(frozen=True)
class Task(Teaching):
    """All that decides a training on images: data, what to make of it, and the seed."""

    images: Tensor  # uint8 n, c, h, w: inliers only
    preprocessing: Preprocessing
    outliers: OutlierSource
    views: Views
    positives: str
    training: Training
    seed: int
    foreground: Tensor | None = None  # bool n, h, w: the object in each image, for outliers and views that are local
    ignored: Tensor | None = None  # bool h, w: what was taken from every foreground
    hidden: Tensor | None = None  # bool n, h, w: the same in each image as it was conditioned

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(len(self.images), self.outliers.per_inlier, self.training.batch)

    @cached_property
    def replay(self) -> Replay | None:
        """Outliers made ahead, where each is to be used several times."""
        if self.training.reuse == 1 or self.foreground is None:
            return None
        share = self.outliers.per_inlier / (1 + self.outliers.per_inlier)
        fresh = self.training.batch * share / self.training.reuse
        return Replay(self.outliers, self.images, self.foreground, self.seed, fresh, self.hidden)

    def batch(self, step: int, device: torch.device | str = "cpu") -> Batch:
        return make_batch(
            self.images,
            self.outliers,
            self.views,
            self.preprocessing,
            batch=self.training.batch,
            stratified=self.training.stratified,
            seed=self.seed,
            step=step,
            foreground=self.foreground,
            hidden=self.hidden,
            replay=self.replay,
            device=device,
        )

    def fresh(self, encoder: Encoder) -> Network:
        return build(encoder, rng=stream(self.seed, "weights"))

    @property
    def fingerprint(self) -> str:
        return "-".join(fingerprint(named) for named in (self.images, self.ignored) if named is not None)


@dataclass
class State:
    """What a step changes: the network, the momenta, and how many steps were made."""

    network: nn.Module
    optimizer: torch.optim.SGD
    step: int = 0

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device


@dataclass(frozen=True)
class Progress:
    """One step that was made; `diagnose` is computed only if somebody asks."""

    step: int  # 1 for the first
    steps: int
    epoch: float
    lr: float
    loss: Float[Tensor, ""]
    z: Float[Tensor, "b d"]
    batch: Batch

    def diagnose(self) -> Diagnostics:
        return diagnose(self.z, self.batch)


def start(encoder: Encoder, training: Training, *, seed: int, device: torch.device | str = "cpu") -> State:
    """A fresh network and optimiser; the weights depend on the seed only."""
    return begin(build(encoder, rng=stream(seed, "weights")), training, device)


def begin(network: nn.Module, training: Training, device: torch.device | str = "cpu") -> State:
    """A network that is to be trained, and its optimiser."""
    network = network.to(device)
    optimizer = torch.optim.SGD(
        network.parameters(), lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay
    )
    return State(network, optimizer)


def train(state: State, task: Teaching) -> Iterator[Progress]:
    """Run the steps that are still missing and yield each; the state is valid whenever this yields."""
    training, positive_set, device = task.training, POSITIVES[task.positives], state.device
    steps = task.steps
    while state.step < steps:
        state.network.train()
        batch = task.batch(state.step, device)
        lr = set_schedule(state.optimizer, training, state.step, steps)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=_half(training.precision, device)):
            z = state.network(batch.images)
        loss = contrastive_loss(z, positive_set(batch.source, batch.group), training.temperature, training.layout)
        state.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        state.optimizer.step()
        state.step += 1
        yield Progress(state.step, steps, state.step / task.steps_per_epoch, lr, loss.detach(), z.detach(), batch)


def learning_rate(training: Training, step: int, steps: int) -> tuple[float, float]:
    """Learning rate and momentum of one step (0 is the first)."""
    if training.schedule == "one-cycle":
        return _one_cycle(training.lr, training.warmup, step, steps)
    warm = round(training.warmup * steps)
    if step < warm:
        return training.lr * (step + 1) / warm, training.momentum
    return training.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm))), training.momentum


def set_schedule(optimizer: torch.optim.SGD, training: Training, step: int, steps: int) -> float:
    """Put the step's learning rate and momentum into the optimiser; returns the learning rate."""
    lr, momentum = learning_rate(training, step, steps)
    for group in optimizer.param_groups:
        group["lr"], group["momentum"] = lr, momentum
    return lr


def save_checkpoint(path: Path, state: State, digest: str) -> None:
    """Everything needed to go on; `digest` names the task it belongs to."""
    tensors = {f"network.{name}": value for name, value in state.network.state_dict().items()}
    for name, parameter in state.network.named_parameters():
        momentum = state.optimizer.state.get(parameter, {}).get("momentum_buffer")
        if momentum is not None:
            tensors[f"momentum.{name}"] = momentum
    storage.save_tensors(path, tensors, {"step": state.step, "task": digest}, kind="checkpoint", schema=1)


def load_checkpoint(path: Path, state: State, digest: str) -> None:
    """Put a checkpoint into a fresh state; one of another task is refused."""
    tensors, card = storage.load_tensors(path, kind="checkpoint", schema=1)
    if card["task"] != digest:
        raise FirmError(
            f"{path} belongs to a training with other settings or images; remove its folder or choose another one"
        )
    network = {name.removeprefix("network."): value for name, value in tensors.items() if name.startswith("network.")}
    state.network.load_state_dict(network)
    for name, parameter in state.network.named_parameters():
        if f"momentum.{name}" in tensors:
            buffer = tensors[f"momentum.{name}"]
            # copied into the parameter's own memory layout, so that a resumed run also computes in the same order
            state.optimizer.state[parameter]["momentum_buffer"] = torch.empty_like(parameter).detach().copy_(buffer)
    state.step = int(card["step"])


def _half(precision: str, device: torch.device) -> bool:
    return precision == "bfloat16" or (precision == "auto" and device.type == "cuda")


def _one_cycle(peak: float, part: float, step: int, steps: int) -> tuple[float, float]:
    """The authors' schedule: cosine from peak/25 up and down to peak/250,000, momentum the other way."""
    top = part * steps - 1
    if step <= top:
        ratio, low = (step / top if top else 1.0), peak / 25
        rise = (1 - math.cos(math.pi * ratio)) / 2
        return low + (peak - low) * rise, 0.95 - 0.10 * rise
    low = peak / 25 / 1e4
    fall = (1 + math.cos(math.pi * (step - top) / (steps - 1 - top))) / 2
    return low + (peak - low) * fall, 0.95 - 0.10 * fall
