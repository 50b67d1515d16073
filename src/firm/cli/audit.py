"""firm audit: which images of a folder of good ones do not look like the others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from firm.cli import options as opt
from firm.cli.terminal import reporting, show, use_device
from firm.errors import named

SUSPECTS, TYPICAL = 16, 8  # images drawn at most


def audit(
    data: opt.Data,
    out: Annotated[Path, Option("--out", "-o", help="The picture to write (PNG).")] = Path("audit.png"),
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
    threads: opt.Threads = 0,
    depth: opt.Bits = None,
    strict: opt.Strict = False,
    ignore: opt.Ignore = None,
    group_by: opt.GroupBy = None,
    memory: opt.Gigabytes = 6.0,
    as_json: opt.AsJson = False,
    output: opt.Output = None,
) -> None:
    """Find good images that do not look like the others, and draw them beside the most typical ones."""
    from firm.cli.preview import check_picture
    from firm.detector.audit import MIN_PARTS, audit_images
    from firm.detector.read import Options, read_good
    from firm.recipes.presets import usual
    from firm.report.sheets import Part, draw_parts
    from firm.runtime.files import check_writable
    from firm.types import Depth

    check_picture(out)
    check_writable(out.parent)
    use_device(device, threads)
    options = Options(
        seed=seed,
        device=device,
        depth=None if depth is None else Depth(2**depth - 1),
        strict=strict,
        ignored=ignore,
        memory=memory,
        group_by=group_by,
    )
    with reporting() as listener:
        good = read_good(data, usual(), options, listener)
        assert good.backbone is not None  # the usual recipe has one
        images, parts = good.data.train, good.parts
        found = audit_images(good.recipe, good.data, parts, good.backbone, seed=seed, listener=listener)
    pictures = images.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
    shown = {"suspect": found.ordered(suspect=True)[:SUSPECTS], "typical": found.ordered(suspect=False)[::-1][:TYPICAL]}
    sheet = [
        Part(pictures[number], float(found.scores[number]), kind, None, found.names[number])
        for kind, numbers in shown.items()
        for number in numbers
    ]
    suspects = found.suspects()
    text = f"{len(suspects)} of {len(images)} images do not look like the others"
    if len(parts.unique()) < MIN_PARTS:
        text = (
            f"{len(images)} images of {len(parts.unique())} parts are too few to compare; {MIN_PARTS} parts are needed"
        )
    draw_parts(sheet, found.limit, out, title=f"{good.data.name}: {text}")
    lines = [f"{each['score']:8.2f}  {named(each['file'])}" for each in suspects]
    lines.append(f"{named(good.data.name)}: {text}" + f" (score above {found.limit:.2f})" * bool(found.scores.any()))
    values = {"images": len(images), "limit": found.limit, "suspects": suspects, "picture": str(out)}
    show(values, "\n".join([*lines, f"see {named(out)}"]), as_json, good.left_out)
