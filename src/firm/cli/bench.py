"""Verbs of research: fetch downloads a data set; bench lists, plans, runs and reports the tables and figures."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Context, Option

from firm.cli.options import Device, Output, Settings, Threads
from firm.cli.terminal import reporting, say, use_device
from firm.errors import SettingError

if TYPE_CHECKING:
    from firm.research.blocks import Block, Drawing
    from firm.research.experiment import Experiment
    from firm.research.tables import Table

RUNS = Path("results/runs")
FORMATS = "md, tex, csv or html"
EVERY_FIGURE = "figures"  # the name of them all
Names = Annotated[
    list[str] | None, Argument(metavar="TABLE", help="Tables or figures, as `firm bench list` names them.")
]
Scale = Annotated[str, Option(help="smoke, short or paper: how long each training is.")]
Seeds = Annotated[int | None, Option(min=1, help="How many seeds, from 0. [default: 5 at paper scale, else 2]")]
Classes = Annotated[list[str] | None, Option("--class", metavar="CLASS", help="Only this class; may be repeated.")]
Rows = Annotated[list[str] | None, Option("--row", metavar="ROW", help="Only this row; may be repeated.")]
Results = Annotated[Path, Option(help="One JSON file per run.")]
Work = Annotated[Path, Option(help="Checkpoints of unfinished runs.")]
Out = Annotated[
    Path | None, Option("--out", "-o", help=f"Write the page here ({FORMATS}), or all four into this folder.")
]

bench = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


def fetch(
    dataset: Annotated[str, Argument(help="cifar10, cifar100-super or fashion-mnist.")], output: Output = None
) -> None:
    """Download a data set.

    Its official files, checksummed, go into FIRM_DATA (else ~/.cache/firm).
    """
    from firm.data.download import fetch as fetch_files

    with reporting() as listener:
        files = fetch_files(dataset, progress=partial(listener.progress, dataset, note="bytes"))
    print("\n".join(map(str, files)))


@bench.callback()
def _bench(context: Context) -> None:
    """The paper's tables and figures, and ours: list, plan, run, report."""
    if context.invoked_subcommand is None:
        list_tables()


@bench.command("list")
def list_tables(scale: Scale = "short", seeds: Seeds = None, results: Results = RUNS) -> None:
    """List every table and figure, and how many of its runs are there, missing, or without data."""
    from firm.research.experiment import record_path
    from firm.research.figures import FIGURES
    from firm.research.runner import missing
    from firm.research.tables import TABLES, plan

    asked, counts = _asked(list(TABLES), scale, seeds, results), dict[str, list[int]]()
    plans = {name: plan(table, scale, asked.seeds) for name, table in asked.tables.items()}
    print(f"{'at scale ' + scale:<24} {'done':>5} {'missing':>8} {'no data':>8}")
    for name, runs in plans.items():
        to_make = [run for run in runs if not record_path(results, run).exists()]
        without = sum(bool(missing(run)) for run in to_make)
        counts[name] = [len(runs) - len(to_make), len(to_make) - without, without]
        print(_counted(name, counts[name], TABLES[name].title))
    for name, figure in FIGURES.items():
        of_runs = [sum(column) for column in zip(*(counts[table] for table in figure.tables), strict=True)]
        print(_counted(name, of_runs or ["-"] * 3, f"figure: {figure.title}"))
    print(f"`firm bench report NAME --scale {scale}` shows one, `firm bench run NAME --scale {scale}` makes its runs.")


def _counted(name: str, counts: list[int] | list[str], title: str) -> str:
    return f"{name:<24} {counts[0]:>5} {counts[1]:>8} {counts[2]:>8}   {title}"


@bench.command()
def plan(
    names: Names = None,
    scale: Scale = "smoke",
    seeds: Seeds = None,
    classes: Classes = None,
    rows: Rows = None,
    settings: Settings = None,
    results: Results = RUNS,
    threads: Threads = 1,
) -> None:
    """Tell what is to be trained, what tables share, and the hours on this machine from a few timed steps."""
    from firm.research.budget import hours
    from firm.research.experiment import record_path
    from firm.research.runner import missing
    from firm.research.tables import plan as plan_of

    use_device("cpu", threads)
    every: dict[str, Experiment] = {}
    asked = _asked(names, scale, seeds, results, classes, rows, settings)
    for name, table in asked.trained.items():
        runs = {run.key: run for run in plan_of(table, scale, asked.seeds)}
        print(f"{name}: {len(runs)} runs, {len(runs.keys() & every.keys())} of them shared with the tables above")
        every |= runs
    to_make = [run for run in every.values() if not record_path(results, run).exists()]
    absent = [lacks.partition(":")[0] for run in to_make if (lacks := missing(run))]
    cost, unknown = hours(run for run in to_make if not missing(run))
    print(f"all: {len(every)} runs, {len(every) - len(to_make)} done, {len(to_make) - len(absent)} to make", end="")
    print(f", {len(absent)} without data ({', '.join(dict.fromkeys(absent))})" if absent else "")
    print(f"about {cost:.1f} CPU hours on this machine", end="")
    print(f", and {unknown} runs on frozen patches or sets of unknown size" if unknown else "")
    if absent:
        cost, _ = hours(to_make)
        print(f"about {cost:.1f} CPU hours with all data")


@bench.command()
def run(
    names: Names = None,
    scale: Scale = "smoke",
    seeds: Seeds = None,
    classes: Classes = None,
    rows: Rows = None,
    settings: Settings = None,
    results: Results = RUNS,
    work: Work = Path("bench-work"),
    out: Out = None,
    outdated: Annotated[bool, Option("--outdated", help="Repeat runs of other code or other images.")] = False,
    device: Device = "cpu",
    threads: Threads = 1,
    output: Output = None,
) -> None:
    """Make the missing runs of tables, draw figures, and write the page.

    Runs are resumed after an interruption, and several processes may share them. A run without data is skipped. Figures
    are drawn beside the page, by default in the folder figures; the runs that they show are made, too.
    """
    from firm.research.runner import run_missing
    from firm.research.tables import plan as plan_of

    use_device(device, threads)
    asked = _asked(names, scale, seeds, results, classes, rows, settings)
    runs = {one.key: one for table in asked.trained.values() for one in plan_of(table, scale, asked.seeds)}
    with reporting() as listener:
        for line in run_missing([*runs.values()], results, work, device=device, listener=listener, outdated=outdated):
            say(line)
    out = out or (Path("figures") if asked.figures else None)
    report(names, scale, seeds, classes, rows, settings, results, out, threads)


@bench.command()
def confirm(
    names: Names = None,
    scale: Scale = "smoke",
    seeds: Seeds = None,
    classes: Classes = None,
    rows: Rows = None,
    settings: Settings = None,
    results: Results = RUNS,
    work: Work = Path("bench-work"),
    device: Device = "cpu",
    threads: Threads = 1,
    output: Output = None,
) -> None:
    """Repeat one run of each recipe that other code made; where it is equal to the bit, pages no longer mark it."""
    from firm.research.runner import confirm_outdated
    from firm.research.tables import plan as plan_of

    use_device(device, threads)
    asked = _asked(names, scale, seeds, results, classes, rows, settings)
    runs = {one.key: one for table in asked.tables.values() for one in plan_of(table, scale, asked.seeds)}
    with reporting() as listener:
        for line in confirm_outdated([*runs.values()], results, work, device=device, listener=listener):
            say(line)


@bench.command()
def report(
    names: Names = None,
    scale: Scale = "smoke",
    seeds: Seeds = None,
    classes: Classes = None,
    rows: Rows = None,
    settings: Settings = None,
    results: Results = RUNS,
    out: Out = None,
    threads: Threads = 1,
) -> None:
    """Write the page of tables and figures from the runs there are: published numbers, ours, differences."""
    from firm.research.blocks import FORMATS, markdown
    from firm.runtime.files import write_atomically

    use_device("cpu", threads)
    asked = _asked(names, scale, seeds, results, classes, rows, settings)
    options: list[tuple[str, object]] = [("--scale", scale), ("--seeds", len(asked.seeds))]
    options += [("--class", name) for name in classes or ()] + [("--row", name) for name in rows or ()]
    options += [("--set", setting) for setting in settings or ()]
    options += [("--results", results.as_posix())] if results != RUNS else []
    words = [*(names or ()), *(str(word) for option in options for word in option)]
    command = f"firm bench report {shlex.join(words)}"
    if out is None:
        print(markdown(_page(asked, command, None)), end="")
        return
    if out.suffix and out.suffix not in FORMATS:
        raise SettingError(f"{out} is none of {', '.join(FORMATS)}; name one of them, or a folder for all")
    first = out if out.suffix else out / "report.md"
    first.parent.mkdir(parents=True, exist_ok=True)
    blocks = _page(asked, f"{command} --out {out.as_posix()}", first)
    for suffix in [out.suffix] if out.suffix else FORMATS:
        write_atomically(first.with_suffix(suffix), FORMATS[suffix](blocks).encode())
        say(f"wrote {first.with_suffix(suffix)}")


def _page(asked: _Asked, command: str, beside: Path | None) -> list[Block]:
    """The blocks of the page; pictures are drawn beside a file."""
    from firm.research.blocks import Drawing, parsed
    from firm.research.few_page import draw_few
    from firm.research.figures import FIGURES, draw_curves
    from firm.research.pages import SCALES, page
    from firm.research.tables import with_runs

    pictures: dict[str, list[Drawing]] = {}
    for name, table in asked.tables.items():
        draw = draw_few if table.protocol == "few" else draw_curves
        if beside is not None and (table.protocol in ("semantic", "few") or name.endswith("curve")):
            file = beside.with_name(f"{beside.stem}-{name}.png")
            if trained := with_runs(table, asked.scale, asked.seeds, asked.results):
                draw(trained, asked.scale, asked.seeds, asked.results, file)
                pictures[name] = [Drawing(table.title, file)]
    blocks: list[Block] = []
    if asked.tables:
        blocks = page(asked.tables, asked.scale, asked.seeds, asked.results, command=command, pictures=pictures)
    elif asked.figures:
        blocks = ["# Figures", f"Written by `{command}`. {SCALES.get(asked.scale, '')}"]
    for figure in (FIGURES[name] for name in asked.figures):
        blocks += [f"## {figure.title}", figure.why]
        if beside is None:
            blocks.append("Name a page with `--out` to have it drawn.")
            continue
        with reporting() as listener:
            files = figure.draw(
                beside.parent, scale=asked.scale, seeds=asked.seeds, folder=asked.results, listener=listener
            )
        blocks.append("" if files else f"Needs {figure.needs}.")
        for file in files:  # a figure may come with a table
            if file.suffix == ".md":
                blocks += parsed(file.read_text(encoding="utf-8"))
                file.unlink()
            else:
                blocks.append(Drawing(figure.title, file))
    return blocks


@dataclass(frozen=True)
class _Asked:
    """The tables and figures of a command, at a scale, with seeds."""

    tables: dict[str, Table]
    figures: list[str]
    scale: str
    seeds: list[int]
    results: Path

    @property
    def trained(self) -> dict[str, Table]:
        """The tables whose runs are asked for: those named, and those that a named figure shows."""
        from firm.research.figures import FIGURES
        from firm.research.tables import TABLES

        shown = [table for figure in self.figures for table in FIGURES[figure].tables]
        return {name: TABLES[name] for name in shown} | self.tables


def _asked(
    names: list[str] | None,
    scale: str,
    seeds: int | None,
    results: Path,
    classes: list[str] | None = None,
    rows: list[str] | None = None,
    settings: list[str] | None = None,
) -> _Asked:
    from firm.recipes.recipe import parse_settings
    from firm.research.figures import FIGURES
    from firm.research.tables import TABLES, chosen, narrowed

    known = [*TABLES, *FIGURES, EVERY_FIGURE]
    if not names:
        raise SettingError("name a table or figure; `firm bench list` shows them")
    if results.exists() and not results.is_dir():
        raise SettingError(f"{results} is no folder; --results names the folder of the runs")
    if unknown := [name for name in names if name not in known]:
        raise SettingError(f"no table or figure {unknown[0]!r}; use one of {', '.join(known)}")
    changes = parse_settings(settings or ())
    tables = {name: narrowed(TABLES[name], classes or (), changes, rows or ()) for name in names if name in TABLES}
    figures = list(FIGURES) if EVERY_FIGURE in names else [name for name in names if name in FIGURES]
    if not tables and (classes or rows or settings):
        raise SettingError(f"the figure {figures[0]} is drawn from whole tables; leave out --class, --row and --set")
    for row in rows or ():
        if not any(row in table.rows for table in tables.values()):
            listed = ", ".join(dict.fromkeys(repr(name) for table in tables.values() for name in table.rows))
            raise SettingError(f"{', '.join(tables)} has no row {row!r}; use one of {listed}")
    for wanted in classes or ():
        if not any(chosen(narrowed(table, [wanted], {})) for table in tables.values()):
            listed = ", ".join(dict.fromkeys(data for table in tables.values() for data in table.data))
            raise SettingError(f"{', '.join(tables)} has no class {wanted}; use one of {listed}")
    numbers = list(range(seeds or (5 if scale == "paper" else 2)))
    return _Asked(tables, figures, scale, numbers, results)
