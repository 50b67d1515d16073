"""Runs die at any moment and end bit-equal: real processes, real signals, real files."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import firm
from firm.fitting import as_data, preprocessing_of
from firm.model_folder import read_model
from firm.recipes.presets import PARTS
from firm.recipes.recipe import change
from firm.runs import CHECKPOINT, HISTORY, Run
from firm.storage import load_tensors
from firm.training import Task
from firm.types import FirmError

SETTINGS = {
    "encoder.width": 8,
    "encoder.head.hidden": (16,),
    "encoder.head.out": 8,
    "training.epochs": 4,
    "training.batch": 8,
    "size": 16,
    "outliers": "rotations",
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty small pictures: stripes with noise."""
    folder = tmp_path_factory.mktemp("parts")
    rng = np.random.default_rng(0)
    for number in range(40):
        stripes = 128 + 80 * np.sin(np.arange(16)[:, None, None] * 0.9 + rng.uniform(0, 6))
        pixels = stripes + rng.normal(0, 12, (16, 16, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number:02d}.png")
    return folder


def command(parts: Path, out: Path) -> list[str]:
    settings = [
        f"--set={path}={json.dumps(list(value) if isinstance(value, tuple) else value)}"
        for path, value in SETTINGS.items()
    ]
    # a checkpoint after every step, so that deaths fall into its writing as well
    more = ["--preset=parts", "--threads=1", "--checkpoint-seconds=0", "--json"]
    return [sys.executable, "-m", "firm", "fit", str(parts), f"--out={out}", *settings, *more]


def finish(parts: Path, out: Path) -> dict[str, torch.Tensor]:
    done = subprocess.run(command(parts, out), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return read_model(out)[0]


def start_until(parts: Path, out: Path, step: int) -> subprocess.Popen[str]:
    return started(command(parts, out), out.with_name(out.name + ".run") / HISTORY, step)


def started(
    arguments: list[str], history: Path, step: int, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """A process that has made at least so many steps, counted by what it wrote."""
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 600
    while process.poll() is None and time.monotonic() < deadline:
        if history.exists() and _last_step(history) >= step:
            break
        time.sleep(0.005)
    return process


def _last_step(history: Path) -> int:
    lines = [line for line in history.read_text().splitlines() if line.endswith("}")]
    return json.loads(lines[-1])["step"] if lines else 0


@pytest.fixture(scope="module")
def whole(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return finish(parts, tmp_path_factory.mktemp("whole") / "model.firm")


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_killed_at_random_points_ends_bit_equal(parts: Path, whole: dict, tmp_path: Path) -> None:
    out = tmp_path / "model.firm"
    chance = random.Random(7)
    for floor in (10, 40):
        process = start_until(parts, out, floor)
        time.sleep(chance.uniform(0, 0.15))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"
    assert_equal(finish(parts, out), whole)
    steps = [json.loads(line)["step"] for line in (tmp_path / "model.firm.run" / HISTORY).read_text().splitlines()]
    assert steps == sorted(set(steps))  # no step logged twice, none missing its place
    assert not (tmp_path / "model.firm.run" / CHECKPOINT).exists()


PATCHES = """
import sys
from pathlib import Path
import torch
import drawings
from firm.fitting import as_data
from firm.fitting import task_of
from firm.recipes.presets import INSPECT
from firm.recipes.recipe import change
from firm.runs import Run

torch.set_num_threads(1)
recipe = change(INSPECT, {
    "encoder.width": 8, "encoder.head.hidden": (16,), "encoder.head.out": 8, "size": 48, "views.sizes": (16,),
    "training.epochs": 20, "training.batch": 8, "training.reuse": 4, "automatic": (),
    "conditioning.light": "median", "conditioning.foreground.method": "otsu",
})
task = task_of(recipe, as_data(drawings.screws(12, side=48).images), seed=0)
assert task.replay is not None
for _ in Run(recipe, task, folder=Path(sys.argv[1]), checkpoint_seconds=0, log_every=1):
    pass
"""


def test_a_training_on_patches_with_outliers_used_again_ends_bit_equal(tmp_path: Path) -> None:
    """The window of ready outliers dies with the process and comes back as it was."""
    paths = os.pathsep.join([str(Path(firm.__file__).parents[1]), str(Path(__file__).parent)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}

    def arguments(name: str) -> list[str]:
        return [sys.executable, "-c", PATCHES, str(tmp_path / name)]

    process = started(arguments("parts"), tmp_path / "parts" / HISTORY, 17, environment)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"
    for name in ("parts", "whole"):
        done = subprocess.run(arguments(name), capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
    (ours, card), (theirs, _) = (
        load_tensors(tmp_path / name / CHECKPOINT, kind="checkpoint", schema=1) for name in ("parts", "whole")
    )
    assert card["step"] == 60
    assert_equal(ours, theirs)


def test_asked_to_stop_it_checkpoints_and_says_so(parts: Path, whole: dict, tmp_path: Path) -> None:
    out = tmp_path / "model.firm"
    for kind, code, step in ((signal.SIGTERM, 143, 20), (signal.SIGINT, 130, 40)):
        process = start_until(parts, out, step)
        process.send_signal(kind)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == code, errors
        assert "run the same command again" in errors
        assert (tmp_path / "model.firm.run" / CHECKPOINT).exists()
        assert not out.exists()
    assert_equal(finish(parts, out), whole)


def small_task(images: torch.Tensor) -> tuple[object, Task]:
    recipe = change(PARTS, SETTINGS | {"training.epochs": 1})
    preprocessing = preprocessing_of(recipe, as_data(images))
    task = Task(images, preprocessing, recipe.outliers, recipe.views, recipe.positives, recipe.training, 0)
    return recipe, task


def noise(seed: int, n: int = 12) -> torch.Tensor:
    return torch.randint(0, 256, (n, 3, 16, 16), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_other_images_or_settings_are_refused(tmp_path: Path) -> None:
    recipe, task = small_task(noise(0))
    run = Run(recipe, task, folder=tmp_path)
    next(iter(run))
    run.save()
    other_recipe, other = small_task(noise(1))
    with pytest.raises(FirmError, match="other settings or images"):
        Run(other_recipe, other, folder=tmp_path)
    with pytest.raises(FirmError, match="other settings or images"):
        Run(change(recipe, {"training.lr": 0.5}), task, folder=tmp_path)


def test_a_cut_history_line_is_dropped(tmp_path: Path) -> None:
    recipe, task = small_task(noise(0))
    for _ in (run := Run(recipe, task, folder=tmp_path, log_every=1)):
        pass
    before = [line["step"] for line in run.history.lines]
    with (tmp_path / HISTORY).open("a") as file:
        file.write('{"step": 99, "lo')
    again = Run(recipe, task, folder=tmp_path, log_every=1)
    assert [line["step"] for line in again.history.lines] == before == list(range(1, task.steps + 1))


def test_a_failed_checkpoint_leaves_the_last_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, task = small_task(noise(0))
    run = Run(recipe, task, folder=tmp_path)
    steps = iter(run)
    next(steps)
    run.save()
    good = (tmp_path / CHECKPOINT).read_bytes()
    next(steps)
    replace = os.replace

    def full(source: str, target: Path) -> None:
        if Path(target).name == CHECKPOINT:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(FirmError, match=r"checkpoint\.safetensors: No space left on device; free some space; the file"):
        run.save()
    monkeypatch.undo()
    assert (tmp_path / CHECKPOINT).read_bytes() == good
    assert not list(tmp_path.glob(".checkpoint*"))
    assert Run(recipe, task, folder=tmp_path).resumed_at == 1


def test_a_full_disk_is_a_sentence_and_costs_only_the_last_part(parts: Path, whole: dict, tmp_path: Path) -> None:
    """No file may grow beyond a little less than a checkpoint: the real write fails half-way."""
    out = tmp_path / "model.firm"
    process = start_until(parts, out, 20)
    process.kill()
    process.communicate()
    folder = tmp_path / "model.firm.run"
    before = (folder / CHECKPOINT).read_bytes()
    limit = len(before) - 100

    def confine() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    done = subprocess.run(command(parts, out), capture_output=True, text=True, check=False, preexec_fn=confine)
    assert done.returncode == 2, done.stderr
    assert "cannot write" in done.stderr
    assert "Traceback" not in done.stderr
    assert (folder / CHECKPOINT).read_bytes() == before
    assert_equal(finish(parts, out), whole)


def test_what_a_killed_process_left_half_written_is_swept(tmp_path: Path) -> None:
    recipe, task = small_task(noise(0))
    (tmp_path / f".{CHECKPOINT}.abc123").write_bytes(b"half")
    Run(recipe, task, folder=tmp_path)
    assert not list(tmp_path.glob(".checkpoint*"))


def test_the_history_reports_the_three_properties(tmp_path: Path) -> None:
    recipe, task = small_task(noise(0))
    for _ in (run := Run(recipe, task, folder=tmp_path, log_every=1)):
        pass
    line = run.history.lines[-1]
    assert {"loss", "lr", "epoch", "compactness", "margin", "outlier_spread", "collapsed"} <= line.keys()
    assert line["collapsed"] is False


def test_collapse_is_detected(tmp_path: Path) -> None:
    recipe, task = small_task(noise(0))
    run = Run(recipe, task, folder=tmp_path, log_every=1)
    with torch.no_grad():
        last = run.state.network.head[-1]
        last.weight.zero_()  # every image is mapped to one point
    next(iter(run))
    assert run.collapsed


def test_a_diverged_loss_is_a_sentence(tmp_path: Path) -> None:
    recipe, task = small_task(noise(0))
    run = Run(recipe, task, folder=tmp_path, log_every=1)
    with torch.no_grad():
        run.state.network.head[-1].weight.fill_(torch.nan)
    with pytest.raises(FirmError, match=r"loss is nan at step 1; lower training\.lr"):
        next(iter(run))
