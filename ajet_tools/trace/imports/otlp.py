"""Imports OpenTelemetry traces: OTLP, spans of the SDK (also Phoenix's), AgentScope Studio.

A trace becomes an episode: model calls become calls, tools and retrievals events, and scores
rewards. A model call whose messages aren't understood is not imported, and is reported.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from pydantic import ValidationError

from ajet_sdk.capture.events import INPUTS, KINDS, OUTPUTS, event_of, first_of, parsed
from ajet_sdk.dialects.message_parts import request_messages
from ajet_sdk.errors import TraceError
from ajet_sdk.tasks.json_rows import BadRows, Row
from ajet_sdk.types import Call, Episode, Reward, Run, Task
from ajet_tools.trace.export.otlp import REQUEST
from ajet_tools.trace.imports.dialogue import Dialogue, NotUnderstood, dialogue_of, is_call_kind
from ajet_tools.trace.imports.sink import UNKNOWN_TIME, Parsed, stable_id, task_of, text_of
from ajet_tools.trace.imports.spans import Span, otlp_span, spans_of
from ajet_tools.trace.imports.spool import Spool

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

_NOT_A_CALL = (
    "invoke_agent",
    "create_agent",
    "execute_tool",
    "embeddings",
    "invoke_workflow",
    "retrieval",
)


@dataclass(frozen=True)
class _Read:
    """What was read of a trace."""

    parsed: Parsed | None
    """None without a model call that was understood."""
    unread: Sequence[str] = ()
    """Why calls were not understood."""


def episode_of(trace: str, spans: Sequence[Span]) -> _Read:
    """Convert a trace to an episode."""
    ordered = sorted(spans, key=lambda span: (span.start or 0, span.span_id))
    root = next((span for span in ordered if "ajet.episode" in span.attributes), None)
    if root is not None:
        return _Read(_exported(root, ordered))
    parents = {span.span_id: span for span in ordered}
    calls: list[Call] = []
    call_spans: set[str] = set()
    unread = []
    for span in ordered:
        if not _is_call(span):
            continue
        call_spans.add(span.span_id)
        try:
            dialogue = dialogue_of(span)
        except NotUnderstood as error:
            unread.append(str(error))
            continue
        if dialogue is None:
            unread.append(f"no messages, only {', '.join(sorted(span.attributes))[:200]}")
        else:
            calls.append(_call(span, dialogue, trace, len(calls), parents))
    if not calls:
        return _Read(None, unread)
    tops = [span for span in ordered if span.parent_id not in parents]
    top = tops[0] if tops else ordered[0]
    events = [
        event_of(s.name, s.attributes, s.error, _at(s.start), _at(s.end), (trace, s.span_id))
        for s in ordered
    ]
    runs = [str(s.resource["ajet.run_id"]) for s in ordered if s.resource.get("ajet.run_id")]
    episode = Episode(
        episode_id=trace,
        run_id=runs[0] if runs else "",
        task=_task(top, calls, trace),
        split="",
        output=None if top.span_id in call_spans else _output(top),
        calls=tuple(calls),
        events=tuple(event for event in events if event),
        rewards=tuple(reward for span in ordered for reward in _rewards(span)),
        status="failed" if top.error else "succeeded",
        error=top.error,
        started_at=_at(min((s.start for s in ordered if s.start is not None), default=None)),
        ended_at=_at(max((s.end for s in ordered if s.end is not None), default=None)),
    )
    return _Read(Parsed(episode=episode), unread)


def _output(span: Span) -> object:
    value = parsed(first_of(span.attributes, OUTPUTS))
    if isinstance(value, Mapping) and value.keys() == {"output"}:
        return value["output"]  # LangSmith's form of a plain value
    return value


def _exported(root: Span, spans: Iterable[Span]) -> Parsed:
    """Restore an episode exported by ajet."""
    plain = json.loads(str(root.attributes["ajet.episode"]))
    calls = []
    for span in spans:
        if "ajet.call" in span.attributes:
            fields = json.loads(str(span.attributes["ajet.call"]))
            request, response = fields.pop("request"), fields.pop("response")
            dialogue = dialogue_of(span)
            if "gen_ai.input.messages" in span.attributes and dialogue:
                request = {"messages": dialogue.messages, **request}
            if dialogue and dialogue.tools:
                request["tools"] = dialogue.tools
            choices = response.get("choices")
            is_single = isinstance(choices, list) and len(choices) == 1
            has_reply = is_single and {"message", "text"} & choices[0].keys()
            if is_single and not has_reply and dialogue and dialogue.replies:
                choices[0]["message"] = dialogue.replies[0]
            calls.append(
                Call(**fields, request=request, response=response, episode_id=plain["episode_id"])
            )
    calls.sort(key=lambda call: call.index)
    return Parsed(episode=Episode(**plain, calls=tuple(calls)))


def _is_call(span: Span) -> bool:
    """Whether a span is a model call, by its kind or else by its attributes."""
    attributes = span.attributes
    operation = attributes.get("gen_ai.operation.name")
    kind = first_of(attributes, KINDS)
    if operation in _NOT_A_CALL or (kind and not is_call_kind(kind)):
        return False
    if operation in ("chat", "text_completion", "generate_content") or kind:
        return True
    if operation:
        return False
    return any(name in _SIGNS or name.startswith("llm.input_messages.") for name in attributes)


_SIGNS = (
    "gen_ai.request.model",
    "gen_ai.response.model",
    "gen_ai.input.messages",
    "gen_ai.output.messages",
    "llm.model_name",
    "llm.request.type",
)


_MODELS = (
    "gen_ai.response.model",
    "gen_ai.request.model",
    "llm.model_name",
    "langfuse.observation.model.name",
)
_SETTINGS = ("llm.invocation_parameters", "langfuse.observation.model.parameters")


def _call(
    span: Span, dialogue: Dialogue, episode_id: str, index: int, parents: Mapping[str, Span]
) -> Call:
    attributes = span.attributes
    sampling = {name: attributes[key] for name, key in REQUEST.items() if key in attributes}
    settings = parsed(first_of(attributes, _SETTINGS))
    if isinstance(settings, dict):
        sampling |= settings
    request = dialogue.request
    if "gen_ai.request.model" in attributes:
        request["model"] = attributes["gen_ai.request.model"]
    finish_reason = dialogue.finish_reason
    reasons = attributes.get("gen_ai.response.finish_reasons")
    if finish_reason is None and isinstance(reasons, list) and reasons:
        finish_reason = str(reasons[0])
    return Call(
        call_id=stable_id("span", episode_id, span.span_id),
        episode_id=episode_id,
        index=index,
        agent=_agent(span, parents),
        trainable=False,
        model=str(first_of(attributes, _MODELS) or ""),
        request=request,
        response=_response(span, dialogue, finish_reason),
        finish_reason=finish_reason,
        started_at=_at(span.start),
        ended_at=_at(span.end),
        error=span.error,
        sampling=sampling,
    )


_USAGE = {
    "prompt_tokens": (
        "gen_ai.usage.input_tokens",
        "gen_ai.usage.prompt_tokens",
        "llm.token_count.prompt",
    ),
    "completion_tokens": (
        "gen_ai.usage.output_tokens",
        "gen_ai.usage.completion_tokens",
        "llm.token_count.completion",
    ),
    "cost": ("gen_ai.usage.cost", "llm.cost.total"),
}


def _response(span: Span, dialogue: Dialogue, finish_reason: str | None) -> dict[str, object]:
    response: dict[str, object] = {}
    if text_of(span.attributes.get("gen_ai.response.id")):
        response["id"] = span.attributes["gen_ai.response.id"]
    response |= dialogue.response(finish_reason)
    usage = _langfuse_usage(span)
    for name, keys in _USAGE.items():
        value = first_of(span.attributes, keys)
        if value is not None:
            usage[name] = value
    return {**response, "usage": usage} if usage else response


def _langfuse_usage(span: Span) -> dict[str, object]:
    usage: dict[str, object] = {}
    tokens = parsed(span.attributes.get("langfuse.observation.usage_details"))
    if isinstance(tokens, Mapping):
        for name, key in (("prompt_tokens", "input"), ("completion_tokens", "output")):
            if key in tokens:
                usage[name] = tokens[key]
    costs = parsed(span.attributes.get("langfuse.observation.cost_details"))
    if isinstance(costs, Mapping) and costs:
        total = costs.get("total")
        usage["cost"] = float(sum(costs.values()) if total is None else total)
    return usage


def _agent(span: Span, parents: Mapping[str, Span]) -> str:
    """Return the name of the agent in the span or its nearest named parent."""
    current: Span | None = span
    for _ in range(64):  # parents may form a cycle
        if current is None:
            break
        of = current.attributes
        name = of.get("gen_ai.agent.name") or of.get("agent.name")
        if isinstance(name, str) and name:
            return name
        current = parents.get(current.parent_id or "")
    return "default"


def _task(top: Span, calls: Sequence[Call], episode_id: str) -> Task:
    """Make a task of the input of the outermost span, or else of the first call."""
    kind = first_of(top.attributes, KINDS)
    if kind and not is_call_kind(kind):
        asked = parsed(first_of(top.attributes, INPUTS))
        if isinstance(asked, str):
            return Task(main_query=asked)
        if isinstance(asked, dict):
            texts = [value for value in asked.values() if isinstance(value, str)]
            if texts:
                return Task(main_query=texts[0], metadata=asked)
    return task_of(request_messages(calls[0].request), {}, episode_id)


def _rewards(span: Span) -> Iterable[Reward]:
    """Yield the scores of GenAI's evaluation events."""
    for event, attributes in span.events:
        value = attributes.get("gen_ai.evaluation.score.value")
        if event == "gen_ai.evaluation.result" and isinstance(value, int | float):
            name = str(attributes.get("gen_ai.evaluation.name") or "reward")
            reason = text_of(attributes.get("gen_ai.evaluation.explanation"))
            yield Reward(name=name, value=value, reason=reason)


def _at(nanoseconds: int | None) -> datetime:
    return (
        UNKNOWN_TIME
        if nanoseconds is None
        else _EPOCH + timedelta(microseconds=nanoseconds // 1000)
    )


def read(rows: Iterable[Row], bad: BadRows, left_out: Counter[str]) -> Iterator[Parsed]:
    """Read an episode per trace with model calls."""
    with Spool() as spool:
        for row in rows:
            try:
                if not isinstance(row.value, Mapping):
                    raise TypeError("it is not an object")
                for span in list(spans_of(row.value)):
                    spool.add(span.trace, json.dumps(asdict(span)))
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
                bad.add(row.where, f"holds no spans: {error}")
        groups = spool.groups()
        traces = ((trace, [_stored_span(text) for text in texts]) for trace, texts in groups)
        yield from _read_traces(traces, bad, left_out)


def _stored_span(text: str) -> Span:
    fields = json.loads(text)
    events = [(name, attributes) for name, attributes in fields.pop("events")]
    return Span(**fields, events=events)


def _read_traces(
    traces: Iterable[tuple[str, list[Span]]], bad: BadRows, left_out: Counter[str]
) -> Iterator[Parsed]:
    unread: list[str] = []
    for trace, spans in traces:
        try:
            result = episode_of(trace, spans)
        except (ValidationError, ValueError, TypeError, KeyError, AttributeError) as error:
            bad.add(f"trace {trace}", f"cannot be read as an episode: {str(error).splitlines()[0]}")
            continue
        unread += result.unread
        if result.parsed is None:
            left_out["traces without a model call that was understood"] += 1
            continue
        others = _other_spans(spans, result.parsed)
        if others > 0:
            left_out["spans that are no model calls, tools or retrievals"] += others
        yield result.parsed
    if unread:
        left_out[f"model calls that were not understood (the first: {unread[0]})"] = len(unread)


def _other_spans(spans: Sequence[Span], parsed: Parsed) -> int:
    """Count the spans that are neither calls nor events, nor the outermost one."""
    ours = ("ajet.episode", "ajet.call", "ajet.event")
    others = [span for span in spans if not any(name in span.attributes for name in ours)]
    if any("ajet.call" in span.attributes for span in spans):
        return len(others)
    ids = {span.span_id for span in spans}
    calls = [span for span in others if _is_call(span)]
    has_top = any(span.parent_id not in ids and span not in calls for span in others)
    events = parsed.episode.events if parsed.episode else ()
    return len(others) - len(calls) - len(events) - has_top


def read_studio(path: Path, bad: BadRows, left_out: Counter[str]) -> Iterator[Parsed]:
    """Read runs and traces from the span table of an AgentScope Studio database
    (`database.sqlite`).

    The table has OTLP's names and GenAI attributes. Messages of the chat window are ignored, as the
    calls have them. Raises TraceError for another database.
    """
    try:
        file = sqlite3.connect(f"file:{path.resolve().as_posix()}?mode=ro", uri=True)
        try:
            file.row_factory = sqlite3.Row
            tables = {
                row["name"]
                for row in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            }
            if "span_table" not in tables:
                raise TraceError(
                    f"{path.name} is not an AgentScope Studio database: it has no span_table"
                )
            if "run_table" in tables:
                yield from (
                    Parsed(run=_studio_run(dict(row)))
                    for row in file.execute("SELECT * FROM run_table")
                )
            yield from _read_traces(_studio_traces(file), bad, left_out)
        finally:
            file.close()
    except sqlite3.Error as error:
        raise TraceError(f"cannot read {path.name} as an SQLite database: {error}") from error


def _studio_run(row: Mapping[str, object]) -> Run:
    try:
        at = datetime.fromisoformat(str(row.get("timestamp")))  # `2025-01-31 12:00:00.000`
    except ValueError:
        at = UNKNOWN_TIME
    at = at if at.tzinfo else at.replace(tzinfo=timezone.utc)
    name = "/".join(str(row[key]) for key in ("project", "name") if row.get(key))
    status = {"running": "interrupted", "done": "finished"}.get(
        str(row.get("status", "")).lower(), "finished"
    )
    return Run(run_id=str(row["id"]), name=name, status=status, started_at=at)  # type: ignore[arg-type]


def _studio_traces(file: sqlite3.Connection) -> Iterator[tuple[str, list[Span]]]:
    for (trace,) in file.execute(
        "SELECT traceId FROM span_table GROUP BY traceId ORDER BY min(startTimeUnixNano)"
    ):
        spans = []
        for row in map(dict, file.execute("SELECT * FROM span_table WHERE traceId = ?", (trace,))):
            nested = {
                name: parsed(row.get(name)) for name in ("attributes", "events", "status")
            }  # JSON texts
            resource = {"ajet.run_id": row["runId"]} if row.get("runId") else {}
            spans.append(otlp_span({**row, **nested}, resource))
        yield str(trace), spans
