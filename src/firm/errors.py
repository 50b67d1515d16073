"""The kinds of errors; no heavy imports, so that the command line starts fast.

Exception
├── FirmError              one sentence that names the culprit and the fix
│   ├── SettingError       a setting, option or argument is wrong
│   ├── DataError          a folder or data set is missing, too small or has another layout
│   ├── ImageError         one image cannot be used (`.path`)
│   ├── ModelFileError     a detector, weights, calibration or checkpoint file is missing, damaged or of another kind
│   └── MachineError       a device, memory, disk, lock or package is not available
└── Stopped                the process was asked to end by a signal (`.signal`)
"""

from pathlib import Path


class FirmError(Exception):
    """A failure the user can fix; catch this one for all kinds below."""


class SettingError(FirmError):
    """A setting, option or argument is wrong."""


class DataError(FirmError):
    """A folder or data set is missing, damaged, too small or has another layout."""


class ImageError(FirmError):
    """One image cannot be used; `path` is its file, if it has one."""

    def __init__(self, message: str, path: Path | None = None) -> None:
        super().__init__(message)
        self.path = path


class ModelFileError(FirmError):
    """A detector, weights, calibration or checkpoint file is missing, damaged, of another kind or not usable."""


class MachineError(FirmError):
    """A device, memory, disk space, a lock, a permission or a package is not available."""


class Stopped(Exception):
    """The process was asked to end by a signal; the message says what is kept."""

    def __init__(self, signal: int, message: str) -> None:
        super().__init__(message)
        self.signal = signal


def named(path: Path | str) -> str:
    """A path as printable text on one line."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(path))
