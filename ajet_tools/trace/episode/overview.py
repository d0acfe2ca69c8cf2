"""Everything that is known of one episode, for a screen that shows it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ajet_sdk.errors import ConfigError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.reader import calls_of
from ajet_sdk.types import Call
from ajet_tools.trace.decoding import Vocabulary, vocabulary
from ajet_tools.trace.episode.messages import Message, conversation
from ajet_tools.trace.episode.tree import EpisodeTree, episode_tree
from ajet_tools.trace.queries.calls import (
    EpisodeRow,
    FeedbackRow,
    Pulse,
    RewardRow,
    attempt_rewards,
    episode_pulse,
    episode_row,
    feedback_of,
    ledger_of_episode,
    mean_advantage,
    rewards_of,
)
from ajet_tools.trace.queries.episodes import attempts_of


@dataclass(frozen=True, eq=False)
class EpisodeOverview:
    """An episode as it stood when it was asked for."""

    episode_id: str
    pulse: Pulse
    row: EpisodeRow | None
    """The row of `episodes`; None where the episode runs or was cut off."""
    calls: Mapping[str, Call]
    tree: EpisodeTree
    rewards: Sequence[RewardRow] = ()
    feedback: Sequence[FeedbackRow] = ()
    ledger: Mapping[str, Sequence[tuple[str, int]]] | None = None
    """Outcomes with their tokens by call."""
    attempts: Sequence[str] = ()
    """The episodes of its group, in the order of attempts."""
    group_rewards: Sequence[float | None] = ()
    """Those of its attempts."""
    advantage: float | None = None
    """The mean over its trained tokens."""
    known: Vocabulary | None = None
    """The run's tokens as text, once they are known."""
    unexplained: str = ""
    """Why it is not: the run's tokenizer is not at hand."""

    @property
    def status(self) -> str:
        """How the episode ended, or that it has not."""
        if self.row is not None:
            return "superseded" if self.row["superseded"] else str(self.row["status"])
        if not self.calls:
            return "absent"
        return "running" if self.pulse["running"] else "cut off"

    @cached_property
    def reward(self) -> float | None:
        """The weighted sum of all rewards; None where there is none."""
        return sum(r["value"] * r["weight"] for r in self.rewards) if self.rewards else None

    @cached_property
    def task(self) -> Mapping[str, object]:
        parsed = json.loads(self.row["task"]) if self.row else None
        return parsed if isinstance(parsed, Mapping) else {}

    def outcome(self, call_id: str) -> str:
        """The outcome of a call's tokens, in words; empty if nothing is booked yet."""
        booked = (self.ledger or {}).get(call_id, ())
        if len(booked) == 1:
            return booked[0][0]
        return ", ".join(f"{tokens:,} {outcome}" for outcome, tokens in booked)

    def totals(self) -> dict[str, int]:
        """Tokens by outcome."""
        totals: dict[str, int] = {}
        for booked in (self.ledger or {}).values():
            for outcome, tokens in booked:
                totals[outcome] = totals.get(outcome, 0) + tokens
        return totals

    def chain(self, branch: int) -> list[Call]:
        """The calls whose conversation a branch is."""
        return [self.calls[call_id] for call_id in self.tree.branches[branch].chain]

    def conversation(self, branch: int) -> tuple[Message, ...]:
        """The conversation along a branch, from the beginning."""
        return conversation(self.chain(branch))


def read_overview(reader: TraceReader, episode_id: str, known: Vocabulary | None = None) -> EpisodeOverview:
    """Read an episode, finished or not. Without `known`, causes that need the text are left to `explain_forks`."""
    return _read_overview(reader, episode_id, episode_pulse(reader, episode_id), known)


def _read_overview(reader: TraceReader, episode_id: str, pulse: Pulse, known: Vocabulary | None) -> EpisodeOverview:
    row = episode_row(reader, episode_id) if pulse["ended"] else None
    calls = {call.call_id: call for call in calls_of(reader, episode_id)}
    ledger: dict[str, list[tuple[str, int]]] = {}
    for entry in ledger_of_episode(reader, episode_id) if row else ():
        ledger.setdefault(entry["call_id"], []).append((entry["outcome"], entry["tokens"]))
    attempts = attempts_of(reader, episode_id) if row else [episode_id]
    return EpisodeOverview(
        episode_id=episode_id,
        pulse=pulse,
        row=row,
        calls=calls,
        tree=_tree(calls, known),
        rewards=rewards_of(reader, episode_id) if row else (),
        feedback=feedback_of(reader, episode_id) if pulse["feedback"] else (),
        ledger=ledger,
        attempts=attempts,
        group_rewards=attempt_rewards(reader, attempts) if len(attempts) > 1 else (),
        advantage=mean_advantage(reader, episode_id) if row else None,
        known=known,
    )


def refresh_overview(reader: TraceReader, old: EpisodeOverview) -> EpisodeOverview | None:
    """Read it once more where anything of it has changed; else None."""
    fresh = episode_pulse(reader, old.episode_id)
    if fresh == old.pulse:
        return None
    return replace(_read_overview(reader, old.episode_id, fresh, old.known), unexplained=old.unexplained)


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
    try:
        known = vocabulary(reader, overview.row["run_id"] if overview.row else _newest_run(reader), trace=trace)
    except ConfigError as error:
        return replace(overview, unexplained=str(error))
    return replace(overview, tree=_tree(overview.calls, known), known=known)


def _tree(calls: Mapping[str, Call], known: Vocabulary | None) -> EpisodeTree:
    every = list(calls.values())
    return episode_tree(every, known.decode, known.template) if known else episode_tree(every)


def _newest_run(reader: TraceReader) -> str:
    """The run of an unfinished episode, as far as can be overview: its calls do not say."""
    runs = reader.query("SELECT run_id FROM runs ORDER BY started_at DESC LIMIT 1").to_pylist()
    return runs[0]["run_id"] if runs else ""
