"""What the working size and the crop are worth, on surfaces of one aspect and on small parts in large frames.

    python benchmarks/resolution.py [--data kolektor ...] [--canvas drawn:plate mvtec:screw] [--seeds 3] [--out PAGE.md]

Every fit is that of `firm fit` without calibration, on the files. What is measured is kept in --work, where a run that
was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from firm.data.duplicates import group_by_part, thumbnails
from firm.data.folder import read_test
from firm.data.registry import folder_named, load
from firm.detector.evaluation import trivial
from firm.detector.fit import train
from firm.detector.prepare import prepare
from firm.detector.read import Options, read_good
from firm.detector.remember import remember
from firm.detector.tune import choose, choose_features
from firm.drawn.render import draw_dataset
from firm.metrics.image import _weighted_auroc, auroc, percentile_interval, resampled
from firm.metrics.pixel import localisation
from firm.recipes.presets import usual
from firm.recipes.recipe import change
from firm.runtime.platform import keep_freed_memory

WIDTH, HEIGHT = 1600, 900  # of a canvas
SQUARES, CHOSEN, UNADAPTED = "squares of 256 px", "chosen size", "chosen size, unadapted"
ALONE, WHOLE, CROPPED = "the part alone", "in a frame", "in a frame, --crop auto"
BARE = {"features": "backbone", "training.epochs": 0}
WAYS: dict[str, dict[str, Any]] = {SQUARES: {"size": 256}, CHOSEN: {}, UNADAPTED: BARE}
FRAMES: dict[str, str | None] = {ALONE: None, WHOLE: None, CROPPED: "auto"}
PAGE = """# Working size and crop

Written by `python benchmarks/resolution.py {command}`.

Detectors are those of `firm fit` ({encoder}) without calibration; the size is chosen by `firm fit` itself, on synthetic
defects on good images. AUROC of images and pixels and AUPRO, the latter two at the working size. Differences of image
AUROC are of the same test images, with a 95 % interval of a paired bootstrap over them. Floors: the AUROC of
brightness, and of the nearest good thumbnail.

{tables}
"""


def measured(name: str, way: str, settings: dict[str, Any], crop: str | None, seed: int) -> dict[str, Any]:
    """Fit on a folder and score its test images."""
    began = time.process_time()
    options = Options(seed=seed, crop=crop, choose_size="size" not in settings)
    good = read_good(name, change(usual(), settings), options)
    parts = group_by_part(good.data.name, good.data.train)
    tuned = choose(good.recipe, good.data, parts, seed=seed, backbone=good.backbone)
    prepared = prepare(tuned.recipe, good.data, parts, seed=seed, backbone=good.backbone, masks=tuned.masks)
    network = prepared.trained(train(prepared, Options(seed=seed)))
    chosen = choose_features(prepared, network, seed=seed)
    model = remember(chosen, prepared, network, {}, seed=seed).model
    fitted, how = time.process_time(), model.preprocessing
    folder = folder_named(name)
    if folder is not None:
        test = read_test(folder, how.file_side, crop=how.crop)
        images, anomalous, truth = test.images, test.anomalous, test.truth
    else:
        task = load(name, side=how.file_side)
        images, anomalous, truth = task.test, task.anomalous, task.truth
    located = model.locate(images)
    result = {
        "way": way, "seed": seed, "frame": how.frame, "scores": located.scores.tolist(),
        "anomalous": anomalous.tolist(), "fit": fitted - began, "inspect": (time.process_time() - fitted) / len(images),
        "trivial": asdict(trivial(images, anomalous, thumbnails(good.data.train))),
    }  # fmt: skip
    if truth is not None and bool(truth.masks.any()):
        found = localisation(located.maps[truth.known], truth.masks[truth.known], resamples=2)
        result |= {"pixel": found.pixel_auroc.value, "aupro": found.aupro.value}
    return result


def kept(work: Path, name: str, way: str, settings: dict[str, Any], crop: str | None, seed: int) -> dict[str, Any]:
    """The run, or what is kept of it."""
    file = work / f"{name.replace('/', '_').replace(':', '-')} {way} {seed}.json"
    if not file.exists():
        file.write_text(json.dumps(measured(name, way, settings, crop, seed)), encoding="utf-8")
    return dict(json.loads(file.read_text(encoding="utf-8")))


def paired(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> str:
    """The difference of image AUROC, mean over the seeds, and its interval."""
    labels = np.array(first[0]["anomalous"])
    weights = resampled(labels, 2000, np.random.default_rng(0))
    pairs = list(zip(first, second, strict=False))
    drawn = np.zeros(len(weights))
    for a, b in pairs:
        drawn += _weighted_auroc(np.array(a["scores"]), labels, weights)
        drawn -= _weighted_auroc(np.array(b["scores"]), labels, weights)
    value = sum(auroc(a["scores"], labels) - auroc(b["scores"], labels) for a, b in pairs) / len(pairs)
    interval = percentile_interval(value, drawn / len(pairs), 0.95)
    return f"{100 * interval.value:+.1f} ({100 * interval.low:+.1f} to {100 * interval.high:+.1f})"


def canvas(name: str, work: Path, count: int) -> tuple[str, str]:
    """Folders of the parts of a product, alone and pasted at random places of frames of their background."""
    if name.startswith("drawn:"):
        data = draw_dataset(name.removeprefix("drawn:"), size=256, train=count, good=count // 2, bad=count // 2)
    else:
        data = load(name, side=256)
    folders = work / f"{name.replace(':', '-')}-alone", work / f"{name.replace(':', '-')}-frame"
    if not folders[1].exists():
        rng = np.random.default_rng(0)
        for kind, images in (
            ("train/good", data.train[:count]),
            ("test/good", data.test[~data.anomalous]),
            ("test/bad", data.test[data.anomalous]),
        ):
            for folder in folders:
                (folder / kind).mkdir(parents=True)
            for number, image in enumerate(images):
                part = image.expand(3, -1, -1).permute(1, 2, 0).numpy()
                border = np.concatenate([part[0], part[-1], part[:, 0], part[:, -1]])
                frame = np.clip(np.median(border, 0) + rng.normal(0, 2, (HEIGHT, WIDTH, 1)), 0, 255).astype(np.uint8)
                top, left = rng.integers(0, HEIGHT - 256), rng.integers(0, WIDTH - 256)
                frame[top : top + 256, left : left + 256] = part
                for folder, picture in zip(folders, (part, frame), strict=True):
                    Image.fromarray(picture).save(folder / kind / f"{number:03}.png")
    return str(folders[0]), str(folders[1])


def row(name: str, way: str, runs: list[dict[str, Any]], against: str) -> str:
    def mean(values: list[float]) -> str:
        spread = f" ± {100 * np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
        return f"{100 * np.mean(values):.1f}{spread}"

    pixels = [mean([run[of] for run in runs]) if of in runs[0] else "-" for of in ("pixel", "aupro")]
    frames = ", ".join(sorted({f"{run['frame'][1]} x {run['frame'][0]}" for run in runs}))
    seconds = f"{np.mean([run['fit'] for run in runs]):.0f} | {1000 * np.mean([run['inspect'] for run in runs]):.0f}"
    image = mean([auroc(run["scores"], run["anomalous"]) for run in runs])
    return f"| {name} | {way} | {frames} | {len(runs)} | {image} | {' | '.join(pixels)} | {against} | {seconds} |"


HEAD = "| data | way | px | seeds | image | pixel | AUPRO | {against} | CPU s of fit | CPU ms per image |"


def tables(options: argparse.Namespace) -> Iterator[list[str]]:
    """The rows so far, after every run."""
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    canvases = {name: canvas(name, options.work, options.parts) for name in options.canvas}
    for seed in range(options.seeds):
        for name in options.data:
            for way, settings in WAYS.items():
                results.setdefault((name, way), []).append(kept(options.work, name, way, settings, None, seed))
                yield page(results)
        for name, (alone, frame) in canvases.items():
            for way, crop in FRAMES.items():
                settings = BARE if options.untrained else {}
                run = kept(options.work, alone if way == ALONE else frame, way, settings, crop, seed)
                results.setdefault((name, way), []).append(run)
                yield page(results)


def page(results: dict[tuple[str, str], list[dict[str, Any]]]) -> list[str]:
    lines = list[str]()
    for ways, reference, title in ((WAYS, CHOSEN, "chosen - this"), (FRAMES, ALONE, "alone - this")):
        of = [(key, runs) for key, runs in results.items() if key[1] in ways]
        if not of:
            continue
        head = HEAD.format(against=title)
        lines += [head, "|" + " --- |" * (head.count("|") - 1)]
        for (name, way), runs in of:
            other = results.get((name, reference))
            lines.append(row(name, way, runs, "" if way == reference or not other else paired(other, runs)))
        for name in dict.fromkeys(key[0] for key, _ in of):
            run = next(runs[0] for key, runs in of if key[0] == name)
            floors = {what: 100 * value for what, value in run["trivial"].items()}
            lines += [
                "",
                f"Floors of {name}: " + ", ".join(f"{what} {value:.1f}" for what, value in floors.items()) + ".",
            ]
        lines.append("")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", nargs="*", default=[])
    parser.add_argument("--canvas", nargs="*", default=[])
    parser.add_argument("--parts", type=int, default=80)
    parser.add_argument("--untrained", action="store_true", help="frames with unadapted features, which is quicker")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("resolution-work"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    options.work.mkdir(parents=True, exist_ok=True)
    facts = {"command": " ".join(sys.argv[1:]), "encoder": usual().pretrained.name}
    lines = list[str]()
    for lines in tables(options):
        print("\n".join(lines), flush=True)
        if options.out:
            options.out.write_text(PAGE.format(tables="\n".join(lines), **facts), encoding="utf-8")
    print(f"rows = {sum(line.startswith('| ') for line in lines)}")


if __name__ == "__main__":
    main()
