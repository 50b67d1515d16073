"""Verbs for the paper's experiments: fetch, bench."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from firm.cli.options import Device, Threads
from firm.cli.terminal import bar, say, settle
from firm.errors import FirmError


def fetch(dataset: Annotated[str, typer.Argument(help="cifar10, cifar100-super or fashion-mnist.")]) -> None:
    """Download a data set.

    Its official files, checksummed, go into FIRM_DATA (else ~/.cache/firm).
    """
    from firm.data.download import fetch as fetch_files

    with bar(dataset) as update:
        files = fetch_files(dataset, progress=lambda done, total: update(done, total, "bytes"))
    print("\n".join(map(str, files)))


def bench(
    table: Annotated[
        list[str],
        typer.Argument(
            help="objectives, exposure, short-budget; patches, patches-ablation, looks, patch-curve, pretrained, "
            "pretrained-ablation, wavelets, mvtec, mvtec-ablation; promises"
        ),
    ],
    scale: Annotated[str, typer.Option(help="smoke, short or paper; only `paper` is the paper's protocol.")] = "smoke",
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0.")] = 2,
    results: Annotated[Path, typer.Option(help="One JSON file per run.")] = Path("docs/results/runs"),
    work: Annotated[Path, typer.Option(help="Checkpoints of unfinished runs.")] = Path("bench-work"),
    out: Annotated[Path | None, typer.Option(help="Write the tables as Markdown here.")] = None,
    only_report: Annotated[bool, typer.Option(help="Train nothing; report what there is.")] = False,
    device: Device = "cpu",
    threads: Threads = 1,
) -> None:
    """Make the missing runs of a table and write it. Several processes may share a plan.

    Tables of classes and of patches are written to pages of their own: name tables of one sort.
    """
    from firm.recipes.industrial import PATCH_TABLES, SCALES
    from firm.recipes.tables import TABLES
    from firm.storage import write_atomically

    settle(device, threads)
    if scale not in SCALES:
        raise FirmError(f"no scale {scale!r}; use one of {', '.join(SCALES)}")
    numbers = list(range(seeds))
    page: _Page
    if set(table) <= set(TABLES):
        page = _Semantic(table, scale, numbers, results)
    elif set(table) == {"promises"}:
        page = _Promises(table, scale, numbers, results)
    elif set(table) <= set(PATCH_TABLES) - {"promises"}:
        page = _Patches(table, scale, numbers, results)
    else:
        raise FirmError(f"no such tables; write some of {', '.join(TABLES)}, or some of {', '.join(PATCH_TABLES)}")
    for line in [] if only_report else page.made(work, device):
        say(line)
    if out is None:
        print(page.text(None))
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    pictures = page.drawn(out)
    write_atomically(out, page.text(pictures).encode())
    say(f"wrote {out}")


@dataclass(frozen=True)
class _Page(ABC):
    """Tables of one sort; only some have pictures."""

    names: list[str]
    scale: str
    seeds: list[int]
    results: Path

    @abstractmethod
    def made(self, work: Path, device: str) -> Iterator[str]:
        """The missing runs, made."""

    def drawn(self, out: Path) -> dict[str, str]:
        """The pictures beside the page, drawn, by table."""
        return {}

    @abstractmethod
    def text(self, pictures: dict[str, str] | None) -> str:
        """The page."""


class _Semantic(_Page):
    """Tables of classes."""

    def made(self, work: Path, device: str) -> Iterator[str]:
        from firm.bench import run_missing
        from firm.recipes.tables import TABLES, plan

        for name in self.names:
            yield from run_missing(plan(TABLES[name], self.scale, self.seeds), self.results, work, device=device)

    def drawn(self, out: Path) -> dict[str, str]:
        from firm.recipes.tables import TABLES
        from firm.report.curves import draw_curves

        pictures = {name: f"{out.stem}-{name}.png" for name in self.names}
        for name, picture in pictures.items():
            draw_curves(TABLES[name], self.scale, self.seeds, self.results, out.with_name(picture))
        return pictures

    def text(self, pictures: dict[str, str] | None) -> str:
        from firm.recipes.tables import TABLES
        from firm.report.tables import report

        return report({name: TABLES[name] for name in self.names}, self.scale, self.seeds, self.results, pictures)


class _Patches(_Page):
    """Tables of patches; only curves over time have a picture."""

    def made(self, work: Path, device: str) -> Iterator[str]:
        from firm.bench import run_missing
        from firm.bench_patches import conduct_patches, patch_line
        from firm.recipes.industrial import PATCH_TABLES, patch_plan

        for name in self.names:
            plan = patch_plan(PATCH_TABLES[name], self.scale, self.seeds)
            told = partial(conduct_patches, tell=say)
            yield from run_missing(plan, self.results, work, device=device, by=told, line=patch_line)

    def drawn(self, out: Path) -> dict[str, str]:
        from firm.recipes.industrial import PATCH_TABLES
        from firm.report.industrial import draw_patch_curves

        pictures = {name: f"{out.stem}-{name}.png" for name in self.names if name.endswith("curve")}
        for name, picture in pictures.items():
            draw_patch_curves(PATCH_TABLES[name], self.scale, self.seeds, self.results, out.with_name(picture))
        return pictures

    def text(self, pictures: dict[str, str] | None) -> str:
        from firm.recipes.industrial import PATCH_TABLES
        from firm.report.industrial import patch_report

        tables = {name: PATCH_TABLES[name] for name in self.names}
        return patch_report(tables, self.scale, self.seeds, self.results, pictures)


class _Promises(_Page):
    """What thresholds promise and what came true."""

    def made(self, work: Path, device: str) -> Iterator[str]:
        from firm.bench import run_missing
        from firm.bench_promises import conduct_promise, promise_line
        from firm.recipes.industrial import PROMISES, patch_plan

        plan, told = patch_plan(PROMISES, self.scale, self.seeds), partial(conduct_promise, tell=say)
        yield from run_missing(plan, self.results, work, device=device, by=told, line=promise_line)

    def text(self, pictures: dict[str, str] | None) -> str:
        from firm.report.promises import promise_report

        return promise_report(self.scale, self.seeds, self.results)
