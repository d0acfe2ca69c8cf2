"""OTLP JSON lines, one trace a line: a span for the episode and one for each call below it (OTLP file format 1.x)."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, BinaryIO

from ajet_sdk.types import Call, Episode
from ajet_tools.trace.export.genai import SEMCONV, any_value, call_attributes, nanos
from ajet_tools.trace.export.job import Job
from ajet_tools.trace.export.target import json_line
from ajet_tools.trace.text import reply_of

__all__ = ["write"]

_INTERNAL, _CLIENT = 1, 3
_OK, _ERROR = 1, 2
_HEX_32 = re.compile(r"[0-9a-f]{32}")


def write(job: Job, file: BinaryIO) -> None:
    """A line for each episode: an ExportTraceServiceRequest. Token ids are not among the attributes."""
    for record in job.records():
        file.write(json_line(_request(record.episode)))
        job.wrote(record, 1 + len(record.episode.calls))


def _request(episode: Episode) -> dict[str, Any]:
    spans = [_root(episode), *(_span(call, episode) for call in episode.calls)]
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


def _root(episode: Episode) -> dict[str, Any]:
    plain = {name: getattr(episode, name) for name in Episode.model_fields if name not in ("calls", "task", "rewards")}
    plain |= {"task": episode.task.model_dump(), "rewards": [reward.model_dump() for reward in episode.rewards]}
    attributes = {
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.workflow.name": "ajet",
        "gen_ai.conversation.id": episode.episode_id,
        "ajet.episode": _json(plain),
        "ajet.reward": episode.reward,
    }
    failed = episode.status != "succeeded"
    return {
        "traceId": _trace_id(episode),
        "spanId": _span_id(episode.episode_id),
        "name": "invoke_workflow",
        "kind": _INTERNAL,
        "startTimeUnixNano": nanos(episode.started_at),
        "endTimeUnixNano": nanos(episode.ended_at),
        "attributes": _attributes(attributes),
        "events": [_evaluation(reward.model_dump(), episode) for reward in episode.rewards],
        "status": {"code": _ERROR, "message": episode.error or episode.status} if failed else {"code": _OK},
    }


def _evaluation(reward: dict[str, Any], episode: Episode) -> dict[str, Any]:
    attributes = {
        "gen_ai.evaluation.name": reward["name"],
        "gen_ai.evaluation.score.value": reward["value"],
        "gen_ai.evaluation.explanation": reward["reason"],
    }
    at = nanos(episode.ended_at)
    return {"name": "gen_ai.evaluation.result", "timeUnixNano": at, "attributes": _attributes(attributes)}


_APART = ("episode_id", "prompt_ids", "output_ids", "logprobs", "request", "response")


def _span(call: Call, episode: Episode) -> dict[str, Any]:
    messages = call.request.get("messages")
    asked = messages if isinstance(messages, list) and all(isinstance(m, dict) for m in messages) else None
    choice = _only_choice(call)
    reply = dict(reply_of(call.response)) if call.response else None
    plain = {name: getattr(call, name) for name in Call.model_fields if name not in _APART}
    apart = {"messages"} if asked is not None else set()
    apart |= {"tools"} if call.request.get("tools") else set()
    plain["request"] = {name: value for name, value in call.request.items() if name not in apart}
    plain["response"] = call.response
    if choice is not None:
        bare = {name: value for name, value in choice.items() if name != "message"}
        plain["response"] = {**call.response, "choices": [bare]}
    attributes = {**call_attributes(call, asked, reply), "ajet.call": _json(plain)}
    return {
        "traceId": _trace_id(episode),
        "spanId": _span_id(call.call_id),
        "parentSpanId": _span_id(episode.episode_id),
        "name": f"chat {call.model}".strip(),
        "kind": _CLIENT,
        "startTimeUnixNano": nanos(call.started_at),
        "endTimeUnixNano": nanos(call.ended_at),
        "attributes": _attributes(attributes),
        "status": {"code": _ERROR, "message": call.error} if call.error else {"code": _OK},
    }


def _only_choice(call: Call) -> dict[str, Any] | None:
    """The choice of a chat response; None where there is none with a message."""
    choices = call.response.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return None
    return choices[0] if isinstance(choices[0].get("message"), dict) else None


def _trace_id(episode: Episode) -> str:
    """The episode's own id where it has that form, else a hash of it."""
    own = episode.episode_id
    return (
        own if _HEX_32.fullmatch(own) else hashlib.blake2b(own.encode("utf-8", "replace"), digest_size=16).hexdigest()
    )


def _span_id(own: str) -> str:
    return hashlib.blake2b(own.encode("utf-8", "replace"), digest_size=8).hexdigest()


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": any_value(value)} for key, value in values.items() if value is not None]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=lambda at: at.isoformat())
