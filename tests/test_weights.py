"""Weights files of every kind are read, none is run, and what does not fit is refused with the culprit named."""

import os
import pickle
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from cases import each
from firm.errors import ModelFileError, SettingError
from firm.networks.efficientnet_lite import timm_names
from firm.networks.weights import FACTS, _recognised, file_digest, load_backbone, read_weights
from random_networks import LITES, RESNETS, pictures, random_backbone, random_tensors, trunk

# --- packages ---


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


def test_names_of_the_packages_become_ours():
    for name in LITES:
        ours = trunk(name).state_dict()
        theirs = package_names(ours)
        assert "_blocks.15._bn2.running_mean" in theirs
        renamed = timm_names(theirs)
        assert set(renamed) - set(ours) == {"_conv_head.weight", "_bn1.weight", "_fc.bias"}
        assert all(renamed[key] is value for key, value in ours.items())
        assert timm_names(ours) is ours


def test_other_numbers_of_blocks_are_not_renamed():
    tensors = {"_conv_stem.weight": torch.zeros(1), "_blocks.0._bn1.weight": torch.zeros(1)}
    assert timm_names(tensors) is tensors


def test_a_package_is_found_without_running_it_and_must_bring_the_published_file(tmp_path, monkeypatch):
    facts = replace(FACTS["efficientnet-lite0"], module="weights_of_somebody")
    monkeypatch.setitem(FACTS, facts.name, facts)
    with pytest.raises(ModelFileError, match=r"efficientnet-lite0 are not installed.*firm\[pretrained\]"):
        load_backbone("efficientnet-lite0")
    package = tmp_path / "weights_of_somebody"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('this ran')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelFileError, match="not installed"):
        load_backbone("efficientnet-lite0")
    (package / facts.file).write_bytes(b"something else")
    with pytest.raises(ModelFileError, match=r"57934424\.pth .*--force-reinstall"):
        load_backbone("efficientnet-lite0")
    torch.save(package_names(random_tensors("efficientnet-lite0")), package / facts.file)
    digest = file_digest(package / facts.file)
    monkeypatch.setitem(FACTS, facts.name, replace(facts, digest=digest))
    assert load_backbone("efficientnet-lite0", deepest=1).digest == digest
    assert "weights_of_somebody" not in sys.modules


def test_resnets_need_a_file():
    with pytest.raises(SettingError, match=r"resnet18 .*--encoder FILE"):
        load_backbone("resnet18")


# --- files ---


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


def test_each_network_is_recognised_from_names_and_shapes(tmp_path):
    for name in (*LITES, *RESNETS):
        assert _recognised(tmp_path, trunk(name).state_dict() | {"fc.weight": torch.zeros(5, 5)}) == name


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
        with pytest.raises(ModelFileError) as error:
            _recognised(tmp_path / "w.pth", tensors)
        assert all(part in str(error.value) for part in (str(tmp_path / "w.pth"), nearest, reason))


class Trap:
    """Unpickled, it would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["zip", "old", "raw", "newer"])
def test_a_file_with_code_in_it_is_refused_unrun(kind, tmp_path):
    trap, path = tmp_path / "sprung", tmp_path / "w.pth"
    if kind in ("zip", "old"):
        content = {"conv1.weight": torch.zeros(1), "more": Trap(trap)}
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    else:
        path.write_bytes(pickle.dumps(Trap(trap), protocol=2 if kind == "raw" else 5))
    for read in (read_weights, lambda path: load_backbone(str(path))):
        with pytest.raises(ModelFileError, match=r"w\.pth"):
            read(path)
        assert not trap.exists()
    if kind in ("zip", "old"):
        torch.load(path, weights_only=False)
    else:
        pickle.loads(path.read_bytes())  # noqa: S301
    assert trap.exists()  # the trap is a real one


def test_a_whole_module_is_refused(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "w.pt")
    with pytest.raises(ModelFileError, match=r"w\.pt holds objects"):
        read_weights(tmp_path / "w.pt")


BROKEN = {
    "empty": b"",
    "text": b"this is no checkpoint " * 20,
    "zip": b"PK\x03\x04" + bytes(200),
    "pickle": b"\x80\x02K",
}


@each("content", BROKEN.values())
def test_a_broken_file_is_refused(content, tmp_path):
    for file in ("w.pth", "w.safetensors"):
        (tmp_path / file).write_bytes(content)
        with pytest.raises(ModelFileError, match=file):
            read_weights(tmp_path / file)


def test_a_prefix_is_one_only_if_every_name_has_it(tmp_path):
    save_file({"module.a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "w.safetensors")
    assert set(read_weights(tmp_path / "w.safetensors")) == {"module.a", "b"}


def test_a_cut_file_is_refused(tmp_path):
    for old in (False, True):
        path = tmp_path / "w.pth"
        torch.save({"a": torch.ones(1000)}, path, _use_new_zipfile_serialization=not old)
        path.write_bytes(path.read_bytes()[:2000])
        with pytest.raises(ModelFileError, match=r"w\.pth is damaged"):
            read_weights(path)


@each(
    "content, culprit",
    [
        ([torch.zeros(1)], "named tensors"),
        ({}, "named tensors"),
        ({"state_dict": 3}, "named tensors"),
        ({"a": torch.zeros(1), "epoch": 3}, "'epoch'"),
        ({7: torch.zeros(1)}, "7"),
    ],
)
def test_content_that_is_no_state_dict_is_refused(content, culprit, tmp_path):
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(ModelFileError, match=rf"w\.pth holds .*{culprit}"):
        read_weights(tmp_path / "w.pth")


def test_files_that_are_not_there_are_named(tmp_path):
    (tmp_path / "w.onnx").write_bytes(b"x")
    for path in (tmp_path / "no.pth", tmp_path, tmp_path / "w.onnx"):
        with pytest.raises(ModelFileError, match=str(path)):
            read_weights(path)
    for text in ("absent.pth", "some/where"):
        with pytest.raises(ModelFileError, match=text):
            load_backbone(text)
    with pytest.raises(SettingError, match=r"'resnet19'.*resnet18"):
        load_backbone("resnet19")


@each("deepest", [0, 6])
def test_stages_that_do_not_exist_are_named(deepest):
    with pytest.raises(SettingError, match=f"deepest is {deepest}"):
        load_backbone("efficientnet-lite0", deepest=deepest)
