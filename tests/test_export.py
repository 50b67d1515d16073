"""Exports end to end with the real engines: the same verdicts, a runtime that stands alone, certificates."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch
from PIL import Image

from cases import each
from commands import run, values
from exports import BAD, GOOD, fitted
from firm.decision.calibration import TargetRates, calibration_of, write_calibration
from firm.deploy import export as exporting
from firm.deploy.export import Target, export
from firm.deploy.firm_runtime import Runtime
from firm.deploy.image_steps import ExportError
from firm.deploy.parity import images_to_compare, read_certificate, verify
from firm.detector.detector import Detector
from firm.errors import DataError, FirmError, MachineError, ModelFileError, SettingError

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("openvino")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the engines, and about so few good images
PAIRS = [
    ("onnx", "within 2 cells"),
    ("onnx", "aligned"),
    ("onnx", "anywhere, with surroundings"),
    ("onnx", "whole images"),
    ("openvino", "within 2 cells"),
    ("openvino", "ignored pixels"),
    ("openvino", "whole images, turned"),
]
ALONE = (
    "import sys, runpy\nsys.modules.update(dict.fromkeys(('torch', 'firm', 'cv2', 'scipy')))\nsys.argv = sys.argv[1:]\n"
)
ALONE += "runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.fixture(scope="module", autouse=True)
def unchecked_shapes() -> Iterator[None]:
    """While a module is traced its sizes are no numbers."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def written(folder: Path, images: torch.Tensor) -> Path:
    folder.mkdir(parents=True)
    for number, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{number:02}.png")
    return folder


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("images") / "good", GOOD)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Suspects of other sizes, depths and channels."""
    folder = tmp_path_factory.mktemp("odd")
    grey = BAD[:, 0].numpy()
    Image.fromarray(grey[0]).resize((97, 41)).save(folder / "odd.png")
    Image.fromarray(grey[1]).save(folder / "grey.png")
    Image.fromarray(grey[2].astype(np.uint16) * 257).save(folder / "deep.png")
    Image.fromarray(BAD[3].permute(1, 2, 0).numpy()).resize((301, 200)).save(folder / "large.jpg", quality=92)
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, good: Path) -> Path:
    """An export that the tests only read."""
    detector, folder = fitted("within 2 cells"), tmp_path_factory.mktemp("made") / "part.onnx"
    export(detector, folder, Target(), images_to_compare(detector, [good]))
    return folder


@each("engine, name", PAIRS)
def test_an_export_decides_as_its_detector(
    engine: str, name: str, tmp_path_factory: pytest.TempPathFactory, good: Path, odd: list[Path]
) -> None:
    detector, folder = fitted(name), tmp_path_factory.mktemp("exports") / "part"
    certificate = export(detector, folder, Target(engine=engine), images_to_compare(detector, [good]))
    assert certificate.summary["changed_verdicts"] == 0
    assert certificate.summary["kinds"].keys() >= {"good", "synthetic defect"}
    apart = [abs(each.score - each.exported_score) / abs(detector.decides.fail) for each in certificate.images]
    assert max(apart) < 1e-2  # logarithms of wavelets amplify rounding where an image is flat
    assert np.median(apart) < 1e-4
    runtime, again = Runtime(folder), Detector.load(folder)
    for file in odd:
        expected, found, loaded = detector.inspect(file), runtime.inspect(file), again.inspect(file)
        assert found.verdict == loaded.verdict, (name, file.name)
        near = min(abs(expected.score - limit) for limit in (expected.review, expected.fail))
        if near > 2e-3 * abs(expected.fail):  # so close a score counts as at the threshold
            assert found.verdict == expected.verdict, (name, file.name)
        assert found.score == pytest.approx(expected.score, rel=1e-2)
        assert loaded.score == pytest.approx(found.score, rel=1e-5)
        assert (found.model, found.calibration) == (expected.model, expected.calibration)
        assert [region.box for region in found.regions] == [region.box for region in expected.regions]
    alone = [runtime.score([file])[0] for file in odd]
    assert np.allclose(runtime.score(odd), alone, rtol=1e-5)
    pixels = torch.cat([detector.preprocessing.read(file) for file in odd])
    assert torch.allclose(again.score(pixels), torch.tensor(alone), rtol=1e-5)


def test_the_runtime_stands_alone(made: Path, odd: list[Path]) -> None:
    command = [sys.executable, "-c", ALONE, str(made / "firm_runtime.py"), str(made), *map(str, odd)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3, 4), done.stderr
    scores = [json.loads(line)["score"] for line in done.stdout.splitlines()]
    assert scores == pytest.approx(Runtime(made).score(odd).tolist(), rel=1e-5)


def test_the_graph_takes_any_batch_and_size(made: Path) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(made / "model.onnx", providers=["CPUExecutionProvider"])
    expected = fitted("within 2 cells").score(BAD).numpy()
    for count in (1, 2, 5):
        found = session.run(["score"], {"images": BAD[:count].numpy()})[0]
        assert np.allclose(found, expected[:count], rtol=1e-3, atol=1e-3)
    large = BAD[:3].repeat_interleave(2, 2).repeat_interleave(3, 3).numpy()  # resized in the graph
    exact = Runtime(made).score(list(large.transpose(0, 2, 3, 1)))
    assert np.allclose(session.run(["score"], {"images": large})[0], exact, rtol=0.02, atol=0.02)


def test_thresholds_move_without_another_export(made: Path, tmp_path: Path, good: Path) -> None:
    folder, detector = shutil.copytree(made, tmp_path / "part"), fitted("within 2 cells")
    lowest = TargetRates(review_at=-1e6, fail_at=-1e6)
    moved = calibration_of(torch.tensor(detector.decides.scores), model=detector.id, targets=lowest)
    write_calibration(folder / "calibration.json", moved)
    assert Runtime(folder).inspect(good / "00.png").verdict == "FAIL"
    assert Runtime(folder).inspect(good / "00.png").calibration == moved.id
    assert Detector.load(folder).inspect(good / "00.png").verdict == "FAIL"
    write_calibration(folder / "calibration.json", calibration_of(torch.rand(30), model="another"))
    with pytest.raises(ExportError, match="another"):
        Runtime(folder)


def test_a_changed_verdict_fails_the_export_and_leaves_nothing(
    tmp_path: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model, **settings):
        graph = graph_of(model, **settings)
        bank = graph.banks["backbone"]
        bank.mean = bank.mean - 100  # not in place: the numbers are the model's
        return graph

    graph_of, detector = exporting.graph_of, fitted("within 2 cells")
    monkeypatch.setattr(exporting, "graph_of", wrong)
    (tmp_path / "new").mkdir()
    with pytest.raises(FirmError, match="verdicts change"):
        export(detector, tmp_path / "new" / "part", Target(), images_to_compare(detector, [good]))
    assert list((tmp_path / "new").iterdir()) == []


def test_verify_compares_with_the_certificate_or_the_detector(
    made: Path, good: Path, odd: list[Path], tmp_path: Path
) -> None:
    fitted("within 2 cells").save(tmp_path / "part.firm")
    check = values("verify", made, good)
    assert (check["summary"]["images"], check["summary"]["changed_verdicts"]) == (16, 0)
    both = values("verify", made, *odd, "--detector", tmp_path / "part.firm")
    assert both["summary"]["kinds"] == {"new": 4}
    assert run("verify", made, *odd).code == 2  # not in the certificate
    altered = shutil.copytree(made, tmp_path / "altered")
    content = json.loads((altered / "certificate.json").read_text())
    content["images"][0]["score"] = 1e6
    (altered / "certificate.json").write_text(json.dumps(content))
    assert run("verify", altered, good).code == 4
    with pytest.raises(ModelFileError, match="not of"):
        verify(made, odd, fitted("whole images"))


def test_the_certificate_tells_where_and_on_what(made: Path, good: Path) -> None:
    certificate = read_certificate(made)
    assert {"engine", "cpu", "torch", "numpy", "pillow"} <= certificate.machine.keys()
    assert {Path(one.image).name for one in certificate.images} >= {file.name for file in good.iterdir()}
    assert "changed verdicts: 0" in (made / "certificate.txt").read_text()


@pytest.mark.parametrize("content", [b"", b"null", b"\xff", 200_000 * b"["], ids=["empty", "null", "no text", "deep"])
def test_what_is_no_card_and_no_certificate_is_refused(made: Path, tmp_path: Path, content: bytes) -> None:
    folder = shutil.copytree(made, tmp_path / "part")
    for name in ("certificate.json", "calibration.json", "card.json"):
        (folder / name).write_bytes(content)
    with pytest.raises(ModelFileError):
        read_certificate(folder)
    with pytest.raises(ExportError):
        Runtime(folder)


def test_damage_is_refused(made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made, tmp_path / "part")
    with (folder / "model.onnx").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ExportError, match="damaged or edited"):
        Runtime(folder)
    with pytest.raises(ModelFileError):
        Detector.load(folder)


def test_int8_and_triton_by_the_command_line(tmp_path: Path, good: Path) -> None:
    fitted("pretrained").save(tmp_path / "part.firm")
    options = ["--precision", "int8", "--accept", 40, "--images", good, "--most", 6, "--triton", "-o", tmp_path / "x"]
    done = values("export", tmp_path / "part.firm", *options)
    assert done["precision"] == "int8"
    config = (tmp_path / "x" / "config.pbtxt").read_text()
    assert 'backend: "onnxruntime"' in config
    assert (tmp_path / "x" / "1" / "model.onnx").is_file()
    assert np.isfinite(Runtime(tmp_path / "x").score([good / "00.png"])).all()


def test_bf16_is_refused_where_the_processor_has_none(
    tmp_path: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openvino

    monkeypatch.setattr(openvino.Core, "get_property", lambda *_: ["FP32", "INT8"])
    detector, target = fitted("within 2 cells"), Target(engine="openvino", precision="bf16")
    with pytest.raises(MachineError, match="BF16"):
        export(detector, tmp_path / "part", target, images_to_compare(detector, [good]))


@each("settings", [{"engine": "abacus"}, {"precision": "fp8"}, {"accept": 3}, {"precision": "bf16"}])
def test_impossible_targets_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(SettingError):
        Target(**settings)


def test_what_is_missing_is_named(tmp_path: Path, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detector = fitted("within 2 cells")
    with pytest.raises(DataError, match="--images"):
        images_to_compare(detector, [])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    again = partial(export, detector, target=Target(), files=images_to_compare(detector, [good]))
    with pytest.raises(SettingError, match="no export"):
        again(tmp_path / "mine")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MachineError, match="pip install"):
        again(tmp_path / "part")
    assert not (tmp_path / "part").exists()
