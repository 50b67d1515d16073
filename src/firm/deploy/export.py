"""Write a detector as a graph for an engine, with its calibration, a runtime of one file and a certificate of parity.

Everything is written beside the target first and moved there at the end, so that a failed export leaves nothing.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from torch import Tensor, nn

from firm.decision.calibration import beside, write_calibration
from firm.deploy.exported import read
from firm.deploy.firm_runtime import BATCH, CARD, ENGINES, SCHEMA, Runtime
from firm.deploy.graph import graph_of, takes_any_size
from firm.deploy.onnx import needed, quantise, write_onnx
from firm.deploy.openvino import check_bf16, write_openvino
from firm.deploy.parity import Certificate, certify
from firm.detector.detector import Detector
from firm.errors import ModelFileError, SettingError, named
from firm.images.ignore_mask import scaled
from firm.recipes.recipe import to_json
from firm.runtime.files import check_writable, replace_file
from firm.runtime.listener import SILENT, Listener
from firm.scoring.models import ImageModel, PatchModel

PRECISIONS = ("fp32", "bf16", "int8")
SLACK = 1e-3  # of a threshold: so close a score is at it, since a threshold is the score of a good image
RANGES = 64  # good images by which the ranges of INT8 are set
RUNTIME = "firm_runtime.py"
BACKENDS = {"onnx": "onnxruntime", "openvino": "openvino"}  # of Triton
GRAPHS = {"onnx": "model.onnx", "openvino": "model.xml"}


@dataclass(frozen=True, kw_only=True)
class Target:
    """What to export to."""

    engine: str = "onnx"
    precision: str = "fp32"
    accept: int = 0  # changed verdicts that a lower precision may have
    triton: bool = False  # write config.pbtxt, so that the folder is a model of a Triton server

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("--to", self.engine, tuple(ENGINES)),
            ("--precision", self.precision, PRECISIONS),
        ):
            if value not in allowed:
                raise SettingError(f"{name} is {value!r}; use one of {', '.join(allowed)}")
        if self.accept and self.precision == "fp32":
            raise SettingError("--accept is for lower precisions; in fp32 no verdict may change, leave it out")
        if self.precision == "bf16" and self.engine == "onnx":
            raise SettingError("onnxruntime computes no BF16 on a CPU; use --to openvino, or another precision")


def export(
    detector: Detector,
    folder: Path,
    target: Target,
    files: Sequence[tuple[Path, str]],
    listener: Listener = SILENT,
) -> Certificate:
    """Write the export, compared with the detector on files (`images_to_compare`); refuses if a verdict changes."""
    _check_folder(folder)
    for name in ("onnx", ENGINES[target.engine]):
        needed(name)
    if target.precision == "bf16":
        check_bf16()
    detector.decides  # noqa: B018 - refused before any work
    model, any_size = detector.model, takes_any_size(detector.model)
    graph = graph_of(model, any_size=any_size)
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.absolute().parent, prefix=f".{folder.name}.") as name:
        place = Path(name) / "export"
        place.mkdir()
        card = card_of(detector, target, graph)
        listener.say(f"writing a graph for {ENGINES[target.engine]}")
        _write_graph(graph, place, card, target, any_size, detector, [file for file, _ in files])
        written = sorted(file for file in place.rglob("*") if file.is_file())
        card["files"] = {file.relative_to(place).as_posix(): _sha256(file) for file in written}
        (place / CARD).write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
        write_calibration(beside(place), detector.decides)
        (place / RUNTIME).write_text(runtime_source(), encoding="utf-8")
        if target.triton:
            (place / "config.pbtxt").write_text(triton_config(folder.name, card, any_size), encoding="utf-8")
        certificate = certify(detector, read(lambda: Runtime(place)), files, listener)
        changed = certificate.summary["changed_verdicts"]
        if changed > target.accept:
            raise ModelFileError(
                f"{changed} of {len(certificate.images)} verdicts change, so nothing is exported: "
                + "; ".join(line for line in certificate.lines() if line.startswith("changed: "))
                + ("" if target.precision == "fp32" else f"; accept them with --accept {changed}, or use fp32")
            )
        certificate.write(place)
        _move(place, folder)
    return certificate


def _check_folder(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and (not any(folder.iterdir()) or (folder / CARD).is_file())):
        raise SettingError(f"{named(folder)} is there and no export; name a new folder, such as part.{GRAPHS['onnx']}")
    check_writable(folder.absolute().parent)


def _move(place: Path, folder: Path) -> None:
    """The finished export to where it belongs; one that is there is replaced."""
    old = place.with_name("old")
    if folder.exists():
        replace_file(folder, old)
    try:
        replace_file(place, folder)
    except OSError:
        if old.exists():
            replace_file(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write_graph(
    graph: nn.Module,
    place: Path,
    card: dict[str, Any],
    target: Target,
    any_size: bool,
    detector: Detector,
    files: Sequence[Path],
) -> None:
    """The graph under its name in the card."""
    file = place / card["graph"]
    file.parent.mkdir(exist_ok=True)
    onnx_file = file.with_name(GRAPHS["onnx"])
    write_onnx(graph, onnx_file, card["size"], any_size=any_size)
    if target.precision == "int8":
        quantise(onnx_file, _feeds(place, card, detector, files))
    if target.engine == "openvino":
        write_openvino(onnx_file, file)
        onnx_file.unlink()


def _feeds(place: Path, card: dict[str, Any], detector: Detector, files: Sequence[Path]) -> list[dict[str, Any]]:
    """Good images as the graph takes them."""
    runtime = Runtime.__new__(Runtime)  # without a graph: it is not written yet
    runtime.folder, runtime.card = place, card
    feeds = []
    for file in files[:: max(1, len(files) // RANGES)][:RANGES]:
        image, mask, _ = runtime.prepared(detector.preprocessing.read(file)[0].numpy())
        both = {"images": image[None], "foreground": mask[None].astype(np.uint8)}
        feeds.append({name: both[name] for name in card["inputs"]})
    return feeds


def card_of(detector: Detector, target: Target, graph: nn.Module) -> dict[str, Any]:
    """What the runtime and `Detector.load` need beside the graph."""
    model, by = detector.model, detector.decides
    assert isinstance(model, PatchModel | ImageModel)
    how, side = model.conditioning, model.preprocessing.file_side
    size = model.preprocessing.size if isinstance(model, PatchModel) else side
    rule = how.foreground if how.align or "foreground" in graph.inputs else None  # type: ignore[operator]
    return {
        "kind": "export",
        "schema": SCHEMA,
        "engine": target.engine,
        "precision": target.precision,
        "graph": ("1/" if target.triton else "") + GRAPHS[target.engine],
        "inputs": list(graph.inputs),  # type: ignore[arg-type]
        "model": detector.id,
        "file_side": side,
        "size": size,
        "depth": asdict(model.preprocessing.depth),
        "maps": model.has_maps,
        "foreground": None if rule is None or rule.method == "ones" else asdict(rule),
        "fill": None if model.ignored is None else _fill(scaled(model.ignored, size, size)),
        "illumination": how.illumination,
        "align": how.align,
        "slack": {"score": SLACK * max(abs(by.review), abs(by.fail)), "map": SLACK * abs(by.pixel or 0.0)},
        "recipe": to_json(detector.recipe),
        "preprocessing": asdict(model.preprocessing),
        "origin": detector.origin,
    }


def _fill(ignored: Tensor) -> dict[str, list[int]]:
    """Which pixels are ignored, and the nearest other one of each, whose value they take."""
    mask = ignored.cpu().numpy()
    metric = (cv2.DIST_L2, cv2.DIST_MASK_5)
    _, labels = cv2.distanceTransformWithLabels(mask.astype(np.uint8), *metric, labelType=cv2.DIST_LABEL_PIXEL)
    places = np.zeros(int(labels.max()) + 1, np.int64)
    places[labels[~mask]] = np.flatnonzero(~mask)
    to = np.flatnonzero(mask)
    return {"to": to.tolist(), "from": places[labels.ravel()[to]].tolist()}


def runtime_source() -> str:
    """The runtime as one file: what it imports of firm stands in the place of the import."""
    text = _source("firm.deploy.firm_runtime")
    lines = text.splitlines()
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("firm."):
            part = _source(str(node.module))
            body = ast.parse(part).body[2].lineno  # behind its docstring and its import of annotations
            lines[node.lineno - 1 : node.end_lineno] = part.splitlines()[body - 1 :]
    return "\n".join(lines) + "\n"


def _source(module: str) -> str:
    package, _, name = module.rpartition(".")
    return resources.files(package).joinpath(f"{name}.py").read_text(encoding="utf-8")


def triton_config(name: str, card: dict[str, Any], any_size: bool) -> str:
    """The folder as a model of a Triton server, which sees the graph: conditioned images in, scores and maps out."""
    size = card["size"]
    shapes = {"images": [3, -1, -1] if any_size else [3, size, size], "foreground": [size, size]}
    outputs = {"score": [], "map": [size, size]} if card["maps"] else {"score": []}
    lines = [f"name: {json.dumps(name)}", f'backend: "{BACKENDS[card["engine"]]}"', f"max_batch_size: {BATCH}"]
    lines.append(f'default_model_filename: "{Path(card["graph"]).name}"')
    for each in card["inputs"]:
        lines.append(f'input [ {{ name: "{each}" data_type: TYPE_UINT8 dims: {shapes[each]} }} ]')
    for each, dims in outputs.items():
        shape = f"dims: {dims}" if dims else "dims: [ 1 ] reshape: { shape: [ ] }"
        lines.append(f'output [ {{ name: "{each}" data_type: TYPE_FP32 {shape} }} ]')
    return "\n".join([*lines, "dynamic_batching { }"]) + "\n"


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
