"""Backbones of random weights, for tests of networks and weights files."""

from __future__ import annotations

import math
from functools import cache

import torch
from safetensors.torch import save_file

import contracts
from firm.networks.efficientnet_lite import EfficientNetLite
from firm.networks.resnet import ResNet
from firm.networks.weights import FACTS, rebuild

LITES = [name for name in FACTS if name.startswith("efficientnet")]
RESNETS = [name for name in FACTS if "resnet" in name]


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


def close(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))
