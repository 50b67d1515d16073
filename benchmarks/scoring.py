"""Scoring one image, from its file to verdict and map, over the bare forward pass of the backbone: ratios of one run.

    python benchmarks/scoring.py [--data plate mvtec:screw magnetic_tile kolektor] [--models FOLDER] [--images 24]

Each product is fitted as `firm fit` does (kept in FOLDER, if given), and once more as PatchCore (docs/reference/
features.md). The forward pass is that of the same weights at 256 px in float32, by plain torch and by firm; a floor is
its arithmetic at the speed of a large matrix product. Times are of the CPU, on one core, from the second image on.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from inspect_memory import resident_megabytes
from torch import nn

from firm.data.folder import find_files
from firm.data.registry import DATASETS, training_files
from firm.detector.detector import Detector
from firm.drawn.render import PRODUCTS, write_folder
from firm.errors import DataError
from firm.images.decode import decode
from firm.images.preprocess import resize, to_tensor
from firm.networks.backbone import Backbone
from firm.networks.weights import load_backbone
from firm.recipes.presets import recipe_of, usual
from firm.recipes.recipe import Recipe
from firm.runtime.platform import keep_freed_memory
from firm.scoring.patch_features import mirrored

SIDE = 256  # of the bare forward pass
BATCH = 16
TARGET = 2.0
PATCHCORE = (
    "features=backbone", "training.epochs=0", "pretrained.margin=0", "memory.neighbourhood=-1", "memory.reweight=9",
    "memory.sampling_ratio=0.1", "memory.sampling=coreset", "memory.standardise=false", "tiling.min_foreground=0",
    "conditioning.illumination=none", "conditioning.align=false",
)  # fmt: skip
STAGES = ("decode", "prepare", "backbone", "features", "search", "map")


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of the CPU."""
    begin = time.process_time()
    call()
    return 1000 * (time.process_time() - begin)


def multiplications(backbone: Backbone) -> int:
    """Multiply-adds of one forward pass."""
    total = 0

    def count(module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        nonlocal total
        total += output[0].numel() * module.weight[0].numel()

    handles = [m.register_forward_hook(count) for m in backbone.modules() if isinstance(m, nn.Conv2d)]
    backbone.trunk.stages(torch.zeros(1, 3, SIDE, SIDE))
    for handle in handles:
        handle.remove()
    return total


def limits(backbone: Backbone, rounds: int = 15) -> dict[str, float]:
    """Milliseconds of the bare forward pass, by plain torch and by firm, and of its arithmetic alone."""
    image = torch.randn(1, 3, SIDE, SIDE).contiguous(memory_format=torch.channels_last)
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    plain, ours, product = (
        float(np.median([timed(call) for _ in range(rounds)][1:]))
        # with gradients enabled, of which there are none, no convolution is fused
        for call in (lambda: backbone.trunk.stages(image), lambda: backbone.stages(image), lambda: left @ right)
    )
    return {"torch": plain, "firm": ours, "floor": product * multiplications(backbone) / 1024**3}


@dataclass(frozen=True)
class Row:
    """What one detector costs."""

    times: list[float]  # of each image, from the file to verdict and map
    stages: dict[str, float]
    per_second: dict[int, float]  # by the size of the batch
    resident: float
    megabytes: float

    @property
    def median(self) -> float:
        return float(np.median(self.times))


def staged(detector: Detector, file: Path) -> Iterator[tuple[str, float]]:
    """The same steps as `examine`, one by one."""
    model, kept = detector.model, {}

    def step(name: str, call: Callable[[], object]) -> tuple[str, float]:
        begin = time.process_time()
        kept[name] = call()
        return name, 1000 * (time.process_time() - begin)

    yield step("decode", lambda: decode(file, model.preprocessing.depth))
    read = model.preprocessing.file_side
    yield step("prepare", lambda: model.align(resize(to_tensor(kept["decode"]), read)))
    aligned, extractor = kept["prepare"], model.extractor
    backbone, margin = extractor.network.backbone, extractor.settings.margin
    images = mirrored(backbone.normalise(aligned.images.float() / 255), margin)
    name, bare = step("backbone", lambda: backbone.stages(images))
    yield name, bare
    name, taken = step("features", lambda: extractor(aligned.images))
    yield name, taken - bare
    yield step("search", lambda: model.scorer.cells(kept["features"], aligned.foreground, aligned.hidden()))


@torch.no_grad()
def measured(detector: Detector, folder: Path, files: list[Path]) -> Row:
    times = [timed(lambda file=file: detector.examine(file)) for file in files][1:]
    parts = [dict(staged(detector, file)) for file in files][1:]
    stages = {name: float(np.median([part[name] for part in parts])) for name in STAGES[:-1]}
    stages["map"] = float(np.median(times)) - sum(stages.values())
    pixels = torch.cat([detector.preprocessing.read(file) for file in itertools.islice(itertools.cycle(files), BATCH)])
    one, many = (
        min(timed(lambda size=size: [detector.locate(part) for part in pixels.split(size)]) for _ in range(2))
        for size in (1, BATCH)
    )
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    return Row(times, stages, {1: 1000 * BATCH / one, BATCH: 1000 * BATCH / many}, resident_megabytes(), size)


def shown(name: str, row: Row, bare: dict[str, float]) -> None:
    p50, p95 = row.median, float(np.percentile(row.times, 95))
    print(
        f"{name}: an image / bare forward by torch = {p50 / bare['torch']:.2f} (target: at most {TARGET:g}), "
        f"by firm = {p50 / bare['firm']:.2f}, arithmetic of the backbone = {p50 / bare['floor']:.2f}; "
        f"p50 {p50:.1f} ms, p95 {p95:.1f} ms"
    )
    parts = ", ".join(f"{stage} {value:.1f}" for stage, value in row.stages.items())
    rates = ", ".join(f"{value:.0f} images/s in batches of {size}" for size, value in row.per_second.items())
    print(f"  {parts}; {rates} without decoding; {row.resident:.0f} MB resident, detector {row.megabytes:.1f} MB")


def images_of(data: str, work: Path, count: int) -> tuple[str, list[Path]]:
    """What to fit on, and files to score: of test parts."""
    if data in PRODUCTS:
        write_folder(work / data, data, size=SIDE, train=40, good=count // 2 + 1, bad=count // 2)
        return str(work / data), find_files([work / data / "test"])
    top = training_files(data)[0].parents
    test = next((folder / "test" for folder in top if (folder / "test").is_dir()), None)
    if test is None:
        raise DataError(f"{data} has no folder test; the data sets are {', '.join(DATASETS)}")
    return data, find_files([test])


def fitted(good: str, recipe: Recipe, folder: Path) -> Detector:
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        Detector.fit(good, recipe=recipe).save(folder)
    return Detector.load(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", default=["plate"])
    parser.add_argument("--models", type=Path)
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    recipes = {"firm": usual(), "patchcore": recipe_of("adapted", PATCHCORE)}
    bare = limits(load_backbone(usual().pretrained.name, deepest=4))
    print(
        f"bare forward at {SIDE} px: torch {bare['torch']:.1f} ms, firm {bare['firm']:.1f}, floor {bare['floor']:.1f}"
    )
    with tempfile.TemporaryDirectory() as name:
        for data in options.data:
            good, files = images_of(data, Path(name), options.images)
            files = files[:: max(1, len(files) // options.images)][: options.images]
            for row, recipe in recipes.items():
                folder = (options.models or Path(name)) / f"{data.replace(':', '-')}-{row}.firm"
                shown(f"{data}, {row}", measured(fitted(good, recipe, folder), folder, files), bare)


if __name__ == "__main__":
    main()
