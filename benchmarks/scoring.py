"""Scoring one image, from its file to verdict and map, over the bare forward pass of the backbone: ratios of one run.

    python benchmarks/scoring.py [--data plate mvtec:screw magnetic_tile kolektor] [--models FOLDER] [--good 80]
        [--images 24] [--peer anomalib]

Each product is fitted as `firm fit` does (kept in FOLDER, if given), and once more as PatchCore (docs/reference/
features.md); --peer times anomalib's own PatchCore on the same files, with 5,000 patches in its memory. The forward
pass is that of the same weights at 256 px in float32, by plain torch, and timed before every image; a floor is its
arithmetic at the speed of a large matrix product. Times are of the CPU, on one core, from the second image on, and
`backbone` includes the margin.
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
from firm.decision.verdict import regions_of
from firm.detector.detector import Detector
from firm.drawn.render import PRODUCTS, write_folder
from firm.errors import DataError
from firm.images.crop import part_of
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
PEER_BANK, PEER_LAYERS = 5000, ("blocks.2", "blocks.4")  # patches remembered; those after which firm looks, too


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


@dataclass(frozen=True)
class Bare:
    """The forward pass of a backbone alone, by plain torch, and what it would take at the speed of a matrix product."""

    backbone: Backbone
    floor: float  # ms

    @classmethod
    def of(cls, backbone: Backbone, rounds: int = 15) -> Bare:
        left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
        product = float(np.median([timed(lambda: left @ right) for _ in range(rounds)][1:]))
        return cls(backbone, product * multiplications(backbone) / 1024**3)

    def timed(self) -> float:
        """Milliseconds."""
        image = torch.randn(1, 3, SIDE, SIDE).contiguous(memory_format=torch.channels_last)
        with torch.enable_grad():  # there are no gradients, but so no convolution is fused
            return timed(lambda: self.backbone.trunk.stages(image))


@dataclass(frozen=True)
class Row:
    """What one detector costs."""

    times: list[float]  # of each image, from the file to verdict and map
    bare: list[float]  # of the forward pass before it
    per_second: dict[int, float]  # by the size of the batch
    stages: dict[str, float]
    resident: float
    megabytes: float

    @property
    def median(self) -> float:
        return float(np.median(self.times))


def staged(detector: Detector, file: Path) -> Iterator[tuple[str, float]]:
    """The same steps as `examine`, one by one."""
    model, prep, kept = detector.model, detector.preprocessing, {}
    scorer, extractor, by = model.scorer, model.extractor, detector.decides

    def step(name: str, call: Callable[[], object]) -> tuple[str, float]:
        begin = time.process_time()
        kept[name] = call()
        return name, 1000 * (time.process_time() - begin)

    yield step("decode", lambda: decode(file, prep.depth))
    yield step("resize", lambda: part_of(kept["decode"], prep.crop, prep.file_side, file.name)[0])
    yield step("align", lambda: model.align(kept["resize"]))
    aligned, backbone = kept["align"], extractor.network.backbone
    pixels = aligned.images.float() / 255
    name, bare = step(
        "backbone", lambda: backbone.stages(mirrored(backbone.normalise(pixels), extractor.settings.margin))
    )
    yield name, bare
    name, taken = step("adaptor", lambda: extractor(aligned.images))
    yield name, taken - bare
    features, shown_of = kept["adaptor"], (aligned.foreground, aligned.hidden())
    kept["cells"] = scorer.cells(features, *shown_of)
    for kind in scorer.kinds:
        yield step(f"search {kind}", lambda kind=kind: scorer.of((kind,)).cells(features, *shown_of))
    yield step("map", lambda: scorer.maps(kept["cells"], aligned))
    size = kept["decode"].shape[:2]
    yield step("regions", lambda: regions_of(kept["map"][0], by.pixel, *size))


@torch.no_grad()
def measured(detector: Detector, folder: Path, files: list[Path], bare: Bare) -> Row:
    detector.examine(files[0])
    times, passes, parts = [], [], []
    for file in files[1:]:  # in turn, so that all see the machine alike
        passes.append(bare.timed())
        times.append(timed(lambda file=file: detector.examine(file)))
        parts.append(dict(staged(detector, file)))
    stages = {name: float(np.median([part[name] for part in parts])) for name in parts[0]}
    stages["verdict and rest"] = float(np.median(times)) - sum(stages.values())
    pixels = torch.cat([detector.preprocessing.read(file) for file in itertools.islice(itertools.cycle(files), BATCH)])
    rates = by_batch(lambda size: [detector.locate(part) for part in pixels.split(size)])
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    return Row(times, passes, rates, stages, resident_megabytes(), size)


def by_batch(call: Callable[[int], object]) -> dict[int, float]:
    """Images per second of a call on BATCH images, some at once."""
    return {size: 1000 * BATCH / min(timed(lambda size=size: call(size)) for _ in range(2)) for size in (1, BATCH)}


@torch.no_grad()
def peer(files: list[Path], bare: Bare) -> Row:
    """anomalib's PatchCore on the same network with weights and memory at random: the cost is the same."""
    try:
        from anomalib.models.image.patchcore.torch_model import PatchcoreModel
    except ImportError as error:
        raise DataError(f"--peer anomalib needs anomalib: {error}") from error
    model = PatchcoreModel(layers=list(PEER_LAYERS), backbone="tf_efficientnet_lite0", pre_trained=False).eval()
    model.memory_bank = torch.randn(PEER_BANK, sum(model.feature_extractor.out_dims))

    def read(file: Path) -> torch.Tensor:
        return resize(to_tensor(decode(file)), SIDE).float() / 255

    both = [(timed(lambda file=file: model(read(file))), bare.timed()) for file in files][1:]
    times, passes = (list(each) for each in zip(*both, strict=True))
    pixels = torch.cat([read(file) for file in itertools.islice(itertools.cycle(files), BATCH)])
    rates = by_batch(lambda size: [model(part) for part in pixels.split(size)])
    return Row(times, passes, rates, {}, resident_megabytes(), model.memory_bank.numel() * 4e-6)


def shown(name: str, row: Row, bare: Bare) -> None:
    p50, p95, alone = row.median, float(np.percentile(row.times, 95)), float(np.median(row.bare))
    print(
        f"{name}: an image / bare forward = {p50 / alone:.2f} (target: at most {TARGET:g}), / arithmetic of the "
        f"backbone = {p50 / bare.floor:.2f}; p50 {p50:.1f} ms, p95 {p95:.1f} ms, bare forward {alone:.1f} ms"
    )
    parts = ", ".join(f"{stage} {value:.1f}" for stage, value in row.stages.items())
    rates = ", ".join(f"{value:.0f} images/s in batches of {size}" for size, value in row.per_second.items())
    print(f"  ms: {parts or 'not split'}\n  {rates}, without decoding")
    print(f"  {row.resident:.0f} MB resident, {row.megabytes:.1f} MB stored")


def images_of(data: str, work: Path, good: int, count: int) -> tuple[list[Path], list[Path]]:
    """Files to fit on, and files to score: of test parts."""
    if data in PRODUCTS:
        write_folder(work / data, data, size=SIDE, train=good, good=count // 2 + 1, bad=count // 2)
        return find_files([work / data / "train"]), find_files([work / data / "test"])
    files = training_files(data)
    test = next((folder / "test" for folder in files[0].parents if (folder / "test").is_dir()), None)
    if test is None:
        raise DataError(f"{data} has no folder test; the data sets are {', '.join(DATASETS)}")
    return spread(files, good), find_files([test])


def spread(files: list[Path], count: int) -> list[Path]:
    return files[:: max(1, len(files) // count)][:count]


def fitted(good: list[Path], recipe: Recipe, folder: Path) -> Detector:
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        Detector.fit(good, recipe=recipe).save(folder)
    return Detector.load(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", default=["plate"])
    parser.add_argument("--models", type=Path)
    parser.add_argument("--good", type=int, default=80)
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--peer", choices=["anomalib"])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    recipes = {"firm": usual(), "patchcore": recipe_of("adapted", PATCHCORE)}
    bare = Bare.of(load_backbone(usual().pretrained.name, deepest=4))
    with tempfile.TemporaryDirectory() as name:
        for data in options.data:
            good, files = images_of(data, Path(name), options.good, options.images)
            files = spread(files, options.images)
            for row, recipe in recipes.items():
                folder = (options.models or Path(name)) / f"{data.replace(':', '-')}-{row}.firm"
                shown(f"{data}, {row}", measured(fitted(good, recipe, folder), folder, files, bare), bare)
            if options.peer:
                shown(f"{data}, {options.peer}", peer(files, bare), bare)


if __name__ == "__main__":
    main()
