"""Memory of this process."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path


def resident_bytes() -> int:
    """Resident memory of the process in bytes; its maximum so far if the current value is unknown
    (macOS)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )
    return pages * resource.getpagesize()


def return_freed() -> None:
    """Return freed memory to the system, which glibc otherwise keeps for the threads that used
    it."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
