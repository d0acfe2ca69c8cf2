"""All data of an episode for display, and its summary in a few lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from rich.text import Text

from ajet_sdk.protocols import TraceReader
from ajet_sdk.types import Call, Episode, LedgerEntry
from ajet_tools.text.clean import counted, drop_zero_width, kind_of, one_line
from ajet_tools.text.tables import number
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

STATUS_STYLES = {"failed": "red", "timeout": "yellow", "aborted": "yellow", "running": "cyan"}
_SIGNS = {"failed": "✗", "running": "▶", "timeout": "‖", "aborted": "‖", "cut off": "‖"}
_GROUP = 16
"""Attempts of a group that are shown one by one."""
_ANSWER = 60


@dataclass(frozen=True, eq=False)
class EpisodeOverview:
    """Snapshot of an episode."""

    record: Record
    """Only the calls if the episode is running or was cut off."""
    pulse: Pulse
    tree: EpisodeTree
    attempts: Sequence[str] = ()
    """Episodes of its group, by attempt."""
    group_rewards: Sequence[float | None] = ()
    """Rewards of `attempts`."""
    known: Vocabulary | None = None
    """Tokenizer of the run, once loaded."""
    unexplained: str = ""
    """Reason why the tokenizer cannot be loaded."""

    @property
    def episode(self) -> Episode:
        return self.record.episode

    @property
    def status(self) -> str:
        """Status of the episode; `running`, `cut off` or `absent` if it has no end."""
        if self.record.ended:
            if self.record.superseded:
                return "superseded"
            return self.episode.status
        if not self.calls:
            return "absent"
        if self.pulse.running:
            return "running"
        return "cut off"

    @cached_property
    def calls(self) -> Mapping[str, Call]:
        return {call.call_id: call for call in self.episode.calls}

    @cached_property
    def _booked(self) -> Mapping[str, Sequence[LedgerEntry]]:
        return grouped(self.record.ledger, lambda entry: entry.call_id)

    def outcome(self, call_id: str) -> str:
        """Return the ledger outcomes of a call as text; empty without entries."""
        booked = self._booked.get(call_id, ())
        if len(booked) == 1:
            return booked[0].outcome
        return ", ".join(f"{entry.tokens:,} {entry.outcome}" for entry in booked)

    def totals(self) -> dict[str, int]:
        """Return tokens by outcome."""
        totals: dict[str, int] = {}
        for entry in self.record.ledger:
            totals[entry.outcome] = totals.get(entry.outcome, 0) + entry.tokens
        return totals

    def conversation(self, branch: int) -> tuple[Message, ...]:
        """Return the conversation of a branch, from the beginning."""
        return conversation([self.calls[call_id] for call_id in self.tree.branches[branch].chain])


def read_overview(
    reader: TraceReader, episode_id: str, known: Vocabulary | None = None
) -> EpisodeOverview:
    """Read a finished or unfinished episode. Without `known`, `explain_forks` finds the causes that
    need text."""
    return _read_overview(reader, episode_id, episode_pulse(reader, episode_id), known)


def _read_overview(
    reader: TraceReader, episode_id: str, pulse: Pulse, known: Vocabulary | None
) -> EpisodeOverview:
    [record] = records_of(reader, [episode_id], whole=True)
    if record.ended:
        attempts = attempts_of(reader, episode_id)
    else:
        attempts = [episode_id]
    return EpisodeOverview(
        record,
        pulse,
        _tree(record.episode.calls, known),
        attempts=attempts,
        group_rewards=attempt_rewards(reader, attempts) if len(attempts) > 1 else (),
        known=known,
    )


def refresh_overview(reader: TraceReader, old: EpisodeOverview) -> EpisodeOverview | None:
    """Read the episode again if it has changed, or return None."""
    fresh = episode_pulse(reader, old.episode.episode_id)
    if fresh == old.pulse:
        return None
    return replace(
        _read_overview(reader, old.episode.episode_id, fresh, old.known),
        unexplained=old.unexplained,
    )


def explain_forks(
    reader: TraceReader, overview: EpisodeOverview, trace: Path | None = None
) -> EpisodeOverview:
    """Decode the tokens at forks, and find the causes that need text.

    Loads the tokenizer only if there are forks; `unexplained` has the reason if that fails. `trace`
    is the path of the trace.
    """
    has_forks = any(
        branch.fork and branch.fork.unit == "token" for branch in overview.tree.branches
    )
    if overview.known or overview.unexplained or not has_forks:
        return overview
    known, why = known_vocabulary(reader, overview.episode.run_id, trace=trace)
    if known is None:
        return replace(overview, unexplained=why)
    return replace(overview, tree=_tree(overview.episode.calls, known), known=known)


def _tree(calls: Sequence[Call], known: Vocabulary | None) -> EpisodeTree:
    if known:
        return episode_tree(calls, known.decode, known.template)
    return episode_tree(calls)


def _outcome(reward: float | None, solved: bool | None = None) -> tuple[str, str]:
    """Return a mark and its style: solved, no reward, partial reward, unknown."""
    if reward is None:
        return "·", ""
    if solved or reward >= 1 - 1e-9:
        return "✓", "bold green"
    if reward <= 0:
        return ("✗", "bold red")
    return ("~", "bold")


def summarize(overview: EpisodeOverview, new: int = 0) -> Text:
    """Summarize the episode in a few lines; `new` is the number of unread messages."""
    episode = overview.episode
    if (
        overview.status == "succeeded" and episode.reward is not None
    ):  # the reward implies the status
        mark, style = _outcome(episode.reward, episode.is_success)
        line = Text.assemble((f"{mark} reward {number(episode.reward)}", style))
    else:
        mark = _SIGNS.get(overview.status, "·")
        line = Text.assemble(
            (f"{mark} {overview.status}", f"bold {STATUS_STYLES.get(overview.status, 'yellow')}")
        )
        line.append(
            "" if episode.reward is None else f"  reward {number(episode.reward)}", style="bold"
        )
    line.append("  " + " · ".join(fact for fact in _counts(overview) if fact))
    if episode.error or episode.cause:
        lines = (episode.error or "").strip().splitlines() or [""]
        if lines[0].startswith("Traceback"):
            error = lines[-1]
        else:
            error = lines[0]
        if (episode.cause or "") not in error:
            error = f"{episode.cause}: {error}"
        line.append(f"\n{drop_zero_width(one_line(error, 200))}", style="red")
    if episode.task.main_query:
        line.append(f"\n{drop_zero_width(one_line(episode.task.main_query, 300))}", style="italic")
    if parts := [part for part in (_answers(overview), _group(overview)) if part]:
        line.append("\n").append_text(Text("   ").join(parts))
    line.append(
        "" if episode.calls or not overview.record.ended else "\nthe episode made no call",
        style="yellow",
    )
    line.append(
        f"\n{counted(new, 'message')} new: end goes there and follows" if new else "",
        style="bold yellow",
    )
    return line


def _answers(overview: EpisodeOverview) -> Text:
    """Compare the reference answer with the output, if both are short."""
    episode = overview.episode
    shown = [
        str(value)
        for value in (episode.task.metadata.get("answer"), episode.output)
        if isinstance(value, str | int | float)
    ]
    if len(shown) < 2 or max(map(len, shown)) > _ANSWER:
        return Text()
    return Text(f"expected {one_line(shown[0], _ANSWER)}   got {one_line(shown[1], _ANSWER)}")


def _group(overview: EpisodeOverview) -> Text:
    """Show the outcomes of the group, this episode in brackets, and the sign of the advantage."""
    line = Text()
    if 1 < len(overview.attempts) <= _GROUP:
        line.append("group")
        for episode_id, reward in zip(overview.attempts, overview.group_rewards, strict=True):
            mark, style = _outcome(reward)
            line.append(
                f" [{mark}]" if episode_id == overview.episode.episode_id else f" {mark}",
                style=style,
            )
    if advantage := overview.record.advantage:
        direction = "up" if advantage > 0 else "down"
        line.append(f"{'   ' if line else ''}pushed {direction} (advantage {advantage:+.3g})")
    return line


def _counts(overview: EpisodeOverview) -> Iterator[str]:
    """Yield status and size of the episode."""
    episode = overview.episode
    ended = overview.record.ended
    if ended:
        yield f"step {episode.step} {kind_of(episode)}" if episode.split else ""
        group = ""
        if len(overview.attempts) > 1:
            group = f" of a group of {len(overview.attempts)}"
        yield f"attempt {episode.attempt}{group}"
    yield counted(len(episode.calls), "call")
    agents = len({call.agent for call in episode.calls})
    yield counted(agents, "agent") if agents > 1 else ""
    lines = sum(1 for branch in overview.tree.branches if branch.timeline is not None)
    yield counted(lines, "timeline") if lines else ""
    tokens = sum(len(call.output_ids) for call in episode.calls if call.output_ids is not None)
    yield f"{counted(tokens, 'token')} sampled" if tokens else ""
    yield f"{(episode.ended_at - episode.started_at).total_seconds():,.2f} s" if ended else ""
    yield episode.episode_id[:12]
