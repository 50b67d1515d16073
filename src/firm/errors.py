"""What may go wrong and be said in a sentence; free of heavy imports, so that the command line starts at once."""

from __future__ import annotations


class FirmError(Exception):
    """A failure a person can mend: the message is one sentence naming the culprit and the fix."""


class Stopped(Exception):
    """The process was asked to end by a signal; the message says what is kept."""

    def __init__(self, signal: int, message: str) -> None:
        super().__init__(message)
        self.signal = signal
