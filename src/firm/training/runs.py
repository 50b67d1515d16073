"""A training with its own folder: checkpoints, a history, resume after any interruption, and a clean stop.

run/
  checkpoint.safetensors   network, memory of the optimiser, step: always whole, at most one interval old
  history.jsonl            one line per logged step or probe; lines beyond the checkpoint are dropped on resume
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from firm.errors import ModelFileError, SettingError, Stopped
from firm.runtime.files import load_tensors, save_tensors, write_atomically, writing
from firm.runtime.platform import stop_signals
from firm.training.loop import Progress, State, Task, start, train
from firm.training.methods import Method

CHECKPOINT = "checkpoint.safetensors"
HISTORY = "history.jsonl"
STORED_AS = {"momentum_buffer": "momentum"}  # what an optimiser remembers -> its name in a checkpoint
KEPT_AS = {stored: kept for kept, stored in STORED_AS.items()}


class History:
    """JSON lines, kept in memory and, with a path, on disk: a line is in the file when `write` returns."""

    def __init__(self, path: Path | None, keep_until: int) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        if path is not None:
            if path.exists():
                self.lines = [line for line in _parsed(path) if line["step"] <= keep_until]
            write_atomically(path, "".join(json.dumps(line) + "\n" for line in self.lines).encode())

    def write(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        self._append(json.dumps(line) + "\n")

    def sync(self) -> None:
        """Wait until the file is on the disk."""
        self._append("", sync=True)

    def _append(self, text: str, sync: bool = False) -> None:
        if self.path is None:
            return
        with (
            writing(self.path, "the last checkpoint is whole"),
            self.path.open("a", encoding="utf-8", newline="\n") as file,
        ):
            file.write(text)
            if sync:
                os.fsync(file.fileno())


class Run:
    """One training, resumable when it has a folder. Iterate over it; the state is there after each step.

    The network comes with its initial weights. `digest` names all that decides the training: a checkpoint of another
    one is refused. Checkpoints are written every few seconds, lines of the history every few steps.
    """

    def __init__(
        self,
        task: Task[Any],
        method: Method[Any],
        network: nn.Module,
        *,
        digest: str,
        device: torch.device | str = "cpu",
        folder: Path | None = None,
        checkpoint_seconds: float = 30.0,
        log_every: int = 10,
    ) -> None:
        self.task, self.method, self.digest, self.folder = task, method, digest, folder
        self.checkpoint_seconds, self.log_every = checkpoint_seconds, log_every
        self.state = start(network, task.training, device)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for left in [*folder.glob(f".{CHECKPOINT}.*"), *folder.glob(f".{HISTORY}.*")]:
                left.unlink(missing_ok=True)  # half-written by a process that was killed
            if (folder / CHECKPOINT).exists():
                load_checkpoint(folder / CHECKPOINT, self.state, digest)
        self.resumed_at = self.state.step
        self.history = History(None if folder is None else folder / HISTORY, self.state.step)
        self.collapsed = [False, *(line["collapsed"] for line in self.history.lines if "collapsed" in line)][-1]
        # CPU time of the training alone; of a resumed run as far as its history knows
        self.seconds = max((line.get("seconds", 0.0) for line in self.history.lines), default=0.0)

    @property
    def steps(self) -> int:
        return self.task.steps_per_epoch * self.task.training.epochs

    def __iter__(self) -> Iterator[Progress]:
        saved_at, saved_step = time.monotonic(), self.state.step
        with stop_signals() as signals:
            began = time.process_time()
            for progress in train(self.state, self.task, self.method):
                self.seconds += time.process_time() - began
                if progress.step % self.log_every == 0 or progress.step == progress.steps:
                    self._log(progress)
                yield progress
                due = time.monotonic() - saved_at >= self.checkpoint_seconds
                if due or signals or progress.step == progress.steps:
                    self.save()
                    saved_at, saved_step = time.monotonic(), progress.step
                began = time.process_time()
                if signals:
                    raise Stopped(signals[0], self._stop_message(saved_step, progress.steps))

    def save(self) -> None:
        """Write a checkpoint now; the history is on disk before the checkpoint that counts on it."""
        if self.folder is not None:
            self.history.sync()
            save_checkpoint(self.folder / CHECKPOINT, self.state, self.digest)

    def _stop_message(self, step: int, steps: int) -> str:
        after = "; run the same command again to go on" if self.folder is not None else ", and nothing is kept of it"
        return f"stopped at step {step} of {steps}{after}"

    def _log(self, progress: Progress) -> None:
        loss = float(progress.loss)
        if not math.isfinite(loss):
            raise SettingError(
                f"the loss is {loss} at step {progress.step}; lower training.lr or raise the temperature"
            )
        diagnosis = progress.diagnose()
        self.collapsed = diagnosis.collapsed
        line = {"step": progress.step, "epoch": round(progress.epoch, 4), "lr": progress.lr, "loss": loss}
        line["seconds"] = round(self.seconds, 2)
        self.history.write(line | diagnosis.numbers | {"collapsed": self.collapsed})


def save_checkpoint(path: Path, state: State, digest: str) -> None:
    """Everything needed to go on; `digest` names the training it belongs to."""
    tensors = {f"network.{name}": value for name, value in state.network.state_dict().items()}
    for name, parameter in state.network.named_parameters():
        for what, value in state.optimizer.state.get(parameter, {}).items():
            if value is not None:  # SGD without momentum
                tensors[f"{STORED_AS.get(what, what)}.{name}"] = value
    save_tensors(path, tensors, {"step": state.step, "task": digest}, kind="checkpoint", schema=1)


def load_checkpoint(path: Path, state: State, digest: str) -> None:
    """Put a checkpoint into a fresh state; one of another training is refused."""
    tensors, card = load_tensors(path, kind="checkpoint", schema=1)
    if card["task"] != digest:
        raise ModelFileError(
            f"{path} belongs to a training with other settings or images; remove its folder or choose another one"
        )
    network = {name.removeprefix("network."): value for name, value in tensors.items() if name.startswith("network.")}
    state.network.load_state_dict(network)
    parameters = dict(state.network.named_parameters())
    for name, value in tensors.items():
        what, _, of = name.partition(".")
        if what != "network":
            state.optimizer.state[parameters[of]][KEPT_AS.get(what, what)] = _as_kept(value, parameters[of])
    state.step = int(card["step"])


def _as_kept(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """In the parameter's own memory layout, so that a resumed run also computes in the same order."""
    if value.shape != parameter.shape:  # a count of steps
        return value
    return torch.empty_like(parameter).detach().copy_(value)


def _parsed(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a history; one that was cut off, and foreign ones, are dropped."""
    for text in path.read_text("utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            match line := json.loads(text):
                case {"step": int()} if all(isinstance(line.get(name, 0), int | float) for name in ("loss", "seconds")):
                    yield line
