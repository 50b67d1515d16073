"""The command line: thin verbs over the package. Results go to standard output, all else to standard error.

Exit codes: 0 done; 1 done, but some files could not be used; 2 a mistake a person can mend; 70 a bug in firm; 130 and
143 stopped by Ctrl-C or SIGTERM. Heavy modules are imported inside the verbs, so that `firm --help` answers at once.
"""

import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from io import TextIOWrapper
from types import FrameType
from typing import Annotated

import typer

from firm.cli.audit import audit
from firm.cli.bench import bench, fetch
from firm.cli.calibrate import calibrate
from firm.cli.demo import demo
from firm.cli.evaluate import card, evaluate
from firm.cli.export import export, verify
from firm.cli.fit import fit
from firm.cli.inspect import inspect
from firm.cli.preview import masks, outliers
from firm.cli.sia import sia
from firm.cli.terminal import report_error, sentence, warn
from firm.errors import FirmError, MachineError, Stopped

BUG = 70  # exit code, as of sysexits.h
_debug = False

app = typer.Typer(name="firm", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
for verb in (fit, audit, calibrate, inspect, evaluate, card, export, verify, masks, outliers, fetch, demo):
    app.command()(verb)
app.add_typer(sia, name="sia")
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def firm(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Visual anomaly detection: learn from good images alone, then find what is not like them."""
    global _debug
    _debug = debug
    if show_version:
        print(f"firm {version('firm')}")
        raise typer.Exit


def main() -> None:
    """Run the command line; a failure a person can mend is one sentence and exit code 2, a bug one and 70."""
    if isinstance(sys.stdout, TextIOWrapper):  # a pipe of Windows may know fewer letters than the name of a file
        sys.stdout.reconfigure(errors="backslashreplace")
    with _orderly_exit(), warnings.catch_warnings():
        warnings.showwarning = lambda message, *_args, **_kwargs: warn(str(message))
        try:
            app()
        except Stopped as stopped:
            report_error(str(stopped))
            sys.exit(128 + stopped.signal)
        except Exception as error:
            if _debug:
                traceback.print_exc()
            torch_too = isinstance(error, RuntimeError) and "allocate" in str(error)
            if isinstance(error, MemoryError) or torch_too:
                error = MachineError("memory is too short; free some, or use fewer or smaller images")
            report_error(sentence(error))
            sys.exit(2 if isinstance(error, FirmError | OSError) else BUG)


@contextmanager
def _orderly_exit() -> Iterator[None]:
    """Exit by an exception on SIGTERM, so that temporary files are removed; a second one ends the process at once."""

    def leave(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
