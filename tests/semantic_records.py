"""Crafted records of semantic runs at scale `short`, so that tests of pages do not depend on what has been measured."""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path

from firm.recipes.recipe import to_json
from firm.research.experiment import Experiment, Record, record_path
from firm.research.semantic import FINAL, PROBES
from firm.research.tables import TABLES, narrowed, plan

CLASSES = ("cifar10:bird", "cifar10:dog", "fashion-mnist:sandal", "fashion-mnist:shirt")
GOOD = {"cifar10": 5000, "fashion-mnist": 6000}


def semantic_record(asked: Experiment) -> Record:
    """A record as the runner writes it, with numbers that its key decides."""
    value = 0.6 + zlib.crc32(asked.key.encode()) % 3000 / 10000
    measured = {"value": value, "low": value - 0.02, "high": value + 0.02}
    steps = 100 * asked.recipe.training.epochs
    properties = {"compactness": 0.5, "margin": 0.4, "outlier_spread": 1.0}
    probes = [{"step": part * steps // 10, **dict.fromkeys(PROBES, measured)} for part in range(1, 11)]
    names = [name for name in FINAL if asked.recipe.features != "pixels" or name in PROBES]
    return {
        "key": asked.key,
        "experiment": asked.content,
        "data": {"train": None, "test": None},
        "code": "other",
        "origin": {"torch": "2", "python": "3", "machine": "crafted, 1 core", "device": "cpu", "threads": 1},
        "recipe": to_json(asked.recipe),
        "steps": steps,
        "good_images": GOOD.get(asked.data.partition(":")[0], 1),
        "test_images": asked.test_images,
        "probes": [probe | {"properties": properties} for probe in probes] if steps else [],
        "final": dict.fromkeys(names, measured),
        "diagnostics": {"step": steps, "loss": 2.0, "collapsed": False, **properties} if steps else None,
        "seconds": 60.0,
        "resumed": False,
    }


def write_semantic_records(folder: Path, seeds: Sequence[int] = (0, 1)) -> Path:
    """Records of `objectives` and `exposure` on four classes, as far as each table has them."""
    for name in ("objectives", "exposure"):
        for asked in plan(narrowed(TABLES[name], CLASSES, {}), "short", list(seeds)):
            record_path(folder, asked).write_text(json.dumps(semantic_record(asked)), encoding="utf-8")
    return folder
