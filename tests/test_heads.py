"""The encoder is the paper's ResNet-18, the heads are the paper's and the authors', embedding is a pure function."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import contracts
import firm
from cases import each
from firm.errors import ModelFileError, SettingError
from firm.networks.heads import Encoder, Head, Network, build, embed, load_weights
from firm.networks.resnet import STEMS
from firm.recipes.presets import AUTHORS, PAPER

TINY = Encoder(width=8, head=Head(hidden=(16,), out=8))


def numbers(module):
    return sum(parameter.numel() for parameter in module.parameters())


def multiplications(network, side):
    """Multiply-adds of the convolutions of one image."""
    total = []

    def count(module, _, output):
        total.append(output[0].numel() * module.weight[0].numel())

    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(count)
    embed(network, iter([torch.zeros(1, 3, side, side)]))
    return sum(total)


@pytest.fixture
def tiny():
    return build(TINY, rng=contracts.generator())


def test_numbers_of_weights_and_operations():
    paper = Network(PAPER.encoder).encoder
    assert numbers(paper) == 11_168_832
    assert multiplications(paper, 32) == pytest.approx(0.555e9, rel=2e-3)


@pytest.mark.parametrize(
    ("head", "layers", "weights"),
    [(PAPER.encoder.head, 9, 8 * 512 * 512 + 512 * 128), (AUTHORS.encoder.head, 8, 6_946_816)],
    ids=["paper", "authors"],
)
def test_heads(head, layers, weights):
    modules = list(Network(Encoder(head=head)).head)
    linear = [module for module in modules if isinstance(module, nn.Linear)]
    norms = [module for module in modules if isinstance(module, nn.BatchNorm1d)]
    assert len(linear) == layers
    assert sum(module.weight.numel() for module in linear) == weights
    assert all(module.bias is None for module in linear)
    assert linear[-1].out_features == 128
    assert isinstance(modules[-1], nn.BatchNorm1d) == head.last_norm
    assert len(norms) == layers - 1 + head.last_norm
    assert norms[-1].affine != head.last_norm


@each("stem, step", [("3x3", 8), ("3x3/2", 16), ("7x7", 32)])
def test_an_embedding_is_the_mean_over_the_last_stage_and_stems_decide_the_strides(stem, step):
    encoder = build(Encoder(width=4, stem=stem, head=Head(hidden=(8,))), rng=contracts.generator()).encoder.eval()
    images = torch.randn(2, 3, 64, 96, generator=contracts.generator(1))
    with torch.no_grad():
        stages = encoder.stages(images)
        assert torch.equal(stages[-1].mean((2, 3)), encoder(images))
    assert len(stages) == len(STEMS) + 2 == 5
    for number, stage in enumerate(stages[1:]):
        stride = step // 2 ** (3 - number)
        assert stage.shape == (2, 4 * 2**number, 64 // stride, 96 // stride)
    assert encoder.dim == stages[-1].shape[1]


def test_weights_come_from_the_rng_alone():
    torch.manual_seed(1)
    first = build(TINY, rng=contracts.generator(3)).state_dict()
    torch.manual_seed(2)
    again = build(TINY, rng=contracts.generator(3)).state_dict()
    other = build(TINY, rng=contracts.generator(4)).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    moved = [name for name, value in first.items() if value.dim() > 1]
    assert moved
    assert not any(torch.equal(first[name], other[name]) for name in moved)


def test_initialisation_is_kaiming_by_fan_out():
    network = build(Encoder(width=16, head=Head(hidden=(256,))), rng=contracts.generator())
    conv = network.encoder.layer4[1].conv2.weight.detach()  # 128 x 128 x 3 x 3
    assert float(conv.std()) == pytest.approx((2 / (128 * 9)) ** 0.5, rel=0.02)
    linear = network.head[0].weight.detach()  # 256 x 128
    assert float(linear.std()) == pytest.approx((2 / 256) ** 0.5, rel=0.02)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.weight.eq(1).all()
            assert module.bias.eq(0).all()
            assert module.eps == 1e-5


@each("momentum", [0.1, 0.9])
def test_norm_momentum_reaches_every_norm(momentum):
    settings = Encoder(width=4, norm_momentum=momentum, head=Head(hidden=(8,), last_norm=True))
    network = build(settings, rng=contracts.generator())
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)]
    assert len(norms) == 20 + 2
    assert {module.momentum for module in norms} == {momentum}


@each("width", [4, 16])
def test_memory_layout_changes_no_result(width):
    network = build(Encoder(width=width), rng=contracts.generator()).encoder
    images = torch.randn(3, 3, 16, 16, generator=contracts.generator())
    expected = embed(network, iter([images]))
    found = embed(network, iter([images.to(memory_format=torch.channels_last)]))
    torch.testing.assert_close(found, expected)


def test_widths_below_eight_train_without_corrupting_memory():
    """In a process of its own: with channels last, oneDNN's backward pass writes beyond its memory there."""
    program = """
import torch
from firm.networks.heads import Encoder, Head, build
for width in range(1, 9):
    network = build(Encoder(width=width, head=Head(hidden=(8,), out=4)), rng=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for step in range(3):
        loss = network(torch.randn(8, 3, 16, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert torch.isfinite(loss), width
print("whole")
"""
    source = Path(firm.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(source), "MALLOC_CHECK_": "3", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "whole"


def test_embeddings_are_non_negative_and_made_in_evaluation_mode(tiny):
    tiny.train()
    images = torch.randn(6, 3, 16, 16, generator=contracts.generator())
    before = {name: value.clone() for name, value in tiny.state_dict().items()}
    features = embed(tiny.encoder, iter([images[:4], images[4:]]))
    assert features.shape == (6, 64)
    assert features.dtype == torch.float32
    assert not features.requires_grad
    assert float(features.min()) >= 0
    assert float(features.max()) > 0
    assert not tiny.encoder.training
    assert all(torch.equal(before[name], value) for name, value in tiny.state_dict().items())


def test_an_embedding_does_not_depend_on_its_companions(tiny):
    images = torch.randn(6, 3, 16, 16, generator=contracts.generator())
    together = embed(tiny.encoder, iter([images]))
    alone = embed(tiny.encoder, iter(images.split(1)))
    reversed_order = embed(tiny.encoder, iter([images.flip(0)])).flip(0)
    torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(reversed_order, together, rtol=1e-5, atol=1e-6)


def test_nothing_embeds_to_nothing(tiny):
    assert embed(tiny.encoder, iter([])).shape == (0, 64)


# --- weights of a published checkpoint ---


def stored(network, path, **changes):
    weights = {name: value.contiguous() for name, value in network.encoder.state_dict().items()} | changes
    save_file({name: value for name, value in weights.items() if value is not None}, path)
    return path


def test_a_checkpoint_comes_back_and_its_classifier_is_left_aside(tiny, tmp_path):
    classifier = {"fc.weight": torch.randn(10, 64), "fc.bias": torch.randn(10)}
    path = stored(tiny, tmp_path / "weights.safetensors", **classifier)
    other = build(TINY, rng=contracts.generator(9))
    head = other.head[0].weight.clone()
    load_weights(other, path)
    for name, value in tiny.encoder.state_dict().items():
        assert torch.equal(other.encoder.state_dict()[name], value)
    assert torch.equal(other.head[0].weight, head)


def test_a_checkpoint_without_batch_counters_is_good(tiny, tmp_path):
    counters = {name: None for name in tiny.encoder.state_dict() if name.endswith("num_batches_tracked")}
    other = build(TINY, rng=contracts.generator(9))
    load_weights(other, stored(tiny, tmp_path / "old.safetensors", **counters))
    assert torch.equal(other.encoder.conv1.weight, tiny.encoder.conv1.weight)
    assert int(other.encoder.bn1.num_batches_tracked) == 0


def test_a_checkpoint_that_does_not_fit_is_refused(tiny, tmp_path):
    changes = [{"conv1.weight": torch.zeros(8, 3, 7, 7)}, {"layer3.0.downsample.0.weight": None}]
    for change in changes:
        path = stored(tiny, tmp_path / "w.safetensors", **change)
        with pytest.raises(ModelFileError, match=rf"w\.safetensors .*{next(iter(change))}.*encoder\.width"):
            load_weights(tiny, path)


def test_a_file_that_is_no_checkpoint_is_refused(tiny, tmp_path):
    path = tmp_path / "w.safetensors"
    for content in (None, b"not tensors at all, but long enough to look for a header"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ModelFileError, match=r"w\.safetensors"):
            load_weights(tiny, path)


def test_a_network_starts_from_the_weights_its_settings_name(tiny, tmp_path):
    path = stored(tiny, tmp_path / "w.safetensors")
    again = build(replace(TINY, weights=str(path)), rng=contracts.generator(9))
    images = torch.randn(2, 3, 16, 16, generator=contracts.generator())
    assert torch.equal(embed(again.encoder, iter([images])), embed(tiny.encoder, iter([images])))
    assert all(parameter.requires_grad for parameter in again.parameters())
    assert again.encoder.conv1.weight.is_contiguous(memory_format=torch.channels_last)


def test_impossible_settings_are_named():
    for wrong in ({"stem": "5x5"}, {"width": 0}, {"norm_momentum": 2.0}):
        with pytest.raises(SettingError, match=rf"encoder\.{next(iter(wrong))}"):
            Encoder(**wrong)
    with pytest.raises(SettingError, match="head"):
        Head(hidden=(0,))
