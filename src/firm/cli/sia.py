"""firm sia: train a diffusion model on good images, sample anomalies from it, and draw sheets of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from firm.cli.options import AsJson, Device, Output, Picture, Seed, Threads
from firm.cli.terminal import detail, reporting, say, show, use_device
from firm.errors import MachineError, SettingError, named

if TYPE_CHECKING:
    from jaxtyping import UInt8
    from torch import Tensor

    from firm.diffusion.sample import Sampling

SHOWN = 8  # images in a row of a sheet
SHEET_STRENGTHS = (0.0, 0.1, 0.2, 0.4)
Products = Annotated[
    list[str], Argument(metavar="GOOD...", help="Good images of a product; of several, the model is told which one.")
]
Trained = Annotated[Path, Argument(metavar="MODEL", help="A diffusion model written by `firm sia train`.")]
Steps = Annotated[int, Option(min=1, help="Steps of the sampling.")]
Batch = Annotated[int, Option(min=1, help="Images sampled at once; they have one strength in common.")]
Ddim = Annotated[bool, Option("--ddim", help="Deterministic sampling but for the strength; use 0.01:0.03.")]

sia = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@sia.callback()
def _sia() -> None:
    """Anomalies by a diffusion model of your product, as RealNet makes its SIA images."""


@sia.command()
def train(
    data: Products,
    out: Annotated[Path, Option("--out", "-o", help="Where the model is written.")],
    size: Annotated[str, Option(help="tiny (64 px, for a CPU) or paper (256 px, for a large GPU).")] = "tiny",
    steps: Annotated[int | None, Option(min=1, help="Batches to train on. [default: those of the size]")] = None,
    batch: Annotated[int | None, Option(min=1, help="Images of a batch. [default: those of the size]")] = None,
    weights: Annotated[
        Path | None, Option(metavar="FILE", help="A guided-diffusion checkpoint to start from: 256x256_diffusion.pt.")
    ] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    threads: Threads = 0,
    checkpoint_seconds: Annotated[float, Option(help="How much work an interruption may cost.")] = 30.0,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Train a diffusion model on good images. Run it again after an interruption: it resumes."""
    from firm.detector.generate import described, good_images
    from firm.diffusion.model import diffusers, sized
    from firm.diffusion.train import LEARNING, cost_of, learn_images
    from firm.report.sheets import draw_rows
    from firm.runtime.files import check_writable, folder_lock
    from firm.training.runs import CHECKPOINT

    use_device(device, threads)
    check_writable(out.parent)
    if out.is_dir():
        raise SettingError(f"{named(out)} is a folder; name a file such as part.sia")
    diffusers()
    run, settings = out.with_name(out.name + ".run"), sized(size, tuple(product_name(each) for each in data))
    usual = LEARNING[size]
    learning = replace(usual, steps=steps or usual.steps, batch=batch or usual.batch)
    say(described(cost_of(settings, learning, device=device), learning, learning.steps, 0, settings))

    def draw(step: int, samples: UInt8[Tensor, "n 3 s s"]) -> None:
        draw_rows({"s = 0": samples}, file := run / f"samples-{step:07d}.png", f"after {step:,} steps")
        detail(f"see {named(file)}")

    with reporting() as listener, folder_lock(run) as mine:
        if not mine:
            raise MachineError(f"another process is training in {named(run)}; wait for it or choose another --out")
        model = learn_images(
            *good_images(data, settings.side),
            settings,
            learning,
            seed=seed,
            weights=weights,
            folder=run,
            device=device,
            checkpoint_seconds=checkpoint_seconds,
            listener=listener,
            on_samples=draw,
        )
    model.save(out)
    (run / CHECKPOINT).unlink(missing_ok=True)  # the history and the sheets stay
    values = {"model": str(out), "id": model.id, "classes": list(settings.classes), "steps": learning.steps}
    text = f"{named(out)}: a diffusion model of {', '.join(settings.classes)}; sample sheets are in {named(run)}"
    show(values, text, as_json)


@sia.command()
def sample(
    model: Trained,
    out: Annotated[Path, Option("--out", "-o", help="The folder to fill: OUT/CLASS/00000.jpg and so on.")],
    count: Annotated[int, Option("--count", "-n", min=1, help="Images of each class.")] = 512,
    strength: Annotated[str, Option(help="Of the perturbation: a number or a range; 0 gives normal images.")] = ".1:.2",
    classes: Annotated[
        list[str] | None, Option("--class", metavar="CLASS", help="Only this class; may be repeated.")
    ] = None,
    steps: Steps = 20,
    batch: Batch = 8,
    ddim: Ddim = False,
    seed: Seed = 0,
    device: Device = "cpu",
    threads: Threads = 0,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Sample images in RealNet's layout. Run it again after an interruption: images that are there are kept."""
    from firm.diffusion.model import DiffusionModel
    from firm.diffusion.sample import write_samples
    from firm.runtime.files import check_writable

    use_device(device, threads)
    sampling = _sampling(strength, steps, batch, ddim)
    check_writable(out)
    trained = DiffusionModel.load(model, device)
    wanted = tuple(classes or ())
    with reporting() as listener:
        counted = listener.count("sampling", count * len(wanted or trained.settings.classes))
        places = write_samples(trained, out, count, sampling, seed=seed, classes=wanted, on_images=counted)
    folders = ", ".join(named(place) for place in places)
    values = {"folders": [str(place) for place in places], "images": count, "model": trained.id}
    show(values, f"{count:,} images each in {folders}", as_json)


@sia.command()
def sheet(
    model: Trained,
    data: Annotated[str, Argument(metavar="GOOD", help="Good images of one of the model's products.")],
    out: Picture,
    steps: Steps = 20,
    batch: Batch = SHOWN,
    ddim: Ddim = False,
    seed: Seed = 0,
    device: Device = "cpu",
    threads: Threads = 0,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Draw good images, samples of rising strength, and good images with samples of usual strength blended in."""
    from firm.cli.preview import check_picture
    from firm.detector.generate import sheet_of
    from firm.diffusion.model import DiffusionModel
    from firm.report.sheets import draw_rows

    use_device(device, threads)
    check_picture(out)
    trained = DiffusionModel.load(model, device)
    known, name = trained.settings.classes, product_name(data)
    label = known.index(name) if name in known else 0
    sampling = _sampling("0", steps, batch, ddim)
    levels = tuple(level / 10 if ddim else level for level in SHEET_STRENGTHS)
    with reporting() as listener:
        rows = sheet_of(trained, data, levels, sampling, seed=seed, label=label, shown=SHOWN, listener=listener)
    draw_rows(rows, out, f"{name}: model {trained.id}")
    show({"picture": str(out), "rows": list(rows)}, f"see {named(out)}", as_json)


def product_name(data: str) -> str:
    """The class of a product: that of its set, or the folder above train/good."""
    parts = [part for part in re.split(r"[/\\:]+", data) if part not in ("", ".", "train", "good")]
    return re.sub(r"[^\w.-]+", "-", parts[-1]).strip(".-") or "part" if parts else "part"


def _sampling(strength: str, steps: int, batch: int, ddim: bool) -> Sampling:
    from firm.diffusion.sample import Sampling

    low, _, high = strength.partition(":")
    try:
        span = float(low), float(high or low)
    except ValueError as error:
        raise SettingError(f"--strength {strength!r} is no number or range; write .1:.2") from error
    return Sampling(strength=span, steps=steps, batch=batch, method="ddim" if ddim else "ddpm")
