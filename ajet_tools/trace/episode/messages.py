"""The conversation along some calls: each message once, in the order in which it was first said."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import is_

from ajet_sdk.dialects.message_parts import MessageParts, lay_out, parts_of, reply_messages, request_messages
from ajet_sdk.types import Call

CUT = 12_000
"""Characters of a message that are shown before it is opened whole."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Message(MessageParts):
    """One message of a conversation; `answers` is a tool's name where it is known."""

    key: str
    """Stays the same while the episode grows."""
    call_id: str
    """The call whose request it first stands in, or whose reply it is."""
    is_reply: bool
    name: str
    note: str
    """Said before the message, where the history it stands in is not what was said before."""
    raw: object
    """As it was sent."""


def conversation(chain: Sequence[Call]) -> tuple[Message, ...]:
    """The messages along calls that go on from each other, oldest first.

    Of each request only the messages that were not said before it are new; where a request leaves out or changes what
    was said, the first new message (or the reply) carries a note.
    """
    messages: list[Message] = []
    marks: list[int] = []
    names: dict[str, str] = {}
    known: list[int] = []
    before: list[object] = []
    fingerprints = Fingerprints()
    for call in chain:
        raws = request_messages(call.request)
        same = len(before) if len(before) <= len(raws) and all(map(is_, before, raws)) else 0
        rest = known[same:]  # what was asked before stands first in `known`: the very same messages are there
        view, fresh = _place(
            [marks[i] for i in rest], rest, [fingerprints.of(raw) for raw in raws[same:]], len(messages)
        )
        view, fresh = [*known[:same], *view], [(same + n, place) for n, place in fresh]
        if call.request.get("previous_response_id"):  # what was said before is known to the server and not sent again
            view = list(dict.fromkeys([*known, *view]))
        note = _note(known, view) if known else ""
        for n, _ in fresh:
            messages.append(_read(raws[n], f"{call.call_id}/{n}", call.call_id, False, "", names, note))
            marks.append(fingerprints.of(raws[n]))
            note = ""
        for n, raw in enumerate(replies(call)):
            view.append(len(messages))
            messages.append(_read(raw, f"{call.call_id}/reply{n}", call.call_id, True, call.agent, names, note))
            marks.append(fingerprints.of(raw))
            note = ""
        known, before = view, [] if call.request.get("previous_response_id") else raws
    return tuple(messages)


class Fingerprints:
    """Fingerprints, each worked out once: requests of one episode share their messages."""

    def __init__(self) -> None:
        self._by_object: dict[int, tuple[object, int]] = {}

    def of(self, raw: object) -> int:
        entry = self._by_object.get(id(raw))
        if entry is None:
            entry = self._by_object[id(raw)] = (raw, hash(fingerprint(raw)))
        return entry[1]


def _place(
    marks: Sequence[int], known: Sequence[int], request_marks: Sequence[int], size: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """Where each message of a request stands: among the known ones, in their order, else new at the end.

    Returns the positions, and of the new ones (their number in the request, their position).
    """
    places: dict[int, list[int]] = {}
    for n, mark in enumerate(marks):
        places.setdefault(mark, []).append(n)
    view, fresh, last = list[int](), list[tuple[int, int]](), -1
    for n, mark in enumerate(request_marks):
        later = next((place for place in places.get(mark, ()) if place > last), None)
        if later is not None:
            last = later
            view.append(known[later])
        else:
            view.append(size + len(fresh))
            fresh.append((n, view[-1]))
    return view, fresh


def _note(known: Sequence[int], view: Sequence[int]) -> str:
    """What became of the history, where it is not as it was said."""
    missing = len(set(known).difference(view))
    if missing:
        return f"from here on, {missing} earlier {'message is' if missing == 1 else 'messages are'} missing or changed"
    moved = any(before > after for before, after in pairwise(view))
    return "inserted before messages that had already been sent" if moved else ""


def replies(call: Call) -> list[object]:
    """The messages of a call's reply; none where nothing came."""
    return reply_messages(call.response, failed=call.error is not None)


def gist(call: Call) -> str:
    """How a call's reply begins: the tools that it asks for, else its text."""
    for message in map(parts_of, replies(call)):
        tools = ", ".join(tool.name for tool in message.tool_calls)
        if tools or message.content:
            return f"→ {tools}" if tools else message.content[:200]
    return ""


def fingerprint(raw: object) -> Hashable:
    """Equal for messages that say the same: content as parts or a string, arguments as a string or an object.

    Reasoning is left out, for many clients send a reply back without it.
    """
    if not isinstance(raw, Mapping):
        return raw if isinstance(raw, str) else json.dumps(raw, sort_keys=True, default=str)
    parsed = parts_of(raw)
    return parsed.role, parsed.content, tuple((call.name, call.arguments) for call in parsed.tool_calls), parsed.answers


def _read(raw: object, key: str, call_id: str, is_reply: bool, agent: str, names: dict[str, str], note: str) -> Message:
    """A message as it is shown; `names` are the tools asked for so far, by id."""
    message = parts_of(raw)
    name = raw.get("name") if isinstance(raw, Mapping) and "role" in raw else None
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
    """The beginning of a long text, `most` characters and a line for 30, and how many characters are left out."""
    head = "\n".join(text[:most].split("\n")[: most // 30])
    return head, len(text) - len(head)
