"""Frozen networks with their weights: from an installed package, a file or timm; wavelets need none.

Nothing is downloaded by firm itself, and nothing in a weights file is ever run.
"""

import hashlib
import importlib.util
import json
import warnings
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import fuse_conv_bn_eval

from firm.data.registry import data_roots
from firm.errors import ModelFileError, SettingError
from firm.networks.backbone import TIMM, Backbone, Facts, Trunk
from firm.networks.efficientnet_lite import EfficientNetLite, timm_names
from firm.networks.resnet import ResNet
from firm.networks.timm_backbone import timm_trunk
from firm.networks.vit import SHAPES, ViT, official_names
from firm.networks.wavelets import Wavelets
from firm.runtime.files import Card

WAVELETS = "wavelets"
STAGES = 5
SUFFIXES = (".safetensors", ".pth", ".pt")
HEADS = {"fc", "classifier", "conv_head", "bn2", "_fc", "_conv_head", "_bn1"}  # what stands behind the last stage
COUNTER = "num_batches_tracked"  # of a batch norm in training: some files lack it, and it is not needed
USUAL_RESNET = "conv1.weight, layer1.0.conv1.weight, ..."
ADVICE = "store the state dict of the network as .safetensors and give that file"


def _facts(name: str, base: str = "", **own: Any) -> Facts:
    fields: dict[str, Any] = _STORED.get(base, {}) | own
    tuples: dict[str, Any] = {field: tuple(value) for field, value in fields.items() if isinstance(value, list)}
    return Facts(name=name, **fields | tuples)


_STORED = json.loads(resources.files("firm.networks").joinpath("backbones.json").read_text(encoding="utf-8"))
FACTS = {name: _facts(name, **own) for name, own in _STORED["backbones"].items()}


def load_backbone(name_or_file: str, *, deepest: int = STAGES, fold: bool = True) -> Backbone:
    """A backbone by name (FACTS), from timm ("timm:NAME"), or from a weights file, whose kind is recognised.

    Stages behind `deepest` are neither kept nor computed. `fold` merges batch norms into convolutions: faster, and
    equal up to rounding; wavelets and models of timm stay as they are.
    """
    if not 1 <= deepest <= STAGES:
        raise SettingError(f"deepest is {deepest}; stages are numbered 1..{STAGES}")
    if name_or_file.startswith(TIMM):
        trunk, facts = timm_trunk(name_or_file.removeprefix(TIMM), deepest=deepest, pretrained=True)
    elif name_or_file == WAVELETS:
        facts = FACTS[WAVELETS]
        trunk = Wavelets(deepest=min(deepest, len(facts.strides)))
    else:
        return _from_file(name_or_file, deepest, fold)
    deepest = min(deepest, len(facts.strides))  # some families have only four stages
    return Backbone(trunk, facts, deepest=deepest, digest=tensors_digest(trunk.state_dict()), folded=False)


def _from_file(name_or_file: str, deepest: int, fold: bool) -> Backbone:
    known, path = name_or_file in FACTS, Path(name_or_file)
    if not known and not path.exists() and path.name == name_or_file and not path.suffix:
        raise SettingError(f"no backbone {name_or_file!r}; use one of {', '.join(FACTS)}, {TIMM}NAME or a weights file")
    path = package_file(FACTS[name_or_file]) if known else path
    tensors = _usual_names(read_weights(path))
    name = name_or_file if known else _recognised(path, tensors)
    network = _empty(name, deepest)
    fill(network, tensors)
    if fold:
        fold_norms(network)
    return Backbone(network, FACTS[name], deepest=deepest, digest=file_digest(path), folded=fold)


def rebuild(description: Card, tensors: dict[str, Tensor]) -> Backbone:
    """The backbone of this `architecture` and `state_dict`; only a model of timm needs a package."""
    name, deepest, folded = description["name"], description["deepest"], description["folded"]
    if name.startswith(TIMM):
        trunk, facts = timm_trunk(name.removeprefix(TIMM), deepest=deepest, pretrained=False)
    elif name in FACTS:
        trunk, facts = _empty(name, deepest), FACTS[name]
    else:
        raise ModelFileError(f"this firm has no backbone {name!r}; upgrade firm to use it")
    if folded:
        fold_norms(trunk)
    stored = {key.removeprefix("trunk."): value for key, value in tensors.items()}
    wrong = differences(trunk, stored)
    if wrong:
        raise ModelFileError(f"the stored weights are not those of {name}: {wrong[0]}; fit the detector again")
    fill(trunk, stored)
    return Backbone(trunk, facts, deepest=deepest, digest=description["digest"], folded=folded)


def _empty(name: str, deepest: int) -> Trunk:
    """On the meta device: making it is quick and draws no random weights."""
    with torch.device("meta"):
        if name == WAVELETS:
            return Wavelets(deepest=deepest)
        if name in SHAPES:
            return ViT(SHAPES[name], deepest=deepest)
        if not name.startswith("efficientnet-lite"):
            return ResNet(name, deepest=deepest)
        return EfficientNetLite(name, deepest=deepest)


def _usual_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return official_names(timm_names(tensors))


def weights_file(name: str, file: Path) -> str:
    """The file, refused unless it holds the weights of this backbone."""
    if name not in FACTS or name == WAVELETS:
        names = ", ".join(each for each in FACTS if each != WAVELETS)
        raise SettingError(f"--weights needs --encoder NAME with one of {names}" + (f", not {name}" if name else ""))
    found = _recognised(file, _usual_names(read_weights(file)))
    if found != name:
        raise SettingError(f"{file} holds the weights of {found}, not of {name}; use --encoder {found}")
    return str(file)


def _recognised(path: Path, tensors: dict[str, Tensor]) -> str:
    wrong = {name: differences(_empty(name, STAGES), tensors) for name in FACTS if name != WAVELETS}
    name = min(wrong, key=lambda name: len(wrong[name]))
    if wrong[name]:
        nearest = f"the nearest is {name}, but {wrong[name][0]}; give a file of one of these under the usual names"
        raise ModelFileError(f"{path} is none of {', '.join(wrong)}: {nearest}")
    return name


def installed(name: str) -> bool:
    """Whether the weights of a backbone are on this machine, or it needs none."""
    try:
        return name == WAVELETS or package_file(FACTS[name]).is_file()
    except (SettingError, ModelFileError):
        return False


def package_file(facts: Facts) -> Path:
    """The weights in an installed package, found without running any code of it; else in a folder of FIRM_DATA."""
    if not facts.package:
        if found := [path for root in data_roots() for path in sorted((root / "weights").glob(facts.file or "-"))]:
            return found[0]
        usual = "blocks.0.attn.qkv.weight, ..., or those of Hugging Face" if facts.name in SHAPES else USUAL_RESNET
        kind = f".safetensors or .pth, with the usual names: {usual}"
        give = f"give a file with --weights FILE or as --encoder FILE ({kind})"
        raise SettingError(f"{facts.name} comes without weights; {give}")
    spec = importlib.util.find_spec(facts.module)
    folders = spec.submodule_search_locations if spec else None
    path = Path(folders[0], facts.file) if folders else None
    if path is None or not path.is_file():
        run = "run: pip install 'firm[pretrained]' (or give a weights file with --encoder FILE)"
        raise ModelFileError(f"the weights of {facts.name} are not installed; {run}")
    if file_digest(path) != facts.digest:
        run = f"run: pip install --force-reinstall --no-deps {facts.package}"
        raise ModelFileError(f"{path} is not the published weights file of {facts.name}; {run}")
    return path


def file_digest(path: Path) -> str:
    """The first 16 digits of the SHA-256 of a file: which weights these are."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def tensors_digest(tensors: dict[str, Tensor]) -> str:
    """The same for weights that came without a file."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
    return digest.hexdigest()[:16]


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file or a weights-only .pth or .pt, out of the usual wrappings."""
    if not path.is_file():
        raise ModelFileError(f"there is no weights file {path}; check the path")
    if path.suffix not in SUFFIXES:
        raise ModelFileError(f"{path} does not end in {', '.join(SUFFIXES)}; {ADVICE}")
    content = _content(path)
    if isinstance(content, dict) and "state_dict" in content:
        content = content["state_dict"]
    if not isinstance(content, dict) or not content:
        raise ModelFileError(f"{path} holds no named tensors; {ADVICE}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ModelFileError(f"{path} holds {name!r}, which is no tensor; {ADVICE}")
    if all(name.startswith("module.") for name in content):  # as a parallel training stores them
        return {name.removeprefix("module."): value for name, value in content.items()}
    return content


def _content(path: Path) -> object:
    """What the file holds, by readers that run nothing."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd formats, which fail below
            return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch's reader fails in as many ways as there are broken files
        reason = "is damaged or holds no tensors"
        if type(error).__name__ == "UnpicklingError" and "global" in str(error).lower():
            reason = "holds objects beside tensors, which could run code and are not read"
        raise ModelFileError(f"{path} {reason}; copy it again from its source, or {ADVICE}") from error


def differences(network: nn.Module, tensors: dict[str, Tensor]) -> list[str]:
    """What keeps the tensors from being this network's, each as half a sentence; heads and counters do not matter."""
    own = {name: value for name, value in network.state_dict().items() if not name.endswith(COUNTER)}
    given = {name: value for name, value in tensors.items() if not name.endswith(COUNTER)}
    wrong = [f"it has no {name!r}" for name in own if name not in given]
    wrong += [f"its {name!r} is none" for name in given if name not in own and name.split(".")[0] not in HEADS]
    for name, value in own.items():
        if name in given and given[name].shape != value.shape:
            wrong.append(f"its {name} is {tuple(given[name].shape)} instead of {tuple(value.shape)}")
        elif name in given and given[name].is_floating_point() != value.is_floating_point():
            wrong.append(f"its {name} is {given[name].dtype} instead of {value.dtype}")
    return wrong


def fill(network: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give a network, which may be on the meta device, copies of the tensors it needs."""
    copies = {}
    for name, value in network.state_dict().items():
        given = torch.zeros((), dtype=torch.long) if name.endswith(COUNTER) else tensors[name].detach()
        copies[name] = given.to(value.dtype, copy=True, memory_format=torch.contiguous_format)
    network.load_state_dict(copies, assign=True)


def fold_norms(network: nn.Module) -> None:
    """Merge each batch norm into the convolution right before it, in place: faster, but not trainable any more."""
    network.eval()
    for module in list(network.modules()):
        before, conv = "", None
        for name, child in list(module.named_children()):
            if isinstance(conv, nn.Conv2d) and isinstance(child, nn.BatchNorm2d):
                setattr(module, before, fuse_conv_bn_eval(conv, child))
                setattr(module, name, nn.Identity())
            before, conv = name, child
