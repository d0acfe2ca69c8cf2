"""Validates replies passed through to an agent, in the vendor's dialect."""

from __future__ import annotations

from collections.abc import Mapping

from ajet_sdk.dialects.finish import finish_of
from ajet_sdk.engines.reply_schema import SHOWN, has_content, read_reply
from ajet_sdk.errors import EngineUnavailable


def fault_in(route: str, request: Mapping[str, object], response: Mapping[str, object], source: str) -> str | None:
    """Why a response with status 200 is not a valid reply; None if it is, or is not from a model.

    Other routes may end like a vendor's (`threads/…/messages`); the request tells whether a model was asked.
    """
    if route == "chat/completions" or (route == "completions" and ("choices" in response or "prompt" in request)):
        try:
            read_reply(response, route, source)
        except EngineUnavailable as error:
            return str(error)
        return None
    read = next((read for name, needed, read in _READ if route.endswith(name) and needed <= request.keys()), None)
    if read is None:
        return None
    failed = response.get("error") or response.get("stream_error")
    wrong = f"it says an error: {failed!s:.{SHOWN}}" if failed else read(response, request)
    quoted = f"{dict(response)!s:.{SHOWN}}"
    return None if wrong is None else f"{source} answered {route} with an invalid reply ({wrong}): {quoted}"


def _message(message: Mapping[str, object], request: Mapping[str, object]) -> str | None:
    """Anthropic's Messages."""
    blocks, usage = message.get("content"), message.get("usage")
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) and block.get("type") for block in blocks):
        return "content is no list of blocks"
    for block in blocks:
        if block["type"] == "text" and not isinstance(block.get("text"), str):
            return "a block of text has no text"
        if block["type"] == "tool_use" and not (
            isinstance(block.get("name"), str) and isinstance(block.get("input"), Mapping)
        ):
            return 'a tool_use has another shape; expected {"type": "tool_use", "id": …, "name": "…", "input": {…}}'
    has_text = any(has_content({**block, "type": "", "id": ""}) for block in blocks)
    return _ended(message.get("stop_reason"), has_text, _number(usage, "output_tokens"))


def _response(response: Mapping[str, object], request: Mapping[str, object]) -> str | None:
    """OpenAI's Responses."""
    status, items = response.get("status"), response.get("output")
    if request.get("background") and status in ("queued", "in_progress"):
        return None
    if not isinstance(items, list) or not all(isinstance(item, Mapping) and item.get("type") for item in items):
        return "output is no list of items"
    for item in items:
        parts = item.get("content") if item["type"] == "message" else []
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
            return "the content of a message is no list of parts"
        if any(part.get("type") == "output_text" and not isinstance(part.get("text"), str) for part in parts):
            return "a part of text has no text"
        if item["type"] == "function_call" and not (
            isinstance(item.get("name"), str) and isinstance(item.get("arguments"), str)
        ):
            return (
                'a function_call has another shape; expected {"type": "function_call", "call_id": …, "name": "…", '
                '"arguments": "{…}"}'
            )
    has_text = any(
        any(has_content({**part, "type": ""}) for part in item.get("content") or ())
        if item["type"] in ("message", "reasoning")
        else True
        for item in items
    )
    reason = status
    if status == "incomplete":
        reason = _field(response.get("incomplete_details"), "reason") or status
    return _ended(reason, has_text, _number(response.get("usage"), "output_tokens"))


def _candidates(response: Mapping[str, object], request: Mapping[str, object]) -> str | None:
    """Gemini's."""
    candidates, usage = response.get("candidates"), response.get("usageMetadata")
    if not candidates and finish_of(_field(response.get("promptFeedback"), "blockReason")):
        return None  # the prompt was filtered
    if not isinstance(candidates, list) or not candidates:
        return "there are no candidates"
    sampled = _number(usage, "candidatesTokenCount") + _number(usage, "thoughtsTokenCount")
    for candidate in candidates:
        content = candidate.get("content") if isinstance(candidate, Mapping) else None
        if not isinstance(content or {}, Mapping) or not isinstance(candidate, Mapping):
            return "a candidate is no object with content"
        parts = (content or {}).get("parts") or []
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
            return "the parts of a candidate are no list of objects"
        for part in parts:
            call = part.get("functionCall")
            if call is not None and not (isinstance(call, Mapping) and isinstance(call.get("name"), str)):
                return 'a functionCall has another shape; expected {"functionCall": {"name": "…", "args": {…}}}'
            if not isinstance(part.get("text", ""), str):
                return "a part of text has no text"
        has_text = any(any(part.values()) for part in parts)
        if wrong := _ended(candidate.get("finishReason"), has_text, sampled):
            return wrong
    return None


_READ = (
    ("messages", {"messages", "max_tokens"}, _message),
    ("responses", {"input", "model"}, _response),
    (":generateContent", {"contents"}, _candidates),
    (":streamGenerateContent", {"contents"}, _candidates),
    (":streamGenerateContent?alt=sse", {"contents"}, _candidates),
)
"""By the end of the route: required fields of the request, and the validator of the reply."""


def _ended(reason: object, has_text: bool, sampled: int) -> str | None:
    finish = finish_of(reason)
    if finish is None:
        return f"it ended for {reason!r}" if reason else "it says no reason of its end"
    if not has_text and not sampled and finish != "content_filter":
        return "it is empty, and no token was sampled"
    return None


def _number(usage: object, name: str) -> int:
    value = _field(usage, name)
    return value if isinstance(value, int) else 0


def _field(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, Mapping) else None
