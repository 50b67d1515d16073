"""Fit on a folder of good parts, inspect a folder of suspects, and write a report.

    python examples/own_images.py GOOD SUSPECTS

Without arguments it draws both folders itself, so it always runs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from firm import Detector, recipe
from firm.data.folder import find_files
from firm.detector.inspection import Inspection
from firm.drawn.render import write_folder
from firm.report.page import write_inspection


def main(good: Path, suspects: Path) -> None:
    detector = Detector.fit(good, recipe=recipe("wavelets"), seed=0)  # leave the recipe out for pretrained features
    guarantee = detector.decides.reviewed.kept
    print(f"PASS up to {detector.limit:.4f}: at most {100 * guarantee:.0f} % of good parts do not PASS")

    batch = Inspection(detector)
    page = write_inspection(Path("own-report"), batch, batch(find_files([suspects])), model="own images")
    for verdict in sorted(batch.verdicts, key=lambda verdict: -verdict.score)[:16]:
        print(f"{verdict.verdict:<6}  {verdict.score:.4f}  {verdict.image}")
    for file, reason in batch.left_out:
        print(f"left out: {file}: {reason}", file=sys.stderr)
    print(f"open {page}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_folder(Path(folder) / "label", "label", size=128, train=100)
            main(Path(folder) / "label" / "train" / "good", Path(folder) / "label" / "test")
