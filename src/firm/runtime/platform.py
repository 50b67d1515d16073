"""Memory, devices and signals of the machine, on every system."""

import contextlib
import ctypes
import platform
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from firm.errors import MachineError

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def keep_freed_memory() -> bool:
    """Make glibc keep freed buffers, which every training step needs again; True if it did."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return all(
        libc.mallopt(option, value)
        for option, value in ((M_MMAP_THRESHOLD, 2**25), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26))
    )


def reset_peak() -> None:
    """Restart the peak measurement (Linux only)."""
    with contextlib.suppress(OSError):
        _RESET.write_text("5", encoding="ascii")


def peak_megabytes() -> int | None:
    """Peak resident memory since `reset_peak`; None outside Linux."""
    try:
        line = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return None
    return int(line.group(1)) // 1000 if line else None


def check_device(device: str) -> None:
    """Raise if a tensor cannot be computed on the device."""
    try:
        torch.zeros(1, device=device).sum().item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise MachineError(f"the device {device!r} cannot be used here ({reason}); try --device cpu") from error


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGBREAK (Windows) in a list; outside the main thread it stays empty."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    kinds = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name)]
    before = [signal.signal(kind, lambda number, _frame: received.append(number)) for kind in kinds]
    try:
        yield received
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
