"""Joins the streamed parts of a response from another server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from ajet_sdk.types import Json, JsonView

FINAL = ("response.completed", "response.incomplete", "response.failed")
"""The last event of a stream of OpenAI's Responses."""
CUT = "the stream ended before the reply did"


def join_events(text: str) -> Json:
    """Join a stream of server-sent events to a response, as far as it was received.

    Completions, Anthropic's messages and Gemini's candidates are joined; OpenAI's Responses send the whole response in
    the last event. `stream_error` is set if the stream broke off or an event is not JSON.
    """
    events, broken, done = list[Json](), "", False
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
    if any("candidates" in part for part in parts):
        return _candidates(parts)
    if any(part.get("type") == "message_start" for part in parts):
        return _message(parts)
    if any("choices" in part for part in parts):
        return _completion(parts, done)
    error = next(
        (part.get("error") or part for part in parts if part.get("error") or part.get("type") == "error"), None
    )
    return {"events": parts, **({"error": error} if error is not None else {"stream_error": CUT})}


def _data(text: str) -> Iterator[str]:
    """The data of each event, its lines joined."""
    lines = list[str]()
    for line in [*text.splitlines(), ""]:
        if line.startswith("data:"):
            lines.append(line[5:].removeprefix(" "))
        elif not line and lines:
            if data := "\n".join(lines).strip():
                yield data
            lines = []


def _completion(events: list[Json], done: bool) -> Json:
    response: Json = {}
    choices: dict[int, Json] = {}
    for chunk in events:
        response.update({k: v for k, v in chunk.items() if k != "choices" and v is not None})
        for part in _objects(chunk.get("choices")):
            choice = choices.setdefault(part.get("index", 0), {"index": part.get("index", 0), "finish_reason": None})
            for name in ("finish_reason", "error"):
                if part.get(name):
                    choice[name] = part[name]
            if "delta" in part:
                _extend(choice.setdefault("message", {"role": "assistant", "content": None}), part["delta"] or {})
            elif "text" in part:
                choice["text"] = choice.get("text", "") + (part["text"] or "")
    if response.get("object") == "chat.completion.chunk":
        response["object"] = "chat.completion"
    if not done and any(choice["finish_reason"] is None for choice in choices.values()):
        response["stream_error"] = CUT
    return {**response, "choices": [choices[index] for index in sorted(choices)]}


def _extend(message: Json, delta: JsonView) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for part in _objects(value):
                while len(calls) <= part.get("index", 0):
                    calls.append({"id": None, "type": "function", "function": {"name": None, "arguments": ""}})
                call, function = calls[part.get("index", 0)], part.get("function") or {}
                call["id"] = part.get("id") or call["id"]
                if function.get("name"):
                    call["function"]["name"] = (call["function"]["name"] or "") + function["name"]
                call["function"]["arguments"] += function.get("arguments") or ""
        elif key == "role":
            message["role"] = value or message["role"]
        elif isinstance(value, str):
            message[key] = (message.get(key) or "") + value


_GROWS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


def _message(events: list[Json]) -> Json:
    """Anthropic's message."""
    message: Json = {"stop_reason": None}
    blocks: dict[int, Json] = {}
    for event in events:
        kind, delta = event.get("type"), event.get("delta") or {}
        block = blocks.setdefault(event["index"], {}) if isinstance(event.get("index"), int) else {}
        if kind == "message_start":
            message |= event.get("message") or {}
        elif kind == "content_block_start":
            block |= event.get("content_block") or {}
        elif kind == "content_block_delta" and (name := _GROWS.get(str(delta.get("type")))):
            block[name] = (block.get(name) or "") + (delta.get(name) or "")
        elif kind == "content_block_delta" and delta.get("type") == "input_json_delta":
            block["partial_json"] = block.get("partial_json", "") + (delta.get("partial_json") or "")
        elif kind == "message_delta":
            message |= delta
            message["usage"] = {**(message.get("usage") or {}), **(event.get("usage") or {})}
        elif kind == "error":
            message["error"] = event.get("error") or event
    for block in blocks.values():
        if spelt := block.pop("partial_json", ""):
            try:
                block["input"] = json.loads(spelt)
            except ValueError:
                block["input"] = spelt
    if message["stop_reason"] is None and "error" not in message:
        message["stream_error"] = CUT
    return {**message, "content": [blocks[index] for index in sorted(blocks)]}


def _candidates(chunks: list[Json]) -> Json:
    """Gemini's response."""
    response: Json = {}
    candidates: dict[int, Json] = {}
    for chunk in chunks:
        response |= {name: value for name, value in chunk.items() if name != "candidates"}
        for part in _objects(chunk.get("candidates")):
            candidate = candidates.setdefault(part.get("index") or 0, {})
            before = (candidate.get("content") or {}).get("parts") or []
            candidate |= part
            content = part.get("content") or {}
            candidate["content"] = {"role": "model", **content, "parts": [*before, *(content.get("parts") or [])]}
    if not all(candidate.get("finishReason") for candidate in candidates.values()):
        response["stream_error"] = CUT
    return {**response, "candidates": [candidates[index] for index in sorted(candidates)]}


def _objects(value: object) -> list[JsonView]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
