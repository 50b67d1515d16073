"""A fitted model as one module from uint8 images to scores and maps, without Python that depends on the batch.

Everything from the pixels on is in it: resizing, backbone, adaptor, neighbours, the score and the map. It leaves to the
runtime (`firm.deploy.image_steps`) what decides pixel by pixel: foreground, illumination and alignment.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firm.deploy.neighbours import largest, search_of
from firm.errors import SettingError
from firm.images.preprocess import Preprocessing
from firm.networks.adaptor import AdaptedImages, Adaptor
from firm.networks.backbone import Backbone
from firm.networks.heads import Network
from firm.scoring.image_scores import Kde, Knn, Prototype
from firm.scoring.knn import unit
from firm.scoring.models import ImageModel, Model, PatchModel
from firm.scoring.patch_features import MOST_PIXELS, PIXELS, BackboneFeatures, EncoderFeatures, cell_features
from firm.scoring.patch_features import tile_features as features_of_tiles
from firm.scoring.patch_grid import Grid

LARGEST = 1_900_000_000  # bytes of all tensors: an ONNX file holds 2 GB


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
        trunk, deepest, digest = copy.deepcopy(backbone.trunk), backbone.deepest, backbone.digest
        super().__init__(trunk, backbone.facts, deepest=deepest, digest=digest, folded=backbone.folded)

    def stages(self, images: Tensor, at_once: int = 0) -> list[Tensor]:
        return self.trunk.stages(images)


class Resize(nn.Module):
    """uint8 images of any size to a square, as firm resizes: weights made in the graph from the size of its input."""

    place: Tensor

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side
        self.register_buffer("place", torch.arange(side, dtype=torch.float32) + 0.5)

    def forward(self, images: Tensor) -> Tensor:
        down, across = (self.weights(length) for length in images.shape[-2:])
        return (down @ (images.float() @ across.T)).round().clamp(0, 255).to(torch.uint8)

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
    whole: Whole  # of a pretrained backbone, with
    adaptor: Adaptor
    trained: Network  # on the good images, in their place
    present: Tensor
    free: Tensor | None
    weight: Tensor | None
    visible: Tensor | None
    inside: Tensor  # which pixels of a side are in each row of cells
    window: Tensor  # which rows of cells surround each
    spread: Tensor  # what each row of cells gives to each pixel

    def __init__(self, model: PatchModel, *, any_size: bool) -> None:
        super().__init__()
        side, grid = model.preprocessing.size, model.scorer.grid
        self.grid, self.extractor = grid, model.extractor
        self.resize = Resize(side) if any_size else None
        if isinstance(model.extractor, BackboneFeatures):
            self.whole = Whole(model.extractor.network.backbone)
            self.adaptor = copy.deepcopy(model.extractor.network.adaptor)
        elif model.extractor.network is not None:
            self.trained = copy.deepcopy(model.extractor.network)
        self.banks = nn.ModuleDict({kind: search_of(bank) for kind, bank in model.scorer.references.items()})
        rows, columns = grid.shape(side, side)
        every = torch.eye(side, dtype=torch.bool)[:, :, None].expand(-1, -1, side)
        self.register_buffer("inside", grid.parts(every)[:, :, 0].T * grid.size)
        nodes = torch.eye(rows)[:, :, None].expand(-1, -1, columns)
        self.register_buffer("window", grid.surrounding(nodes)[:, :, 0].T.contiguous())
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
        features = self.features(images if self.resize is None else self.resize(images))
        cells = torch.stack([bank(features[kind]) for kind, bank in self.banks.items()]).mean(0)
        weight = self.weight if foreground is None else self.object_weight(foreground)
        if weight is not None:
            cells = cells.clamp(min=0) * weight
        if self.grid.surroundings:
            around = self.window @ cells @ self.window.T
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
            flat, shape, adaptor = cells.flatten(0, 2), cells.shape[1:3], self.adaptor
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
            made[PIXELS] = self.plain(F.pad(pixels.float(), (margin,) * 4, mode=mode), grid)
        return {kind: made[kind] for kind in kinds}

    def tile_features(self, kind: str, pixels: Tensor) -> Tensor:
        """Of an encoder that was trained on the good images."""
        assert isinstance(self.extractor, EncoderFeatures)
        if kind == PIXELS:
            return self.plain(pixels.float(), self.grid)
        tiles = self.grid.cut(self.extractor.preprocessing.normalise(pixels.float() / 255))
        encoder, head = self.trained.encoder, self.trained.head
        made = head(encoder(tiles)) if kind == "projection" else features_of_tiles(encoder, self.grid, tiles)
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


class ImageGraph(nn.Module):
    """`ImageModel` from conditioned images on."""

    inputs, outputs = ("images",), ("score",)
    zoom: Tensor | None

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
        pixels = (images if self.resize is None else self.resize(images)).float()
        if self.zoom is not None:
            pixels = self.zoom @ (pixels @ self.zoom.T)
        size = self.preprocessing.size
        begin = (pixels.shape[-1] - size) // 2
        ready = self.preprocessing.normalise(pixels[..., begin : begin + size, begin : begin + size] / 255)
        views = [turned_by(ready, turn) for turn in range(self.scoring.turns)]
        scores = [self.score(self.network.encoder(view).float(), turn) for turn, view in enumerate(views)]
        return torch.stack(scores).mean(0)

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


def turned_by(images: Tensor, quarters: int) -> Tensor:
    """Turned counter-clockwise, as `firm.outliers.whole_images.turned`, by what every engine knows."""
    turned = images.flip((2, 3)) if quarters >= 2 else images
    return turned.transpose(2, 3).flip((2,)) if quarters % 2 else turned
