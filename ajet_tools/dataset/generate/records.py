"""What passes through a generation run: calls, the rows of their replies, outcomes, the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ajet_sdk.errors import AjetError
from ajet_tools.dataset.curation.forms import Diversity, diversity_of

if TYPE_CHECKING:
    from ajet_tools.dataset.generate.seeds import Side
    from ajet_tools.dataset.similarity.decontaminate import Leaks
    from ajet_tools.dataset.verify.combined import CombinedVerifier


class NoProgress(AjetError, RuntimeError):
    """Many consecutive calls gave no accepted row."""


class Interrupted(AjetError, RuntimeError):
    """A signal stopped the run: Ctrl-C, or SIGTERM."""

    def __init__(self, signal: int) -> None:
        super().__init__("stopped: accepted rows are kept; continue with --resume")
        self.signal = signal


@dataclass(frozen=True)
class Checks:
    """Checks of valid rows."""

    verifier: CombinedVerifier | None = None
    leaks: Leaks | None = None
    held_out: Leaks | None = None
    """The validation tasks of the seeds' trace."""


NO_CHECKS = Checks()


@dataclass(frozen=True)
class Call:
    """A call for rows of a split side; `provenance` is that of its rows."""

    number: int
    side: str
    count: int
    provenance: Mapping[str, Any]
    messages: Sequence[Mapping[str, str]] = ()
    """Empty for a call of an earlier process, whose reply is stored."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        parameters: Mapping[str, Any] = self.provenance["parameters"]
        return parameters


@dataclass(frozen=True)
class Candidate:
    """A valid row of a reply, with its provenance."""

    values: dict[str, Any]
    provenance: Mapping[str, Any]


class Unusable(Exception):
    """An invalid row of a reply: `reason` to count by, `detail` to read, and its provenance."""

    def __init__(self, reason: str, detail: str, provenance: Mapping[str, object]) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail
        self.provenance = provenance


@dataclass(frozen=True)
class Rejected:
    """A rejected row with the reason; `row` is None if the reply had no row."""

    reason: str
    """One of a few phrases, to count by."""
    detail: str
    row: Mapping[str, object] | None
    provenance: Mapping[str, object]
    reply: str | None = None

    def as_row(self) -> dict[str, Any]:
        """Returns the row of `rejected.jsonl`."""
        rejected = {"reason": self.reason, "detail": self.detail}
        if self.reply is not None:
            rejected["reply"] = self.reply[:4000]
        return {**(self.row or {}), "rejected": rejected, "provenance": dict(self.provenance)}


@dataclass
class Outcome:
    """What became of the rows of a reply."""

    sound: list[Candidate] = field(default_factory=list)
    """Rows that passed every check."""
    refuted: list[Rejected] = field(default_factory=list)
    """New rows that the verifier refused; later copies of them are duplicates."""
    refused: list[Rejected] = field(default_factory=list)


@dataclass
class GenerationResult:
    """The result of a run so far. `stopped` is the reason if it ended with too few rows."""

    sides: Mapping[str, Side]
    rejected: list[Rejected] = field(default_factory=list)
    calls: int = 0
    """Decided calls for rows, without those of verifiers."""
    asked: int = 0
    """Rows requested by these calls."""
    stopped: AjetError | None = None

    @property
    def train(self) -> list[dict[str, Any]]:
        return self.sides["train"].rows

    @property
    def validation(self) -> list[dict[str, Any]]:
        side = self.sides.get("validation")
        return side.rows if side is not None else []

    @property
    def accepted(self) -> int:
        return len(self.train) + len(self.validation)

    @property
    def sound(self) -> int:
        """Accepted rows, and sound ones beyond the target."""
        return sum(side.sound for side in self.sides.values())

    @property
    def surplus(self) -> int:
        return self.sound - self.accepted

    @property
    def is_complete(self) -> bool:
        """Whether each side has as many rows as requested."""
        return all(side.is_full for side in self.sides.values())

    @property
    def refused(self) -> Counter[str]:
        return Counter(rejected.reason for rejected in self.rejected)

    def reasons(self) -> str:
        """Describes the most frequent rejections."""
        common = self.refused.most_common(3)
        return ", ".join(f"{count} {reason}" for reason, count in common) or "none"

    def diversity(self) -> Diversity:
        """Returns the diversity of the accepted rows."""
        return diversity_of([*self.train, *self.validation])

    def provenances(self) -> Iterator[Mapping[str, Any]]:
        """Yields the provenance of all rows, including refused ones."""
        for row in (*self.train, *self.validation):
            yield row["provenance"]
        for rejected in self.rejected:
            yield rejected.provenance
