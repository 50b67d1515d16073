"""What a person sees: results, sentences, a progress bar; and the machine made ready before a verb begins."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from firm.errors import FirmError

if TYPE_CHECKING:
    from firm.metrics import Interval

Update = Callable[[int, int | None, str], None]  # done, total if it is known, note


def say(text: str) -> None:
    """A sentence beside the result."""
    print(text, file=sys.stderr, flush=True)


def sentence(error: FirmError | OSError) -> str:
    """What went wrong, also where only the system has a word for it."""
    if isinstance(error, FirmError):
        return str(error)
    return f"cannot use {error.filename or 'a file'}: {error.strerror or error}"


def show(machine: dict[str, Any], human: str, as_json: bool) -> None:
    """The result, for whoever asked."""
    print(json.dumps(machine) if as_json else human)


def percent(found: Interval) -> str:
    """A measure and its interval, in percent."""
    return f"{100 * found.value:.1f} ({100 * found.low:.1f} to {100 * found.high:.1f})"


def decided(counts: dict[str, int], review: float, fail: float) -> str:
    """How many images have each verdict, and where one begins."""
    total = sum(counts.values())
    return (
        f"{total} image{'' if total == 1 else 's'}: {counts['PASS']} PASS up to {review:.6g}, "
        f"{counts['REVIEW']} REVIEW, {counts['FAIL']} FAIL above {fail:.6g}"
    )


@contextmanager
def bar(title: str) -> Iterator[Update]:
    """A progress bar with the time left on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=not sys.stderr.isatty()) as progress:
        task = progress.add_task(title, total=None, note="")
        yield lambda done, total, note: progress.update(task, completed=done, total=total, note=note)


def counting(update: Update, total: int, done: int = 0) -> Callable[[int], None]:
    """Moves a bar on by as many images as were just done."""

    def advance(count: int) -> None:
        nonlocal done
        done += count
        update(done, total, "")

    return advance


def settle(device: str, threads: int) -> None:
    """The number of threads and the device, tried before anything is read."""
    import torch

    from firm.allocator import keep_freed_memory

    keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)
    try:
        torch.zeros(1, device=device).sum().item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise FirmError(f"the device {device!r} cannot be used here ({reason}); try --device cpu") from error
