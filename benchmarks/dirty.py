"""What defective images in the training folder cost, without and with the audit of `firm fit`.

    python benchmarks/dirty.py [--data drawn:plate mvtec:screw ...] [--good 160] [--seeds 1] [--out docs/results/dirty.md]

Defective test images are put among the good ones. They leave the test set for every fit of a row, so that the fits
differ only in what they learn from.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from firm.data.duplicates import group_by_part
from firm.data.registry import load
from firm.detector.audit import Audit, audit_images
from firm.detector.detector import Detector
from firm.detector.fit import Options, fit, read_good
from firm.drawn.render import draw_dataset
from firm.metrics.image import auroc
from firm.recipes.presets import usual
from firm.recipes.recipe import Recipe
from firm.runtime.platform import keep_freed_memory
from firm.runtime.random import stream
from firm.types import OneClass

SHARES = (0.01, 0.05)
TEST = 120  # good and defective test images, at most so many of each

PAGE = """# Defective images among the good ones

Written by `python benchmarks/dirty.py {command}`.

{good} good images of each product, and a share of them more that show real (or drawn) defects; {seeds}. Fits are those
of `firm fit` ({encoder}), in full. `clean` is learnt from the good images alone, `dirty` from all
(`--keep-suspects`), `audited` from all that the audit does not suspect. The images put in leave the test set for all
three. `found` of the images put in are suspected, `wrongly` counts good images suspected beside them, `clean suspected`
is the share of the folder without them that is. Where the audit suspects nothing, `audited` is `dirty` by definition.

{table}

The test sets are small (at most {test} good and {test} defective images), so differences of a point are within the
noise of a fit. The constants of the audit were settled on drawn parts, so the rows of drawn products flatter it.
"""
HEAD = "| product | seed | put in | AUROC clean | dirty | audited | audited - clean | found | wrongly | clean suspected |"


def some(images: torch.Tensor, most: int, seed: int, what: str) -> torch.Tensor:
    return images[torch.randperm(len(images), generator=stream(seed, "dirty", what))[:most]]


def product(name: str, good: int, seed: int) -> tuple[OneClass, torch.Tensor, torch.Tensor]:
    """Good images to learn from; good and defective ones to test on, in random order."""
    if name.startswith("drawn:"):
        data = draw_dataset(name.removeprefix("drawn:"), seed=seed, size=256, train=good, good=TEST // 2, bad=TEST // 2)
    else:
        data = load(name, side=256)
        data = replace(data, train=some(data.train, good, seed, "good"), files=())
    test = (some(data.test[data.anomalous == bad], TEST, seed, f"test {bad}") for bad in (False, True))
    return replace(data, size=256, truth=None), *test


def auroc_of(recipe: Recipe, data: OneClass, good: torch.Tensor, bad: torch.Tensor, seed: int) -> float:
    options = Options(seed=seed, keep_suspects=True)  # whoever is to be left out is left out already
    detector = Detector.of(fit(read_good(data, recipe, options)))
    return 100 * auroc(detector.score(torch.cat([good, bad])), torch.arange(len(good) + len(bad)) >= len(good))


def audited(recipe: Recipe, data: OneClass, seed: int) -> Audit:
    backbone = read_good(data, recipe).backbone
    assert backbone is not None
    return audit_images(recipe, data, group_by_part(data.name, data.train), backbone, seed=seed)


def rows(recipe: Recipe, name: str, images: int, seed: int, shares: tuple[float, ...]):
    data, good, bad = product(name, images, seed)
    clean_suspects = float(audited(recipe, data, seed).suspect.float().mean())
    most = max(1, round(max(shares) * len(data.train)))
    test = bad[most:]
    clean = auroc_of(recipe, data, good, test, seed)
    for share in shares:
        count = max(1, round(share * len(data.train)))
        mixed = replace(data, train=torch.cat([data.train, bad[:count]]))
        suspect = audited(recipe, mixed, seed).suspect
        dirty = auroc_of(recipe, mixed, good, test, seed)
        left = replace(mixed, train=mixed.train[~suspect])
        trimmed = auroc_of(recipe, left, good, test, seed) if bool(suspect.any()) else dirty
        found, wrongly = int(suspect[-count:].sum()), int(suspect[:-count].sum())
        yield (
            f"| {name} | {seed} | {count} ({share:.0%}) | {clean:.1f} | {dirty:.1f} | {trimmed:.1f} | "
            f"{trimmed - clean:+.1f} | {found} of {count} | {wrongly} | {clean_suspects:.1%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", nargs="+", default=["drawn:plate"])
    parser.add_argument("--good", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    recipe = usual()
    lines = [HEAD, "|" + " --- |" * (HEAD.count("|") - 1)]
    for seed in range(options.seeds):
        for name in options.data:
            for row in rows(recipe, name, options.good, seed, SHARES):
                lines.append(row)
                print(row, flush=True)
                if options.out:  # what is measured is kept if the rest is not waited for
                    seeds = "1 seed" if options.seeds == 1 else f"{options.seeds} seeds"
                    facts = {"good": options.good, "seeds": seeds, "encoder": recipe.pretrained.name, "test": TEST}
                    page = PAGE.format(command=" ".join(sys.argv[1:]), table="\n".join(lines), **facts)
                    options.out.write_text(page, encoding="utf-8")
    print(f"rows = {len(lines) - 2}")


if __name__ == "__main__":
    main()
