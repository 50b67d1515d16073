"""A fitted model as one module from uint8 images to scores and maps, without Python that depends on the batch.

Everything from the pixels on is in it: resizing, backbone, adaptor, neighbours, the score and the map. It leaves to the
runtime (`firm.deploy.image_steps`) what decides pixel by pixel: foreground, illumination and alignment.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firm.errors import SettingError
from firm.images.preprocess import Preprocessing
from firm.networks.adaptor import AdaptedImages
from firm.networks.backbone import Backbone
from firm.outliers.whole_images import turned
from firm.scoring.image_scores import Kde, Knn, Prototype
from firm.scoring.knn import unit
from firm.scoring.models import ImageModel, Model, PatchModel
from firm.scoring.patch_bank import Bank, Memory, PatchReference
from firm.scoring.patch_bank import Prototype as MeanPatch
from firm.scoring.patch_features import MOST_PIXELS, PIXELS, BackboneFeatures, EncoderFeatures, cell_features
from firm.scoring.patch_features import tile_features as features_of_tiles
from firm.scoring.patch_grid import Grid

LARGEST = 1_900_000_000  # bytes of all tensors: an ONNX file holds 2 GB
CELLS, KEYS = 128, 16_384  # cells, or keys, that are compared at once: their products stay in the cache
NOTHING = -1e30  # product of a query with a key that is not there


def graph_of(model: Model, *, any_size: bool) -> nn.Module:
    """The module to export, or a SettingError that names the setting that cannot be."""
    check_exportable(model)
    assert isinstance(model, PatchModel | ImageModel)
    made = PatchGraph(model, any_size=any_size) if isinstance(model, PatchModel) else ImageGraph(model, any_size)
    size = sum(each.numel() * each.element_size() for each in made.state_dict().values())
    if size > LARGEST:
        raise SettingError(
            f"the bank of {size / 1e9:.1f} GB does not fit into a graph of 2 GB; "
            "fit again with --set memory.sampling_ratio=0.5 or less"
        )
    return made.eval().requires_grad_(False)


def check_exportable(model: Model) -> None:
    """Refuse what neither the graph nor the runtime can do."""
    reason = ""
    if isinstance(model, PatchModel):
        if model.conditioning.align and model.ignored is not None:
            reason = "it aligns images and ignores pixels; fit again with --set conditioning.align=false"
        elif any(bank.memory.reweight for bank in model.scorer.references.values()):
            reason = "memory.reweight weighs patches one by one; fit again with --set memory.reweight=0"
    elif isinstance(model, ImageModel):
        if model.scoring.crops:
            reason = "score.crops averages over crops; fit again with --set score.crops=0"
        elif not isinstance(model.scoring.by, Knn | Prototype | Kde):
            reason = f"score.by is your own class {type(model.scoring.by).__name__}; fit again with --set score=s_con"
    else:
        reason = f"it is a {type(model).__name__}; export the detector that firm fit wrote"
    if reason:
        raise SettingError(f"this detector cannot be exported: {reason}")


class Whole(Backbone):
    """A backbone that takes a batch at once; `Backbone` takes it in portions, which a graph cannot."""

    def __init__(self, backbone: Backbone) -> None:
        known = {"deepest": backbone.deepest, "digest": backbone.digest, "folded": backbone.folded}
        super().__init__(copy.deepcopy(backbone.trunk), backbone.facts, **known)

    def stages(self, images: Tensor) -> list[Tensor]:
        return self.trunk.stages(images)


class Resize(nn.Module):
    """uint8 images of any size to a square, as firm resizes: weights made in the graph from the size of its input."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side
        self.register_buffer("place", torch.arange(side, dtype=torch.float32) + 0.5)

    def forward(self, images: Tensor) -> Tensor:
        down, across = (self.weights(length) for length in images.shape[-2:])
        return (down @ (images.float() @ across.mT)).round().clamp(0, 255)

    def weights(self, length: int) -> Tensor:
        """What each pixel of a side gives to each of the result; one to one where the sizes agree."""
        pixels = torch.arange(length, dtype=torch.float32)
        scale = (pixels[-1:] + 1) / self.side
        support, centre = scale.clamp(min=1), scale * self.place
        away = (pixels - centre[:, None] + 0.5) / support
        weights = (1 - away.abs()).clamp(min=0)
        return weights / weights.sum(1, keepdim=True)


def sampled(side: int, size: int) -> Tensor:
    """The weights by which firm resizes `side` to `size`."""
    rows = torch.eye(side)[None, None]
    return F.interpolate(rows, size=(size, side), mode="bilinear", antialias=True, align_corners=False)[0, 0]


class PatchGraph(nn.Module):
    """`PatchModel` from conditioned images on: `forward(images)`, or `forward(images, foreground)` if it has a rule."""

    outputs = ("score", "map")
    present: Tensor
    free: Tensor | None
    weight: Tensor | None
    visible: Tensor | None
    inside: Tensor
    spread: Tensor

    def __init__(self, model: PatchModel, *, any_size: bool) -> None:
        super().__init__()
        side, grid = model.preprocessing.size, model.scorer.grid
        self.grid, self.extractor = grid, model.extractor
        self.resize = Resize(side) if any_size else None
        self.network = copy.deepcopy(model.network)
        if isinstance(model.extractor, BackboneFeatures):
            self.whole = Whole(model.extractor.network.backbone)
        self.banks = nn.ModuleDict({kind: search_of(bank) for kind, bank in model.scorer.references.items()})
        rows, columns = grid.shape(side, side)
        every = torch.eye(side, dtype=torch.bool)[:, :, None].expand(-1, -1, side)
        self.register_buffer("inside", grid.parts(every)[:, :, 0].T * grid.size)
        nodes = torch.eye(rows)[:, :, None].expand(-1, -1, columns)
        self.register_buffer("spread", grid.maps(nodes, side, side)[:, :, 0].T.contiguous())
        aligned = model.align(torch.zeros(1, 3, side, side, dtype=torch.uint8))
        hidden = aligned.hidden()
        self.register_buffer("present", model.scorer.present.cpu())
        self.register_buffer("visible", None if hidden is None else (~hidden).float())
        self.register_buffer("free", None if hidden is None else grid.parts(~hidden))
        self.inputs = ("images", "foreground") if grid.min_foreground and needs_foreground(model) else ("images",)
        constant = None
        if len(self.inputs) == 1 and (grid.min_foreground or hidden is not None):
            constant = self.object_weight(aligned.foreground)
        self.register_buffer("weight", constant)

    def forward(self, images: Tensor, foreground: Tensor | None = None) -> tuple[Tensor, Tensor]:
        pixels = images.float() if self.resize is None else self.resize(images)
        features = self.features(pixels)
        cells = torch.stack([bank(features[kind]) for kind, bank in self.banks.items()]).mean(0)
        weight = self.weight if foreground is None else self.object_weight(foreground)
        if weight is not None:
            cells = cells.clamp(min=0) * weight
        if self.grid.surroundings:
            around = self.grid.surrounding(cells)
            cells = cells + (around if weight is None else around * weight)
        count = min(self.grid.top_patches, self.inside.shape[0] ** 2)
        flat = cells.flatten(1)
        scores = flat.amax(1) if count == 1 else flat.topk(count, dim=1).values.mean(1)
        maps = self.spread @ cells @ self.spread.T
        return scores, maps if self.visible is None else maps * self.visible

    def object_weight(self, foreground: Tensor) -> Tensor:
        """How much every patch counts, as `PatchScorer.cells` weighs it."""
        if not self.grid.min_foreground:
            assert self.free is not None
            return (self.free > 0).float()
        share = self.inside @ foreground.float() @ self.inside.T / self.grid.size**2
        share = torch.maximum(share, self.present)
        share = share if self.free is None else torch.minimum(share, self.free)
        return (share / self.grid.min_foreground).clamp(max=1)

    def features(self, pixels: Tensor) -> dict[str, Tensor]:
        """Every kind of feature, n, r, c, d."""
        made: dict[str, Tensor] = {}
        kinds = self.extractor.kinds
        if isinstance(self.extractor, EncoderFeatures):
            return {kind: self.tile_features(kind, pixels) for kind in kinds}
        if set(kinds) - {PIXELS}:
            cells = cell_features(self.whole, self.extractor.settings, self.grid, pixels)
            flat, shape, adaptor = cells.flatten(0, 2), cells.shape[1:3], self.network.adaptor
            made["backbone"] = cells
            if "encoder" in kinds:
                made["encoder"] = adaptor.adapted(flat).view(-1, *shape, adaptor.out)
            if "projection" in kinds:
                made["projection"] = adaptor(flat).view(-1, *shape, adaptor.projected)
        if PIXELS in kinds:
            pool = self.extractor.settings.pool
            margin = pool // 2 * self.grid.stride
            mode = "reflect" if margin < pixels.shape[-1] else "replicate"
            grid = Grid(size=pool * self.grid.stride, stride=self.grid.stride)
            made[PIXELS] = self.plain(F.pad(pixels, (margin,) * 4, mode=mode), grid)
        return {kind: made[kind] for kind in kinds}

    def tile_features(self, kind: str, pixels: Tensor) -> Tensor:
        """Of an encoder that was trained on the good images."""
        assert isinstance(self.extractor, EncoderFeatures)
        if kind == PIXELS:
            return self.plain(pixels, self.grid)
        tiles = self.grid.cut(self.extractor.preprocessing.normalise(pixels / 255))
        made = self.network.encoder(tiles) if kind == "projection" else None
        made = features_of_tiles(self.network.encoder, self.grid, tiles) if made is None else self.network.head(made)
        return made.view(-1, *self.grid.shape(*pixels.shape[-2:]), made.shape[-1])

    def plain(self, pixels: Tensor, grid: Grid) -> Tensor:
        """The pixels of every tile, as `firm.scoring.patch_features.pixel_features`."""
        values = pixels.mean(1, keepdim=True) if self.extractor.grey else pixels
        side = max(1, int((MOST_PIXELS / values.shape[1]) ** 0.5))
        parts = F.avg_pool2d(grid.cut(values), -(-grid.size // side), ceil_mode=True).flatten(1)
        shape = grid.shape(*values.shape[-2:])
        return (parts / parts.shape[1] ** 0.5).view(-1, *shape, parts.shape[1])


def needs_foreground(model: Model) -> bool:
    """Whether each image has a foreground of its own."""
    assert isinstance(model, PatchModel | ImageModel)
    return model.conditioning.foreground.method != "ones"


def takes_any_size(model: Model) -> bool:
    """Whether nothing stands between resizing and the graph, so that it can resize by itself."""
    assert isinstance(model, PatchModel | ImageModel)
    how, plain = model.conditioning, model.ignored is None
    object_counts = isinstance(model, PatchModel) and bool(model.scorer.grid.min_foreground) and needs_foreground(model)
    same = isinstance(model, ImageModel) or model.preprocessing.file_side == model.preprocessing.size
    return plain and same and how.illumination == "none" and not how.align and not object_counts


def search_of(bank: PatchReference) -> nn.Module:
    """The distance to what is normal, by the kind of reference."""
    if isinstance(bank, MeanPatch):
        return ToMean(bank)
    assert isinstance(bank, Bank)
    return ToAll(bank) if bank.memory.neighbourhood < 0 else ToNear(bank)


class Standardised(nn.Module):
    """Distances of cells, n, r, c, as deviations from those of good images, where the memory says so."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, bank: PatchReference) -> None:
        super().__init__()
        self.memory: Memory = bank.memory
        self.register_buffer("mean", bank.mean.cpu())
        self.register_buffer("deviation", bank.deviation.cpu())

    def forward(self, features: Tensor) -> Tensor:
        distances = self.distances(features)
        return (distances - self.mean) / self.deviation if self.memory.standardise else distances

    def distances(self, features: Tensor) -> Tensor:
        raise NotImplementedError

    def behind(self, queries: Tensor, products: Tensor) -> Tensor:
        """The mean distance behind the largest products, of queries (..., e) and (..., k)."""
        if self.memory.metric == "cosine":
            return (1 - products).mean(-1)
        squares = queries[..., :-1].square().sum(-1, keepdim=True)
        return (squares - 2 * products).clamp(min=0).sqrt().mean(-1)


class ToMean(Standardised):
    """To the mean direction of the good patches."""

    direction: Tensor

    def __init__(self, bank: MeanPatch) -> None:
        super().__init__(bank)
        self.register_buffer("direction", bank.direction.cpu())

    def distances(self, features: Tensor) -> Tensor:
        return 1 - F.normalize(features, dim=-1, eps=1e-12) @ self.direction


class ToAll(Standardised):
    """To the k nearest of all good patches."""

    keys: Tensor

    def __init__(self, bank: Bank) -> None:
        super().__init__(bank)
        self.register_buffer("keys", bank.vectors.cpu().T.contiguous())

    def distances(self, features: Tensor) -> Tensor:
        queries, k = self.memory.queries(features.flatten(0, 2)), self.memory.k
        found = [largest(queries @ keys, k) for keys in self.keys.split(KEYS, dim=1)]
        best = found[0] if len(found) == 1 else largest(torch.cat(found, -1), k)
        return self.behind(queries, best).view(-1, *self.mean.shape)


class ToNear(Standardised):
    """To the k nearest of the good patches around each cell.

    The patches of one cell are a block, padded to the longest. A block is compared with all cells it is near to; then
    each cell gathers what the blocks around it found.
    """

    keys: Tensor  # cells, e, longest
    asked: Tensor  # cells, w: which cells each block is near to, padded with 0
    found: Tensor  # cells, v: where in `asked` each cell is, padded with the number of all places

    def __init__(self, bank: Bank) -> None:
        super().__init__(bank)
        cells, cell = math.prod(bank.shape), bank.cell.cpu()
        count = cell.bincount(minlength=cells)
        place = torch.arange(len(cell)) - (count.cumsum(0) - count)[cell]
        vectors = bank.vectors.cpu()
        if self.memory.metric == "cosine":  # one more number, by which a missing key is told
            vectors = torch.cat([vectors, torch.zeros(len(vectors), 1)], dim=1)
        keys = torch.zeros(cells, int(count.max()), vectors.shape[1])
        keys[..., -1] = NOTHING
        keys[cell, place] = vectors
        rows, columns = torch.arange(cells) // bank.shape[1], torch.arange(cells) % bank.shape[1]
        down, across = (rows[:, None] - rows).abs(), (columns[:, None] - columns).abs()
        near = torch.maximum(down, across) <= bank.radii.cpu()  # a block, and the cells it is near to
        self.register_buffer("keys", keys.mT.contiguous())
        self.register_buffer("asked", padded(near, torch.arange(cells).expand(cells, -1), 0))
        width = self.asked.shape[1]
        at = torch.arange(cells)[:, None] * width + near.long().cumsum(1) - 1
        self.register_buffer("found", padded(near.T, at.T, cells * width))

    def distances(self, features: Tensor) -> Tensor:
        memory, cells = self.memory, len(self.keys)
        queries = memory.queries(features.flatten(0, 2))
        queries = queries.view(-1, cells, queries.shape[-1])
        wanted = queries
        if memory.metric == "cosine":
            wanted = torch.cat([queries, torch.ones_like(queries[..., :1])], dim=-1)
        by_cell = wanted.transpose(0, 1)  # cells, n, e
        parts = []
        for begin in range(0, cells, CELLS):
            asked, keys = self.asked[begin : begin + CELLS], self.keys[begin : begin + CELLS]
            block = by_cell.index_select(0, asked.flatten())
            products = block.reshape(len(keys), -1, keys.shape[1]) @ keys
            best = largest(products, memory.k)
            parts.append(best.view(len(keys) * asked.shape[1], -1, best.shape[-1]))  # places, n, k
        table = torch.cat([*parts, torch.full_like(parts[0][:1], NOTHING)])
        around = table.index_select(0, self.found.flatten())
        around = around.view(*self.found.shape, -1, around.shape[-1]).permute(2, 0, 1, 3).flatten(2)  # n, cells, v k
        return self.behind(queries, largest(around, memory.k)).view(-1, *self.mean.shape)


def largest(values: Tensor, k: int) -> Tensor:
    """The k largest of the last axis, or all."""
    return values.amax(-1, keepdim=True) if k == 1 else values.topk(min(k, values.shape[-1]), dim=-1).values


def padded(chosen: Tensor, values: Tensor, padding: int) -> Tensor:
    """The chosen values of each row, moved to its begin; rows are cut to the longest."""
    order = (~chosen).long().argsort(dim=1, stable=True)[:, : int(chosen.sum(1).max())]
    return torch.where(chosen.gather(1, order), values.gather(1, order), padding)


class ImageGraph(nn.Module):
    """`ImageModel` from conditioned images on."""

    inputs, outputs = ("images",), ("score",)

    def __init__(self, model: ImageModel, any_size: bool) -> None:
        super().__init__()
        self.preprocessing: Preprocessing = model.preprocessing
        self.scoring, side = model.scoring, model.preprocessing.file_side
        self.resize = Resize(side) if any_size else None
        self.network = copy.deepcopy(model.network)
        if isinstance(self.network, AdaptedImages):
            self.network.backbone = Whole(self.network.backbone)
        large = int(self.preprocessing.zoom * self.preprocessing.size)
        self.register_buffer("zoom", None if large == side else sampled(side, large))
        for turn in range(self.scoring.turns):
            bank = model.get_buffer(f"references_{turn}").float().cpu()
            self.register_buffer(f"references_{turn}", bank)
            self.register_buffer(f"units_{turn}", unit(bank))

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.float() if self.resize is None else self.resize(images)
        if self.zoom is not None:
            pixels = self.zoom @ (pixels @ self.zoom.T)
        size = self.preprocessing.size
        begin = (pixels.shape[-1] - size) // 2
        ready = self.preprocessing.normalise(pixels[..., begin : begin + size, begin : begin + size] / 255)
        turns = range(self.scoring.turns)
        return sum(self.score(self.network.encoder(turned(ready, turn)).float(), turn) for turn in turns) / len(turns)

    def score(self, features: Tensor, turn: int) -> Tensor:
        """The score of embeddings, as `firm.scoring.image_scores` gives it."""
        by, bank, queries = self.scoring.by, self.get_buffer(f"units_{turn}"), unit(features)
        if isinstance(by, Knn):
            near = largest(queries @ bank.T, by.k).mean(-1)
            return -near * features.norm(dim=1) if by.norm else 1 - near
        if isinstance(by, Prototype):
            return 1 - queries @ unit(bank.mean(0, keepdim=True))[0]
        assert isinstance(by, Kde)
        gamma = by.scale / max(float(bank.var(correction=0)) * bank.shape[1], 1e-6)
        return -torch.logsumexp(-gamma * (2 - 2 * (queries @ bank.T)), dim=1) / gamma
