"""What people said of an episode, taken together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ajet_sdk.protocols import TraceReader
from ajet_sdk.types import Feedback
from ajet_tools.trace.queries.rows import rows

__all__ = ["Opinion", "opinion", "opinions"]


@dataclass(frozen=True)
class Opinion:
    """Several people's feedback as one. Where one person spoke twice of the same thing, the later word counts."""

    score: float | None = None
    """The mean of the scores; a thumb up is 1 and a thumb down is 0."""
    correction: Feedback | None = None
    """The latest corrected answer."""
    comments: tuple[str, ...] = ()

    @property
    def kinds(self) -> frozenset[str]:
        """Which of up, down and corrected it is. A score of exactly one half is neither up nor down."""
        found = {"corrected"} if self.correction else set()
        if self.score is not None and self.score != 0.5:
            found.add("up" if self.score > 0.5 else "down")
        return frozenset(found)


def opinion(feedback: Iterable[Feedback]) -> Opinion:
    """The opinion that feedback on one episode comes to."""
    ordered = sorted(feedback, key=lambda said: (said.at, said.feedback_id))
    scores = {(said.call_id, said.author or said.feedback_id): said.score for said in ordered if said.score is not None}
    corrections = [said for said in ordered if said.correction and said.correction.strip()]
    return Opinion(
        score=sum(scores.values()) / len(scores) if scores else None,
        correction=corrections[-1] if corrections else None,
        comments=tuple(said.comment for said in ordered if said.comment),
    )


def opinions(reader: TraceReader) -> dict[str, Opinion]:
    """The opinion on each episode of a trace that anything was said of."""
    said: dict[str, list[Feedback]] = {}
    for row in rows(reader, "SELECT * FROM feedback"):
        said.setdefault(row["episode_id"], []).append(Feedback(**row))
    return {episode_id: opinion(feedback) for episode_id, feedback in said.items()}
