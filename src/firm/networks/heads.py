"""ResNet-18 with its stems, and the projection head (paper section 6 and appendix A).

The encoder's parameters carry the names every published ResNet-18 checkpoint uses, so one can be loaded.
Scores use the pooled encoder output; the projection exists only for the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from firm.types import FirmError


@dataclass(frozen=True, kw_only=True)
class Head:
    """The projection g: hidden layers with batch norm and ReLU, then a plain linear output."""

    hidden: tuple[int, ...] = (512,) * 8
    out: int = 128
    last_norm: bool = False  # the authors' code ends on a batch norm without scale, which resists collapse

    def __post_init__(self) -> None:
        if min((*self.hidden, self.out)) < 1:
            raise FirmError(f"a head of {self.hidden} + {self.out} has an empty layer; use sizes of at least 1")


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Settings of the encoder f and its head; `build` makes the network."""

    width: int = 64
    stem: str = "3x3"
    norm_momentum: float = 0.1
    weights: str = ""  # a ResNet-18 checkpoint (safetensors) to start from; the paper starts from scratch
    head: Head = field(default_factory=Head)

    def __post_init__(self) -> None:
        if self.stem not in STEMS:
            raise FirmError(f"no stem {self.stem!r}; use one of {', '.join(STEMS)}")
        if not 0 <= self.norm_momentum <= 1:
            raise FirmError(f"encoder.norm_momentum is {self.norm_momentum}; it must lie in 0..1")
        if self.width < 1:
            raise FirmError(f"encoder.width is {self.width}; it must be at least 1")


@dataclass(frozen=True)
class Stem:
    kernel: int
    stride: int
    pool: bool


STEMS = {
    "3x3": Stem(3, 1, pool=False),  # 32 and 64 px
    "3x3/2": Stem(3, 2, pool=False),  # a quarter of the operations, for a CPU
    "7x7": Stem(7, 2, pool=True),  # large images
}


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, ReLU after the sum."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = (
            nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
            if stride != 1 or inside != outside
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)).add_(shortcut))


class ResNet18(nn.Module):
    """Images to pooled features of 8 x width numbers, all non-negative."""

    def __init__(self, settings: Encoder) -> None:
        super().__init__()
        width, stem = settings.width, STEMS[settings.stem]
        self.dim = 8 * width
        self.step = 8 * stem.stride * (2 if stem.pool else 1)
        self.memory_format = memory_format(width)
        self.conv1 = nn.Conv2d(3, width, stem.kernel, stem.stride, stem.kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if stem.pool else nn.Identity()
        self.layer1 = _stage(width, width, 1)
        self.layer2 = _stage(width, 2 * width, 2)
        self.layer3 = _stage(2 * width, 4 * width, 2)
        self.layer4 = _stage(4 * width, 8 * width, 2)

    def forward(self, images: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n d"]:
        return self.places(images).mean(dim=(2, 3))

    def places(self, images: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n d r c"]:
        """The features before pooling: one vector for every `step` pixels."""
        return self.stages(images)[-1]

    def stages(self, images: Float[Tensor, "n 3 h w"]) -> list[Tensor]:
        """What each of the four stages makes of the images, n, d, r, c: each half as fine as the one before."""
        x = self.conv1(images.contiguous(memory_format=self.memory_format))
        x = self.maxpool(self.relu(self.bn1(x)))  # n, width, h, w
        found = []
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
            found.append(x)
        return found  # the last: n, 8 width, h/step, w/step


class Network(nn.Module):
    """Encoder and head together: what training moves."""

    def __init__(self, settings: Encoder) -> None:
        super().__init__()
        self.encoder = ResNet18(settings)
        self.head = projection(self.encoder.dim, settings.head)

    def forward(self, images: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n p"]:
        return self.head(self.encoder(images))


def build(settings: Encoder, *, rng: torch.Generator) -> Network:
    """A freshly initialised network; every weight comes from `rng`."""
    network = Network(settings)
    draw_weights(network, settings.norm_momentum, rng=rng)
    if settings.weights:
        load_weights(network, Path(settings.weights))
    return arranged(network)


def draw_weights(network: nn.Module, norm_momentum: float, *, rng: torch.Generator) -> None:
    """Draw every weight anew."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=rng)
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.momentum = norm_momentum


def arranged(network: Network) -> Network:
    """The network with its weights in the memory layout it computes in."""
    return network.to(memory_format=network.encoder.memory_format)  # type: ignore[call-overload]


def memory_format(width: int) -> torch.memory_format:
    """Channels last is the fast layout, but oneDNN's backward pass corrupts memory there below 8 channels."""
    return torch.channels_last if width >= 8 else torch.contiguous_format


def load_weights(network: Network, path: Path) -> None:
    """Put a ResNet-18 checkpoint (safetensors) into the encoder; a classifier `fc` in it is left aside."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise FirmError(f"{path} is not a readable safetensors file ({error}); convert the checkpoint first") from error
    weights = {name: value for name, value in weights.items() if not name.startswith("fc.")}
    own = network.encoder.state_dict()
    for name, value in own.items():
        if name.endswith("num_batches_tracked"):
            weights.setdefault(name, value)
        elif name not in weights:
            raise FirmError(f"{path} has no {name!r}; it is not a ResNet-18 checkpoint of the usual naming")
        elif weights[name].shape != value.shape:
            raise FirmError(
                f"{path}: {name} is {tuple(weights[name].shape)}, the encoder wants {tuple(value.shape)}; "
                "set encoder.width and encoder.stem to those of the checkpoint"
            )
    network.encoder.load_state_dict({name: weights[name] for name in own})


@torch.no_grad()
def embed(encoder: ResNet18, images: Iterator[Tensor]) -> Float[Tensor, "n d"]:
    """Features of ready image batches, in evaluation mode, gathered on the CPU."""
    encoder.eval()
    device = next(encoder.parameters()).device
    parts = [encoder(batch.to(device)).float().cpu() for batch in images]
    return torch.cat(parts) if parts else torch.empty(0, encoder.dim)


def _stage(inside: int, outside: int, stride: int) -> nn.Sequential:
    return nn.Sequential(Block(inside, outside, stride), Block(outside, outside, 1))


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
