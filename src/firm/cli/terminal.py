"""What a person sees: results on standard output, everything else on standard error, at three levels.

A verb takes `output: Output = None` (options.py), which sets the level. Long work gets a listener, `reporting()`, that
prints the same way and shows one bar with the current stage and the time left.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from firm.errors import FirmError
from firm.runtime.listener import Listener

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from firm.metrics.image import Interval


QUIET, NORMAL, VERBOSE = range(3)  # how much is printed beside the result
_level = NORMAL


def set_level(verbose: bool | None) -> bool | None:
    """The level of this process: verbose, quiet (False) or normal (None)."""
    global _level
    _level = NORMAL if verbose is None else VERBOSE if verbose else QUIET
    return verbose


def say(text: str) -> None:
    """What was found and chosen; not with --quiet."""
    _print(text, NORMAL)


def detail(text: str) -> None:
    """Everything else; only with --verbose."""
    _print(text, VERBOSE)


def warn(text: str) -> None:
    """What may make the result wrong or incomplete, such as a file left out; always."""
    _print(f"warning: {text}", QUIET)


def report_error(text: str) -> None:
    """Why something failed; always."""
    _print(f"firm: {text}", QUIET)


def _print(text: str, level: int) -> None:
    if level <= _level:
        print(text, file=sys.stderr, flush=True)


def sentence(error: Exception) -> str:
    """What went wrong, also where only the operating system describes it."""
    if isinstance(error, OSError):
        return f"cannot use {error.filename or 'a file'}: {error.strerror or error}"
    if isinstance(error, FirmError):
        return str(error)
    what = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"this is a bug in firm ({what}); report it with the output of firm --debug and the same command"


def warn_left_out(skipped: Sequence[tuple[Path | str, str]]) -> list[str]:
    """Warn of files that could not be used, given with the reason, and list them."""
    for _, reason in skipped:
        warn(f"left out: {reason}")
    return [str(file) for file, _ in skipped]


def show(values: dict[str, Any], text: str, as_json: bool, left_out: Sequence[str] = ()) -> None:
    """The result, as JSON for a program or as text for a person; the exit code is 1 if files were left out."""
    print(json.dumps(values) if as_json else text)
    if left_out:
        raise typer.Exit(1)


class Reporter(Listener):
    """Prints the messages of long work, and shows its current stage, how far it is and the time left as one bar."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task: TaskID | None = None
        self._stage = ""
        self._began = 0.0

    say, detail, warn = staticmethod(say), staticmethod(detail), staticmethod(warn)

    def progress(self, stage: str, done: int, total: int | None, note: str = "") -> None:
        """Move the bar; a new stage replaces the one before it."""
        if self._task is None or stage != self._stage:
            self.end()
            self._stage, self._began = stage, time.monotonic()
            self._task = self._bar.add_task(stage, total=total, note=note)
        self._bar.update(self._task, completed=done, total=total, note=note)

    def end(self) -> None:
        """Remove the bar, and report how long its stage took."""
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
            detail(f"{self._stage}: {time.monotonic() - self._began:.1f} s")


@contextmanager
def reporting() -> Iterator[Reporter]:
    """The listener of a verb; its bar is hidden with --quiet and where standard error is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    stage, note = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
    columns = (stage, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(elapsed_when_finished=True), note)
    hidden = _level == QUIET or not sys.stderr.isatty()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=hidden) as bar:
        reporter = Reporter(bar)
        yield reporter
        reporter.end()


def percent(interval: Interval) -> str:
    """A measure and its interval, in percent."""
    return f"{100 * interval.value:.1f} ({100 * interval.low:.1f} to {100 * interval.high:.1f})"


def use_device(device: str, threads: int) -> None:
    """Set the number of threads and try the device before anything is read."""
    import torch

    from firm.runtime.platform import check_device, keep_freed_memory

    keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)
    check_device(device)
