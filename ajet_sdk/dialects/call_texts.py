"""Applies a function to the texts of a request or a reply of any dialect, except for values of the
protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ajet_sdk.dialects.fields import camel_case

_VALUES = {
    "role", "type", "object", "id", "callId", "toolCallId", "toolUseId", "itemId", "previousResponseId", "responseId",
    "model", "modelVersion", "status", "finishReason", "stopReason", "toolChoice", "reasoningEffort", "effort", "mode",
    "serviceTier", "systemFingerprint", "mimeType", "mediaType",
}  # fmt: skip
"""Keys of protocol values in the APIs of OpenAI, Anthropic and Gemini, in any part of a call."""
_PARTS = {
    "messages", "choices", "message", "delta", "content", "tools", "toolChoice", "toolCalls", "function", "functions",
    "functionCall", "input", "output", "reasoning", "summary", "system", "text", "format", "responseFormat",
    "jsonSchema", "thinking", "contents", "candidates", "parts", "systemInstruction", "generationConfig", "toolConfig",
    "functionCallingConfig", "functionResponse", "functionDeclarations",
}  # fmt: skip
"""Keys of parts of the protocol. Values under other keys, such as a tool's arguments, are user
data."""
_SCHEMAS = {
    "parameters",
    "schema",
    "inputSchema",
    "parametersJsonSchema",
    "responseSchema",
    "responseJsonSchema",
}
_SCHEMA_VALUES = frozenset({"type", "required", "$ref"})
_GIVEN = {"input", "args", "arguments", "metadata", "response", "structuredContent"}
"""Keys of parts whose numbers are user data, too."""
_SPELLED = {"logprobs", "logprobsResult", "promptLogprobs", "tokenIds", "promptTokenIds", "events"}
"""Keys of parts that repeat the text. All names above stand for their spelling in snake_case,
too."""


def map_texts(
    value: object,
    text: Callable[[str], str],
    spared: frozenset[str] = frozenset(),
    *,
    numbers: bool = True,
) -> object:
    """Apply `text` to all texts of a JSON value and, as texts, to numbers; not to keys and values
    of `spared` keys."""
    if isinstance(value, str):
        return text(value)
    if numbers and type(value) in (int, float):
        return value if (masked := text(str(value))) == str(value) else masked
    if isinstance(value, Mapping):
        return {
            k: (
                v
                if k in spared and not isinstance(v, Mapping)
                else map_texts(v, text, spared, numbers=numbers)
            )
            for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [map_texts(item, text, spared, numbers=numbers) for item in value]
    return value


def map_call(value: object, text: Callable[[str], str], within: str = "") -> object:
    """Apply `text` to the texts of a part of a call, at the key `within`, except for values of the
    protocol.

    Log-probabilities, token ids and events of a broken stream repeat the text and are removed.
    """
    if isinstance(value, (list, tuple)):
        return [map_call(item, text, within) for item in value]
    if not isinstance(value, Mapping):
        return map_texts(value, text, numbers=False)
    kind = f"{within} {value.get('type')} {value.get('role')}".lower()
    of_tool = any(word in kind for word in ("tool", "function", "_call"))
    call: dict[str, object] = {}
    for key, item in value.items():
        name = camel_case(key)
        is_part = isinstance(item, (Mapping, list, tuple))
        if name in _SPELLED and is_part:
            call[key] = None
        elif (name in _VALUES or (name == "name" and of_tool)) and not is_part:
            call[key] = item
        elif name in _PARTS and not (
            name == "input" and isinstance(item, Mapping)
        ):  # these are a tool's arguments
            call[key] = map_call(item, text, key)
        else:
            schema = _SCHEMA_VALUES if name in _SCHEMAS else frozenset[str]()
            call[key] = map_texts(item, text, schema, numbers=name in _GIVEN)
    return call
