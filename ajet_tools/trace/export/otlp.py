"""Exports episodes as OTLP JSON lines with GenAI attributes (semantic conventions 1.38), and
converts messages.

https://opentelemetry.io/docs/specs/semconv/gen-ai/ : messages are JSON texts in
`gen_ai.input.messages` and `gen_ai.output.messages`, each with a role and parts. A message that
parts cannot express (custom keys, images) is stored whole in a part of type `ajet.message`, so that
the export is lossless.

A line is a trace, with a span for the episode, and child spans for calls, tools and retrievals
(OTLP file format 1.x). Spans also have OpenInference's attributes, for Phoenix and others.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import BinaryIO

from ajet_sdk.dialects.message_parts import reply_of, without_pictures
from ajet_sdk.samples.prefixes import PLACE
from ajet_sdk.types import Call, Episode, Event, Reward
from ajet_tools.trace.export.conversations import tool_call
from ajet_tools.trace.export.job import Job, json_line

SEMCONV = "1.38.0"

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

_WHOLE = "ajet.message"

REQUEST = {
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
    """Format a time as in OTLP JSON: nanoseconds since 1970, as text."""
    return str((at - _EPOCH) // timedelta(microseconds=1) * 1000)


def any_value(value: object) -> dict[str, object]:
    """Convert a value to an AnyValue of OTLP JSON; objects become JSON text, as few tools show
    nested ones."""
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
    call: Call, messages: Sequence[Mapping[str, object]] | None, reply: Mapping[str, object] | None
) -> dict[str, object]:
    """Return the GenAI and OpenInference attributes of a call."""
    usage = call.response.get("usage") or {}
    prompt = usage.get("prompt_tokens", None if call.prompt_ids is None else len(call.prompt_ids))
    output = usage.get(
        "completion_tokens", None if call.output_ids is None else len(call.output_ids)
    )
    details = usage.get("prompt_tokens_details")
    attributes: dict[str, object] = {
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
        "llm.model_name": call.response.get("model") or call.model or None,
        "llm.invocation_parameters": _json(call.sampling) if call.sampling else None,
        "llm.token_count.prompt": prompt,
        "llm.token_count.completion": output,
        "llm.token_count.prompt_details.cache_read": (
            details.get("cached_tokens") if isinstance(details, dict) else None
        ),
        **_openinference("LLM", messages, reply),
        **_numbered("llm.input_messages", messages or []),
        **_numbered("llm.output_messages", [] if reply is None else [reply]),
    }
    used = {**call.request, **call.sampling}
    attributes |= {name: used.get(key) for key, name in REQUEST.items()}
    if messages is not None:
        attributes["gen_ai.input.messages"] = _json([from_message(m) for m in messages])
    if reply is not None:
        reply_message = {**from_message(reply), "finish_reason": call.finish_reason or ""}
        attributes["gen_ai.output.messages"] = _json([reply_message])
    tools = call.request.get("tools")
    if tools:
        attributes["gen_ai.tool.definitions"] = _json(tools)
        listed = tools if isinstance(tools, list) else [tools]
        attributes |= {
            f"llm.tools.{i}.tool.json_schema": _as_value(tool) for i, tool in enumerate(listed)
        }
    return {name: value for name, value in attributes.items() if value is not None and value != []}


def _openinference(kind: str, asked: object, answered: object) -> dict[str, object]:
    attributes: dict[str, object] = {"openinference.span.kind": kind}
    for name, value in (("input", asked), ("output", answered)):
        attributes[f"{name}.value"] = _as_value(value)
        if value is not None and not isinstance(value, str):
            attributes[f"{name}.mime_type"] = "application/json"
    return attributes


def _documents(result: object) -> dict[str, object]:
    """Return the attributes of retrieved documents: content (or text), id and score."""
    attributes: dict[str, object] = {}
    for i, item in enumerate(result if isinstance(result, list) else []):
        if isinstance(item, Mapping):
            document = item
        else:
            document = {"content": item}
        content = document.get("content", document.get("text", document))
        named = {
            "id": document.get("id"),
            "content": _as_value(content),
            "score": document.get("score"),
        }
        attributes |= {
            f"retrieval.documents.{i}.document.{name}": value for name, value in named.items()
        }
    return attributes


def _as_value(value: object) -> object:
    if value is None or isinstance(value, str):
        return value
    return _json(value)


def _numbered(name: str, messages: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Flatten messages as in OpenInference: `llm.input_messages.0.message.role`."""
    attributes: dict[str, object] = {}
    for i, message in enumerate(messages):
        prefix = f"{name}.{i}.message"
        attributes |= {
            f"{prefix}.{key}": _as_value(without_pictures(message.get(key)))
            for key in ("role", "content", "name", "tool_call_id")
        }
        calls = message.get("tool_calls")
        for j, part in enumerate(map(_tool_part, calls) if isinstance(calls, list) else ()):
            call = f"{prefix}.tool_calls.{j}.tool_call"
            attributes |= {f"{call}.id": part["id"], f"{call}.function.name": part["name"]}
            attributes[f"{call}.function.arguments"] = _as_value(part["arguments"])
    return attributes


def from_message(message: Mapping[str, object]) -> dict[str, object]:
    """Convert a chat message to role and parts."""
    role = str(message.get("role", ""))
    parts: list[dict[str, object]] = []
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str):
        parts.append({"type": "reasoning", "content": reasoning})
    content = message.get("content")
    if role == "tool":
        parts.append(
            {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}
        )
    elif isinstance(content, str):
        parts.append({"type": "text", "content": content})
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        parts += [_tool_part(call) for call in calls if isinstance(call, Mapping)]
    converted: dict[str, object] = {"role": role, "parts": parts}
    if isinstance(message.get("name"), str):
        converted["name"] = message["name"]
    if to_message(converted) != message:
        parts.append({"type": _WHOLE, "message": message})
    return converted


def _tool_part(call: Mapping[str, object]) -> dict[str, object]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        function = {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict) and json.dumps(parsed, ensure_ascii=False) == arguments:
            arguments = parsed
    named = {"type": "tool_call", "id": call.get("id"), "name": function.get("name")}
    return {**named, "arguments": arguments}


def to_message(made: Mapping[str, object]) -> dict[str, object]:
    """Convert role and parts to a chat message: the inverse of `from_message`, also for output of
    other tools."""
    listed = made.get("parts")
    parts = []
    if isinstance(listed, list):
        parts = [part for part in listed if isinstance(part, Mapping)]
    for part in parts:
        stored = part.get("message")
        if part.get("type") == _WHOLE and isinstance(stored, dict):
            return stored
    message: dict[str, object] = {"role": made.get("role", ""), "content": None}
    tool_calls = []
    for part in parts:
        if part.get("type") == "tool_call":
            tool_calls.append(tool_call(part.get("id"), part.get("name"), part.get("arguments")))
    texts = [part.get("content") for part in parts if part.get("type") == "text"]
    others = [part for part in parts if part.get("type") not in _KNOWN]
    if others:
        content: list[dict[str, object]] = []
        for part in parts:
            if part.get("type") == "text":
                content.append({"type": "text", "text": part.get("content")})
            elif part.get("type") not in _STRUCTURED:
                content.append(dict(part))
        message["content"] = content
    elif texts:
        message["content"] = texts[0] if len(texts) == 1 else "\n".join(str(text) for text in texts)
    for part in parts:
        kind = part.get("type")
        if kind == "reasoning":
            message["reasoning_content"] = part.get("content")
        elif kind == "tool_call_response":
            message |= {"tool_call_id": part.get("id"), "content": _response(part)}
    if tool_calls:
        message["tool_calls"] = tool_calls
    if isinstance(made.get("name"), str):
        message["name"] = made["name"]
    return message


_STRUCTURED = ("reasoning", "tool_call", "tool_call_response")

_KNOWN = ("text", *_STRUCTURED)


def _response(part: Mapping[str, object]) -> object:
    """Return the result of a tool: `response` since 1.37, `result` in earlier drafts."""
    response = part.get("response", part.get("result"))
    if response is None or isinstance(response, str | list):
        return response
    return json.dumps(response, ensure_ascii=False)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# kinds of spans, and status codes
_INTERNAL = 1
_CLIENT = 3
_OK = 1
_ERROR = 2
_HEX_32 = re.compile(r"[0-9a-f]{32}")
_HEX_16 = re.compile(r"[0-9a-f]{16}")


def write(job: Job, file: BinaryIO) -> None:
    """Write an ExportTraceServiceRequest per episode, without token ids."""
    for record in job.records():
        file.write(json_line(_request(record.episode)))
        job.wrote(record, 1 + len(record.episode.calls) + len(record.episode.events))


def _request(episode: Episode) -> dict[str, object]:
    tools = (_tool_span(event, n, episode) for n, event in enumerate(episode.events))
    spans = [_root(episode), *(_call_span(call, episode) for call in episode.calls), *tools]
    resource = {"service.name": "ajet", "ajet.run_id": episode.run_id}
    scope = {"name": "ajet", "version": "1"}
    schema = f"https://opentelemetry.io/schemas/{SEMCONV}"
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(resource)},
                "scopeSpans": [{"scope": scope, "spans": spans, "schemaUrl": schema}],
            }
        ]
    }


def _root(episode: Episode) -> dict[str, object]:
    plain = {
        name: getattr(episode, name)
        for name in Episode.model_fields
        if name not in ("calls", "task", "rewards")
    }
    plain |= {
        "task": episode.task.model_dump(),
        "rewards": [reward.model_dump() for reward in episode.rewards],
    }
    plain["events"] = [event.model_dump() for event in episode.events]
    attributes = {
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.workflow.name": "ajet",
        "gen_ai.conversation.id": episode.episode_id,
        "ajet.episode": _json_with_times(plain),
        "ajet.reward": episode.reward,
        **_openinference("CHAIN", episode.task.main_query, episode.output),
    }
    if episode.status == "succeeded":
        error = None
    else:
        error = episode.error or episode.status
    span = _span(episode, episode.episode_id, "invoke_workflow", attributes, episode, error)
    return {**span, "events": [_evaluation(reward, episode) for reward in episode.rewards]}


def _span(
    episode: Episode,
    of: str,
    name: str,
    attributes: Mapping[str, object],
    at: Episode | Call | Event,
    error: str | None,
) -> dict[str, object]:
    """Return the span of an episode, call or event with the id `of`; calls and events are children
    of the episode."""
    is_trace_id = _HEX_32.fullmatch(episode.episode_id)
    return {
        "traceId": episode.episode_id if is_trace_id else _digest(episode.episode_id, 16),
        "spanId": _digest(of, 8),
        **({} if of == episode.episode_id else {"parentSpanId": _digest(episode.episode_id, 8)}),
        "name": name,
        "kind": _CLIENT if isinstance(at, Call) else _INTERNAL,
        "startTimeUnixNano": nanos(at.started_at),
        "endTimeUnixNano": nanos(at.ended_at),
        "attributes": _attributes(attributes),
        "status": {"code": _OK} if error is None else {"code": _ERROR, "message": error},
    }


def _evaluation(reward: Reward, episode: Episode) -> dict[str, object]:
    attributes = {
        "gen_ai.evaluation.name": reward.name,
        "gen_ai.evaluation.score.value": reward.value,
        "gen_ai.evaluation.explanation": reward.reason,
    }
    ended = nanos(episode.ended_at)
    return {
        "name": "gen_ai.evaluation.result",
        "timeUnixNano": ended,
        "attributes": _attributes(attributes),
    }


_OMITTED = (
    "episode_id",
    "prompt_ids",
    "pictures",
    "output_ids",
    "logprobs",
    "request",
    "response",
    *PLACE,
)


def _call_span(call: Call, episode: Episode) -> dict[str, object]:
    messages = call.request.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        messages = None
    reply = dict(reply_of(call.response)) if call.response else None
    plain = {name: getattr(call, name) for name in Call.model_fields if name not in _OMITTED}
    in_attributes = {"messages"} if messages is not None else set()
    in_attributes |= {"tools"} if call.request.get("tools") else set()
    plain["request"] = {
        name: value for name, value in call.request.items() if name not in in_attributes
    }
    plain["response"] = call.response
    choices = call.response.get("choices")
    choice = None
    if isinstance(choices, list) and len(choices) == 1:
        choice = choices[0]
    if isinstance(choice, dict) and isinstance(choice.get("message"), dict):
        bare = {name: value for name, value in choice.items() if name != "message"}
        plain["response"] = {**call.response, "choices": [bare]}
    attributes = {**call_attributes(call, messages, reply), "ajet.call": _json_with_times(plain)}
    return _span(
        episode, call.call_id, f"chat {call.model}".strip(), attributes, call, call.error or None
    )


def _tool_span(event: Event, number: int, episode: Episode) -> dict[str, object]:
    """Return the span of an event for other tools; the span of the episode has the whole event."""
    is_retrieval = event.kind == "retrieval"
    operation = "retrieval" if is_retrieval else "execute_tool"
    attributes = {
        **_openinference("RETRIEVER" if is_retrieval else "TOOL", event.arguments, event.result),
        **(_documents(event.result) if is_retrieval else {}),
        "gen_ai.operation.name": operation,
        "gen_ai.tool.name": event.name,
        "gen_ai.tool.call.arguments": _json(event.arguments),
        "gen_ai.tool.call.result": _json(event.result),
        "ajet.event": event.kind,
    }
    linked = _HEX_32.fullmatch(event.trace_id or "") and _HEX_16.fullmatch(event.span_id or "")
    links = []
    if linked:
        links = [{"traceId": event.trace_id, "spanId": event.span_id}]
    span_id = f"{episode.episode_id}/event/{number}"
    name = f"{operation} {event.name}"
    span = _span(episode, span_id, name, attributes, event, event.error or None)
    return {**span, "links": links}


def _digest(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=size).hexdigest()


def _attributes(values: Mapping[str, object]) -> list[dict[str, object]]:
    return [
        {"key": key, "value": any_value(value)}
        for key, value in values.items()
        if value is not None
    ]


def _json_with_times(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=lambda at: at.isoformat())
