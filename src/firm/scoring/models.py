"""What a detector decides by: one protocol, and its two implementations for whole images and for patches.

ImageModel   an image is compared with the embeddings of the good ones: a score, and no map
PatchModel   each patch is compared with the patches of the good ones: a score, and a map of where

Section 5 of the paper: an image scores as its worst patch, and the grid of patch scores is spread over the pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int, Shaped, UInt8
from torch import Tensor, nn

from firm.errors import ModelFileError, SettingError
from firm.images.alignment import Conditioned, Conditioning
from firm.images.preprocess import Preprocessing, resize
from firm.networks.adaptor import ImageNetwork
from firm.runtime.random import stream
from firm.scoring.image_scores import Scoring, fit_scorings, score_images
from firm.scoring.memory import Memory, memory_for
from firm.scoring.patch_bank import BY_MEAN, Bank, PatchReference, Prototype, remember
from firm.scoring.patch_features import CHUNK, PIXELS, BackboneFeatures, EncoderFeatures, Features, extract
from firm.scoring.patch_grid import Grid

NAME = "image"  # the one score of an ImageModel
SMALLEST = 1e-6  # part of a patch: less than any pixel

OnChunk = Callable[[int], None]  # called with the number of images just done
Images = UInt8[Tensor, "n c h w"]
Scores = Float[Tensor, " n"]
Masks = Bool[Tensor, "n h w"]
Cells = Float[Tensor, "n r c"]
Parts = Int[Tensor, " n"]


@dataclass(frozen=True)
class Neighbour:
    """The good image that is most like an image at its worst patch, and how to move it over that image."""

    image: int  # its number among the good images
    shift: tuple[int, int]  # px to the right and down, in the aligned frame
    frame: Float[Tensor, "2 3"] | None  # from the image to the aligned frame; None: not aligned


class Patches(NamedTuple):
    """What a PatchModel makes of aligned images: the score of each, that of every patch, the features behind them."""

    scores: Scores
    cells: Cells
    features: Features


@dataclass(frozen=True)
class Located:
    """The score of every image and its anomaly map; without maps these are empty."""

    scores: Scores
    maps: Float[Tensor, "n h w"]


@dataclass(frozen=True)
class Examination(Located):
    """A few images examined: their scores and maps, and what these rest on."""

    aligned: Conditioned | None = None
    patches: Patches | None = None


class Model(Protocol):
    """A fitted model. Higher scores are more anomalous; up to rounding a score does not depend on the other images.

    What has a body is the answer of a model without maps.
    """

    preprocessing: Preprocessing
    has_maps: bool

    @property
    def ignored(self) -> Bool[Tensor, "a b"] | None:
        """Pixels that never decide, of images as they come."""

    def score(self, images: Images, on_chunk: OnChunk | None = None) -> Scores:
        """The anomaly score of each image."""

    def align(self, images: Images) -> Conditioned:
        """The images as their features are computed."""

    def score_aligned(self, aligned: Conditioned, on_chunk: OnChunk | None = None) -> Scores:
        """The scores of images that are aligned already."""

    def locate(self, images: Images, on_chunk: OnChunk | None = None) -> Located:
        """Scores, and a map over each image; of a model without maps they are empty."""

    def examine(self, images: Images) -> Examination:
        """The same of a few images, with what the scores rest on."""

    def nearest(self, examination: Examination) -> Neighbour | None:
        """The good image to show beside the first one examined; None where the model cannot tell."""
        return None

    def describe(self) -> dict[str, Any]:
        """What the card must say, beside the recipe, to build the model again."""
        return {}

    def pictures(self, images: Images, aligned: Conditioned | None) -> UInt8[Tensor, "_ c _ _"]:
        """Of the good images, what `nearest` shows; none where it shows nothing."""
        return images[:0]

    def baseline(self, memory: Memory, aligned: Conditioned | None, parts: Parts, *, seed: int) -> Model | None:
        """The same model on the plain pixels of good images; None where there is no other."""
        return None

    def state_dict(self) -> dict[str, Tensor]:
        """All that is to be saved, as of any nn.Module."""


class ImageModel(nn.Module, Model):
    """Whole images compared by their embeddings: of the encoder, or of a frozen backbone with an adaptor."""

    has_maps = False
    ignored: Bool[Tensor, "a b"] | None = None

    def __init__(
        self,
        network: ImageNetwork,
        preprocessing: Preprocessing,
        conditioning: Conditioning,
        scoring: Scoring,
        references: list[Float[Tensor, "n d"]],
    ) -> None:
        super().__init__()
        self.network, self.preprocessing, self.conditioning = network, preprocessing, conditioning
        self.scoring = scoring
        for turn, embeddings in enumerate(references):
            self.register_buffer(f"references_{turn}", embeddings)

    def forward(self, images: Images, on_chunk: OnChunk | None = None) -> Scores:
        """Aligned images in, scores out."""
        references = [self.get_buffer(f"references_{turn}").cpu() for turn in range(self.scoring.turns)]
        fitted = fit_scorings({NAME: self.scoring}, references)  # quick, and always of the buffers as they are
        return _finite(score_images(self.network.encoder, self.preprocessing, images, fitted, on_chunk)[NAME])

    def score(self, images: Images, on_chunk: OnChunk | None = None) -> Scores:
        return self.score_aligned(self.align(images), on_chunk)

    def align(self, images: Images) -> Conditioned:
        return self.conditioning(images)

    def score_aligned(self, aligned: Conditioned, on_chunk: OnChunk | None = None) -> Scores:
        scores: Scores = self(aligned.images, on_chunk)
        return scores

    def locate(self, images: Images, on_chunk: OnChunk | None = None) -> Located:
        return Located(self.score(images, on_chunk), torch.empty(len(images), 0, 0))

    def examine(self, images: Images) -> Examination:
        return Examination(self.score(images), torch.empty(len(images), 0, 0))

    def describe(self) -> dict[str, Any]:
        return self.network.describe()


class PatchScorer(nn.Module):
    """Banks of good patches, one per kind of feature; all tensors are buffers, so it moves to a device."""

    present: Float[Tensor, "r c"]  # how much of each cell is object in good images

    def __init__(self, grid: Grid, banks: Mapping[str, PatchReference], present: Float[Tensor, "r c"]) -> None:
        super().__init__()
        self.grid = grid
        self.banks = nn.ModuleDict(banks)
        self.register_buffer("present", present)

    @classmethod
    def fit(
        cls,
        grid: Grid,
        features: Features,
        aligned: Conditioned,
        memory: Memory,
        *,
        seed: int,
        parts: Parts | None = None,
    ) -> PatchScorer:
        """Remember the patches of good images but those wholly hidden; `parts` numbers the part each image shows."""
        hidden = aligned.hidden()
        free = None if hidden is None else grid.parts(~hidden)
        visible = None if free is None else free > 0
        present, weight, banks = torch.zeros(next(iter(features.values())).shape[1:3]), None, {}
        if memory.neighbourhood >= 0:
            share = grid.parts(aligned.foreground)
            present = share.mean(0) if free is None else share.sum(0) / free.sum(0).clamp(min=SMALLEST)
            weight = (present / grid.min_foreground).clamp(max=1) if grid.min_foreground else None
        for kind, values in features.items():
            rng = stream(seed, "bank", kind)
            banks[kind] = remember(kind, values, memory, rng=rng, parts=parts, visible=visible, weight=weight)
        return cls(grid, banks, present)

    def of(self, kinds: Iterable[str], grid: Grid | None = None) -> PatchScorer:
        """The same banks, of some kinds of features only, or read out by another grid."""
        return PatchScorer(grid or self.grid, {kind: self.references[kind] for kind in kinds}, self.present)

    @property
    def references(self) -> dict[str, PatchReference]:
        """What the patches are compared with, by the kind of feature."""
        return {kind: bank for kind, bank in self.banks.items() if isinstance(bank, PatchReference)}

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.banks)

    def cells(self, features: Features, foreground: Masks, hidden: Masks | None = None) -> Cells:
        """The anomaly score of every patch: the mean over the kinds of features, weighted by how much object it shows.

        A patch counts in full if `tiling.min_foreground` of it is object, here or at this place in the good images, and
        never more than the part of it that is not hidden. `tiling.surroundings` adds the mean score around.
        """
        weight = torch.ones((), device=self.present.device)
        if self.grid.min_foreground or hidden is not None:
            weight = self._object_weight(foreground, hidden).to(weight.device)
        needed = weight > 0 if weight.dim() else None
        scores = torch.stack([bank.score(features[kind], needed) for kind, bank in self.references.items()]).mean(0)
        if needed is not None:
            scores = scores.masked_fill(~needed, 0).clamp(min=0) * weight
        return scores + self.grid.surrounding(scores) * weight if self.grid.surroundings else scores

    def scores(self, cells: Cells, features: Features | None = None) -> Scores:
        """Of an image its worst patch, or the mean of its `tiling.top_patches` worst, weighed by `memory.reweight`."""
        flat, banks = cells.flatten(1), self.references
        worst, places = flat.topk(min(self.grid.top_patches, flat.shape[1]), dim=1)
        if any(bank.memory.reweight for bank in banks.values()):
            if features is None:
                raise SettingError("memory.reweight weighs patches by their features; pass the features, too")
            image, cell = torch.arange(len(places)).repeat_interleave(places.shape[1]), places.flatten()
            weights = [bank.weights(features[kind].flatten(1, 2)[image, cell], cell) for kind, bank in banks.items()]
            worst = worst * torch.stack(weights).mean(0).view_as(places)
        return worst.mean(1)

    def maps(self, cells: Cells, aligned: Conditioned) -> Float[Tensor, "n h w"]:
        """A score for every pixel of the images as they came, however they were aligned."""
        return aligned.back(self.grid.maps(cells, *aligned.images.shape[-2:]))

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], grid: Grid, memory: Memory, kinds: Iterable[str]) -> PatchScorer:
        """The scorer whose state dict this is."""
        family = {kind: Prototype if kind == BY_MEAN else Bank for kind in kinds}
        banks = {kind: family[kind](memory_for(memory, kind), under(f"banks.{kind}.", tensors)) for kind in family}
        return cls(grid, banks, tensors["present"])

    def _object_weight(self, foreground: Masks, hidden: Masks | None) -> Cells:
        """How much every patch counts, 0 to 1."""
        free = torch.ones(()) if hidden is None else self.grid.parts(~hidden)
        if not self.grid.min_foreground:
            return (free > 0).float()
        share = torch.maximum(self.grid.parts(foreground), self.present.cpu())
        # the good parts may have been elsewhere under the mask
        return (torch.minimum(share, free) / self.grid.min_foreground).clamp(max=1)


class PatchModel(nn.Module, Model):
    """Patches compared with the banks of good patches; network, banks and masks move to a device together."""

    has_maps = True
    ignore_mask: Bool[Tensor, "a b"] | None
    typical: UInt8[Tensor, "k a b"] | None  # what aligned parts show, in the place of ignored pixels

    def __init__(
        self,
        extractor: EncoderFeatures | BackboneFeatures,
        preprocessing: Preprocessing,
        conditioning: Conditioning,
        scorer: PatchScorer,
        *,
        ignored: Bool[Tensor, "a b"] | None = None,
        typical: UInt8[Tensor, "k a b"] | None = None,
    ) -> None:
        super().__init__()
        self.network = extractor.network
        self.extractor, self.scorer = extractor, scorer
        self.preprocessing, self.conditioning = preprocessing, conditioning
        self.register_buffer("ignore_mask", ignored)
        self.register_buffer("typical", typical)

    @classmethod
    def fit(
        cls,
        extractor: EncoderFeatures | BackboneFeatures,
        preprocessing: Preprocessing,
        conditioning: Conditioning,
        memory: Memory,
        aligned: Conditioned,
        *,
        seed: int,
        parts: Parts | None = None,
        cells: Float[Tensor, "n r c d"] | None = None,
        typical: UInt8[Tensor, "k a b"] | None = None,
    ) -> PatchModel:
        """Remember the patches of aligned good images; `cells` are their backbone features, where these are known."""
        if cells is not None and isinstance(extractor, BackboneFeatures):
            features = extractor.from_stored(aligned.images, cells[: len(aligned.images)])
        else:
            features = extract(extractor, aligned.images)
        scorer = PatchScorer.fit(extractor.grid, features, aligned, memory, seed=seed, parts=parts)
        model = cls(extractor, preprocessing, conditioning, scorer, ignored=aligned.ignored, typical=typical)
        return model.to(next(model.parameters()).device)

    def forward(self, images: Images, foreground: Masks, hidden: Masks | None = None) -> Patches:
        """A few aligned images, where their objects are and what is hidden of them in, their scores out."""
        device = self.scorer.present.device
        features = {kind: values.to(device) for kind, values in self.extractor(images).items()}
        cells = self.scorer.cells(features, foreground, hidden)
        return Patches(_finite(self.scorer.scores(cells, features).cpu()), cells, features)

    @property
    def ignored(self) -> Bool[Tensor, "a b"] | None:
        """Pixels that never decide, on the CPU, where images are aligned."""
        return None if self.ignore_mask is None else self.ignore_mask.cpu()

    def score(self, images: Images, on_chunk: OnChunk | None = None) -> Scores:
        parts = [self._patches(self.align(chunk)).scores for chunk in _chunks(images, on_chunk)]
        return torch.cat([torch.empty(0), *parts])

    def locate(self, images: Images, on_chunk: OnChunk | None = None) -> Located:
        scores, maps = [torch.empty(0)], [torch.empty(0, *self.preprocessing.frame)]
        for chunk in _chunks(images, on_chunk):
            examination = self.examine(chunk)
            scores.append(examination.scores)
            maps.append(examination.maps)
        return Located(torch.cat(scores), torch.cat(maps))

    def examine(self, images: Images) -> Examination:
        aligned = self.align(images)
        patches = self._patches(aligned)
        return Examination(patches.scores, self.scorer.maps(patches.cells, aligned).cpu(), aligned, patches)

    def align(self, images: Images) -> Conditioned:
        """The images as the features are computed of them."""
        return self.conditioning(resize(images, self.preprocessing.frame), self.ignored).completed(self.typical)

    def score_aligned(self, aligned: Conditioned, on_chunk: OnChunk | None = None) -> Scores:
        """The scores of images that are aligned already."""
        places = _chunks(torch.arange(len(aligned.images)), on_chunk)
        return torch.cat([self._patches(aligned[chunk]).scores for chunk in places])

    def nearest(self, examination: Examination) -> Neighbour | None:
        """By the first kind of feature that is remembered patch by patch."""
        aligned, patches = examination.aligned, examination.patches
        banks = [(kind, bank) for kind, bank in self.scorer.banks.items() if isinstance(bank, Bank)]
        if not banks or patches is None or aligned is None:
            return None
        kind, bank = banks[0]
        worst = int(patches.cells[0].flatten().argmax())
        number, cell = bank.nearest(patches.features[kind][0].flatten(0, 1)[worst], worst)
        columns, stride = bank.shape[1], self.scorer.grid.stride
        shift = (worst % columns - cell % columns) * stride, (worst // columns - cell // columns) * stride
        return Neighbour(number, shift, None if aligned.frames is None else aligned.frames[0])

    def describe(self) -> dict[str, Any]:
        return self.extractor.describe()

    def pictures(self, images: Images, aligned: Conditioned | None) -> UInt8[Tensor, "_ c _ _"]:
        resized = resize(images, self.preprocessing.frame)
        return (resized if aligned is None else aligned.moved_alike(resized)).cpu()

    def baseline(self, memory: Memory, aligned: Conditioned | None, parts: Parts, *, seed: int) -> PatchModel | None:
        """Of the same good patches if their pixels are remembered already, else of `aligned`."""
        extractor, how = replace(self.extractor, kinds=(PIXELS,)), (self.preprocessing, self.conditioning)
        if extractor == self.extractor or aligned is None:
            return None
        if PIXELS in self.scorer.kinds:
            scorer = self.scorer.of((PIXELS,))
            return PatchModel(extractor, *how, scorer, ignored=self.ignored, typical=self.typical)
        return PatchModel.fit(extractor, *how, memory, aligned, seed=seed, parts=parts, typical=self.typical)

    def _patches(self, aligned: Conditioned) -> Patches:
        patches: Patches = self(aligned.images, aligned.foreground, aligned.hidden())
        return patches


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _chunks(images: Shaped[Tensor, "n ..."], on_chunk: OnChunk | None) -> Iterator[Shaped[Tensor, "m ..."]]:
    """A few images at a time; each is counted when it is done."""
    for chunk in images.split(CHUNK) if len(images) else ():
        yield chunk
        if on_chunk is not None:
            on_chunk(len(chunk))


def _finite(scores: Scores) -> Scores:
    if not bool(scores.isfinite().all()):
        raise ModelFileError("a score is not finite, so nothing can be decided; fit the detector again")
    return scores
