"""Fit on good images, score, inspect, calibrate, save and load: `Detector.fit("parts/good").inspect("new/017.png")`."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from html import escape
from importlib import import_module
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np
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
from firm.decision.regions import start
from firm.decision.verdict import Region, Shown, Verdict, figure_of, regions_of
from firm.detector.fit import OnProgress, fit
from firm.detector.model_folder import read_fitted, write_model
from firm.detector.prepare import MEMORY
from firm.detector.read import Good, Images, Options, check_images, read_good
from firm.detector.remember import Fitted, measure
from firm.errors import DataError, ModelFileError, SettingError, named
from firm.images.arrays import images_in, in_rgb, is_batch
from firm.images.decode import Source, decode
from firm.images.preprocess import Preprocessing, brightness, resize, to_tensor
from firm.recipes.recipe import Recipe, to_json
from firm.runtime.listener import SILENT, Listener
from firm.scoring.models import Examination, Located
from firm.types import Depth

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OnImage = Callable[[int], None]
EXPORT = "export.json"  # marks the folder of an export
SWAPS = 8  # arrays that do not PASS for which another order of channels is tried


@dataclass(frozen=True)
class Examined(Shown):
    """A verdict with the image, its brightness and heat map, and the features the score comes from."""

    verdict: Verdict
    pixels: UInt8[Tensor, "1 3 s s"]  # the picture as the model reads it
    light: float  # mean grey level, 0 to 1
    examination: Examination

    def plot(self) -> "Figure":
        """The image with its regions, and its heat map, as a matplotlib figure."""
        return figure_of(self.verdict, self)


@dataclass
class Detector(Fitted):
    """A fitted model and its thresholds. Higher scores are more anomalous."""

    _calibration_file = "its calibration.json"
    _swaps = SWAPS

    def __repr__(self) -> str:
        return f"Detector({', '.join(f'{name}: {value}' for name, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        rows = (f"<tr><th>{name}</th><td>{escape(value)}</td></tr>" for name, value in self._facts().items())
        return f"<table>{''.join(rows)}</table>"

    def _facts(self) -> dict[str, str]:
        by = self.calibration
        return {
            "product": named(self.origin.get("data", "unknown")),
            "encoder": named(self.recipe.pretrained.name or "trained from scratch"),
            "good images": str(self.origin.get("good_images", len(self.thumbnails))),
            "thresholds": f"REVIEW above {by.review:.4g}, FAIL above {by.fail:.4g}" if by else "none",
        }

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
        false_calls: float | None = None,
        fail: float | None = None,
        minutes: float | None = None,
        memory: float = MEMORY,
        depth: Depth | None = None,
        strict: bool = False,
        ignored: Path | Bool[Tensor, "a b"] | None = None,
        parts: Int[Tensor, " n"] | None = None,
        channels: str = "rgb",
        keep_suspects: bool = False,
        checkpoint_seconds: float = 30.0,
        calibration: str | None = None,
        group_by: str | None = None,
        listener: Listener = SILENT,
        on_progress: OnProgress | None = None,
    ) -> Self:
        """Learn from good images, exactly as `firm fit` does.

        Args:
            good: a folder, a name (mvtec:screw), what `firm.load` returns, a list of files or arrays, or a stack.
            recipe: the settings; by default those of `firm fit`: patches for parts, whole images for semantic classes.
            seed: seeds every random draw.
            device: cpu, cuda, mps, ...
            folder: makes the training resumable: call again with the same arguments after an interruption.
            holdout: fraction of the good images held out of training to set the thresholds; implies a split.
            false_calls: target rate of good parts that do not PASS; by default what the good images support.
            fail: target rate of good parts that FAIL; by default the same.
            minutes: time budget of the fit; replaces the recipe's epochs.
            memory: GB the fit may use; if the good images need more, a uniform sample is used.
            depth: the white level of files with more than 8 bits; by default detected on the good images.
            strict: stop at the first unusable file instead of skipping it.
            ignored: pixels to leave out: a mask file, or bool (h, w) of any size over the whole image.
            parts: which part each image shows; by default detected on the images.
            channels: rgb or bgr, as OpenCV has them; of arrays.
            keep_suspects: learn also from images that do not look like the others; the card lists them either way.
            checkpoint_seconds: time between checkpoints.
            calibration: "folds": all images are learnt from, and thresholds come from models that score the fold they
                have not seen (rates are estimated); "split": from held-out images (rates are guaranteed). By default
                folds with frozen features, else a split.
            group_by: a regular expression on the path of each image that names its part, in place of `parts`.
            listener: receives messages, warnings and progress.
            on_progress: called after every training step.
        """
        options = Options(
            seed=seed, device=device, folder=folder, holdout=holdout, false_calls=false_calls, fail=fail,
            minutes=minutes, memory=memory, depth=depth, strict=strict, ignored=ignored, parts=parts,
            keep_suspects=keep_suspects, checkpoint_seconds=checkpoint_seconds, calibration=calibration,
            group_by=group_by,
        )  # fmt: skip
        return cls.learn(read_good(in_rgb(good, channels), recipe, options, listener), listener, on_progress)

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

    @overload
    def inspect(self, source: Source | Tensor, *, name: str = ..., channels: str = ...) -> Verdict: ...
    @overload
    def inspect(
        self, source: list[Any] | tuple[Any, ...], *, name: str = ..., channels: str = ...
    ) -> list[Verdict]: ...
    def inspect(self, source: Any, *, name: str = "", channels: str = "rgb") -> Verdict | list[Verdict]:
        """PASS, REVIEW or FAIL for a file, its bytes, an array or a Pillow image called `name` (default: its path).

        A list, or a stack (n, h, w, c) or (n, c, h, w), gives a list of verdicts. `channels` is rgb or bgr, as OpenCV
        has them; of arrays.
        """
        if is_batch(source):
            names = [name and f"{name} {number}" for number in range(len(source))]
            pairs = zip(images_in(source), names, strict=True)
            return [self.inspect(image, name=each, channels=channels) for image, each in pairs]
        examined = self.examine(source, name=name, channels=channels)
        if isinstance(source, Path | str):  # read again: a verdict on a file keeps no pixels
            return examined.verdict.showing(lambda: self.examine(source, name=name))
        shown = Shown(examined.picture, examined.heat, examined.pixel)  # without the features
        return examined.verdict.showing(lambda: shown)

    def examine(self, source: Source | Tensor, *, name: str = "", channels: str = "rgb") -> Examined:
        """Like `inspect` for one image, with everything that explains the verdict."""
        if is_batch(source):
            raise SettingError("these are several images; give them to inspect, or each alone to examine")
        picture = decode(images_in(source, channels)[0], self.preprocessing.depth)
        pixels, by = resize(to_tensor(picture), self.preprocessing.file_side), self.decides
        examination = self.model.examine(pixels)
        score, heat = float(examination.scores), examination.maps[0] if self.model.has_maps else None
        regions, pixel = tuple[Region, ...](), by.pixel
        if heat is not None and pixel is not None:
            pixel = pixel if score <= by.review else start(heat.numpy(), pixel)
            regions = regions_of(heat, pixel, *picture.shape[:2])
        name = name or (str(source) if isinstance(source, Path | str) else "image")
        verdict = Verdict(name, score, by.verdict(score), regions, self.id, by.id, by.review, by.fail)
        if channels == "rgb" and score > by.review and isinstance(source, np.ndarray):
            self._hint_at_bgr(picture, score)
        light = float(brightness(pixels, self.model.ignored))
        return Examined(picture, heat, pixel, verdict, pixels, light, examination)

    def _hint_at_bgr(self, picture: UInt8[Any, "h w 3"], score: float) -> None:
        """Warn once if the image looks far more like the good ones with its channels swapped."""
        swapped = np.ascontiguousarray(picture[..., ::-1])
        if not self._swaps or np.array_equal(swapped, picture):
            return
        other = float(self.model.score(self.preprocessing.read(swapped)))
        self._swaps -= 1
        if 2 * max(other, 0.0) < score:
            self._swaps = 0
            text = f"this array scores {score:.4g}, and {other:.4g} with red and blue swapped"
            warnings.warn(f'{text}; if it comes from OpenCV, pass channels="bgr"', stacklevel=4)

    def calibrate(
        self,
        good: UInt8[Tensor, "n c h w"],
        *,
        name: str = "images",
        files: Sequence[str] = (),
        parts: Int[Tensor, " n"] | None = None,
        defects: UInt8[Tensor, "m c h w"] | None = None,
        targets: TargetRates | None = None,
        listener: Listener = SILENT,
    ) -> Calibration:
        """Set the thresholds on good images called `name`, without training.

        Training images are skipped, because they score too low; images of one part count as one, by `parts` or as
        found. Defects do not move a threshold; the calibration counts how many of them are missed.
        """
        check_images(good)
        new = ~copies_of_known(good, self.thumbnails)
        fresh, files = good[new], tuple(compress(files, new.tolist()))
        if len(fresh) < len(good):
            listener.say(
                f"{len(good) - len(fresh)} of the {len(good)} good images are training images and are left out"
            )
        if not len(fresh):
            raise DataError("every good image is a training image; give images of new parts")
        parts = group_by_part(name, fresh) if parts is None else parts[new]
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
            files=files,
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
            path: the folder that `save` wrote, or `firm export`.
            device: cpu, cuda, mps, ...
            calibration: another calibration file; False reads none.
        """
        file = beside(path) if isinstance(calibration, bool) else Path(calibration)
        if (Path(path) / EXPORT).is_file():  # a stage below, which needs an engine
            return import_module("firm.deploy.exported").open_export(Path(path), file)
        detector = cls.of(read_fitted(Path(path), device))
        detector._calibration_file = named(file)
        if calibration is not False and (calibration is not True or file.exists()):
            detector.calibration = read_calibration(file, model=detector.id)
        return detector
