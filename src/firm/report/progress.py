"""The curve of a training: held-out good parts against synthetic defects, over CPU time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a file is written, no window opened
import matplotlib.pyplot as plt


def draw_progress(lines: Sequence[dict[str, Any]], path: Path) -> bool:
    """Write the probes of a run's history as a PNG; False if there are none."""
    probes = [line for line in lines if "synthetic_auroc" in line]
    if not probes:
        return False
    figure, place = plt.subplots(figsize=(6, 3.6), layout="constrained")
    minutes = [line["seconds"] / 60 for line in probes]
    place.plot(minutes, [100 * line["synthetic_auroc"] for line in probes], marker="o", color="#1f4e79")
    place.set(xlabel="CPU minutes of training", ylabel="AUROC on held-out good parts\nwith synthetic defects, %")
    place.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True
