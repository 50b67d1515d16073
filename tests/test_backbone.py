"""Backbones are the published networks, weights files are read without running them, and a stored one comes back."""

import json
import math
import os
import pickle
import sys
from copy import deepcopy
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import contracts
import firm.backbones
from firm.backbones import FACTS, Facts, architecture, load_backbone, read_weights, rebuild
from firm.backbones.efficientnet_lite import EfficientNetLite, Halving, rounded, usual_names
from firm.backbones.folding import fold
from firm.backbones.resnet import ResNet
from firm.backbones.weights import file_digest, tensors_digest
from firm.storage import load_tensors, save_tensors
from firm.types import FirmError

LITES = [name for name in FACTS if name.startswith("efficientnet")]
RESNETS = [name for name in FACTS if "resnet" in name]
NORM = ("weight", "bias", "running_mean", "running_var")


@cache
def trunk(name, deepest=5):
    """Without memory: for names, shapes and counts; to be left as it is."""
    with torch.device("meta"):
        return (EfficientNetLite if name in LITES else ResNet)(name, deepest=deepest)


@cache
def random_tensors(name, deepest=5):
    """Weights that keep signals alive, and batch norms that do something."""
    rng = contracts.generator(7)
    made = {}
    for key, value in trunk(name, deepest).state_dict().items():
        if key.endswith("num_batches_tracked"):
            made[key] = torch.tensor(5)
        elif value.dim() == 4:
            made[key] = torch.randn(value.shape, generator=rng) * math.sqrt(2 / value[0].numel())
        elif key.endswith(("var", "weight")):
            made[key] = torch.rand(value.shape, generator=rng) + 0.5
        else:
            made[key] = torch.randn(value.shape, generator=rng) * 0.1
    return made


def stored(tmp_path, name, tensors=None, file="weights.safetensors"):
    path = tmp_path / file
    save_file(random_tensors(name) if tensors is None else tensors, path)
    return str(path)


def describe(name, deepest=5, folded=True):
    return {"name": name, "deepest": deepest, "folded": folded, "digest": "0123456789abcdef"}


def random_backbone(name, deepest=5):
    return rebuild(describe(name, deepest, folded=False), random_tensors(name, deepest))


def pictures(n=2, height=64, width=64):
    return torch.rand(n, 3, height, width, generator=contracts.generator(3))


def drawn(side=96):
    """A disc on a regular ground, in whole numbers, so that every machine draws the same."""
    rows, columns = torch.arange(side).view(1, side, 1), torch.arange(side).view(1, 1, side)
    channel = torch.arange(3).view(3, 1, 1)
    ground = (7 * rows + 13 * columns + 29 * channel) % 64 + 64
    disc = (rows - side // 2) ** 2 + (columns - side // 3) ** 2 < (side // 4) ** 2
    return torch.where(disc, 40 * channel + 120, ground)[None] / 255


def close(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


# --- the networks ---


@pytest.mark.parametrize("name", [*LITES, *RESNETS])
def test_stages_have_the_channels_and_strides_of_the_facts(name):
    tensors = {key: torch.zeros(()).expand(value.shape) for key, value in trunk(name).state_dict().items()}
    stages = rebuild(describe(name, folded=False), tensors).stages(pictures(1))
    facts = FACTS[name]
    expected = [(1, c, 64 // s, 64 // s) for c, s in zip(facts.channels, facts.strides, strict=True)]
    assert [tuple(stage.shape) for stage in stages] == expected
    assert facts.name == name
    assert facts.strides == (2, 4, 8, 16, 32)


@pytest.mark.parametrize("name", ["efficientnet-lite0", "efficientnet-lite2", "resnet18", "resnet50"])
@pytest.mark.parametrize(("height", "width"), [(97, 130), (1, 33)])
def test_odd_sizes_are_rounded_up(name, height, width):
    stages = random_backbone(name, 4).stages(pictures(1, height, width))
    assert len(stages) == 4
    for stage, stride in zip(stages, FACTS[name].strides, strict=False):
        assert stage.shape[2:] == (math.ceil(height / stride), math.ceil(width / stride))


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("efficientnet-lite0", 4_652_008 - 320 * 1280 - 2 * 1280 - 1_281_000),
        ("efficientnet-lite1", 5_416_680 - 320 * 1280 - 2 * 1280 - 1_281_000),
        ("efficientnet-lite2", 6_092_072 - 352 * 1280 - 2 * 1280 - 1_281_000),
        ("resnet18", 11_689_512 - 513_000),
        ("resnet34", 21_797_672 - 513_000),
        ("resnet50", 25_557_032 - 2_049_000),
        ("wide-resnet50", 68_883_240 - 2_049_000),
    ],
)
def test_numbers_of_weights_are_the_published_ones_less_the_head(name, numbers):
    assert sum(value.numel() for value in trunk(name).parameters()) == numbers


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


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("kernel", [3, 5])
def test_halving_pads_as_tensorflow_does(size, kernel):
    """Place i covers i * 2 - before .. + kernel, with `before` half of what is missing in all, rounded down."""
    conv = Halving(1, 1, kernel)
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


@pytest.mark.parametrize("name", RESNETS)
def test_resnets_carry_the_names_of_published_checkpoints(name):
    found = {key: tuple(value.shape) for key, value in trunk(name).state_dict().items() if value.dim() == 4}
    assert found == USUAL[name]
    norms = {key.rsplit(".", 1)[0] for key, value in trunk(name).state_dict().items() if value.dim() == 1}
    replaced = {
        key.removesuffix(".weight").replace("conv", "bn").replace("downsample.0", "downsample.1") for key in found
    }
    assert norms == replaced


def test_widths_are_rounded_to_eights_but_not_by_a_tenth_down():
    assert [rounded(width) for width in (1, 16, 17.6, 26.4, 44, 88, 123.2, 211.2, 352)] == [
        *(8, 16, 16, 24, 48, 88, 120, 208, 352)
    ]
    assert rounded(11) == 16  # 8 would be more than a tenth less


# --- weights of packages ---


def package_names(tensors):
    """Our names -> those of the PyPI packages: blocks counted through."""
    blocks = {}
    for key in tensors:
        if key.startswith("blocks."):
            blocks.setdefault(key.rsplit(".", 2)[0], len(blocks))
    renamed = {"conv_stem": "_conv_stem", "bn1": "_bn0"}
    first = {"conv_dw": "_depthwise_conv", "bn1": "_bn1", "conv_pw": "_project_conv", "bn2": "_bn2"}
    other = {"conv_pw": "_expand_conv", "bn1": "_bn0", "conv_dw": "_depthwise_conv", "bn2": "_bn1"}
    other |= {"conv_pwl": "_project_conv", "bn3": "_bn2"}
    found = {}
    for key, value in tensors.items():
        place, layer, part = key.rsplit(".", 2) if key.startswith("blocks.") else ("", *key.split("."))
        number = blocks.get(place)
        table = renamed if number is None else first if number == 0 else other
        found[(f"_blocks.{number}." if place else "") + f"{table[layer]}.{part}"] = value
    head = {"_conv_head.weight": torch.zeros(3, 3, 1, 1), "_bn1.weight": torch.zeros(3), "_fc.bias": torch.zeros(9)}
    return found | head


@pytest.mark.parametrize("name", LITES)
def test_names_of_the_packages_become_ours(name):
    ours = trunk(name).state_dict()
    theirs = package_names(ours)
    assert "_blocks.15._bn2.running_mean" in theirs
    renamed = usual_names(theirs)
    assert set(renamed) - set(ours) == {"_conv_head.weight", "_bn1.weight", "_fc.bias"}
    assert all(renamed[key] is value for key, value in ours.items())
    assert usual_names(ours) is ours


def test_other_numbers_of_blocks_are_not_renamed():
    tensors = {"_conv_stem.weight": torch.zeros(1), "_blocks.0._bn1.weight": torch.zeros(1)}
    assert usual_names(tensors) is tensors


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


def installed(name):
    if find_spec(FACTS[name].module) is None:
        pytest.skip(f"{FACTS[name].package} is not installed")


@pytest.mark.parametrize("name", LITES)
def test_features_are_those_of_the_published_network(name):
    installed(name)
    backbone = load_backbone(name)
    stages = backbone.stages(backbone.normalise(drawn()))
    for stage, golden in zip(stages, GOLDEN[name], strict=True):
        middle = stage.shape[-1] // 2
        found = (stage.mean(), stage.std(), stage[0, 0, middle, middle], stage[0, 7, -1, 1])
        assert [float(value) for value in found] == pytest.approx(golden, abs=2e-4)
    assert backbone.digest == FACTS[name].digest
    assert backbone.facts is FACTS[name]


def test_a_package_is_found_without_running_it_and_must_bring_the_published_file(tmp_path, monkeypatch):
    facts = replace(FACTS["efficientnet-lite0"], module="weights_of_somebody")
    monkeypatch.setitem(FACTS, facts.name, facts)
    missing = (
        "the weights of efficientnet-lite0 are not installed; run: pip install 'firm[pretrained]' "
        r"(or give a weights file with --encoder FILE)"
    )
    with pytest.raises(FirmError) as error:
        load_backbone("efficientnet-lite0")
    assert str(error.value) == missing
    package = tmp_path / "weights_of_somebody"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('this ran')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FirmError) as error:
        load_backbone("efficientnet-lite0")
    assert str(error.value) == missing
    (package / facts.file).write_bytes(b"something else")
    with pytest.raises(FirmError, match=r"57934424\.pth is not the published weights file .* pip install --force-rein"):
        load_backbone("efficientnet-lite0")
    torch.save(package_names(random_tensors("efficientnet-lite0")), package / facts.file)
    digest = file_digest(package / facts.file)
    monkeypatch.setitem(FACTS, facts.name, replace(facts, digest=digest))
    assert load_backbone("efficientnet-lite0", deepest=1).digest == digest
    assert "weights_of_somebody" not in sys.modules


@pytest.mark.parametrize("name", RESNETS)
def test_resnets_need_a_file(name):
    with pytest.raises(FirmError, match=f"^{name} comes without weights; give a weights file with --encoder FILE"):
        load_backbone(name)


# --- weights files ---


@pytest.mark.parametrize("name", ["efficientnet-lite0", "resnet18"])
def test_every_kind_of_file_gives_the_same_backbone(name, tmp_path):
    tensors = random_tensors(name)
    images = pictures(1)
    expected = random_backbone(name).stages(images)
    parallel = {f"module.{key}": value for key, value in tensors.items()}
    torch.save(tensors | {"fc.weight": torch.zeros(2, 2)}, tmp_path / "plain.pth")
    torch.save(tensors, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"epoch": 3, "state_dict": parallel}, tmp_path / "wrapped.pth")
    save_file(parallel | {"module.classifier.bias": torch.zeros(2)}, tmp_path / "parallel.safetensors")
    uncounted = {key: value for key, value in tensors.items() if not key.endswith("tracked")}
    save_file(uncounted, tmp_path / "uncounted.safetensors")
    for file in sorted(tmp_path.iterdir()):
        backbone = load_backbone(str(file), fold=False)
        assert backbone.facts is FACTS[name]
        assert backbone.digest == file_digest(file)
        assert all(torch.equal(*pair) for pair in zip(backbone.stages(images), expected, strict=True))
        assert read_weights(file).keys() >= uncounted.keys()


def test_a_file_of_a_package_is_recognised_and_half_precision_becomes_single(tmp_path):
    theirs = package_names(random_tensors("efficientnet-lite1"))
    torch.save({key: value.half() for key, value in theirs.items()}, tmp_path / "w.pth")
    backbone = load_backbone(str(tmp_path / "w.pth"), deepest=2)
    assert backbone.facts is FACTS["efficientnet-lite1"]
    assert {value.dtype for value in backbone.state_dict().values()} == {torch.float32}
    assert backbone.deepest == 2


@pytest.mark.parametrize("name", [*LITES, *RESNETS])
def test_each_network_is_recognised_from_names_and_shapes(name, tmp_path):
    tensors = trunk(name).state_dict() | {"fc.weight": torch.zeros(5, 5)}
    assert firm.backbones._recognised(tmp_path, tensors) == name


def test_a_network_that_is_none_of_them_is_refused_with_the_nearest(tmp_path):
    deeper = trunk("resnet50").state_dict()
    deeper |= {key.replace("layer3.5", "layer3.6"): value for key, value in deeper.items()}
    grouped = trunk("resnet50").state_dict() | {"layer1.0.conv2.weight": torch.empty(64, 2, 3, 3, device="meta")}
    short = trunk("resnet18").state_dict()
    del short["layer4.1.bn2.bias"]
    whole = trunk("resnet34").state_dict() | {"bn1.weight": torch.zeros(64, dtype=torch.int8)}
    for tensors, nearest, reason in [
        (deeper, "resnet50", "its 'layer3.6.conv1.weight' is none"),
        (grouped, "resnet50", "its layer1.0.conv2.weight is (64, 2, 3, 3) instead of (64, 64, 3, 3)"),
        (short, "resnet18", "it has no 'layer4.1.bn2.bias'"),
        (whole, "resnet34", "its bn1.weight is torch.int8 instead of torch.float32"),
    ]:
        with pytest.raises(FirmError) as error:
            firm.backbones._recognised(tmp_path / "w.pth", tensors)
        assert str(error.value) == (
            f"{tmp_path / 'w.pth'} is none of {', '.join([*LITES, *RESNETS])}: the nearest is {nearest}, but {reason}; "
            "give a file of one of these under the usual names"
        )


class Trap:
    """Unpickled, it would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


HOLDS = "holds objects beside tensors, which could run code and are not read; "
DAMAGED = "is damaged or no checkpoint of tensors; copy it again, or "
PLAIN = "store the state dict of the network as .safetensors and give that file"


@pytest.mark.parametrize(("kind", "reason"), [("zip", HOLDS), ("old", HOLDS), ("raw", HOLDS), ("newer", DAMAGED)])
def test_a_file_with_code_in_it_is_refused_unrun(kind, reason, tmp_path):
    trap, path = tmp_path / "sprung", tmp_path / "w.pth"
    if kind in ("zip", "old"):
        content = {"conv1.weight": torch.zeros(1), "more": Trap(trap)}
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    else:
        path.write_bytes(pickle.dumps(Trap(trap), protocol=2 if kind == "raw" else 5))
    for read in (read_weights, lambda path: load_backbone(str(path))):
        with pytest.raises(FirmError) as error:
            read(path)
        assert str(error.value) == f"{path} {reason}{PLAIN}"
        assert not trap.exists()
    if kind in ("zip", "old"):
        torch.load(path, weights_only=False)
    else:
        pickle.loads(path.read_bytes())  # noqa: S301
    assert trap.exists()  # the trap is a real one


def test_a_whole_module_is_refused(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "w.pt")
    with pytest.raises(FirmError, match=r"w\.pt holds objects beside tensors"):
        read_weights(tmp_path / "w.pt")


BROKEN = {
    "empty": b"",
    "text": b"this is no checkpoint " * 20,
    "zip": b"PK\x03\x04" + bytes(200),
    "pickle": b"\x80\x02K",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("w.pth", "is damaged or no checkpoint of tensors; copy it again, or store the state dict"),
        ("w.safetensors", r"is not a readable safetensors file \(.*\); copy it again from its source"),
    ],
)
def test_a_broken_file_is_refused(content, file, reason, tmp_path):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(FirmError, match=rf"{file} {reason}"):
        read_weights(tmp_path / file)


def test_a_prefix_is_one_only_if_every_name_has_it(tmp_path):
    save_file({"module.a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "w.safetensors")
    assert set(read_weights(tmp_path / "w.safetensors")) == {"module.a", "b"}


def test_a_cut_file_is_refused(tmp_path):
    for old in (False, True):
        path = tmp_path / "w.pth"
        torch.save({"a": torch.ones(1000)}, path, _use_new_zipfile_serialization=not old)
        path.write_bytes(path.read_bytes()[:2000])
        with pytest.raises(FirmError, match=r"w\.pth is damaged or no checkpoint"):
            read_weights(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([torch.zeros(1)], "holds no named tensors"),
        ({}, "holds no named tensors"),
        ({"state_dict": 3}, "holds no named tensors"),
        ({"a": torch.zeros(1), "epoch": 3}, "holds 'epoch', which is no tensor"),
        ({7: torch.zeros(1)}, "holds 7, which is no tensor"),
    ],
)
def test_content_that_is_no_state_dict_is_refused(content, reason, tmp_path):
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(FirmError, match=rf"w\.pth {reason}; store the state dict of the network as \.safetensors"):
        read_weights(tmp_path / "w.pth")


def test_files_that_are_not_there_are_named(tmp_path):
    for path in (tmp_path / "no.pth", tmp_path):
        with pytest.raises(FirmError) as error:
            read_weights(path)
        assert str(error.value) == f"there is no weights file {path}; check the path"
    with pytest.raises(FirmError, match=r"there is no weights file absent\.pth; check the path"):
        load_backbone("absent.pth")
    with pytest.raises(FirmError, match=r"there is no weights file some/where; check the path"):
        load_backbone("some/where")
    (tmp_path / "w.onnx").write_bytes(b"x")
    with pytest.raises(FirmError, match=r"w\.onnx does not end in \.safetensors, \.pth or \.pt; store the state dict"):
        read_weights(tmp_path / "w.onnx")
    with pytest.raises(FirmError) as error:
        load_backbone("resnet19")
    assert str(error.value) == f"no backbone 'resnet19'; use one of {', '.join(FACTS)}, timm:NAME or a weights file"


@pytest.mark.parametrize("deepest", [0, 6])
def test_stages_that_do_not_exist_are_named(deepest):
    with pytest.raises(FirmError, match=rf"deepest is {deepest}; stages are numbered 1\.\.5"):
        load_backbone("efficientnet-lite0", deepest=deepest)


# --- the backbone ---


def test_a_backbone_is_frozen_and_stays_so():
    backbone = random_backbone("efficientnet-lite0", 2)
    around = nn.Sequential(backbone).train()
    assert around.training
    assert not any(module.training for module in backbone.modules())
    assert not any(value.requires_grad for value in backbone.parameters())
    images = pictures().requires_grad_()
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    assert not any(stage.requires_grad for stage in backbone.stages(images))
    assert all(torch.equal(before[name], value) for name, value in backbone.state_dict().items())


@pytest.mark.parametrize("name", ["efficientnet-lite2", "resnet18"])
def test_images_are_normalised_as_the_network_wants(name):
    backbone, facts = random_backbone(name, 1), FACTS[name]
    images = pictures()
    found = backbone.normalise(images)
    for channel in range(3):
        expected = (images[:, channel] - facts.mean[channel]) / facts.std[channel]
        torch.testing.assert_close(found[:, channel], expected)
    grey = images[:, :1]
    assert torch.equal(backbone.normalise(grey), backbone.normalise(grey.expand(-1, 3, -1, -1)))
    with pytest.raises(FirmError, match=f"^{name} takes images of 1 or 3 channels, not 2; convert them$"):
        backbone.normalise(images[:, :2])


def test_statistics_are_the_published_ones():
    assert {(FACTS[name].mean, FACTS[name].std) for name in LITES} == {((0.5,) * 3, (0.5,) * 3)}
    assert {(FACTS[name].mean, FACTS[name].std) for name in RESNETS} == {((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}


@pytest.mark.parametrize("name", ["efficientnet-lite0", "resnet18", "resnet50"])
def test_folding_changes_nothing_but_the_batch_norms(name):
    plain = random_backbone(name, 4)
    folded = deepcopy(plain)
    fold(folded.trunk)
    images = plain.normalise(pictures(1, 45, 64))
    close(folded.stages(images), plain.stages(images))
    norms = [sum(isinstance(module, nn.BatchNorm2d) for module in each.modules()) for each in (plain, folded)]
    assert norms == [len([key for key in random_tensors(name, 4) if key.endswith("running_var")]), 0]


def test_a_backbone_is_folded_unless_asked_otherwise(tmp_path):
    path = stored(tmp_path, "efficientnet-lite0")
    norms = [
        any(isinstance(module, nn.BatchNorm2d) for module in backbone.modules()) != backbone.folded
        for backbone in (load_backbone(path), load_backbone(path, fold=False))
    ]
    assert norms == [True, True]
    assert load_backbone(path, deepest=1).folded


def test_an_image_does_not_depend_on_its_companions_and_a_cpu_sees_a_few_at_once():
    backbone = random_backbone("efficientnet-lite0", 2)
    seen = []
    backbone.trunk.conv_stem.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    images = pictures(5, 256, 200)
    together = backbone.stages(images)
    assert [len(portion) for portion in seen] == [2, 2, 1]
    assert all(portion.is_contiguous(memory_format=torch.channels_last) for portion in seen)
    close(backbone.stages(images.flip(0)), [stage.flip(0) for stage in together])
    close(backbone.stages(images[3:4]), [stage[3:4] for stage in together])
    assert [tuple(stage.shape) for stage in backbone.stages(images[:0])] == [(0, 16, 128, 100), (0, 24, 64, 50)]
    seen.clear()
    backbone.stages(pictures(1, 400, 400))
    backbone.stages(pictures(40, 64, 64))
    assert [len(portion) for portion in seen] == [1, 32, 8]


def test_a_backbone_moves_as_one():
    backbone = random_backbone("resnet18", 2).to(torch.float64)
    assert {stage.dtype for stage in backbone.stages(backbone.normalise(pictures().double()))} == {torch.float64}
    there = random_backbone("resnet18", 2).to("meta")
    assert {value.device.type for value in (*there.parameters(), *there.buffers())} == {"meta"}


def test_another_device_sees_the_images_as_they_are():
    """Portions and layout are for the CPU."""
    backbone = random_backbone("efficientnet-lite0", 1)
    images = torch.empty(9, 3, 256, 256, device="meta")
    backbone.trunk.stages = lambda given: [given]
    assert backbone.stages(images)[0] is images


@pytest.mark.parametrize(
    ("name", "folded"), [("efficientnet-lite0", True), ("efficientnet-lite0", False), ("resnet18", True)]
)
def test_a_stored_backbone_comes_back_to_the_bit(name, folded, tmp_path, monkeypatch):
    backbone = load_backbone(stored(tmp_path, name), deepest=4, fold=folded)
    description = json.loads(json.dumps(architecture(backbone)))
    save_tensors(tmp_path / "b.firm", backbone.state_dict(), description, kind="test", schema=1)
    for facts in FACTS.values():
        monkeypatch.setitem(FACTS, facts.name, replace(facts, module="not_there", package="not-there"))
    tensors, card = load_tensors(tmp_path / "b.firm", kind="test", schema=1)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    again = rebuild(card, tensors)
    assert torch.equal(torch.get_rng_state(), state)
    images = pictures(2, 50, 61)
    assert all(torch.equal(*pair) for pair in zip(again.stages(images), backbone.stages(images), strict=True))
    assert (
        architecture(again)
        == description
        == {
            "name": name,
            "deepest": 4,
            "digest": file_digest(tmp_path / "weights.safetensors"),
            "folded": folded,
        }
    )
    assert not again.training
    tensors["trunk." + next(iter(again.trunk.state_dict()))].zero_()
    assert all(torch.equal(*pair) for pair in zip(again.stages(images), backbone.stages(images), strict=True))


def test_stored_weights_that_do_not_fit_are_refused():
    backbone = random_backbone("resnet18", 2)
    description, tensors = architecture(backbone), backbone.state_dict()
    with pytest.raises(FirmError) as error:
        rebuild(description | {"deepest": 3}, tensors)
    assert str(error.value) == (
        "the stored weights are not those of resnet18: it has no 'layer2.0.conv1.weight'; fit the detector again"
    )
    with pytest.raises(FirmError, match="this firm has no backbone 'resnet99'; upgrade firm to use it"):
        rebuild(description | {"name": "resnet99"}, tensors)


def test_facts_are_consistent():
    given = {"name": "x", "mean": (0.5,) * 3, "std": (0.5,) * 3, "licence": "none"}
    with pytest.raises(FirmError, match="x has 5 strides but 1 numbers of channels; give one of each per stage"):
        Facts(**given, channels=(1,))
    for stages in ((), (0,), (3, 6)):
        with pytest.raises(FirmError, match=r"x has no stages .*; use numbers in 1\.\.5"):
            Facts(**given, channels=(1,) * 5, stages=stages)
    for facts in FACTS.values():
        assert facts.licence.endswith(".")
        assert (
            bool(facts.package) == bool(facts.module) == bool(facts.file) == bool(facts.digest) == (facts.name in LITES)
        )


# --- timm ---


class Pretended(nn.Module):
    """A network of timm: four stages, of which those asked for are given."""

    strides, channels = (4, 8, 16, 32), (2, 3, 4, 5)
    pretrained_cfg: ClassVar = {"mean": (0.1, 0.2, 0.3), "std": (1.0, 2.0, 4.0), "license": "mit"}

    def __init__(self, pretrained, out_indices):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(3, self.channels[i], s, s) for i, s in enumerate(self.strides) if i in out_indices
        )
        if pretrained:
            nn.init.ones_(self.convs[0].weight)
        self.feature_info = SimpleNamespace(reduction=lambda: list(self.strides), channels=lambda: list(self.channels))

    def forward(self, images):
        return [conv(images) for conv in self.convs]


@pytest.fixture
def timm(monkeypatch):
    def create_model(name, *, pretrained, features_only, out_indices=(0, 1, 2, 3)):
        assert features_only
        if name == "unknown":
            raise RuntimeError("Unknown model (unknown)\nand more")
        model = Pretended(pretrained, out_indices)
        if name == "last":
            model.output_fmt = "NHWC"
        return model

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))


@pytest.mark.parametrize(("asked", "deepest"), [(5, 4), (2, 2)])
def test_a_model_of_timm_is_a_backbone(timm, asked, deepest):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    backbone = load_backbone("timm:net", deepest=asked)
    assert torch.equal(torch.get_rng_state(), state)
    images = pictures()
    stages = backbone.stages(images)
    expected = [(2, 2, 16, 16), (2, 3, 8, 8), (2, 4, 4, 4), (2, 5, 2, 2)][:deepest]
    assert [tuple(stage.shape) for stage in stages] == expected
    assert backbone.facts == Facts(
        name="timm:net",
        mean=(0.1, 0.2, 0.3),
        std=(1.0, 2.0, 4.0),
        licence="As timm says: mit.",
        strides=(4, 8, 16, 32),
        channels=(2, 3, 4, 5),
        stages=(2, 3),
    )
    assert backbone.trunk.model.convs[0].weight.eq(1).all()
    digest = tensors_digest(backbone.trunk.state_dict())
    assert architecture(backbone) == {"name": "timm:net", "deepest": deepest, "digest": digest, "folded": False}
    again = rebuild(architecture(backbone), backbone.state_dict())
    assert all(torch.equal(*pair) for pair in zip(again.stages(images), stages, strict=True))
    backbone.trunk.model.convs[0].weight[0, 0, 0, 0] += 1
    assert tensors_digest(backbone.trunk.state_dict()) != digest


def test_what_timm_cannot_do_is_said(timm, monkeypatch):
    advice = r"; choose one of timm\.list_models\(pretrained=True\) and let it reach its weights$"
    with pytest.raises(FirmError, match=rf"^timm cannot make 'unknown' \(Unknown model \(unknown\)\){advice}"):
        load_backbone("timm:unknown")
    with pytest.raises(FirmError, match=rf"^timm cannot make 'last' \(its stages do not give channels, .*\){advice}"):
        load_backbone("timm:last")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(FirmError, match=r"^timm:net needs timm, which is not installed; run: pip install timm$"):
        load_backbone("timm:net")
