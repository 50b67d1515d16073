"""The command line: thin verbs over the package. Results go to standard output, all else to standard error.

Exit codes: 0 done; 1 done, but some files could not be used; 2 a mistake a person can mend; 130 and 143 stopped by
Ctrl-C or SIGTERM.
Heavy modules are imported inside the verbs, so that `firm --help` answers at once.
"""

from __future__ import annotations

import sys
import warnings

import typer

from firm.cli.calibrating import calibrate
from firm.cli.demonstration import demo
from firm.cli.inspecting import card, evaluate, score
from firm.cli.judging import inspect
from firm.cli.learning import fit
from firm.cli.looking import masks, outliers
from firm.cli.research import bench, fetch
from firm.cli.terminal import say, sentence
from firm.errors import FirmError, Stopped

app = typer.Typer(
    name="firm",
    help="Visual anomaly detection: learn from good images alone, then find what is not like them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for verb in (fit, calibrate, inspect, score, evaluate, card, masks, outliers, fetch, bench, demo):
    app.command()(verb)


def main() -> None:
    """Run the command line; a failure a person can mend is one sentence and exit code 2."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_args, **_kwargs: say(f"warning: {message}")
        try:
            app()
        except Stopped as stopped:
            say(f"firm: {stopped}")
            sys.exit(128 + stopped.signal)
        except (FirmError, OSError) as error:
            say(f"firm: {sentence(error)}")
            sys.exit(2)
