"""The benchmarks of speed: their numbers are for people; that they can still be measured is for this."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted(Path("benchmarks").glob("*.py"))


def test_benchmarks_know_the_names_they_import(monkeypatch):
    monkeypatch.syspath_prepend("benchmarks")
    for script in SCRIPTS:
        importlib.import_module(script.stem)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_benchmarks_run(script: Path) -> None:
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert " = " in done.stdout
