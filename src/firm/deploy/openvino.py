"""An ONNX file as an OpenVINO model, in its own precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from firm.deploy.onnx import needed
from firm.errors import MachineError


def write_openvino(onnx_file: Path, file: Path) -> None:
    """Convert, and write `file` (.xml) and its weights (.bin) without rounding them."""
    engine: Any = needed("openvino")
    model = engine.Core().read_model(onnx_file)  # `convert_model` does the same and reports to its makers
    engine.save_model(model, file, compress_to_fp16=False)


def check_bf16() -> None:
    """Refuse where the processor would compute BF16 in float32."""
    able = needed("openvino").Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if "BF16" not in able:
        raise MachineError(f"this processor has no BF16 ({', '.join(able)}); use --precision fp32 or int8")
