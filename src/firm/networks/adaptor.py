"""A frozen backbone seen cell by cell, and the small network that FIRM trains behind it.

The backbone has seen a million photographs and none of this product; the adaptor has seen nothing but this product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from firm.backbones import Backbone, Facts
from firm.encoder import Head, projection
from firm.plain import PIXELS, plain_cells
from firm.tiling import Grid
from firm.types import FirmError

EVENLY = ("images", "cells")
HARDEST = 10.0  # of `Pretrained.hard`
NOISIEST = 10.0  # of `Pretrained.noise`
COARSEST = 32  # px: the step of the deepest stage, to a multiple of which images are filled up
ROWS = 65_536  # features adapted at once


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """Which backbone describes the patches, and the adaptor behind it; without a name nothing is pretrained."""

    name: str = ""  # efficientnet-lite0, resnet18, ..., timm:NAME, or a weights file
    stages: tuple[int, ...] = ()  # counted from 1; none: those known to serve the backbone
    pool: int = 3  # cells averaged along each side: a patch is so many cells wide
    context: int = 0  # cells averaged around a patch that the adaptor sees beside it; 0: the patch alone
    margin: int = 32  # px mirrored around an image: the zeros seen beyond a border are an edge no part has; 0: those
    hidden: tuple[int, ...] = (256,)  # of the adaptor
    out: int = 64
    versions: int = 1  # of every good image that are learnt from; those after the first vary in light
    flip: bool = False  # and are mirrored at random, for products without an orientation
    hard: float = 0.0  # cells of synthetic defects are drawn by the change of their features to the power of minus this
    evenly: str = "images"  # over which defects are drawn: every image counts as much, or every altered cell
    noise: float = 0.0  # deviations of good features by which what is learnt from varies, lest it is known by heart

    def __post_init__(self) -> None:
        if self.pool < 1 or self.pool % 2 == 0:
            raise FirmError(f"pretrained.pool is {self.pool}; a patch around a cell is an odd number of cells wide")
        if self.context < 0 or (self.context and (self.context % 2 == 0 or self.context <= self.pool)):
            raise FirmError(
                f"pretrained.context is {self.context}; use 0 for none, or an odd number of cells above pretrained.pool"
            )
        if self.margin < 0 or self.margin % COARSEST:
            raise FirmError(f"pretrained.margin is {self.margin}; use 0 or a multiple of {COARSEST} px")
        if min((*self.hidden, self.out, self.versions)) < 1:
            raise FirmError("pretrained.hidden, out and versions must be at least 1")
        if not 0 <= self.hard <= HARDEST:
            raise FirmError(f"pretrained.hard is {self.hard}; use 0 for cells drawn alike, and at most {HARDEST:g}")
        if not 0 <= self.noise <= NOISIEST:
            raise FirmError(f"pretrained.noise is {self.noise}; use 0 for none, and at most {NOISIEST:g}")
        if self.evenly not in EVENLY:
            raise FirmError(f"pretrained.evenly is {self.evenly!r}; use one of {', '.join(EVENLY)}")

    def stages_of(self, facts: Facts) -> tuple[int, ...]:
        """The stages to take, refused if the backbone does not have them."""
        stages = self.stages or facts.stages
        if not set(stages) <= set(range(1, len(facts.strides) + 1)):
            raise FirmError(f"pretrained.stages is {list(stages)}; {facts.name} has 1..{len(facts.strides)}")
        return stages


class Adaptor(nn.Module):
    """Features of a patch -> features in which good patches are alike; the projection exists only for the loss.

    Features are first brought to mean 0 and deviation 1 over the good patches.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, inside: int, settings: Pretrained, head: Head) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(inside))
        self.register_buffer("std", torch.ones(inside))
        self.adapt = projection(inside, Head(hidden=settings.hidden, out=settings.out))
        self.head = projection(settings.out, head)

    def forward(self, features: Float[Tensor, "b d"]) -> Float[Tensor, "b p"]:
        return self.head(self.adapted(features))

    def adapted(self, features: Float[Tensor, "b d"]) -> Float[Tensor, "b e"]:
        return self.adapt((features - self.mean) / self.std)


class Adapted(nn.Module):
    """Backbone and adaptor together: what a detector holds."""

    def __init__(self, backbone: Backbone, adaptor: Adaptor) -> None:
        super().__init__()
        self.backbone = backbone
        self.adaptor = adaptor

    def adapt(self, features: Float[Tensor, "n r c d"]) -> Float[Tensor, "n r c e"]:
        """The adapted features of every cell."""
        return self._through(self.adaptor.adapted, features)

    def project(self, features: Float[Tensor, "n r c d"]) -> Float[Tensor, "n r c p"]:
        """The projection of every cell: where the objective drew good patches together."""
        return self._through(self.adaptor, features)

    @torch.no_grad()
    def _through(self, layers: Callable[[Tensor], Tensor], features: Float[Tensor, "n r c d"]) -> Tensor:
        """Some cells at a time, gathered on the CPU."""
        self.adaptor.eval()
        device = self.adaptor.mean.device
        parts = [layers(part.float().to(device)).cpu() for part in features.flatten(0, 2).split(ROWS)]
        return torch.cat(parts).unflatten(0, features.shape[:3])


@dataclass(frozen=True)
class CellLooker:
    """Conditioned images in, features of their cells out; the counterpart of `Looker` for a pretrained backbone."""

    network: Adapted
    settings: Pretrained
    grid: Grid
    kinds: tuple[str, ...]
    grey: bool = False  # the good images have no colour, so plain pixels are compared without it

    def __call__(self, images: UInt8[Tensor, "n k h w"]) -> dict[str, Float[Tensor, "n r c _"]]:
        if self.kinds == (PIXELS,):
            return {PIXELS: self._pixels(images)}
        return self.seen(images, cell_features(self.network.backbone, self.settings, self.grid, images))

    def seen(
        self, images: UInt8[Tensor, "n k h w"], features: Float[Tensor, "n r c d"]
    ) -> dict[str, Float[Tensor, "n r c _"]]:
        """All that is asked for, in its order, where the features of the images are known."""
        found = self.kinds_from(features)
        return {kind: self._pixels(images) if kind == PIXELS else found[kind] for kind in self.kinds}

    def _pixels(self, images: UInt8[Tensor, "n k h w"]) -> Float[Tensor, "n r c d"]:
        """Plain pixels of the very patches the backbone describes."""
        pool = self.settings.pool
        return torch.stack([plain_cells(self.grid, pool, one[None], grey=self.grey) for one in images])

    def kinds_from(self, features: Float[Tensor, "n r c d"]) -> dict[str, Float[Tensor, "n r c _"]]:
        """Of what is asked for, all that comes from the features: themselves, adapted, projected."""
        own = described(self.settings, self.network.backbone.facts)  # what is around is for the adaptor alone
        made = {
            "backbone": lambda: features[..., :own].float(),
            "encoder": lambda: self.network.adapt(features),
            "projection": lambda: self.network.project(features),
        }
        return {kind: made[kind]() for kind in self.kinds if kind != PIXELS}


def cell_features(
    backbone: Backbone, settings: Pretrained, grid: Grid, images: UInt8[Tensor, "n k h w"]
) -> Float[Tensor, "n r c d"]:
    """What the backbone makes of every cell and its neighbours: several stages side by side, on the CPU."""
    rows, columns = grid.shape(*images.shape[-2:])
    device = backbone.mean.device
    ready = mirrored(backbone.normalise(images.to(device).float() / 255), settings.margin)
    found = backbone.stages(ready)
    first = settings.margin // grid.stride
    parts = []
    for pool in (settings.pool, settings.context) if settings.context else (settings.pool,):
        for stage in settings.stages_of(backbone.facts):
            at_cells = _at_stride(found[stage - 1], ready.shape[-1] // grid.stride, pool, margin=settings.margin > 0)
            own = at_cells[:, :, first : first + rows, first : first + columns]
            parts.append(backbone.finished(stage, own))
    return torch.cat(parts, dim=1).permute(0, 2, 3, 1).float().cpu()


def mirrored(images: Float[Tensor, "n 3 h w"], margin: int) -> Float[Tensor, "n 3 a b"]:
    """The images with a mirrored margin, filled up to a multiple of the coarsest step."""
    height, width = images.shape[-2:]
    down, right = -height % COARSEST, -width % COARSEST
    return F.pad(images, (margin, margin + right, margin, margin + down), mode="reflect")


def described(settings: Pretrained, facts: Facts) -> int:
    """How many numbers describe a patch by itself."""
    return sum(facts.channels[stage - 1] for stage in settings.stages_of(facts))


def _at_stride(stage: Float[Tensor, "n d h w"], columns: int, pool: int, *, margin: bool) -> Float[Tensor, "n d r c"]:
    """A stage averaged over its neighbourhood and brought to so many columns of cells.

    Without a margin zeros count beyond the border, as PatchCore has it: the outermost cells then weigh less.
    """
    smooth = F.avg_pool2d(stage, pool, 1, pool // 2, count_include_pad=not margin)
    width = stage.shape[-1]
    if width > columns:
        return F.avg_pool2d(smooth, width // columns)
    if width < columns:
        return F.interpolate(smooth, scale_factor=columns // width, mode="bilinear", align_corners=False)
    return smooth


def check_cells(settings: Pretrained, grid: Grid, side: int) -> None:
    """Refuse cells the stages of a backbone cannot be brought to."""
    if grid.size != grid.stride or grid.stride & (grid.stride - 1) or grid.stride > COARSEST:
        raise FirmError(
            f"features of {settings.name} describe square cells side by side; set tiling.size and tiling.stride to "
            f"one of 4, 8, 16, 32, not {grid.size} and {grid.stride}"
        )
    if side % grid.stride or side <= settings.margin + COARSEST:
        raise FirmError(
            f"images of {side} px do not fall into cells of {grid.stride} px for {settings.name}; set size to a "
            f"multiple of it above {settings.margin + COARSEST}"
        )
