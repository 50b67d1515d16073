"""ResNet-18, -34, -50 and Wide-ResNet-50-2: the encoder FIRM trains, and a frozen backbone for large images.

Parameters carry the names that published checkpoints use, so one can be loaded.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from firm.networks.backbone import Trunk, reach_of

UNIT = 64  # width of the published networks
STEMS = {  # kernel, stride, whether max-pooling follows
    "3x3": (3, 1, False),  # for images of 32 and 64 px
    "3x3/2": (3, 2, False),  # a quarter of the operations, for a CPU
    "7x7": (7, 2, True),  # for large images; that of published checkpoints
}
SHAPES = {  # blocks of each layer, and how wide the middle of a bottleneck is; 0: basic blocks
    "resnet18": ((2, 2, 2, 2), 0),
    "resnet34": ((3, 4, 6, 3), 0),
    "resnet50": ((3, 4, 6, 3), 1),
    "wide-resnet50": ((3, 4, 6, 3), 2),
}
WIDENING = 4  # of a bottleneck's output


class Block(nn.Module):
    """Two 3x3 convolutions, or 1x1, 3x3 and 1x1 with so wide a `middle`, and a shortcut; ReLU after the sum."""

    def __init__(self, inside: int, outside: int, stride: int, middle: int = 0) -> None:
        super().__init__()
        shapes = [(inside, outside, 3, stride), (outside, outside, 3, 1)]
        if middle:
            shapes = [(inside, middle, 1, 1), (middle, middle, 3, stride), (middle, outside, 1, 1)]
        self.depth = len(shapes)
        for number, (before, after, kernel, step) in enumerate(shapes, start=1):
            self.add_module(f"conv{number}", nn.Conv2d(before, after, kernel, step, kernel // 2, bias=False))
            self.add_module(f"bn{number}", nn.BatchNorm2d(after))
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(inside, outside, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        for number in range(1, self.depth + 1):
            x = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(x))
            x = self.relu(x if number < self.depth else x.add_(shortcut))
        return x


class ResNet(Trunk):
    """Images to pooled features, all non-negative, or to the output of each stage.

    `width` is that of the stem; the last layer is 8 times as wide (32 with bottlenecks). Of the five stages nothing
    behind `deepest` is built.
    """

    def __init__(self, name: str, *, width: int = UNIT, stem: str = "7x7", deepest: int = 5) -> None:
        super().__init__()
        kernel, stride, pool = STEMS[stem]
        # channels last is the fast layout, but oneDNN's backward pass corrupts memory there below 8 channels
        self.memory_format = torch.channels_last if width >= 8 else torch.contiguous_format
        self.conv1 = nn.Conv2d(3, width, kernel, stride, kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if pool else nn.Identity()
        self.layers = [f"layer{number}" for number in range(1, deepest)]
        self.dim = width  # numbers of a pooled feature
        for number, layer in enumerate(self.layers):
            unit = width * 2**number
            self.add_module(layer, _layer(name, number, self.dim, unit))
            self.dim = unit * (WIDENING if SHAPES[name][1] else 1)
        self.reach = reach_of(self.modules())

    def forward(self, images: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n d"]:
        return self.stages(images)[-1].mean(dim=(2, 3))

    def stages(self, images: Float[Tensor, "n 3 h w"]) -> list[Tensor]:
        """The output of the stem and of each layer, n, c, r, s: with the stem 7x7 at strides 2, 4, 8, 16 and 32."""
        x = self.relu(self.bn1(self.conv1(images.contiguous(memory_format=self.memory_format))))
        outputs = [x]
        x = self.maxpool(x)
        for layer in self.layers:
            x = self.get_submodule(layer)(x)
            outputs.append(x)
        return outputs


def _layer(name: str, number: int, inside: int, unit: int) -> nn.Sequential:
    depths, middle = SHAPES[name]
    outside = WIDENING * unit if middle else unit
    blocks: list[nn.Module] = []
    for block in range(depths[number]):
        stride = 2 if number and not block else 1
        blocks.append(Block(inside, outside, stride, middle * unit))
        inside = outside
    return nn.Sequential(*blocks)


def _downsample(inside: int, outside: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inside == outside:
        return None
    return nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
