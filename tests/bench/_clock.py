"""An event loop whose clock is this process's processor time, and whose waits take none.

What else a machine does then counts for nothing: a sleep of 0.2 s is 0.2 s on the clock and over at
once, and work takes as long as the processor was really at it. For programs that talk to nobody but
themselves.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_ON_ITS_WAY = 0.002
"""Seconds in which the kernel hands on what was written to a socket of this process."""


def run(program: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, by the processor's clock."""
    loop = _ProcessorLoop()
    try:
        return loop.run_until_complete(program)
    finally:
        loop.close()


class _ProcessorLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skipped = 0.0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        return time.process_time() + self._skipped

    def skip(self, seconds: float) -> None:
        self._skipped += seconds


class _Skipping(selectors.DefaultSelector):
    """Asked to wait where nothing comes, it puts the clock forward."""

    def __init__(self, loop: _ProcessorLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0) or (super().select(_ON_ITS_WAY) if timeout != 0 else [])
        if ready or timeout == 0:
            return ready
        if timeout is None:
            return super().select(None)
        self._loop.skip(timeout)
        return super().select(0)
