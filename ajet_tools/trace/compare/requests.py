"""Requests of two runs of a workflow: which are the same, which differ and where, which are missing or extra.

Requests are matched by what they ask and not by their order alone, so that parallel calls may end in any order.
"""

from __future__ import annotations

import difflib
import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from ajet_sdk.engines.retokenize import by_request
from ajet_sdk.samples.prefixes import common_start
from ajet_sdk.types import Call
from ajet_tools.text.clean import message_text

_Message = Mapping[str, object]
Kind = Literal["changed", "missing", "extra"]

_CONTEXT = 2
_MOST_LINES = 400
"""Lines of a request that are compared one by one, once what is alike at both ends is gone."""
_WIDTH = 200
_LONG = 20_000
"""Characters of a text that is shown whole."""
_SPELLED_APART = {"role", "content", "tool_calls", "reasoning_content", "reasoning"}


@dataclass(frozen=True, eq=False)
class Asked:
    """One request of an agent, and the calls (one for each choice) that answered it."""

    agent: str
    body: Mapping[str, object]
    calls: tuple[Call, ...]

    @property
    def content(self) -> str:
        """The request's content, whatever its agent."""
        return _json(self.body)


@dataclass(frozen=True)
class Difference:
    """A request that is not the same in both runs."""

    kind: Kind
    agent: str
    position: int
    """Its place, from 0: among the recorded requests, or for an extra one among those of the replay."""
    parts: tuple[str, ...]
    """What differs: `messages`, `prompt`, `tools`, `agent`, or a parameter's name."""
    lines: tuple[str, ...]
    """A diff, `-` as recorded and `+` as asked now."""
    call_id: str | None
    """The recorded call; None for an extra one."""


def requests_of(calls: Iterable[Call]) -> list[Asked]:
    """The requests that a workflow made, in the order in which they began; a judge's are left out."""
    return [Asked(choices[0].agent, choices[0].request, choices) for choices in by_request(calls)]


def compare(recorded: Sequence[Asked], asked: Sequence[Asked]) -> list[Difference]:
    """Everything that differs, in the order of the recording; empty where both make the same requests."""
    pairs, missing, extra = _paired(recorded, asked)
    differences = [_changed(i, recorded[i], asked[j]) for i, j in pairs]
    differences += [_alone("missing", i, recorded[i]) for i in missing]
    differences += [_alone("extra", j, asked[j]) for j in extra]
    return sorted(differences, key=lambda difference: difference.position)


def likeness(a: Mapping[str, object], b: Mapping[str, object]) -> tuple[int, int, int]:
    """How alike two requests are: messages in common from the start, from the end, and equal parameters."""
    mine, theirs = _messages(a), _messages(b)
    head = common_start(mine, theirs)
    tail = common_start(mine[head:][::-1], theirs[head:][::-1])
    return head, tail, sum(a[name] == b.get(name) for name in a if name != "messages")


def message_diff(a: Mapping[str, object], b: Mapping[str, object]) -> list[str]:
    """Two messages line by line, `-` as in the first and `+` as in the second."""
    sides = _short_messages(a, b)
    lines = [_message_lines(side) for side in sides]
    return _diff(*lines) or _diff(*map(_indented, sides))


def _paired(recorded: Sequence[Asked], asked: Sequence[Asked]) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Pairs that differ, and what stands alone on either side: equal requests first, then the most alike of an agent,
    then equal requests of other agents."""
    left, right = set(range(len(recorded))), set(range(len(asked)))
    places: dict[tuple[str, str], deque[int]] = defaultdict(deque)
    for i, request in enumerate(recorded):
        places[request.agent, request.content].append(i)
    for j, request in enumerate(asked):
        if matches := places[request.agent, request.content]:
            left.discard(matches.popleft())
            right.discard(j)
    pairs = []
    for j in sorted(right):
        same = [i for i in left if recorded[i].agent != asked[j].agent and recorded[i].content == asked[j].content]
        same_agent = [i for i in left if recorded[i].agent == asked[j].agent]
        if same_agent or same:
            best = max(same_agent or same, key=lambda i: (likeness(recorded[i].body, asked[j].body), -i))
            pairs.append((best, j))
            left.discard(best)
            right.discard(j)
    return pairs, sorted(left), sorted(right)


def _changed(position: int, recorded: Asked, asked: Asked) -> Difference:
    names = [name for name in {**recorded.body, **asked.body} if recorded.body.get(name) != asked.body.get(name)]
    parts = (["agent"] if recorded.agent != asked.agent else []) + names
    bodies = _shortened(recorded.body, asked.body)
    before, after = (
        [f"agent: {request.agent}", *_spelled(body)] for request, body in zip((recorded, asked), bodies, strict=True)
    )
    lines = _diff(before, after) or _diff(*map(_indented, bodies))
    return Difference("changed", recorded.agent, position, tuple(parts), tuple(lines), recorded.calls[0].call_id)


def _alone(kind: Kind, position: int, asked: Asked) -> Difference:
    sign = "-" if kind == "missing" else "+"
    body, _ = _shortened(asked.body, {})
    lines = [f"{sign}{line}" for line in _spelled(body)[-_MOST_LINES:]]
    call_id = asked.calls[0].call_id if kind == "missing" else None
    return Difference(kind, asked.agent, position, (), tuple(lines), call_id)


def _shortened(a: Mapping[str, object], b: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """The requests, with long texts cut to the surroundings of their first difference."""
    short_a, short_b = dict(a), dict(b)
    mine, theirs = a.get("messages"), b.get("messages")
    if isinstance(mine, list):
        counterparts = theirs if isinstance(theirs, list) else []
        sides: Iterator[tuple[object, object]] = zip_longest(mine, counterparts, fillvalue={})
        pairs = [_short_pair(x, y) for x, y in sides]
        short_a["messages"] = [pair[0] for pair in pairs[: len(mine)]]
        if counterparts:
            short_b["messages"] = [pair[1] for pair in pairs[: len(counterparts)]]
    mine, theirs = a.get("prompt"), b.get("prompt")
    if isinstance(mine, str):
        short_a["prompt"], counterpart = _window(mine, theirs if isinstance(theirs, str) else "")
        short_b |= {"prompt": counterpart} if isinstance(theirs, str) else {}
    return short_a, short_b


def _short_pair(a: object, b: object) -> tuple[object, object]:
    return _short_messages(a, b) if isinstance(a, Mapping) and isinstance(b, Mapping) else (a, b)


def _short_messages(a: _Message, b: _Message) -> tuple[_Message, _Message]:
    """Two messages, with long texts cut to the surroundings of their first difference."""
    text_a, text_b = a.get("content"), b.get("content")
    short_a, short_b = _window(*(text if isinstance(text, str) else "" for text in (text_a, text_b)))
    return (
        {**a, "content": short_a} if isinstance(text_a, str) else a,
        {**b, "content": short_b} if isinstance(text_b, str) else b,
    )


def _window(a: str, b: str) -> tuple[str, str]:
    """Both texts, if short; else the surroundings of their first difference."""
    if max(len(a), len(b)) <= _LONG:
        return a, b
    start = max(0, common_start(a, b) - _LONG // 4)
    return _piece(a, start), _piece(b, start)


def _piece(text: str, start: int) -> str:
    end = start + _LONG // 2
    return ("…\n" if start else "") + text[start:end] + ("\n…" if len(text) > end else "")


def _messages(body: Mapping[str, object]) -> list[object]:
    messages = body.get("messages")
    return messages if isinstance(messages, list) else [body.get("prompt")]


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _indented(value: object) -> list[str]:
    return _cut(json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, default=str))


def _spelled(body: Mapping[str, object]) -> list[str]:
    """A request as lines that a person reads: parameters, tools, then messages."""
    plain = sorted(body.keys() - {"messages", "tools", "prompt"})
    lines = [f"{name}: {_json(body[name])[:_WIDTH]}" for name in plain]
    if "prompt" in body:
        prompt = body["prompt"]
        lines += ["prompt", *(f"  {line}" for line in _cut(prompt if isinstance(prompt, str) else _json(prompt)))]
    tools = body.get("tools")
    for i, tool in enumerate(tools if isinstance(tools, list) else ()):
        lines += [f"tools[{i}]", *_indented(tool)]
    for i, message in enumerate(_messages(body) if "messages" in body else ()):
        lines += _message(i, message)
    return lines


def _message(place: int, message: object) -> list[str]:
    if not isinstance(message, Mapping):
        return [f"messages[{place}]", *_cut(_json(message))]
    return [f"messages[{place}] {message.get('role', '?')}", *_message_lines(message)]


def _message_lines(message: Mapping[str, object]) -> list[str]:
    more = {name: value for name, value in message.items() if name not in _SPELLED_APART and value is not None}
    lines = [*_cut(message_text(message)), *(f"{name}: {_json(value)[:_WIDTH]}" for name, value in more.items())]
    return [f"  {line}" for line in lines]


def _cut(text: str) -> list[str]:
    """Lines of bounded length."""
    return [line[at : at + _WIDTH] for line in text.splitlines() for at in range(0, max(1, len(line)), _WIDTH)]


def _diff(before: list[str], after: list[str]) -> list[str]:
    """A unified diff with some context and without a header."""
    head = common_start(before, after)
    tail = common_start(before[head:][::-1], after[head:][::-1])
    cut, start = _MOST_LINES, max(0, head - _CONTEXT)
    old, new = (side[start : len(side) - max(0, tail - _CONTEXT)][:cut] for side in (before, after))
    lines = list(difflib.unified_diff(old, new, lineterm="", n=_CONTEXT))[2:]
    return [line if not line.startswith("@@") else "…" for line in lines][1:]
