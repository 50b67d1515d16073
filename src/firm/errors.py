"""What may go wrong and be said in a sentence; free of heavy imports, so that the command line starts at once."""

from __future__ import annotations

from pathlib import Path


class FirmError(Exception):
    """A failure a person can mend: the message is one sentence naming the culprit and the fix."""


class UnreadableImage(FirmError):
    """An image that cannot be used; `path` is its file, None where the pixels came without one."""

    def __init__(self, message: str, path: Path | None = None) -> None:
        super().__init__(message)
        self.path = path


def named(path: Path | str) -> str:
    """A path as a sentence may hold it: on one line and printable, whatever bytes the name is made of."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in str(path))


class Stopped(Exception):
    """The process was asked to end by a signal; the message says what is kept."""

    def __init__(self, signal: int, message: str) -> None:
        super().__init__(message)
        self.signal = signal
