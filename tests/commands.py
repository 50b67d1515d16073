"""Commands run within the process of the tests: an interpreter and torch for each would take minutes."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from firm.cli import main


class Done(NamedTuple):
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str


def run(*arguments: str | Path) -> Done:
    """A command within this process."""
    out, err, code, before = io.StringIO(), io.StringIO(), 0, sys.argv
    sys.argv = ["firm", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("default")
            main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0
    finally:
        sys.argv = before
    return Done(code, out.getvalue(), err.getvalue())


def values(*arguments: str | Path) -> dict[str, Any]:
    """The JSON result of a command that succeeds."""
    done = run(*arguments, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)  # one machine-readable result and nothing else
