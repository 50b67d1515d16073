"""A backbone is frozen, folded, moved as one and comes back from what was stored; timm gives others."""

import json
import sys
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from firm.errors import FirmError, ImageError, ModelFileError
from firm.networks.backbone import Facts, architecture
from firm.networks.weights import FACTS, file_digest, fold_norms, load_backbone, rebuild, tensors_digest
from firm.runtime.files import load_tensors, save_tensors
from random_networks import LITES, RESNETS, close, pictures, random_backbone, random_tensors, stored


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
    with pytest.raises(ImageError, match=f"{name}.*not 2"):
        backbone.normalise(images[:, :2])


def test_statistics_are_the_published_ones():
    assert {(FACTS[name].mean, FACTS[name].std) for name in LITES} == {((0.5,) * 3, (0.5,) * 3)}
    assert {(FACTS[name].mean, FACTS[name].std) for name in RESNETS} == {((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}


@pytest.mark.parametrize("name", ["efficientnet-lite0", "resnet18", "resnet50"])
def test_folding_changes_nothing_but_the_batch_norms(name):
    plain = random_backbone(name, 4)
    folded = deepcopy(plain)
    fold_norms(folded.trunk)
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
    with pytest.raises(ModelFileError, match=r"resnet18: .*'layer2\.0\.conv1\.weight'"):
        rebuild(description | {"deepest": 3}, tensors)
    with pytest.raises(ModelFileError, match="'resnet99'"):
        rebuild(description | {"name": "resnet99"}, tensors)


def test_only_packages_that_bring_weights_are_named():
    for facts in FACTS.values():
        assert facts.licence.endswith(".")
        brought = {bool(facts.package), bool(facts.module), bool(facts.digest)}
        assert brought == {facts.name in LITES}
        assert bool(facts.file) or facts.name not in LITES  # a file of yours may be found by its name
        assert len(facts.strides) == len(facts.channels)
        assert set(facts.stages) <= set(range(1, len(facts.strides) + 1))


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
    with pytest.raises(FirmError, match=r"'unknown' \(Unknown model \(unknown\)\)"):
        load_backbone("timm:unknown")
    with pytest.raises(FirmError, match=r"'last'.*channels"):
        load_backbone("timm:last")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(FirmError, match=r"timm:net.*pip install timm"):
        load_backbone("timm:net")
