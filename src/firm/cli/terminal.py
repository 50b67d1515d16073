"""What a person sees, at three levels.

Results go to standard output, everything else to standard error:

    show(values, text, as_json)   the result of a verb; always
    warn(text)                    what may make the result wrong or incomplete, such as a file left out; always
    report_error(text)            why something failed; always
    say(text)                     what was found and chosen; not with --quiet
    detail(text)                  everything else; only with --verbose

A verb takes `output: Output = None` (options.py), which sets the level. Long work gets a listener, `reporting()`, that
prints the same way and shows one bar with the current stage and the time left.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from firm.runtime.listener import Listener

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from firm.metrics.image import Interval


class Level(IntEnum):
    """How much is printed beside the result."""

    QUIET, NORMAL, VERBOSE = range(3)


_level = Level.NORMAL


def set_level(verbose: bool | None) -> bool | None:
    """The level of this process: verbose, quiet (False) or normal (None)."""
    global _level
    _level = Level.NORMAL if verbose is None else Level.VERBOSE if verbose else Level.QUIET
    return verbose


def say(text: str) -> None:
    """A sentence beside the result, unless quiet."""
    _print(text, Level.NORMAL)


def detail(text: str) -> None:
    """A sentence for those who asked for more."""
    _print(text, Level.VERBOSE)


def warn(text: str) -> None:
    """A warning, at every level."""
    _print(f"warning: {text}", Level.QUIET)


def report_error(text: str) -> None:
    """Why something failed, at every level."""
    _print(f"firm: {text}", Level.QUIET)


def _print(text: str, level: Level) -> None:
    if level <= _level:
        print(text, file=sys.stderr, flush=True)


def sentence(error: Exception) -> str:
    """What went wrong, also where only the operating system describes it."""
    if isinstance(error, OSError):
        return f"cannot use {error.filename or 'a file'}: {error.strerror or error}"
    return str(error)


def warn_left_out(skipped: Iterable[tuple[Path | str, str]]) -> list[str]:
    """Warn of files that could not be used, given with the reason, and list them."""
    left_out = []
    for file, reason in skipped:
        warn(f"left out: {reason}")
        left_out.append(str(file))
    return left_out


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

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[note]}"),
    )
    hidden = _level == Level.QUIET or not sys.stderr.isatty()
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
