"""The most memory this process has held since it was last asked to forget, where the system tells (Linux)."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def forget_peak() -> None:
    """Count from what is held now."""
    with contextlib.suppress(OSError):
        _FORGET.write_text("5")


def peak_megabytes() -> int | None:
    """Resident at the most; None where the system does not tell."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    except OSError:
        return None
    return int(found.group(1)) // 1000 if found else None
