"""A training with a folder of its own: checkpoints, a history, resume after any death, and a clean stop.

run/
  checkpoint.safetensors   network, momenta, step: always whole, at most one interval old
  history.jsonl            one line per logged step or probe; lines beyond the checkpoint are dropped on resume
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import firm
from firm.encoder import Encoder
from firm.errors import named
from firm.objective import resting_loss
from firm.recipes.recipe import Recipe, digest
from firm.storage import why, write_atomically
from firm.training import Progress, State, Teaching, begin, load_checkpoint, save_checkpoint, train
from firm.types import FirmError, Stopped

CHECKPOINT = "checkpoint.safetensors"
HISTORY = "history.jsonl"
CLAIM = "claim"


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
        try:
            with self.path.open("a") as file:
                file.write(text)
                if sync:
                    os.fsync(file.fileno())
        except OSError as error:
            raise FirmError(f"cannot write {named(self.path)}: {why(error)}; the last checkpoint is whole") from error


class Run:
    """One training, resumable when it has a folder. Iterate over it; the state is there after each step."""

    def __init__(
        self,
        recipe: Recipe,
        task: Teaching,
        *,
        device: torch.device | str = "cpu",
        folder: Path | None = None,
        checkpoint_seconds: float = 30.0,
        log_every: int = 10,
    ) -> None:
        self.recipe, self.task, self.folder = recipe, task, folder
        self.checkpoint_seconds, self.log_every = checkpoint_seconds, log_every
        prepared = asdict(task.preprocessing)
        del prepared["depth"]  # of files whose pixels are named by the fingerprint already
        self.digest = digest(recipe, seed=task.seed, images=task.fingerprint, preprocessing=prepared)
        self.state = resumed(recipe.encoder, task, device, folder, self.digest)
        self.resumed_at = self.state.step
        self.history = History(None if folder is None else folder / HISTORY, self.state.step)
        self.collapsed = [False, *(line["collapsed"] for line in self.history.lines if "collapsed" in line)][-1]
        # CPU time of the training alone; of a resumed run as far as its history tells
        self.seconds = max((line.get("seconds", 0.0) for line in self.history.lines), default=0.0)

    def __iter__(self) -> Iterator[Progress]:
        saved_at, saved_step = time.monotonic(), self.state.step
        with asked_to_stop() as asked:
            began = time.process_time()
            for progress in train(self.state, self.task):
                self.seconds += time.process_time() - began
                if progress.step % self.log_every == 0 or progress.step == progress.steps:
                    self._log(progress)
                yield progress
                due = time.monotonic() - saved_at >= self.checkpoint_seconds
                if due or asked or progress.step == progress.steps:
                    self.save()
                    saved_at, saved_step = time.monotonic(), progress.step
                began = time.process_time()
                if asked:
                    raise Stopped(asked[0], self._farewell(saved_step, progress.steps))

    def origin(self, data: str, good_images: int) -> dict[str, Any]:
        """Where a detector that was trained so comes from."""
        return {
            "data": data,
            "seed": self.task.seed,
            "good_images": good_images,
            "fingerprint": self.task.fingerprint,
            "task": self.digest,
            "firm": firm.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "collapsed": self.collapsed,
        }

    def save(self) -> None:
        """Checkpoint now; the history is on disk before the checkpoint that vouches for it."""
        if self.folder is not None:
            self.history.sync()
            save_checkpoint(self.folder / CHECKPOINT, self.state, self.digest)

    def _farewell(self, step: int, steps: int) -> str:
        after = "; run the same command again to go on" if self.folder is not None else ", and nothing is kept of it"
        return f"stopped at step {step} of {steps}{after}"

    def _log(self, progress: Progress) -> None:
        loss = float(progress.loss)
        if not math.isfinite(loss):
            raise FirmError(f"the loss is {loss} at step {progress.step}; lower training.lr or raise the temperature")
        found = progress.diagnose()
        stuck = abs(loss - resting_loss(len(progress.z), self.task.training.layout)) < 1e-3
        self.collapsed = found.collapsed or stuck
        line = {"step": progress.step, "epoch": round(progress.epoch, 4), "lr": progress.lr, "loss": loss}
        line["seconds"] = round(self.seconds, 2)
        self.history.write(line | asdict(found) | {"collapsed": self.collapsed})


def resumed(encoder: Encoder, task: Teaching, device: torch.device | str, folder: Path | None, name: str) -> State:
    """A fresh state, or the one the folder's checkpoint holds."""
    state = begin(task.fresh(encoder), task.training, device)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for left in [*folder.glob(f".{CHECKPOINT}.*"), *folder.glob(f".{HISTORY}.*")]:
            left.unlink(missing_ok=True)  # half-written by a process that was killed
        if (folder / CHECKPOINT).exists():
            load_checkpoint(folder / CHECKPOINT, state, name)
    return state


def discard(folder: Path) -> None:
    """Remove the checkpoint of a run whose result is safe; the history stays."""
    (folder / CHECKPOINT).unlink(missing_ok=True)


@contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """A list that SIGTERM and SIGINT enter. Signals belong to the main thread; elsewhere it stays empty."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(kind, lambda number, _frame: asked.append(number)) for kind in kinds]
    try:
        yield asked
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


@contextmanager
def claim(folder: Path, name: str = CLAIM) -> Iterator[bool]:
    """True for the one process that may work in this folder, or on what is claimed by that name in it.

    The claim dies with its owner.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / name, os.O_CREAT | os.O_RDWR)
    try:
        yield _locked(handle)
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _parsed(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a history; a death may have cut the last one."""
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return
