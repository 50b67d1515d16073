"""Fit on good images, score, inspect, calibrate, save and load: `Detector.fit("parts/good").inspect("new/017.png")`."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from firm.data.duplicates import copies_of_known, describe_parts, group_by_part
from firm.decision.calibration import (
    Calibration,
    TargetRates,
    beside,
    calibration_of,
    read_calibration,
    write_calibration,
)
from firm.decision.verdict import Region, Verdict, regions_of
from firm.detector.fit import Good, Images, OnProgress, Options, check_images, fit, read_good
from firm.detector.model_folder import read_fitted, write_model
from firm.detector.prepare import MEMORY
from firm.detector.remember import Fitted, measure
from firm.errors import DataError, ModelFileError, named
from firm.images.decode import Source, decode
from firm.images.preprocess import Preprocessing, brightness
from firm.recipes.recipe import Recipe, to_json
from firm.runtime.listener import SILENT, Listener
from firm.scoring.models import Examination, Located
from firm.types import Depth

OnImage = Callable[[int], None]


@dataclass(frozen=True)
class Examined:
    """A verdict with the image, its brightness and heat map, and the features the score comes from."""

    verdict: Verdict
    picture: UInt8[Any, "h w 3"]
    light: float  # mean grey level, 0 to 1
    heat: Float[Tensor, "r c"] | None  # None without maps
    examination: Examination


@dataclass
class Detector(Fitted):
    """A fitted model and its thresholds. Higher scores are more anomalous."""

    _calibration_file = "its calibration.json"

    @classmethod
    def fit(
        cls,
        good: Images,
        *,
        recipe: Recipe | None = None,
        seed: int = 0,
        device: str = "cpu",
        folder: Path | None = None,
        holdout: float | None = None,
        false_calls: float = 0.05,
        fail: float = 0.01,
        minutes: float | None = None,
        memory: float = MEMORY,
        depth: Depth | None = None,
        strict: bool = False,
        ignored: Path | Bool[Tensor, "a b"] | None = None,
        parts: Int[Tensor, " n"] | None = None,
        keep_suspects: bool = False,
        checkpoint_seconds: float = 30.0,
        listener: Listener = SILENT,
        on_progress: OnProgress | None = None,
    ) -> Self:
        """Learn from good images, exactly as `firm fit` does.

        Args:
            good: a folder, a name such as mvtec:screw, the result of `firm.load`, or a uint8 tensor (n, 1 or 3, h, w).
            recipe: the settings; by default patches for parts, whole images for semantic classes and bare tensors.
            seed: seeds every random draw.
            device: cpu, cuda, mps, ...
            folder: makes the training resumable: call again with the same arguments after an interruption.
            holdout: fraction of the good images held out of training to set the thresholds.
            false_calls: target rate of good parts that do not PASS.
            fail: target rate of good parts that FAIL.
            minutes: time budget of the fit; replaces the recipe's epochs.
            memory: GB the fit may use; if the good images need more, a uniform sample is used.
            depth: the white level of files with more than 8 bits; by default detected on the good images.
            strict: stop at the first unusable file instead of skipping it.
            ignored: pixels to leave out: a mask file, or bool (h, w) of any size over the whole image.
            parts: which part each image shows; by default detected on the images.
            keep_suspects: learn also from images that do not look like the others; the card lists them either way.
            checkpoint_seconds: time between checkpoints.
            listener: receives messages, warnings and progress.
            on_progress: called after every training step.
        """
        options = Options(
            seed=seed,
            device=device,
            folder=folder,
            holdout=holdout,
            false_calls=false_calls,
            fail=fail,
            minutes=minutes,
            memory=memory,
            depth=depth,
            strict=strict,
            ignored=ignored,
            parts=parts,
            keep_suspects=keep_suspects,
            checkpoint_seconds=checkpoint_seconds,
        )
        return cls.learn(read_good(good, recipe, options, listener), listener, on_progress)

    @classmethod
    def learn(cls, good: Good, listener: Listener = SILENT, on_progress: OnProgress | None = None) -> Self:
        """Fit on good images that are already read."""
        return cls.of(fit(good, listener, on_progress))

    @classmethod
    def of(cls, fitted: Fitted) -> Self:
        """The detector of a fit's result."""
        return cls(**{item.name: getattr(fitted, item.name) for item in fields(fitted)})

    @property
    def preprocessing(self) -> Preprocessing:
        return self.model.preprocessing

    def score(self, images: UInt8[Tensor, "n c h w"], on_chunk: OnImage | None = None) -> Float[Tensor, " n"]:
        """The anomaly score of each image, independent of the other images up to rounding."""
        check_images(images)
        return self.model.score(images, on_chunk)

    def locate(self, images: UInt8[Tensor, "n c h w"], on_chunk: OnImage | None = None) -> Located:
        """Scores, and an anomaly map of each image at the detector's working size (empty for whole-image detectors)."""
        check_images(images)
        return self.model.locate(images, on_chunk)

    def predict(self, images: UInt8[Tensor, "n c h w"]) -> Int[Tensor, " n"]:
        """+1 for PASS and -1 for the rest, as the paper labels them."""
        return torch.where(self.score(images) > self.limit, -1, 1)

    @property
    def limit(self) -> float:
        """The score above which an image does not PASS."""
        return self.decides.review

    @property
    def decides(self) -> Calibration:
        """The calibration; raises if there is none."""
        if self.calibration is None:
            raise ModelFileError(
                f"{self._calibration_file} is missing; copy it again or run firm calibrate with good images"
            )
        return self.calibration

    def inspect(self, source: Source, *, name: str = "") -> Verdict:
        """PASS, REVIEW or FAIL for a file, its bytes, an array or a Pillow image called `name` (default: its path)."""
        return self.examine(source, name=name).verdict

    def examine(self, source: Source, *, name: str = "") -> Examined:
        """Like `inspect`, with everything that explains the verdict."""
        picture = decode(source, self.preprocessing.depth)
        pixels, by = self.preprocessing.read(picture), self.decides
        examination = self.model.examine(pixels)
        score, heat = float(examination.scores), examination.maps[0] if self.model.has_maps else None
        regions: tuple[Region, ...] = ()
        if heat is not None and by.pixel is not None:
            regions = regions_of(heat, by.pixel, *picture.shape[:2])
        name = name or (str(source) if isinstance(source, Path | str) else "image")
        verdict = Verdict(name, score, by.verdict(score), regions, self.id, by.id, by.review, by.fail)
        return Examined(verdict, picture, float(brightness(pixels, self.model.ignored)), heat, examination)

    def calibrate(
        self,
        good: UInt8[Tensor, "n c h w"],
        *,
        name: str = "images",
        defects: UInt8[Tensor, "m c h w"] | None = None,
        targets: TargetRates | None = None,
        listener: Listener = SILENT,
    ) -> Calibration:
        """Set the thresholds on good images called `name`, without training.

        Training images are skipped, because they score too low; images of one part count as one. Defects do not move
        a threshold; the calibration counts how many of them are missed.
        """
        check_images(good)
        fresh = good[~copies_of_known(good, self.thumbnails)]
        if len(fresh) < len(good):
            listener.say(
                f"{len(good) - len(fresh)} of the {len(good)} good images are training images and are left out"
            )
        if not len(fresh):
            raise DataError("every good image is a training image; give images of new parts")
        parts = group_by_part(name, fresh)
        if text := describe_parts(parts):
            listener.say(text)
        measured = measure(self.model, fresh, partial(listener.progress, "scoring good images", total=len(fresh)))
        if defects is not None:
            scored = partial(listener.progress, "scoring defects", total=len(defects))
            defects = measure(self.model, defects, scored).scores
        self.calibration = calibration_of(
            measured.scores,
            model=self.id,
            peaks=measured.peaks,
            parts=parts,
            light=measured.light,
            defects=defects,
            targets=targets,
        )
        return self.calibration

    def card(self) -> dict[str, Any]:
        """The content of card.json."""
        return {"recipe": to_json(self.recipe), "preprocessing": asdict(self.preprocessing), "origin": self.origin}

    def save(self, path: Path | str) -> None:
        """Write a folder with the card, the weights and the calibration; an existing detector is replaced."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"examples.{name}": value for name, value in self.examples.tensors().items()}
        write_model(Path(path), tensors | {"thumbnails": self.thumbnails}, self.card())
        if self.calibration is not None:
            write_calibration(beside(path), self.calibration)
        else:
            beside(path).unlink(missing_ok=True)  # left by the replaced detector

    @classmethod
    def load(
        cls, path: Path | str, *, device: torch.device | str = "cpu", calibration: Path | str | bool = True
    ) -> Self:
        """Read a saved detector; its scores and verdicts are those from before saving.

        Args:
            path: the folder that `save` wrote.
            device: cpu, cuda, mps, ...
            calibration: another calibration file; False reads none.
        """
        detector = cls.of(read_fitted(Path(path), device))
        file = beside(path) if isinstance(calibration, bool) else Path(calibration)
        detector._calibration_file = named(file)
        if calibration is not False and (calibration is not True or file.exists()):
            detector.calibration = read_calibration(file, model=detector.id)
        return detector
