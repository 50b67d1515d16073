"""Keep freed memory in the process: a training step frees and asks for the same large buffers over and over.

By default glibc hands them back to the system, which then fills every page with zeros again at the next step.
"""

from __future__ import annotations

import ctypes
import platform

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed; True if it listened. Other allocators are left as they are."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return all(
        libc.mallopt(option, value)
        for option, value in ((M_MMAP_THRESHOLD, 2**25), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26))
    )
