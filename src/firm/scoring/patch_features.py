"""Features of the patches of an image: by the trained encoder, by a pretrained backbone, or their plain pixels.

Plain pixels are the baseline: a learnt feature that does not beat them is of no use.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor
from torch.nn import functional as F

from firm.errors import SettingError
from firm.images.preprocess import Preprocessing
from firm.networks.adaptor import COARSEST, Adapted, Pretrained
from firm.networks.backbone import Backbone, Facts, architecture
from firm.networks.heads import Network
from firm.networks.resnet import ResNet
from firm.scoring.patch_grid import Grid

KINDS = ("encoder", "projection", "pixels", "backbone")  # learnt; behind the head; raw; before the adaptor
PIXELS = "pixels"  # the only kind that needs no network
CHUNK = 16  # images whose features are computed together
TILES = 512  # patches passed to the encoder together
MOST_PIXELS = 256  # numbers per patch; larger patches are averaged down to it
TILED = 2**21  # pixels of an image above which the backbone sees it in tiles
TILE = 1024  # px of their sides, up to an eighth more: each reads far beyond its own, so few are made
FIELDS = {1: 4, 2: 2, 3: 2, 4: 1}  # stage -> fields along each side of a tile over which it is averaged

Features = dict[str, Float[Tensor, "n r c _"]]  # kind of feature -> features of every patch


@runtime_checkable
class FeatureExtractor(Protocol):
    """Conditioned images in, features of every patch out, for each of its kinds."""

    @property
    def grid(self) -> Grid: ...
    @property
    def kinds(self) -> tuple[str, ...]: ...
    def __call__(self, images: UInt8[Tensor, "n k h w"]) -> Features: ...


def kinds_of(features: str) -> tuple[str, ...]:
    """The kinds a setting names: one, or several joined by +; `both` is encoder+pixels."""
    kinds = ("encoder", PIXELS) if features == "both" else tuple(features.split("+"))
    if not set(kinds) <= set(KINDS) or len(set(kinds)) < len(kinds):
        raise SettingError(f"features is {features!r}; use both, or one or more of {', '.join(KINDS)} joined by +")
    return kinds


def extract(extractor: FeatureExtractor, images: UInt8[Tensor, "n k h w"]) -> Features:
    """Features of many images, computed chunk by chunk."""
    parts: dict[str, list[Tensor]] = {kind: [] for kind in extractor.kinds}
    for chunk in images.split(CHUNK):
        for kind, features in extractor(chunk).items():
            parts[kind].append(features)
    return {kind: torch.cat(chunks) for kind, chunks in parts.items()}


@dataclass(frozen=True)
class EncoderFeatures:
    """Patch features of the encoder that was trained on the good images."""

    network: Network | None  # None: pixels need no network
    preprocessing: Preprocessing
    grid: Grid
    kinds: tuple[str, ...]
    grey: bool  # the good images have no colour, so pixels are compared without it

    def __call__(self, images: UInt8[Tensor, "n k h w"]) -> Features:
        return {kind: torch.stack([self._features(kind, image[None]) for image in images]) for kind in self.kinds}

    def describe(self) -> dict[str, Any]:
        """What the card says of the features beside the recipe."""
        return {"grey": self.grey}

    @torch.no_grad()
    def _features(self, kind: str, image: UInt8[Tensor, "1 k h w"]) -> Float[Tensor, "r c d"]:
        if kind == PIXELS:
            return pixel_features(self.grid, image, grey=self.grey)
        assert self.network is not None
        network = self.network.eval()
        # the head is fed the last stage, whatever the setting says
        grid = replace(self.grid, layers=(4,)) if kind == "projection" else self.grid
        pixels = image.to(next(network.encoder.parameters()).device).float() / 255
        tiles = grid.tiles(self.preprocessing.normalise(pixels), TILES)
        features = torch.cat([tile_features(network.encoder, grid, part) for part in tiles])
        if kind == "projection":
            features = network.head(features).float()
        return features.cpu().unflatten(0, grid.shape(*image.shape[-2:]))


def tile_features(encoder: ResNet, grid: Grid, tiles: Float[Tensor, "t 3 s s"]) -> Float[Tensor, "t d"]:
    """Encoder features of tiles: the paper's pooled output, or several stages of equal weight side by side."""
    if grid.layers == (4,):
        return encoder(tiles).float()
    stages = encoder.stages(tiles)
    return torch.cat([F.normalize(_fields(stages[layer], layer), dim=1) for layer in grid.layers], dim=1)


def _fields(stage: Float[Tensor, "t d h w"], layer: int) -> Float[Tensor, "t e"]:
    """Means over a tile; before the last stage over several fields of it, to keep detail."""
    fields = min(FIELDS[layer], stage.shape[-1])
    means = F.avg_pool2d(stage, stage.shape[-1] // fields)[:, :, :fields, :fields]
    return means.permute(0, 2, 3, 1).flatten(1).float()


@dataclass(frozen=True)
class BackboneFeatures:
    """Patch features of a frozen backbone: unchanged, adapted, or behind the projection head."""

    network: Adapted
    settings: Pretrained
    grid: Grid
    kinds: tuple[str, ...]
    grey: bool = False  # the good images have no colour, so pixels are compared without it

    def __call__(self, images: UInt8[Tensor, "n k h w"]) -> Features:
        if self.kinds == (PIXELS,):
            return {PIXELS: self._pixels(images)}
        return self.from_stored(images, cell_features(self.network.backbone, self.settings, self.grid, images))

    def describe(self) -> dict[str, Any]:
        """What the card says of the features beside the recipe: also the backbone, to build it again."""
        backbone = self.network.backbone
        return {"grey": self.grey, "backbone": architecture(backbone), "licence": backbone.facts.licence}

    def from_stored(self, images: UInt8[Tensor, "n k h w"], cells: Float[Tensor, "n r c d"]) -> Features:
        """All kinds in their order, from backbone features that are known already."""
        learnt = self.from_cells(cells)
        return {kind: self._pixels(images) if kind == PIXELS else learnt[kind] for kind in self.kinds}

    def from_cells(self, cells: Float[Tensor, "n r c d"]) -> Features:
        """The kinds that need nothing but backbone features."""
        made = {
            "backbone": lambda: cells.float(),
            "encoder": lambda: self.network.adapt(cells),
            "projection": lambda: self.network.project(cells),
        }
        return {kind: made[kind]() for kind in self.kinds if kind != PIXELS}

    def _pixels(self, images: UInt8[Tensor, "n k h w"]) -> Float[Tensor, "n r c d"]:
        pool = self.settings.pool
        return torch.stack([cell_pixels(self.grid, pool, image[None], grey=self.grey) for image in images])


@dataclass(frozen=True)
class UnadaptedFeatures:
    """Patch features of a frozen backbone before anything is trained."""

    backbone: Backbone
    settings: Pretrained
    grid: Grid
    kinds: tuple[str, ...] = ("backbone",)

    def __call__(self, images: UInt8[Tensor, "n k h w"]) -> Features:
        return {"backbone": cell_features(self.backbone, self.settings, self.grid, images)}


def cell_features(
    backbone: Backbone, settings: Pretrained, grid: Grid, images: UInt8[Tensor, "n k h w"]
) -> Float[Tensor, "n r c d"]:
    """Backbone features of every cell averaged with its neighbours: several stages side by side, on the CPU."""
    rows, columns = grid.shape(*images.shape[-2:])
    reach, first = backbone.trunk.reach, settings.margin // grid.stride
    if reach is None or images.shape[-2] * images.shape[-1] <= TILED:
        padded = mirrored(backbone.normalise(images.to(backbone.mean.device).float() / 255), settings.margin)
        inner = slice(first, first + rows), slice(first, first + columns)
        return _cells_of(backbone, settings, grid, padded, inner).cpu()
    padded = mirrored(images.float(), settings.margin).to(torch.uint8)
    # the tile's own border shows nowhere if it is farther away than the features, averaged over `pool` cells, see
    around = COARSEST * -(-(reach + settings.pool * COARSEST) // COARSEST)
    result = torch.empty(len(images), rows, columns, feature_count(settings, backbone.facts))
    sides = [
        _tiles(length, first, count, around, grid.stride)
        for length, count in zip(padded.shape[-2:], (rows, columns), strict=True)
    ]
    for (down, inner_rows, to_rows), (across, inner_columns, to_columns) in product(*sides):
        tile = backbone.normalise(padded[:, :, down, across].to(backbone.mean.device).float() / 255)
        result[:, to_rows, to_columns] = _cells_of(backbone, settings, grid, tile, (inner_rows, inner_columns)).cpu()
    return result


def _cells_of(
    backbone: Backbone, settings: Pretrained, grid: Grid, padded: Float[Tensor, "n 3 a b"], inner: tuple[slice, slice]
) -> Float[Tensor, "n r c d"]:
    """The features of the inner cells of images that are normalised and padded."""
    stages, parts = backbone.stages(padded), []
    size = padded.shape[-2] // grid.stride, padded.shape[-1] // grid.stride
    for stage in settings.stages_of(backbone.facts):
        cells = _at_stride(stages[stage - 1], size, settings)
        parts.append(backbone.finished(stage, cells[:, :, inner[0], inner[1]]))
    return torch.cat(parts, dim=1).permute(0, 2, 3, 1).float()


def _tiles(length: int, first: int, cells: int, around: int, stride: int) -> list[tuple[slice, slice, slice]]:
    """Along a padded side: what a tile reads, the cells it gives in its own numbers, and in those of the grid."""
    count, tiles = -(-length // (TILE + TILE // 8)), []
    side = COARSEST * -(-length // (count * COARSEST))  # a multiple of every stride
    for begin in range(0, length, side):
        end, low = min(length, begin + side), max(0, begin - around)
        given = slice(max(begin // stride, first), min(end // stride, first + cells))
        if given.start < given.stop:
            own = slice(given.start - low // stride, given.stop - low // stride)
            tiles.append((slice(low, min(length, end + around)), own, slice(given.start - first, given.stop - first)))
    return tiles


def mirrored(images: Float[Tensor, "n 3 h w"], margin: int) -> Float[Tensor, "n 3 a b"]:
    """The images with a mirrored margin, padded to a multiple of the coarsest stride."""
    height, width = images.shape[-2:]
    down, right = -height % COARSEST, -width % COARSEST
    return F.pad(images, (margin, margin + right, margin, margin + down), mode="reflect")


def feature_count(settings: Pretrained, facts: Facts) -> int:
    """How many numbers the backbone gives for a patch."""
    return sum(facts.channels[stage - 1] for stage in settings.stages_of(facts))


def _at_stride(
    stage: Float[Tensor, "n d h w"], size: tuple[int, int], settings: Pretrained
) -> Float[Tensor, "n d r c"]:
    """A stage averaged over its neighbourhood and resampled to so many rows and columns of cells.

    Without a margin zeros count beyond the border, as in PatchCore: the outermost cells then weigh less.
    """
    smooth = F.avg_pool2d(stage, settings.pool, 1, settings.pool // 2, count_include_pad=settings.margin == 0)
    if smooth.shape[-2:] == size:
        return smooth
    within = stage.shape[-1] // size[1]
    if stage.shape[-2:] == (size[0] * within, size[1] * within):
        return F.avg_pool2d(smooth, within)
    return F.interpolate(smooth, size=size, mode="bilinear", align_corners=False)


def check_cells(settings: Pretrained, grid: Grid, frame: tuple[int, int]) -> None:
    """Refuse cells to which the stages of a backbone cannot be resampled."""
    if grid.size != grid.stride or grid.stride & (grid.stride - 1) or grid.stride > COARSEST:
        raise SettingError(
            f"features of {settings.name} describe square cells side by side; set tiling.size and tiling.stride to "
            f"one of 4, 8, 16, 32, not {grid.size} and {grid.stride}"
        )
    if any(side % grid.stride or side <= settings.margin + COARSEST for side in frame):
        raise SettingError(
            f"images of {frame[1]} x {frame[0]} px do not fall into cells of {grid.stride} px for {settings.name}; "
            f"set size or shape to a multiple of it above {settings.margin + COARSEST}"
        )


def extractor_of(
    network: Network | Adapted,
    preprocessing: Preprocessing,
    grid: Grid,
    features: str,
    settings: Pretrained,
    *,
    grey: bool,
) -> EncoderFeatures | BackboneFeatures:
    """What computes the patch features that a recipe asks for."""
    if isinstance(network, Adapted):
        return BackboneFeatures(network, settings, grid, kinds_of(features), grey)
    return EncoderFeatures(network, preprocessing, grid, kinds_of(features), grey)


def pixel_features(grid: Grid, image: Shaped[Tensor, "1 k h w"], *, grey: bool) -> Float[Tensor, "r c d"]:
    """The pixels of every patch of an image; of a grey product without their colour."""
    values = image.float().mean(1, keepdim=True) if grey else image.float()
    side = max(1, int((MOST_PIXELS / values.shape[1]) ** 0.5))
    factor = -(-grid.size // side)
    parts = [F.avg_pool2d(tiles, factor, ceil_mode=True).flatten(1) for tiles in grid.tiles(values, TILES)]
    # a difference of one grey level everywhere is a distance of one, whatever the size of the patch
    return (torch.cat(parts) / parts[0].shape[1] ** 0.5).unflatten(0, grid.shape(*values.shape[-2:]))


def cell_pixels(grid: Grid, pool: int, image: UInt8[Tensor, "1 k h w"], *, grey: bool) -> Float[Tensor, "r c d"]:
    """The pixels of the patch of `pool` x `pool` cells around every cell.

    Beyond the border the image is mirrored, or its border repeated where a patch is wider than the image.
    """
    margin = pool // 2 * grid.stride
    mode = "reflect" if margin < min(image.shape[-2:]) else "replicate"
    padded = F.pad(image.float(), (margin,) * 4, mode=mode)
    return pixel_features(replace(grid, size=pool * grid.stride), padded, grey=grey)
