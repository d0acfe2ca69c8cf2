"""What a run that makes rows asks, finds, refuses and comes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ajet_sdk.errors import AjetError
from ajet_tools.dataset.forms import Diversity, diversity_of

__all__ = ["Asked", "Expanded", "Found", "Fruitless", "Interrupted", "Pace", "Refused", "Side", "count_for"]


class Fruitless(AjetError, RuntimeError):
    """Call after call gave no row that could be kept."""


class Interrupted(AjetError, RuntimeError):
    """A person stopped the run."""


@dataclass(frozen=True)
class Asked:
    """One call: which side of the split it is for, how many rows were asked for, and in what words."""

    number: int
    side: str
    count: int
    messages: list[dict[str, str]]
    seed: int
    provenance: Mapping[str, Any]


@dataclass(frozen=True)
class Found:
    """A row of a reply that holds by itself, and where it comes from."""

    values: dict[str, Any]
    provenance: Mapping[str, Any]


@dataclass(frozen=True)
class Refused:
    """A generated row that is not taken, and why; `row` is None where there was no row, but a reply without one."""

    reason: str
    """One of few phrases, to count by."""
    detail: str
    row: Mapping[str, Any] | None
    provenance: Mapping[str, Any]
    reply: str | None = None

    def as_row(self) -> dict[str, Any]:
        """The row as `rejected.jsonl` holds it."""
        rejected = {"reason": self.reason, "detail": self.detail}
        if self.reply is not None:
            rejected["reply"] = self.reply[:4000]
        return {**(self.row or {}), "rejected": rejected, "provenance": dict(self.provenance)}


@dataclass
class Expanded:
    """What a run came to so far. `stopped` is why it ended before there were as many rows as asked for."""

    train: list[dict[str, Any]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)
    rejected: list[Refused] = field(default_factory=list)
    surplus: int = 0
    """Sound rows that came after the last one that was needed."""
    calls: int = 0
    """Calls for rows that were taken in; those of a verifier are not among them."""
    stopped: AjetError | None = None

    @property
    def accepted(self) -> int:
        return len(self.train) + len(self.validation)

    def diversity(self) -> Diversity:
        """How many forms the accepted rows have."""
        return diversity_of([*self.train, *self.validation])

    @property
    def refused(self) -> Counter[str]:
        return Counter(one.reason for one in self.rejected)


class Pace(Protocol):
    """What a recipe says of the calls, whatever is asked in them."""

    @property
    def window(self) -> int: ...
    @property
    def per_call(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def similarity(self) -> float: ...
    @property
    def max_same_form(self) -> int | None: ...


@dataclass(kw_only=True)
class Side:
    """One side of the split: how many rows it is to have (None: as many as there are), and those it has."""

    name: str
    target: int | None
    rows: list[dict[str, Any]]
    spare: list[tuple[Asked, Found, Mapping[str, Any]]] = field(default_factory=list)
    """Sound rows beyond the target, each with its provenance."""
    under_way: dict[int, int] = field(default_factory=dict)
    """Rows asked for in each call under way."""

    def lacks(self, each: float) -> float:
        """Rows still to be asked for, where of each one asked for `each` is accepted."""
        wanted = float("inf") if self.target is None else self.target
        return wanted - len(self.rows) - each * sum(self.under_way.values())


def count_for(side: Side, each: float, most: int) -> int:
    """How many rows to ask for in a call."""
    lacking = side.lacks(each)
    return most if side.target is None else max(1, min(most, round(lacking / each)))
