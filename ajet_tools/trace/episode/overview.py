"""Everything that is known of one episode, for a screen that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ajet_sdk.protocols import TraceReader
from ajet_sdk.types import Call, Episode, LedgerEntry
from ajet_tools.trace.decoding import Vocabulary, known_vocabulary
from ajet_tools.trace.episode.messages import Message, conversation
from ajet_tools.trace.episode.tree import EpisodeTree, episode_tree
from ajet_tools.trace.queries.base import grouped
from ajet_tools.trace.queries.episodes import attempts_of
from ajet_tools.trace.queries.records import (
    Pulse,
    Record,
    attempt_rewards,
    episode_pulse,
    records_of,
)


@dataclass(frozen=True, eq=False)
class EpisodeOverview:
    """An episode as it stood when it was asked for."""

    record: Record
    """Has only the calls of an episode that runs or was cut off."""
    pulse: Pulse
    tree: EpisodeTree
    attempts: Sequence[str] = ()
    """The episodes of its group, in the order of attempts."""
    group_rewards: Sequence[float | None] = ()
    """Those of its attempts."""
    known: Vocabulary | None = None
    """The run's tokens as text, once they are known."""
    unexplained: str = ""
    """Why it is not: the run's tokenizer is not at hand."""

    @property
    def episode(self) -> Episode:
        return self.record.episode

    @property
    def status(self) -> str:
        """How the episode ended, or that it has not."""
        if self.record.ended:
            return "superseded" if self.record.superseded else self.episode.status
        if not self.calls:
            return "absent"
        return "running" if self.pulse.running else "cut off"

    @cached_property
    def calls(self) -> Mapping[str, Call]:
        return {call.call_id: call for call in self.episode.calls}

    @cached_property
    def _booked(self) -> Mapping[str, Sequence[LedgerEntry]]:
        return grouped(self.record.ledger, lambda entry: entry.call_id)

    def outcome(self, call_id: str) -> str:
        """The outcome of a call's tokens, in words; empty if nothing is booked yet."""
        booked = self._booked.get(call_id, ())
        if len(booked) == 1:
            return booked[0].outcome
        return ", ".join(f"{entry.tokens:,} {entry.outcome}" for entry in booked)

    def totals(self) -> dict[str, int]:
        """Tokens by outcome."""
        totals: dict[str, int] = {}
        for entry in self.record.ledger:
            totals[entry.outcome] = totals.get(entry.outcome, 0) + entry.tokens
        return totals

    def conversation(self, branch: int) -> tuple[Message, ...]:
        """The conversation along a branch, from the beginning."""
        return conversation([self.calls[call_id] for call_id in self.tree.branches[branch].chain])


def read_overview(reader: TraceReader, episode_id: str, known: Vocabulary | None = None) -> EpisodeOverview:
    """Read an episode, finished or not. Without `known`, causes that need the text are left to `explain_forks`."""
    return _read_overview(reader, episode_id, episode_pulse(reader, episode_id), known)


def _read_overview(reader: TraceReader, episode_id: str, pulse: Pulse, known: Vocabulary | None) -> EpisodeOverview:
    [record] = records_of(reader, [episode_id], whole=True)
    attempts = attempts_of(reader, episode_id) if record.ended else [episode_id]
    return EpisodeOverview(
        record,
        pulse,
        _tree(record.episode.calls, known),
        attempts=attempts,
        group_rewards=attempt_rewards(reader, attempts) if len(attempts) > 1 else (),
        known=known,
    )


def refresh_overview(reader: TraceReader, old: EpisodeOverview) -> EpisodeOverview | None:
    """Read it once more where anything of it has changed; else None."""
    fresh = episode_pulse(reader, old.episode.episode_id)
    if fresh == old.pulse:
        return None
    return replace(_read_overview(reader, old.episode.episode_id, fresh, old.known), unexplained=old.unexplained)


def explain_forks(reader: TraceReader, overview: EpisodeOverview, trace: Path | None = None) -> EpisodeOverview:
    """The overview with each fork's tokens as text, and with the causes that only the text tells.

    Where the run's tokenizer is not at hand the overview stays as it is and says so; where there is nothing to explain
    none is loaded. `trace` is where the trace lies.
    """
    if (
        overview.known
        or overview.unexplained
        or not any(b.fork and b.fork.unit == "token" for b in overview.tree.branches)
    ):
        return overview
    known, why = known_vocabulary(reader, overview.episode.run_id, trace=trace)
    if known is None:
        return replace(overview, unexplained=why)
    return replace(overview, tree=_tree(overview.episode.calls, known), known=known)


def _tree(calls: Sequence[Call], known: Vocabulary | None) -> EpisodeTree:
    return episode_tree(calls, known.decode, known.template) if known else episode_tree(calls)
