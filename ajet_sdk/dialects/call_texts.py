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
_SPELLED = {"logprobs", "logprobsResult", "promptLogprobs", "tokenIds", "promptTokenIds"}
"""Each name stands for its spelling in snake_case too."""


def map_texts(value: object, text: Callable[[str], str], spared: frozenset[str] = frozenset()) -> object:
    """A value of JSON with this done to each of its texts; keys stay, and the texts at the spared ones."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {
            k: v if k in spared and not isinstance(v, Mapping) else map_texts(v, text, spared) for k, v in value.items()
        }
    return [map_texts(item, text, spared) for item in value] if isinstance(value, (list, tuple)) else value


def map_call(value: object, text: Callable[[str], str], within: str = "") -> object:
    """A part of a call, the one at the key `within`, with this done to the texts that the protocol does not define.

    Log-probabilities and ids of tokens spell the text once more, and are left out.
    """
    if isinstance(value, (list, tuple)):
        return [map_call(item, text, within) for item in value]
    if not isinstance(value, Mapping):
        return map_texts(value, text)
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
            call[key] = map_texts(item, text, _SCHEMA_VALUES if name in _SCHEMAS else frozenset())
    return call
