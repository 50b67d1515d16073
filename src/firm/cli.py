"""The command line: thin verbs over the package. Results go to standard output, all else to standard error.

Exit codes: 0 done; 1 done, but some files could not be used; 2 a mistake a person can mend; 130 and 143 stopped by
Ctrl-C or SIGTERM.
Heavy modules are imported inside the verbs, so that `firm --help` answers at once.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from firm.errors import FirmError, Stopped

if TYPE_CHECKING:
    from torch import Tensor

    from firm.metrics import Interval
    from firm.recipes.recipe import Recipe
    from firm.runs import Run
    from firm.training import Progress

app = typer.Typer(
    name="firm",
    help="Visual anomaly detection: learn from good images alone, then find what is not like them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

CHUNK = 128  # images decoded and scored at once

Data = Annotated[str, typer.Argument(help="A folder, or DATASET:CLASS such as cifar10:bird or drawn:plate.")]
Model = Annotated[Path, typer.Argument(help="A detector written by `firm fit`.")]
Preset = Annotated[str, typer.Option(help="Where the settings start: paper, authors, fast or parts.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Change one setting; may be repeated.")
]
Seed = Annotated[int, typer.Option(help="Everything random follows from it.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, ...")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves the choice to torch.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON result on standard output.")]


@app.command()
def fit(
    data: Data,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the detector is written.")],
    preset: Preset = "parts",
    settings: Settings = None,
    seed: Seed = 0,
    device: Device = "cpu",
    threads: Threads = 0,
    holdout: Annotated[float, typer.Option(help="Part of the good images kept for the threshold.")] = 0.1,
    false_calls: Annotated[float, typer.Option(help="Wished rate of good images called anomalous.")] = 0.05,
    checkpoint_seconds: Annotated[float, typer.Option(help="How much work an interruption may cost.")] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Learn from good images and write a detector. Run again after an interruption: it goes on where it was."""
    from firm.data import load
    from firm.data.folder import SIDE
    from firm.detector import Detector
    from firm.runs import claim, discard

    _settle(device, threads)
    recipe = _recipe(preset, settings)
    if out.is_dir() or not out.name:
        raise FirmError(f"{out} is a folder; name the file to write, for example {out / 'parts.firm'}")
    images = load(data, side=max(SIDE, 2 * recipe.size))
    folder = out.with_name(out.name + ".run")
    with claim(folder) as mine, _bar("training") as update:
        if not mine:
            raise FirmError(f"another process is training in {folder}; wait for it or choose another --out")
        detector = Detector.fit(
            images,
            recipe=recipe,
            seed=seed,
            device=device,
            folder=folder,
            holdout=holdout,
            false_calls=false_calls,
            checkpoint_seconds=checkpoint_seconds,
            on_progress=_training_bar(update),
        )
        detector.save(out)
        discard(folder)
    bound = detector.threshold
    if bound.false_calls > false_calls + 1e-9:
        wanted = math.ceil(1 / false_calls) - 1
        _say(f"warning: {bound.images} held-out images cannot promise {100 * false_calls:g} %; that takes {wanted}")
    _result(
        {"model": str(out), **detector.card()},
        f"{out}: learnt {detector.origin['good_images']} good images of {images.name}\n"
        f"threshold {bound.value:.6g}: at most {100 * bound.false_calls:.1f} % false calls expected, "
        f"by {bound.images} held-out good images",
        as_json,
    )


@app.command()
def score(
    model: Model,
    images: Annotated[list[str], typer.Argument(help="Image files, folders, or one DATASET:CLASS.")],
    device: Device = "cpu",
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Score images and call each normal (+1) or anomalous (-1). Higher = more anomalous."""
    from firm.detector import Detector

    _settle(device, threads)
    detector = Detector.load(model, device=device)
    limit, rows, left_out = detector.threshold.value, [], []
    with _bar("scoring") as update:
        for names, pixels, skipped, total in _chunks(images, detector.preprocessing.file_side):
            for name, value in zip(names, detector.score(pixels).tolist(), strict=True):
                rows.append({"image": name, "score": value, "label": -1 if value > limit else 1})
            left_out += skipped
            update(len(rows) + len(left_out), total, "")
    for _, reason in left_out:
        _say(f"left out: {reason}")
    if not rows:
        raise FirmError("none of the images could be read; see the lines above")
    calls = sum(row["label"] == -1 for row in rows)
    lines = [f"{row['score']:.6f}  {'normal   ' if row['label'] == 1 else 'anomalous'}  {row['image']}" for row in rows]
    lines.append(f"{calls} of {len(rows)} images above the threshold {limit:.6g}")
    machine = {"threshold": limit, "images": rows, "left_out": [str(path) for path, _ in left_out]}
    _result(machine, "\n".join(lines), as_json)
    if left_out:
        raise typer.Exit(1)


@app.command()
def evaluate(model: Model, data: Data, device: Device = "cpu", threads: Threads = 0, as_json: AsJson = False) -> None:
    """AUROC of a detector on labelled images, with its 95 % bootstrap interval."""
    from firm.data import DATASETS, load
    from firm.data.folder import read_labelled
    from firm.detector import Detector
    from firm.metrics import auroc_interval

    _settle(device, threads)
    detector = Detector.load(model, device=device)
    if data.partition(":")[0] in DATASETS:
        task = load(data)
        test, anomalous = task.test, task.anomalous
    else:
        test, anomalous, skipped = read_labelled(Path(data), detector.preprocessing.file_side)
        for _, reason in skipped:
            _say(f"left out: {reason}")
        if not (Path(data) / "test").is_dir():
            _say("warning: good/ holds the images one learns from; on them false calls look fewer than they are")
    with _bar("scoring") as update:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            update(done, len(test), "")

        scores = detector.score(test, advance)
    found, above = auroc_interval(scores, anomalous), scores > detector.threshold.value
    caught, false = float(above[anomalous].float().mean()), float(above[~anomalous].float().mean())
    _result(
        {"data": data, "images": len(test), "auroc": asdict(found), "caught": caught, "false_calls": false},
        f"{data}: AUROC {_percent(found)} on {len(test)} images\n"
        f"at the threshold: {100 * caught:.1f} % of the anomalies caught, {100 * false:.1f} % false calls",
        as_json,
    )


@app.command()
def card(model: Model) -> None:
    """Show what a detector says of itself: recipe, preprocessing, threshold, origin."""
    from firm.detector import Detector

    print(json.dumps(Detector.load(model).card(), indent=2))


@app.command()
def fetch(dataset: Annotated[str, typer.Argument(help="cifar10, cifar100-super or fashion-mnist.")]) -> None:
    """Download a data set's official files, checksummed, into FIRM_DATA (else ~/.cache/firm)."""
    from firm.data.download import fetch as fetch_files

    with _bar(dataset) as update:
        files = fetch_files(dataset, progress=lambda done, total: update(done, total, "bytes"))
    print("\n".join(map(str, files)))


@app.command()
def bench(
    table: Annotated[list[str], typer.Argument(help="objectives, exposure, short-budget")],
    scale: Annotated[str, typer.Option(help="smoke, short or paper; only `paper` is the paper's protocol.")] = "smoke",
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0.")] = 2,
    results: Annotated[Path, typer.Option(help="One JSON file per run.")] = Path("docs/results/runs"),
    work: Annotated[Path, typer.Option(help="Checkpoints of unfinished runs.")] = Path("bench-work"),
    out: Annotated[Path | None, typer.Option(help="Write the tables as Markdown here.")] = None,
    only_report: Annotated[bool, typer.Option(help="Train nothing; report what there is.")] = False,
    device: Device = "cpu",
    threads: Threads = 1,
) -> None:
    """Make the runs of a table that are still missing, then write the table. Several processes may share a plan."""
    from firm.bench import run_missing
    from firm.recipes.tables import TABLES, plan
    from firm.report.curves import draw_curves
    from firm.report.tables import report
    from firm.storage import write_atomically

    _settle(device, threads)
    unknown = [name for name in table if name not in TABLES]
    if unknown:
        raise FirmError(f"no table {unknown[0]!r}; the tables are {', '.join(TABLES)}")
    numbers = list(range(seeds))
    plans = [plan(TABLES[name], scale, numbers) for name in table]
    for experiments in [] if only_report else plans:
        for line in run_missing(experiments, results, work, device=device):
            _say(line)
    chosen = {name: TABLES[name] for name in table}
    if out is None:
        print(report(chosen, scale, numbers, results))
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    pictures = {name: f"{out.stem}-{name}.png" for name in chosen}
    for name, picture in pictures.items():
        draw_curves(chosen[name], scale, numbers, results, out.with_name(picture))
    write_atomically(out, report(chosen, scale, numbers, results, pictures).encode())
    _say(f"wrote {out}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where model and picture are written.")] = Path("demo"),
    product: Annotated[str, typer.Option(help="plate, weave or label.")] = "plate",
    settings: Settings = None,
    seed: Seed = 0,
    device: Device = "cpu",
    threads: Threads = 1,  # the same tray on every machine
    as_json: AsJson = False,
) -> None:
    """Fit a detector on drawn parts, inspect a mixed tray, and write a picture of it."""
    from firm.data.drawn import drawn
    from firm.detector import Detector
    from firm.metrics import auroc_interval
    from firm.report.tray import Inspected, draw_tray, mixed

    _settle(device, threads)
    out.mkdir(parents=True, exist_ok=True)
    data, parts = drawn(product, seed=seed)
    recipe = _recipe("parts", settings)
    with _bar(f"learning {product}") as update:
        watch = _training_bar(update)
        detector = Detector.fit(data, recipe=recipe, seed=seed, device=device, holdout=0.2, on_progress=watch)
    model, picture = out / f"{product}.firm", out / f"{product}-tray.png"
    detector.save(model)
    scores = detector.score(data.test)
    tray = [Inspected(part.image, float(value), part.defect) for part, value in zip(parts, scores, strict=True)]
    shown = mixed(tray)
    draw_tray(shown, detector.threshold.value, picture, title=f"{product}: {len(shown)} of {len(tray)} inspected parts")
    found, above = auroc_interval(scores, data.anomalous), scores > detector.threshold.value
    caught, false = int((above & data.anomalous).sum()), int((above & ~data.anomalous).sum())
    bad = int(data.anomalous.sum())
    _result(
        {"picture": str(picture), "auroc": asdict(found), "caught": caught, "bad": bad, "false_calls": false},
        f"{product}: {caught} of {bad} bad parts called, {false} of {len(tray) - bad} good parts called falsely\n"
        f"AUROC {_percent(found)}\nlook at {picture}; the detector is {model}",
        as_json,
    )


def main() -> None:
    """Run the command line; a failure a person can mend is one sentence and exit code 2."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_args, **_kwargs: _say(f"warning: {message}")
        try:
            app()
        except FirmError as error:
            _say(f"firm: {error}")
            sys.exit(2)
        except Stopped as stopped:
            _say(f"firm: {stopped}")
            sys.exit(128 + stopped.signal)
        except OSError as error:
            _say(f"firm: cannot use {error.filename or 'a file'}: {error.strerror or error}")
            sys.exit(2)


def _settle(device: str, threads: int) -> None:
    import torch

    from firm.allocator import keep_freed_memory

    keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)
    try:
        torch.zeros(1, device=device).sum().item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise FirmError(f"the device {device!r} cannot be used here ({reason}); try --device cpu") from error


def _recipe(preset: str, settings: list[str] | None) -> Recipe:
    from firm.recipes.presets import recipe
    from firm.recipes.recipe import parse_settings

    return recipe(preset, **parse_settings(settings or []))


def _chunks(images: list[str], side: int) -> Iterator[tuple[list[str], Tensor, list[tuple[Path, str]], int]]:
    """What is to be scored, in pieces that fit in memory: names, pixels, unreadable files, and how many in all."""
    from firm.data import DATASETS, load
    from firm.data.folder import find_files, read_files

    if len(images) == 1 and images[0].partition(":")[0] in DATASETS:
        task = load(images[0])
        for begin in range(0, len(task.test), CHUNK):
            pixels = task.test[begin : begin + CHUNK]
            yield [f"{task.name} test {begin + i}" for i in range(len(pixels))], pixels, [], len(task.test)
        return
    files = find_files([Path(name) for name in images])
    for begin in range(0, len(files), CHUNK):
        pixels, read, skipped = read_files(files[begin : begin + CHUNK], side)
        yield [str(file) for file in read], pixels, skipped, len(files)


def _training_bar(update: Callable[[int, int, str], None]) -> Callable[[Progress, Run], None]:
    def show(progress: Progress, run: Run) -> None:
        loss = f"loss {run.history.lines[-1]['loss']:.3f}" if run.history.lines else ""
        update(progress.step, progress.steps, loss)

    return show


@contextmanager
def _bar(title: str) -> Iterator[Any]:
    """A progress bar with the time left on standard error; `update(done, total, note)`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=not sys.stderr.isatty()) as progress:
        bar = progress.add_task(title, total=None, note="")
        yield lambda done, total, note: progress.update(bar, completed=done, total=total, note=note)


def _percent(found: Interval) -> str:
    return f"{100 * found.value:.1f} ({100 * found.low:.1f} to {100 * found.high:.1f})"


def _result(machine: dict[str, Any], human: str, as_json: bool) -> None:
    print(json.dumps(machine) if as_json else human)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
