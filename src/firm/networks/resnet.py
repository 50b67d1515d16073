"""ResNet-18, -34, -50 and Wide-ResNet-50-2 for large images, under the names every published checkpoint uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from firm.encoder import Block

STEM = 64


class Bottleneck(nn.Module):
    """1x1, 3x3 (which takes the stride) and 1x1 convolutions and a shortcut, ReLU after the sum."""

    def __init__(self, inside: int, middle: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, outside, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = (
            nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
            if stride != 1 or inside != outside
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)).add_(shortcut))


@dataclass(frozen=True)
class Shape:
    depths: tuple[int, int, int, int]
    block: Callable[[int, int, int, int], nn.Module]  # inside, unit, outside, stride
    widening: int = 1  # of a layer's output over its unit


def _basic(inside: int, unit: int, outside: int, stride: int) -> nn.Module:
    return Block(inside, outside, stride)


def _wide(inside: int, unit: int, outside: int, stride: int) -> nn.Module:
    return Bottleneck(inside, 2 * unit, outside, stride)


SHAPES = {
    "resnet18": Shape((2, 2, 2, 2), _basic),
    "resnet34": Shape((3, 4, 6, 3), _basic),
    "resnet50": Shape((3, 4, 6, 3), Bottleneck, widening=4),
    "wide-resnet50": Shape((3, 4, 6, 3), _wide, widening=4),
}


class ResNet(nn.Module):
    """The trunk up to its `deepest` stage; what lies behind it is not even built."""

    def __init__(self, name: str, *, deepest: int = 5) -> None:
        super().__init__()
        shape = SHAPES[name]
        self.conv1 = nn.Conv2d(3, STEM, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(STEM)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layers = [f"layer{number}" for number in range(1, deepest)]
        inside = STEM
        for number, layer in enumerate(self.layers):
            unit = STEM * 2**number
            self.add_module(layer, _layer(shape, number, inside, unit))
            inside = unit * shape.widening

    def stages(self, images: Float[Tensor, "n 3 h w"]) -> list[Tensor]:
        """The stem's output and that of each layer, n, c, r, s: at strides 2, 4, 8, 16 and 32."""
        x = self.relu(self.bn1(self.conv1(images)))
        found = [x]
        for layer in self.layers:
            x = self.get_submodule(layer)(self.maxpool(x) if layer == "layer1" else x)
            found.append(x)
        return found


def _layer(shape: Shape, number: int, inside: int, unit: int) -> nn.Sequential:
    outside = unit * shape.widening
    first = shape.block(inside, unit, outside, 1 if number == 0 else 2)
    others = [shape.block(outside, unit, outside, 1) for _ in range(shape.depths[number] - 1)]
    return nn.Sequential(first, *others)
