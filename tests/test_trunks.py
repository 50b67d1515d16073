"""Frozen networks are the published ones: against their definitions, golden values, names and numbers of weights."""

import math
from importlib.util import find_spec

import pytest
import torch
from torch.nn import functional as F

import contracts
from cases import each
from firm.networks.efficientnet_lite import Convolution, rounded
from firm.networks.weights import FACTS, load_backbone, rebuild
from random_networks import LITES, RESNETS, close, describe, pictures, random_backbone, random_tensors, trunk

NORM = ("weight", "bias", "running_mean", "running_var")


def drawn(side=96):
    """A disc on a regular ground, in whole numbers, so that every machine draws the same."""
    rows, columns = torch.arange(side).view(1, side, 1), torch.arange(side).view(1, 1, side)
    channel = torch.arange(3).view(3, 1, 1)
    ground = (7 * rows + 13 * columns + 29 * channel) % 64 + 64
    disc = (rows - side // 2) ** 2 + (columns - side // 3) ** 2 < (side // 4) ** 2
    return torch.where(disc, 40 * channel + 120, ground)[None] / 255


def test_stages_have_the_channels_and_strides_of_the_facts():
    for name in (*LITES, *RESNETS):
        facts = FACTS[name]
        stages = trunk(name).stages(torch.zeros(1, 3, 64, 64, device="meta"))
        expected = [(1, c, 64 // s, 64 // s) for c, s in zip(facts.channels, facts.strides, strict=True)]
        assert [tuple(stage.shape) for stage in stages] == expected
        assert (facts.name, facts.strides) == (name, (2, 4, 8, 16, 32))


@each("name, height, width", [("efficientnet-lite0", 97, 130), ("resnet18", 1, 33)])
def test_odd_sizes_are_rounded_up(name, height, width):
    stages = random_backbone(name, 4).stages(pictures(1, height, width))
    assert len(stages) == 4
    for stage, stride in zip(stages, FACTS[name].strides, strict=False):
        assert stage.shape[2:] == (math.ceil(height / stride), math.ceil(width / stride))


def test_numbers_of_weights_are_the_published_ones_less_the_head():
    published = {
        "efficientnet-lite0": 4_652_008 - 320 * 1280 - 2 * 1280 - 1_281_000,
        "efficientnet-lite1": 5_416_680 - 320 * 1280 - 2 * 1280 - 1_281_000,
        "efficientnet-lite2": 6_092_072 - 352 * 1280 - 2 * 1280 - 1_281_000,
        "resnet18": 11_689_512 - 513_000,
        "resnet34": 21_797_672 - 513_000,
        "resnet50": 25_557_032 - 2_049_000,
        "wide-resnet50": 68_883_240 - 2_049_000,
    }
    assert {name: sum(value.numel() for value in trunk(name).parameters()) for name in published} == published


@pytest.mark.parametrize("name", ["efficientnet-lite0", "resnet18"])
def test_deeper_stages_are_neither_kept_nor_computed(name):
    whole = random_backbone(name)
    images = whole.normalise(pictures())
    expected = whole.stages(images)
    sizes = []
    for deepest in range(1, 6):
        tensors = {key: random_tensors(name)[key] for key in trunk(name, deepest).state_dict()}
        backbone = rebuild(describe(name, deepest, folded=False), tensors)
        stages = backbone.stages(images)
        assert len(stages) == deepest
        assert all(torch.equal(*pair) for pair in zip(stages, expected, strict=False))
        sizes.append(sum(value.numel() for value in backbone.parameters()))
    assert sizes == sorted(set(sizes))


@each("size, kernel", [(1, 3), (2, 5), (4, 3), (5, 3), (8, 5), (9, 5)])
def test_halving_pads_as_tensorflow_does(size, kernel):
    """Place i covers i * 2 - before .. + kernel, with `before` half of what is missing in all, rounded down."""
    conv = Convolution(1, 1, kernel, 2)
    height, width = size, size + 3
    image = torch.randn(1, 1, height, width, generator=contracts.generator(size))
    with torch.no_grad():
        found = conv(image)[0, 0]
    places = [math.ceil(height / 2), math.ceil(width / 2)]
    before = [max((p - 1) * 2 + kernel - n, 0) // 2 for p, n in zip(places, (height, width), strict=True)]
    expected = torch.zeros(places)
    for i in range(places[0]):
        for j in range(places[1]):
            for a in range(kernel):
                for b in range(kernel):
                    row, column = 2 * i - before[0] + a, 2 * j - before[1] + b
                    if 0 <= row < height and 0 <= column < width:
                        expected[i, j] += conv.weight[0, 0, a, b].item() * image[0, 0, row, column]
    torch.testing.assert_close(found, expected)


def lite_by_hand(tensors, images, depths, kernels):
    """EfficientNet-Lite from tensors alone: every kind of padding, norm and shortcut written out."""

    def conv(x, name, stride=1):
        weight = tensors[f"{name}.weight"]
        kernel, groups = weight.shape[-1], x.shape[1] // weight.shape[1]
        total = [max((math.ceil(n / stride) - 1) * stride + kernel - n, 0) for n in x.shape[-2:]]
        around = [total[1] // 2, total[1] - total[1] // 2, total[0] // 2, total[0] - total[0] // 2]
        return F.conv2d(F.pad(x, around), weight, stride=stride, groups=groups)

    def norm(x, name):
        weight, bias, mean, var = (tensors[f"{name}.{part}"].view(1, -1, 1, 1) for part in NORM)
        return (x - mean) / (var + 0.001).sqrt() * weight + bias

    x = norm(conv(images, "conv_stem", 2), "bn1").clamp(0, 6)
    x = norm(conv(x, "blocks.0.0.conv_dw"), "blocks.0.0.bn1").clamp(0, 6)
    x = norm(conv(x, "blocks.0.0.conv_pw"), "blocks.0.0.bn2")
    found = [x]
    for group, (depth, kernel) in enumerate(zip(depths, kernels, strict=True), start=1):
        for number in range(depth):
            block = f"blocks.{group}.{number}"
            assert tensors[f"{block}.conv_dw.weight"].shape[-1] == kernel
            y = norm(conv(x, f"{block}.conv_pw"), f"{block}.bn1").clamp(0, 6)
            y = norm(conv(y, f"{block}.conv_dw", 2 if number == 0 and group in (1, 2, 3, 5) else 1), f"{block}.bn2")
            y = norm(conv(y.clamp(0, 6), f"{block}.conv_pwl"), f"{block}.bn3")
            x = x + y if number else y
        found.append(x)
    return [found[number] for number in (0, 1, 2, 4, 6)]


@pytest.mark.parametrize(
    ("name", "depths"), [("efficientnet-lite0", (2, 2, 3, 3, 4, 1)), ("efficientnet-lite2", (3, 3, 4, 4, 5, 1))]
)
def test_efficientnet_lite_against_its_definition(name, depths):
    images = pictures(2, 45, 64) * 2 - 1
    expected = lite_by_hand(random_tensors(name), images, depths, (3, 5, 3, 5, 5, 3))
    close(random_backbone(name).stages(images), expected)


def resnet_by_hand(tensors, images):
    def unit(x, conv, bn, stride=1):
        weight, bias, mean, var = (tensors[f"{bn}.{part}"].view(1, -1, 1, 1) for part in NORM)
        y = F.conv2d(x, tensors[f"{conv}.weight"], stride=stride, padding=tensors[f"{conv}.weight"].shape[-1] // 2)
        return (y - mean) / (var + 1e-5).sqrt() * weight + bias

    found = [unit(images, "conv1", "bn1", 2).clamp(min=0)]
    x = F.max_pool2d(found[0], 3, 2, 1)
    for layer in range(1, 4):
        number = 0
        while f"layer{layer}.{number}.conv1.weight" in tensors:
            name = f"layer{layer}.{number}"
            stride = 2 if layer > 1 and number == 0 else 1
            last = 3 if f"{name}.conv3.weight" in tensors else 2
            y = x
            for part in range(1, last + 1):
                y = unit(y, f"{name}.conv{part}", f"{name}.bn{part}", stride if part == last - 1 else 1)
                y = y.clamp(min=0) if part < last else y
            skip = f"{name}.downsample"
            x = unit(x, f"{skip}.0", f"{skip}.1", stride) if f"{skip}.0.weight" in tensors else x
            x = (x + y).clamp(min=0)
            number += 1
        found.append(x)
    return found


@pytest.mark.parametrize("name", ["resnet34", "resnet50"])
def test_resnets_against_their_definition(name):
    images = pictures(1, 45, 64) * 2 - 1
    close(random_backbone(name, 4).stages(images), resnet_by_hand(random_tensors(name, 4), images))


def usual_resnet(depths, middle, outside, convolutions):
    """Names and shapes of the convolutions of every published checkpoint."""
    shapes = {"conv1": (64, 3, 7, 7)}
    inside = 64
    for layer, depth in enumerate(depths, start=1):
        m, o = middle * 2 ** (layer - 1), outside * 2 ** (layer - 1)
        for block in range(depth):
            name = f"layer{layer}.{block}"
            sizes = [(m, inside, 1), (m, m, 3), (o, m, 1)] if convolutions == 3 else [(o, inside, 3), (o, o, 3)]
            shapes |= {f"{name}.conv{i}": (a, b, k, k) for i, (a, b, k) in enumerate(sizes, start=1)}
            if inside != o:
                shapes[f"{name}.downsample.0"] = (o, inside, 1, 1)
            inside = o
    return {f"{name}.weight": shape for name, shape in shapes.items()}


USUAL = {
    "resnet18": usual_resnet((2, 2, 2, 2), 64, 64, 2),
    "resnet34": usual_resnet((3, 4, 6, 3), 64, 64, 2),
    "resnet50": usual_resnet((3, 4, 6, 3), 64, 256, 3),
    "wide-resnet50": usual_resnet((3, 4, 6, 3), 128, 256, 3),
}


def test_resnets_carry_the_names_of_published_checkpoints():
    for name in RESNETS:
        tensors = trunk(name).state_dict()
        convs = {key: tuple(value.shape) for key, value in tensors.items() if value.dim() == 4}
        assert convs == USUAL[name]
        norms = {key.rsplit(".", 1)[0] for key, value in tensors.items() if value.dim() == 1}
        assert norms == {
            key.removesuffix(".weight").replace("conv", "bn").replace("downsample.0", "downsample.1") for key in convs
        }


def test_widths_are_rounded_to_eights_but_not_by_a_tenth_down():
    assert [rounded(width) for width in (1, 16, 17.6, 26.4, 44, 88, 123.2, 211.2, 352)] == [
        *(8, 16, 16, 24, 48, 88, 120, 208, 352)
    ]
    assert rounded(11) == 16  # 8 would be more than a tenth less


# per stage: mean, deviation, a value in the middle, a value at the rim; made with efficientnet-lite-pytorch 0.1.0
GOLDEN = {
    "efficientnet-lite0": [
        (-0.12146, 6.21761, 0.37206, 1.95644),
        (0.46884, 8.09813, -3.63911, -6.72542),
        (-1.08751, 8.08447, -13.43961, -7.48112),
        (0.69693, 7.43886, -21.31364, -5.08065),
        (-0.13456, 3.19317, 4.92312, -0.22581),
    ],
    "efficientnet-lite1": [
        (0.28013, 6.41889, -1.27748, -7.21660),
        (1.75369, 9.26134, 10.83962, -3.82923),
        (1.21149, 9.92844, -1.55287, -1.85001),
        (-0.42594, 7.90708, -6.86369, -3.64427),
        (0.37501, 2.95490, -0.38789, 4.20052),
    ],
    "efficientnet-lite2": [
        (-0.16815, 6.61864, 3.95738, -9.13868),
        (0.64298, 9.55829, 0.37685, 5.90339),
        (-0.89662, 8.73925, -6.20048, -7.15520),
        (-0.37394, 7.28673, -12.76678, 2.48701),
        (-0.09722, 2.84154, -5.79589, -3.21282),
    ],
}


@pytest.mark.parametrize("name", LITES)
def test_features_are_those_of_the_published_network(name):
    if find_spec(FACTS[name].module) is None:
        pytest.skip(f"{FACTS[name].package} is not installed")
    backbone = load_backbone(name)
    stages = backbone.stages(backbone.normalise(drawn()))
    for stage, golden in zip(stages, GOLDEN[name], strict=True):
        middle = stage.shape[-1] // 2
        found = (stage.mean(), stage.std(), stage[0, 0, middle, middle], stage[0, 7, -1, 1])
        assert [float(value) for value in found] == pytest.approx(golden, abs=2e-4)
    assert backbone.digest == FACTS[name].digest
    assert backbone.facts is FACTS[name]
