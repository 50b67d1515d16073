"""The denoiser: a U-Net of the diffusers library that tells the noise in an image, its sizes, and its file.

Noise levels are DDPM's: 1,000 linear betas from 1e-4 to 0.02. Images are in -1..1 and have three channels.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from firm.errors import MachineError, ModelFileError, SettingError
from firm.images.preprocess import resize
from firm.runtime.files import Card, load_tensors, save_tensors
from firm.runtime.random import stream_seed

TIMES = 1000  # noise levels
BETAS = (1e-4, 0.02)
KIND, SCHEMA = "diffusion model", 1
INSTALL = "pip install -c constraints.txt 'firm[diffusion]'"

Noised = Float[Tensor, "b 3 s s"]


@dataclass(frozen=True, kw_only=True)
class Denoiser:
    """The shape of a denoiser: one level per entry of `channels`, each half as wide as the one before."""

    side: int = 64  # px of its images
    channels: tuple[int, ...] = (32, 64, 128, 128)
    layers: int = 1  # residual blocks of a level
    attention: tuple[int, ...] = (8,)  # sides of the levels with self-attention
    head: int = 32  # channels of an attention head
    residual_resampling: bool = False  # residual blocks change the side, and time scales and shifts (guided diffusion)
    learned_sigma: bool = False  # three more outputs: the variance of a step, within its bounds
    classes: tuple[str, ...] = ("part",)  # products; the model is told which one if there are several

    def __post_init__(self) -> None:
        halvings = 2 ** (len(self.channels) - 1)
        for name, allowed, fix in (
            ("channels", bool(self.channels) and all(c % 32 == 0 for c in self.channels), "use multiples of 32"),
            ("side", self.side > 0 and self.side % halvings == 0, f"use a multiple of {halvings}"),
            ("layers", self.layers >= 1, "use 1 or more"),
            ("head", all(c % self.head == 0 for c in self.channels), "it must divide the channels of every level"),
            ("classes", 0 < len(self.classes) == len(set(self.classes)), "name each product once"),
        ):
            if not allowed:
                raise SettingError(f"the denoiser's {name} is {getattr(self, name)!r}; {fix}")


SIZES = {  # the keys are those of `firm.outliers.sia.MODELS`
    "tiny": Denoiser(),
    "paper": Denoiser(  # RealNet's: that of guided diffusion at 256 px, 554 M parameters
        side=256,
        channels=(256, 256, 512, 512, 1024, 1024),
        layers=2,
        attention=(32, 16, 8),
        head=64,
        residual_resampling=True,
        learned_sigma=True,
    ),
}


@cache
def alpha_bar() -> Float[Tensor, " t"]:
    """The part of an image's variance that is left at each noise level."""
    return torch.cumprod(1 - torch.linspace(*BETAS, TIMES), dim=0)


def diffusers() -> ModuleType:
    """The library, which is an optional extra."""
    try:
        return import_module("diffusers")
    except ImportError as error:
        raise MachineError(f"making images needs the package diffusers, which is not installed; {INSTALL}") from error


def unet_settings(settings: Denoiser) -> dict[str, Any]:
    """The arguments of diffusers' `UNet2DModel`."""
    sides = [settings.side >> level for level in range(len(settings.channels))]
    plain = ("ResnetDownsampleBlock2D", "ResnetUpsampleBlock2D")
    plain = plain if settings.residual_resampling else ("DownBlock2D", "UpBlock2D")
    how = "resnet" if settings.residual_resampling else "conv"
    attentive = [side in settings.attention for side in sides]
    return {
        "sample_size": settings.side,
        "in_channels": 3,
        "out_channels": 6 if settings.learned_sigma else 3,
        "block_out_channels": settings.channels,
        "layers_per_block": settings.layers,
        "down_block_types": tuple("AttnDownBlock2D" if each else plain[0] for each in attentive),
        "up_block_types": tuple("AttnUpBlock2D" if each else plain[1] for each in reversed(attentive)),
        "downsample_type": how,
        "upsample_type": how,
        "resnet_time_scale_shift": "scale_shift" if settings.residual_resampling else "default",
        "attention_head_dim": settings.head,
        "attn_norm_num_groups": 32,
        "num_class_embeds": len(settings.classes) if len(settings.classes) > 1 else None,
    }


def build(settings: Denoiser, *, seed: int) -> nn.Module:
    """A denoiser with initial weights that depend on the seed alone."""
    unet = diffusers().UNet2DModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(seed, "denoiser weights"))
        network: nn.Module = unet(**unet_settings(settings))
    return network


def predict(network: nn.Module, noisy: Noised, times: Int[Tensor, " b"], labels: Int[Tensor, " b"]) -> Tensor:
    """The noise in each image, and behind it the variance of its step where that is learnt."""
    conditional = getattr(network, "class_embedding", None) is not None
    return network(noisy, times, class_labels=labels if conditional else None, return_dict=False)[0]


def to_model(images: UInt8[Tensor, "n c h w"], side: int) -> UInt8[Tensor, "n 3 s s"]:
    """Good images at the side and with the channels of a model."""
    return resize(images, side).expand(-1, 3, -1, -1).contiguous()


@dataclass(frozen=True)
class DiffusionModel:
    """A trained denoiser with the averaged weights, and where it comes from."""

    network: nn.Module
    settings: Denoiser
    origin: Card

    @property
    def id(self) -> str:
        """A digest of settings and origin, which name all that decides the weights."""
        text = json.dumps([asdict(self.settings), self.origin], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """One file: safetensors and a JSON card."""
        card = {"settings": asdict(self.settings), "origin": self.origin}
        save_tensors(path, dict(self.network.state_dict()), card, kind=KIND, schema=SCHEMA)

    @classmethod
    def load(cls, path: Path, device: torch.device | str = "cpu") -> "DiffusionModel":
        tensors, card = load_tensors(path, kind=KIND, schema=SCHEMA)
        try:
            stored: Card = {name: tuple(v) if isinstance(v, list) else v for name, v in card["settings"].items()}
            settings, origin = Denoiser(**stored), card["origin"]
            network = build(settings, seed=0)
            network.load_state_dict(tensors)
        except (KeyError, TypeError, RuntimeError) as error:
            why = str(error).splitlines()[0]
            raise ModelFileError(f"{path} does not describe a diffusion model ({why}); train it again") from error
        return cls(network.to(device).eval(), settings, origin)


def sized(name: str, classes: tuple[str, ...] = ("part",), **changes: Any) -> Denoiser:
    """A denoiser by the name of its size."""
    if name not in SIZES:
        raise SettingError(f"no diffusion model {name!r}; use one of {', '.join(SIZES)}")
    return replace(SIZES[name], classes=classes, **changes)
