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
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import drawings
import firm
from commands import run
from firm.detector.model_folder import read_model
from firm.detector.prepare import prepare
from firm.detector.read import as_data
from firm.errors import MachineError, ModelFileError, SettingError
from firm.images.preprocess import Preprocessing
from firm.networks.heads import Encoder, Head
from firm.outliers.registry import Rotations
from firm.recipes.presets import INSPECT, PARTS
from firm.recipes.recipe import change
from firm.runtime.files import load_tensors
from firm.training.batches import ImageTask
from firm.training.loop import Training
from firm.training.methods import Contrastive
from firm.training.runs import CHECKPOINT, HISTORY, Run
from firm.views.registry import SimCLR

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
    done = run(*command(parts, out)[3:])  # within this process: an interpreter and torch take seconds
    assert done.code == 0, done.err
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


def test_a_training_that_is_killed_stopped_and_out_of_disk_ends_bit_equal(
    parts: Path, whole: dict, tmp_path: Path
) -> None:
    """One training, interrupted in every way, each time by another process."""
    out, folder = tmp_path / "model.firm", tmp_path / "model.firm.run"
    killed(parts, out, 10)
    before = (folder / CHECKPOINT).read_bytes()
    done = subprocess.run(
        command(parts, out), capture_output=True, text=True, check=False, preexec_fn=confined(len(before) - 100)
    )
    assert done.returncode == 2, done.stderr
    assert "cannot write" in done.stderr
    assert "Traceback" not in done.stderr
    assert (folder / CHECKPOINT).read_bytes() == before
    for kind, code, step in ((signal.SIGTERM, 143, 20), (signal.SIGINT, 130, 35)):
        process = start_until(parts, out, step)
        process.send_signal(kind)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == code, errors
        assert "run the same command again" in errors
        assert (folder / CHECKPOINT).exists()
        assert not out.exists()
    killed(parts, out, 50)
    assert_equal(finish(parts, out), whole)
    steps = [json.loads(line)["step"] for line in (folder / HISTORY).read_text().splitlines()]
    assert steps == sorted(set(steps))  # no step logged twice, none missing its place
    assert not (folder / CHECKPOINT).exists()


def killed(parts: Path, out: Path, step: int) -> None:
    process = start_until(parts, out, step)
    time.sleep(random.Random(step).uniform(0, 0.15))
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"


def confined(limit: int) -> Callable[[], None]:
    """No file may grow beyond a little less than a checkpoint: the real write fails half-way."""

    def confine() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    return confine


def train_patches(folder: Path) -> None:
    """A training on patches whose outliers are used again."""
    torch.set_num_threads(1)
    changes = {
        "encoder.width": 8, "encoder.head.hidden": (16,), "encoder.head.out": 8, "size": 48, "views.sizes": (16,),
        "training.epochs": 20, "training.batch": 8, "training.reuse": 4, "automatic": (),
        "conditioning.illumination": "median", "conditioning.foreground.method": "otsu",
    }  # fmt: skip
    images = as_data(drawings.screws(12, side=48).images)
    prepared = prepare(change(INSPECT, changes), images, torch.arange(12), seed=0)
    assert isinstance(prepared.task, ImageTask)
    assert prepared.task.buffer is not None
    for _ in prepared.run(folder=folder, checkpoint_seconds=0, log_every=1):
        pass


def test_a_training_on_patches_with_outliers_used_again_ends_bit_equal(tmp_path: Path) -> None:
    """The window of ready outliers dies with the process and comes back as it was."""
    paths = os.pathsep.join([str(Path(firm.__file__).parents[1]), str(Path(__file__).parent)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}

    program = "import sys; from pathlib import Path; import test_runs; test_runs.train_patches(Path(sys.argv[1]))"
    arguments = [sys.executable, "-c", program, str(tmp_path / "parts")]
    process = started(arguments, tmp_path / "parts" / HISTORY, 17, environment)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"
    for name in ("parts", "whole"):
        train_patches(tmp_path / name)
    (ours, card), (theirs, _) = (
        load_tensors(tmp_path / name / CHECKPOINT, kind="checkpoint", schema=1) for name in ("parts", "whole")
    )
    assert card["step"] == 60
    assert_equal(ours, theirs)


def small_run(folder: Path | None, *, digest: str = "one training", log_every: int = 1) -> Run:
    training = Training(epochs=1, batch=8, lr=0.05)
    task = ImageTask(noise(0), Preprocessing(16), Rotations(), SimCLR(), training, 0)
    network = task.network(Encoder(width=8, head=Head(hidden=(16,), out=8)))
    return Run(task, Contrastive(), network, digest=digest, folder=folder, log_every=log_every)


def noise(seed: int, n: int = 12) -> torch.Tensor:
    return torch.randint(0, 256, (n, 3, 16, 16), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    next(iter(run))
    run.save()
    with pytest.raises(ModelFileError, match=str(tmp_path)):
        small_run(tmp_path, digest="another training")


def test_a_training_is_named_by_its_recipe_seed_and_images() -> None:
    def name(images: torch.Tensor, *, seed: int = 0, **changes: object) -> str:
        recipe = change(PARTS, SETTINGS | changes)
        return prepare(recipe, as_data(images), torch.arange(len(images)), seed=seed).run().digest

    one = name(noise(0))
    assert one == name(noise(0), **{"score": "s_con", "features": "pixels"})  # what costs no training
    others = [name(noise(1)), name(noise(0), seed=1), name(noise(0), **{"training.lr": 0.5})]
    others += [name(noise(0), positives="supcon"), name(noise(0), zoom=1.5)]
    assert len({one, *others}) == 6


def test_a_cut_history_line_is_dropped(tmp_path: Path) -> None:
    for _ in (run := small_run(tmp_path)):
        pass
    before = [line["step"] for line in run.history.lines]
    with (tmp_path / HISTORY).open("a") as file:
        file.write('{"step": 99, "lo')
    again = small_run(tmp_path)
    assert [line["step"] for line in again.history.lines] == before == list(range(1, run.state.step + 1))


def test_a_failed_checkpoint_leaves_the_last_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(tmp_path)
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
    with pytest.raises(MachineError, match=rf"{CHECKPOINT}.*No space left"):
        run.save()
    monkeypatch.undo()
    assert (tmp_path / CHECKPOINT).read_bytes() == good
    assert not list(tmp_path.glob(".checkpoint*"))
    assert small_run(tmp_path).resumed_at == 1


def test_what_a_killed_process_left_half_written_is_swept(tmp_path: Path) -> None:
    (tmp_path / f".{CHECKPOINT}.abc123").write_bytes(b"half")
    small_run(tmp_path)
    assert not list(tmp_path.glob(".checkpoint*"))


@pytest.mark.parametrize(
    "line",
    ["[]", '{"x": 1}', '{"step": "x"}', '{"step": 1, "seconds": "x"}', '{"step": 1, "loss": "x"}', "7", "null", "{x"],
)
def test_a_foreign_history_line_is_dropped(tmp_path: Path, line: str) -> None:
    for _ in (run := small_run(tmp_path)):
        pass
    before = (tmp_path / HISTORY).read_text()
    (tmp_path / HISTORY).write_text(line + "\n" + before)
    assert small_run(tmp_path).history.lines == run.history.lines
    assert (tmp_path / HISTORY).read_text() == before


def test_the_history_reports_the_three_properties(tmp_path: Path) -> None:
    for _ in (run := small_run(tmp_path)):
        pass
    line = run.history.lines[-1]
    assert {"loss", "lr", "epoch", "compactness", "margin", "outlier_spread", "collapsed"} <= line.keys()
    assert line["collapsed"] is False


def test_collapse_is_detected(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    with torch.no_grad():
        last = run.state.network.head[-1]
        last.weight.zero_()  # every image is mapped to one point
    next(iter(run))
    assert run.collapsed


def test_a_diverged_loss_is_a_sentence(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    with torch.no_grad():
        run.state.network.head[-1].weight.fill_(torch.nan)
    with pytest.raises(SettingError, match=r"nan at step 1.*training\.lr"):
        next(iter(run))
