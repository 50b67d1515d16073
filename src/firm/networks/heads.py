"""The projection head, and encoder and head together as the network that is trained (section 6 and appendix A).

Scores use the pooled encoder output; the projection exists for the loss.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from firm.errors import ModelFileError, SettingError
from firm.networks.resnet import STEMS, ResNet
from firm.networks.weights import differences, fill, read_weights


@dataclass(frozen=True, kw_only=True)
class Head:
    """The projection g: hidden layers with batch norm and ReLU, then a plain linear output."""

    hidden: tuple[int, ...] = (512,) * 8
    out: int = 128
    last_norm: bool = False  # the authors' code ends on a batch norm without scale, which resists collapse

    def __post_init__(self) -> None:
        if min((*self.hidden, self.out)) < 1:
            raise SettingError(f"a head of {self.hidden} + {self.out} has an empty layer; use sizes of at least 1")


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Settings of the encoder f, a ResNet-18, and its head; `build` makes the network."""

    width: int = 64
    stem: str = "3x3"
    norm_momentum: float = 0.1
    weights: str = ""  # a ResNet-18 checkpoint to start from; the paper starts from scratch
    head: Head = field(default_factory=Head)

    def __post_init__(self) -> None:
        if self.stem not in STEMS:
            raise SettingError(f"encoder.stem is {self.stem!r}; use one of {', '.join(STEMS)}")
        if not 0 <= self.norm_momentum <= 1:
            raise SettingError(f"encoder.norm_momentum is {self.norm_momentum}; it must lie in 0..1")
        if self.width < 1:
            raise SettingError(f"encoder.width is {self.width}; it must be at least 1")


@runtime_checkable
class ImageEncoder(Protocol):
    """A module that turns normalised images into one vector each."""

    @property
    def dim(self) -> int: ...
    def eval(self) -> Any: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def __call__(self, images: Tensor) -> Tensor: ...


class Network(nn.Module):
    """Encoder and head together: what training changes."""

    def __init__(self, settings: Encoder) -> None:
        super().__init__()
        self.encoder = ResNet("resnet18", width=settings.width, stem=settings.stem)
        self.head = projection(self.encoder.dim, settings.head)

    def forward(self, images: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n p"]:
        return self.head(self.encoder(images))

    def describe(self) -> dict[str, Any]:
        """What the card says beside the recipe: nothing."""
        return {}


def projection(inside: int, settings: Head) -> nn.Sequential:
    """The layers a head describes, for inputs of so many numbers."""
    layers: list[nn.Module] = []
    for outside in settings.hidden:
        layers += [nn.Linear(inside, outside, bias=False), nn.BatchNorm1d(outside), nn.ReLU(inplace=True)]
        inside = outside
    layers.append(nn.Linear(inside, settings.out, bias=False))
    if settings.last_norm:
        layers.append(nn.BatchNorm1d(settings.out, affine=False))
    return nn.Sequential(*layers)


def build(settings: Encoder, *, rng: torch.Generator) -> Network:
    """A freshly initialised network; every weight comes from `rng`, or the encoder's from its weights file."""
    network = Network(settings)
    draw_weights(network, settings.norm_momentum, rng=rng)
    if settings.weights:
        load_weights(network, Path(settings.weights))
    return arranged(network)


def draw_weights(network: nn.Module, norm_momentum: float, *, rng: torch.Generator) -> None:
    """Draw the weights of every layer."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=rng)
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.momentum = norm_momentum


def load_weights(network: Network, path: Path) -> None:
    """Put a ResNet-18 checkpoint into the encoder; a classifier in it is left aside."""
    tensors = read_weights(path)
    wrong = differences(network.encoder, tensors)
    if wrong:
        fix = "set encoder.width and encoder.stem to its own"
        raise ModelFileError(f"{path} is no ResNet-18 of these settings: {wrong[0]}; {fix}")
    fill(network.encoder, tensors)


def arranged(network: Network) -> Network:
    """The network with its weights in the memory layout it computes in."""
    return network.to(memory_format=network.encoder.memory_format)  # type: ignore[call-overload]


@torch.no_grad()
def embed(encoder: ImageEncoder, images: Iterator[Tensor]) -> Float[Tensor, "n d"]:
    """Features of batches of normalised images, in evaluation mode, gathered on the CPU."""
    encoder.eval()
    device = next(encoder.parameters()).device
    parts = [encoder(batch.to(device)).float().cpu() for batch in images]
    return torch.cat(parts) if parts else torch.empty(0, encoder.dim)
