"""Decide with an exported detector: NumPy, Pillow and the engine (onnxruntime or openvino), nothing of firm.

    python firm_runtime.py FOLDER IMAGE...          # one line of JSON per image

    from firm_runtime import Runtime
    print(Runtime("FOLDER").inspect("017.png"))     # verdict, score, thresholds, regions, ids

`firm export` writes this file beside the graph. What the graph cannot hold stands here: decoding, the exact resize of
firm, the foreground and the alignment, each equal to firm's own.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from firm.decision.regions import candidates, start
from firm.deploy.image_steps import (
    Array,
    ExportError,
    alignment,
    components,
    decode,
    even_illumination,
    foreground,
    inverse,
    linear,
    nearest,
    resize,
    warped_back,
)

Graph = Callable[[dict[str, Array]], dict[str, Array]]
Box = tuple[int, int, int, int]

CARD, CALIBRATION, SCHEMA, CALIBRATION_SCHEMA = "export.json", "calibration.json", 1, 2
BATCH = 4  # images in one run of the graph
ENGINES = {"onnx": "onnxruntime", "openvino": "openvino"}


@dataclass(frozen=True)
class Region:
    """A connected region around a peak of heat above the pixel threshold, in pixels of the original image."""

    box: Box  # top, left, bottom, right; half-open
    area: int
    peak: float


@dataclass(frozen=True)
class Verdict:
    """A decision with its score, thresholds, and the ids of model and calibration."""

    image: str
    score: float
    verdict: str  # PASS, REVIEW or FAIL
    regions: tuple[Region, ...]  # hottest first
    model: str
    calibration: str
    review: float
    fail: float


class Runtime:
    """An exported detector. Higher scores are more anomalous; a score does not depend on the other images."""

    def __init__(self, folder: Path | str, *, threads: int = 0, calibration: Path | str | None = None) -> None:
        self.folder = Path(folder)
        self.card = _card(self.folder)
        self.limits = _calibration(Path(calibration or self.folder / CALIBRATION), self.card["model"])
        self.graph = _graph(self.folder, self.card, threads)

    def inspect(self, source: Any, *, name: str = "") -> Verdict:
        """PASS, REVIEW or FAIL for a file, its bytes, an array (h, w) or (h, w, c), or a Pillow image."""
        name = name or (str(source) if isinstance(source, Path | str) else "image")
        return self.examine(source, name=name)[0]

    def examine(self, source: Any, *, name: str = "image") -> tuple[Verdict, Array | None]:
        """The verdict and the anomaly map, if there are maps."""
        picture = self.decode(source)
        scores, maps = self.run(self.resized(picture)[None])
        score, by = float(scores[0]), self.limits
        kind = "PASS" if score <= by["review"] else "REVIEW" if score <= by["fail"] else "FAIL"
        regions: tuple[Region, ...] = ()
        if maps is not None and by["pixel"] is not None:
            least = by["pixel"] + self.card["slack"]["map"]  # less is above the threshold by rounding alone
            least = least if kind == "PASS" else start(maps[0], least)
            found = regions_of(maps[0], min(least, by["pixel"]), *picture.shape[:2])
            regions = tuple(region for region in found if region.peak > least)
        return Verdict(name, score, kind, regions, by["model"], by["id"], by["review"], by["fail"]), (
            None if maps is None else maps[0]
        )

    def score(self, sources: Sequence[Any]) -> Array:
        """The anomaly score of each image, a few at a time."""
        parts = [np.empty(0, np.float32)]
        for begin in range(0, len(sources), BATCH):
            pixels = [self.resized(self.decode(source)) for source in sources[begin : begin + BATCH]]
            parts.append(self.run(np.stack(pixels))[0])
        return np.concatenate(parts)

    def decode(self, source: Any) -> Array:
        """Upright 8-bit RGB (h, w, 3), transparency over white."""
        return decode(source, self.card["depth"]["whole"], self.card["depth"]["real"])

    def resized(self, picture: Array) -> Array:
        """A decoded picture as (3, s, s), at the side at which firm reads files."""
        return resize(np.ascontiguousarray(picture.transpose(2, 0, 1)), self.card["file_side"])

    def run(self, pixels: Array) -> tuple[Array, Array | None]:
        """Scores, and maps in the frame of the images, of uint8 (n, 3, s, s)."""
        ready = [self.prepared(each) for each in pixels]
        feeds = {"images": np.stack([image for image, _, _ in ready])}
        if "foreground" in self.card["inputs"]:
            feeds["foreground"] = np.stack([mask for _, mask, _ in ready]).astype(np.uint8)
        found = self.graph(feeds)
        scores = found["score"].astype(np.float32)
        if not np.isfinite(scores).all():
            raise ExportError("a score is not finite, so nothing can be decided; export the detector again")
        if "map" not in found:
            return self._settled(scores), None
        frames = [frame for _, _, frame in ready]
        maps = found["map"].astype(np.float32)
        back = [heat if frame is None else warped_back(heat, frame) for heat, frame in zip(maps, frames, strict=True)]
        return self._settled(scores), np.stack(back)

    def prepared(self, pixels: Array) -> tuple[Array, Array, Array | None]:
        """Image, foreground and frame of one image as the graph takes them: firm's conditioning."""
        card, image = self.card, resize(pixels, self.card["size"])
        mask = foreground(image, card["foreground"])
        if card["fill"]:
            flat, to = image.reshape(len(image), -1).copy(), card["fill"]["to"]
            flat[:, to] = flat[:, card["fill"]["from"]]
            image, hidden = flat.reshape(image.shape), np.zeros(mask.size, bool)
            hidden[to] = True
            remaining = mask & ~hidden.reshape(mask.shape)
            mask = remaining if remaining.any() else ~hidden.reshape(mask.shape)
        image = even_illumination(image, card["illumination"])
        if not card["align"]:
            return image, mask, None
        frame = alignment(mask)
        back = inverse(frame)
        warped = np.rint(linear(image.transpose(1, 2, 0), back)).astype(np.uint8).transpose(2, 0, 1)
        return np.ascontiguousarray(warped), nearest(mask, back, replicate=True), frame

    def _settled(self, scores: Array) -> Array:
        """Scores that differ from a threshold by rounding alone are that threshold: it is a good image's score."""
        for limit in (self.limits["review"], self.limits["fail"]):
            at = np.float32(limit)
            at = at if float(at) <= limit else np.nextafter(at, np.float32(-np.inf))
            scores = np.where(np.abs(scores - limit) <= self.card["slack"]["score"], at, scores)
        return scores


# --- the folder ---


def _card(folder: Path) -> dict[str, Any]:
    card = _json(folder / CARD, "give the folder that firm export wrote")
    if card.get("kind") != "export" or card.get("schema") != SCHEMA:
        raise ExportError(f"{folder / CARD} is not an export that this runtime reads; export the detector again")
    for name, digest in card["files"].items():
        try:
            with (folder / name).open("rb") as file:
                same = hashlib.file_digest(file, "sha256").hexdigest() == digest
        except OSError as error:
            raise ExportError(f"{folder / name} cannot be read ({error.strerror}); copy the export again") from error
        if not same:
            raise ExportError(f"{folder / name} was damaged or edited after it was exported; copy the export again")
    return card


def _calibration(file: Path, model: str) -> dict[str, Any]:
    """Thresholds and ids; refuses a calibration of another model, or one that was edited."""
    values = _json(file, "copy it again, or run firm calibrate")
    content = {name: value for name, value in values.items() if name not in ("kind", "schema", "id")}
    text = json.dumps([CALIBRATION_SCHEMA, content], sort_keys=True)
    if hashlib.sha256(text.encode()).hexdigest()[:16] != values.get("id"):
        raise ExportError(f"{file} is no calibration, or was edited after it was written; run firm calibrate again")
    if values["model"] != model:
        raise ExportError(f"{file} belongs to model {values['model']}, not to {model}; run firm calibrate again")
    return values


def _json(file: Path, fix: str) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ExportError(f"{file} cannot be read ({error}); {fix}") from error
    if not isinstance(values, dict):
        raise ExportError(f"{file} holds no settings; {fix}")
    return values


def _graph(folder: Path, card: dict[str, Any], threads: int) -> Graph:
    name = ENGINES[card["engine"]]
    try:
        engine: Any = importlib.import_module(name)
    except ImportError as error:
        raise ExportError(f"this export needs {name}, which is not installed; run: pip install {name}") from error
    path = str(folder / card["graph"])
    if card["engine"] == "onnx":
        options = engine.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        session = engine.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        return lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))
    hints: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "bf16" if card["precision"] == "bf16" else "f32"}
    compiled = engine.Core().compile_model(path, "CPU", hints | ({"INFERENCE_NUM_THREADS": threads} if threads else {}))
    return lambda feeds: {output.get_any_name(): value for output, value in compiled(feeds).items()}


# --- regions ---


def regions_of(heat: Array, threshold: float, height: int, width: int) -> tuple[Region, ...]:
    """The 8-connected parts of a map with a peak above the threshold, hottest first; a box covers all of its pixels."""
    rows, columns = heat.shape
    regions = []
    for runs in components(candidates(heat, threshold)):
        area, peak = sum(end - begin for _, begin, end in runs), max(heat[y, b:e].max() for y, b, e in runs)
        if not peak > threshold:
            continue
        (top, *_), (low, *_) = runs[0], runs[-1]
        left, right = min(begin for _, begin, _ in runs), max(end for _, _, end in runs)
        box = (
            *(top * height // rows, left * width // columns),
            *(-(-(low + 1) * height // rows), -(-right * width // columns)),
        )
        scaled = max(1, (2 * area * height * width + rows * columns) // (2 * rows * columns))
        regions.append(Region(box, scaled, float(peak)))
    return tuple(sorted(regions, key=lambda region: (-region.peak, region.box)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the verdict of each image as a line of JSON; 0: all PASS, 3: some REVIEW, 4: some FAIL, 1: an error."""
    parser = argparse.ArgumentParser(description="Decide with an exported detector.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("images", type=Path, nargs="+")
    parser.add_argument("--threads", type=int, default=0)
    asked = parser.parse_args(arguments)
    worst = 0
    try:
        runtime = Runtime(asked.folder, threads=asked.threads)
        for image in asked.images:
            verdict = runtime.inspect(image)
            print(json.dumps(asdict(verdict)), flush=True)
            worst = max(worst, {"PASS": 0, "REVIEW": 3, "FAIL": 4}[verdict.verdict])
    except ExportError as error:
        print(error, file=sys.stderr)
        return 1
    return worst


if __name__ == "__main__":
    sys.exit(main())
