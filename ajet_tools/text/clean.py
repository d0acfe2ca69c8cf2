"""Model output as text without control sequences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ajet_sdk.reporting.output import visible as visible

if TYPE_CHECKING:
    from ajet_sdk.types import Episode


def kind_of(episode: Episode) -> str:
    """The split of an episode, with its decoding where that matters: train, val sampled, val greedy."""
    known = episode.split == "val" or episode.decoding == "greedy"
    return " ".join(filter(None, (episode.split, episode.decoding if known else None)))


def counted(count: int, noun: str) -> str:
    """`1 call`, `2,000 calls`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def one_line(value: object, width: int = 120) -> str:
    """A value as at most `width` visible characters on one line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = visible(" ".join(text[: 4 * width].split()))
    return text if len(text) <= width else text[: width - 1] + "…"


def flat_keys(document: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Each value of nested objects with its dotted path; an empty object is a value."""
    for name, value in document.items():
        if isinstance(value, Mapping) and value:
            yield from flat_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def message_text(message: Mapping[str, object]) -> str:
    """The text of a message, safe to print: reasoning, content (parts joined) and tool calls."""
    return visible(spoken(message))


def spoken(message: Mapping[str, object]) -> str:
    """The text of a message, unescaped."""
    parts: list[str] = []
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        parts.append(f"(reasoning) {reasoning}")
    parts.append(content_text(message.get("content")))
    for call in _list(message.get("tool_calls")):
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            arguments = function.get("arguments")
            spelled = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            parts.append(f"→ {function.get('name')}({spelled})")
    return "\n".join(part for part in parts if part)


def content_text(content: object) -> str:
    """A message's content as text: of several parts each its text, else its JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(
        part["text"]
        if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        else json.dumps(part, ensure_ascii=False, default=str)
        for part in _list(content) or [content]
    )


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()


def reply_of(response: Mapping[str, object]) -> Mapping[str, object]:
    """The message that a response holds, whatever its dialect."""
    choices = _list(response.get("choices"))
    first = choices[0] if choices and isinstance(choices[0], Mapping) else {}
    if isinstance(first.get("message"), Mapping):
        message: Mapping[str, object] = first["message"]
        return message
    if isinstance(first.get("text"), str):
        return {"role": "assistant", "content": first["text"]}
    if "content" in response:
        return {"role": "assistant", "content": response["content"]}
    if "output" in response:
        return {"role": "assistant", "content": response["output"]}
    return {"role": "assistant", "content": dict(response) if response else None}


def short_ids(ids: Sequence[str], least: int = 8) -> dict[str, str]:
    """Each id cut to the shortest length, at least `least`, at which all differ; in their order."""
    distinct = set(ids)
    longest = max(map(len, distinct), default=0)
    n = least
    while n < longest and len({i[:n] for i in distinct}) < len(distinct):
        n += 1
    return {i: i[:n] for i in ids}


_ZERO_WIDTH = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufe0e\ufe0f\ufeff"))
"""Characters of no width that join or restyle their neighbours: terminals disagree about how wide the result is."""


def drop_zero_width(text: str) -> str:
    """The text without the characters that make its width another in another terminal."""
    return text.translate(_ZERO_WIDTH)
