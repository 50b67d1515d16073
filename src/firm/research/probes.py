"""What the protocols share: probes during a training, what a training leaves behind, and numbers of five digits."""

from collections.abc import Callable
from typing import Any

from firm.research.experiment import Experiment
from firm.training.loop import Progress
from firm.training.runs import Run
from firm.types import OneClass

Measured = dict[str, Any]
PROPERTIES = ("compactness", "margin", "outlier_spread")


def probing(experiment: Experiment, probe: Callable[[Run], Measured]) -> Callable[[Progress, Run], None]:
    """Measures at evenly spaced steps before the last; the history keeps it, so a resumed run has every probe."""

    def on_progress(progress: Progress, run: Run) -> None:
        if progress.step in {progress.steps * part // experiment.probes for part in range(1, experiment.probes)}:
            run.history.write({"step": progress.step, "probe": probe(run)})

    return on_progress


def left_by(run: Run, data: OneClass) -> Measured:
    """What a training leaves beside its network."""
    logged = [line for line in run.history.lines if "loss" in line]
    return {
        "steps": run.steps,
        "good_images": len(data.train),
        "test_images": len(data.test),
        "probes": [
            {"step": line["step"], **line["probe"], **properties(run, line["step"])}
            for line in run.history.lines
            if "probe" in line
        ],
        "diagnostics": logged[-1] if logged else None,
    }


def properties(run: Run, step: int) -> Measured:
    """The three properties in the last batch that was logged by then; nothing before the first."""
    lines = [line for line in run.history.lines if "compactness" in line and line["step"] <= step]
    return {"properties": {name: rounded(lines[-1][name]) for name in PROPERTIES}} if lines else {}


def rounded(value: Any) -> Any:
    """Five digits of every number in nested JSON."""
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return round(value, 5) if isinstance(value, float) else value
