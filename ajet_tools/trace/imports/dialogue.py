"""Extracts messages and reply from the span of a model call.

The first that a span has counts: messages of the GenAI conventions (1.37 and later), of
OpenInference (`llm.input_messages.0.message.role`), or input and output as a value (Langfuse,
LangSmith, LangChain). Messages of another form are not guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ajet_sdk.capture.events import INPUTS, KINDS, OUTPUTS, first_of, parsed
from ajet_tools.trace.export.otlp import to_message
from ajet_tools.trace.imports.spans import Span

Message = dict[str, object]


class NotUnderstood(ValueError):
    """Messages of an unknown form."""


@dataclass(frozen=True)
class Dialogue:
    """Request and replies, as OpenAI's messages or as items of its Responses."""

    messages: list[Message]
    replies: list[Message]
    """One per choice; items of one reply if `has_items`."""
    finish_reason: str | None = None
    tools: Sequence[object] | None = None
    has_items: bool = field(default=False, kw_only=True)

    @property
    def request(self) -> dict[str, object]:
        is_items = any(message.get("type") in _ITEMS for message in self.messages)
        request: dict[str, object] = {"input" if is_items else "messages": self.messages}
        return {**request, "tools": self.tools} if self.tools else request

    def response(self, finish_reason: str | None) -> dict[str, object]:
        if self.has_items:
            return {"output": self.replies}
        choices: list[dict[str, object]] = []
        for index, message in enumerate(self.replies):
            choices.append({"index": index, "message": message})
            if finish_reason is not None:
                choices[-1]["finish_reason"] = finish_reason
        return {"choices": choices} if choices else {}


def dialogue_of(span: Span) -> Dialogue | None:
    """Extract the messages of a span; None if it has none. Raises NotUnderstood."""
    dialogue = _genai(span) or _openinference(span) or _values(span)
    return dialogue if dialogue and (dialogue.messages or dialogue.replies) else None


def _genai(span: Span) -> Dialogue | None:
    asked = _messages(span, "gen_ai.input.messages")
    answered = _messages(span, "gen_ai.output.messages")
    if asked is None and answered is None:
        return None
    messages: list[Message] = []
    system = _messages(span, "gen_ai.system_instructions")
    if system:
        messages.append(to_message({"role": "system", "parts": system}))
    for message in asked or ():
        messages += _separated(message)
    replies = [to_message(message) for message in answered or ()]
    finish_reason = _text(answered[0].get("finish_reason")) if answered else None
    tools = parsed(span.attributes.get("gen_ai.tool.definitions"))
    return Dialogue(messages, replies, finish_reason, tools if isinstance(tools, list) else None)


def _messages(span: Span, name: str) -> list[Mapping[str, object]] | None:
    """Return a list in an attribute of the span, or of an event
    (`gen_ai.client.inference.operation.details`)."""
    value = span.attributes.get(name)
    for _, attributes in span.events:
        value = attributes.get(name) if value is None else value
    return None if value is None else _objects(parsed(value), name)


def _objects(value: object, name: str) -> list[Mapping[str, object]]:
    if not isinstance(value, list):  # such as JSON that was cut at the length of an attribute
        raise NotUnderstood(f"{name} is no list")
    for item in value:
        if not isinstance(item, Mapping):
            raise NotUnderstood(f"{name} has an item that is no object")
    return value


def _separated(message: Mapping[str, object]) -> list[Message]:
    """Convert a message; several tool results, or a result among other parts, become separate
    messages."""
    if not message.get("parts") and "content" in message:
        return [dict(message)]  # some clients write OpenAI messages
    parts = _objects(message.get("parts") or [], "parts")
    answers = [part for part in parts if part.get("type") == "tool_call_response"]
    is_whole = any(part.get("type") == "ajet.message" for part in parts)
    if is_whole or not answers or (len(parts) == 1 and message.get("role") == "tool"):
        return [to_message(message)]
    messages: list[Message] = []
    others = [part for part in parts if part.get("type") != "tool_call_response"]
    if others:
        messages.append(to_message({**message, "parts": others}))
    for part in answers:
        answer: dict[str, object] = {"role": "tool", "parts": [part]}
        if message.get("role") == "tool" and message.get("name"):
            answer["name"] = message["name"]
        messages.append(to_message(answer))
    return messages


def _nested_list(attributes: Mapping[str, object], name: str) -> list[dict[str, object]]:
    """Collect `name.0.a`, `name.1.a`, ... as a list of nested objects."""
    items: dict[int, dict[str, object]] = {}
    start = f"{name}."
    for key, value in attributes.items():
        number, _, subkey = key.removeprefix(start).partition(".")
        if key.startswith(start) and number.isdigit() and subkey:
            _put(items.setdefault(int(number), {}), subkey.split("."), value)
    return [items[number] for number in sorted(items)]


def _put(into: dict[str, object], path: Sequence[str], value: object) -> None:
    for step in path[:-1]:
        inner = into.setdefault(step, {})
        if not isinstance(inner, dict):
            return
        into = inner
    into[path[-1]] = value


def _openinference(span: Span) -> Dialogue | None:
    asked = _nested_list(span.attributes, "llm.input_messages")
    answered = _nested_list(span.attributes, "llm.output_messages")
    if not asked and not answered:
        return None
    tools = []
    for tool in _nested_list(span.attributes, "llm.tools"):
        schema = parsed(_inside(tool, "tool").get("json_schema"))
        if schema:
            tools.append(schema)
    messages = [_openinference_message(message) for message in asked]
    replies = [_openinference_message(message) for message in answered]
    return Dialogue(messages, replies, None, tools or None)


def _openinference_message(item: Mapping[str, object]) -> Message:
    """Convert a message with numbered parts and tool calls."""
    source = _inside(item, "message")
    if not source:
        raise NotUnderstood("a message of OpenInference without `message`")
    message: Message = {"role": source.get("role", ""), "content": source.get("content")}
    parts = _numbered(source.get("contents"))
    if parts:
        message["content"] = [_part(_inside(part, "message_content")) for part in parts]
    calls = _numbered(source.get("tool_calls"))
    if calls:
        message["tool_calls"] = [_tool_call(_inside(call, "tool_call")) for call in calls]
    for name in ("name", "tool_call_id"):
        if source.get(name):
            message[name] = source[name]
    return message


def _tool_call(call: Mapping[str, object]) -> dict[str, object]:
    function = _inside(call, "function") or call
    arguments = function.get("arguments", function.get("args"))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    named = {"name": function.get("name"), "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": named}


_CALL_KINDS = ("llm", "chat", "generation")


def is_call_kind(kind: object) -> bool:
    return str(kind).lower() in _CALL_KINDS


def _values(span: Span) -> Dialogue | None:
    if not is_call_kind(first_of(span.attributes, KINDS)):
        return None
    asked = parsed(first_of(span.attributes, INPUTS))
    answered = parsed(first_of(span.attributes, OUTPUTS))
    tools = asked.get("tools") if isinstance(asked, Mapping) else None
    replies, finish_reason = _answered(answered)
    return Dialogue(
        _asked(asked),
        replies,
        finish_reason,
        tools if isinstance(tools, list) else None,
        has_items=any(reply.get("type") in _ITEMS for reply in replies),
    )


def _asked(value: object) -> list[Message]:
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": _whole(value)}]
    if isinstance(value, Mapping):
        if value.keys() == {"args", "kwargs"}:  # of a function under Langfuse's `observe`
            given = [*value["args"], *([value["kwargs"]] if value["kwargs"] else [])]
            if len(given) != 1:
                raise NotUnderstood("several arguments of a function")
            return _asked(given[0])
        for name in ("messages", "prompts", "prompt", "input"):
            if value.get(name) is not None:
                system = value.get("instructions") or value.get("system")
                before: list[Message] = [{"role": "system", "content": system}] if system else []
                return [*before, *_asked(value[name])]
        return [_message(value)]
    if not isinstance(value, list):
        raise NotUnderstood(f"an input of type {type(value).__name__}")
    if any(isinstance(item, list) for item in value):
        if len(value) > 1:
            raise NotUnderstood("a batch of conversations")
        return _asked(value[0])  # LangChain's batch of one
    messages: list[Message] = []
    for item in value:
        messages += _asked(item) if isinstance(item, str) else [_message(item)]
    return messages


def _answered(value: object) -> tuple[list[Message], str | None]:
    """Return the replies, or the items of one reply, with its finish reason."""
    if value is None:
        return [], None
    if isinstance(value, str):
        return [{"role": "assistant", "content": _whole(value)}], None
    if isinstance(value, list):
        if len(value) == 1:
            return _answered(value[0])
        return [_message(item, "assistant") for item in value], None
    if not isinstance(value, Mapping):
        raise NotUnderstood(f"an output of type {type(value).__name__}")
    finish_reason = _text(value.get("finish_reason"))
    for name in ("choices", "generations", "message", "output", "text"):
        inner = value.get(name)
        if inner is None or ("role" in value and name == "text"):
            continue
        if name == "choices" and isinstance(inner, list):
            answers = [_answered(choice) for choice in inner]
            replies = [reply for choice, _ in answers for reply in choice]
            return replies, answers[0][1] if answers else None
        replies, inner_reason = _answered(inner)
        return replies, finish_reason or inner_reason
    return [_message(value, "assistant")], finish_reason


def _whole(text: str) -> str:
    """Return a text, unless it is JSON that was cut at the length of an attribute."""
    if text.startswith(('{"', '[{"')):
        raise NotUnderstood("JSON that is cut")
    return text


_ROLES = {"human": "user", "ai": "assistant", "model": "assistant"}
_ROLES |= {role: role for role in ("system", "developer", "user", "assistant", "tool", "function")}
_LANGCHAIN = {"HumanMessage": "user", "AIMessage": "assistant", "AIMessageChunk": "assistant"}
_LANGCHAIN |= {"SystemMessage": "system", "ToolMessage": "tool"}
_ITEMS = ("function_call", "function_call_output", "reasoning")
"""Items of OpenAI's Responses that are no messages."""
_FIELDS = ("name", "tool_call_id", "reasoning_content", "refusal", "function_call")


def _message(value: object, role: str | None = None) -> Message:
    """Convert a message of OpenAI or LangChain. `role` is of a message that doesn't say its own."""
    if not isinstance(value, Mapping):
        raise NotUnderstood(f"a message of type {type(value).__name__}")
    if value.get("type") in _ITEMS:
        return dict(value)
    fields = _inside(value, "kwargs") or _inside(value, "data") or value
    path = value.get("id")
    if isinstance(path, list) and path:  # LangChain's path of the class
        role = _LANGCHAIN.get(str(path[-1]), role)
    for name in ("type", "role"):
        role = _ROLES.get(str(fields.get(name)), role)
    calls = fields.get("tool_calls") or _inside(fields, "additional_kwargs").get("tool_calls")
    if role is None or not ("content" in fields or "text" in fields or calls):
        names = ", ".join(map(str, fields))
        raise NotUnderstood(f"a message with {names[:80]}")
    message: Message = {"role": role, "content": fields.get("content", fields.get("text"))}
    message |= {name: fields[name] for name in _FIELDS if fields.get(name)}
    if calls:
        message["tool_calls"] = [_tool_call(call) for call in _objects(calls, "tool_calls")]
    return message


def _inside(item: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Return a nested object, or an empty one."""
    value = item.get(name)
    return value if isinstance(value, Mapping) else {}


def _numbered(value: object) -> list[Mapping[str, object]]:
    """Return the values of `0`, `1`, ... in their order."""
    if not isinstance(value, Mapping):
        return _objects(value or [], "a list of OpenInference")
    return [value[key] for key in sorted(value, key=lambda key: int(key) if key.isdigit() else 0)]


def _part(part: Mapping[str, object]) -> dict[str, object]:
    if part.get("type") == "text":
        return {"type": "text", "text": part.get("text")}
    url = _inside(_inside(part, "image"), "image").get("url")
    return {"type": "image_url", "image_url": {"url": url}} if url else dict(part)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
