"""The command line: thin verbs over the package. Results go to standard output, all else to standard error.

Exit codes: 0 done; 1 done, but some files could not be used; 2 a mistake a person can mend; 143 stopped by SIGTERM.
Heavy modules are imported inside the verbs, so that `firm --help` answers at once.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from firm.errors import FirmError, Stopped

if TYPE_CHECKING:
    from torch import Tensor

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

Data = Annotated[str, typer.Argument(help="A folder, or DATASET:CLASS such as cifar10:bird or drawn:plate.")]
Model = Annotated[Path, typer.Argument(help="A detector written by `firm fit`.")]
Preset = Annotated[str, typer.Option(help="Where the settings start: paper, authors, fast or parts.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Change one setting; may be repeated.")
]
Seed = Annotated[int, typer.Option(help="Everything random follows from it.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, ...")]
Threads = Annotated[int, typer.Option(help="CPU threads; 0 leaves the choice to torch.")]
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
    from firm.detector import Detector
    from firm.runs import discard

    _settle(device, threads)
    recipe = _recipe(preset, settings)
    images = load(data)
    with _bar("training") as update:

        def show(progress: Progress, run: Run) -> None:
            loss = f"loss {run.history.lines[-1]['loss']:.3f}" if run.history.lines else ""
            update(progress.step, progress.steps, loss)

        folder = out.with_name(out.name + ".run")
        detector = Detector.fit(
            images,
            recipe=recipe,
            seed=seed,
            device=device,
            folder=folder,
            holdout=holdout,
            false_calls=false_calls,
            checkpoint_seconds=checkpoint_seconds,
            on_progress=show,
        )
    detector.save(out)
    discard(folder)
    if detector.origin["collapsed"]:
        _say("warning: the embeddings collapsed to one point, so this detector tells nothing apart; lower training.lr")
    bound = detector.threshold
    _result(
        {"model": str(out), **detector.card()},
        f"{out}: learnt {detector.origin['good_images']} good images of {images.name}\n"
        f"threshold {bound.value:.6g}: at most {100 * bound.false_calls:.1f} % false calls, "
        f"supported by {bound.images} held-out good images",
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
    names, tensors, skipped = _gather(images)
    scores = [float(value) for part in tensors for value in detector.score(part)]
    limit = detector.threshold.value
    rows = [{"image": n, "score": s, "label": -1 if s > limit else 1} for n, s in zip(names, scores, strict=True)]
    for _, reason in skipped:
        _say(f"left out: {reason}")
    calls = sum(row["label"] == -1 for row in rows)
    lines = [
        f"{row['score']:.6f}  {'anomalous' if row['label'] == -1 else 'normal   '}  {row['image']}" for row in rows
    ]
    lines.append(f"{calls} of {len(rows)} images above the threshold {limit:.6g}")
    left_out = [str(path) for path, _ in skipped]
    _result({"threshold": limit, "images": rows, "left_out": left_out}, "\n".join(lines), as_json)
    if skipped:
        raise typer.Exit(1)


@app.command()
def evaluate(model: Model, data: Data, device: Device = "cpu", threads: Threads = 0, as_json: AsJson = False) -> None:
    """AUROC of a detector on labelled images, with its 95 % bootstrap interval."""
    from firm.data import load
    from firm.detector import Detector
    from firm.metrics import auroc_interval

    _settle(device, threads)
    detector = Detector.load(model, device=device)
    task = load(data)
    if not task.anomalous.any() or task.anomalous.all():
        raise FirmError(f"{task.name} has no test images of both kinds; lay them out as test/good and test/<defect>")
    scores = detector.score(task.test)
    found = auroc_interval(scores, task.anomalous)
    above = scores > detector.threshold.value
    caught = float(above[task.anomalous].float().mean())
    false_calls = float(above[~task.anomalous].float().mean())
    _result(
        {
            "data": task.name,
            "images": len(scores),
            "auroc": {"value": found.value, "low": found.low, "high": found.high},
            "caught": caught,
            "false_calls": false_calls,
        },
        f"{task.name}: AUROC {100 * found.value:.1f} ({100 * found.low:.1f} to {100 * found.high:.1f}) "
        f"on {len(scores)} images\n"
        f"at the threshold: {100 * caught:.1f} % of the anomalies caught, {100 * false_calls:.1f} % false calls",
        as_json,
    )


@app.command()
def card(model: Model) -> None:
    """Show what a detector says of itself: recipe, preprocessing, threshold, origin."""
    from firm.detector import Detector

    print(json.dumps(Detector.load(model).card(), indent=2))


@app.command()
def bench(
    table: Annotated[list[str], typer.Argument(help="objectives, exposure, short-budget")],
    scale: Annotated[str, typer.Option(help="smoke, short or paper; only `paper` is the paper's protocol.")] = "smoke",
    seeds: Annotated[int, typer.Option(help="How many seeds, from 0.")] = 2,
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
    from firm.report.tables import report

    _settle(device, threads)
    for name in table:
        if name not in TABLES:
            raise FirmError(f"no table {name!r}; the tables are {', '.join(TABLES)}")
        if not only_report:
            for line in run_missing(plan(TABLES[name], scale, list(range(seeds))), results, work, device=device):
                _say(line)
    text = report([TABLES[name] for name in table], table, scale, list(range(seeds)), results)
    if out is None:
        print(text)
    else:
        out.write_text(text)
        _say(f"wrote {out}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where model and picture are written.")] = Path("demo"),
    product: Annotated[str, typer.Option(help="plate, weave or label.")] = "plate",
    settings: Settings = None,
    seed: Seed = 0,
    device: Device = "cpu",
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Fit a detector on drawn parts, inspect a mixed tray, and write a picture of it."""
    from firm.data.drawn import drawn
    from firm.detector import Detector
    from firm.metrics import auroc_interval
    from firm.report.tray import Inspected, draw_tray

    _settle(device, threads)
    out.mkdir(parents=True, exist_ok=True)
    data, parts = drawn(product, seed=seed)
    with _bar(f"learning {product}") as update:
        detector = Detector.fit(
            data,
            recipe=_recipe("parts", settings),
            seed=seed,
            device=device,
            holdout=0.2,
            on_progress=lambda progress, _run: update(progress.step, progress.steps, ""),
        )
    detector.save(out / f"{product}.firm")
    scores = detector.score(data.test)
    tray = [Inspected(part.image, float(value), part.defect) for part, value in zip(parts, scores, strict=True)]
    mixed = [one for pair in zip(tray[:12], tray[40:52], strict=True) for one in pair]  # good and bad in turn
    limit, found = detector.threshold.value, auroc_interval(scores, data.anomalous)
    picture = out / f"{product}-tray.png"
    draw_tray(mixed, limit, picture, title=f"{product}: 24 of {len(tray)} inspected parts")
    above = scores > limit
    caught, false = int((above & data.anomalous).sum()), int((above & ~data.anomalous).sum())
    bad = int(data.anomalous.sum())
    _result(
        {"picture": str(picture), "auroc": found.value, "caught": caught, "bad": bad, "false_calls": false},
        f"{product}: {caught} of {bad} bad parts called, {false} of {len(tray) - bad} good parts called falsely\n"
        f"AUROC {100 * found.value:.1f} ({100 * found.low:.1f} to {100 * found.high:.1f})\n"
        f"look at {picture}; the detector is {out / product}.firm",
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
            _say(f"firm: {stopped}; run the same command again to go on")
            sys.exit(143)
        except KeyboardInterrupt:
            _say("firm: interrupted; run the same command again to go on from the last checkpoint")
            sys.exit(130)


def _settle(device: str, threads: int) -> None:
    import torch

    from firm.allocator import keep_freed_memory

    keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise FirmError(f"the device {device!r} cannot be used here ({reason}); try --device cpu") from error


def _recipe(preset: str, settings: list[str] | None) -> Recipe:
    from firm.recipes.presets import recipe
    from firm.recipes.recipe import parse_settings

    return recipe(preset, **parse_settings(settings or []))


def _gather(images: list[str]) -> tuple[list[str], list[Tensor], list[tuple[Path, str]]]:
    """Names and pixels of what is to be scored, and the files that could not be used."""
    from firm.data import DATASETS, load
    from firm.data.folder import read_files

    if len(images) == 1 and images[0].partition(":")[0] in DATASETS:
        task = load(images[0])
        return [f"{task.name} test {i}" for i in range(len(task.test))], [task.test], []
    tensors, files, skipped = read_files([Path(name) for name in images])
    return [str(file) for file in files], [tensors], skipped


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


def _result(machine: dict[str, Any], human: str, as_json: bool) -> None:
    print(json.dumps(machine) if as_json else human)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
