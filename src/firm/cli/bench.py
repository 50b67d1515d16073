"""Verbs of research: fetch downloads a data set, bench makes the missing runs of a table and prints its page."""

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from firm.cli.options import Device, Output, Threads
from firm.cli.terminal import reporting, say, use_device
from firm.errors import SettingError


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


def bench(
    table: Annotated[list[str] | None, Argument(help="Tables, one page for all; none lists them.")] = None,
    scale: Annotated[str, Option(help="smoke, short or paper: how long each training is.")] = "smoke",
    seeds: Annotated[int, Option(min=1, help="How many seeds, from 0.")] = 2,
    results: Annotated[Path, Option(help="One JSON file per run.")] = Path("results/runs"),
    work: Annotated[Path, Option(help="Checkpoints of unfinished runs.")] = Path("bench-work"),
    out: Annotated[Path | None, Option(help="Write the page and its pictures here; else print it.")] = None,
    only_report: Annotated[bool, Option("--only-report", help="Train nothing; report what there is.")] = False,
    outdated: Annotated[bool, Option("--outdated", help="Repeat runs that other code has made.")] = False,
    device: Device = "cpu",
    threads: Threads = 1,
    output: Output = None,
) -> None:
    """Make the missing runs of a table and write its page.

    Runs are resumed after an interruption, and several processes may share them. A run without data is skipped.
    """
    from firm.research.experiment import record_path
    from firm.research.figures import draw_curves
    from firm.research.pages import page
    from firm.research.runner import run_missing
    from firm.research.tables import TABLES, plan
    from firm.runtime.files import write_atomically

    numbers = list(range(seeds))
    if not table:
        for name, listed in TABLES.items():
            made = [record_path(results, run).exists() for run in plan(listed, scale, numbers)]
            print(f"{name:<20} {sum(made):>4} of {len(made):>3} runs at scale {scale}   {listed.title}")
        return
    unknown = [name for name in table if name not in TABLES]
    if unknown:
        raise SettingError(f"no table {unknown[0]!r}; use one of {', '.join(TABLES)}")
    use_device(device, threads)
    if not only_report:
        runs = [run for name in table for run in plan(TABLES[name], scale, numbers)]
        with reporting() as listener:
            for line in run_missing(runs, results, work, device=device, listener=listener, outdated=outdated):
                say(line)
    command = f"firm bench {' '.join(table)} --scale {scale} --seeds {seeds} --only-report"
    if out is None:
        print(page(table, scale, numbers, results, command=command, pictures={}))
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    drawn = [name for name in table if TABLES[name].protocol == "semantic" or name.endswith("curve")]
    pictures = {name: f"{out.stem}-{name}.png" for name in drawn}
    for name, picture in pictures.items():
        draw_curves(TABLES[name], scale, numbers, results, out.with_name(picture))
    text = page(table, scale, numbers, results, command=f"{command} --out {out.as_posix()}", pictures=pictures)
    write_atomically(out, text.encode())
    say(f"wrote {out}")
