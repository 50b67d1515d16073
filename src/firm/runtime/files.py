"""Atomic writes, tensor files with a JSON card and a digest, and a folder lock; on Linux, macOS and Windows."""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from firm.errors import MachineError, ModelFileError, SettingError, named

Card = dict[str, Any]

WINDOWS = os.name == "nt"
LOCK = "lock"  # the file in a folder that its owner has locked
LONGEST = 255  # bytes of a file name
UNREADABLE = (SafetensorError, AttributeError, KeyError, RuntimeError)  # of tensors: damage, or a type unknown to torch
NO_SPACE = {getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG") if hasattr(errno, name)}


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file: temporary file in the same folder, fsync, rename. A failure leaves the old file."""
    temporary = path.parent / shortened(f".{path.name}", f".{secrets.token_hex(8)}")
    try:
        with writing(path, "the old file is unchanged"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "xb") as file:  # with the rights that the umask leaves
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            replace_file(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # already renamed
            os.unlink(temporary)
    with contextlib.suppress(OSError):  # make the rename durable, where folders can be synced
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def shortened(name: str, suffix: str) -> str:
    """The name and an ASCII suffix; a digest replaces the end of the name if both are too long for a file."""
    content, room = os.fsencode(name), LONGEST - len(suffix)
    if len(content) <= room:
        return name + suffix
    cut = hashlib.blake2b(content, digest_size=8).hexdigest()
    return f"{content[: room - len(cut)].decode(errors='ignore')}{cut}{suffix}"


def read_file(path: Path) -> bytes:
    """The bytes of a file; a device or a pipe, whose end may never come, is an OSError."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return path.read_bytes()


def cache_folder() -> Path:
    """Where results that can be computed again are kept, never among the data: FIRM_CACHE, else ~/.cache/firm."""
    return Path(os.environ.get("FIRM_CACHE") or "~/.cache/firm").expanduser()


def check_writable(folder: Path) -> None:
    """Refuse, before any work, a folder in which nothing can be written; it need not exist yet."""
    folder = folder.absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        why = "may not be written to" if there.is_dir() else "is no folder"
        raise MachineError(f"cannot write {named(folder)}: {named(there)} {why}; name another place")


def replace_file(source: Path, target: Path) -> None:
    """Rename over the target; retried on Windows, where another program may have it open."""
    for pause in (0.01, 0.05, 0.2, 0.8) if WINDOWS else ():
        try:
            os.replace(source, target)
            return
        except PermissionError:
            time.sleep(pause)
    os.replace(source, target)


@contextlib.contextmanager
def writing(path: Path, kept: str) -> Iterator[None]:
    """Turn a failed write into a MachineError with the file and what is kept."""
    try:
        yield
    except OSError as error:
        fix = "; free some space" if error.errno in NO_SPACE else ""
        raise MachineError(f"cannot write {named(path)}: {error.strerror or error}{fix}; {kept}") from error


def save_tensors(path: Path, tensors: dict[str, Tensor], card: Card, *, kind: str, schema: int) -> None:
    """Write tensors and card as one file of the given kind and schema version."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    text = json.dumps({"kind": kind, "schema": schema, **card}, sort_keys=True)
    write_atomically(path, save(tensors, {"card": text, "digest": digest(tensors, text)}))


def load_tensors(path: Path, *, kind: str, schema: int) -> tuple[dict[str, Tensor], Card]:
    """Read a file of the given kind; refuses a newer, foreign, damaged or edited one."""
    if not path.is_file():
        raise ModelFileError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            text = metadata.get("card", "")
            card = check_card(path, text, kind, schema)
            # copies, because Windows cannot replace a mapped file
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (*UNREADABLE, OSError) as error:
        raise ModelFileError(f"{path} is not a readable firm file ({error}); copy it again from its source") from error
    if metadata.get("digest") != digest(tensors, text):
        raise ModelFileError(f"{path} was damaged or edited after it was written; copy it again from its source")
    return tensors, card


def check_card(path: Path, text: str, kind: str, schema: int) -> Card:
    """Parse a card; refuses another kind or a newer version."""
    try:
        card: Card = json.loads(text)
        written, version = card["kind"], int(card["schema"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ModelFileError(f"{path} has no firm card; it was not written by firm") from error
    if written != kind:
        raise ModelFileError(f"{path} is a firm {written}, not a {kind}")
    if version > schema:
        raise ModelFileError(f"{path} has schema {version}, this firm reads up to {schema}; upgrade firm to use it")
    return card


def digest(tensors: dict[str, Tensor], text: str) -> str:
    """A digest of tensors and a text."""
    content = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        content.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        content.update(value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
    return content.hexdigest()


def common_folder(paths: Iterable[Path]) -> Path:
    """The deepest common folder of absolute paths; raises for several Windows drives."""
    paths = list(paths)
    try:
        return Path(os.path.commonpath(paths))
    except ValueError as error:
        raise SettingError(f"{', '.join(map(named, paths))} lie on several drives; give those of one drive") from error


@contextlib.contextmanager
def folder_lock(folder: Path, name: str = LOCK) -> Iterator[bool]:
    """True if this process got the lock of the folder; never waits, and is released even if the process is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / name, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        is_owner = _lock(handle)
        try:
            yield is_owner
        finally:
            if is_owner:
                _lock(handle, release=True)
    finally:
        os.close(handle)


def _lock(handle: int, *, release: bool = False) -> bool:
    """Take or release the lock of a file; False if another process has it."""
    try:
        fcntl = import_module("fcntl")
        call = partial(fcntl.flock, handle, fcntl.LOCK_UN if release else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows locks bytes of a file
        msvcrt = import_module("msvcrt")
        call = partial(msvcrt.locking, handle, msvcrt.LK_UNLCK if release else msvcrt.LK_NBLCK, 1)
    try:
        call()
    except (BlockingIOError, PermissionError):
        return False
    return True
