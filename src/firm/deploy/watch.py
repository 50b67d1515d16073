"""Images decided as they appear: folders looked at again and again, and a journal of what was decided.

Looking works wherever a folder can be listed, on network shares too. A file is whole when it has stopped changing and
can be decoded. An image is named by its path below the folders, its size and its time of change; each has one line in
the journal, whatever dies in between, and a file written anew is an image of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from firm.data.folder import all_files
from firm.errors import FirmError, UnreadableImage, named
from firm.runs import claim
from firm.storage import write_atomically

Line = dict[str, Any]  # "file" and "stamp" name the image; the rest is what was decided, or why it is "unreadable"
Stamp = Sequence[int]  # size and mtime_ns
Decide = Callable[[Path], dict[str, Any]]

HEAD = b'{"file": '  # how every line begins
LEISURE = 3  # rest after each look, as a multiple of what it took: a large folder is looked at less often


class Journal:
    """JSON lines on disk, one for each image that was decided: a line is safe when `write` returns.

    At opening, what a death left of the last line is cut off. One process has it at a time, the others are refused.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        self._known = set[bytes]()
        with ExitStack() as held:
            if not held.enter_context(claim(self.path.parent, f".{self.path.name}.claim")):
                raise FirmError(f"another process is writing {named(path)}; wait for it or choose another journal")
            self._end = self._mended()  # of the last whole line
            self._held = held.pop_all()
        self._open = True

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _one: BaseException | None, _at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave it to others."""
        self._open = False
        self._held.close()

    @property
    def lines(self) -> list[Line]:
        """All that is in it, read from the disk: in a long run only the names of the images stay in memory."""
        with self.path.open("rb") as file:
            return [json.loads(text) for text in file.read(self._end).splitlines()]

    def knows(self, file: str, stamp: Stamp) -> bool:
        """Whether this image, and not only another of the same name, has its line."""
        return _key(file, stamp) in self._known

    def write(self, line: Line) -> None:
        """Add the line of an image, on the disk before this returns; an image that has one gets no second."""
        if not self._open:
            raise FirmError(f"{named(self.path)} was closed; open it again before writing")
        file, stamp = line["file"], line["stamp"]
        if self.knows(file, stamp):
            return
        self._append((json.dumps({"file": file} | line) + "\n").encode())
        self._known.add(_key(file, stamp))

    def _append(self, text: bytes) -> None:
        try:
            with self.path.open("r+b") as file:
                if file.seek(0, os.SEEK_END) < self._end:
                    raise FirmError(f"{named(self.path)} was shortened by another program; start again to go on")
                file.truncate(self._end)  # a write that failed may have left a part of its line
                file.seek(self._end)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            after = "see to it and start again: what was not written is decided again"
            raise FirmError(f"cannot write {named(self.path)}: {error.strerror}; {after}") from error
        self._end += len(text)

    def _mended(self) -> int:
        """Where the whole lines end, after what follows them was cut off."""
        try:
            if not self.path.exists():
                write_atomically(self.path, b"")
            with self.path.open("r+b") as file:
                end = self._whole(file)
                file.truncate(end)
                os.fsync(file.fileno())
                return end
        except OSError as error:
            raise FirmError(f"cannot read {named(self.path)}: {error.strerror}; choose another journal") from error

    def _whole(self, file: BinaryIO) -> int:
        """Where the whole lines end; what follows them must be the beginning of one, or the file is no journal."""
        end = 0
        for number, text in enumerate(file, 1):
            line = _parsed(text)
            if line is None:
                if file.read(1) or not _is_begun(text):
                    raise FirmError(
                        f"line {number} of {named(self.path)} is not one of a journal; mend or move the file"
                    )
                break
            self._known.add(_key(line["file"], line["stamp"]))
            end += len(text)
        return end


def _parsed(text: bytes) -> Line | None:
    """A line that is whole; None of any other."""
    try:
        line = json.loads(text) if text.endswith(b"\n") else None
    except ValueError:
        return None
    match line:
        case {"file": str(), "stamp": [int(), int()]}:
            return line
    return None


def _is_begun(text: bytes) -> bool:
    """Whether this is the beginning of a line; a power cut may leave zeros in place of its bytes."""
    begun = text.rstrip(b"\0")
    return begun.startswith(HEAD) or HEAD.startswith(begun)


def _key(file: str, stamp: Stamp) -> bytes:
    """An image in 16 bytes, however long its path."""
    size, mtime_ns = stamp
    return hashlib.blake2b(f"{size} {mtime_ns} {file}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


# watching


@dataclass
class _Waiting:
    """A file that has no line yet."""

    path: Path
    stamp: Stamp
    since: float  # when it was first seen with this stamp
    due: float  # when it is to be tried


@dataclass(frozen=True)
class _Pace:
    settle: float
    poll: float
    patience: float

    def __post_init__(self) -> None:
        if not self.settle >= 0 or not self.patience >= 0:
            raise FirmError(f"settle {self.settle} and patience {self.patience} are spans of time; use seconds >= 0")
        if not self.poll > 0:
            raise FirmError(f"poll {self.poll} would leave no time for anything else; use seconds > 0")

    def again(self, age: float) -> float:
        """The age at which to try again a file that could not be read: ever more rarely, and when patience ends."""
        return min(max(2 * age, self.poll), self.patience)


def watch(
    folders: Sequence[Path],
    decide: Decide,
    journal: Journal,
    *,
    stop: Callable[[], bool],
    settle: float = 0.5,
    poll: float = 0.5,
    patience: float = 10.0,
    tell: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Line]:
    """Decide every image below the folders once, until asked to stop; its line is yielded when the journal has it.

    `decide` reads the file and raises UnreadableImage if that is in vain: such a file is tried again until it has not
    changed for `patience` seconds. What changes or vanishes while it is decided is not decided. `clock` only measures
    spans, so the clocks of other machines do not matter.
    """
    outlook = _Outlook(folders, journal, tell)
    return _watched(outlook, decide, _Pace(settle, poll, patience), stop=stop, clock=clock, sleep=sleep)


def _watched(
    outlook: _Outlook,
    decide: Decide,
    pace: _Pace,
    *,
    stop: Callable[[], bool],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> Iterator[Line]:
    waiting = dict[str, _Waiting]()
    while not stop():
        began, seen, now = clock(), outlook.look(), clock()
        waiting = _still_waiting(seen, waiting, now, pace.settle)
        rested = now + LEISURE * (now - began)
        for name, one in waiting.items():
            if stop():
                return
            now = clock()
            found = _tried(one, decide, now, pace) if now >= one.due else None
            if found is not None:
                identity = {"file": name, "stamp": list(one.stamp)}
                line = identity | found | identity  # what was decided comes after the image's name, never in its place
                outlook.journal.write(line)
                yield line
        sleep(pace.poll)
        while clock() < rested and not stop():
            sleep(pace.poll)


def _still_waiting(
    seen: dict[str, tuple[Path, Stamp]], before: dict[str, _Waiting], now: float, settle: float
) -> dict[str, _Waiting]:
    """What is there now: the unchanged goes on waiting, the changed begins anew, the vanished is forgotten."""
    return {
        name: before[name]
        if name in before and before[name].stamp == stamp
        else _Waiting(path, stamp, now, now + settle)
        for name, (path, stamp) in seen.items()
    }


def _tried(one: _Waiting, decide: Decide, now: float, pace: _Pace) -> Line | None:
    """What was decided; None of a file that has to be waited for."""
    if _stamp(one.path) != one.stamp:  # it was seen a while ago if many came before it
        return None
    unreadable: str | None = None
    try:
        found = decide(one.path)
    except UnreadableImage as error:
        unreadable = str(error)
    if _stamp(one.path) != one.stamp:
        return None
    if unreadable is None:
        return found
    age = now - one.since
    one.due = one.since + pace.again(age)
    return {"unreadable": unreadable} if age >= pace.patience else None


class _Outlook:
    """What lies below the folders and is not in the journal; a folder that cannot be listed is waited for, said once.

    Files still being copied are often hidden or end in .part, .tmp, .crdownload; `all_files` passes over them.
    """

    def __init__(self, folders: Sequence[Path], journal: Journal, tell: Callable[[str], None]) -> None:
        if not folders:
            raise FirmError("there is nothing to watch; name a folder")
        for folder in folders:
            if os.path.exists(folder) and not os.path.isdir(folder):
                raise FirmError(f"{named(folder)} is not a folder; give the folder in which images appear")
        self.folders = [Path(os.path.abspath(folder)) for folder in folders]
        self.home = os.path.join(os.path.commonpath(self.folders), "")
        self.journal, self.tell = journal, tell
        self.lost = set[Path]()

    def look(self) -> dict[str, tuple[Path, Stamp]]:
        """The images without a line by their paths below what the folders have in common."""
        found, lost = dict[str, tuple[Path, Stamp]](), set[Path]()
        for folder in self.folders:
            for file in self._listed(folder):
                name, stamp = str(file).removeprefix(self.home), _stamp(file)
                if file == folder:
                    lost.add(file)
                elif stamp is not None and not self.journal.knows(name, stamp):
                    if os.path.isdir(file):  # see find_files
                        lost.add(file)
                    else:
                        found[name] = file, stamp
        self._say(lost)
        return found

    def _listed(self, folder: Path) -> list[Path]:
        """All files below a folder, or the folder itself where it cannot be listed."""
        try:
            return list(all_files(folder))
        except FirmError:
            return [folder]

    def _say(self, lost: set[Path]) -> None:
        for folder in sorted(lost - self.lost):
            self.tell(f"{named(folder)} cannot be listed; waiting for it")
        for folder in sorted(self.lost - lost):
            if os.path.isdir(folder):
                self.tell(f"{named(folder)} is back")
        self.lost = lost


def _stamp(file: Path) -> Stamp | None:
    """The size and the time of change of what is there, if anything is."""
    try:
        about = os.stat(file)
    except OSError:
        return None
    return about.st_size, about.st_mtime_ns
