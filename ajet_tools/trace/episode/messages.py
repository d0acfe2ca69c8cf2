"""Extracts the conversation of a chain of calls: each message once, in order of appearance."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import is_

from ajet_sdk.dialects.message_parts import (
    MessageParts,
    lay_out,
    parts_of,
    reply_messages,
    request_messages,
)
from ajet_sdk.types import Call

CUT = 12_000
"""Characters of a message shown outside the full view."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Message(MessageParts):
    """A message of a conversation; `answers` is the name of the tool, if known."""

    key: str
    """Stable while the episode grows."""
    call_id: str
    """The first call with the message in its request or reply."""
    is_reply: bool
    name: str
    note: str
    """Remark before the message about a changed history."""
    raw: object
    """The original message."""


def conversation(chain: Sequence[Call]) -> tuple[Message, ...]:
    """Return the messages of calls that extend each other, oldest first.

    A request contributes only new messages; if it omits or changes earlier ones, the first new
    message (or the reply) has a note.
    """
    messages: list[Message] = []
    marks: list[int] = []
    names: dict[str, str] = {}
    known: list[int] = []
    before: list[object] = []
    fingerprints = Fingerprints()
    for call in chain:
        raws = request_messages(call.request)
        same = 0
        if len(before) <= len(raws) and all(map(is_, before, raws)):
            same = len(before)
        rest = known[same:]  # messages that are identical objects need no comparison
        view, fresh = _match(
            [marks[i] for i in rest],
            rest,
            [fingerprints.of(raw) for raw in raws[same:]],
            len(messages),
        )
        view = [*known[:same], *view]
        if call.request.get("previous_response_id"):  # the server has the earlier messages
            view = list(dict.fromkeys([*known, *view]))
        note = _note(known, view) if known else ""
        for n in fresh:
            raw = raws[same + n]
            messages.append(
                _read(raw, f"{call.call_id}/{same + n}", call.call_id, False, "", names, note)
            )
            marks.append(fingerprints.of(raw))
            note = ""
        for n, raw in enumerate(replies(call)):
            view.append(len(messages))
            messages.append(
                _read(raw, f"{call.call_id}/reply{n}", call.call_id, True, call.agent, names, note)
            )
            marks.append(fingerprints.of(raw))
            note = ""
        known = view
        if call.request.get("previous_response_id"):
            before = []
        else:
            before = raws
    return tuple(messages)


class Fingerprints:
    """Cache of fingerprints by object identity: requests of an episode share their messages."""

    def __init__(self) -> None:
        self._by_object: dict[int, tuple[object, int]] = {}

    def of(self, raw: object) -> int:
        entry = self._by_object.get(id(raw))
        if entry is None:
            entry = self._by_object[id(raw)] = (raw, hash(fingerprint(raw)))
        return entry[1]


def _match(
    marks: Sequence[int], known: Sequence[int], request_marks: Sequence[int], size: int
) -> tuple[list[int], list[int]]:
    """Match the messages of a request with known ones, in order; others are new, numbered from
    `size`.

    Returns the positions of all messages, and the indices of the new ones in the request.
    """
    positions: dict[int, list[int]] = {}
    for n, mark in enumerate(marks):
        positions.setdefault(mark, []).append(n)
    view = list[int]()
    fresh = list[int]()
    last = -1
    for n, mark in enumerate(request_marks):
        later = next((position for position in positions.get(mark, ()) if position > last), None)
        if later is not None:
            last = later
            view.append(known[later])
        else:
            view.append(size + len(fresh))
            fresh.append(n)
    return view, fresh


def _note(known: Sequence[int], view: Sequence[int]) -> str:
    """Describe changes of the history."""
    missing = len(set(known).difference(view))
    if missing:
        return (
            f"from here on, {missing} earlier {'message is' if missing == 1 else 'messages are'}"
            " missing or changed"
        )
    moved = any(before > after for before, after in pairwise(view))
    if moved:
        return "inserted before messages that had already been sent"
    return ""


def replies(call: Call) -> list[object]:
    """Return the messages of a reply."""
    return reply_messages(call.response, failed=call.error is not None)


def gist(call: Call) -> str:
    """Return the beginning of a reply: its tool calls, or else its text."""
    for message in map(parts_of, replies(call)):
        tools = ", ".join(tool.name for tool in message.tool_calls)
        if tools or message.content:
            if tools:
                return f"→ {tools}"
            return message.content[:200]
    return ""


def fingerprint(raw: object) -> Hashable:
    """Return a key that is equal for equivalent messages: content as parts or string, arguments as
    string or object.

    Reasoning is ignored, as many clients drop it from the history.
    """
    if not isinstance(raw, Mapping):
        if isinstance(raw, str):
            return raw
        return json.dumps(raw, sort_keys=True, default=str)
    parsed = parts_of(raw)
    return (
        parsed.role,
        parsed.content,
        tuple((call.name, call.arguments) for call in parsed.tool_calls),
        parsed.answers,
    )


def _read(
    raw: object,
    key: str,
    call_id: str,
    is_reply: bool,
    agent: str,
    names: dict[str, str],
    note: str,
) -> Message:
    """Parse a message for display; `names` maps ids of tool calls to tools, and is updated."""
    message = parts_of(raw)
    name = None
    if isinstance(raw, Mapping) and "role" in raw:
        name = raw.get("name")
    names.update((call.id, call.name) for call in message.tool_calls if call.id)
    is_result = message.role == "tool" and message.content.lstrip()[:1] in ("{", "[")
    return Message(
        key=key,
        call_id=call_id,
        is_reply=is_reply,
        role=message.role,
        name=name if isinstance(name, str) else agent,
        content=lay_out(message.content) if is_result else message.content,
        reasoning=message.reasoning,
        tool_calls=message.tool_calls,
        answers=names.get(message.answers, message.answers),
        note=note,
        raw=raw,
    )


def cut(text: str, most: int = CUT) -> tuple[str, int]:
    """Truncate a text to `most` characters and `most // 30` lines; returns it with the number of
    omitted characters."""
    head = "\n".join(text[:most].split("\n")[: most // 30])
    return head, len(text) - len(head)
