"""Joins the streamed parts of a response from another server.

Servers differ in what the protocols leave open, and the vendors' clients accept all of it, so
nothing is lost here either: what cannot be joined is kept as it came, under `events`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ajet_sdk.types import Json, JsonView

FINAL = ("response.completed", "response.incomplete", "response.failed")
"""The last event of a stream of OpenAI's Responses."""
CUT = "the stream ended before the reply did"
_LINE_END = re.compile(r"\r\n|\n|\r")
"""Of server-sent events. `str.splitlines` also splits at characters that JSON texts may have, such
as U+2028."""
_WHOLE = frozenset(("id", "type", "role", "format", "expires_at"))
"""Fields of a delta whose value is sent at once, maybe repeatedly."""

_JOINABLE = frozenset(("type", "text", "thinking", "index", "format", "id"))
"""Fields of a part of text that comes in pieces."""


def join_events(text: str) -> Json:
    """Join a stream of server-sent events to a response, as far as it was received.

    Completions, Anthropic's messages and Gemini's candidates are joined; OpenAI's Responses send
    the whole response in the last event. `stream_error` is set if the stream broke off or an event
    is not JSON.
    """
    events = list[Json]()
    broken = ""
    done = False
    for data in _data(text):
        if data == "[DONE]":
            done = True
            continue
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            broken = f"an event is not JSON: {data[:100]}"
            continue
        if isinstance(event, dict):
            events.append(event)
    response = join_parts(events, done=done)
    if broken and response.get("stream_error") != CUT:
        response["stream_error"] = broken
    return response


def join_parts(parts: list[Json], *, done: bool = False) -> Json:
    """Join the parts of a stream. `done`: the stream sent its end mark."""
    final = [part["response"] for part in parts if part.get("type") in FINAL and "response" in part]
    if final:
        return dict(final[-1])
    if any("candidates" in part or "promptFeedback" in part for part in parts):
        return _candidates(parts)
    if any(part.get("type") == "message_start" for part in parts):
        return _message(parts)
    if any("choices" in part for part in parts):
        return _completion(parts, done)
    error = next(
        (
            part.get("error") or part
            for part in parts
            if part.get("error") or part.get("type") == "error"
        ),
        None,
    )
    return {"events": parts, **({"error": error} if error is not None else {"stream_error": CUT})}


def _data(text: str) -> Iterator[str]:
    """The data of each event, its lines joined."""
    lines = list[str]()
    for line in [*_LINE_END.split(text.removeprefix("\ufeff")), ""]:
        if line.startswith("data:"):
            lines.append(line[5:].removeprefix(" "))
        elif not line and lines:
            if data := "\n".join(lines).strip(" \t"):
                yield data
            lines = []


# Chat completions and completions


def _completion(events: list[Json], done: bool) -> Json:
    response: Json = {}
    choices: dict[int, _Choice] = {}
    for chunk in events:
        response.update({k: v for k, v in chunk.items() if k != "choices" and v is not None})
        for part in _objects(chunk.get("choices")):
            index = _index(part) or 0
            choices.setdefault(index, _Choice(index)).add(part)
    if response.get("object") == "chat.completion.chunk":
        response["object"] = "chat.completion"
    joined = [choices[index].joined() for index in sorted(choices)]
    if not done and any(choice["finish_reason"] is None for choice in joined):
        response["stream_error"] = CUT
    return {**response, "choices": joined}


class _Choice:
    """A choice of a completion, as far as its chunks have come."""

    def __init__(self, index: int) -> None:
        self._fields: Json = {"index": index, "finish_reason": None}
        self._message: Json | None = None
        self._tool_calls = _ToolCalls()

    def add(self, part: JsonView) -> None:
        """Add the choice of one chunk."""
        for name, value in part.items():
            if name == "delta":
                self._extend(value if isinstance(value, Mapping) else {})
            elif name == "text":
                self._fields["text"] = self._fields.get("text", "") + (value or "")
            elif name in ("logprobs", "token_ids"):
                self._fields[name] = _merged(self._fields.get(name), value)
            elif name != "index" and value is not None and value != "":
                self._fields[name] = value

    def joined(self) -> Json:
        """The choice of the whole response."""
        message = self._message
        if message is None:
            return self._fields
        if calls := self._tool_calls.joined():
            message = {**message, "tool_calls": calls}
        return {**self._fields, "message": message}

    def _extend(self, delta: JsonView) -> None:
        if self._message is None:
            self._message = {"role": "assistant", "content": None}
        for name, value in delta.items():
            if name == "tool_calls":
                self._tool_calls.add(_objects(value))
            elif name == "role":
                self._message["role"] = value or self._message["role"]
            elif isinstance(value, Mapping) and name not in ("audio", "function_call"):
                self._message[name] = {**(self._message.get(name) or {}), **value}
            elif value is not None:
                self._message[name] = _merged(self._message.get(name), value, name)


class _ToolCalls:
    """The tool calls of a message.

    A piece continues the call of its index. Some servers number all parallel calls alike, or none,
    so that a new id, or a name after complete arguments, begins another call.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[int | None, Json]] = []

    def add(self, pieces: list[JsonView]) -> None:
        """Add the pieces of one chunk."""
        extended = list[Json]()
        for piece in pieces:
            index = _index(piece)
            kind = "custom" if "custom" in piece else "function"
            body = piece.get(kind) or {}
            call = self._continued(index, piece, body, extended)
            if call is None:
                call = {"id": None, "type": kind, kind: {"name": None}}
                self._calls.append((index, call))
            extended.append(call)
            _extend_call(call, piece, kind, body)

    def joined(self) -> list[Json]:
        """The calls in the order of their indices, those without one behind."""
        for _, call in self._calls:
            if call["type"] == "function":
                call["function"].setdefault("arguments", "")
        ordered = sorted(self._calls, key=lambda item: (item[0] is None, item[0] or 0))
        return [call for _, call in ordered]

    def _continued(
        self, index: int | None, piece: JsonView, body: JsonView, extended: list[Json]
    ) -> Json | None:
        """The call that a piece continues; None: it begins one."""
        alike = [call for number, call in self._calls if number == index]
        if piece.get("id"):
            named = [call for call in alike if call["id"] == piece.get("id")]
        else:
            named = []
        if named:
            alike = named
        elif piece.get("id") and alike and alike[-1]["id"] is not None:
            return None
        if not alike:
            return None
        call = alike[-1]
        if body.get("name"):
            in_this_chunk = any(call is other for other in extended)
            if in_this_chunk or _is_complete(call):
                return None
        return call


def _extend_call(call: Json, piece: JsonView, kind: str, body: JsonView) -> None:
    for name, value in piece.items():
        if name not in ("index", kind) and value:
            call[name] = value
    function = call.setdefault(kind, {"name": None})
    for name, value in body.items():
        if value is None or (name == "name" and value == function.get("name")):
            continue  # some servers repeat the name in each piece
        if name == "arguments" and isinstance(value, Mapping):
            value = json.dumps(value, ensure_ascii=False)
        function[name] = _merged(function.get(name), value)


def _is_complete(call: Json) -> bool:
    """Whether the arguments of a call are a whole JSON object."""
    arguments = (call.get("function") or {}).get("arguments")
    if not arguments:
        return False
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _merged(before: Any, piece: Any, name: str = "") -> Any:
    """A value of a delta, joined to what came before it."""
    if before is None or piece is None:
        return before if piece is None else piece
    if isinstance(before, str) and isinstance(piece, str):
        return piece if name in _WHOLE else before + piece
    if isinstance(before, Mapping) and isinstance(piece, Mapping):
        return {
            **before,
            **{key: _merged(before.get(key), value, key) for key, value in piece.items()},
        }
    if isinstance(before, list) or isinstance(piece, list):
        return _joined_lists(_as_list(before), _as_list(piece))
    return piece


def _as_list(value: object) -> list[Any]:
    if isinstance(value, list):
        return value
    return (
        [{"type": "text", "text": value}] if value else []
    )  # a message whose content is text, then parts


def _joined_lists(before: list[Any], piece: list[Any]) -> list[Any]:
    """Joins two lists. A part of text that continues the last part is joined to it."""
    joined = list(before)
    for item in piece:
        if joined and _continues(joined[-1], item):
            joined[-1] = _merged(joined[-1], item)
        else:
            joined.append(item)
    return joined


def _continues(before: object, item: object) -> bool:
    if not isinstance(before, Mapping) or not isinstance(item, Mapping):
        return False
    if not before.get("type") or (before.keys() | item.keys()) - _JOINABLE:
        return False
    return all(before.get(name) == item.get(name) for name in ("type", "index", "format", "id"))


# Anthropic's messages

_GROWS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
_KNOWN = frozenset(
    (
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    )
)


def _message(events: list[Json]) -> Json:
    message: Json = {"stop_reason": None}
    blocks: dict[int, Json] = {}
    unknown = list[Json]()
    latest = 0
    for event in events:
        kind = event.get("type")
        delta = event.get("delta") or {}
        index = _index(event)
        latest = latest if index is None else index
        if kind == "message_start":
            message |= event.get("message") or {}
        elif kind == "content_block_start":
            blocks.setdefault(latest, {}).update(event.get("content_block") or {})
        elif kind == "content_block_delta":
            if not _extend_block(blocks.setdefault(latest, {}), delta):
                unknown.append(event)
        elif kind == "message_delta":
            message |= delta
            message["usage"] = {**(message.get("usage") or {}), **(event.get("usage") or {})}
        elif kind == "error":
            message["error"] = event.get("error") or event
        elif kind not in _KNOWN:
            unknown.append(event)
    for block in blocks.values():
        if spelt := block.pop("partial_json", ""):
            try:
                block["input"] = json.loads(spelt)
            except (ValueError, RecursionError):
                block["input"] = spelt
    if message["stop_reason"] is None and "error" not in message:
        message["stream_error"] = CUT
    if unknown:
        message["events"] = unknown
    return {**message, "content": [blocks[index] for index in sorted(blocks)]}


def _extend_block(block: Json, delta: JsonView) -> bool:
    """Add a delta to its block; False: of a kind that is not known here."""
    kind = str(delta.get("type"))
    if name := _GROWS.get(kind):
        block[name] = (block.get(name) or "") + (delta.get(name) or "")
    elif kind == "input_json_delta":
        block["partial_json"] = block.get("partial_json", "") + (delta.get("partial_json") or "")
    elif kind == "citations_delta":
        block["citations"] = [*(block.get("citations") or []), delta.get("citation")]
    else:
        return False
    return True


# Gemini's candidates


def _candidates(chunks: list[Json]) -> Json:
    response: Json = {}
    candidates: dict[int, Json] = {}
    for chunk in chunks:
        response |= {name: value for name, value in chunk.items() if name != "candidates"}
        for part in _objects(chunk.get("candidates")):
            candidate = candidates.setdefault(_index(part) or 0, {})
            before = (candidate.get("content") or {}).get("parts") or []
            candidate |= part
            content = part.get("content") or {}
            candidate["content"] = {
                "role": "model",
                **content,
                "parts": [*before, *(content.get("parts") or [])],
            }
    if not all(candidate.get("finishReason") for candidate in candidates.values()):
        response["stream_error"] = CUT
    return {**response, "candidates": [candidates[index] for index in sorted(candidates)]}


def _index(value: JsonView) -> int | None:
    index = value.get("index")
    return index if isinstance(index, int) else None


def _objects(value: object) -> list[JsonView]:
    if isinstance(value, list):
        return [item for item in value if isinstance(item, Mapping)]
    return []
