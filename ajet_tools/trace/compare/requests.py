"""The requests that a workflow made, and two messages line by line."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ajet_sdk.engines.retokenize import by_request
from ajet_sdk.samples.prefixes import common_start
from ajet_sdk.types import Call
from ajet_tools.text.clean import message_text

_Message = Mapping[str, object]
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


def requests_of(calls: Iterable[Call]) -> list[Asked]:
    """The requests that a workflow made, in the order in which they began; a judge's are left out."""
    return [Asked(choices[0].agent, choices[0].request, choices) for choices in by_request(calls)]


def message_diff(a: Mapping[str, object], b: Mapping[str, object]) -> list[str]:
    """Two messages line by line, `-` as in the first and `+` as in the second."""
    sides = _short_messages(a, b)
    lines = [_message_lines(side) for side in sides]
    return _diff(*lines) or _diff(*map(_indented, sides))


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


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _indented(value: object) -> list[str]:
    return _cut(json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, default=str))


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
