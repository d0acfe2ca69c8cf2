"""Anthropic's Messages API: converts completions to messages and their events; requests:
`anthropic_requests`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ajet_sdk.dialects.anthropic_requests import MESSAGE_FIELDS, read
from ajet_sdk.dialects.finish import Finish
from ajet_sdk.dialects.json import Stored, arguments_of, event_bytes, json_text
from ajet_sdk.dialects.openai_chat import ChatDialect, pieces
from ajet_sdk.types import Json

STOP_REASONS: dict[Finish, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}

ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

SIGNATURE = "unsigned"
"""Signature of thinking blocks: clients drop blocks without a signature. It is not checked."""

TOO_LONG = "prompt is too long"
"""Clients recognize this text and shorten the conversation."""


class Messages(ChatDialect):
    """The route messages, or with `counts` messages/count_tokens."""

    fields = MESSAGE_FIELDS

    def __init__(self, *, counts: bool = False) -> None:
        self.counts = counts

    def opening(self, request_id: str, model: str, body: Mapping[str, object]) -> bytes:
        message: Json = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage({}),
        }
        return event_bytes({"type": "message_start", "message": message})

    def keep_alive(self, request_id: str, model: str, body: Mapping[str, object]) -> bytes:
        """An event without news: Claude Code ends a stream after 300 s that has pings only."""
        end = {"stop_reason": None, "stop_sequence": None}
        return event_bytes({"type": "message_delta", "delta": end, "usage": {"output_tokens": 0}})

    def neutral(self, body: Json, stored: Mapping[str, Json]) -> Json:
        return read(body, counts=self.counts, stored=stored)

    def response(self, completion: Json, request: Json, body: Json, stored: Stored) -> Json:
        """Return the whole message. In a thread, later requests of the episode can continue it."""
        choice = completion["choices"][0]
        message = choice["message"]
        stop = choice.get("stop_reason")
        reason = STOP_REASONS[choice["finish_reason"]]
        if message.get("tool_calls") and reason == "end_turn":
            reason = "tool_use"
        by_string = reason == "end_turn" and isinstance(stop, str)
        message_id = "msg_" + str(completion["id"]).rpartition("-")[2]
        if body.get("thread"):
            stored[message_id] = {
                "messages": [*request["messages"], message],
                "tools": request.get("tools"),
            }
        return {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": completion["model"],
            "content": list(_blocks(message)),
            "stop_reason": "stop_sequence" if by_string else reason,
            "stop_sequence": stop if by_string else None,
            "usage": _usage(completion["usage"]),
        }

    def events(self, response: Json, body: Mapping[str, object]) -> list[bytes]:
        """Return the message as server-sent events, block by block."""
        usage = {**response["usage"], "output_tokens": 0}
        start = {
            **response,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        events = [
            event_bytes({"type": "message_start", "message": start}),
            event_bytes({"type": "ping"}),
        ]
        for index, block in enumerate(response["content"]):
            opened, deltas = _opened(block)
            events.append(
                event_bytes(
                    {"type": "content_block_start", "index": index, "content_block": opened}
                )
            )
            for delta in deltas:
                events.append(
                    event_bytes({"type": "content_block_delta", "index": index, "delta": delta})
                )
            events.append(event_bytes({"type": "content_block_stop", "index": index}))
        end = {name: response[name] for name in ("stop_reason", "stop_sequence")}
        events.append(
            event_bytes({"type": "message_delta", "delta": end, "usage": response["usage"]})
        )
        events.append(event_bytes({"type": "message_stop"}))
        return events

    def error(self, status: int, message: str, code: str | None, param: str | None) -> Json:
        if code == "context_length_exceeded":
            message = f"{TOO_LONG}: {message}"
        kind = ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
        details = (
            {"details": {"error_code": code}} if code == "thread_not_found" else {}
        )  # clients then send all again
        return {"type": "error", "error": {"type": kind, "message": message, **details}}

    def error_event(self, error: Json) -> bytes:
        return event_bytes(error)

    def count(self, tokens: int) -> Json:
        return {"input_tokens": tokens}

    def model(self, name: str) -> Json:
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": "1970-01-01T00:00:00Z",
        }

    def models(self, names: list[str]) -> Json:
        ends = (
            {"first_id": names[0], "last_id": names[-1]}
            if names
            else {"first_id": None, "last_id": None}
        )
        return {"data": [self.model(name) for name in names], "has_more": False, **ends}


MESSAGES = Messages()
COUNT = Messages(counts=True)


# Responses


def _blocks(message: Json) -> Iterator[Json]:
    thought = message.get("reasoning_content")
    text = message.get("content")
    calls = message.get("tool_calls") or ()
    if thought:
        yield {"type": "thinking", "thinking": thought, "signature": SIGNATURE}
    if text or not (thought or calls):
        yield {"type": "text", "text": text or ""}
    for call in calls:
        function = call["function"]
        yield {
            "type": "tool_use",
            "id": call["id"],
            "name": function["name"],
            "input": arguments_of(function),
        }


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage.get("prompt_tokens", 0),
        "output_tokens": usage.get("completion_tokens", 0),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _opened(block: Json) -> tuple[Json, list[Json]]:
    """The block of the start event, and its deltas."""
    if block["type"] == "text":
        return {**block, "text": ""}, [
            {"type": "text_delta", "text": piece} for piece in pieces(block["text"])
        ]
    if block["type"] == "thinking":
        deltas = [
            {"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])
        ]
        signed = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": "", "signature": ""}, [*deltas, signed]
    spelt = json_text(block["input"])
    return {**block, "input": {}}, [
        {"type": "input_json_delta", "partial_json": piece} for piece in pieces(spelt)
    ]
