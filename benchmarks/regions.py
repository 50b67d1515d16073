"""How well regions fit the marked defects: the rule of firm and the plain threshold it replaces, on the same maps.

    python benchmarks/regions.py [--data drawn:plate magnetic_tile ...] [--good 80] [--test 80] [--seeds 0] [--work DIR]
                                 [--out PAGE.md]

A detector is fitted once for each product and seed, with the settings of `firm fit`, and kept in --work.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from firm.data.registry import load
from firm.decision.regions import start
from firm.decision.verdict import marked
from firm.detector.detector import Detector
from firm.drawn.render import draw_dataset
from firm.images.foreground import foreground
from firm.runtime.platform import keep_freed_memory
from firm.types import OneClass

SIDE = 256
CUTS = np.linspace(0.05, 0.95, 19)  # of the map's peak, among which the best is chosen by the mask

PAGE = """# Regions and marked defects

Written by `python benchmarks/regions.py {command}`.

Mean over images of the IoU, in %, of all regions of an image with its mask, on defective images with a mask that do not
PASS at the calibrated threshold (`counted` of all). Detectors are those of `firm fit`, on at most {good} good images;
at most {test} defective ones are tested. All columns are of the same detector and the same maps:

- `threshold`: all heat above the threshold of regions, as firm marked them before.
- `regions`: what firm marks: hysteresis around peaks, without the halo, and the hottest place of an image that has no
  heat above the threshold. The two constants were settled on drawn plates and weaves of another seed (101), so the rows
  of drawn products flatter them. The idea of the hottest place came from looking at test images of kolektor, where many
  images that do not PASS have no heat above the threshold, so kolektor is not a blind test of it.
- `best cut`: the share of the map's peak that fits the mask best, chosen for each image by its mask. No rule that cuts
  a map at one height for all of an image does better.
- `foreground`: all of the object (of the image where no object is found). `centre`: a box of half the height and width.

{table}
"""
HEAD = "| product | seed | counted | threshold | regions | ratio | best cut | foreground | centre |"


def thinned(images: torch.Tensor, most: int) -> torch.Tensor:
    """The numbers of at most so many images, evenly spaced."""
    return torch.linspace(0, len(images) - 1, min(most, len(images))).round().long()


def product(name: str, good: int, test: int, seed: int) -> OneClass:
    """Good images to learn from, and defective ones whose masks are known."""
    if name.startswith("drawn:"):
        return draw_dataset(name.removeprefix("drawn:"), seed=seed, size=SIDE, train=good, good=0, bad=test)
    data = load(name, side=SIDE)
    assert data.truth is not None
    chosen = (data.truth.known & data.anomalous & data.truth.masks.flatten(1).any(1)).nonzero().flatten()
    chosen = chosen[thinned(chosen, test)]
    truth = replace(
        data.truth,
        kinds=tuple(data.truth.kinds[number] for number in chosen.tolist()),
        masks=data.truth.masks[chosen],
        known=data.truth.known[chosen],
        files=(),
    )
    train = data.train[thinned(data.train, good)]
    return replace(data, train=train, test=data.test[chosen], anomalous=data.anomalous[chosen], truth=truth, files=())


def fitted(data: OneClass, seed: int, folder: Path) -> Detector:
    """The detector of a product, fitted unless it is there."""
    if not folder.is_dir():
        Detector.fit(data, seed=seed).save(folder)
    return Detector.load(folder)


def iou(found: np.ndarray, mask: np.ndarray) -> float:
    return float((found & mask).sum() / (found | mask).sum())


def row(name: str, data: OneClass, detector: Detector, seed: int) -> tuple[str, float, float]:
    """A line of the table, and its mean IoU before and after."""
    by, located, truth = detector.decides, detector.locate(data.test), data.truth
    assert by.pixel is not None and truth is not None  # noqa: PT018
    called = located.scores > by.review
    maps, masks = located.maps[called].numpy(), truth.masks[called].numpy()
    objects = foreground(data.test[called], detector.recipe.conditioning.foreground).numpy()
    centre = np.zeros(masks.shape[1:], bool)
    height, width = centre.shape
    centre[height // 4 : height - height // 4, width // 4 : width - width // 4] = True

    def mean(rule: Callable[[int], float]) -> float:
        return 100 * float(np.mean([rule(number) for number in range(len(maps))]))

    old = mean(lambda i: iou(maps[i] > by.pixel, masks[i]))
    new = mean(lambda i: iou(marked(maps[i], start(maps[i], by.pixel)), masks[i]))
    best = mean(lambda i: max(iou(maps[i] > cut * maps[i].max(), masks[i]) for cut in CUTS))
    floors = mean(lambda i: iou(objects[i], masks[i])), mean(lambda i: iou(centre, masks[i]))
    cells = (name, seed, f"{len(maps)} of {len(called)}", f"{old:.1f}", f"{new:.1f}", f"{new / old:.2f}")
    return "| " + " | ".join(map(str, (*cells, f"{best:.1f}", *(f"{each:.1f}" for each in floors)))) + " |", old, new


def rows(options: argparse.Namespace, work: Path) -> Iterator[tuple[str, float, float]]:
    for seed in options.seeds:
        for name in options.data:
            data = product(name, options.good, options.test, seed)
            folder = work / f"{name.replace(':', '-')}-{options.good}-{seed}.firm"
            yield row(name, data, fitted(data, seed, folder), seed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", nargs="+", default=["drawn:plate"])
    parser.add_argument("--good", type=int, default=40)
    parser.add_argument("--test", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    table, before, after = [HEAD, "|" + " --- |" * (HEAD.count("|") - 1)], list[float](), list[float]()
    with tempfile.TemporaryDirectory() as scratch:
        for line, old, new in rows(options, options.work or Path(scratch)):
            table.append(line)
            before.append(old)
            after.append(new)
            print(line, flush=True)
            if options.out:  # what is measured is kept if the rest is not waited for
                facts = {"good": options.good, "test": options.test, "command": " ".join(sys.argv[1:])}
                options.out.write_text(PAGE.format(table="\n".join(table), **facts), encoding="utf-8")
    print(f"mean IoU, in %: threshold = {np.mean(before):.1f}, regions = {np.mean(after):.1f}")


if __name__ == "__main__":
    main()
