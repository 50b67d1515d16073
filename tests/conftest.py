"""Shapes in signatures are checked while the tests run; one thread, so that equal means equal on any machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook
from safetensors.torch import save_file

torch.set_num_threads(1)
settings.register_profile("firm", deadline=None)  # tests must pass on a loaded machine
settings.load_profile("firm")

CHECKED = [
    f"firm.{name}"
    for name in (
        "decision.calibration",
        "detector.evaluation",
        "detector.tune",
        "diffusion",
        "images",
        "metrics",
        "networks.heads",
        "networks.resnet",
        "outliers",
        "scoring",
        "training.batches",
        "training.loop",
        "training.methods",
        "training.patch_batches",
        "training.positives",
        "views",
    )
]
install_import_hook(CHECKED, "shape_check.checked")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests leave the user's cache alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FIRM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def resnet18_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A ResNet-18 of drawn weights, as somebody's checkpoint: random features describe much already."""
    from firm.networks.resnet import ResNet

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "resnet18.safetensors"
    save_file({name: value.contiguous() for name, value in ResNet("resnet18").state_dict().items()}, path)
    return str(path)
