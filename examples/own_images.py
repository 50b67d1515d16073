"""Fit on a folder of good parts, inspect a folder of suspects, and write a picture of the worst.

    python examples/own_images.py GOOD SUSPECTS

Without arguments it draws both folders itself, so that it always runs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from firm import Detector, load, recipe
from firm.data.drawn import write_folder
from firm.data.folder import read_files
from firm.report.tray import Inspected, draw_tray


def main(good: Path, suspects: Path) -> None:
    detector = Detector.fit(load(str(good)), recipe=recipe("parts"), seed=0)
    by = detector.decides
    print(f"PASS up to {by.review:.4f}: at most {100 * by.reviewed.kept:.0f} % false calls ({by.images} images)")

    images, files, skipped = read_files([suspects], depth=detector.preprocessing.depth)
    for _, reason in skipped:
        print(f"left out: {reason}", file=sys.stderr)
    scores = detector.score(images)
    worst = scores.argsort(descending=True)[:16].tolist()
    for number in worst:
        call = "anomalous" if scores[number] > by.review else "normal"
        print(f"{scores[number]:.4f}  {call:9}  {files[number]}")
    shown = [Inspected(images[number].permute(1, 2, 0).numpy(), float(scores[number])) for number in worst]
    draw_tray(shown, by.review, Path("worst.png"), title=f"the worst of {suspects}")
    print("look at worst.png")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_folder(Path(folder) / "label", "label", train=100)
            main(Path(folder) / "label" / "train" / "good", Path(folder) / "label" / "test")
