"""Aligns conversations of episodes, finds their first difference, and lays out two side by side."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
import numpy.typing as npt

from ajet_sdk.pictures import keyed
from ajet_sdk.protocols import TraceReader
from ajet_sdk.samples.prefixes import common_prefix, common_start
from ajet_sdk.types import Call, Episode
from ajet_tools.trace.decoding import shown
from ajet_tools.trace.episode.messages import conversation
from ajet_tools.trace.queries.base import grouped
from ajet_tools.trace.queries.records import Record, known_records, mean_of, recomputed_advantages
from ajet_tools.trace.tokens.layout import lay_out
from ajet_tools.trace.tokens.view import episode_tokens


@dataclass(frozen=True, slots=True)
class ComparedMessage:
    """A message of a conversation."""

    role: str
    agent: str
    text: str
    call_id: str
    """The first call with this message in its request or reply."""

    @property
    def content(self) -> tuple[str, str, str]:
        """What is compared."""
        return self.role, self.agent, self.text


@dataclass(frozen=True, eq=False)
class ComparedAttempt:
    """An episode prepared for comparison."""

    episode: Episode
    status: str
    """`running` for an unfinished episode."""
    advantage: float | None
    """Mean over the trained tokens; None without any."""
    recomputed: bool
    sampled: int
    trained: int
    messages: tuple[ComparedMessage, ...]
    timelines: tuple[npt.NDArray[np.int32], ...]
    """Token ids of each timeline, with the keys of its pictures (`keyed`)."""
    homes: dict[str, int]
    """Timeline of each call with ids."""

    @property
    def episode_id(self) -> str:
        return self.episode.episode_id


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between two conversations."""

    message: int
    """Number of equal messages, which is the index of the first difference; one of the two may have
    ended."""
    character: int
    """Number of equal characters of that message; 0 for another role, or if one of the two has
    ended."""
    timeline: int | None = None
    """Timeline of the message in the second conversation; None without token ids."""
    token: int | None = None
    """Number of equal tokens of that timeline."""


def align(reference: ComparedAttempt, attempt: ComparedAttempt) -> Divergence | None:
    """Find the first difference from a reference; None if there is none."""
    a = reference.messages
    b = attempt.messages
    # the same message is another call's in each episode
    same = common_start([message.content for message in a], [message.content for message in b])
    if same == len(a) == len(b):
        return None
    character = 0
    if same < min(len(a), len(b)) and (a[same].role, a[same].agent) == (
        b[same].role,
        b[same].agent,
    ):
        character = common_start(a[same].text, b[same].text)
    before = _home(reference, same)
    timeline = _home(attempt, same)
    token = None
    if before is not None and timeline is not None:
        token = common_prefix(reference.timelines[before], attempt.timelines[timeline])
    return Divergence(same, character, timeline, token)


def _home(attempt: ComparedAttempt, message: int) -> int | None:
    """Return the timeline of a message, or of the last one if the conversation has ended before."""
    if not attempt.messages:
        return None
    return attempt.homes.get(attempt.messages[min(message, len(attempt.messages) - 1)].call_id)


_Floats = npt.NDArray[np.float32]


def read_attempts(reader: TraceReader, episode_ids: Sequence[str]) -> list[ComparedAttempt]:
    """Read episodes to compare, in the given order. Raises QueryError for an unknown episode."""
    records = known_records(reader, episode_ids)
    unknown = [r.episode.episode_id for r in records if _trained(r) and not r.trained]
    recomputed = {}
    if unknown:
        recomputed = recomputed_advantages(reader, *unknown)
    return [attempt_of(record, recomputed) for record in records]


def attempt_of(record: Record, recomputed: Mapping[str, _Floats] | None = None) -> ComparedAttempt:
    """Prepare an episode for comparison; `recomputed` has advantages by call, used if none are
    recorded."""
    episode = record.episode
    tokens = episode_tokens(record)
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
        timelines=tuple(
            keyed(timeline.token_ids, timeline.pictures) for timeline in tokens.merged.timelines
        ),
        homes=dict(tokens.homes),
    )


def compared_messages(calls: Sequence[Call]) -> tuple[ComparedMessage, ...]:
    """Return the conversation of an episode without repetitions; agents are interleaved in the
    order of their calls."""
    by_agent = grouped((call for call in calls if call.phase == "rollout"), lambda call: call.agent)
    position = {call.call_id: i for i, call in enumerate(calls)}
    messages: list[ComparedMessage] = []
    for agent, agent_calls in by_agent.items():
        for message in conversation(agent_calls):
            messages.append(ComparedMessage(message.role, agent, message.text, message.call_id))
    return tuple(sorted(messages, key=lambda message: position[message.call_id]))


def _trained(record: Record) -> int:
    return sum(entry.tokens for entry in record.ledger if entry.outcome == "trained")


Kind = Literal["role", "same", "differs", "after", "left out"]
"""Part of a line: role of the speaker, text shared with the reference, the first different word,
text after it, or a remark about omitted text."""

Cell = list[tuple[str, Kind]]
"""A line of a column."""

_WORDS = re.compile(r"\S{1,64}[^\S\n]*|[^\S\n]+|\n")
_WORD = re.compile(r"\s*\S{0,24}")
_ALIKE = 1500
_AFTER = 4000
"""Characters shown at each end of shared text, and after the first difference."""


@dataclass(frozen=True, eq=False)
class SideBySide:
    """Two conversations in columns."""

    lines: Sequence[tuple[Cell, Cell]]
    first_difference: int | None
    """Line of the first difference."""


def side_by_side(reference: ComparedAttempt, attempt: ComparedAttempt, width: int) -> SideBySide:
    """Lay out two attempts in columns of `width` cells."""
    divergence = align(reference, attempt)
    lines: list[tuple[Cell, Cell]] = []
    first_difference = None
    for number in range(max(len(reference.messages), len(attempt.messages))):
        left = _message(reference.messages, number, divergence, width)
        right = _message(attempt.messages, number, divergence, width)
        for line in range(max(len(left), len(right)) + 1):
            cells = (_at(left, line), _at(right, line))
            differs = any(kind == "differs" for _, kind in chain(*cells))
            if differs and first_difference is None:
                first_difference = len(lines)
            lines.append(cells)
    return SideBySide(lines, first_difference)


def _at(column: Sequence[Cell], line: int) -> Cell:
    return column[line] if line < len(column) else []


def _message(
    messages: Sequence[ComparedMessage], i: int, mark: Divergence | None, width: int
) -> list[Cell]:
    """Return the lines of a message in a column."""
    here = mark is not None and mark.message == i
    if i >= len(messages):
        if here:
            return [[("(ends here)", "differs")]]
        return []
    message = messages[i]
    if message.agent not in ("", "default"):
        title = f"{message.role} ({message.agent})"
    else:
        title = message.role
    labels = []
    kinds = list[Kind]()
    for text, kind in _parts(message.text, i, mark):
        for word in _WORDS.findall(shown(text).replace("\t", "    ")):
            labels.append(word)
            kinds.append(kind)
    lines: list[Cell] = []
    is_marked = False
    for line in lay_out(labels, width).lines:
        lines.append([(text, kinds[word]) for word, text, _ in line])
        is_marked = is_marked or any(kinds[word] == "differs" for word, _, _ in line)
    head: Cell = [(shown(title)[:width], "role")]
    if here and not is_marked:  # a line break differs, or the role
        head.append((" (differs)", "differs"))
    return [head, *lines]


def _parts(text: str, i: int, mark: Divergence | None) -> Iterator[tuple[str, Kind]]:
    """Split the text of a message into parts, and shorten long ones."""
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
