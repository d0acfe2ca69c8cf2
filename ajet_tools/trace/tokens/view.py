"""Timelines of an episode as arrays of tokens: log-probabilities, advantages, versions, outcomes.

All arrays of a `TokenView` have length T, the number of its tokens. Unknown floats are NaN, unknown
integers -1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ajet_sdk.pictures import PlacedPicture
from ajet_sdk.protocols import TraceReader
from ajet_sdk.samples.timelines import Merged, merge
from ajet_sdk.types import OUTCOMES, Call, Episode, LedgerEntry, Split, Timeline, Trained
from ajet_tools.trace.decoding import Spelled, Vocabulary, known_vocabulary, token_text
from ajet_tools.trace.queries.base import grouped
from ajet_tools.trace.queries.records import Record, known_records, trained_version

_Floats = npt.NDArray[np.float32]
_Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Turn:
    """A call in a timeline: token_ids[:start] is its prompt, token_ids[start:end] its sampled
    tokens."""

    call: Call
    start: int
    end: int
    is_home: bool
    """Its tokens may be masked in here; otherwise it is context, and may be masked in in timeline
    `home`."""
    home: int


@dataclass(frozen=True, slots=True)
class Fork:
    """A fork between a timeline and another one."""

    at: int
    """First different token of this timeline."""
    other: int
    """The other timeline."""
    opens: bool
    """This timeline starts at the fork; otherwise the other one does."""
    split: Split


@dataclass(frozen=True, eq=False)
class EpisodeTokens:
    """The timelines of an episode."""

    record: Record
    """With ledger and trained tokens."""
    merged: Merged
    known: Vocabulary | None = None
    why_ids: str = ""
    """Reason for showing ids instead of text; empty with a tokenizer."""
    step_version: int | None = None
    """Policy version trained by the episode's step."""

    def __len__(self) -> int:
        return len(self.merged.timelines)

    @cached_property
    def calls(self) -> Mapping[str, Call]:
        return {call.call_id: call for call in self.record.episode.calls}

    @property
    def without_ids(self) -> int:
        """Number of calls without ids, which are in no timeline."""
        return sum(
            call.prompt_ids is None or call.output_ids is None for call in self.record.episode.calls
        )

    @cached_property
    def openers(self) -> Sequence[str]:
        """First call after the fork of each timeline, or its first call."""
        opened = {split.call_id for split in self.merged.splits}
        openers: list[str] = []
        for timeline in self.merged.timelines:
            after_forks = [call_id for call_id in timeline.call_ids if call_id in opened]
            openers.append(after_forks[-1] if after_forks else timeline.call_ids[0])
        return openers

    @cached_property
    def homes(self) -> Mapping[str, int]:
        """Timeline in which each call may be masked in."""
        by_call: dict[str, int] = {}
        for i, (timeline, opener) in enumerate(
            zip(self.merged.timelines, self.openers, strict=True)
        ):
            for call_id in timeline.call_ids[timeline.call_ids.index(opener) :]:
                by_call[call_id] = i
        return by_call

    @cached_property
    def booked(self) -> Mapping[str, Sequence[LedgerEntry]]:
        """Ledger entries by call, in the order of tokens: trained, then truncated, then others."""
        ordered = sorted(
            self.record.ledger, key=lambda e: (e.outcome != "trained", e.outcome != "truncated")
        )
        return grouped(ordered, lambda entry: entry.call_id)

    @cached_property
    def scores(self) -> Mapping[str, Trained]:
        return self.record.scores


def episode_tokens(
    record: Record,
    known: Vocabulary | None = None,
    why_ids: str = "",
    step_version: int | None = None,
) -> EpisodeTokens:
    """Merge the calls of an episode; a tokenizer helps to find causes of splits."""
    calls = record.episode.calls
    if known:
        merged = merge(calls, known.decode, known.template)
    else:
        merged = merge(calls)
    return EpisodeTokens(record, merged, known, why_ids, step_version)


def open_tokens(
    reader: TraceReader, episode_id: str, tokenizer: Path | None = None, trace: Path | None = None
) -> EpisodeTokens:
    """Read an episode with its tokenizer and timelines; for `tokenizer` and `trace` see
    `vocabulary`.

    Raises QueryError for an unknown episode. A missing tokenizer is no error.
    """
    [record] = known_records(reader, [episode_id])
    version = None
    if record.ended:
        version = trained_version(reader, record.episode)
    known, why = known_vocabulary(reader, record.episode.run_id, tokenizer, trace)
    return episode_tokens(record, known, why, version)


@dataclass(frozen=True, eq=False)
class TokenView:
    """Arrays of a timeline's tokens."""

    index: int
    agent: str
    phase: str
    episode: Episode
    ids: _Ints
    spelled: Spelled | None
    """None without a tokenizer."""
    special: npt.NDArray[np.bool_]
    mask: npt.NDArray[np.bool_]
    """Loss mask: sampled in this timeline by a trainable call."""
    sampled: npt.NDArray[np.bool_]
    """Sampled by any call of this timeline; otherwise prompt."""
    turn: _Ints
    """Index in `turns` of the call that added the token, in its prompt or by sampling."""
    sampler: _Floats
    trainer: _Floats
    advantage: _Floats
    entropy: _Floats
    version: _Ints
    outcome: npt.NDArray[np.int8]
    """Index in `ajet_sdk.types.OUTCOMES`; -1 for prompts and tokens without a ledger entry."""
    turns: tuple[Turn, ...]
    forks: tuple[Fork, ...]
    step_version: int | None
    pictures: tuple[PlacedPicture, ...] = ()
    recomputed: bool = False
    """Advantages were not recorded, and are recomputed from the group."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def gap(self) -> _Floats:
        """Trainer minus sampler log-probability."""
        return self.trainer - self.sampler

    @cached_property
    def staleness(self) -> _Ints:
        """Number of updates between the sampling and the trained version of each token."""
        if self.step_version is None:
            return np.full(self.version.shape, -1, np.int32)
        behind = np.where(self.version >= 0, self.step_version - self.version, -1)
        return behind.astype(np.int32)

    @cached_property
    def span_starts(self) -> npt.NDArray[np.int64]:
        """Start of each masked-in span."""
        return np.array(
            [t.start for t in self.turns if t.end > t.start and self.mask[t.start]], np.int64
        )

    @property
    def unknown_advantages(self) -> bool:
        """Whether trained tokens have no recorded advantage."""
        trained = self.mask & (self.outcome == OUTCOMES.index("trained"))
        return bool(np.isnan(self.advantage[trained]).any())

    def with_advantages(self, recomputed: Mapping[str, _Floats]) -> TokenView:
        """Fill in the unknown advantages of trained tokens."""
        advantage = self.advantage.copy()
        for turn in self.turns:
            values = recomputed.get(turn.call.call_id)
            if turn.is_home and values is not None:
                span = slice(turn.start, turn.end)
                trained = self.outcome[span] == OUTCOMES.index("trained")
                advantage[span] = np.where(
                    np.isnan(advantage[span]) & trained, values, advantage[span]
                )
        return dataclasses.replace(self, advantage=advantage, recomputed=True)


def timeline_view(episode: EpisodeTokens, index: int) -> TokenView:
    """Build the arrays of a timeline; without a tokenizer its tokens have no text."""
    timeline = episode.merged.timelines[index]
    known = episode.known
    ids = timeline.token_ids
    size = len(timeline.token_ids)
    turns = _turns(episode, index, timeline)
    special = np.zeros(size, np.bool_)
    if known is not None:
        special = np.isin(ids, [i for i in np.unique(ids).tolist() if known.is_special(i)])
    sampler, trainer, advantage, entropy = (np.full(size, np.nan, np.float32) for _ in range(4))
    view = TokenView(
        index=index,
        agent=timeline.agent,
        phase=turns[-1].call.phase,
        episode=episode.record.episode,
        ids=ids,
        spelled=token_text(ids.tolist(), known) if known else None,
        special=special,
        mask=timeline.loss_mask,
        sampled=np.zeros(size, np.bool_),
        turn=np.full(size, -1, np.int32),
        sampler=sampler,
        trainer=trainer,
        advantage=advantage,
        entropy=entropy,
        version=np.full(size, -1, np.int32),
        outcome=np.full(size, -1, np.int8),
        turns=turns,
        forks=_forks(episode, index, turns),
        step_version=episode.step_version,
        pictures=timeline.pictures,
    )
    for number, turn in enumerate(turns):
        _fill(view, number, turn, episode)
    return view


def _turns(episode: EpisodeTokens, index: int, timeline: Timeline) -> tuple[Turn, ...]:
    turns = []
    for call_id in timeline.call_ids:
        call = episode.calls[call_id]
        assert call.prompt_ids is not None and call.output_ids is not None, (
            "a timeline consists of token ids"
        )
        start = len(call.prompt_ids)
        home = episode.homes[call_id]
        turns.append(Turn(call, start, start + len(call.output_ids), home == index, home))
    return tuple(turns)


def _fill(view: TokenView, number: int, turn: Turn, episode: EpisodeTokens) -> None:
    """Fill in the values of a call."""
    span = slice(turn.start, turn.end)
    call = turn.call
    fresh = view.turn[: turn.end]
    fresh[fresh < 0] = number
    view.turn[span] = number
    view.sampled[span] = True
    if call.logprobs is not None:
        view.sampler[span] = call.logprobs
    if call.versions is not None:
        view.version[span] = call.versions
    at = turn.start
    for booked in episode.booked.get(call.call_id, ()):
        view.outcome[at : min(at + booked.tokens, turn.end)] = OUTCOMES.index(booked.outcome)
        at += booked.tokens
    scores = episode.scores.get(call.call_id)
    if scores is not None and len(scores.logprobs) == turn.end - turn.start:
        view.trainer[span] = scores.logprobs
        view.entropy[span] = scores.entropy
        if turn.is_home:
            view.advantage[span] = scores.advantages


def _forks(episode: EpisodeTokens, index: int, turns: Sequence[Turn]) -> tuple[Fork, ...]:
    """Return the fork that opened a timeline, and forks from it, by position."""
    members = {turn.call.call_id for turn in turns}
    size = turns[-1].end
    forks = []
    for split in episode.merged.splits:
        timeline = episode.homes[split.call_id]
        parent = None
        if split.parent_call_id is not None:
            parent = episode.homes.get(split.parent_call_id)
        if timeline == index:
            forks.append(
                Fork(min(split.at_token, size - 1), 0 if parent is None else parent, True, split)
            )
        elif split.parent_call_id in members and split.call_id not in members:
            forks.append(Fork(min(split.at_token, size - 1), timeline, False, split))
    return tuple(sorted(forks, key=lambda fork: (fork.at, not fork.opens, fork.other)))
