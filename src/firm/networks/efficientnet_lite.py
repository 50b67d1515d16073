"""EfficientNet-Lite: inverted bottlenecks with ReLU6 and without squeeze-and-excitation, cheap on a CPU.

Parameters carry the names of timm's checkpoints; `timm_names` renames those of the PyPI packages.
"""

import math
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from firm.networks.backbone import Trunk, reach_of

EPS = 1e-3  # of every batch norm, as the weights were trained with
STEM = 32  # channels; neither stem nor first and last group are scaled
EXPANSION = 6


@dataclass(frozen=True)
class Group:
    """Blocks of one width; the first of them takes the stride."""

    kernel: int
    stride: int
    width: int
    repeats: int


GROUPS = (
    Group(3, 1, 16, 1),
    Group(3, 2, 24, 2),
    Group(5, 2, 40, 2),
    Group(3, 2, 80, 3),
    Group(5, 1, 112, 3),
    Group(5, 2, 192, 4),
    Group(3, 1, 320, 1),
)
STAGE_ENDS = (1, 2, 3, 5, 7)  # groups done when a stage is: right before the next halving, or at the end
SCALES = {  # of width and of depth
    "efficientnet-lite0": (1.0, 1.0),
    "efficientnet-lite1": (1.0, 1.1),
    "efficientnet-lite2": (1.1, 1.2),
}


class Halving(nn.Conv2d):
    """A convolution of stride 2 that pads as TensorFlow does: where a size is even, one zero more behind than before.

    There it pads both sides by one more and drops the first output, so that no padded copy of the input is made.
    """

    def __init__(self, inside: int, outside: int, kernel: int, *, groups: int = 1) -> None:
        super().__init__(inside, outside, kernel, 2, kernel // 2, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (1 - size % 2 for size in x.shape[-2:])
        around = (self.kernel_size[0] // 2 + rows, self.kernel_size[1] // 2 + columns)
        outputs = F.conv2d(x, self.weight, self.bias, self.stride, around, groups=self.groups)
        return outputs[:, :, rows:, columns:]


class Separable(nn.Module):
    """The first block, which expands nothing: depthwise, then pointwise."""

    def __init__(self, inside: int, group: Group) -> None:
        super().__init__()
        self.conv_dw = _depthwise(inside, group.kernel, group.stride)
        self.bn1 = nn.BatchNorm2d(inside, eps=EPS)
        self.conv_pw = nn.Conv2d(inside, group.width, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(group.width, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.bn1(self.conv_dw(x)), inplace=True)
        return self.bn2(self.conv_pw(y))


class Inverted(nn.Module):
    """Expand, filter each channel, project; the input is added where it has the shape of the output."""

    def __init__(self, inside: int, kernel: int, stride: int, outside: int) -> None:
        super().__init__()
        middle = EXPANSION * inside
        self.shortcut = stride == 1 and inside == outside
        self.conv_pw = nn.Conv2d(inside, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle, eps=EPS)
        self.conv_dw = _depthwise(middle, kernel, stride)
        self.bn2 = nn.BatchNorm2d(middle, eps=EPS)
        self.conv_pwl = nn.Conv2d(middle, outside, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outside, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.bn1(self.conv_pw(x)), inplace=True)
        y = F.relu6(self.bn2(self.conv_dw(y)), inplace=True)
        y = self.bn3(self.conv_pwl(y))
        return y.add_(x) if self.shortcut else y


class EfficientNetLite(Trunk):
    """The trunk up to its `deepest` stage; nothing behind it is built."""

    def __init__(self, name: str, *, deepest: int = 5) -> None:
        super().__init__()
        self.ends = STAGE_ENDS[:deepest]
        self.conv_stem = Halving(3, STEM, 3)
        self.bn1 = nn.BatchNorm2d(STEM, eps=EPS)
        self.blocks = nn.ModuleList()
        inside = STEM
        for group in groups_of(name)[: self.ends[-1]]:
            self.blocks.append(_blocks(inside, group))
            inside = group.width
        self.reach = reach_of(self.modules())

    def stages(self, images: Float[Tensor, "n 3 h w"]) -> list[Tensor]:
        """The last output before each halving, n, c, r, s: at strides 2, 4, 8, 16 and 32."""
        x = F.relu6(self.bn1(self.conv_stem(images)), inplace=True)
        outputs = []
        for number, blocks in enumerate(self.blocks, start=1):
            x = blocks(x)
            if number in self.ends:
                outputs.append(x)
        return outputs


def groups_of(name: str) -> tuple[Group, ...]:
    """The groups of a variant: depths rounded up, widths to multiples of 8; first and last keep their depth."""
    width, depth = SCALES[name]
    first, *middle, last = (replace(group, width=rounded(group.width * width)) for group in GROUPS)
    return (first, *(replace(group, repeats=math.ceil(group.repeats * depth)) for group in middle), last)


def rounded(width: float) -> int:
    """The nearest multiple of 8, but never a tenth less than asked for."""
    nearest = max(8, int(width + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * width else nearest


STEM_NAMES = {"_conv_stem": "conv_stem", "_bn0": "bn1"}
FIRST_NAMES = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
BLOCK_NAMES = {"_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw", "_bn1": "bn2"}
BLOCK_NAMES |= {"_project_conv": "conv_pwl", "_bn2": "bn3"}


def timm_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of timm, if they carry those of the PyPI packages, which number all blocks in one row."""
    blocks = len({name.split(".")[1] for name in tensors if name.startswith("_blocks.")})
    for variant in SCALES:
        groups = enumerate(groups_of(variant))
        places = [f"blocks.{row}.{column}" for row, group in groups for column in range(group.repeats)]
        if "_conv_stem.weight" in tensors and len(places) == blocks:
            return {_timm_name(name, places): value for name, value in tensors.items()}
    return tensors


def _timm_name(name: str, places: list[str]) -> str:
    first, *rest = name.split(".")
    if first != "_blocks":
        return ".".join([STEM_NAMES.get(first, first), *rest])
    number, layer, *rest = rest
    names = BLOCK_NAMES if int(number) else FIRST_NAMES
    return ".".join([places[int(number)], names.get(layer, layer), *rest])


def _blocks(inside: int, group: Group) -> nn.Sequential:
    if inside == STEM:
        return nn.Sequential(Separable(inside, group))
    first = Inverted(inside, group.kernel, group.stride, group.width)
    others = [Inverted(group.width, group.kernel, 1, group.width) for _ in range(group.repeats - 1)]
    return nn.Sequential(first, *others)


def _depthwise(channels: int, kernel: int, stride: int) -> nn.Conv2d:
    if stride == 1:
        return nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=channels, bias=False)
    return Halving(channels, channels, kernel, groups=channels)
