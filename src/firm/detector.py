"""Detector: fit on good images, score, predict, save and load.

>>> detector = Detector.fit(good, recipe=FAST, seed=0)      # doctest: +SKIP
>>> detector.predict(suspects)                              # +1 normal, -1 anomalous   # doctest: +SKIP
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

import firm
from firm import storage
from firm.adaptor import Adapted, Adaptor, CellLooker
from firm.backbones import FACTS, architecture, load_backbone, rebuild
from firm.bank import cost
from firm.batching import steps_per_epoch
from firm.calibration import Threshold, threshold_of
from firm.cells import CellTask, cell_steps
from firm.choosing import choose, within
from firm.conditioning import Conditioned
from firm.data.folder import SIZE
from firm.embedding import OnImages, disk_costs, teaching
from firm.encoder import Network, ResNet18, arranged
from firm.fitting import conditioned, looker_of
from firm.foreground import foreground, rule_for
from firm.holdout import split, wanted
from firm.images import Preprocessing, resize
from firm.localiser import CHUNK, Localiser, Looker, check_dense, fit_localiser, is_grey, kinds_of, metric_of
from firm.recipes.presets import FAST
from firm.recipes.recipe import Recipe, from_json, to_json
from firm.runs import Run
from firm.scores import Fitted, fit_scorings, reference_features, score_images
from firm.sisters import describe, sisters
from firm.streams import stream
from firm.tiling import Grid
from firm.training import Progress
from firm.types import FirmError, Focus, Located, OneClass
from firm.views import PatchPairs

SCHEMA = 1
THUMB = 16  # side of the shrunken good images an evaluation compares with
FORETOLD = 64  # good images in which patches are tried before a fit
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
        return torch.where(self.score(images) > self.threshold.value, -1, 1)

    def save(self, path: Path | str) -> None:
        """One safetensors file with a JSON card, written atomically."""
        tensors = {f"network.{name}": value for name, value in self.network.state_dict().items()}
        tensors |= {f"references.{turn}": value for turn, value in enumerate(self.references)}
        tensors["thumbnails"] = self.thumbnails
        if self.localiser is not None:
            tensors |= {f"localiser.{name}": value for name, value in self.localiser.tensors().items()}
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
            network = _network(recipe, card["origin"], _under("network.", tensors)).to(device)
            parts, patches = _under("references.", tensors), _under("localiser.", tensors)
            return cls(
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


def foretell(
    recipe: Recipe, data: OneClass, *, holdout: float = 0.1, false_calls: float = 0.05, seed: int = 0
) -> list[str]:
    """What a fit will take and has to work with, in sentences to be read before it; too few images are said at once."""
    learn, _ = split(sisters(data.name, data.train), holdout, seed=seed, least=wanted(false_calls))
    told = [
        f"training: {len(learn)} good images, {recipe.training.epochs} epochs of {_steps(recipe, len(learn))} steps"
    ]
    if isinstance(recipe.tiling, Grid):
        side = min(recipe.size or data.size, data.train.shape[-1])
        side -= side % recipe.tiling.stride if recipe.pretrained.name else 0  # as preprocessing_of
        small = resize(data.train[learn], side)
        numbers = _numbers(recipe, recipe.tiling, small)
        if recipe.pretrained.name:
            told += disk_costs(recipe, len(learn), (*recipe.tiling.shape(side, side), numbers["backbone"]))
        told += _banks(recipe, recipe.tiling, small, numbers)
        if isinstance(recipe.views, PatchPairs) and not recipe.pretrained.name:
            told.append(_offered(recipe, recipe.views, data.name, small, seed=seed))
    return told


def _steps(recipe: Recipe, images: int) -> int:
    """Of an epoch on so many good images."""
    if recipe.pretrained.name:
        return cell_steps(images * recipe.pretrained.versions, recipe.training.batch)
    settled = within(recipe, images) if recipe.automatic else recipe
    return steps_per_epoch(images, recipe.outliers.per_inlier, settled.training.batch)


def _banks(recipe: Recipe, grid: Grid, small: UInt8[Tensor, "n c h w"], numbers: dict[str, int]) -> list[str]:
    """The size of each bank of patches."""
    shape = grid.shape(*small.shape[-2:])
    told = []
    for kind in kinds_of(recipe.features):
        memory = metric_of(recipe.memory, kind)
        told.append(f"{kind} {cost(len(small), *shape, memory.keys(torch.zeros(1, numbers[kind])).shape[1], memory)}")
    return told


def _numbers(recipe: Recipe, grid: Grid, small: UInt8[Tensor, "n c h w"]) -> dict[str, int]:
    """How many numbers describe a patch: known of a backbone, and of an encoder told by a single patch."""
    kinds, settings = kinds_of(recipe.features), recipe.pretrained
    if settings.name:
        facts = FACTS.get(settings.name) or load_backbone(settings.name, deepest=1).facts
        described = sum(facts.channels[stage - 1] for stage in settings.stages_of(facts))
        return {"encoder": settings.out, "backbone": described}
    with torch.device("meta"):
        encoder = ResNet18(recipe.encoder)
    look = Looker(encoder.to_empty(device="cpu"), Preprocessing(grid.size), grid, kinds, is_grey(small))
    return {kind: patch.shape[-1] for kind, patch in look(small[:1, :, : grid.size, : grid.size]).items()}


def _offered(recipe: Recipe, pairs: PatchPairs, name: str, small: UInt8[Tensor, "n c h w"], *, seed: int) -> str:
    """How many good images have a patch with enough of the object; a pose still to be chosen changes it little."""
    rule = rule_for(name, small) if "foreground" in recipe.automatic else recipe.conditioning.foreground
    masks = foreground(small[:FORETOLD], rule)
    part = pairs.acceptance(Focus(masks, torch.zeros_like(masks)), rng=stream(seed, "acceptance"))
    enough = f"{100 * pairs.fore:g} % object (views.fore)"
    return f"patches: {100 * part:.0f} % of the good images offer one that is {enough}"


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
