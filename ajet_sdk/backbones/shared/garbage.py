"""Garbage collection during a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = 50_000
"""Threshold of the youngest generation; Python's default is 700."""
FROZEN = 10_000
"""Above this number the program has frozen objects itself; Python 3.12 starts with a few hundred."""


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Within the block, exclude all existing objects from garbage collection and collect less often.

    A run makes small objects by the million, and with libraries of half a million objects loaded each full collection
    stops all threads for a third of a second: a tenth of a step of a small model's time. What it makes in a step lives
    until the step is trained, so that each early look at it finds nothing to free: another tenth. What the program has
    frozen itself stays frozen.
    """
    ours = gc.get_freeze_count() < FROZEN
    if ours:
        gc.collect()
        gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], SELDOM) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if ours:
            gc.unfreeze()
