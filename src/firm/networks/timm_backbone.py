"""Any convolutional network of timm as a backbone, where timm is installed; firm itself does not need it."""

import importlib
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from firm.errors import MachineError, ModelFileError
from firm.networks.backbone import TIMM, Facts, Trunk


class TimmTrunk(Trunk):
    """A model of timm that gives its stages."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def stages(self, images: Float[Tensor, "n 3 h w"]) -> list[Tensor]:
        return list(self.model(images))


def timm_trunk(name: str, *, deepest: int, pretrained: bool) -> tuple[Trunk, Facts]:
    """`name` is timm's own; `pretrained` fetches the weights, otherwise they are to be filled in."""
    try:
        timm: Any = importlib.import_module("timm")
    except ImportError as error:
        raise MachineError(f"{TIMM}{name} needs timm, which is not installed; run: pip install timm") from error
    try:
        with torch.random.fork_rng(devices=[]):  # timm draws first weights from the global generator
            facts = _facts(name, timm.create_model(name, pretrained=False, features_only=True))
            stages = tuple(range(min(deepest, len(facts.strides))))
            model = timm.create_model(name, pretrained=pretrained, features_only=True, out_indices=stages)
    except Exception as error:  # unknown names, models without stages, downloads: whatever timm raises
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        fix = "choose one of timm.list_models(pretrained=True) and let it reach its weights"
        raise ModelFileError(f"timm cannot make {name!r} ({reason}); {fix}") from error
    return TimmTrunk(model), facts


def _facts(name: str, model: Any) -> Facts:
    if getattr(model, "output_fmt", "NCHW") != "NCHW":
        raise ModelFileError("its stages do not give channels, rows, columns")
    settings = model.pretrained_cfg
    strides = tuple(model.feature_info.reduction())
    middle = tuple(number for number, stride in enumerate(strides, start=1) if stride in (8, 16))
    return Facts(
        name=TIMM + name,
        mean=tuple(settings["mean"]),
        std=tuple(settings["std"]),
        licence=f"As timm says: {settings.get('license') or 'not stated'}.",
        strides=strides,
        channels=tuple(model.feature_info.channels()),
        stages=middle or (len(strides),),
    )
