"""Frozen networks for patch features: images in, what each stage makes of them out.

Nothing is trained here and nothing is downloaded: weights come from an installed package or from a file; wavelets need
none.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from firm.backbones.efficientnet_lite import SCALES, EfficientNetLite, usual_names
from firm.backbones.facts import FACTS, Facts
from firm.backbones.folding import fold as fold_norms
from firm.backbones.resnet import ResNet
from firm.backbones.timm_models import PREFIX, TimmTrunk, timm_trunk
from firm.backbones.wavelets import NAME as WAVELETS
from firm.backbones.wavelets import Wavelets
from firm.backbones.weights import differences, file_digest, fill, read_weights, tensors_digest
from firm.storage import Card
from firm.types import FirmError

STAGES = 5
PORTION = 2 * 256 * 256  # pixels a CPU sees at once: more leave its cache, and each image takes longer

Trunk = EfficientNetLite | ResNet | TimmTrunk | Wavelets


class Backbone(nn.Module):
    """A trunk with what is known of it; always in evaluation mode and without gradients."""

    mean: Tensor
    std: Tensor

    def __init__(self, trunk: Trunk, facts: Facts, *, deepest: int, digest: str, folded: bool) -> None:
        super().__init__()
        self.trunk = trunk
        self.facts = facts
        self.deepest = deepest  # the last of its stages, counted from 1
        self.digest = digest  # of the weights file
        self.folded = folded  # batch norms are part of the convolutions
        self.register_buffer("mean", torch.tensor(facts.mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(facts.std).view(1, 3, 1, 1), persistent=False)
        self.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Backbone:
        """Frozen: stays in evaluation mode, also as part of something that trains."""
        return super().train(False)

    def normalise(self, images: Float[Tensor, "n c h w"]) -> Float[Tensor, "n 3 h w"]:
        """Images in 0..1 as the network was trained to see them; a grey image becomes three equal channels."""
        if images.shape[1] not in (1, 3):
            raise FirmError(f"{self.facts.name} takes images of 1 or 3 channels, not {images.shape[1]}; convert them")
        return (images - self.mean) / self.std

    @torch.no_grad()
    def stages(self, images: Float[Tensor, "n 3 h w"]) -> list[Tensor]:
        """What each stage makes of normalised images, n, c, r, s, down to the deepest that was loaded."""
        if images.device.type != "cpu":
            return self.trunk.stages(images)
        at_once = max(1, PORTION // max(1, images.shape[-2] * images.shape[-1]))
        images = images.contiguous(memory_format=torch.channels_last)
        portions = [self.trunk.stages(portion) for portion in images.split(at_once)]
        return [torch.cat(stage) for stage in zip(*portions, strict=True)]

    @torch.no_grad()
    def finished(self, stage: int, averaged: Float[Tensor, "n c r s"]) -> Float[Tensor, "n c r s"]:
        """A stage, counted from 1, that was averaged over patches: of a network that is it, of wavelets not yet."""
        return self.trunk.finished(stage, averaged) if isinstance(self.trunk, Wavelets) else averaged


def load_backbone(name_or_file: str, *, deepest: int = STAGES, fold: bool = True) -> Backbone:
    """A backbone by name (FACTS), from timm ("timm:NAME"), or from a weights file, whose kind is recognised.

    Stages behind `deepest` are neither kept nor computed. `fold` makes it faster and equal up to rounding; a model of
    timm stays as it is.
    """
    if not 1 <= deepest <= STAGES:
        raise FirmError(f"deepest is {deepest}; stages are numbered 1..{STAGES}")
    if name_or_file.startswith(PREFIX):
        return _of_timm(name_or_file, deepest)
    if name_or_file == WAVELETS:
        return _of_wavelets(deepest)
    path = _package_file(FACTS[name_or_file]) if name_or_file in FACTS else _given_file(name_or_file)
    tensors = usual_names(read_weights(path))
    name = name_or_file if name_or_file in FACTS else _recognised(path, tensors)
    trunk = _empty(name, deepest)
    fill(trunk, tensors)
    if fold:
        fold_norms(trunk)
    return Backbone(trunk, FACTS[name], deepest=deepest, digest=file_digest(path), folded=fold)


def architecture(backbone: Backbone) -> Card:
    """What makes this backbone again beside its `state_dict`: for the card of a file that holds both."""
    return {
        "name": backbone.facts.name,
        "deepest": backbone.deepest,
        "digest": backbone.digest,
        "folded": backbone.folded,
    }


def rebuild(description: Card, tensors: dict[str, Tensor]) -> Backbone:
    """The backbone of which these are the `architecture` and the `state_dict`; no package or weights file is needed.

    Only a model of timm needs timm again.
    """
    name, deepest, folded = description["name"], description["deepest"], description["folded"]
    trunk, facts = _unfilled(name, deepest, folded)
    stored = {key.removeprefix("trunk."): value for key, value in tensors.items()}
    wrong = differences(trunk, stored)
    if wrong:
        raise FirmError(f"the stored weights are not those of {name}: {wrong[0]}; fit the detector again")
    fill(trunk, stored)
    return Backbone(trunk, facts, deepest=deepest, digest=description["digest"], folded=folded)


def _of_timm(name: str, deepest: int) -> Backbone:
    trunk, facts = timm_trunk(name.removeprefix(PREFIX), deepest=deepest, pretrained=True)
    deepest = min(deepest, len(facts.strides))  # some families have four stages
    return Backbone(trunk, facts, deepest=deepest, digest=tensors_digest(trunk.state_dict()), folded=False)


def _of_wavelets(deepest: int) -> Backbone:
    facts = FACTS[WAVELETS]
    trunk = Wavelets(deepest=min(deepest, len(facts.strides)))
    digest = tensors_digest(trunk.state_dict())
    return Backbone(trunk, facts, deepest=trunk.deepest, digest=digest, folded=False)


def _unfilled(name: str, deepest: int, folded: bool) -> tuple[Trunk, Facts]:
    if name.startswith(PREFIX):
        return timm_trunk(name.removeprefix(PREFIX), deepest=deepest, pretrained=False)
    if name not in FACTS:
        raise FirmError(f"this firm has no backbone {name!r}; upgrade firm to use it")
    trunk = _empty(name, deepest)
    if folded:
        fold_norms(trunk)
    return trunk, FACTS[name]


def _empty(name: str, deepest: int) -> EfficientNetLite | ResNet | Wavelets:
    """Without memory: making it is quick and draws no random weights."""
    with torch.device("meta"):
        if name == WAVELETS:
            return Wavelets(deepest=deepest)
        return EfficientNetLite(name, deepest=deepest) if name in SCALES else ResNet(name, deepest=deepest)


@cache
def _whole(name: str) -> EfficientNetLite | ResNet | Wavelets:
    """To be looked at only, never to be filled."""
    return _empty(name, STAGES)


def _recognised(path: Path, tensors: dict[str, Tensor]) -> str:
    wrong = {name: differences(_whole(name), tensors) for name in FACTS if name != WAVELETS}
    name = min(wrong, key=lambda name: len(wrong[name]))
    if wrong[name]:
        raise FirmError(
            f"{path} is none of {', '.join(wrong)}: the nearest is {name}, but {wrong[name][0]}; "
            "give a file of one of these under the usual names"
        )
    return name


def installed(name: str) -> bool:
    """Whether the weights of a backbone come with an installed package, or it needs none."""
    if name == WAVELETS:
        return True
    try:
        _package_file(FACTS[name])
    except FirmError:
        return False
    return True


def _given_file(text: str) -> Path:
    path = Path(text)
    if not path.exists() and path.name == text and not path.suffix:
        raise FirmError(f"no backbone {text!r}; use one of {', '.join(FACTS)}, {PREFIX}NAME or a weights file")
    return path


def _package_file(facts: Facts) -> Path:
    """The weights in an installed package, found without running any code of it."""
    if not facts.package:
        raise FirmError(
            f"{facts.name} comes without weights; give a weights file with --encoder FILE (.safetensors or .pth, "
            "with the usual names: conv1.weight, layer1.0.conv1.weight, ...)"
        )
    spec = importlib.util.find_spec(facts.module)
    folders = spec.submodule_search_locations if spec else None
    path = Path(folders[0], facts.file) if folders else None
    if path is None or not path.is_file():
        raise FirmError(
            f"the weights of {facts.name} are not installed; run: pip install 'firm[pretrained]' "
            "(or give a weights file with --encoder FILE)"
        )
    if file_digest(path) != facts.digest:
        raise FirmError(
            f"{path} is not the published weights file of {facts.name}; "
            f"run: pip install --force-reinstall --no-deps {facts.package}"
        )
    return path


__all__ = [
    "FACTS",
    "WAVELETS",
    "Backbone",
    "Facts",
    "architecture",
    "installed",
    "load_backbone",
    "read_weights",
    "rebuild",
]
