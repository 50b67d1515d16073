"""Detector: fit on good images, score, predict, save and load.

>>> detector = Detector.fit(good, recipe=FAST, seed=0)      # doctest: +SKIP
>>> detector.predict(suspects)                              # +1 normal, -1 anomalous   # doctest: +SKIP
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

import firm
from firm import storage
from firm.calibration import Threshold, threshold_of
from firm.data.folder import SIZE
from firm.encoder import Network, arranged
from firm.fitting import task_of
from firm.images import Preprocessing
from firm.recipes.presets import FAST
from firm.recipes.recipe import Recipe, from_json, to_json
from firm.runs import Run
from firm.scores import Fitted, fit_scorings, reference_features, score_images
from firm.streams import stream
from firm.training import Progress
from firm.types import FirmError, OneClass, Statistics

SCHEMA = 1
NAME = "image"  # the one scoring a detector holds


@dataclass
class Detector:
    """A trained encoder, the embeddings of its good images, and a threshold. Higher scores are more anomalous."""

    recipe: Recipe
    preprocessing: Preprocessing
    network: Network
    references: list[Tensor]  # embeddings of the good images, one set per turn of the score
    threshold: Threshold
    origin: dict[str, Any]

    def __post_init__(self) -> None:
        self._fitted: dict[str, Fitted] = fit_scorings({NAME: self.recipe.score}, self.references)

    @classmethod
    def fit(
        cls,
        good: UInt8[Tensor, "n c h w"] | OneClass,
        *,
        recipe: Recipe = FAST,
        seed: int = 0,
        device: torch.device | str = "cpu",
        folder: Path | None = None,
        holdout: float = 0.1,
        false_calls: float = 0.05,
        checkpoint_seconds: float = 30.0,
        on_progress: Callable[[Progress, Run], None] | None = None,
    ) -> Detector:
        """Learn from good images; a part of them is held out of training and sets the threshold.

        With a folder the training is resumable: call again with the same arguments after any interruption.
        """
        data = good if isinstance(good, OneClass) else as_data(good)
        learn, held_out = split(len(data.train), holdout, seed=seed)
        check_before(recipe, data.train, len(learn), false_calls)
        part = replace(data, train=data.train[learn])
        run = Run(
            recipe,
            task_of(recipe, part, seed=seed),
            device=device,
            folder=folder,
            checkpoint_seconds=checkpoint_seconds,
        )
        for progress in run:
            if on_progress is not None:
                on_progress(progress, run)
        encoder, preprocessing = run.state.network.encoder, run.task.preprocessing
        references = reference_features(encoder, preprocessing, part.train, recipe.score.turns)
        fitted = fit_scorings({NAME: recipe.score}, references)
        scores = score_images(encoder, preprocessing, data.train[held_out], fitted)[NAME]
        if run.collapsed:
            warnings.warn(
                "the embeddings collapsed to one point, so this detector tells nothing apart; lower training.lr",
                stacklevel=2,
            )
        origin = {
            "data": data.name,
            "seed": seed,
            "good_images": len(learn),
            "task": run.digest,
            "firm": firm.__version__,
            "torch": torch.__version__,
            "collapsed": run.collapsed,
        }
        threshold = threshold_of(scores, false_calls)
        return cls(recipe, preprocessing, run.state.network, references, threshold, origin)

    def score(
        self, images: UInt8[Tensor, "n c h w"], on_chunk: Callable[[int], None] | None = None
    ) -> Float[Tensor, " n"]:
        """The anomaly score of each image; up to rounding it does not depend on the images beside it."""
        check_images(images)
        scores = score_images(self.network.encoder, self.preprocessing, images, self._fitted, on_chunk)[NAME]
        if not bool(scores.isfinite().all()):
            raise FirmError("a score is not finite, so nothing can be decided; fit the detector again")
        return scores

    def predict(self, images: UInt8[Tensor, "n c h w"]) -> Int[Tensor, " n"]:
        """+1 for normal and -1 for anomalous, as the paper labels them."""
        return torch.where(self.score(images) > self.threshold.value, -1, 1)

    def save(self, path: Path | str) -> None:
        """One safetensors file with a JSON card, written atomically."""
        tensors = {f"network.{name}": value for name, value in self.network.state_dict().items()}
        tensors |= {f"references.{turn}": value for turn, value in enumerate(self.references)}
        storage.save_tensors(Path(path), tensors, self.card(), kind="detector", schema=SCHEMA)

    def card(self) -> dict[str, Any]:
        """What the file says of itself."""
        return {
            "recipe": to_json(self.recipe),
            "preprocessing": asdict(self.preprocessing),
            "threshold": asdict(self.threshold),
            "origin": self.origin,
        }

    @classmethod
    def load(cls, path: Path | str, *, device: torch.device | str = "cpu") -> Detector:
        """Read a saved detector; it decides as it did when it was saved."""
        tensors, card = storage.load_tensors(Path(path), kind="detector", schema=SCHEMA)
        try:
            recipe = from_json(card["recipe"])
            network = Network(recipe.encoder)
            network.load_state_dict(_under("network.", tensors))
            network = arranged(network.to(device))
            parts = _under("references.", tensors)
            return cls(
                recipe,
                _preprocessing(card["preprocessing"]),
                network,
                [parts[str(turn)] for turn in range(len(parts))],
                Threshold(**card["threshold"]),
                card["origin"],
            )
        except (KeyError, TypeError, RuntimeError) as error:
            raise FirmError(f"{path} is not a complete detector ({error}); fit and save it again") from error


def as_data(good: UInt8[Tensor, "n c h w"]) -> OneClass:
    """Bare good images as a data set without a test part."""
    check_images(good)
    return OneClass("images", good, good[:0], torch.zeros(0, dtype=torch.bool), size=min(SIZE, good.shape[-1]))


def check_images(images: Tensor) -> None:
    """Pixels as they come from a file: uint8, channels first, at least one pixel."""
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] not in (1, 3) or not all(images.shape[2:]):
        raise FirmError(f"images are {images.dtype} of shape {tuple(images.shape)}; give uint8 (n, 1 or 3, h, w)")


def check_before(recipe: Recipe, good: Tensor, references: int, false_calls: float) -> None:
    """What would fail after the training is said before it."""
    height, width = good.shape[-2:]
    if height != width:
        raise FirmError(f"images of {width} x {height} pixels cannot be learnt from; make them square (images.resize)")
    if not 0 < false_calls < 1:
        raise FirmError(f"false_calls is {false_calls}; it must lie between 0 and 1")
    k = getattr(recipe.score.by, "k", 1)
    if k > references:
        raise FirmError(f"score.by.k is {k}, but only {references} good images are learnt from; use a smaller k")


def split(images: int, holdout: float, *, seed: int) -> tuple[Tensor, Tensor]:
    """Which images are learnt from and which are held out for the threshold: at least one."""
    if images < 2:
        raise FirmError(f"{images} good images are too few; give at least 2, better 50 or more")
    if not 0 < holdout < 1:
        raise FirmError(f"holdout is {holdout}; it must lie between 0 and 1")
    order = torch.randperm(images, generator=stream(seed, "holdout"))
    count = min(images - 1, max(1, round(holdout * images)))
    return order[count:].sort().values, order[:count].sort().values


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _preprocessing(card: dict[str, Any]) -> Preprocessing:
    statistics = card["statistics"]
    return Preprocessing(
        card["size"], card["zoom"], Statistics(tuple(statistics["mean"]), tuple(statistics["std"])), card["side"]
    )
