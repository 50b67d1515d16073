"""Weights of a public guided-diffusion checkpoint in the names of diffusers' U-Net.

RealNet starts from the class-conditional ImageNet model of 256 px (256x256_diffusion.pt). The embedding of its 1,000
classes is replaced, so it is left out here.
"""

from collections.abc import Iterator

from jaxtyping import Float
from torch import Tensor, nn

from firm.diffusion.model import Denoiser
from firm.errors import ModelFileError

RESIDUAL = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
ENDS = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}


def start_from(network: nn.Module, settings: Denoiser, tensors: dict[str, Tensor]) -> None:
    """Put a checkpoint's weights into a denoiser of the same shape; the embedding of classes stays as it is."""
    wanted = {name: value for name, value in network.state_dict().items() if not name.startswith("class_embedding")}
    found = renamed(tensors, settings)
    wrong = sorted(wanted.keys() ^ found.keys()) or sorted(n for n in wanted if wanted[n].shape != found[n].shape)
    if wrong:
        raise ModelFileError(
            f"the checkpoint is no guided-diffusion model of this shape ({len(wrong)} tensors differ, such as "
            f"{wrong[0]}); give 256x256_diffusion.pt, or leave the weights out"
        )
    network.load_state_dict(found, strict=False)


def renamed(tensors: dict[str, Tensor], settings: Denoiser) -> dict[str, Tensor]:
    """The checkpoint's tensors under diffusers' names; what has no place there keeps its own."""
    places, result = dict(_places(settings)), dict[str, Tensor]()
    for name, value in tensors.items():
        owner, _, kind = name.rpartition(".")
        if name.startswith("label_emb."):
            continue
        if owner.endswith(".qkv"):
            place = places.get(owner.removesuffix(".qkv"), owner)
            for which, part in zip(("to_q", "to_k", "to_v"), _heads(value, settings.head), strict=True):
                result[f"{place}.{which}.{kind}"] = part
            continue
        place = ENDS.get(owner) or _inner(owner, places) or owner
        result[f"{place}.{kind}"] = value.squeeze(-1) if owner.endswith("proj_out") and value.dim() == 3 else value
    return result


def _heads(value: Float[Tensor, "c ..."], head: int) -> list[Tensor]:
    """Query, key and value of all heads; the checkpoint has the three of the first head, then of the second, ..."""
    value = value.squeeze(-1) if value.dim() == 3 else value
    return [part.flatten(0, 1) for part in value.unflatten(0, (-1, 3, head)).unbind(1)]


def _inner(owner: str, places: dict[str, str]) -> str | None:
    """The place of a layer within a residual block or an attention."""
    for old, new in (*RESIDUAL.items(), ("norm", "group_norm"), ("proj_out", "to_out.0")):
        if owner.endswith(f".{old}") and (block := owner.removesuffix(f".{old}")) in places:
            return f"{places[block]}.{new}"
    return None


def _places(settings: Denoiser) -> Iterator[tuple[str, str]]:
    """Each residual block and attention: its name in the checkpoint, and in diffusers."""
    levels, layers = len(settings.channels), settings.layers
    attentive = [settings.side >> level in settings.attention for level in range(levels)]
    number = 1
    for level in range(levels):
        for layer in range(layers):
            yield f"input_blocks.{number}.0", f"down_blocks.{level}.resnets.{layer}"
            if attentive[level]:
                yield f"input_blocks.{number}.1", f"down_blocks.{level}.attentions.{layer}"
            number += 1
        if level < levels - 1:
            yield f"input_blocks.{number}.0", f"down_blocks.{level}.downsamplers.0"
            number += 1
    for place, inside in enumerate(("resnets.0", "attentions.0", "resnets.1")):
        yield f"middle_block.{place}", f"mid_block.{inside}"
    number = 0
    for block, level in enumerate(reversed(range(levels))):
        for layer in range(layers + 1):
            yield f"output_blocks.{number}.0", f"up_blocks.{block}.resnets.{layer}"
            if attentive[level]:
                yield f"output_blocks.{number}.1", f"up_blocks.{block}.attentions.{layer}"
            if layer == layers and level > 0:
                yield f"output_blocks.{number}.{1 + attentive[level]}", f"up_blocks.{block}.upsamplers.0"
            number += 1
