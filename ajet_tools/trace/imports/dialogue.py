"""Request and response of the span of a model call.

The first form that a span has counts: messages of the GenAI conventions (1.37 and later), of
OpenInference (`llm.input_messages.0.message.role`), or OpenAI's request and response as values
(OpenInference's `input.value`, Langfuse, LangSmith). Messages of another form are not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ajet_sdk.capture.events import INPUTS, KINDS, OUTPUTS, first_of, parsed
from ajet_tools.trace.export.conversations import tool_call
from ajet_tools.trace.export.otlp import to_message
from ajet_tools.trace.imports.openai import are_messages, is_reply, request_problem
from ajet_tools.trace.imports.spans import Span

Message = dict[str, object]


class NotUnderstood(ValueError):
    """Messages of an unknown form."""


@dataclass(frozen=True)
class Dialogue:
    """A model call as OpenAI's request and response."""

    request: dict[str, object]
    response: dict[str, object]

    @property
    def choice(self) -> Mapping[str, object]:
        """The first choice, or an empty one."""
        choices = self.response.get("choices")
        if isinstance(choices, list) and choices:
            choice: Mapping[str, object] = choices[0]
            return choice
        return {}


def dialogue_of(span: Span) -> Dialogue:
    """Raises NotUnderstood."""
    for form in (_genai, _openinference, _values):
        dialogue = form(span)
        if dialogue.request or dialogue.response:
            return dialogue
    raise NotUnderstood(f"no messages, only {', '.join(sorted(span.attributes))[:200]}")


def _dialogue(messages: list[Message], tools: object, choices: list[dict[str, object]]) -> Dialogue:
    request: dict[str, object] = {}
    if messages:
        request["messages"] = messages
    if tools:
        request["tools"] = tools
    for index, choice in enumerate(choices):
        choice["index"] = index
    return Dialogue(request, {"choices": choices} if choices else {})


def is_call_kind(kind: object) -> bool:
    return str(kind).lower() in ("llm", "chat", "generation")


def _genai(span: Span) -> Dialogue:
    messages: list[Message] = []
    system = _message_list(span, "gen_ai.system_instructions")
    if system:
        messages.append(to_message({"role": "system", "parts": system}))
    for message in _message_list(span, "gen_ai.input.messages"):
        messages += _separated(message)
    choices: list[dict[str, object]] = []
    for message in _message_list(span, "gen_ai.output.messages"):
        choices.append({"message": to_message(message)})
        if message.get("finish_reason"):
            choices[-1]["finish_reason"] = message["finish_reason"]
    if not messages and not choices:
        return Dialogue({}, {})
    return _dialogue(messages, parsed(span.attributes.get("gen_ai.tool.definitions")), choices)


def _message_list(span: Span, name: str) -> list[Mapping[str, object]]:
    """Return a list in an attribute of the span, or of an event
    (`gen_ai.client.inference.operation.details`)."""
    value = span.attributes.get(name)
    for _, attributes in span.events:
        if value is None:
            value = attributes.get(name)
    return _objects([] if value is None else parsed(value), name)


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
    results = [part for part in parts if part.get("type") == "tool_call_response"]
    is_exact = any(part.get("type") == "ajet.message" for part in parts)
    if is_exact or not results or (len(parts) == 1 and message.get("role") == "tool"):
        return [to_message(message)]
    messages: list[Message] = []
    others = [part for part in parts if part.get("type") != "tool_call_response"]
    if others:
        messages.append(to_message({**message, "parts": others}))
    for part in results:
        result: dict[str, object] = {"role": "tool", "parts": [part]}
        if message.get("role") == "tool" and message.get("name"):
            result["name"] = message["name"]
        messages.append(to_message(result))
    return messages


def _openinference(span: Span) -> Dialogue:
    messages = [_openinference_message(m) for m in _numbered(span, "llm.input_messages")]
    replies = [_openinference_message(m) for m in _numbered(span, "llm.output_messages")]
    if not messages and not replies:
        return Dialogue({}, {})
    tools = []
    for tool in _numbered(span, "llm.tools"):
        schema = parsed(_inside(tool, "tool").get("json_schema"))
        if schema:
            tools.append(schema)
    return _dialogue(messages, tools, [{"message": reply} for reply in replies])


def _numbered(span: Span, name: str) -> list[object]:
    """Return `name.0.a.b`, `name.1.a.b`, ... as nested objects, in their order."""
    tree: dict[str, object] = {}
    for key, value in span.attributes.items():
        if not key.startswith(f"{name}."):
            continue
        inner: object = tree
        *path, last = key.removeprefix(f"{name}.").split(".")
        for step in path:
            if isinstance(inner, dict):
                inner = inner.setdefault(step, {})
            else:
                inner = None
        if isinstance(inner, dict):
            inner[last] = value
    return _in_order(tree)


def _in_order(tree: object) -> list[object]:
    """Return the values of the keys `0`, `1`, ... of an object."""
    if not isinstance(tree, Mapping):
        return []
    numbers = sorted(int(key) for key in tree if key.isdigit())
    return [tree[str(number)] for number in numbers]


def _inside(item: object, name: str) -> Mapping[str, object]:
    """Return a nested object, or an empty one."""
    value = item.get(name) if isinstance(item, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _openinference_message(item: object) -> Message:
    source = _inside(item, "message")
    if not source:
        raise NotUnderstood("a message of OpenInference without `message`")
    message: Message = {"role": source.get("role", ""), "content": source.get("content")}
    parts = _in_order(source.get("contents"))
    if parts:
        message["content"] = [_part(_inside(part, "message_content")) for part in parts]
    calls = [_tool_call(_inside(c, "tool_call")) for c in _in_order(source.get("tool_calls"))]
    if calls:
        message["tool_calls"] = calls
    for name in ("name", "tool_call_id"):
        if source.get(name):
            message[name] = source[name]
    return message


def _part(part: Mapping[str, object]) -> dict[str, object]:
    if part.get("type") == "text":
        return {"type": "text", "text": part.get("text")}
    url = _inside(_inside(part, "image"), "image").get("url")
    if url:
        return {"type": "image_url", "image_url": {"url": url}}
    return dict(part)


def _tool_call(call: Mapping[str, object]) -> dict[str, object]:
    function = _inside(call, "function")
    return tool_call(call.get("id"), function.get("name"), function.get("arguments"))


def _values(span: Span) -> Dialogue:
    if not is_call_kind(first_of(span.attributes, KINDS)):
        return Dialogue({}, {})
    request = _request(parsed(first_of(span.attributes, INPUTS)))
    return Dialogue(request, _response(parsed(first_of(span.attributes, OUTPUTS))))


def _request(value: object) -> dict[str, object]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"messages": [{"role": "user", "content": _text(value)}]}
    if isinstance(value, Mapping) and value.keys() == {"args", "kwargs"}:
        # of a function that Langfuse observes
        arguments = [*value["args"], *([value["kwargs"]] if value["kwargs"] else [])]
        if len(arguments) != 1:
            raise NotUnderstood("several arguments of a function")
        return _request(arguments[0])
    request = {"messages": value} if isinstance(value, list) else value
    if not isinstance(request, Mapping) or request_problem(request):
        raise NotUnderstood("an input that is neither text nor OpenAI's messages or request")
    return dict(request)


def _response(value: object) -> dict[str, object]:
    if value is None:
        return {}
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, Mapping) and is_reply(value):
        return dict(value)
    if isinstance(value, str):
        value = {"role": "assistant", "content": _text(value)}
    if isinstance(value, Mapping) and not are_messages([value]):
        value = value.get("message")
    if not are_messages([value]):
        raise NotUnderstood("an output that is neither text nor OpenAI's message or response")
    return {"choices": [{"index": 0, "message": value}]}


def _text(text: str) -> str:
    """Return a text, unless it is JSON that was cut at the length of an attribute."""
    if text.startswith(('{"', '[{"')):
        raise NotUnderstood("JSON that is cut")
    return text
