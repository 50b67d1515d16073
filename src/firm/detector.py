"""Detector: fit on good images, score, predict, save and load.

>>> detector = Detector.fit(good, recipe=FAST, seed=0)      # doctest: +SKIP
>>> detector.predict(suspects)                              # +1 normal, -1 anomalous   # doctest: +SKIP
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

import firm
from firm import storage
from firm.adaptor import Adapted, Adaptor, CellLooker
from firm.backbones import architecture, rebuild
from firm.calibration import Calibration, Threshold, of_threshold, threshold_of
from firm.calibration_file import beside, read_calibration, write_calibration
from firm.cells import CellTask
from firm.choosing import choose
from firm.conditioning import Conditioned
from firm.data.folder import SIZE
from firm.embedding import OnImages, teaching
from firm.encoder import Network, arranged
from firm.fitting import conditioned, looker_of
from firm.holdout import split, wanted
from firm.images import Preprocessing, Source, decode, resize
from firm.localiser import CHUNK, Localiser, check_dense, fit_localiser, is_grey, kinds_of
from firm.recipes.presets import FAST
from firm.recipes.recipe import Recipe, from_json, sparse, to_json
from firm.runs import Run
from firm.scores import Fitted, fit_scorings, reference_features, score_images
from firm.sisters import describe, sisters
from firm.tiling import Grid
from firm.training import Progress
from firm.types import FirmError, Located, OneClass
from firm.verdicts import Region, Verdict, regions_of

SCHEMA = 1
THUMB = 16  # side of the shrunken good images an evaluation compares with
NAME = "image"  # the one scoring a detector holds


@dataclass
class Detector:
    """A trained encoder, the embeddings of its good images, and a threshold. Higher scores are more anomalous.

    Whole images are compared as one (`references`), or patch by patch (`localiser`), which also says where.
    """

    recipe: Recipe
    preprocessing: Preprocessing
    network: Network | Adapted
    references: list[Tensor]  # embeddings of the good images, one set per turn of the score
    threshold: Threshold
    origin: dict[str, Any]
    localiser: Localiser | None = None
    thumbnails: UInt8[Tensor, "n s s"] = field(default_factory=lambda: torch.empty(0, THUMB, THUMB, dtype=torch.uint8))
    given: Calibration | None = None  # decides instead of the threshold of the fit

    def __post_init__(self) -> None:
        whole = {} if self.localiser else {NAME: self.recipe.score}
        self._fitted: dict[str, Fitted] = fit_scorings(whole, self.references)

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
        on_choice: Callable[[str], None] | None = None,
        on_images: OnImages | None = None,
    ) -> Detector:
        """Learn from good images; a part of them is held out of training and sets the threshold.

        With a folder the training is resumable: call again with the same arguments after any interruption.
        """
        data = good if isinstance(good, OneClass) else as_data(good)
        parts = sisters(data.name, data.train)
        learn, held_out = split(parts, holdout, seed=seed, least=wanted(false_calls))
        check_before(recipe, data.train, len(learn), false_calls)
        part = replace(data, train=data.train[learn])
        if on_choice is not None and describe(parts):
            on_choice(describe(parts))
        recipe = choose(recipe, part, seed=seed, device=device, on_choice=on_choice)
        task = teaching(recipe, part, seed=seed, device=device, folder=folder, on_images=on_images)
        run = Run(recipe, task, device=device, folder=folder, checkpoint_seconds=checkpoint_seconds)
        check_tiles(recipe, network_of(run), task.preprocessing.size)
        for progress in run:
            if on_progress is not None:
                on_progress(progress, run)
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
        detector = cls.remember(recipe, run, part, origin, seed=seed, parts=parts[learn])
        detector.threshold = threshold_of(detector.score(data.train[held_out]), false_calls, parts[held_out])
        return detector

    @classmethod
    def remember(
        cls,
        recipe: Recipe,
        run: Run,
        good: OneClass,
        origin: dict[str, Any],
        *,
        seed: int,
        parts: Int[Tensor, " n"] | None = None,
    ) -> Detector:
        """A trained network with the good images it is to compare with; its threshold is still to be set.

        `parts` numbers the part each image shows; without it that is looked for.
        """
        network, preprocessing = network_of(run), run.task.preprocessing
        unset = Threshold(math.inf, 1.0, 0)
        if not isinstance(recipe.tiling, Grid):
            assert isinstance(network, Network)  # the backbones describe patches
            ready, _ = conditioned(recipe, good)
            references = reference_features(network.encoder, preprocessing, ready.train, recipe.score.turns)
            return cls(recipe, preprocessing, network, references, unset, origin, None, thumbnails(good.train))
        small = resize(good.train, preprocessing.size)
        origin = origin | {"grey": is_grey(small)}
        look = looker_of(recipe, network, preprocessing, grey=origin["grey"])
        seen = None
        if isinstance(look, CellLooker) and isinstance(run.task, CellTask):
            origin |= {"backbone": architecture(look.network.backbone), "licence": look.network.backbone.facts.licence}
            seen = look.kinds_from(run.task.good.features[: len(small)])  # further versions are only learnt from
        shown = sisters(good.name, good.train) if parts is None else parts
        localiser = fit_localiser(look, recipe.conditioning(small), recipe.memory, seed=seed, seen=seen, parts=shown)
        return cls(recipe, preprocessing, network, [], unset, origin, localiser, thumbnails(good.train))

    def score(
        self, images: UInt8[Tensor, "n c h w"], on_chunk: Callable[[int], None] | None = None
    ) -> Float[Tensor, " n"]:
        """The anomaly score of each image; up to rounding it does not depend on the images beside it."""
        check_images(images)
        if self.localiser is None:
            assert isinstance(self.network, Network)
            ready = self.recipe.conditioning(images).images
            scores = score_images(self.network.encoder, self.preprocessing, ready, self._fitted, on_chunk)[NAME]
        else:
            scores = torch.cat([torch.empty(0), *(self._looked(chunk, on_chunk)[2] for chunk in _chunks(images))])
        if not bool(scores.isfinite().all()):
            raise FirmError("a score is not finite, so nothing can be decided; fit the detector again")
        return scores

    def locate(self, images: UInt8[Tensor, "n c h w"], on_chunk: Callable[[int], None] | None = None) -> Located:
        """Scores, and a heat map over each image at the side the detector works at."""
        check_images(images)
        if self.localiser is None:
            raise FirmError("this detector looks at whole images and cannot say where; fit with --preset inspect")
        parts = []
        for chunk in _chunks(images):
            ready, cells, scores = self._looked(chunk, on_chunk)
            parts.append(Located(scores, ready.back(self.localiser.grid.maps(cells, *ready.images.shape[-2:]))))
        side = self.preprocessing.size
        return Located(
            torch.cat([torch.empty(0), *(one.scores for one in parts)]),
            torch.cat([torch.empty(0, side, side), *(one.maps for one in parts)]),
        )

    def _looked(
        self, images: UInt8[Tensor, "n c h w"], on_chunk: Callable[[int], None] | None
    ) -> tuple[Conditioned, Float[Tensor, "n r c"], Float[Tensor, " n"]]:
        """The images as they are looked at, the score of every patch, and that of every image."""
        assert self.localiser is not None
        ready = self.recipe.conditioning(resize(images, self.preprocessing.size))
        look = looker_of(self.recipe, self.network, self.preprocessing, grey=self.origin["grey"])
        seen = look(ready.images)
        cells = self.localiser.cells(seen, ready.foreground)
        if on_chunk is not None:
            on_chunk(len(images))
        return ready, cells, self.localiser.scores(cells, seen)

    def predict(self, images: UInt8[Tensor, "n c h w"]) -> Int[Tensor, " n"]:
        """+1 for normal and -1 for anomalous, as the paper labels them."""
        return torch.where(self.score(images) > self.limit, -1, 1)

    @property
    def limit(self) -> float:
        """The score above which an image is anomalous."""
        return self.threshold.value if self.given is None else self.given.fail

    @property
    def calibration(self) -> Calibration:
        """By which it decides: the one it was given, else the threshold of its fit."""
        return self.given or of_threshold(self.threshold, self.id, maps=self.localiser is not None)

    @cached_property
    def id(self) -> str:
        """Names the model by all that decides a score; thresholds are none of it, and no setting at its default is."""
        how = {"recipe": sparse(self.recipe), "preprocessing": sparse(self.preprocessing)}
        seen = {name: self.origin.get(name) for name in ("grey", "backbone")}
        return storage.digest(self.tensors(), json.dumps(how | seen, sort_keys=True))[:16]

    def inspect(self, source: Source, *, name: str = "") -> Verdict:
        """A file, its bytes, an array or a Pillow image judged: PASS, REVIEW or FAIL, and where.

        `name` is what the image is called; unless given its path.
        """
        picture = decode(source, self.preprocessing.depth)
        pixels, by = self.preprocessing.read(picture), self.calibration
        regions: tuple[Region, ...] = ()
        if self.localiser is None or by.pixel is None:
            score = float(self.score(pixels))
        else:
            found = self.locate(pixels)
            score, regions = float(found.scores), regions_of(found.maps[0], by.pixel, *picture.shape[:2])
        called = name or (str(source) if isinstance(source, Path | str) else "image")
        return Verdict(called, score, by.verdict(score), regions, self.id, by.id, by.review, by.fail)

    def save(self, path: Path | str) -> None:
        """One safetensors file with a JSON card, written atomically; a calibration it was given goes beside it."""
        storage.save_tensors(Path(path), self.tensors(), self.card(), kind="detector", schema=SCHEMA)
        if self.given is not None:
            write_calibration(beside(path), self.given)
        elif beside(path).exists():
            try:
                read_calibration(beside(path), model=self.id)
            except FirmError as error:  # what was there before had it; loading will refuse
                warnings.warn(str(error), stacklevel=2)

    def tensors(self) -> dict[str, Tensor]:
        """All numbers that are to be saved."""
        tensors = {f"network.{name}": value for name, value in self.network.state_dict().items()}
        tensors |= {f"references.{turn}": value for turn, value in enumerate(self.references)}
        tensors["thumbnails"] = self.thumbnails
        if self.localiser is not None:
            tensors |= {f"localiser.{name}": value for name, value in self.localiser.tensors().items()}
        return tensors

    def card(self) -> dict[str, Any]:
        """What the file says of itself."""
        return {
            "recipe": to_json(self.recipe),
            "preprocessing": asdict(self.preprocessing),
            "threshold": asdict(self.threshold),
            "origin": self.origin,
        }

    @classmethod
    def load(
        cls, path: Path | str, *, device: torch.device | str = "cpu", calibration: Path | str | bool = True
    ) -> Detector:
        """Read a saved detector; it decides as it did when it was saved, or by the calibration beside it.

        `calibration` names another file to decide by; False: the threshold of the fit, whatever lies beside.
        """
        tensors, card = storage.load_tensors(Path(path), kind="detector", schema=SCHEMA)
        try:
            recipe = from_json(card["recipe"])
            network = _network(recipe, card["origin"], _under("network.", tensors)).to(device)
            parts, patches = _under("references.", tensors), _under("localiser.", tensors)
            detector = cls(
                recipe,
                Preprocessing.from_card(card["preprocessing"]),
                network,
                [parts[str(turn)] for turn in range(len(parts))],
                Threshold(**card["threshold"]),
                card["origin"],
                _localiser(recipe, patches),
                tensors.get("thumbnails", torch.empty(0, THUMB, THUMB, dtype=torch.uint8)),
            )
        except (KeyError, TypeError, RuntimeError) as error:
            raise FirmError(f"{path} is not a complete detector ({error}); fit and save it again") from error
        file = beside(path) if isinstance(calibration, bool) else Path(calibration)
        if calibration is not False and (calibration is not True or file.exists()):
            detector.given = read_calibration(file, model=detector.id)
        return detector


def as_data(good: UInt8[Tensor, "n c h w"]) -> OneClass:
    """Bare good images as a data set without a test part."""
    check_images(good)
    return OneClass("images", good, good[:0], torch.zeros(0, dtype=torch.bool), size=min(SIZE, good.shape[-1]))


def thumbnails(images: UInt8[Tensor, "n c h w"]) -> UInt8[Tensor, "n s s"]:
    """The images in grey and as small as tells their overall look."""
    small = resize(images, THUMB).float().mean(1)
    return small.round().to(torch.uint8)


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


def check_tiles(recipe: Recipe, network: Network | Adapted, side: int) -> None:
    """What patches ask of the side of the images is said before the training, too."""
    if isinstance(recipe.tiling, Grid):
        recipe.tiling.places(side, side)
        if recipe.tiling.dense and isinstance(network, Network):
            check_dense(network.encoder, recipe.tiling, side, side)


def _chunks(images: UInt8[Tensor, "n c h w"]) -> Sequence[UInt8[Tensor, "m c h w"]]:
    """Some images at a time; none of none, where `split` gives an empty part."""
    return images.split(CHUNK) if len(images) else ()


def network_of(run: Run) -> Network | Adapted:
    """What a run has trained, together with what it was trained behind."""
    trained = run.state.network
    if isinstance(run.task, CellTask):
        assert isinstance(trained, Adaptor)
        return Adapted(run.task.backbone, trained)
    assert isinstance(trained, Network)
    return trained


def _network(recipe: Recipe, origin: dict[str, Any], tensors: dict[str, Tensor]) -> Network | Adapted:
    """The network a file holds; a pretrained backbone is in it whole, so nothing needs to be installed."""
    if not recipe.pretrained.name:
        network = Network(recipe.encoder)
        network.load_state_dict(tensors)
        return arranged(network)
    backbone = rebuild(origin["backbone"], _under("backbone.", tensors))
    parts = _under("adaptor.", tensors)
    adaptor = Adaptor(len(parts["mean"]), recipe.pretrained, recipe.encoder.head)
    adaptor.load_state_dict(parts)
    return Adapted(backbone, adaptor)


def _localiser(recipe: Recipe, tensors: dict[str, Tensor]) -> Localiser | None:
    if not isinstance(recipe.tiling, Grid):
        return None
    return Localiser.from_tensors(tensors, recipe.tiling, recipe.memory, kinds_of(recipe.features))


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
