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
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Stop at the first file that cannot be used instead of going on without it."),
]
Bits = Annotated[
    int | None,
    typer.Option("--depth", min=8, max=16, help="Bits of images deeper than 8 (12 in 16, ...). Else found on them."),
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="Where the settings start: inspect, adapted, wavelets, patches, whole, parts, fast, paper or authors. "
        "Unless given: fast for classes of semantic data sets, inspect for all else.",
    ),
]
Pretrained = Annotated[
    str | None,
    typer.Option(
        help="Start from frozen features: efficientnet-lite0, -lite1, -lite2, timm:NAME, a weights file of one of "
        "these or a ResNet (.safetensors or .pth), or wavelets, which need no weights. Minutes instead of hours.",
    ),
]
Ignore = Annotated[
    Path | None,
    typer.Option(
        "--ignore",
        metavar="FILE",
        help="A mask over the images as the camera gives them: what is white in it never decides.",
    ),
]
Gigabytes = Annotated[
    float, typer.Option(help="GB that may be taken; of more good images than fit into it some are drawn.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON result on standard output.")]
Holdout = Annotated[
    float | None,
    typer.Option(
        help="Part of the good images kept for the thresholds. Else a tenth, or more if the promise takes it."
    ),
]
FalseCalls = Annotated[float, typer.Option(help="Wished rate of good parts that do not PASS (REVIEW or FAIL).")]
Fail = Annotated[float, typer.Option(help="Wished rate of good parts that FAIL.")]
