"""Receives messages, warnings and progress of long work."""

import warnings
from collections.abc import Callable


class Listener:
    """Silent except for warnings; the command line has one that prints."""

    def say(self, text: str) -> None:
        """A result or choice for the user."""

    def detail(self, text: str) -> None:
        """A line for `--verbose`."""

    def warn(self, text: str) -> None:
        """Something the user should act on."""
        warnings.warn(text, stacklevel=3)

    def progress(self, stage: str, done: int, total: int | None, note: str = "") -> None:
        """Progress of a stage; the first call starts it."""

    def count(self, stage: str, total: int) -> Callable[[int], None]:
        """A function that adds to the finished items of a stage and reports its progress."""
        done = 0

        def report(more: int) -> None:
            nonlocal done
            done += more
            self.progress(stage, done, total)

        return report


SILENT = Listener()
