"""Plan -> missing runs -> records: resumable, shared by several processes, one JSON file per run.

A file is named by what was asked (`experiment`). Its record holds what came out and all else that decides it: digests
of the images, the exposure pool and the code, versions and machine; where one of the digests is no longer today's, the
run is outdated. The process that makes a run locks it.
"""

import ast
import hashlib
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

import firm
from firm.data.registry import DATASETS, data_roots, folder_named, load, training_files
from firm.detector.read import Options
from firm.errors import DataError, ImageError, ModelFileError
from firm.images.preprocess import fingerprint
from firm.networks.weights import FACTS, installed
from firm.outliers.sia import Sia
from firm.outliers.whole_images import Exposure, RotationsAndExposure, pool_named
from firm.research.experiment import Experiment, Record, read_record, record_path
from firm.research.few import few
from firm.research.frozen import frozen
from firm.research.protocols import Protocol, guarantees, patches
from firm.research.semantic import semantic
from firm.runtime.files import check_writable, folder_lock, write_atomically
from firm.runtime.listener import SILENT, Listener
from firm.types import OneClass

Plan = Sequence[Experiment]
PROTOCOLS: dict[str, Protocol] = {
    "semantic": semantic,
    "patches": patches,
    "guarantees": guarantees,
    "few": few,
    "frozen": frozen,
}
MISSING = (DataError, ImageError, ModelFileError)  # without which one run cannot be made, but others can
DECIDING = (  # the runs on parts
    "types.py", "runtime/random.py", "runtime/feature_cache.py", "images", "drawn", "data", "outliers", "views",
    "networks", "training", "diffusion", "scoring", "metrics", "decision", "recipes", "detector",
)  # fmt: skip
OF_IMAGES = (  # the runs on whole images of a class, which nothing that is made for parts can change
    "types.py", "runtime/random.py", "runtime/feature_cache.py", "images/colour.py", "images/preprocess.py",
    "images/resize.py", "data/cats_vs_dogs.py", "data/cifar.py", "data/datasets.json", "data/fashion_mnist.py",
    "data/registry.py", "data/splits.py", "outliers/cutpaste.py", "outliers/drawing.py", "outliers/perlin_blend.py",
    "outliers/registry.py", "outliers/whole_images.py", "views/registry.py", "views/simclr.py", "networks",
    "training/batches.py", "training/feature_batches.py", "training/loop.py", "training/methods.py",
    "training/positives.py", "training/runs.py", "scoring/image_scores.py", "scoring/knn.py", "metrics/image.py",
    "recipes/recipe.py", "detector/embed_images.py", "detector/frozen_floor.py", "detector/prepare.py",
    "research/semantic.py", "research/probes.py",
)  # fmt: skip
VARYING = ("seconds", "megabytes", "per_second", "per_image", "code", "origin", "resumed", "confirmed", "recipe")
OF_PROTOCOL = {
    "semantic": OF_IMAGES,
    "frozen": (*OF_IMAGES, "research/frozen.py"),
    "patches": (*DECIDING, "research/probes.py", "research/protocols.py"),
    "guarantees": (*DECIDING, "research/probes.py", "research/protocols.py"),
    "few": (*DECIDING, "research/few.py"),
}


def run_missing(
    plan: Plan, folder: Path, work: Path, *, device: str = "cpu", listener: Listener = SILENT, outdated: bool = False
) -> Iterator[str]:
    """Make every run that has no record and that no other process is making; yields a line about each.

    A run whose data or weights are missing is skipped. With `outdated`, runs of other code or images are made again.
    """
    check_writable(folder)
    for number, experiment in enumerate(plan, 1):
        if _recorded(folder, experiment, outdated):
            continue
        name, own = f"{number}/{len(plan)} {experiment.key}", work / experiment.key
        with folder_lock(own) as mine:
            if _recorded(folder, experiment, outdated):
                continue
            if not mine:
                yield f"{name}: another process is making it"
                continue
            try:
                record = _run(experiment, Options(seed=experiment.seed, device=device, folder=own / "run"), listener)
            except MISSING as error:
                yield f"{name}: skipped: {error}"
                continue
            _write(folder, experiment, record)
            shutil.rmtree(own / "run", ignore_errors=True)  # checkpoints and features of what is safe now
        yield f"{name}: {record['summary']}, {record['seconds']:.0f} s"


def confirm_outdated(
    plan: Plan, folder: Path, work: Path, *, device: str = "cpu", listener: Listener = SILENT
) -> Iterator[str]:
    """Repeat the shortest of the outdated runs of each recipe; where it is equal to the bit, all of them are confirmed.

    Yields a line about each. What is not equal stays outdated.
    """
    recipes: dict[str, list[tuple[Experiment, Record]]] = {}
    for experiment in plan:
        record = read_record(folder, experiment)
        if record is not None and is_outdated(record):
            alike = {name: value for name, value in experiment.content.items() if name not in ("data", "seed")}
            recipes.setdefault(json.dumps([alike, record["code"]]), []).append((experiment, record))
    for runs in recipes.values():
        experiment, stored = min(runs, key=lambda run: run[1].get("seconds") or math.inf)
        own = work / f"confirm-{experiment.key}"
        fresh = _run(experiment, Options(seed=experiment.seed, device=device, folder=own / "run"), listener)
        shutil.rmtree(own, ignore_errors=True)
        before, after = _measured(stored), _measured(json.loads(json.dumps(fresh)))
        if differing := [name for name in before if before[name] != after.get(name)]:
            yield f"{experiment.key}: not equal to its record in {', '.join(differing)}"
            continue
        confirmed = {"code": code_digest(experiment.protocol), "by": experiment.key}
        for one, record in runs:
            _write(folder, one, record | {"confirmed": confirmed})
        yield f"{experiment.key}: equal to its record; {len(runs)} runs confirmed"


def is_outdated(record: Record) -> bool:
    """Whether other code than today's made the run, and no repeated run shows that today's makes the same."""
    return record["code"] != code_digest(record["experiment"]["protocol"]) and not is_confirmed(record)


def is_confirmed(record: Record) -> bool:
    """Whether other code made the run, and today's gives the same: shown by repeating one of its recipe."""
    today = code_digest(record["experiment"]["protocol"])
    return record["code"] != today == record.get("confirmed", {}).get("code")


def _write(folder: Path, experiment: Experiment, record: Record) -> None:
    write_atomically(record_path(folder, experiment), (json.dumps(record, indent=1) + "\n").encode())


def _measured(value: Any) -> Any:
    """What a run measured, without what differs from one machine or hour to the next."""
    if isinstance(value, dict):
        return {name: _measured(inner) for name, inner in value.items() if not name.endswith(VARYING)}
    return [_measured(inner) for inner in value] if isinstance(value, list) else value


def missing(experiment: Experiment) -> str:
    """What a run lacks, by name: its data, exposure pool or weights; empty if nothing. No image is decoded."""
    outliers, weights = experiment.recipe.outliers, experiment.recipe.pretrained.name
    if not _is_there(experiment.data, tuple(data_roots())):
        return experiment.data
    if isinstance(outliers, Exposure):
        try:
            pool_named(outliers.path)
        except DataError:
            return outliers.path or "an exposure pool"
    if isinstance(outliers, Sia) and experiment.recipe.training.epochs:
        if outliers.folder:
            return "" if Path(outliers.folder).is_dir() else outliers.folder
        if not find_spec("diffusers"):
            return "the package diffusers"
    return weights if weights in FACTS and not installed(weights) else ""


@cache
def _is_there(name: str, roots: tuple[Path, ...]) -> bool:
    """Whether the files of a data set are in one of the folders; drawn parts need none."""
    facts = DATASETS.get(name.partition(":")[0])
    if facts is None:
        return folder_named(name) is not None
    if not facts.listing:
        folders = (name.partition(":")[0], *facts.folders)
        return facts.side > 0 or any((root / folder).exists() for root in roots for folder in folders)
    try:
        return bool(training_files(name))
    except DataError:
        return False


def _recorded(folder: Path, experiment: Experiment, outdated: bool) -> bool:
    record = read_record(folder, experiment)
    if record is None or not outdated:
        return record is not None
    if is_outdated(record):
        return False
    try:
        images, pool = _digests(_load(experiment)), _pool(experiment.recipe.outliers)
    except MISSING:
        return True  # nothing to compare it with, or to repeat it on
    return (images, pool) == (record["data"], record.get("pool", {}))


def _load(experiment: Experiment) -> OneClass:
    return load(experiment.data, side=experiment.side or None)


def _digests(data: OneClass) -> dict[str, str]:
    return {"train": fingerprint(data.train), "test": fingerprint(data.test)}


def _run(experiment: Experiment, options: Options, listener: Listener) -> Record:
    begun, started = options.folder is not None and options.folder.exists(), time.process_time()
    data = _load(experiment)
    pool = _pool(experiment.recipe.outliers)
    measured = PROTOCOLS[experiment.protocol](experiment, data, options, listener)
    return {
        "key": experiment.key,
        "experiment": experiment.content,
        "data": _digests(data),
        **({"pool": pool} if pool else {}),
        "code": code_digest(experiment.protocol),
        "origin": {  # the versions and the machine a number comes from
            "firm": firm.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "system": platform.system(),
            "device": options.device,
            "threads": torch.get_num_threads(),
        },
        **measured,
        "seconds": round(time.process_time() - started, 1),
        "resumed": begun,  # then no time here is that of the whole run
    }


def _pool(outliers: object) -> dict[str, Any]:
    """The name, size and digest of the exposure pool; empty where none is used."""
    if not isinstance(outliers, Exposure | RotationsAndExposure):
        return {}
    pool = pool_named(outliers.path)
    sample = pool.take(range(0, len(pool), max(1, len(pool) // 1000)), 32)  # enough to tell pools apart
    return {"name": outliers.path, "images": len(pool), "digest": fingerprint(sample)}


@cache
def code_digest(protocol: str) -> str:
    """Names the modules and tables that decide a number of this protocol by what they say, however it is written."""
    package, digest = Path(firm.__file__).parent, hashlib.sha256()
    for place in OF_PROTOCOL[protocol]:
        folder = sorted(path for path in (package / place).glob("*") if path.suffix in (".py", ".json"))
        for path in folder or [package / place]:
            text = path.read_text(encoding="utf-8")
            digest.update(f"# {path.relative_to(package).as_posix()}\n".encode())
            digest.update((normalised(text) if path.suffix == ".py" else text).encode())
    return digest.hexdigest()[:16]


def normalised(source: str) -> str:
    """Source code without comments, docstrings, layout and the words of errors, the same in every Python."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            node.body[0] = ast.Pass()
        for part in ast.walk(node) if isinstance(node, ast.Raise) else ():
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                part.value = ""
    return _dumped(tree)


def _dumped(node: object) -> str:
    """Like `ast.dump`, which differs between versions in the empty fields it lists."""
    if isinstance(node, ast.AST):
        fields = (f"{name}={_dumped(value)}" for name, value in ast.iter_fields(node) if value not in (None, []))
        return f"{type(node).__name__}({', '.join(fields)})"
    return f"[{', '.join(map(_dumped, node))}]" if isinstance(node, list) else repr(node)
