"""The most memory that this process has held."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path


def peak_megabytes() -> float:
    """Since the program began. Linux's `ru_maxrss` is no help: a child starts with what its parent
    had."""
    if sys.platform == "linux":
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        if found:
            return int(found[1]) / 1024
    unit = 1024**2 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
