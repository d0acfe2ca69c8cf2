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
from datetime import datetime, timedelta
from pathlib import Path

from pydantic import ValidationError

from ajet_sdk.capture.events import INPUTS, KINDS, OUTPUTS, event_of, first_of, parsed
from ajet_sdk.dialects.message_parts import request_messages
from ajet_sdk.errors import TraceError
from ajet_sdk.tasks.json_rows import BadRows, Row
from ajet_sdk.types import Call, Episode, Event, Reward, Run, Task
from ajet_tools.trace.export.otlp import REQUEST
from ajet_tools.trace.imports.dialogue import Dialogue, NotUnderstood, dialogue_of, is_call_kind
from ajet_tools.trace.imports.sink import UNKNOWN_TIME, Parsed, stable_id, task_of
from ajet_tools.trace.imports.spans import Span, moment, otlp_span, spans_of
from ajet_tools.trace.imports.spool import Spool

_CALLS = ("chat", "text_completion", "generate_content")
"""GenAI's operations that call a model; the others do not."""
_SIGNS = (
    "gen_ai.request.model",
    "gen_ai.response.model",
    "gen_ai.input.messages",
    "gen_ai.output.messages",
    "llm.model_name",
    "llm.request.type",
    "llm.input_messages.0.message.role",
)
"""Attributes of a model call that names neither kind nor operation."""
_MODELS = (
    "gen_ai.response.model",
    "gen_ai.request.model",
    "llm.model_name",
    "langfuse.observation.model.name",
)
_SETTINGS = ("llm.invocation_parameters", "langfuse.observation.model.parameters")
_USAGE = {
    "prompt_tokens": ("gen_ai.usage.input_tokens", "llm.token_count.prompt"),
    "completion_tokens": ("gen_ai.usage.output_tokens", "llm.token_count.completion"),
    "cost": ("gen_ai.usage.cost", "llm.cost.total"),
}


@dataclass(frozen=True)
class _Episode:
    """What was read of a trace."""

    parsed: Parsed | None
    """None without a model call that was understood."""
    not_understood: Sequence[str] = ()
    """Why calls were not understood."""
    other_spans: int = 0
    """Spans that are neither calls nor events, nor an outermost one."""


def read(rows: Iterable[Row], bad: BadRows, left_out: Counter[str]) -> Iterator[Parsed]:
    """Read an episode per trace with model calls; its spans may be anywhere in the file."""
    with Spool() as spool:
        for row in rows:
            try:
                spans = list(spans_of(row.value))
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
                bad.add(row.where, f"holds no spans: {error}")
                continue
            for span in spans:
                spool.add(span.trace, json.dumps(asdict(span)))
        yield from _read_traces(_stored_traces(spool), bad, left_out)


def _stored_traces(spool: Spool) -> Iterator[list[Span]]:
    for _, texts in spool.groups():
        yield [Span(**json.loads(text)) for text in texts]


def _read_traces(
    traces: Iterable[list[Span]], bad: BadRows, left_out: Counter[str]
) -> Iterator[Parsed]:
    not_understood: list[str] = []
    for spans in traces:
        trace = spans[0].trace
        try:
            episode = _episode_of(trace, spans)
        except (ValidationError, ValueError, TypeError, KeyError, AttributeError) as error:
            bad.add(f"trace {trace}", f"cannot be read as an episode: {str(error).splitlines()[0]}")
            continue
        not_understood += episode.not_understood
        if episode.parsed is None:
            left_out["traces without a model call that was understood"] += 1
            continue
        if episode.other_spans:
            left_out["spans that are no model calls, tools or retrievals"] += episode.other_spans
        yield episode.parsed
    if not_understood:
        reason = f"model calls that were not understood (the first: {not_understood[0]})"
        left_out[reason] = len(not_understood)


def _episode_of(trace: str, spans: Sequence[Span]) -> _Episode:
    ordered = sorted(spans, key=lambda span: (span.start or 0, span.span_id))
    for span in ordered:
        if "ajet.episode" in span.attributes:
            return _exported(span, ordered)
    by_id = {span.span_id: span for span in ordered}
    tops = [span for span in ordered if span.parent_id not in by_id] or ordered[:1]
    calls: list[Call] = []
    events: list[Event] = []
    not_understood: list[str] = []
    others = 0
    for span in ordered:
        if _is_call(span):
            try:
                dialogue = dialogue_of(span)
            except NotUnderstood as error:
                not_understood.append(str(error))
            else:
                calls.append(_call(span, dialogue, len(calls), _agent(span, by_id)))
            continue
        ids = (trace, span.span_id)
        times = (_time(span.start), _time(span.end))
        event = event_of(span.name, span.attributes, span.error, *times, ids)
        if event is not None:
            events.append(event)
        elif span not in tops:
            others += 1
    if not calls:
        return _Episode(None, not_understood)
    top = tops[0]
    run_ids = [str(s.resource["ajet.run_id"]) for s in ordered if s.resource.get("ajet.run_id")]
    rewards: list[Reward] = []
    for span in ordered:
        rewards += _rewards(span)
    episode = Episode(
        episode_id=trace,
        run_id=run_ids[0] if run_ids else "",
        task=_task(top, calls[0]),
        split="",
        output=None if _is_call(top) else _output(top),
        calls=tuple(calls),
        events=tuple(events),
        rewards=tuple(rewards),
        status="failed" if top.error else "succeeded",
        error=top.error,
        started_at=_time(min((s.start for s in ordered if s.start is not None), default=None)),
        ended_at=_time(max((s.end for s in ordered if s.end is not None), default=None)),
    )
    return _Episode(Parsed(episode=episode), not_understood, others)


def _exported(root: Span, spans: Iterable[Span]) -> _Episode:
    """Restore an episode exported by ajet."""
    fields = json.loads(str(root.attributes["ajet.episode"]))
    calls = []
    others = 0
    for span in spans:
        if "ajet.call" in span.attributes:
            calls.append(_exported_call(span, fields["episode_id"]))
        elif "ajet.event" not in span.attributes and span is not root:
            others += 1
    calls.sort(key=lambda call: call.index)
    return _Episode(Parsed(episode=Episode(**fields, calls=tuple(calls))), other_spans=others)


def _exported_call(span: Span, episode_id: str) -> Call:
    """Restore a call, whose messages and reply are in the attributes of the conventions alone."""
    fields = json.loads(str(span.attributes["ajet.call"]))
    try:
        dialogue = dialogue_of(span)
    except NotUnderstood:  # a call without messages and reply
        dialogue = Dialogue({}, {})
    fields["request"] = {**dialogue.request, **fields["request"]}
    choices = fields["response"].get("choices")
    if isinstance(choices, list) and len(choices) == 1:
        has_reply = "message" in choices[0] or "text" in choices[0]
        if not has_reply and dialogue.choice:
            choices[0]["message"] = dialogue.choice["message"]
    return Call(**fields, episode_id=episode_id)


def _is_call(span: Span) -> bool:
    """Whether a span is a model call, by its operation, its kind, or else by its attributes."""
    operation = span.attributes.get("gen_ai.operation.name")
    kind = first_of(span.attributes, KINDS)
    if kind and not is_call_kind(kind):
        return False
    if operation:
        return operation in _CALLS
    return bool(kind) or any(name in span.attributes for name in _SIGNS)


def _call(span: Span, dialogue: Dialogue, index: int, agent: str) -> Call:
    attributes = span.attributes
    sampling = {name: attributes[key] for name, key in REQUEST.items() if key in attributes}
    settings = parsed(first_of(attributes, _SETTINGS))
    if isinstance(settings, dict):
        sampling |= settings
    request = dict(dialogue.request)
    if "gen_ai.request.model" in attributes:
        request["model"] = attributes["gen_ai.request.model"]
    response = dict(dialogue.response)
    if attributes.get("gen_ai.response.id"):
        response["id"] = attributes["gen_ai.response.id"]
    usage = _usage(attributes)
    if usage:
        response["usage"] = usage
    finish_reason = dialogue.choice.get("finish_reason")
    reasons = attributes.get("gen_ai.response.finish_reasons")
    if finish_reason is None and isinstance(reasons, list) and reasons:
        finish_reason = reasons[0]
    return Call(
        call_id=stable_id("span", span.trace, span.span_id),
        episode_id=span.trace,
        index=index,
        agent=agent,
        trainable=False,
        model=str(first_of(attributes, _MODELS) or ""),
        request=request,
        response=response,
        finish_reason=None if finish_reason is None else str(finish_reason),
        started_at=_time(span.start),
        ended_at=_time(span.end),
        error=span.error,
        sampling=sampling,
    )


def _usage(attributes: Mapping[str, object]) -> dict[str, object]:
    usage: dict[str, object] = {}
    tokens = parsed(attributes.get("langfuse.observation.usage_details"))
    if isinstance(tokens, Mapping):
        usage = {"prompt_tokens": tokens.get("input"), "completion_tokens": tokens.get("output")}
    costs = parsed(attributes.get("langfuse.observation.cost_details"))
    if isinstance(costs, Mapping) and costs:
        usage["cost"] = costs.get("total", sum(costs.values()))
    for name, keys in _USAGE.items():
        value = first_of(attributes, keys)
        if value is not None:
            usage[name] = value
    return {name: value for name, value in usage.items() if value is not None}


def _agent(span: Span, by_id: Mapping[str, Span]) -> str:
    """Return the name of the agent in the span or its nearest named parent."""
    current: Span | None = span
    for _ in range(64):  # parents may form a cycle
        if current is None:
            break
        name = first_of(current.attributes, ("gen_ai.agent.name", "agent.name"))
        if isinstance(name, str) and name:
            return name
        current = by_id.get(current.parent_id or "")
    return "default"


def _task(top: Span, call: Call) -> Task:
    """Make a task of the input of the outermost span, or else of the first call."""
    kind = first_of(top.attributes, KINDS)
    if kind and not is_call_kind(kind):
        value = parsed(first_of(top.attributes, INPUTS))
        if isinstance(value, str):
            return Task(main_query=value)
        if isinstance(value, dict):
            texts = [text for text in value.values() if isinstance(text, str)]
            if texts:
                return Task(main_query=texts[0], metadata=value)
    return task_of(request_messages(call.request), {}, call.episode_id)


def _output(span: Span) -> object:
    value = parsed(first_of(span.attributes, OUTPUTS))
    if isinstance(value, Mapping) and value.keys() == {"output"}:
        return value["output"]  # LangSmith's form of a plain value
    return value


def _rewards(span: Span) -> Iterator[Reward]:
    """Yield the scores of GenAI's evaluation events."""
    for event, attributes in span.events:
        value = attributes.get("gen_ai.evaluation.score.value")
        if event == "gen_ai.evaluation.result" and isinstance(value, int | float):
            name = str(attributes.get("gen_ai.evaluation.name") or "reward")
            reason = attributes.get("gen_ai.evaluation.explanation")
            yield Reward(name=name, value=value, reason=str(reason) if reason else None)


def _time(nanoseconds: int | None) -> datetime:
    return UNKNOWN_TIME + timedelta(microseconds=(nanoseconds or 0) // 1000)


def read_studio(path: Path, bad: BadRows, left_out: Counter[str]) -> Iterator[Parsed]:
    """Read runs and traces from the span table of an AgentScope Studio database
    (`database.sqlite`), which has OTLP's names and GenAI attributes.

    Messages of the chat window are ignored, as the calls have them. Raises TraceError for another
    database.
    """
    try:
        file = sqlite3.connect(f"file:{path.resolve().as_posix()}?mode=ro", uri=True)
        try:
            file.row_factory = sqlite3.Row
            named = file.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            tables = {row["name"] for row in named}
            if "span_table" not in tables:
                raise TraceError(
                    f"{path.name} is not an AgentScope Studio database: it has no span_table"
                )
            if "run_table" in tables:
                for row in file.execute("SELECT * FROM run_table"):
                    yield Parsed(run=_studio_run(dict(row)))
            yield from _read_traces(_studio_traces(file), bad, left_out)
        finally:
            file.close()
    except sqlite3.Error as error:
        raise TraceError(f"cannot read {path.name} as an SQLite database: {error}") from error


def _studio_run(row: Mapping[str, object]) -> Run:
    try:
        started_at = _time(moment(row.get("timestamp")))
    except ValueError:
        started_at = UNKNOWN_TIME
    is_running = str(row.get("status")).lower() == "running"
    return Run(
        run_id=str(row["id"]),
        name="/".join(str(row[key]) for key in ("project", "name") if row.get(key)),
        status="interrupted" if is_running else "finished",
        started_at=started_at,
        ended_at=None if is_running else started_at,  # when it ended is unknown
    )


def _studio_traces(file: sqlite3.Connection) -> Iterator[list[Span]]:
    in_order = "SELECT traceId FROM span_table GROUP BY traceId ORDER BY min(startTimeUnixNano)"
    for (trace,) in file.execute(in_order):
        spans = []
        for row in file.execute("SELECT * FROM span_table WHERE traceId = ?", (trace,)):
            span = dict(row)
            for name in ("attributes", "events", "status"):  # as JSON texts
                span[name] = parsed(span.get(name))
            resource = {}
            if span.get("runId"):
                resource = {"ajet.run_id": span["runId"]}
            spans.append(otlp_span(span, resource))
        yield spans
