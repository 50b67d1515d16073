"""The verbs that bring a detector to another engine: export and verify."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from firm.cli.options import AsJson, Model, Output, Threads
from firm.cli.terminal import reporting, show, use_device
from firm.errors import named

if TYPE_CHECKING:
    from firm.deploy.parity import Certificate

CHANGED = 4  # exit code of verify


def export(
    model: Model,
    to: Annotated[str, Option("--to", help="onnx or openvino.")] = "onnx",
    out: Annotated[Path | None, Option("--out", "-o", help="The folder to write. [default: MODEL.onnx]")] = None,
    images: Annotated[
        list[Path] | None,
        Option(help="Good images of the fit to compare on; by default where the fit read them. May be repeated."),
    ] = None,
    precision: Annotated[str, Option(help="fp32, bf16 (openvino, where the CPU has it) or int8.")] = "fp32",
    accept: Annotated[int, Option(min=0, help="Verdicts that may change in a lower precision.")] = 0,
    most: Annotated[int, Option(min=1, help="Real images to compare on.")] = 100,
    triton: Annotated[bool, Option("--triton", help="Write config.pbtxt, for a Triton server.")] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Write the detector for another engine, and a certificate that it decides the same.

    Fails, and leaves nothing, if the verdict on an image changes.
    """
    from firm.deploy.export import Target
    from firm.deploy.export import export as write
    from firm.deploy.parity import images_to_compare
    from firm.detector.detector import Detector

    use_device("cpu", threads)
    target = Target(engine=to, precision=precision, accept=accept, triton=triton)
    folder = out or model.with_name(f"{model.name.removesuffix('.firm')}.{to}")
    detector = Detector.load(model)
    files = images_to_compare(detector, images or (), most)
    with reporting() as listener:
        certificate = write(detector, folder, target, files, listener)
    _show(certificate, [f"wrote {named(folder)}"], as_json)


def verify(
    artefact: Annotated[Path, Argument(help="A folder written by `firm export`.")],
    images: Annotated[list[Path], Argument(help="Image files and folders.")],
    detector: Annotated[Path | None, Option(help="Compare with this detector, on any images.")] = None,
    threads: Threads = 0,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Check on this machine that an export decides as its detector does.

    Without a detector it compares with the scores in the certificate. Exit code 4: a verdict changed.
    """
    from firm.deploy.parity import verify as check
    from firm.detector.detector import Detector

    use_device("cpu", threads)
    certificate = check(artefact, images, None if detector is None else Detector.load(detector))
    _show(certificate, [], as_json)
    if certificate.summary["changed_verdicts"]:
        raise Exit(CHANGED)


def _show(certificate: Certificate, before: list[str], as_json: bool) -> None:
    show(asdict(certificate) | {"summary": certificate.summary}, "\n".join([*before, *certificate.lines()]), as_json)
