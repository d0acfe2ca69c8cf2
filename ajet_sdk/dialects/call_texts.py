"""The texts of a request or a reply of any dialect, told from what the protocol defines."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ajet_sdk.dialects.fields import camel_case

_VALUES = {
    "role", "type", "object", "id", "callId", "toolCallId", "toolUseId", "itemId", "previousResponseId", "responseId",
    "model", "modelVersion", "status", "finishReason", "stopReason", "toolChoice", "reasoningEffort", "effort", "mode",
    "serviceTier", "systemFingerprint", "mimeType", "mediaType",
}  # fmt: skip
"""Keys of values that belong to the protocols of OpenAI, Anthropic and Gemini, in any part of a call."""
_PARTS = {
    "messages", "choices", "message", "delta", "content", "tools", "toolChoice", "toolCalls", "function", "functions",
    "functionCall", "input", "output", "reasoning", "summary", "system", "text", "format", "responseFormat",
    "jsonSchema", "thinking", "contents", "candidates", "parts", "systemInstruction", "generationConfig", "toolConfig",
    "functionCallingConfig", "functionResponse", "functionDeclarations",
}  # fmt: skip
"""Keys of the parts themselves. Whatever is under another key, such as a tool's arguments, is the user's."""
_SCHEMAS = {"parameters", "schema", "inputSchema", "parametersJsonSchema", "responseSchema", "responseJsonSchema"}
_SCHEMA_VALUES = frozenset({"type", "required", "$ref"})
_GIVEN = {"input", "args", "arguments", "metadata", "response", "structuredContent"}
"""Keys of parts whose numbers are the user's too."""
_SPELLED = {"logprobs", "logprobsResult", "promptLogprobs", "tokenIds", "promptTokenIds", "events"}
"""Each name stands for its spelling in snake_case too."""


def map_texts(
    value: object, text: Callable[[str], str], spared: frozenset[str] = frozenset(), *, numbers: bool = True
) -> object:
    """A value of JSON with this done to each of its texts and, as texts, numbers; keys and what is at the spared ones
    stay."""
    if isinstance(value, str):
        return text(value)
    if numbers and type(value) in (int, float):
        return value if (masked := text(str(value))) == str(value) else masked
    if isinstance(value, Mapping):
        return {
            k: v if k in spared and not isinstance(v, Mapping) else map_texts(v, text, spared, numbers=numbers)
            for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [map_texts(item, text, spared, numbers=numbers) for item in value]
    return value


def map_call(value: object, text: Callable[[str], str], within: str = "") -> object:
    """A part of a call, the one at the key `within`, with this done to the texts that the protocol does not define.

    Log-probabilities, ids of tokens and pieces of a broken stream spell the text once more, and are left out.
    """
    if isinstance(value, (list, tuple)):
        return [map_call(item, text, within) for item in value]
    if not isinstance(value, Mapping):
        return map_texts(value, text, numbers=False)
    kind = f"{within} {value.get('type')} {value.get('role')}".lower()
    of_tool = any(word in kind for word in ("tool", "function", "_call"))
    call: dict[str, object] = {}
    for key, item in value.items():
        name, is_part = camel_case(key), isinstance(item, (Mapping, list, tuple))
        if name in _SPELLED and is_part:
            call[key] = None
        elif (name in _VALUES or (name == "name" and of_tool)) and not is_part:
            call[key] = item
        elif name in _PARTS and not (name == "input" and isinstance(item, Mapping)):  # which are a tool's arguments
            call[key] = map_call(item, text, key)
        else:
            schema = _SCHEMA_VALUES if name in _SCHEMAS else frozenset[str]()
            call[key] = map_texts(item, text, schema, numbers=name in _GIVEN)
    return call
