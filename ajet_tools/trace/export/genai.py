"""OpenTelemetry's GenAI attributes: the one place that knows their names, here as of semantic conventions 1.38.

https://opentelemetry.io/docs/specs/semconv/gen-ai/ : messages are JSON texts in `gen_ai.input.messages` and
`gen_ai.output.messages`, each with a role and parts. What a part cannot say (a client's own keys, pictures) goes into
a part of type `ajet.message` that has the message as it was, so that nothing is lost on the way back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from ajet_sdk.types import Call

__all__ = ["SEMCONV", "any_value", "call_attributes", "from_message", "nanos", "to_message"]

SEMCONV = "1.38.0"
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_WHOLE = "ajet.message"

_REQUEST = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "stop": "gen_ai.request.stop_sequences",
}


def nanos(at: datetime) -> str:
    """A time as OTLP JSON writes it: nanoseconds since 1970, a text."""
    return str((at - _EPOCH) // timedelta(microseconds=1) * 1000)


def any_value(value: Any) -> dict[str, Any]:
    """A value as OTLP JSON's AnyValue; objects go as JSON text, for few tools show nested ones."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list | tuple):
        return {"arrayValue": {"values": [any_value(v) for v in value]}}
    if isinstance(value, Mapping):
        return {"stringValue": json.dumps(value, ensure_ascii=False)}
    return {"stringValue": str(value)}


def call_attributes(
    call: Call, messages: Sequence[Mapping[str, Any]] | None, reply: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The GenAI attributes of a call."""
    usage = call.response.get("usage") or {}
    prompt = usage.get("prompt_tokens", None if call.prompt_ids is None else len(call.prompt_ids))
    output = usage.get("completion_tokens", None if call.output_ids is None else len(call.output_ids))
    found: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "ajet",
        "gen_ai.conversation.id": call.episode_id,
        "gen_ai.agent.name": call.agent,
        "gen_ai.request.model": call.request.get("model") or call.model or None,
        "gen_ai.response.model": call.response.get("model") or call.model or None,
        "gen_ai.response.id": call.response.get("id"),
        "gen_ai.response.finish_reasons": [call.finish_reason] if call.finish_reason else None,
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": output,
        "error.type": call.error,
    }
    used = {**call.request, **call.sampling}
    found |= {name: used.get(key) for key, name in _REQUEST.items()}
    if messages is not None:
        found["gen_ai.input.messages"] = _json([from_message(m) for m in messages])
    if reply is not None:
        said = {**from_message(reply), "finish_reason": call.finish_reason or ""}
        found["gen_ai.output.messages"] = _json([said])
    tools = call.request.get("tools")
    if tools:
        found["gen_ai.tool.definitions"] = _json(tools)
    return {name: value for name, value in found.items() if value is not None and value != []}


def from_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A chat message as role and parts."""
    role = str(message.get("role", ""))
    parts: list[dict[str, Any]] = []
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str):
        parts.append({"type": "reasoning", "content": reasoning})
    content = message.get("content")
    if role == "tool":
        parts.append({"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content})
    elif isinstance(content, str):
        parts.append({"type": "text", "content": content})
    calls = message.get("tool_calls")
    parts += [_tool_part(call) for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    made: dict[str, Any] = {"role": role, "parts": parts}
    if isinstance(message.get("name"), str):
        made["name"] = message["name"]
    if to_message(made) != message:
        parts.append({"type": _WHOLE, "message": message})
    return made


def _tool_part(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call.get("function"), Mapping) else {}
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict) and json.dumps(parsed, ensure_ascii=False) == arguments:
            arguments = parsed
    name = function.get("name") if isinstance(function, Mapping) else None
    return {"type": "tool_call", "id": call.get("id"), "name": name, "arguments": arguments}


def to_message(made: Mapping[str, Any]) -> dict[str, Any]:
    """Role and parts as a chat message: the inverse of `from_message`, and good for what other tools write."""
    parts = [part for part in made.get("parts") or () if isinstance(part, Mapping)]
    for part in parts:
        if part.get("type") == _WHOLE and isinstance(part.get("message"), dict):
            whole: dict[str, Any] = part["message"]
            return whole
    message: dict[str, Any] = {"role": made.get("role", ""), "content": None}
    texts = [part.get("content") for part in parts if part.get("type") == "text"]
    others = [part for part in parts if part.get("type") not in _KNOWN]
    if others:
        message["content"] = [_content_part(part) for part in parts if part.get("type") not in _STRUCTURED]
    elif texts:
        message["content"] = texts[0] if len(texts) == 1 else "\n".join(str(text) for text in texts)
    for part in parts:
        kind = part.get("type")
        if kind == "reasoning":
            message["reasoning_content"] = part.get("content")
        elif kind == "tool_call":
            message.setdefault("tool_calls", []).append(_tool_call(part))
        elif kind == "tool_call_response":
            message |= {"tool_call_id": part.get("id"), "content": _response(part)}
    if isinstance(made.get("name"), str):
        message["name"] = made["name"]
    return message


_STRUCTURED = ("reasoning", "tool_call", "tool_call_response")
_KNOWN = ("text", *_STRUCTURED)


def _content_part(part: Mapping[str, Any]) -> Any:
    return {"type": "text", "text": part.get("content")} if part.get("type") == "text" else dict(part)


def _tool_call(part: Mapping[str, Any]) -> dict[str, Any]:
    arguments = part.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": part.get("id"), "type": "function", "function": {"name": part.get("name"), "arguments": text}}


def _response(part: Mapping[str, Any]) -> Any:
    """What a tool answered; 1.37 has `response`, earlier drafts `result`."""
    response = part.get("response", part.get("result"))
    return (
        response if response is None or isinstance(response, str | list) else json.dumps(response, ensure_ascii=False)
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
