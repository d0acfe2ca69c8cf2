"""Extracts request and reply from the span of a model call, in several attribute conventions.

The first match wins: GenAI 1.37 and later (messages as attributes), OpenLLMetry
(`gen_ai.prompt.0.role`), OpenInference (`llm.input_messages.0.message.role`), input and output
values (Langfuse, LangSmith, LangChain).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ajet_sdk.capture.events import INPUTS, KINDS, OUTPUTS, first_of, parsed
from ajet_tools.trace.export.otlp import to_message
from ajet_tools.trace.imports.spans import Span

Message = dict[str, object]


@dataclass(frozen=True)
class Dialogue:
    """Request and reply as OpenAI messages."""

    messages: list[Message]
    reply: Message | None
    finish_reason: str | None = None
    tools: Sequence[object] | None = None


def dialogue_of(span: Span) -> Dialogue | None:
    """Extract the messages of a span, or None."""
    return _attributes(span) or _indexed(span) or _openinference(span) or _values(span)


def _attributes(span: Span) -> Dialogue | None:
    values = _first(span, "gen_ai.input.messages"), _first(span, "gen_ai.output.messages")
    asked, answered = (parsed(value) for value in values)
    if not isinstance(asked, list) and not isinstance(answered, list):
        return None
    system = parsed(_first(span, "gen_ai.system_instructions"))
    first = (
        [to_message({"role": "system", "parts": system})]
        if isinstance(system, list) and system
        else []
    )
    messages = [m for message in _objects(asked) for m in _expanded(message)]
    replies = _objects(answered)
    finish = replies[0].get("finish_reason") if replies else None
    reply = to_message(replies[0]) if replies else None
    tools = parsed(span.attributes.get("gen_ai.tool.definitions"))
    return Dialogue(
        [*first, *messages], reply, _text(finish), tools if isinstance(tools, list) else None
    )


def _first(span: Span, name: str) -> object:
    """Return an attribute of the span, or of an event
    (`gen_ai.client.inference.operation.details`)."""
    if name in span.attributes:
        return span.attributes[name]
    return next((attributes[name] for _, attributes in span.events if name in attributes), None)


def _objects(value: object) -> list[Mapping[str, object]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _expanded(message: Mapping[str, object]) -> list[Message]:
    """Convert a message; several tool results, or a result among other parts, become separate
    messages."""
    parts = _objects(message.get("parts"))
    answers = [part for part in parts if part.get("type") == "tool_call_response"]
    if not parts and "content" in message:
        return [dict(message)]  # some clients write OpenAI messages
    is_whole = any(part.get("type") == "ajet.message" for part in parts)
    if is_whole or not answers or (len(parts) == 1 and message.get("role") == "tool"):
        return [to_message(message)]
    others = [part for part in parts if part.get("type") != "tool_call_response"]
    first = [to_message({**message, "parts": others})] if others else []
    name = (
        {"name": message["name"]} if message.get("role") == "tool" and message.get("name") else {}
    )
    return [*first, *(to_message({"role": "tool", "parts": [part], **name}) for part in answers)]


def _nested_list(attributes: Mapping[str, object], name: str) -> list[dict[str, object]]:
    """Collect `name.0.a`, `name.1.a`, ... as a list of nested objects."""
    items: dict[int, dict[str, object]] = {}
    start = f"{name}."
    for key, value in attributes.items():
        number, _, subkey = key.removeprefix(start).partition(".")
        if key.startswith(start) and number.isdigit() and subkey:
            _put(items.setdefault(int(number), {}), subkey.split("."), value)
    return [items[i] for i in sorted(items)]


def _put(into: dict[str, object], path: Sequence[str], value: object) -> None:
    for step in path[:-1]:
        inner = into.setdefault(step, {})
        if not isinstance(inner, dict):
            return
        into = inner
    into[path[-1]] = value


def _indexed(span: Span) -> Dialogue | None:
    """Read OpenLLMetry's and agent-lightning's `gen_ai.prompt.0.content`,
    `gen_ai.completion.0.content`."""
    asked = _nested_list(span.attributes, "gen_ai.prompt")
    answered = _nested_list(span.attributes, "gen_ai.completion")
    if not asked and not answered:
        return None
    tools = [
        {"type": "function", "function": {**tool, "parameters": parsed(tool.get("parameters"))}}
        for tool in _nested_list(span.attributes, "llm.request.functions")
    ]
    reply = _indexed_message(answered[0], "assistant") if answered else None
    finish = _text(answered[0].get("finish_reason")) if answered else None
    return Dialogue([_indexed_message(m, "user") for m in asked], reply, finish, tools or None)


def _indexed_message(item: Mapping[str, object], role: str) -> Message:
    content = item.get("content")
    message: Message = {"role": item.get("role") or role, "content": content}
    if isinstance(item.get("tool_calls"), Mapping):
        message["tool_calls"] = [_call(call) for call in _objects(_numbered(item["tool_calls"]))]
    if item.get("tool_call_id"):
        message["tool_call_id"] = item["tool_call_id"]
    if item.get("reasoning"):
        message["reasoning_content"] = item["reasoning"]
    return message


def _call(call: Mapping[str, object]) -> dict[str, object]:
    function = _inside(call, "function") or call
    named = {"name": function.get("name"), "arguments": function.get("arguments")}
    return {"id": call.get("id"), "type": "function", "function": named}


def _openinference(span: Span) -> Dialogue | None:
    asked = [_inner(m) for m in _nested_list(span.attributes, "llm.input_messages")]
    answered = [_inner(m) for m in _nested_list(span.attributes, "llm.output_messages")]
    if not asked and not answered:
        return None
    tools = [
        parsed(_inside(tool, "tool").get("json_schema"))
        for tool in _nested_list(span.attributes, "llm.tools")
    ]
    return Dialogue(
        asked, answered[0] if answered else None, None, [tool for tool in tools if tool] or None
    )


_CALLS = ("llm", "chat", "generation")
"""Span kinds of model calls."""


def is_call_kind(kind: object) -> bool:
    return str(kind).lower() in _CALLS


def _values(span: Span) -> Dialogue | None:
    if not is_call_kind(first_of(span.attributes, KINDS)):
        return None
    asked, answered = (parsed(first_of(span.attributes, names)) for names in (INPUTS, OUTPUTS))
    tools = asked.get("tools") if isinstance(asked, Mapping) else None
    for key in ("messages", "prompts", "prompt", "input"):
        asked = asked[key] if isinstance(asked, Mapping) and key in asked else asked
    while isinstance(asked, list) and asked and isinstance(asked[0], list):
        asked = asked[0]  # a batch of LangChain has a conversation per call
    finish = None
    for key in ("choices", "generations", "message", "output"):
        answered = (
            answered[key] if isinstance(answered, Mapping) and answered.get(key) else answered
        )
        while isinstance(answered, list) and answered:
            answered = answered[0]
        finish = finish or (
            _text(answered.get("finish_reason")) if isinstance(answered, Mapping) else None
        )
    messages = [
        _value(m, "user") for m in (asked if isinstance(asked, list) else [asked]) if m is not None
    ]
    reply = None if answered is None else _value(answered, "assistant")
    return Dialogue(messages, reply, finish, tools if isinstance(tools, list) else None)


_ROLES = {"human": "user", "ai": "assistant"}


def _value(value: object, role: str) -> Message:
    """Convert a message of OpenAI or LangChain; other values become text."""
    if not isinstance(value, Mapping):
        return {"role": role, "content": value if isinstance(value, str) else json.dumps(value)}
    fields = _inside(value, "kwargs") or _inside(value, "data") or value
    kind = str(fields.get("role") or fields.get("type") or value.get("type") or role)
    message: Message = {
        "role": _ROLES.get(kind, kind),
        "content": fields.get("content", fields.get("text")),
    }
    message |= {
        name: fields[name]
        for name in ("name", "tool_call_id", "reasoning_content")
        if fields.get(name)
    }
    calls = fields.get("tool_calls")
    if isinstance(calls, list) and calls:
        message["tool_calls"] = [
            _call(
                call
                if "function" in call
                else {**call, "arguments": json.dumps(call.get("args"), ensure_ascii=False)}
            )
            for call in _objects(calls)
        ]
    return message


def _inner(item: Mapping[str, object]) -> Message:
    """Convert a message of OpenInference, with numbered parts and tool calls."""
    source = _inside(item, "message")
    message: Message = {"role": source.get("role", ""), "content": source.get("content")}
    parts = _numbered(source.get("contents"))
    if parts:
        message["content"] = [_part(_inside(part, "message_content")) for part in parts]
    calls = _numbered(source.get("tool_calls"))
    if calls:
        message["tool_calls"] = [_call(_inside(call, "tool_call")) for call in calls]
    for name in ("name", "tool_call_id"):
        if source.get(name):
            message[name] = source[name]
    return message


def _inside(item: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Return a nested object, or an empty one."""
    value = item.get(name)
    return value if isinstance(value, Mapping) else {}


def _numbered(value: object) -> list[Mapping[str, object]]:
    if not isinstance(value, Mapping):
        return _objects(value)
    return [value[key] for key in sorted(value, key=lambda k: int(k) if str(k).isdigit() else 0)]


def _part(part: Mapping[str, object]) -> dict[str, object]:
    if part.get("type") == "text":
        return {"type": "text", "text": part.get("text")}
    url = _inside(_inside(part, "image"), "image").get("url")
    return {"type": "image_url", "image_url": {"url": url}} if url else dict(part)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
