"""How often a viewer asks a live run what is new: so seldom that the run does not notice."""

from __future__ import annotations

from collections import deque

__all__ = ["Pace"]


class Pace:
    """A screen is told of a change at the earliest `patience` times as long after the last as its answers took.

    Of the last few rounds of answers the quickest counts: what others do on the machine makes answers late, and costs
    the run nothing. What a screen reads at first is no round, for it is read but once. Times are in seconds, on any
    clock that only goes on.
    """

    def __init__(self, patience: float, longest: float) -> None:
        self.patience, self.longest = patience, longest
        self._rounds: deque[float] = deque(maxlen=4)
        self._asked = 0.0
        self._under_way = 0
        self._told: float | None = None

    def anew(self, patience: float) -> None:
        """Another screen is in front."""
        self.patience = patience
        self._rounds.clear()
        self._asked, self._told = 0.0, None

    def asking(self) -> None:
        """A question is put; `asked` follows. A round is not over before."""
        self._under_way += 1

    def asked(self, seconds: float) -> None:
        """An answer took so long."""
        self._under_way -= 1
        self._asked += seconds

    def ready(self, now: float) -> bool:
        """Whether a screen may be told of a change."""
        if self._told is None or now >= self._told + self.longest:
            return True
        if self._under_way:
            return False
        costs = [*self._rounds, *([self._asked] if self._asked else [])]
        return now >= self._told + self.patience * min(costs, default=0.0)

    def told(self, now: float) -> None:
        """A screen is told now: what it asks from here on is a round."""
        if self._told is not None and self._asked:
            self._rounds.append(self._asked)
        self._asked, self._told = 0.0, now
