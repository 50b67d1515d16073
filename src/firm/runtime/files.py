"""Files that are whole or not there: tensors and a JSON card in one safetensors file, written atomically.

The card says what the tensors are; a digest over both is stored beside them, so a damaged or edited file is
refused instead of deciding differently.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from firm.errors import named
from firm.types import FirmError

Card = dict[str, Any]


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file in one step: temporary file beside it, fsync, rename. A failure leaves the old one."""
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise FirmError(f"cannot write {named(path)}: {why(error)}; the file that was there is unchanged") from error
    finally:
        with contextlib.suppress(OSError):  # after the rename there is nothing left to remove
            os.unlink(temporary)
    _sync_folder(path.parent)


def why(error: OSError) -> str:
    """What the system says of a failed write, and what to do where that is known."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return f"{error.strerror}; free some space" if full else str(error.strerror)


def save_tensors(path: Path, tensors: dict[str, Tensor], card: Card, *, kind: str, schema: int) -> None:
    """Write tensors and card as one file of the given kind and schema version."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    text = json.dumps({"kind": kind, "schema": schema, **card}, sort_keys=True)
    write_atomically(path, save(tensors, {"card": text, "digest": digest(tensors, text)}))


def load_tensors(path: Path, *, kind: str, schema: int) -> tuple[dict[str, Tensor], Card]:
    """Read a file of the given kind; a future, foreign, damaged or edited one is refused with a sentence."""
    if not path.is_file():
        raise FirmError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            text = metadata.get("card", "")
            card = check_card(path, text, kind, schema)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise FirmError(f"{path} is not a readable firm file ({error}); copy it again from its source") from error
    if metadata.get("digest") != digest(tensors, text):
        raise FirmError(f"{path} was damaged or edited after it was written; copy it again from its source")
    return tensors, card


def check_card(path: Path, text: str, kind: str, schema: int) -> Card:
    """The card in a text; one of another kind or of the future is refused."""
    try:
        card: Card = json.loads(text)
        found, version = card["kind"], int(card["schema"])
    except (ValueError, KeyError, TypeError) as error:
        raise FirmError(f"{path} has no firm card; it was not written by firm") from error
    if found != kind:
        raise FirmError(f"{path} is a firm {found}, not a {kind}")
    if version > schema:
        raise FirmError(f"{path} has schema {version}, this firm reads up to {schema}; upgrade firm to use it")
    return card


def digest(tensors: dict[str, Tensor], text: str) -> str:
    """Names tensors and the text beside them by their content."""
    found = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
    return found.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system lets a folder be synced."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
