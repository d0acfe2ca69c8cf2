"""Conversations side by side: how far they say the same, and where they part.

Episodes as a trace has them -> what is compared of them.

Conversations in columns: message beside message, with what differs marked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ajet_sdk.protocols import TraceReader
from ajet_sdk.samples.prefixes import common_prefix, common_start
from ajet_sdk.types import Call, Episode
from ajet_tools.trace.decoding import shown
from ajet_tools.trace.episode.messages import conversation
from ajet_tools.trace.queries.base import grouped
from ajet_tools.trace.queries.records import Record, known_records, mean_of
from ajet_tools.trace.queries.tokens import recomputed_advantages
from ajet_tools.trace.tokens.layout import lay_out
from ajet_tools.trace.tokens.view import episode_tokens


@dataclass(frozen=True, slots=True)
class ComparedMessage:
    """One message of a conversation."""

    role: str
    agent: str
    text: str
    call_id: str
    """The call in whose request or reply it first stands."""


@dataclass(frozen=True, eq=False)
class ComparedAttempt:
    """An episode as one of several that are compared."""

    episode: Episode
    status: str
    """`running` where it has not ended."""
    advantage: float | None
    """The mean over its trained tokens; None where none was trained."""
    recomputed: bool
    sampled: int
    trained: int
    messages: tuple[ComparedMessage, ...]
    timelines: tuple[npt.NDArray[np.int32], ...]
    """The token ids of each timeline."""
    homes: dict[str, int]
    """The timeline of each call that has ids."""

    @property
    def episode_id(self) -> str:
        return self.episode.episode_id


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where one conversation differs from another."""

    message: int
    """How many messages are alike: the first one that differs. It may lie behind the end of one of the two."""
    character: int
    """How many characters of that message are alike; 0 where another role speaks or one of the two has ended."""
    timeline: int | None = None
    """Where the message stands in the second of the two; None where its call has no ids."""
    token: int | None = None
    """How many tokens of that timeline are alike."""


def align(reference: ComparedAttempt, other: ComparedAttempt) -> Divergence | None:
    """Where `other` first differs from `reference`; None where both say the same to the end."""
    a, b = reference.messages, other.messages
    same = common_start(*([(message.role, message.agent, message.text) for message in side] for side in (a, b)))
    if same == len(a) == len(b):
        return None
    character = 0
    if same < min(len(a), len(b)) and (a[same].role, a[same].agent) == (b[same].role, b[same].agent):
        character = common_start(a[same].text, b[same].text)
    timeline, token = _token(reference, other, same)
    return Divergence(same, character, timeline, token)


def _token(reference: ComparedAttempt, attempt: ComparedAttempt, message: int) -> tuple[int | None, int | None]:
    """The timeline of `other` in which a message stands, and how many of its ids the reference has alike."""
    ours, theirs = _home(reference, message), _home(attempt, message)
    if ours is None or theirs is None:
        return theirs, None
    return theirs, common_prefix(reference.timelines[ours], attempt.timelines[theirs])


def _home(attempt: ComparedAttempt, message: int) -> int | None:
    """The timeline of a message, or of the last one where the conversation has ended before."""
    if not attempt.messages:
        return None
    return attempt.homes.get(attempt.messages[min(message, len(attempt.messages) - 1)].call_id)


_Floats = npt.NDArray[np.float32]


def read_attempts(reader: TraceReader, episode_ids: Sequence[str]) -> list[ComparedAttempt]:
    """The episodes to compare, in the order asked. Raises QueryError where the trace knows nothing of one."""
    records = known_records(reader, episode_ids)
    unknown = [r.episode.episode_id for r in records if _trained(r) and not r.trained]
    recomputed = recomputed_advantages(reader, *unknown) if unknown else {}
    return [attempt_of(record, recomputed) for record in records]


def attempt_of(record: Record, recomputed: Mapping[str, _Floats] | None = None) -> ComparedAttempt:
    """An episode prepared for comparison; `recomputed` has advantages by call where none were recorded."""
    episode, tokens = record.episode, episode_tokens(record)
    values = [scores.advantages for scores in record.scores.values()]
    if not values and recomputed:
        values = [recomputed[call.call_id] for call in episode.calls if call.call_id in recomputed]
    return ComparedAttempt(
        episode=episode,
        status=episode.status if record.ended else "running",
        advantage=mean_of(values),
        recomputed=bool(values) and not record.trained,
        sampled=sum(int(timeline.loss_mask.sum()) for timeline in tokens.merged.timelines),
        trained=_trained(record),
        messages=compared_messages(episode.calls),
        timelines=tuple(timeline.token_ids for timeline in tokens.merged.timelines),
        homes=dict(tokens.homes),
    )


def compared_messages(calls: Sequence[Call]) -> tuple[ComparedMessage, ...]:
    """The conversation of an episode: each message once, those of several agents in the order of their calls."""
    by_agent = grouped((call for call in calls if call.phase == "rollout"), lambda call: call.agent)
    place = {call.call_id: i for i, call in enumerate(calls)}
    placed = [
        (place[message.call_id], ComparedMessage(message.role, agent, message.text, message.call_id))
        for agent, chain in by_agent.items()
        for message in conversation(chain)
    ]
    return tuple(entry for _, entry in sorted(placed, key=lambda pair: pair[0]))


def _trained(record: Record) -> int:
    return sum(entry.tokens for entry in record.ledger if entry.outcome == "trained")


Kind = Literal["role", "same", "differs", "after", "left out"]
"""What a part of a line is: the role that speaks, text that the reference has too, the word at which both part, what
comes after it, a word of ours about text that is not shown."""

Cell = list[tuple[str, Kind]]
"""One line of one column."""

_WORDS = re.compile(r"\S{1,64}[^\S\n]*|[^\S\n]+|\n")

_WORD = re.compile(r"\s*\S{0,24}")

_ALIKE, _AFTER = 1500, 4000
"""Characters shown at each end of a text that both have, and of what comes after they part."""


@dataclass(frozen=True, eq=False)
class Columns:
    """The content of the columns, line by line."""

    lines: Sequence[Sequence[Cell]]
    places: Sequence[int]
    """The lines at which columns part from the reference, ascending."""
    messages: Sequence[int]
    """The line at which each message begins."""


def columns_of(shown_attempts: Sequence[ComparedAttempt], width: int) -> Columns:
    """Attempts beside each other in columns of `width` cells; the first is the reference of the others."""
    reference, others = shown_attempts[0], shown_attempts[1:]
    parted: list[Divergence | None] = [align(reference, attempt) for attempt in others]
    first = min((d for d in parted if d is not None), key=lambda d: (d.message, d.character), default=None)
    marks = [first, *parted]
    lines: list[list[Cell]] = []
    places: set[int] = set()
    messages = []
    for i in range(max((len(a.messages) for a in shown_attempts), default=0)):
        cells = [_message(a.messages, i, mark, width) for a, mark in zip(shown_attempts, marks, strict=True)]
        messages.append(len(lines))
        for j, mark in enumerate(marks[1:], 1):
            if mark is not None and mark.message == i:
                at = next((n for n, line in enumerate(cells[j]) if any(kind == "differs" for _, kind in line)), 0)
                places.add(len(lines) + at)
        height = max(map(len, cells)) + 1
        lines += [[cell[n] if n < len(cell) else [] for cell in cells] for n in range(height)]
    return Columns(lines, sorted(places), messages)


def _message(messages: Sequence[ComparedMessage], i: int, mark: Divergence | None, width: int) -> list[Cell]:
    """The lines of one message in one column."""
    here = mark is not None and mark.message == i
    if i >= len(messages):
        return [[("(ends here)", "differs")]] if here else []
    message = messages[i]
    title = f"{message.role} ({message.agent})" if message.agent not in ("", "default") else message.role
    labels, kinds = [], list[Kind]()
    for text, kind in _parts(message.text, i, mark):
        for word in _WORDS.findall(shown(text).replace("\t", "    ")):
            labels.append(word)
            kinds.append(kind)
    lines: list[Cell] = [[(text, kinds[word]) for word, text, _ in line] for line in lay_out(labels, width).lines]
    head: Cell = [(shown(title)[:width], "role")]
    if here and not any(kind == "differs" for line in lines for _, kind in line):  # a line break, or another speaker
        head.append((" (differs)", "differs"))
    return [head, *lines]


def _parts(text: str, i: int, mark: Divergence | None) -> Iterator[tuple[str, Kind]]:
    """A message's text in parts, long ones without their middle or end."""
    if mark is None or i < mark.message:
        yield from _ends(text)
        return
    if i > mark.message:
        yield from _start(text)
        return
    yield from _ends(text[: mark.character])
    word = _WORD.match(text, mark.character)
    end = max(word.end() if word else 0, min(mark.character + 1, len(text)))
    if end > mark.character:
        yield text[mark.character : end], "differs"
    elif text or mark.character:
        yield "(ends here)", "differs"
    yield from _start(text[end:])


def _ends(text: str) -> Iterator[tuple[str, Kind]]:
    if len(text) <= 2 * _ALIKE + 200:
        yield text, "same"
        return
    yield text[:_ALIKE], "same"
    yield f"\n… {len(text) - 2 * _ALIKE:,} characters alike …\n", "left out"
    yield text[-_ALIKE:], "same"


def _start(text: str) -> Iterator[tuple[str, Kind]]:
    yield text[:_AFTER], "after"
    if len(text) > _AFTER:
        yield f"\n… {len(text) - _AFTER:,} more characters", "left out"
