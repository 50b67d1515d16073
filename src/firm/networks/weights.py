"""Weights files in, tensors out: nothing in a file is ever run, and what does not fit is said in a sentence."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from firm.types import FirmError

SUFFIXES = (".pth", ".pt")  # read with torch's weights-only reader, beside .safetensors
HEADS = {"fc", "classifier", "conv_head", "bn2", "_fc", "_conv_head", "_bn1"}  # what stands behind the last stage
COUNTER = "num_batches_tracked"  # of a batch norm in training; not every file has them and nobody here needs them
PLAIN = "store the state dict of the network as .safetensors and give that file"


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file or a weights-only .pth or .pt, out of the usual wrappings."""
    if not path.is_file():
        raise FirmError(f"there is no weights file {path}; check the path")
    if path.suffix == ".safetensors":
        return _tensors(path, _safetensors(path))
    if path.suffix in SUFFIXES:
        return _tensors(path, _checkpoint(path))
    raise FirmError(f"{path} does not end in .safetensors, .pth or .pt; {PLAIN}")


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


def differences(network: nn.Module, tensors: dict[str, Tensor]) -> list[str]:
    """What keeps the tensors from being this network's, each as half a sentence; heads and counters do not count."""
    own = {name: value for name, value in network.state_dict().items() if not name.endswith(COUNTER)}
    given = {name: value for name, value in tensors.items() if not name.endswith(COUNTER)}
    found = [f"it has no {name!r}" for name in own if name not in given]
    found += [f"its {name!r} is none" for name in given if name not in own and name.split(".")[0] not in HEADS]
    for name, value in own.items():
        if name in given and given[name].shape != value.shape:
            found.append(f"its {name} is {tuple(given[name].shape)} instead of {tuple(value.shape)}")
        elif name in given and given[name].is_floating_point() != value.is_floating_point():
            found.append(f"its {name} is {given[name].dtype} instead of {value.dtype}")
    return found


def fill(network: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give a network, which may have been made without memory (on the meta device), copies of the tensors it needs."""
    own = {
        name: torch.zeros((), dtype=torch.long) if name.endswith(COUNTER) else _copy(tensors[name], value.dtype)
        for name, value in network.state_dict().items()
    }
    network.load_state_dict(own, assign=True)


def _copy(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


def _safetensors(path: Path) -> object:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise FirmError(
            f"{path} is not a readable safetensors file ({error}); copy it again from its source"
        ) from error


def _checkpoint(path: Path) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd formats; what they hold decides
            return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # the reader fails in as many ways as there are broken files
        if "global" in str(error).lower():
            raise FirmError(
                f"{path} holds objects beside tensors, which could run code and are not read; {PLAIN}"
            ) from error
        raise FirmError(f"{path} is damaged or no checkpoint of tensors; copy it again, or {PLAIN}") from error


def _tensors(path: Path, content: object) -> dict[str, Tensor]:
    """Out of {"state_dict": ...} and without the "module." a parallel training puts before every name."""
    if isinstance(content, dict) and "state_dict" in content:
        content = content["state_dict"]
    if not isinstance(content, dict) or not content:
        raise FirmError(f"{path} holds no named tensors; {PLAIN}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise FirmError(f"{path} holds {name!r}, which is no tensor; {PLAIN}")
    if all(name.startswith("module.") for name in content):
        return {name.removeprefix("module."): value for name, value in content.items()}
    return content
