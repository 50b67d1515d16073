"""The training loop: one visible generator that asks a task for batches and a method for the loss on them.

Everything random in a step is drawn from streams named by the step (`runtime.random`), so the state of a training is
the network, what the optimiser remembers and a step number: exact resume needs nothing else.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from firm.errors import SettingError
from firm.training.methods import Diagnosis, Method

SCHEDULES = ("cosine", "one-cycle")
PRECISIONS = ("float32", "bfloat16", "auto")

B = TypeVar("B")
B_co = TypeVar("B_co", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Training:
    """The paper's optimisation (appendix A); the authors' schedule is the other value of `schedule`."""

    epochs: int = 2000  # 0 leaves the network at its initial weights
    batch: int = 32  # items, outliers included; every item gives two views
    temperature: float = 0.2  # of the contrastive loss
    layout: str = "concat"  # of the contrastive loss
    lr: float = 0.01
    momentum: float = 0.9  # `one-cycle` cycles it between 0.95 and 0.85 instead
    weight_decay: float = 3e-4  # on every parameter, batch norm included
    warmup: float = 0.01  # part of all steps: 20 of 2000 epochs
    schedule: str = "cosine"
    stratified: bool = False  # every batch has the same number of inliers
    reuse: int = 1  # how often a synthetic outlier is used; more keep slow synthesis from holding up training
    precision: str = "auto"  # bfloat16 on CUDA, float32 elsewhere

    def __post_init__(self) -> None:
        for name, allowed, fix in (
            ("schedule", self.schedule in SCHEDULES, f"use one of {', '.join(SCHEDULES)}"),
            ("precision", self.precision in PRECISIONS, f"use one of {', '.join(PRECISIONS)}"),
            ("epochs", self.epochs >= 0, "use 0 or more"),
            ("batch", self.batch >= 2, "use 2 or more"),
            ("warmup", 0 <= self.warmup < 1, "use 0 or more, below 1"),
            ("reuse", self.reuse >= 1, "an outlier is used at least once"),
            ("lr", 0 < self.lr < math.inf, "it must be above 0"),
            ("momentum", 0 <= self.momentum < 1, "use 0 or more, below 1"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "use 0 or more"),
        ):
            if not allowed:
                raise SettingError(f"training.{name} is {getattr(self, name)!r}; {fix}")

    def optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(network.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def set_rate(self, optimizer: torch.optim.Optimizer, step: int, steps: int) -> float:
        return set_schedule(optimizer, self, step, steps)


@runtime_checkable
class Optimisation(Protocol):
    """What the loop asks of the settings of a training; `Training` are FIRM's, a diffusion model has its own."""

    @property
    def epochs(self) -> int: ...
    @property
    def precision(self) -> str: ...
    def optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        """What it keeps of a parameter between steps must be tensors: they are the checkpoint."""
        ...

    def set_rate(self, optimizer: torch.optim.Optimizer, step: int, steps: int) -> float:
        """Put the learning rate of one step (0 is the first) into the optimiser and return it."""
        ...


@runtime_checkable
class Task(Protocol[B_co]):
    """What a training needs: how long it is, and the batch of every step."""

    @property
    def training(self) -> Optimisation: ...
    @property
    def steps_per_epoch(self) -> int: ...
    def batch(self, step: int, device: torch.device | str = "cpu", *, rank: int = 0, world: int = 1) -> B_co:
        """A pure function of (seed, step, rank, world): the batches of all ranks together are that of one process."""
        ...


@dataclass
class State:
    """What a step changes: the network, what the optimiser remembers, and how many steps were made."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device


@dataclass(frozen=True)
class Progress:
    """A step that was made."""

    step: int  # 1 for the first
    steps: int
    epoch: float
    lr: float
    loss: Float[Tensor, ""]
    diagnose: Callable[[], Diagnosis]  # computed when called


def start(network: nn.Module, training: Optimisation, device: torch.device | str = "cpu") -> State:
    """A network about to be trained, and its optimiser."""
    network = network.to(device)
    return State(network, training.optimizer(network))


def train(state: State, task: Task[B], method: Method[B]) -> Iterator[Progress]:
    """Run the steps that are still missing and yield each; the state is valid whenever this yields."""
    training, device = task.training, state.device
    per_epoch = task.steps_per_epoch
    steps = per_epoch * training.epochs
    half = training.precision == "bfloat16" or (training.precision == "auto" and device.type == "cuda")
    while state.step < steps:
        state.network.train()
        batch = task.batch(state.step, device)
        lr = training.set_rate(state.optimizer, state.step, steps)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half):
            loss, outputs = method.loss(state.network, batch)
        state.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        state.optimizer.step()
        state.step += 1
        loss, outputs = loss.detach(), outputs.detach()
        diagnose = partial(method.diagnose, outputs, batch, loss)
        yield Progress(state.step, steps, state.step / per_epoch, lr, loss, diagnose)


def learning_rate(training: Training, step: int, steps: int) -> tuple[float, float]:
    """Learning rate and momentum of one step (0 is the first)."""
    if training.schedule == "one-cycle":
        return _one_cycle(training.lr, training.warmup, step, steps)
    warm = round(training.warmup * steps)
    if step < warm:
        return training.lr * (step + 1) / warm, training.momentum
    return training.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm))), training.momentum


def set_schedule(optimizer: torch.optim.Optimizer, training: Training, step: int, steps: int) -> float:
    """Put the step's learning rate and momentum into the optimiser; returns the learning rate."""
    lr, momentum = learning_rate(training, step, steps)
    for group in optimizer.param_groups:
        group["lr"], group["momentum"] = lr, momentum
    return lr


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
