"""What garbage collection need not look at while a run lasts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = 50_000
"""New containers, less those freed, between two collections of the youngest; Python's own number is 700."""
FROZEN = 10_000
"""As many objects are frozen by a program that freezes its own; Python 3.12 starts with some hundred."""


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Leave every object that is there now out of collections, as long as the block lasts, and collect more seldom.

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
