"""Tunes garbage collection during a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = 50_000
"""Threshold of the youngest generation; Python's default is 700."""
FROZEN = 10_000
"""Number of frozen objects above which the program has frozen them itself; Python 3.12 starts with
a few hundred."""


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Within the block, exclude all existing objects from garbage collection and collect less
    often.

    A run makes millions of small objects. With half a million objects of libraries, each full
    collection stops all threads for a third of a second, which takes a tenth of a small model's
    step. The objects of a step live until it is trained, so early collections free nothing, which
    takes another tenth. Objects frozen by the program stay frozen.
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
