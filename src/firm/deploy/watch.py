"""Watch folders by polling, which works on network shares too, and decide each image once it is complete.

A file is complete when it has stopped changing and can be decoded. Each image gets one line in the journal.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from firm.data.folder import all_files
from firm.deploy.journal import Journal, Line, Stamp
from firm.detector.detector import Detector
from firm.errors import DataError, FirmError, ImageError, named
from firm.report.heatmap import places, write_overlay
from firm.runtime.files import common_folder, shortened

Decide = Callable[[Path], dict[str, Any]]

REST = 3  # pause after a listing, as a multiple of its duration


def decide_by(detector: Detector, folders: Sequence[Path], maps: Path) -> Decide:
    """A function that inspects a file and writes a heat map below `maps` unless it PASSes."""

    def decide(file: Path) -> dict[str, Any]:
        examined = detector.examine(file)
        line = asdict(examined.verdict)
        if examined.heat is not None and examined.verdict.verdict != "PASS":
            target = maps / places([file], folders)[0].with_name(shortened(file.name, ".png"))
            write_overlay(
                target, examined.picture, examined.heat.numpy(), examined.verdict.review, marked=examined.marked
            )
            line["map"] = str(target)
        return line

    return decide


@dataclass
class _Waiting:
    """A file without a line in the journal."""

    path: Path
    stamp: Stamp
    since: float  # when this stamp was first listed
    due: float  # when to try it


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
    """Decide every image below the folders once until `stop()`; yields its line when the journal has it.

    A file is tried when it is unchanged for `settle` seconds; an unreadable one is retried until it is unchanged for
    `patience` seconds. `decide` raises ImageError for an unreadable file; `tell` receives messages about folders.
    """
    listing, waiting = _Listing(folders, journal, tell), dict[str, _Waiting]()
    while not stop():
        began, listed, now = clock(), listing.undecided(), clock()
        waiting = {
            name: before
            if (before := waiting.get(name)) and before.stamp == stamp  # a change restarts the wait
            else _Waiting(path, stamp, now, now + settle)
            for name, (path, stamp) in listed.items()
        }
        rested = now + REST * (now - began)
        for name, file in waiting.items():
            if stop():
                return
            now = clock()
            decision = _try(file, decide, now - file.since, poll, patience) if now >= file.due else None
            if decision is not None:
                identity = {"file": name, "stamp": list(file.stamp)}
                when = {"time": datetime.now(UTC).isoformat(timespec="milliseconds")}  # of the decision
                line = identity | when | decision | identity  # identity first, and never overwritten
                journal.write(line)
                yield line
        sleep(poll)
        while clock() < rested and not stop():
            sleep(poll)


def _try(file: _Waiting, decide: Decide, age: float, poll: float, patience: float) -> Line | None:
    """The decision; None to wait: the file changed, vanished or may still be copied. Retries back off."""
    if _stamp(file.path) != file.stamp:  # it may have changed since the listing
        return None
    try:
        decision: Line | None = decide(file.path)
    except ImageError as error:
        file.due = file.since + min(max(2 * age, poll), patience)
        decision = {"unreadable": str(error)} if age >= patience else None
    return decision if _stamp(file.path) == file.stamp else None


class _Listing:
    """Lists the files without a line; reports once each folder that cannot be listed, and waits for it."""

    def __init__(self, folders: Sequence[Path], journal: Journal, tell: Callable[[str], None]) -> None:
        for folder in folders:
            if os.path.exists(folder) and not os.path.isdir(folder):
                raise DataError(f"{named(folder)} is not a folder; give the folder in which images appear")
        self.folders = [Path(os.path.abspath(folder)) for folder in folders]
        self.home = os.path.join(common_folder(self.folders), "")
        self.journal, self.tell = journal, tell
        self.lost = set[Path]()

    def undecided(self) -> dict[str, tuple[Path, Stamp]]:
        """The images without a line, by their paths below the common folder."""
        files, lost = dict[str, tuple[Path, Stamp]](), set[Path]()
        for folder in self.folders:
            try:
                listed = list(all_files(folder))
            except FirmError:
                lost.add(folder)
                continue
            for file in listed:
                name, stamp = str(file).removeprefix(self.home), _stamp(file)
                if stamp is not None and not self.journal.knows(name, stamp):
                    if os.path.isdir(file):  # a sub-folder that cannot be listed
                        lost.add(file)
                    else:
                        files[name] = file, stamp
        for folder in sorted(lost - self.lost):
            self.tell(f"{named(folder)} cannot be listed; waiting for it")
        for folder in sorted(self.lost - lost):
            if os.path.isdir(folder):
                self.tell(f"{named(folder)} is back")
        self.lost = lost
        return files


def _stamp(file: Path) -> Stamp | None:
    with suppress(OSError):
        status = os.stat(file)
        return status.st_size, status.st_mtime_ns
    return None
