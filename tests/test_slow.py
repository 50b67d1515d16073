"""Heavier checks on real data and at real length: `make check-slow`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from firm.data.registry import load
from firm.detector.detector import Detector
from firm.research.runner import run_missing
from firm.research.tables import TABLES, experiment

pytestmark = pytest.mark.slow


def test_fast_learns_fashion_mnist(tmp_path: Path) -> None:
    one = experiment(TABLES["objectives"], "fashion-mnist:sandal", "firm", "short", 0)
    (line,) = run_missing([one], tmp_path / "results", tmp_path / "work")
    if "skipped" in line:
        pytest.skip(line)
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
