"""Plan -> missing runs -> results: resumable, shareable between processes, one JSON file per run.

A result file is named by what decided it, so a run that exists is never made twice, a table finds its runs,
and several processes can work through one plan: each run is claimed by a file lock that dies with its owner.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

import firm
from firm.data import load
from firm.encoder import Network
from firm.evaluate import balanced_subset, evaluate
from firm.fitting import task_of
from firm.recipes.experiment import Experiment
from firm.recipes.recipe import from_json, to_json
from firm.restoring import network_of
from firm.runs import Run, claim, discard
from firm.scores import SCORINGS, Scoring, with_k
from firm.storage import write_atomically
from firm.types import FirmError, OneClass

PROBES = {"s_con k=1": SCORINGS["s_con"], "s_con k=5": with_k(SCORINGS["s_con"], 5)}
FINAL: dict[str, Scoring] = {
    f"{name} k={k}": with_k(SCORINGS[name], k)
    for name in ("s_con", "s_con*", "s_shift", "s_shift*", "s_ens", "s_ens*")
    for k in (1, 5)
} | {name: SCORINGS[name] for name in ("s_proto", "kde")}


class Named(Protocol):
    """Anything with a name that says what decides it."""

    @property
    def name(self) -> str: ...


def result_path(folder: Path, experiment: Named) -> Path:
    return folder / f"{experiment.name}.json"


def results(folder: Path, plan: list[Experiment]) -> list[dict[str, Any] | None]:
    """The stored result of each experiment, None where it is missing."""
    return [_stored(result_path(folder, experiment), experiment) for experiment in plan]


def _stored(path: Path, experiment: Experiment) -> dict[str, Any] | None:
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    if replace(from_json(result["recipe"]), score=experiment.recipe.score) != experiment.recipe:
        raise FirmError(f"{path} was made with other settings than its name says; remove it and run again")
    return result


def run_missing(
    plan: Sequence[Named],
    folder: Path,
    work: Path,
    *,
    device: str = "cpu",
    by: Callable[..., dict[str, Any]] | None = None,
    line: Callable[[dict[str, Any]], str] | None = None,
) -> Iterator[str]:
    """Make every run that has no result and that no other process is making; yields a line about each.

    `by` conducts one experiment and `line` tells of its result; without them the semantic ones.
    """
    for number, experiment in enumerate(plan, 1):
        path = result_path(folder, experiment)
        with claim(work / experiment.name) as mine:
            if path.exists():
                continue
            if not mine:
                yield f"{number}/{len(plan)} {experiment.name}: another process is making it"
                continue
            make: Callable[..., dict[str, Any]] = by or conduct
            result = make(experiment, work / experiment.name, device=device)
            write_atomically(path, (json.dumps(result, indent=1) + "\n").encode())
            discard(work / experiment.name)
        yield f"{number}/{len(plan)} {experiment.name}: {(line or semantic_line)(result)}"


def semantic_line(result: dict[str, Any]) -> str:
    """What came out of a semantic run, in a few words."""
    return f"s_con k=1 {100 * result['final']['s_con k=1']['value']:.1f}, {result['seconds']:.0f} s"


def conduct(experiment: Experiment, work: Path, *, device: str = "cpu") -> dict[str, Any]:
    """Train with probes, then score in every way; the work folder makes it resumable."""
    started = time.process_time()
    data = load(experiment.data)
    task = task_of(experiment.recipe, data, seed=experiment.seed)
    run = Run(experiment.recipe, task, device=device, folder=work)
    at = {task.steps * part // experiment.probes for part in range(1, experiment.probes)}
    subset = balanced_subset(data.anomalous, experiment.test_images)
    for progress in run:
        if progress.step in at:
            run.history.write({"step": progress.step, "probe": _measure(run, data, subset, PROBES)})
    final = _measure(run, data, subset, FINAL)
    curve = [line["probe"] for line in run.history.lines if "probe" in line]
    curve.append({name: final[name] for name in PROBES})
    steps = [line["step"] for line in run.history.lines if "probe" in line] + [task.steps]
    return {
        "data": experiment.data,
        "seed": experiment.seed,
        "recipe": to_json(experiment.recipe),
        "steps": task.steps,
        "test_images": len(subset),
        "inliers": len(data.train),
        "probes": [{"step": step, **values} for step, values in zip(steps, curve, strict=True)],
        "final": final,
        "diagnostics": next((line for line in reversed(run.history.lines) if "loss" in line), None),  # untrained: none
        "seconds": round(time.process_time() - started, 1),
        "resumed": run.resumed_at > 0,
        "origin": origin(device),
    }


def origin(device: str) -> dict[str, Any]:
    """Where a number comes from."""
    return {
        "firm": firm.__version__,
        "source": source_digest(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": device,
        "threads": torch.get_num_threads(),
    }


@cache
def source_digest() -> str:
    """Names the code that made a result: a digest over the package's own files."""
    package = Path(firm.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _measure(run: Run, data: OneClass, subset: torch.Tensor, scorings: dict[str, Scoring]) -> dict[str, Any]:
    trained = network_of(run)
    assert isinstance(trained, Network)  # whole images are not described by a backbone
    measured = evaluate(
        trained.encoder,
        run.task.preprocessing,
        references=data.train,
        test=data.test[subset],
        anomalous=data.anomalous[subset],
        scorings=scorings,
    )
    return {name: {key: round(number, 5) for key, number in asdict(value).items()} for name, value in measured.items()}
