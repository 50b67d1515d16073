"""Detector: fit on good images, score, predict, save and load.

>>> detector = Detector.fit("parts/good")                   # doctest: +SKIP
>>> detector.inspect("new/017.png").verdict                 # PASS, REVIEW or FAIL   # doctest: +SKIP
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from firm.adaptor import Adapted, CellLooker
from firm.backbones import architecture
from firm.calibration import Calibration, Threshold, Wishes, calibration_of, of_threshold
from firm.calibration_file import beside, read_calibration, write_calibration
from firm.cells import CellTask
from firm.choosing import choose
from firm.data import shows_parts
from firm.drift import brightness
from firm.embedding import OnImages, teaching
from firm.encoder import Network
from firm.examples import NONE, Examples
from firm.fitting import check_before, check_images, check_tiles, conditioned, data_of, looker_of, side_for
from firm.foretelling import MEMORY, most_images
from firm.holdout import split, usual, wanted
from firm.ignoring import scaled
from firm.images import Preprocessing, Source, decode, resize
from firm.leaks import THUMB, copies, thumbnails
from firm.localiser import CHUNK, Localiser, Look, fit_localiser, is_grey
from firm.model_folder import read_model, write_model
from firm.preferring import prefer
from firm.recipes import presets
from firm.recipes.recipe import Recipe, from_json, sparse, to_json
from firm.restoring import localiser_from, network_from, network_of, under
from firm.runs import Run
from firm.scores import Fitted, fit_scorings, reference_features, score_images
from firm.sisters import describe, sisters
from firm.storage import digest
from firm.tiling import Grid
from firm.timing import duration
from firm.training import Progress
from firm.types import FirmError, Located, OneClass
from firm.verdicts import Examined, Region, Verdict, regions_of

NAME = "image"  # the one scoring a detector holds


@dataclass
class Detector:
    """A trained encoder, the embeddings of its good images, and by what it decides. Higher scores are more anomalous.

    Whole images are compared as one (`references`), or patch by patch (`localiser`), which also says where.
    """

    recipe: Recipe
    preprocessing: Preprocessing
    network: Network | Adapted
    references: list[Tensor]  # embeddings of the good images, one set per turn of the score
    origin: dict[str, Any]
    localiser: Localiser | None = None
    thumbnails: UInt8[Tensor, "n s s"] = field(default_factory=lambda: torch.empty(0, THUMB, THUMB, dtype=torch.uint8))
    examples: Examples = NONE
    calibration: Calibration | None = None
    ignored: Bool[Tensor, "s s"] | None = None  # never decides: pixels of images as they come
    usual: UInt8[Tensor, "k s s"] | None = None  # what aligned parts show; in the place of what is ignored

    def __post_init__(self) -> None:
        whole = {} if self.localiser else {NAME: self.recipe.score}
        self._fitted: dict[str, Fitted] = fit_scorings(whole, self.references)

    @classmethod
    def fit(
        cls,
        good: Path | str | UInt8[Tensor, "n c h w"] | OneClass,
        *,
        recipe: Recipe | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        folder: Path | None = None,
        holdout: float | None = None,
        false_calls: float = 0.05,
        fail: float = 0.01,
        checkpoint_seconds: float = 30.0,
        on_progress: Callable[[Progress, Run], None] | None = None,
        on_choice: Callable[[str], None] | None = None,
        on_images: OnImages | None = None,
        parts: Int[Tensor, " n"] | None = None,
        ignored: Bool[Tensor, "a b"] | None = None,
        memory: float = MEMORY,
    ) -> Detector:
        """Learn from good images; a part of them is held out of training and sets the thresholds.

        Unless a recipe says otherwise parts, from a folder, by a name such as mvtec:screw or as `firm.load` gives them,
        are learnt patch by patch, as `firm fit` does it; a class of a semantic set and bare tensors as whole images.
        `false_calls` is the wished rate of good parts that do not PASS, `fail` of those that FAIL. With a folder the
        training is resumable: call again with the same arguments after any interruption. `parts`
        numbers the part each image shows; without it that is looked for. `ignored` pixels, of whole images at any size,
        never decide. Of a folder with more images than so many gigabytes of `memory` hold, some are drawn.
        """
        recipe = recipe or _usual_recipe(good)
        wishes, most = Wishes(false_calls=false_calls, fail=fail), most_images(recipe, side_for(recipe), memory)
        data = data_of(good, recipe, ignored, most=most)
        parts = sisters(data.name, data.train) if parts is None else parts
        holdout = usual(len(data.train), false_calls) if holdout is None else holdout
        learn, held_out = split(parts, holdout, seed=seed, least=wanted(false_calls))
        check_before(recipe, data, len(learn))
        part = replace(data, train=data.train[learn])
        if on_choice is not None and describe(parts):
            on_choice(describe(parts))
        recipe = choose(recipe, part, seed=seed, device=device, on_choice=on_choice)
        if on_choice is not None:
            on_choice(duration(recipe, part, held_out=len(held_out), seed=seed, device=device).sentence())
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
        recipe = prefer(recipe, network_of(run), task, seed=seed, on_choice=on_choice)
        origin = run.origin(data.name, len(learn))
        detector = cls.remember(recipe, run, part, origin, seed=seed, parts=parts[learn])
        detector.calibration = detector._calibrated(data.train[held_out], parts[held_out], wishes)
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
        """A trained network with the good images it is to compare with; it is still to be calibrated.

        `parts` numbers the part each image shows; without it that is looked for.
        """
        network, preprocessing = network_of(run), run.task.preprocessing
        if not isinstance(recipe.tiling, Grid):
            assert isinstance(network, Network)  # the backbones describe patches
            as_learnt = conditioned(recipe, good)[0].train
            references = reference_features(network.encoder, preprocessing, as_learnt, recipe.score.turns)
            return cls(recipe, preprocessing, network, references, origin, None, thumbnails(good.train))
        small = resize(good.train, preprocessing.size)
        ignored = None if good.ignored is None else scaled(good.ignored, *small.shape[-2:])
        origin = origin | {"grey": is_grey(small)}
        look = looker_of(recipe, network, preprocessing, grey=origin["grey"])
        shown = sisters(good.name, good.train) if parts is None else parts
        upright = recipe.conditioning(small, ignored)
        usual, seen = upright.usual(), None
        ready = upright.completed(usual)
        if isinstance(look, CellLooker) and isinstance(run.task, CellTask):
            origin |= {"backbone": architecture(look.network.backbone), "licence": look.network.backbone.facts.licence}
            features = run.task.good.features[: len(small)]  # further versions are only learnt from
            seen = look.seen(ready.images, features)
        localiser = fit_localiser(look, ready, recipe.memory, seed=seed, seen=seen, parts=shown)
        posed = replace(recipe.conditioning, light="none")(small).images
        thumbs, examples = thumbnails(good.train), Examples.of(posed.cpu())
        return cls(
            recipe, preprocessing, network, [], origin, localiser, thumbs, examples, ignored=ignored, usual=usual
        )

    def score(
        self, images: UInt8[Tensor, "n c h w"], on_chunk: Callable[[int], None] | None = None
    ) -> Float[Tensor, " n"]:
        """The anomaly score of each image; up to rounding it does not depend on the images beside it."""
        check_images(images)
        if self.localiser is not None:
            return torch.cat([torch.empty(0), *(self.look(chunk, on_chunk).scores for chunk in _chunks(images))])
        assert isinstance(self.network, Network)
        ready = self.recipe.conditioning(images).images
        return _finite(score_images(self.network.encoder, self.preprocessing, ready, self._fitted, on_chunk)[NAME])

    def locate(self, images: UInt8[Tensor, "n c h w"], on_chunk: Callable[[int], None] | None = None) -> Located:
        """Scores, and a heat map over each image at the side the detector works at."""
        check_images(images)
        looks = [self.look(chunk, on_chunk) for chunk in _chunks(images)]
        side = self.preprocessing.size
        return Located(
            torch.cat([torch.empty(0), *(one.scores for one in looks)]),
            torch.cat([torch.empty(0, side, side), *(self._maps(one) for one in looks)]),
        )

    def look(self, images: UInt8[Tensor, "n c h w"], on_chunk: Callable[[int], None] | None = None) -> Look:
        """Some images patch by patch."""
        if self.localiser is None:
            raise FirmError("this detector looks at whole images and cannot say where; fit with --preset inspect")
        upright = self.recipe.conditioning(resize(images, self.preprocessing.size), self.ignored)
        ready = upright.completed(self.usual)
        look = looker_of(self.recipe, self.network, self.preprocessing, grey=self.origin["grey"])
        seen = look(ready.images)
        cells = self.localiser.cells(seen, ready.foreground, ready.hidden())
        if on_chunk is not None:
            on_chunk(len(images))
        return Look(ready, seen, cells, _finite(self.localiser.scores(cells, seen)))

    def _maps(self, look: Look) -> Float[Tensor, "n h w"]:
        assert self.localiser is not None
        return look.ready.back(self.localiser.grid.maps(look.cells, *look.ready.images.shape[-2:]))

    def predict(self, images: UInt8[Tensor, "n c h w"]) -> Int[Tensor, " n"]:
        """+1 for what would PASS and -1 for the rest, as the paper labels them."""
        return torch.where(self.score(images) > self.limit, -1, 1)

    @property
    def limit(self) -> float:
        """The score above which an image does not PASS."""
        return self.decides.review

    @property
    def decides(self) -> Calibration:
        """The calibration, where there is one."""
        if self.calibration is None:
            raise FirmError("this detector has no calibration to decide by; run firm calibrate with good images")
        return self.calibration

    @cached_property
    def id(self) -> str:
        """Names the model by all that decides a score; thresholds are none of it, and no setting at its default is."""
        how = {"recipe": sparse(self.recipe), "preprocessing": sparse(self.preprocessing)}
        seen = {name: self.origin.get(name) for name in ("grey", "backbone")}
        shown = ("thumbnails", "examples.")
        deciding = {name: value for name, value in self.tensors().items() if not name.startswith(shown)}
        return digest(deciding, json.dumps(how | seen, sort_keys=True))[:16]

    def inspect(self, source: Source, *, name: str = "") -> Verdict:
        """A file, its bytes, an array or a Pillow image judged: PASS, REVIEW or FAIL, and where.

        `name` is what the image is called; unless given its path.
        """
        return self.examine(source, name=name).verdict

    def examine(self, source: Source, *, name: str = "") -> Examined:
        """The same with all that the verdict rests on."""
        picture = decode(source, self.preprocessing.depth)
        pixels, by, look, heat = self.preprocessing.read(picture), self.decides, None, None
        regions: tuple[Region, ...] = ()
        if self.localiser is None:
            score = float(self.score(pixels))
        else:
            look = self.look(pixels)
            heat, score = self._maps(look)[0], float(look.scores)
            regions = () if by.pixel is None else regions_of(heat, by.pixel, *picture.shape[:2])
        called = name or (str(source) if isinstance(source, Path | str) else "image")
        verdict = Verdict(called, score, by.verdict(score), regions, self.id, by.id, by.review, by.fail)
        return Examined(verdict, picture, float(brightness(pixels, self.ignored)), heat, look)

    def calibrate(
        self,
        good: UInt8[Tensor, "n c h w"],
        *,
        name: str = "images",
        defects: UInt8[Tensor, "m c h w"] | None = None,
        wishes: Wishes | None = None,
        on_doubt: Callable[[str], None] | None = None,
        on_image: Callable[[int], None] | None = None,
    ) -> Calibration:
        """Decide from now on by these good images, without training; `name` is that of the images.

        Images that were learnt from are left out, for they score too low. Sisters among the others count as one part.
        Defects move no threshold; what is missed of them is told.
        """
        told = on_doubt or (lambda sentence: None)
        check_images(good)
        fresh = good[~copies(good, self.thumbnails)]
        if len(fresh) < len(good):
            told(f"{len(good) - len(fresh)} of the {len(good)} good images were learnt from and are left out")
        if not len(fresh):
            raise FirmError("there is no good image that was not learnt from; give others of new parts")
        parts = sisters(name, fresh)
        if describe(parts):
            told(describe(parts))
        self.calibration = self._calibrated(fresh, parts, wishes, defects, on_image)
        return self.calibration

    def _calibrated(
        self,
        good: UInt8[Tensor, "n c h w"],
        parts: Int[Tensor, " n"],
        wishes: Wishes | None,
        defects: UInt8[Tensor, "m c h w"] | None = None,
        on_image: Callable[[int], None] | None = None,
    ) -> Calibration:
        scores, peaks = self.measured(good, on_image)
        wrong = None if defects is None else self.measured(defects, on_image)[0]
        light = brightness(good, self.ignored)
        return calibration_of(
            scores, model=self.id, peaks=peaks, parts=parts, light=light, defects=wrong, wishes=wishes
        )

    def measured(
        self, images: UInt8[Tensor, "n c h w"], on_image: Callable[[int], None] | None = None
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"] | None]:
        """The score of each image and the maximum of its map, None without maps.

        One at a time, as they are inspected: so the images of a calibration lie exactly on their side of it.
        """
        if self.localiser is None:
            return torch.cat([torch.empty(0), *(self.score(image[None], on_image) for image in images)]), None
        found = [self.locate(image[None], on_image) for image in images]
        peaks = [one.maps.amax(dim=(1, 2)) for one in found]
        return torch.cat([torch.empty(0), *(one.scores for one in found)]), torch.cat([torch.empty(0), *peaks])

    def save(self, path: Path | str) -> None:
        """A folder of a card, weights and the calibration; what was there before is replaced."""
        write_model(Path(path), self.tensors(), self.card())
        if self.calibration is not None:
            write_calibration(beside(path), self.calibration)
        else:
            beside(path).unlink(missing_ok=True)  # that of the detector that was there

    def tensors(self) -> dict[str, Tensor]:
        """All numbers that are to be saved."""
        tensors = {f"network.{name}": value for name, value in self.network.state_dict().items()}
        tensors |= {f"references.{turn}": value for turn, value in enumerate(self.references)}
        tensors["thumbnails"] = self.thumbnails
        tensors |= {f"examples.{name}": value for name, value in self.examples.tensors().items()}
        if self.localiser is not None:
            tensors |= {f"localiser.{name}": value for name, value in self.localiser.tensors().items()}
        if self.ignored is not None:
            tensors["ignored"] = self.ignored
        if self.usual is not None:
            tensors["usual"] = self.usual
        return tensors

    def card(self) -> dict[str, Any]:
        """What the file says of itself."""
        return {
            "recipe": to_json(self.recipe),
            "preprocessing": asdict(self.preprocessing),
            "origin": self.origin,
        }

    @classmethod
    def load(
        cls, path: Path | str, *, device: torch.device | str = "cpu", calibration: Path | str | bool = True
    ) -> Detector:
        """Read a saved detector; it decides as it did when it was saved, or by the calibration beside it.

        `calibration` names another file to decide by; False: none is read.
        """
        tensors, card = read_model(Path(path))
        try:
            recipe = from_json(card["recipe"])
            network = network_from(recipe, card["origin"], under("network.", tensors)).to(device)
            parts, patches, shown = (under(f"{name}.", tensors) for name in ("references", "localiser", "examples"))
            detector = cls(
                recipe,
                Preprocessing.from_card(card["preprocessing"]),
                network,
                [parts[str(turn)] for turn in range(len(parts))],
                card["origin"],
                localiser_from(recipe, patches),
                tensors.get("thumbnails", torch.empty(0, THUMB, THUMB, dtype=torch.uint8)),
                Examples(**shown) if shown else NONE,
                ignored=tensors.get("ignored"),
                usual=tensors.get("usual"),
            )
            if "threshold" in card:  # schema 1
                bound = Threshold(**card["threshold"])
                detector.calibration = of_threshold(bound, detector.id, maps=detector.localiser is not None)
        except (KeyError, TypeError, RuntimeError) as error:
            raise FirmError(f"{path} is not a complete detector ({error}); fit and save it again") from error
        file = beside(path) if isinstance(calibration, bool) else Path(calibration)
        if calibration is not False and (calibration is not True or file.exists()):
            detector.calibration = read_calibration(file, model=detector.id)
        return detector


def _usual_recipe(good: Path | str | Tensor | OneClass) -> Recipe:
    if isinstance(good, Tensor):
        return presets.FAST
    return presets.usual() if shows_parts(good.name if isinstance(good, OneClass) else str(good)) else presets.FAST


def _finite(scores: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    if not bool(scores.isfinite().all()):
        raise FirmError("a score is not finite, so nothing can be decided; fit the detector again")
    return scores


def _chunks(images: UInt8[Tensor, "n c h w"]) -> Sequence[UInt8[Tensor, "m c h w"]]:
    """Some images at a time; none of none, where `split` gives an empty part."""
    return images.split(CHUNK) if len(images) else ()
