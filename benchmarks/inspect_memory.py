"""Resident memory while a long batch is inspected with a report, as `firm inspect --report` does it (Linux only).

    python benchmarks/inspect_memory.py [--images 2000] [--side 512] [--threads 1] [--model part.firm]

Drawn plates, decoded again every time; without --model a detector on wavelets is fitted to some of them first.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from firm.detector.detector import Detector
from firm.detector.inspection import InspectedImage, Inspection
from firm.drawn.render import write_folder
from firm.report.page import write_inspection
from firm.runtime.platform import keep_freed_memory

DRAWN, WARM = 100, 100  # different pictures; images after which memory should no longer grow


def resident_megabytes() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found.group(1)) / 1000 if found else 0.0


def noted(images: Iterator[InspectedImage], resident: list[float]) -> Iterator[InspectedImage]:
    for image in images:
        yield image
        del image
        resident.append(resident_megabytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder, "plate", size=arguments.side, train=24, good=DRAWN, bad=0)
        if arguments.model is None:
            arguments.model = folder / "plate.firm"
            fit = ["fit", str(folder), "--out", str(arguments.model), "--preset=wavelets", "--set=training.epochs=1"]
            subprocess.run([sys.executable, "-m", "firm", *fit, "--quiet"], check=True)  # in memory of its own
        files = itertools.islice(itertools.cycle(sorted((folder / "test" / "good").iterdir())), arguments.images)
        batch, resident = Inspection(Detector.load(arguments.model)), list[float]()
        begin = time.process_time()
        write_inspection(folder / "report", batch, noted(batch(files), resident), model="plate.firm")
        after = resident_megabytes()
        each = (time.process_time() - begin) / arguments.images
    warm, last = resident[min(WARM, len(resident)) - 1], max(resident[WARM:], default=resident[-1])
    steps = " ".join(f"{resident[at - 1]:.0f}" for at in (1, WARM, 500, 1000, 2000) if at <= len(resident))
    print(f"{len(resident)} images: {steps} MB, after the report {after:.0f} MB; {1000 * each:.0f} ms of CPU each")
    print(f"most resident memory after image {WARM} / at image {WARM} = {last / warm:.3f} (target: at most 1.05)")


if __name__ == "__main__":
    main()
