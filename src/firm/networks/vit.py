"""A vision transformer, DINOv2 small: self-supervised features, strong on textures, from a weights file only.

Parameters carry the official names; `official_names` renames those of Hugging Face. A stage is the map of patch tokens
after a block, without the class token and the last norm. Stages 1..5 are the blocks 2, 4, 6, 8 and 9 of 12: patches
take blocks 6 and 8 by default, whole images 8 and 9. The last three, which found defects worse in a trial of one file,
are neither kept nor computed.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from firm.networks.backbone import Trunk

EPS = 1e-6  # of every layer norm, as the weights were trained with
WIDENING = 4  # of the middle of a block's two layers


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a transformer, and the blocks, counted from 1, that its stages are."""

    patch: int  # px along each side of a token
    width: int
    heads: int
    blocks: int  # of the published network; those behind the last stage are not built
    grid: int  # tokens along each side of the images it was trained with last
    stages: tuple[int, ...]


SHAPES = {"dinov2-small": Shape(patch=14, width=384, heads=6, blocks=12, grid=37, stages=(2, 4, 6, 8, 9))}


class Attention(nn.Module):
    """Every token takes from all tokens, by several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "n t c"]) -> Float[Tensor, "n t c"]:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, x.shape[-1] // self.heads))
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Layers(nn.Module):
    """Two layers with GELU between, on each token alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, WIDENING * width)
        self.fc2 = nn.Linear(WIDENING * width, width)

    def forward(self, x: Float[Tensor, "n t c"]) -> Float[Tensor, "n t c"]:
        return self.fc2(F.gelu(self.fc1(x)))


class LayerScale(nn.Module):
    """A learnt factor for each channel of what a block adds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Float[Tensor, "n t c"]) -> Float[Tensor, "n t c"]:
        return x * self.gamma


class Block(nn.Module):
    """Attention, then two layers; each sees normalised tokens and adds to them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=EPS)
        self.attn = Attention(width, heads)
        self.ls1 = LayerScale(width)
        self.norm2 = nn.LayerNorm(width, eps=EPS)
        self.mlp = Layers(width)
        self.ls2 = LayerScale(width)

    def forward(self, x: Float[Tensor, "n t c"]) -> Float[Tensor, "n t c"]:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class PatchEmbedding(nn.Module):
    """Patches side by side to tokens."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, patch)

    def forward(self, images: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n c r s"]:
        return self.proj(images)


class ViT(Trunk):
    """The trunk up to its `deepest` stage; nothing behind it is built."""

    def __init__(self, shape: Shape, *, deepest: int = 5) -> None:
        super().__init__()
        self.shape = shape
        self.ends = shape.stages[:deepest]
        self.patch_embed = PatchEmbedding(shape.patch, shape.width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, shape.width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + shape.grid**2, shape.width))
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(self.ends[-1]))

    def stages(self, images: Float[Tensor, "n 3 h w"]) -> list[Tensor]:
        """The tokens after each block that is a stage, n, c, r, s: one for every patch of the whole image.

        Images are enlarged to the next multiple of the patch, so that the tokens cover exactly what was given.
        """
        tokens = self.patch_embed(self._whole_patches(images))
        rows, columns = tokens.shape[-2:]
        x = torch.cat([self.cls_token.expand(len(tokens), -1, -1), tokens.flatten(2).transpose(1, 2)], dim=1)
        x = x + self.positions(rows, columns)
        outputs = []
        for number, block in enumerate(self.blocks, start=1):
            x = block(x)
            if number in self.ends:
                outputs.append(x[:, 1:].transpose(1, 2).unflatten(2, (rows, columns)))
        return outputs

    def positions(self, rows: int, columns: int) -> Float[Tensor, "1 t c"]:
        """What is added to the class token and to the tokens of such a grid.

        Interpolated to its size, bicubic and without antialiasing, as Hugging Face does; the official code does the
        same but for an offset of 0.1 token in the scale.
        """
        side = self.shape.grid
        if (rows, columns) == (side, side):
            return self.pos_embed
        learnt = self.pos_embed[:, 1:].transpose(1, 2).unflatten(2, (side, side))
        resized = F.interpolate(learnt, size=(rows, columns), mode="bicubic", align_corners=False)
        return torch.cat([self.pos_embed[:, :1], resized.flatten(2).transpose(1, 2)], dim=1)

    def _whole_patches(self, images: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 3 a b"]:
        height, width = (-(-side // self.shape.patch) * self.shape.patch for side in images.shape[-2:])
        if (height, width) == images.shape[-2:]:
            return images
        return F.interpolate(images, size=(height, width), mode="bicubic", align_corners=False)


PREFIX = "dinov2."  # before every name of a Hugging Face model with a head
STEM_NAMES = {
    "embeddings.cls_token": "cls_token",
    "embeddings.mask_token": "mask_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection.weight": "patch_embed.proj.weight",
    "embeddings.patch_embeddings.projection.bias": "patch_embed.proj.bias",
    "layernorm.weight": "norm.weight",
    "layernorm.bias": "norm.bias",
}
BLOCK_NAMES = {"attention.output.dense": "attn.proj", "layer_scale1.lambda1": "ls1.gamma"}
BLOCK_NAMES |= {"layer_scale2.lambda1": "ls2.gamma"}
APART = ".attention.attention."  # queries, keys and values at Hugging Face; officially they are one tensor
BEHIND = ("mask_token", "norm.", "head.")  # what no stage needs


def official_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a DINOv2 under the official names, without what no stage needs; others as they are."""
    tensors = {name.removeprefix(PREFIX): value for name, value in tensors.items()}
    if "embeddings.cls_token" in tensors:
        tensors = _joined({_official_name(name): value for name, value in tensors.items()})
    if "cls_token" not in tensors:
        return tensors
    blocks = {number for shape in SHAPES.values() for number in range(shape.stages[-1], shape.blocks)}
    behind = (*BEHIND, *(f"blocks.{number}." for number in blocks))
    return {name: value for name, value in tensors.items() if not name.startswith(behind)}


def _official_name(name: str) -> str:
    if not name.startswith("encoder.layer."):
        return STEM_NAMES.get(name, name)
    number, _, rest = name.removeprefix("encoder.layer.").partition(".")
    for theirs, ours in BLOCK_NAMES.items():
        rest = rest.replace(theirs, ours)
    return f"blocks.{number}.{rest}"


def _joined(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Queries, keys and values one below the other; where one of them is missing, as they are."""
    joined = dict(tensors)
    for name in tensors:
        block, found, kind = name.partition(f"{APART}query.")
        three = [f"{block}{APART}{part}.{kind}" for part in ("query", "key", "value")]
        shapes = {tensors[part].shape if part in tensors else None for part in three}
        if found and len(shapes) == 1:
            joined[f"{block}.attn.qkv.{kind}"] = torch.cat([joined.pop(part) for part in three])
    return joined
