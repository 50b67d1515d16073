"""Rows that are expensive to compute, such as a frozen network's features of every image: made once, kept on disk.

folder/
  good-3f2a.f16    the values, row after row: float16, little-endian
  good-3f2a.json   its card: the shape of a row, the rows in all and done, the SHA-256 of each chunk that is done

A chunk is on the disk before the card vouches for it, so a process may be killed at any moment: the next one goes on
after the last whole chunk. Every opening reads the file against its digests, which is cheap beside computing it;
from the first chunk that is not as it was written, the rows are computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float16
from torch import Tensor

from firm.storage import write_atomically
from firm.types import FirmError

Rows = Callable[[int, int], Float[Tensor, "n ..."]]  # rows begin..end, computed
Report = Callable[[int], None]

SCHEMA = 1
VALUE = np.dtype("<f2")
LARGEST = torch.finfo(torch.float16).max  # 65504


def stored(
    folder: Path | None,
    name: str,
    key: str,
    rows: int,
    compute: Rows,
    *,
    chunk: int = 16,
    on_rows: Report | None = None,
) -> Float16[Tensor, "rows ..."]:
    """All rows, computed as far as the folder does not hold them; other keys of the name are removed when it is whole.

    `key` is a digest of all that decides the rows. From a folder the tensor is a map of the file and takes no memory;
    writing into it never reaches the file.
    """
    _check(name, key, rows, chunk)
    report = on_rows or (lambda _: None)
    if folder is None:
        return _in_memory(name, rows, chunk, compute, report)
    store = _Store(folder, name, key, rows, chunk)
    row = _completed(store, compute, report)
    _remove_others(store)
    return _mapped(store, row)


def cost(rows: int, row: tuple[int, ...]) -> str:
    """What a store will take, in a line to be shown before it is made."""
    shape = " x ".join([f"{rows} images", *map(str, row)])
    return f"features: {shape} = {_megabytes(_bytes(rows, row))} MB on disk"


@dataclass(frozen=True)
class _Store:
    folder: Path
    name: str
    key: str
    rows: int
    chunk: int

    @property
    def data(self) -> Path:
        return self.folder / f"{self.name}-{self.key}.f16"

    @property
    def card(self) -> Path:
        return self.folder / f"{self.name}-{self.key}.json"


@dataclass(frozen=True)
class _Kept:
    """The rows that need not be computed: those of the leading chunks that are as they were written."""

    row: tuple[int, ...] = ()
    done: int = 0
    digests: tuple[str, ...] = ()


def _check(name: str, key: str, rows: int, chunk: int) -> None:
    if not re.fullmatch(r"\w[\w.-]*", name) or not re.fullmatch(r"[0-9a-f]+", key):
        raise FirmError(f"no store can be called {name!r} with the key {key!r}; use a plain word and a hex digest")
    if rows < 0 or chunk < 1:
        raise FirmError(f"cannot store {rows} rows in chunks of {chunk}; use at least 0 rows and chunks of at least 1")


# --- computing ---


def _spans(begin: int, rows: int, chunk: int) -> Iterator[tuple[int, int]]:
    return ((at, min(at + chunk, rows)) for at in range(begin, rows, chunk))


def _in_memory(name: str, rows: int, chunk: int, compute: Rows, report: Report) -> Float16[Tensor, "rows ..."]:
    made = torch.empty(0, dtype=torch.float16)
    for begin, end in _spans(0, rows, chunk):
        part = _computed(name, begin, end, made.shape[1:] if begin else None, compute)
        if begin == 0:
            made = torch.empty(rows, *part.shape[1:], dtype=torch.float16)
        made[begin:end] = part
        report(end - begin)
    return made


def _completed(store: _Store, compute: Rows, report: Report) -> tuple[int, ...]:
    """Bring the files to their end and return the shape of a row."""
    kept = _kept(store)
    row, digests = kept.row, list(kept.digests)
    if kept.done:
        _settle(store, row, kept.done)
        report(kept.done)
    for begin, end in _spans(kept.done, store.rows, store.chunk):
        part = _computed(store.name, begin, end, row if begin else None, compute)
        if begin == 0:
            row = tuple(part.shape[1:])
            _settle(store, row, 0)
        content = part.numpy().astype(VALUE, copy=False).tobytes()
        digests.append(hashlib.sha256(content).hexdigest())
        _append(store, row, begin, content)
        _vouch(store, _Kept(row, end, tuple(digests)))
        report(end - begin)
    return row


def _computed(name: str, begin: int, end: int, row: tuple[int, ...] | None, compute: Rows) -> Float16[Tensor, "n ..."]:
    """The rows begin..end as float16, or a sentence why they cannot be stored; None: the first, of any shape."""
    values = compute(begin, end).detach()
    shape, wanted = tuple(values.shape), (end - begin, *(values.shape[1:] if row is None else row))
    if shape != wanted:
        raise FirmError(
            f"the features {name!r} of images {begin} to {end - 1} have the shape {shape} instead of {wanted}; "
            "images of one size and one network give rows of one shape"
        )
    fits = values.abs() <= LARGEST  # not so for nan either
    if not bool(fits.all()):
        image, worst = begin + int((~fits).nonzero()[0, 0]), float(values[~fits][0])
        raise FirmError(
            f"the features {name!r} of image {image} hold {worst:g}, and 16-bit floats end at {LARGEST:g}; "
            "check the network's weights or scale its features down"
        )
    return values.to("cpu", torch.float16).contiguous()


# --- the files ---


def _kept(store: _Store) -> _Kept:
    """What card and values agree on; a store cut into other chunks counts only when it is whole."""
    try:
        card = json.loads(store.card.read_bytes())
        row, chunk = tuple(int(side) for side in card["row"]), int(card["chunk"])
        if card["schema"] != SCHEMA or card["rows"] != store.rows or chunk < 1 or min(row, default=0) < 0:
            return _Kept()
        digests = _whole(store, row, chunk, card["sha256"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return _Kept()  # never written, or damaged
    done = min(chunk * len(digests), store.rows)
    return _Kept(row, done, digests) if chunk == store.chunk or done == store.rows else _Kept()


def _whole(store: _Store, row: tuple[int, ...], chunk: int, digests: list[str]) -> tuple[str, ...]:
    """The digests of the leading chunks that are in the file as they were written."""
    whole: list[str] = []
    with store.data.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for digest, (begin, end) in zip(digests, _spans(0, store.rows, chunk), strict=False):
            if _bytes(end, row) > size:  # asked first: a damaged card may speak of any number of bytes
                break
            if hashlib.sha256(file.read(_bytes(end - begin, row))).hexdigest() != digest:
                break
            whole.append(digest)
    return tuple(whole)


def _settle(store: _Store, row: tuple[int, ...], done: int) -> None:
    """Drop what lies beyond the rows that are done, and refuse to begin what the disk cannot hold."""
    with _naming(store, row):
        store.folder.mkdir(parents=True, exist_ok=True)
        if store.data.exists() and store.data.stat().st_size > _bytes(done, row):
            os.truncate(store.data, _bytes(done, row))
        free = shutil.disk_usage(store.folder).free
    needed = _bytes(store.rows - done, row)
    if free < needed:
        raise FirmError(
            f"{store.data} needs {_megabytes(needed)} MB more and its disk has {free // 10**6} MB free; "
            "make room or use a folder on another disk"
        )


def _append(store: _Store, row: tuple[int, ...], begin: int, content: bytes) -> None:
    """Write a chunk in its place, and return when it is on the disk."""
    with _naming(store, row), store.data.open("r+b" if begin else "wb") as file:
        file.seek(_bytes(begin, row))
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _vouch(store: _Store, kept: _Kept) -> None:
    card = {"schema": SCHEMA, "row": kept.row, "rows": store.rows, "done": kept.done, "chunk": store.chunk}
    text = json.dumps(card | {"sha256": kept.digests}, sort_keys=True)
    try:
        write_atomically(store.card, text.encode())
    except FirmError as error:
        raise FirmError(f"{error}, and {_needs(store, kept.row)}") from error


@contextlib.contextmanager
def _naming(store: _Store, row: tuple[int, ...]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = f"cannot write {store.data}: {error.strerror}"
        raise FirmError(f"{reason}; {_needs(store, row)}, and what is done is kept") from error


def _needs(store: _Store, row: tuple[int, ...]) -> str:
    return f"the features need {_megabytes(_bytes(store.rows, row))} MB in all"


def _remove_others(store: _Store) -> None:
    """Old features of changed images would fill the disk; a name is only ours if its key is as long as this one."""
    stem = rf"{re.escape(store.name)}-[0-9a-f]{{{len(store.key)}}}"
    ours = re.compile(rf"{stem}\.(f16|json)|\.{stem}\.json\.\w+")  # the last: half-written by a killed process
    for path in list(store.folder.iterdir()) if store.folder.is_dir() else []:
        if ours.fullmatch(path.name) and path not in (store.data, store.card):
            with contextlib.suppress(OSError):  # a folder of that name, or one that may only be read
                path.unlink()


def _mapped(store: _Store, row: tuple[int, ...]) -> Float16[Tensor, "rows ..."]:
    if _bytes(store.rows, row) == 0:  # nothing can be mapped
        return torch.empty(store.rows, *row, dtype=torch.float16)
    # copy-on-write: torch warns of a read-only map, and writing into one would end the process
    return torch.from_numpy(np.memmap(store.data, VALUE, "c", shape=(store.rows, *row)))


def _bytes(rows: int, row: tuple[int, ...]) -> int:
    return VALUE.itemsize * rows * math.prod(row)


def _megabytes(size: int) -> int:
    return -(-size // 10**6)  # rounded up: never less than it takes
