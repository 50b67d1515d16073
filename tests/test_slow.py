"""Heavier checks on real data and at real length: `make check-slow`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from firm.bench import run_missing
from firm.data import load
from firm.detector import Detector
from firm.recipes.tables import experiment
from firm.types import FirmError

pytestmark = pytest.mark.slow


def test_fast_learns_fashion_mnist(tmp_path: Path) -> None:
    one = experiment("fashion-mnist:sandal", {}, "short", 0)
    try:
        list(run_missing([one], tmp_path / "results", tmp_path / "work"))
    except FirmError as error:
        pytest.skip(str(error))
    final = json.loads(next((tmp_path / "results").iterdir()).read_text())["final"]
    assert final["s_con k=1"]["value"] > 0.88


def test_the_demo_beats_chance_and_its_file_decides_the_same(tmp_path: Path) -> None:

    done = subprocess.run(
        [sys.executable, "-m", "firm", "demo", "--out", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout)
    assert said["auroc"]["value"] > 0.65
    detector = Detector.load(tmp_path / "plate.firm")
    data = load("drawn:plate")
    called = detector.predict(data.test) == -1
    assert int((called & data.anomalous).sum()) == said["caught"]
    assert torch.equal(called, detector.score(data.test) > detector.limit)


@pytest.mark.parametrize("script", sorted(Path("benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_benchmarks_run(script: Path) -> None:
    """Their numbers are for people; that they can still be measured is for this."""
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    if "No module named 'faiss'" in done.stderr:
        pytest.skip("faiss is not installed; make bench installs it")
    assert done.returncode == 0, done.stderr
    assert " = " in done.stdout
