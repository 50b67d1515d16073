"""The certificate of an export: on which images it was compared with its detector, and how far apart the two are."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from firm.data.folder import find_files
from firm.data.registry import training_files
from firm.deploy.exported import read
from firm.deploy.firm_runtime import ENGINES, Runtime
from firm.detector.detector import Detector
from firm.errors import DataError, FirmError, ImageError, ModelFileError, named
from firm.outliers.registry import KINDS, Mixture, make_outliers, scene_of
from firm.runtime.files import read_file, write_atomically
from firm.runtime.listener import SILENT, Listener
from firm.runtime.random import stream

NAME, TEXT, KIND, SCHEMA = "certificate.json", "certificate.txt", "certificate", 1
GOOD, CALIBRATION, SYNTHETIC, NEW = "good", "calibration", "synthetic defect", "new"
MOST, DEFECTS = 100, 24  # images that are compared unless you ask for more; those with synthetic defects among them
TOGETHER = 8  # images that are also scored as one batch


@dataclass(frozen=True)
class Compared:
    """One image by the detector and by the export."""

    image: str
    sha256: str  # of the file; of synthetic defects of the pixels
    kind: str
    score: float
    exported_score: float
    verdict: str
    exported_verdict: str
    map_difference: float | None  # the largest of all pixels; None without maps, or where no detector was at hand
    same_regions: bool | None

    @property
    def changed(self) -> bool:
        return self.verdict != self.exported_verdict


@dataclass(frozen=True)
class Certificate:
    """What was compared, where, and the result."""

    model: str
    calibration: str
    engine: str
    precision: str
    machine: dict[str, str]
    batch_difference: float  # of scores in a batch and alone
    images: tuple[Compared, ...]

    @property
    def summary(self) -> dict[str, Any]:
        """The largest differences, and how many verdicts changed."""
        maps = [each.map_difference for each in self.images if each.map_difference is not None]
        kinds = [each.kind for each in self.images]
        return {
            "images": len(self.images),
            "kinds": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
            "changed_verdicts": sum(each.changed for each in self.images),
            "other_regions": sum(each.same_regions is False for each in self.images),
            "max_score_difference": max(abs(each.score - each.exported_score) for each in self.images),
            "max_map_difference": max(maps, default=None),
            "max_batch_difference": self.batch_difference,
        }

    def lines(self) -> list[str]:
        """The certificate as a short text."""
        found = self.summary
        kinds = ", ".join(f"{count} {kind}" for kind, count in found["kinds"].items())
        maps = found["max_map_difference"]
        lines = [
            f"model {self.model}, calibration {self.calibration}",
            f"engine {self.engine} {self.machine['engine']}, {self.precision}, on {self.machine['cpu']}",
            f"compared on {found['images']} images: {kinds}",
            f"changed verdicts: {found['changed_verdicts']}",
            f"largest difference of scores: {found['max_score_difference']:.3g}",
            *([] if maps is None else [f"largest difference of maps: {maps:.3g}"]),
            f"largest difference of a score alone and in a batch: {self.batch_difference:.3g}",
        ]
        return lines + [
            f"changed: {named(each.image)}: {each.verdict} {each.score:.6g}, "
            f"exported {each.exported_verdict} {each.exported_score:.6g}"
            for each in self.images
            if each.changed
        ]

    def write(self, folder: Path) -> None:
        """Both files."""
        values = {"kind": KIND, "schema": SCHEMA, **asdict(self), "summary": self.summary}
        write_atomically(folder / NAME, (json.dumps(values, indent=1) + "\n").encode())
        write_atomically(folder / TEXT, ("\n".join(self.lines()) + "\n").encode())


def read_certificate(folder: Path) -> Certificate:
    """The certificate of an export."""
    try:
        values = json.loads(read_file(folder / NAME))
        assert values.pop("kind") == KIND and values.pop("schema") == SCHEMA  # noqa: PT018
        del values["summary"]
        images = tuple(Compared(**each) for each in values.pop("images"))
        return Certificate(**values, images=images)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError) as error:
        fix = "export the detector again, or compare with --detector"
        raise ModelFileError(f"{named(folder / NAME)} is no certificate that this firm reads; {fix}") from error


def images_to_compare(detector: Detector, given: Sequence[Path], most: int = MOST) -> list[tuple[Path, str]]:
    """Good images of the fit, with the calibration's first; `given` are folders of them, else where the fit read."""
    files, name = find_files(list(given)) if given else [], str(detector.origin.get("data", ""))
    if not given:
        try:
            files = training_files(name)
        except FirmError:
            files = []
        if not files:
            raise DataError(f"the good images of the fit, {named(name)}, are not there; give them with --images FOLDER")
    marked = {Path(file).name for file in detector.decides.files}
    kinds = [CALIBRATION if file.name in marked else GOOD for file in files]
    chosen: list[tuple[Path, str]] = []
    for kind, share in ((CALIBRATION, max(most // 2, most - kinds.count(GOOD))), (GOOD, most)):
        alike = [(file, kind) for file, own in zip(files, kinds, strict=True) if own == kind]
        room = min(len(alike), share - len(chosen))
        chosen += [alike[number * len(alike) // room] for number in range(room)]
    return chosen


def certify(
    detector: Detector, runtime: Runtime, files: Sequence[tuple[Path, str]], listener: Listener = SILENT
) -> Certificate:
    """Compare the two on files and, if any is good, on images with synthetic defects."""
    compared, pictures = [], []
    readable = _readable(runtime, files, listener)
    defects = list(synthetic(detector, [file for file, kind in readable if kind in (GOOD, CALIBRATION)]))
    total = len(readable) + len(defects)
    for number, (file, kind) in enumerate(readable, 1):
        pictures.append(file)
        compared.append(compare(detector, runtime, file, kind, str(file)))
        listener.progress("comparing with the detector", number, total)
    for number, (array, name) in enumerate(defects, len(readable) + 1):
        pictures.append(array)
        compared.append(compare(detector, runtime, array, SYNTHETIC, name))
        listener.progress("comparing with the detector", number, total)
    together = read(lambda: runtime.score(pictures[:TOGETHER]))
    alone = [each.exported_score for each in compared[:TOGETHER]]
    return certificate_of(runtime, compared, float(np.abs(together - np.array(alone)).max()))


def _readable(runtime: Runtime, files: Sequence[tuple[Path, str]], listener: Listener) -> list[tuple[Path, str]]:
    """Without the files that cannot be decoded, of which it warns."""
    readable = []
    for file, kind in files:
        try:
            read(partial(runtime.decode, file))
            readable.append((file, kind))
        except ModelFileError as error:
            listener.warn(f"left out: {error}")
    if not readable:
        raise DataError("none of the images could be read, so nothing can be compared; give others with --images")
    return readable


def compare(detector: Detector, runtime: Runtime, source: Any, kind: str, name: str) -> Compared:
    """One image by both, each decoding it for itself."""
    expected = detector.examine(source, name=name)
    verdict, heat = read(lambda: runtime.examine(source, name=name))
    apart = same = None
    if heat is not None and expected.heat is not None:
        apart = float(np.abs(heat - expected.heat.numpy()).max())
        same = [each.box for each in verdict.regions] == [each.box for each in expected.verdict.regions]
    return Compared(
        name, _sha256(source), kind, expected.verdict.score, verdict.score, expected.verdict.verdict, verdict.verdict,
        apart, same,
    )  # fmt: skip


def synthetic(detector: Detector, files: Sequence[Path]) -> Iterator[tuple[Any, str]]:
    """Good images with a synthetic defect each, as arrays."""
    chosen = [files[number * len(files) // min(DEFECTS, len(files))] for number in range(min(DEFECTS, len(files)))]
    if not chosen:
        return
    good = torch.cat([detector.preprocessing.read(file) for file in chosen])
    rule, ignored = detector.recipe.conditioning.foreground, detector.model.ignored
    scene = scene_of(good, good, ignored, rule=rule)
    copy = torch.arange(len(good)) % len(KINDS)
    source = Mixture(sources=KINDS, per_inlier=len(KINDS))
    made = make_outliers(source, good, rng=stream(0, "certificate"), copy=copy, scene=scene).images
    for file, image in zip(chosen, made, strict=True):
        yield np.ascontiguousarray(image.permute(1, 2, 0).numpy()), f"{file} with a synthetic defect"


def verify(folder: Path, images: Sequence[Path], detector: Detector | None = None) -> Certificate:
    """The export on this machine, against the detector if given, else against the scores in its certificate."""
    runtime, files = read(lambda: Runtime(folder)), find_files(list(images))
    if detector is not None:
        if detector.id != runtime.card["model"]:
            raise ModelFileError(
                f"{named(folder)} is an export of model {runtime.card['model']}, not of {detector.id}; "
                "give the detector that it was exported from"
            )
        return certify(detector, runtime, [(file, NEW) for file in files])
    known = {each.sha256: each for each in read_certificate(folder).images}
    found = [(file, known[digest]) for file in files if (digest := _sha256(file)) in known]
    if not found:
        raise DataError(
            f"none of the {len(files)} images is in the certificate of {named(folder)}; give the images that the "
            "export was compared on, or the detector with --detector"
        )
    compared = []
    for file, before in found:
        verdict = read(partial(runtime.inspect, file))
        compared.append(
            Compared(
                str(file), before.sha256, before.kind, before.score, verdict.score,
                _verdict(before.score, runtime.limits), verdict.verdict, None, None,
            )
        )  # fmt: skip
    together = read(lambda: runtime.score([file for file, _ in found[:TOGETHER]]))
    alone = [each.exported_score for each in compared[:TOGETHER]]
    return certificate_of(runtime, compared, float(np.abs(together - np.array(alone)).max()))


def _verdict(score: float, limits: dict[str, Any]) -> str:
    """By the thresholds of today, which may have moved since the export."""
    return "PASS" if score <= limits["review"] else "REVIEW" if score <= limits["fail"] else "FAIL"


def certificate_of(runtime: Runtime, compared: Sequence[Compared], batch_difference: float) -> Certificate:
    """The result with its origin."""
    card = runtime.card
    packages = ("firm", "torch", "numpy", "pillow", "opencv-python-headless")
    machine = {name: version(name) for name in packages} | {
        "engine": version(ENGINES[card["engine"]]),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": processor(),
    }
    ids = (card["model"], runtime.limits["id"], card["engine"], card["precision"])
    return Certificate(*ids, machine, batch_difference, tuple(compared))


def processor() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _sha256(source: Any) -> str:
    content = source.tobytes() if isinstance(source, np.ndarray) else _bytes(source)
    return hashlib.sha256(content).hexdigest()


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ImageError(f"{named(file)} cannot be read ({error.strerror}); check the path", file) from error
