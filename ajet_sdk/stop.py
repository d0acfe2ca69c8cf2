"""Calling off a question to a trace, from another thread than the one that asks it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Stop"]


class Stop:
    """Given to `TraceReader.query`; once `set`, the query ends with QueryError, in DuckDB too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set = False
        self._interrupts: list[Callable[[], None]] = []

    @property
    def is_set(self) -> bool:
        """Whether it was called off."""
        return self._set

    def set(self) -> None:
        """Call it off; again does nothing."""
        with self._lock:
            self._set = True
            interrupts, self._interrupts = self._interrupts, []
        for interrupt in interrupts:
            interrupt()

    @contextmanager
    def by(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """Within the block, `set` calls `interrupt`; at once where it was set before."""
        with self._lock:
            late = self._set
            if not late:
                self._interrupts.append(interrupt)
        if late:
            interrupt()
        try:
            yield
        finally:
            with self._lock:
                if interrupt in self._interrupts:
                    self._interrupts.remove(interrupt)
