"""What garbage collection need not look at."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["settled"]


@contextmanager
def settled() -> Iterator[None]:
    """Leave every object that is there now out of collections, as long as the block lasts.

    A run makes small objects by the million, and with libraries of half a million objects loaded each full collection
    stops all threads for a third of a second: a tenth of a step of a small model's time.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
