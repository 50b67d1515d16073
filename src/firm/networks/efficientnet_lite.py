"""EfficientNet-Lite: inverted bottlenecks with ReLU6 and without squeeze-and-excitation, cheap on a CPU.

Parameters carry the names of timm's checkpoints; `timm_names` renames those of the PyPI packages.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import torch
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


class Convolution(nn.Conv2d):
    """A convolution as TensorFlow pads it: of stride 2, where a size is even, one zero more behind than before.

    There it pads both sides by one more and drops the first output, so that no padded copy of the input is made.
    """

    def __init__(self, inside: int, outside: int, kernel: int = 1, stride: int = 1, *, groups: int = 1) -> None:
        super().__init__(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self._convolved(x)

    def clipped(self, x: Tensor, norm: nn.Module) -> Tensor:
        """ReLU6 of the normed outputs; with a norm that is folded in, one pass over the memory where torch can."""
        if isinstance(norm, nn.Identity) and _fuses(x):
            return self._convolved(x, "hardtanh", (0.0, 6.0))
        return F.relu6(norm(self(x)), inplace=True)

    def _convolved(self, x: Tensor, activation: str = "none", limits: tuple[float, ...] = ()) -> Tensor:
        rows, columns = (int(self.stride[0] == 2 and size % 2 == 0) for size in x.shape[-2:])
        around = (self.kernel_size[0] // 2 + rows, self.kernel_size[1] // 2 + columns)
        if _fuses(x):
            settings = (around, self.stride, self.dilation, self.groups, activation, limits, "")
            outputs = torch.ops.mkldnn._convolution_pointwise(x, self.weight, self.bias, *settings)
        else:
            outputs = F.conv2d(x, self.weight, self.bias, self.stride, around, groups=self.groups)
        return outputs[:, :, rows:, columns:]


def _fuses(x: Tensor) -> bool:
    """Whether a convolution of it can take its activation along; gradients and exports know public operators only."""
    traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    recorded = traced or torch.is_grad_enabled() or torch.compiler.is_compiling()
    return x.device.type == "cpu" and x.numel() > 0 and not recorded and _has_fused()


@cache
def _has_fused() -> bool:
    """Whether torch has oneDNN's convolution with an activation, which its compiler uses; on x86 it is the faster."""
    fast = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return fast and hasattr(torch.ops.mkldnn, "_convolution_pointwise")


class Separable(nn.Module):
    """The first block, which expands nothing: depthwise, then pointwise."""

    def __init__(self, inside: int, group: Group) -> None:
        super().__init__()
        self.conv_dw = Convolution(inside, inside, group.kernel, group.stride, groups=inside)
        self.bn1 = nn.BatchNorm2d(inside, eps=EPS)
        self.conv_pw = Convolution(inside, group.width)
        self.bn2 = nn.BatchNorm2d(group.width, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv_pw(self.conv_dw.clipped(x, self.bn1)))


class Inverted(nn.Module):
    """Expand, filter each channel, project; the input is added where it has the shape of the output."""

    def __init__(self, inside: int, kernel: int, stride: int, outside: int) -> None:
        super().__init__()
        middle = EXPANSION * inside
        self.shortcut = stride == 1 and inside == outside
        self.conv_pw = Convolution(inside, middle)
        self.bn1 = nn.BatchNorm2d(middle, eps=EPS)
        self.conv_dw = Convolution(middle, middle, kernel, stride, groups=middle)
        self.bn2 = nn.BatchNorm2d(middle, eps=EPS)
        self.conv_pwl = Convolution(middle, outside)
        self.bn3 = nn.BatchNorm2d(outside, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv_dw.clipped(self.conv_pw.clipped(x, self.bn1), self.bn2)
        y = self.bn3(self.conv_pwl(y))
        return y.add_(x) if self.shortcut else y


class EfficientNetLite(Trunk):
    """The trunk up to its `deepest` stage; nothing behind it is built."""

    def __init__(self, name: str, *, deepest: int = 5) -> None:
        super().__init__()
        self.ends = STAGE_ENDS[:deepest]
        self.conv_stem = Convolution(3, STEM, 3, 2)
        self.bn1 = nn.BatchNorm2d(STEM, eps=EPS)
        self.blocks = nn.ModuleList()
        inside = STEM
        for group in groups_of(name)[: self.ends[-1]]:
            self.blocks.append(_blocks(inside, group))
            inside = group.width
        self.reach = reach_of(self.modules())

    def stages(self, images: Float[Tensor, "n 3 h w"]) -> list[Tensor]:
        """The last output before each halving, n, c, r, s: at strides 2, 4, 8, 16 and 32."""
        x = self.conv_stem.clipped(images, self.bn1)
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
