"""The journal of a watch: one JSON line per decided image, identified by path, size and modification time."""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from firm.errors import DataError, MachineError, SettingError, named
from firm.runtime.files import folder_lock, write_atomically

Line = dict[str, Any]  # "file" and "stamp" identify the image; the rest is its "time" and the decision, or "unreadable"
Stamp = Sequence[int]  # size and mtime_ns

HEAD = b'{"file": '  # start of every line


class Journal(AbstractContextManager["Journal"]):
    """JSON lines on disk, durable when `write` returns; opening removes an incomplete last line and takes a lock."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        self._known = set[bytes]()
        with ExitStack() as lock:
            if not lock.enter_context(folder_lock(self.path.parent, f".{self.path.name}.lock")):
                raise MachineError(f"another process is writing {named(path)}; wait for it or choose another journal")
            self._end = self._repair()  # end of the last complete line
            self._lock = lock.pop_all()
        self._open = True

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock."""
        self._open = False
        self._lock.close()

    @property
    def lines(self) -> list[Line]:
        """All lines, read from disk: memory holds only the keys of the images."""
        with self.path.open("rb") as file:
            return [json.loads(text) for text in file.read(self._end).splitlines()]

    def knows(self, file: str, stamp: Stamp) -> bool:
        """Whether this version of the file has a line."""
        return _key(file, stamp) in self._known

    def write(self, line: Line) -> None:
        """Append the line of an image durably, unless it has one."""
        if not self._open:
            raise SettingError(f"{named(self.path)} was closed; open it again before writing")
        name, stamp = line["file"], line["stamp"]
        if self.knows(name, stamp):
            return
        text = (json.dumps({"file": name} | line) + "\n").encode()
        try:
            with self.path.open("r+b") as file:
                if file.seek(0, os.SEEK_END) < self._end:
                    raise DataError(f"{named(self.path)} was shortened by another program; start again to go on")
                file.truncate(self._end)  # remove the rest of a failed write
                file.seek(self._end)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            fix = "fix that and start again: images without a line are decided again"
            raise MachineError(f"cannot write {named(self.path)}: {error.strerror}; {fix}") from error
        self._end += len(text)
        self._known.add(_key(name, stamp))

    def _repair(self) -> int:
        """Cut off an incomplete last line; returns the end of the complete ones."""
        try:
            if not self.path.exists():
                write_atomically(self.path, b"")
            with self.path.open("r+b") as file:
                end = self._read(file)
                file.truncate(end)
                os.fsync(file.fileno())
                return end
        except OSError as error:
            raise MachineError(f"cannot read {named(self.path)}: {error.strerror}; choose another journal") from error

    def _read(self, file: BinaryIO) -> int:
        """The end of the complete lines; only the start of a line may follow, else the file is no journal."""
        end = 0
        for number, text in enumerate(file, 1):
            line = _parsed(text)
            if line is None:
                begun = text.rstrip(b"\0")  # a power cut may leave zeros
                if file.read(1) or not (begun.startswith(HEAD) or HEAD.startswith(begun)):
                    raise DataError(f"line {number} of {named(self.path)} is not of a journal; repair or move the file")
                break
            self._known.add(_key(line["file"], line["stamp"]))
            end += len(text)
        return end


def _parsed(text: bytes) -> Line | None:
    try:
        line = json.loads(text) if text.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    match line:
        case {"file": str(), "stamp": [int(), int()]}:
            return line
    return None


def _key(file: str, stamp: Stamp) -> bytes:
    """16 bytes that identify an image."""
    size, mtime_ns = stamp
    return hashlib.blake2b(f"{size} {mtime_ns} {file}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
