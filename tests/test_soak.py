"""Ten thousand images through one process: what it holds does not grow with them (Linux only)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from firm.drawn.render import write_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads resident memory from /proc"),
]

IMAGES, DRAWN, SIDE = 10_000, 50, 72  # files, different pictures among them, px
GROWTH = 1.05
FIT = ("--preset=wavelets", "--set=training.epochs=1", f"--set=size={SIDE}", "--quiet", "--threads=1")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A detector of small drawn parts, `part.firm`, and files to inspect, `new`."""
    place = tmp_path_factory.mktemp("soak")
    write_folder(place / "plates", "plate", size=SIDE, train=24, good=DRAWN, bad=0)
    assert firm(place, "fit", "plates", "--out", "part.firm", *FIT).wait() == 0
    (place / "new").mkdir()
    pictures = sorted((place / "plates" / "test" / "good").iterdir())
    for number in range(IMAGES):
        os.link(pictures[number % len(pictures)], place / "new" / f"{number:05}.png")
    return place


def firm(place: Path, *arguments: str) -> subprocess.Popen[bytes]:
    name = "watch" if "--watch" in arguments else arguments[0]
    with (place / f"{name}.log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-m", "firm", *arguments], cwd=place, stdout=log, stderr=log)


def resident(process: subprocess.Popen[bytes]) -> int:
    """kB; 0 of a process that has ended."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found.group(1)) if found else 0


def sampled(process: subprocess.Popen[bytes], done: Callable[[], bool]) -> list[int]:
    samples = []
    while process.poll() is None and not done():
        samples.append(resident(process))
        time.sleep(0.05)
    return samples


def grows(samples: list[int]) -> float:
    """Resident memory towards the end, over that once the 2,000 images are in it that a batch compares."""
    assert len(samples) >= 100
    early, late = (samples[len(samples) * begin // 20 : len(samples) * (begin + 2) // 20] for begin in (5, 17))
    return median(late) / median(early)


def test_a_long_batch_takes_no_more_memory_than_a_short_one(parts: Path) -> None:
    process = firm(parts, "inspect", "part.firm", "new", "--threads", "1")
    assert grows(sampled(process, lambda: False)) < GROWTH
    assert process.returncode in (0, 3, 4)
    assert (parts / "inspect.log").read_bytes().count(b".png") >= IMAGES


def test_a_long_watch_takes_no_more_memory_than_a_short_one(parts: Path) -> None:
    journal = parts / "watched" / "watched.jsonl"

    def done() -> bool:
        return journal.exists() and journal.read_bytes().count(b"\n") >= IMAGES

    process = firm(parts, "inspect", "part.firm", "new", "--watch", "--report", "watched", "--threads", "1")
    try:
        assert grows(sampled(process, done)) < GROWTH
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
    assert journal.read_bytes().count(b"\n") == IMAGES
