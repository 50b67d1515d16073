"""The arguments and options that several verbs share, each described once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Data = Annotated[
    str, typer.Argument(help="A folder, or DATASET:CLASS such as mvtec:screw, cifar10:bird or drawn:plate.")
]
Model = Annotated[Path, typer.Argument(help="A detector written by `firm fit`.")]
Picture = Annotated[Path, typer.Option("--out", "-o", help="Where the picture (PNG) is written.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Change one setting; may be repeated.")
]
Seed = Annotated[int, typer.Option(help="Everything random follows from it.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, ...")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves the choice to torch.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON result on standard output.")]
