"""Patches of good images remembered, patches of an image compared with them: an image score and a heat map.

Section 5: the image scores as its worst patch, and the map is the grid of scores spread over the pixels. Beside the
encoder's features stand plain pixels: a learnt feature that does not beat them has learnt nothing of use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

from firm.bank import Bank, Memory, fit_bank
from firm.conditioning import Conditioned
from firm.encoder import Network, ResNet18
from firm.images import Preprocessing
from firm.plain import plain_pixels, tiles_of
from firm.prototype import Prototype, fit_prototype
from firm.streams import stream
from firm.tiling import Grid
from firm.types import FirmError, Located

KINDS = ("encoder", "projection", "pixels", "backbone")  # learnt; where it was taught; as they are; before adapting
LEARNT = ("encoder", "projection")
MEANT = "projection"  # compared with the mean of the good ones
CHUNK = 16  # images looked at together
SMALLEST = 1e-6  # part of a patch: less than any pixel
FIELDS = {1: 4, 2: 2, 3: 2, 4: 1}  # stage -> fields along each side of a tile over which it is averaged

Seen = dict[str, Float[Tensor, "n r c _"]]  # a kind of feature -> the features of every patch


@dataclass(frozen=True)
class Looker:
    """Conditioned images in, features of their patches out: all that must be the same in fitting and in scoring."""

    network: Network | None  # None: plain pixels need none
    preprocessing: Preprocessing
    grid: Grid
    kinds: tuple[str, ...]
    grey: bool  # the good images have no colour, so the pixels are compared without it

    def __call__(self, images: UInt8[Tensor, "n k h w"]) -> Seen:
        looks = {"encoder": self._encoded, "projection": self._projected, "pixels": self._pixels}
        return {kind: torch.stack([looks[kind](image[None]) for image in images]) for kind in self.kinds}

    def _encoded(self, image: UInt8[Tensor, "1 k h w"]) -> Float[Tensor, "r c d"]:
        return self._learnt(image, self.grid).cpu()

    @torch.no_grad()
    def _projected(self, image: UInt8[Tensor, "1 k h w"]) -> Float[Tensor, "r c p"]:
        """The output of the head, which sees the last stage whatever is compared of the encoder."""
        assert self.network is not None
        features = self._learnt(image, replace(self.grid, layers=(4,)))
        return self.network.head(features.flatten(0, 1)).float().cpu().unflatten(0, features.shape[:2])

    @torch.no_grad()
    def _learnt(self, image: UInt8[Tensor, "1 k h w"], grid: Grid) -> Float[Tensor, "r c d"]:
        assert self.network is not None
        encoder = self.network.eval().encoder
        ready = self.preprocessing.normalise(image.to(next(encoder.parameters()).device).float() / 255)
        if grid.dense:
            return dense_features(encoder, grid, ready)
        parts = [tile_features(encoder, grid, tiles) for tiles in tiles_of(grid, ready)]
        return torch.cat(parts).unflatten(0, grid.shape(*image.shape[-2:]))

    def _pixels(self, image: UInt8[Tensor, "1 k h w"]) -> Float[Tensor, "r c d"]:
        return plain_pixels(self.grid, image, grey=self.grey)


def tile_features(encoder: ResNet18, grid: Grid, tiles: Float[Tensor, "t 3 s s"]) -> Float[Tensor, "t d"]:
    """What the encoder makes of tiles: the pooled output of the paper, or several stages side by side."""
    if grid.layers == (4,):
        return encoder(tiles).float()
    stages = encoder.stages(tiles)
    return joined([_pooled(stages[layer - 1], layer, stages[layer - 1].shape[-1], 1, 1, 1) for layer in grid.layers])[
        :, 0, 0
    ]


def joined(stages: list[Float[Tensor, "n r c _"]]) -> Float[Tensor, "n r c e"]:
    """Stages of equal weight: the cosine of the whole is the mean of theirs."""
    return torch.cat([F.normalize(stage.float(), dim=3) for stage in stages], dim=3)


def _pooled(
    stage: Float[Tensor, "n d h w"], layer: int, tile: int, stride: int, rows: int, columns: int
) -> Float[Tensor, "n r c e"]:
    """Means over each tile of so many places; before the last stage over fields of it, since detail is local."""
    fields = min(FIELDS[layer], tile)
    side = tile // fields
    means = F.avg_pool2d(stage, side, 1).permute(0, 2, 3, 1)
    down = torch.arange(rows) * stride
    across = torch.arange(columns) * stride
    parts = [means[:, down + y * side][:, :, across + x * side] for y in range(fields) for x in range(fields)]
    return torch.cat(parts, dim=3)


def dense_features(encoder: ResNet18, grid: Grid, image: Float[Tensor, "1 3 h w"]) -> Float[Tensor, "r c d"]:
    """Features of all patches from a few passes over the whole image instead of a pass per patch.

    A patch then also sees a little beyond its border, where a patch by itself sees zeros: near, not equal. Strides
    finer than the encoder's own are had by shifting the image.
    """
    check_dense(encoder, grid, *image.shape[-2:])
    rows, columns = grid.shape(*image.shape[-2:])
    shifts = range(0, encoder.step, grid.stride) if grid.stride < encoder.step else range(1)
    result: Tensor | None = None
    for i, down in enumerate(shifts):
        for j, right in enumerate(shifts):
            mine = len(range(i, rows, len(shifts))), len(range(j, columns, len(shifts)))
            stages = encoder.stages(image[:, :, down:, right:])
            found = []
            for layer in grid.layers:
                fine = encoder.step >> (4 - layer)
                step = max(grid.stride, encoder.step) // fine
                found.append(_pooled(stages[layer - 1], layer, grid.size // fine, step, *mine))
            part = found[0].float() if grid.layers == (4,) else joined(found)
            if result is None:
                result = part.new_empty(rows, columns, part.shape[-1])
            result[i :: len(shifts), j :: len(shifts)] = part[0]
    assert result is not None
    return result


def check_dense(encoder: ResNet18, grid: Grid, height: int, width: int) -> None:
    """Refuse what one pass over the image cannot give."""
    step = encoder.step
    if grid.size % step or (grid.stride % step and step % grid.stride):
        raise FirmError(
            f"dense features need patches of a multiple of {step} px and a stride that divides it or is a multiple of "
            f"it, not {grid.size} and {grid.stride}; set tiling.dense=false or change them"
        )
    if (height - grid.size) % grid.stride or (width - grid.size) % grid.stride:
        raise FirmError(
            f"dense features need the stride {grid.stride} to lead exactly to the border of {height} x {width} px; "
            "set tiling.dense=false or choose another stride"
        )


@dataclass(frozen=True)
class Look:
    """Images as they are looked at, what is seen of their patches, the score of each patch and of each image."""

    ready: Conditioned
    seen: Seen
    cells: Float[Tensor, "n r c"]
    scores: Float[Tensor, " n"]


@dataclass(frozen=True)
class Localiser:
    """The banks of good patches, and how much of each cell is object in good images."""

    grid: Grid
    banks: dict[str, Bank | Prototype]
    present: Float[Tensor, "r c"]

    def cells(
        self, seen: Seen, foreground: Bool[Tensor, "n h w"], hidden: Bool[Tensor, "n h w"] | None = None
    ) -> Float[Tensor, "n r c"]:
        """The anomaly score of every patch: the mean over the kinds of features, as far as the patch shows the object.

        A patch counts in full from `tiling.object` of object on, in this image or at this place in the good ones, and
        never further than it shows pixels that are not hidden. With `tiling.around` the mean around it is added.
        """
        scores = torch.stack([bank.score(seen[kind]) for kind, bank in self.banks.items()]).mean(0)
        counting = torch.ones(())
        if self.grid.object or hidden is not None:
            counting = self._counting(foreground, hidden)
            scores = scores.clamp(min=0) * counting
        return scores + self.grid.surrounding(scores) * counting if self.grid.around else scores

    def _counting(
        self, foreground: Bool[Tensor, "n h w"], hidden: Bool[Tensor, "n h w"] | None
    ) -> Float[Tensor, "n r c"]:
        """How far every patch counts, 0 to 1."""
        free = None if hidden is None else object_part(self.grid, ~hidden)
        if not self.grid.object:
            assert free is not None
            return (free > 0).float()
        shown = torch.maximum(object_part(self.grid, foreground), self.present)
        if free is not None:
            shown = torch.minimum(shown, free)  # the good parts may have lain elsewhere under the mask
        return (shown / self.grid.object).clamp(max=1)

    def scores(self, cells: Float[Tensor, "n r c"], seen: Seen | None = None) -> Float[Tensor, " n"]:
        """The image's score: its worst patch, or the mean of its `tiling.worst` worst ones.

        With `memory.reweight` each of them is weighed first, by what was seen of it.
        """
        flat = cells.flatten(1)
        worst, places = flat.topk(min(self.grid.worst, flat.shape[1]), dim=1)
        if any(bank.memory.reweight for bank in self.banks.values()):
            worst = worst * self._weights(places, seen)
        return worst.mean(1)

    def _weights(self, places: Int[Tensor, "n w"], seen: Seen | None) -> Float[Tensor, "n w"]:
        """The mean over the kinds of features, as that of the scores themselves."""
        if seen is None:
            raise FirmError("memory.reweight weighs patches by their features; give what was seen of them, too")
        image, cell = torch.arange(len(places)).repeat_interleave(places.shape[1]), places.flatten()
        parts = [bank.weights(seen[kind].flatten(1, 2)[image, cell], cell) for kind, bank in self.banks.items()]
        return torch.stack(parts).mean(0).view_as(places)

    def locate(self, seen: Seen, ready: Conditioned) -> Located:
        """Scores and maps; a map lies over its image as it came, however it was aligned."""
        cells = self.cells(seen, ready.foreground, ready.hidden())
        return Located(self.scores(cells, seen), ready.back(self.grid.maps(cells, *ready.images.shape[-2:])))

    def tensors(self) -> dict[str, Tensor]:
        """All that is to be saved."""
        named = {f"{kind}.{name}": value for kind, bank in self.banks.items() for name, value in bank.tensors().items()}
        return named | {"present": self.present}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], grid: Grid, memory: Memory, kinds: tuple[str, ...]) -> Localiser:
        """The localiser whose `tensors` these are."""
        banks: dict[str, Bank | Prototype] = {}
        for kind in kinds:
            parts = {name.removeprefix(f"{kind}."): one for name, one in tensors.items() if name.startswith(f"{kind}.")}
            # behind the head detectors once remembered a part of the good patches: those decide as they did
            made = Prototype if kind == MEANT and "vectors" not in parts else Bank
            banks[kind] = made.from_tensors(parts, remembering(memory, kind))
        return cls(grid, banks, tensors["present"])


def kinds_of(features: str) -> tuple[str, ...]:
    """The features a setting asks for: one kind, or several joined by +; `both` is encoder+pixels."""
    kinds = ("encoder", "pixels") if features == "both" else tuple(features.split("+"))
    if not set(kinds) <= set(KINDS) or len(set(kinds)) < len(kinds):
        raise FirmError(f"features is {features!r}; use both, or one or more of {', '.join(KINDS)} joined by +")
    return kinds


def remembering(memory: Memory, kind: str) -> Memory:
    """What was learnt is compared by its direction; pixels and features as they are by their difference."""
    return memory if kind in LEARNT else memory.with_metric("l2")


def remember(
    kind: str,
    features: Float[Tensor, "n r c d"],
    memory: Memory,
    *,
    rng: torch.Generator,
    parts: Int[Tensor, " n"] | None = None,
    seen: Bool[Tensor, "n r c"] | None = None,
) -> Bank | Prototype:
    """What patches are compared with: a bank of good ones, or behind the head, where those lie together, their mean."""
    settings = remembering(memory, kind)
    if kind == MEANT:
        return fit_prototype(features, settings, parts=parts, seen=seen)
    return fit_bank(features, settings, rng=rng, parts=parts, seen=seen)


@runtime_checkable
class Looks(Protocol):
    """What sees patches: conditioned images in, features of every kind out."""

    @property
    def grid(self) -> Grid: ...
    @property
    def kinds(self) -> tuple[str, ...]: ...
    def __call__(self, images: UInt8[Tensor, "n k h w"]) -> Seen: ...


def fit_localiser(
    look: Looks,
    ready: Conditioned,
    memory: Memory,
    *,
    seed: int,
    seen: Seen | None = None,
    parts: Int[Tensor, " n"] | None = None,
) -> Localiser:
    """Remember the patches of good images; what was seen of them already need not be looked at again.

    `parts` numbers the part each image shows, where several show one. A patch that is hidden as a whole tells nothing.
    """
    seen = look_at(look, ready.images) if seen is None else seen
    hidden = ready.hidden()
    free = None if hidden is None else object_part(look.grid, ~hidden)
    told = None if free is None else free > 0
    banks = {
        kind: remember(kind, features, memory, rng=stream(seed, "bank", kind), parts=parts, seen=told)
        for kind, features in seen.items()
    }
    present = _present(object_part(look.grid, ready.foreground), free) if memory.reach >= 0 else None
    shape = next(iter(seen.values())).shape[1:3]
    return Localiser(look.grid, banks, torch.zeros(*shape) if present is None else present)


def _present(shown: Float[Tensor, "n r c"], free: Float[Tensor, "n r c"] | None) -> Float[Tensor, "r c"]:
    """How much of each cell is object in good images, of what they do not hide."""
    return shown.mean(0) if free is None else shown.sum(0) / free.sum(0).clamp(min=SMALLEST)


def look_at(look: Looks, images: UInt8[Tensor, "n k h w"]) -> Seen:
    """Features of many images, some at a time."""
    parts: dict[str, list[Tensor]] = {kind: [] for kind in look.kinds}
    for chunk in images.split(CHUNK):
        for kind, features in look(chunk).items():
            parts[kind].append(features)
    return {kind: torch.cat(some) for kind, some in parts.items()}


def object_part(grid: Grid, foreground: Bool[Tensor, "n h w"]) -> Float[Tensor, "n r c"]:
    """How much of every patch is object; some images at a time, for the pixels are counted as floats."""
    return torch.cat([grid.parts(masks) for masks in foreground.split(CHUNK)])


def is_grey(images: UInt8[Tensor, "n k h w"]) -> bool:
    """Whether no image shows any colour."""
    return bool((images == images[:, :1]).all())
