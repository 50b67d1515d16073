"""Commands run within the process of the tests: an interpreter and torch for each would take minutes."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from pathlib import Path

from firm.cli import main


def run(*arguments: str | Path) -> tuple[int, str, str]:
    """A command within this process: its exit code, and what it said."""
    out, err, code, before = io.StringIO(), io.StringIO(), 0, sys.argv
    sys.argv = ["firm", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0
    finally:
        sys.argv = before
    return code, out.getvalue(), err.getvalue()
