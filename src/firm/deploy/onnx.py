"""A module as an ONNX file, in float32 or with its convolutions in INT8."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from firm.errors import MachineError

OPSET = 18
EXAMPLES = 2  # images by which the module is traced


def needed(name: str) -> Any:
    """A package of the extra `export`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MachineError(
            f"exporting needs {name}, which is not installed; run: pip install 'firm[export]'"
        ) from error


def write_onnx(graph: nn.Module, file: Path, side: int, *, any_size: bool) -> None:
    """Trace the module and write one self-contained file; the batch is dynamic, and the size where `any_size`."""
    needed("onnx")
    names: Sequence[str] = graph.inputs  # type: ignore[assignment]
    shapes = {"images": (EXAMPLES, 3, side + 3 * any_size, side + 5 * any_size), "foreground": (EXAMPLES, side, side)}
    rng = torch.Generator().manual_seed(0)
    examples = tuple(torch.randint(0, 2, shapes[name], generator=rng, dtype=torch.uint8) for name in names)
    free = {"images": {0: "n", 2: "h", 3: "w"} if any_size else {0: "n"}, "foreground": {0: "n"}}
    outputs: Sequence[str] = graph.outputs  # type: ignore[assignment]
    axes = {name: free[name] for name in names} | {name: {0: "n"} for name in outputs}
    with _quietly(), torch.no_grad():
        torch.onnx.export(
            graph,
            examples,
            str(file),
            input_names=list(names),
            output_names=list(outputs),
            opset_version=OPSET,
            dynamo=False,  # traced in a second, by every torch that firm runs on
            dynamic_axes=axes,
        )


def quantise(file: Path, feeds: Sequence[dict[str, Any]]) -> None:
    """Replace the file by one whose convolutions are INT8, with the ranges that good images have."""
    needed("onnx")
    quantization: Any = needed("onnxruntime.quantization")

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(feeds)

        def get_next(self) -> dict[str, Any] | None:
            return next(self.left, None)

    small = file.with_name(f"int8-{file.name}")
    with _quietly():
        quantization.quantize_static(
            file,
            small,
            Reader(),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=["Conv"],
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
        )
    os.replace(small, file)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the notes of the exporters, whose failures are exceptions."""
    log = logging.getLogger()
    level = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)
