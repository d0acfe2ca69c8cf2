"""Time taken, by the clock and by the processor."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Taken:
    """Seconds by the clock, and of the processor in all threads: other work on the machine adds to
    the first only."""

    wall: float
    cpu: float

    @staticmethod
    def median(many: Sequence[Taken]) -> Taken:
        return Taken(
            statistics.median(t.wall for t in many), statistics.median(t.cpu for t in many)
        )

    def over(self, other: Taken) -> Taken:
        """The ratio of the two, each by its own measure."""
        return Taken(self.wall / other.wall, self.cpu / other.cpu)


class Stopwatch:
    """Runs from when it is made; what came before leaves it no garbage."""

    def __init__(self) -> None:
        gc.collect()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> Taken:
        return Taken(time.perf_counter() - self._wall, time.process_time() - self._cpu)


def paired(
    a: Callable[[], object], b: Callable[[], object], rounds: int = 7
) -> tuple[Taken, Taken]:
    """Medians of two functions, run in turn after one round of each."""
    times: tuple[list[Taken], list[Taken]] = ([], [])
    for _ in range(rounds + 1):
        for function, takes in zip((a, b), times, strict=True):
            watch = Stopwatch()
            function()
            takes.append(watch.read())
    return Taken.median(times[0][1:]), Taken.median(times[1][1:])
