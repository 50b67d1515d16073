"""What defective images in the training folder cost, without and with the audit of `firm fit`.

    python benchmarks/dirty.py [--data drawn:plate mvtec:screw ...] [--good 160] [--seeds 1] [--draws 5] [--out PAGE.md]

Defective test images are put among the good ones. They leave the test set for every detector, all have the settings
tuned on the clean folder, and an image is embedded once, so that detectors differ only in what they learn from.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from firm.data.duplicates import group_by_part
from firm.data.registry import load
from firm.detector.audit import audit_images
from firm.detector.fit import train
from firm.detector.prepare import Prepared, frozen_backbone, prepare
from firm.detector.read import Options
from firm.detector.remember import fit_model
from firm.detector.tune import choose, choose_features
from firm.drawn.render import draw_dataset
from firm.metrics.image import auroc
from firm.recipes.presets import usual
from firm.recipes.recipe import Recipe
from firm.runtime.platform import keep_freed_memory
from firm.runtime.random import stream
from firm.types import OneClass

SHARES = (0.01, 0.05)
TEST = 80  # good and defective test images, at most so many of each

PAGE = """# Defective images among the good ones

Written by `python benchmarks/dirty.py {command}`.

{good} good images of each product, and a share of them more that show real (or drawn) defects; {seeds}. Detectors are
those of `firm fit` ({encoder}), trained in full, with one difference: the settings that a fit tunes are chosen on the
clean folder and used for every detector of a product, and an image has the same synthetic defects in all of them. So
detectors differ by what they learn from and not by other settings. Numbers are image AUROC:

- `clean`: learnt from the good images alone.
- `more good`: from as many further good images in the place of the defective ones. Its difference from `clean` is
  noise.
- `dirty`: from all (`--keep-suspects`). `audited`: from all that the audit does not suspect; without suspects this is
  `dirty`.

The images put in leave the test set for every fit. `found` of the images put in are suspected, `wrongly` counts the
good images suspected beside them, `if clean` the images suspected in the folder without them.

{table}

Mean over the seeds, with the sample deviation of the difference:

{means}

Precision and recall of the audit alone, over {draws} random folders of {good} good images for each share. Suspected of
a clean folder is the share of good images that the audit wrongly leaves out:

{audits}

The test sets are small (at most {test} good and {test} defective images). The constants of the audit were settled on
drawn parts, so the rows of drawn products flatter it.
"""
HEAD = (
    "| product | seed | put in | clean | more good | dirty | audited | audited - clean | found | wrongly | if clean |"
)
MEANS = "| product | put in | clean | more good | dirty | audited | more good - clean | audited - clean |"
AUDITED = "| product | put in | found (recall) | wrongly suspected | precision |"


def some(images: torch.Tensor, most: int, seed: int, what: str) -> torch.Tensor:
    return images[torch.randperm(len(images), generator=stream(seed, "dirty", what))[:most]]


def product(name: str, good: int, seed: int) -> tuple[OneClass, torch.Tensor, torch.Tensor]:
    """Good images to learn from; good and defective ones to test on, in random order."""
    if name.startswith("drawn:"):
        data = draw_dataset(name.removeprefix("drawn:"), seed=seed, size=256, train=good, good=TEST, bad=TEST)
    else:
        data = load(name, side=256)
        data = replace(data, train=some(data.train, good, seed, "good"), files=())
    test = (some(data.test[data.anomalous == bad], TEST, seed, f"test {bad}") for bad in (False, True))
    return replace(data, size=256, truth=None), *test


def prepared_by_good(recipe: Recipe, data: OneClass, good: int, seed: int) -> tuple[Prepared, Recipe]:
    """All images prepared once, and the settings of every fit: those that the first `good` images alone lead to."""
    backbone = frozen_backbone(recipe, "cpu")
    clean, parts = replace(data, train=data.train[:good]), group_by_part(data.name, data.train)
    tuned = choose(recipe, clean, parts[:good], seed=seed, backbone=backbone).recipe
    prepared = prepare(tuned, data, parts, seed=seed, backbone=backbone)
    first = prepared.subset(torch.arange(good))
    return prepared, choose_features(first, first.trained(train(first, Options(seed=seed))), seed=seed)


def means(lines: list[str]) -> list[str]:
    """Rows of one product and share, averaged over the seeds."""
    groups = dict[tuple[str, str], list[list[float]]]()
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        groups.setdefault((cells[0], cells[2]), []).append([float(cell) for cell in cells[3:7]])
    averaged = []
    for (name, put_in), found in groups.items():
        values = torch.tensor(found, dtype=torch.float64)
        differences = [values[:, column] - values[:, 0] for column in (1, 3)]
        spread = [f" ± {each.std():.1f}" if len(each) > 1 else "" for each in differences]
        shown = [
            *(f"{value:.1f}" for value in values.mean(0)),
            *(f"{each.mean():+.1f}{text}" for each, text in zip(differences, spread, strict=True)),
        ]
        averaged.append(f"| {name} | {put_in} | {' | '.join(shown)} |")
    return averaged


def rows(recipe: Recipe, name: str, images: int, seed: int) -> Iterator[str]:
    put_in = {share: max(1, round(share * images)) for share in SHARES}
    most = max(put_in.values())
    data, good, bad = product(name, images + most, seed)
    data = replace(data, train=torch.cat([data.train, bad[:most]]))
    test = torch.cat([good, bad[most:]])
    anomalous = torch.arange(len(test)) >= len(good)
    prepared, settings = prepared_by_good(recipe, data, images, seed)
    backbone = frozen_backbone(recipe, "cpu")
    assert backbone is not None

    def auroc_of(learn: torch.Tensor) -> float:
        part = prepared.subset(learn)
        model = fit_model(settings, part, part.trained(train(part, Options(seed=seed))), seed=seed)
        return 100 * auroc(model.score(test), anomalous)

    def suspects(learn: torch.Tensor) -> torch.Tensor:
        some = replace(data, train=data.train[learn])
        return audit_images(recipe, some, prepared.parts[learn], backbone, seed=seed).suspect

    known = torch.arange(images)
    clean, wrong = auroc_of(known), int(suspects(known).sum())
    for share, count in put_in.items():
        control = auroc_of(torch.cat([known, images + torch.arange(count)]))
        mixed = torch.cat([known, images + most + torch.arange(count)])
        dirty = audited = auroc_of(mixed)
        suspect = suspects(mixed)
        if suspect.any():
            audited = auroc_of(mixed[~suspect])
        found = int(suspect[images:].sum())
        yield (
            f"| {name} | {seed} | {count} ({share:.0%}) | {clean:.1f} | {control:.1f} | {dirty:.1f} | {audited:.1f} | "
            f"{audited - clean:+.1f} | {found} of {count} | {int(suspect.sum()) - found} | {wrong} |"
        )


def audits(recipe: Recipe, name: str, images: int, draws: int) -> Iterator[str]:
    """What the audit finds in folders with and without defective images; nothing is fitted."""
    backbone = frozen_backbone(recipe, "cpu")
    assert backbone is not None
    drawn = [product(name, images, 1000 + draw) for draw in range(draws)]
    for share in (0.0, *SHARES):
        count = max(1, round(share * images)) if share else 0
        found, wrong = 0, 0
        for draw, (data, _, bad) in enumerate(drawn):
            data = replace(data, train=torch.cat([data.train[:images], bad[:count]]))
            parts = group_by_part(data.name, data.train)
            suspect = audit_images(recipe, data, parts, backbone, seed=draw).suspect
            wrong += int(suspect[:images].sum())
            found += int(suspect[images:].sum())
        recall = f"{found} of {draws * count} ({found / (draws * count):.0%})" if count else "-"
        precision = f"{found / (found + wrong):.0%}" if count and found + wrong else "-"
        rate = f"{wrong} of {draws * images} ({wrong / (draws * images):.1%})"
        yield f"| {name} | {count} of {images + count} | {recall} | {rate} | {precision} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", nargs="+", default=["drawn:plate"])
    parser.add_argument("--good", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    recipe = usual()
    tables = {"audits": [AUDITED, "|" + " --- |" * (AUDITED.count("|") - 1)]}
    tables["table"] = [HEAD, "|" + " --- |" * (HEAD.count("|") - 1)]
    seeds = "1 seed" if options.seeds == 1 else f"{options.seeds} seeds"
    facts = {"good": options.good, "seeds": seeds, "encoder": recipe.pretrained.name, "test": TEST}
    facts |= {"command": " ".join(sys.argv[1:]), "draws": options.draws}
    jobs = [("table", rows(recipe, name, options.good, seed)) for seed in range(options.seeds) for name in options.data]
    jobs += [("audits", audits(recipe, name, options.good, options.draws)) for name in options.data]
    for table, lines in jobs:
        for line in lines:
            tables[table].append(line)
            print(line, flush=True)
            if options.out:  # what is measured is kept if the rest is not waited for
                tables["means"] = [MEANS, "|" + " --- |" * (MEANS.count("|") - 1), *means(tables["table"][2:])]
                content = {name: "\n".join(lines) for name, lines in tables.items()}
                options.out.write_text(PAGE.format(**facts, **content), encoding="utf-8")
    print(f"rows = {len(tables['table']) - 2}")


if __name__ == "__main__":
    main()
