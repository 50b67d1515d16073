"""A disk cache of expensive rows, such as a frozen network's features: name-key.f16 (float16) and its card in JSON.

A chunk is on disk before the card counts it, so a killed process resumes after the last counted chunk. A card or file
that does not match is ignored, and the rows are computed again.
"""

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float16
from torch import Tensor

from firm.errors import MachineError, ModelFileError, SettingError, named
from firm.runtime.files import read_file, write_atomically, writing

Rows = Callable[[int, int], Float[Tensor, "n ..."]]  # computes rows begin..end
Shape = tuple[int, ...]

SCHEMA = 2
VALUE = np.dtype("<f2")
KEPT = "the finished rows are kept"
LARGEST = torch.finfo(torch.float16).max  # 65504


def stored(
    folder: Path | None,
    name: str,
    key: str,
    rows: int,
    compute: Rows,
    *,
    chunk: int = 16,
    on_rows: Callable[[int], None] = lambda _: None,
) -> Float16[Tensor, "rows ..."]:
    """All rows; computes those that the folder lacks, then removes other keys of the name.

    `key` is a hex digest of everything that determines the rows; `on_rows` gets the number of rows done so far. The
    tensor maps the file copy-on-write.
    """
    cache = _Cache(folder or Path(), name, key, rows, chunk)
    if folder is not None:
        return cache.on_disk(compute, on_rows)
    values = torch.empty(0, dtype=torch.float16)
    for begin, part in cache.computed(0, None, compute):
        if begin == 0:
            values = torch.empty(rows, *part.shape[1:], dtype=torch.float16)
        values[begin : begin + len(part)] = part
        on_rows(begin + len(part))
    return values


class _Cache:
    def __init__(self, folder: Path, name: str, key: str, rows: int, chunk: int) -> None:
        self.folder, self.name, self.key, self.rows, self.chunk = folder, name, key, rows, chunk
        self.data, self.card = folder / f"{name}-{key}.f16", folder / f"{name}-{key}.json"

    def on_disk(self, compute: Rows, on_rows: Callable[[int], None]) -> Float16[Tensor, "rows ..."]:
        row, done = self.progress()
        if done:
            self.prepare(row, done)
            on_rows(done)
        for begin, part in self.computed(done, row if done else None, compute):
            if begin == 0:
                row = tuple(part.shape[1:])
                self.prepare(row, 0)
            self.append(part, begin, row)
            on_rows(begin + len(part))
        self.remove_other_keys()
        if _bytes(self.rows, row) == 0:  # an empty file cannot be mapped
            return torch.empty(self.rows, *row, dtype=torch.float16)
        # copy-on-write: torch warns about a read-only map, and writing into one would crash
        return torch.from_numpy(np.memmap(self.data, VALUE, "c", shape=(self.rows, *row)))

    def computed(self, done: int, row: Shape | None, compute: Rows) -> Iterator[tuple[int, Float16[Tensor, "n ..."]]]:
        """First row and values of every missing chunk; the first chunk sets the shape of a row."""
        for begin in range(done, self.rows, self.chunk):
            end = min(begin + self.chunk, self.rows)
            values = compute(begin, end).detach()
            row = tuple(values.shape[1:]) if row is None else row
            if tuple(values.shape) != (end - begin, *row):
                raise SettingError(
                    f"the features {self.name!r} of images {begin} to {end - 1} have the shape {tuple(values.shape)} "
                    f"instead of {(end - begin, *row)}; use one image size and one network"
                )
            fits = values.abs() <= LARGEST  # False for nan
            if not bool(fits.all()):
                image, value = begin + int((~fits).nonzero()[0, 0]), float(values[~fits][0])
                raise ModelFileError(
                    f"the features {self.name!r} of image {image} hold {value:g}, and 16-bit floats end at "
                    f"{LARGEST:g}; check the network's weights or scale its features down"
                )
            yield begin, values.to("cpu", torch.float16).contiguous()

    def progress(self) -> tuple[Shape, int]:
        """The shape of a row and the number of rows on disk."""
        try:
            card = json.loads(read_file(self.card))
            row, done = tuple(int(side) for side in card["row"]), int(card["done"])
            known = (card["schema"], card["rows"], card["chunk"]) == (SCHEMA, self.rows, self.chunk)
            size, expected = self.data.stat().st_size, _bytes(done, row)
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return (), 0  # never written, or damaged
        whole = done == self.rows and size == expected
        begun = 0 < done < self.rows and done % self.chunk == 0 and size >= expected
        return (row, done) if known and min(row, default=0) >= 0 and (whole or begun) else ((), 0)

    def prepare(self, row: Shape, done: int) -> None:
        """Truncate to the finished rows, and check the free disk space."""
        if self.data.exists() and not self.data.is_file():
            raise MachineError(f"{named(self.data)} is not a file; remove it")
        with writing(self.data, KEPT):
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.data.exists() and self.data.stat().st_size > _bytes(done, row):
                os.truncate(self.data, _bytes(done, row))
            free = shutil.disk_usage(self.folder).free
        missing = _bytes(self.rows - done, row)
        if free < missing:
            raise MachineError(
                f"{named(self.data)} needs {-(-missing // 10**6)} MB more and its disk has {free // 10**6} MB free; "
                "make room or use a folder on another disk"
            )

    def append(self, part: Float16[Tensor, "n ..."], begin: int, row: Shape) -> None:
        with writing(self.data, KEPT), self.data.open("r+b" if begin else "wb") as file:
            file.seek(_bytes(begin, row))
            file.write(part.numpy().astype(VALUE, copy=False).tobytes())
            file.flush()
            os.fsync(file.fileno())
        card = {"schema": SCHEMA, "row": row, "rows": self.rows, "chunk": self.chunk, "done": begin + len(part)}
        write_atomically(self.card, json.dumps(card).encode())

    def remove_other_keys(self) -> None:
        """Delete the rows of other keys; a file is ours if its key has the same length."""
        stem = rf"{re.escape(self.name)}-[0-9a-f]{{{len(self.key)}}}"
        ours = re.compile(rf"{stem}\.(f16|json)|\.{stem}\.json\.\w+")  # the last: left by a killed process
        for path in list(self.folder.iterdir()) if self.folder.is_dir() else []:
            if ours.fullmatch(path.name) and path not in (self.data, self.card):
                with contextlib.suppress(OSError):  # a folder, a read-only or, on Windows, a mapped file
                    path.unlink()


def _bytes(rows: int, row: Shape) -> int:
    return VALUE.itemsize * rows * math.prod(row)
