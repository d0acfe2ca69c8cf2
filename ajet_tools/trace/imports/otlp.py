"""Imports OpenTelemetry traces: OTLP, spans of the SDK (OpenInference, Phoenix), agent-lightning,
AgentScope Studio.

A trace becomes an episode: model calls become calls, tools and retrievals events, and scores
rewards.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from ajet_sdk.capture.events import INPUTS, KINDS, OUTPUTS, event_of, first_of, parsed
from ajet_sdk.errors import TraceError
from ajet_sdk.tasks.json_rows import BadRows, Row
from ajet_sdk.types import Call, Episode, Ids, Reward, Run, Task
from ajet_tools.trace.export.otlp import REQUEST
from ajet_tools.trace.imports.dialogue import Dialogue, dialogue_of, is_call_kind
from ajet_tools.trace.imports.sink import UNKNOWN_TIME, Parsed, stable_id, task_of, text_of
from ajet_tools.trace.imports.spans import Span, Spool, flat, otlp_span, spans_of, total_cost

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

_NOT_A_CALL = (
    "invoke_agent",
    "create_agent",
    "execute_tool",
    "embeddings",
    "invoke_workflow",
    "retrieval",
)


def episode_of(trace: str, spans: Sequence[Span]) -> Parsed | None:
    """Convert a trace to an episode; None without a model call or an episode exported by ajet."""
    ordered = sorted(spans, key=lambda span: (span.order, span.start or 0, span.span_id))
    root = next((span for span in ordered if "ajet.episode" in span.attributes), None)
    if root is not None:
        return _exported(root, ordered)
    dialogues = [(span, dialogue_of(span)) for span in ordered if _is_call(span)]
    if not dialogues:
        return None
    parents = {span.span_id: span for span in ordered}
    episode_id = trace if ":" not in trace else stable_id("rollout", trace)
    calls = [
        _call(span, dialogue, episode_id, i, parents)
        for i, (span, dialogue) in enumerate(dialogues)
    ]
    top = next(
        (span for span in ordered if span.parent_id is None or span.parent_id not in parents),
        ordered[0],
    )
    rewards = tuple(reward for span in ordered for reward in _rewards(span))
    output = parsed(first_of(top.attributes, OUTPUTS))
    events = [
        event_of(s.name, s.attributes, s.error, _at(s.start), _at(s.end), (trace, s.span_id))
        for s in ordered
    ]
    return Parsed(
        episode=Episode(
            episode_id=episode_id,
            run_id=next((str(r) for s in ordered if (r := s.resource.get("ajet.run_id"))), ""),
            task=_task(top, trace, calls, episode_id),
            split="",
            output=output if top not in [s for s, _ in dialogues] else None,
            calls=tuple(calls),
            events=tuple(event for event in events if event),
            rewards=rewards,
            status="failed" if top.error else "succeeded",
            error=top.error,
            started_at=_at(min((s.start for s in ordered if s.start is not None), default=None)),
            ended_at=_at(max((s.end for s in ordered if s.end is not None), default=None)),
        )
    )


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
            bare = (
                isinstance(choices, list)
                and len(choices) == 1
                and not {"message", "text"} & choices[0].keys()
            )
            if dialogue and dialogue.reply is not None and bare:
                choices[0]["message"] = dialogue.reply
            calls.append(
                Call(**fields, request=request, response=response, episode_id=plain["episode_id"])
            )
    calls.sort(key=lambda call: call.index)
    return Parsed(episode=Episode(**plain, calls=tuple(calls)))


def _is_call(span: Span) -> bool:
    """Whether a span is a model call, by its kind or else by its attributes."""
    of = span.attributes
    operation = of.get("gen_ai.operation.name")
    kind = first_of(of, KINDS)
    if operation in _NOT_A_CALL or (kind and not is_call_kind(kind)):
        return False
    if operation in ("chat", "text_completion", "generate_content") or kind:
        return True
    known = ("gen_ai.request.model", "llm.model_name", "llm.request.type", "gen_ai.response.model")
    return any(name in of for name in known) or dialogue_of(span) is not None


def _call(
    span: Span, dialogue: Dialogue | None, episode_id: str, index: int, parents: Mapping[str, Span]
) -> Call:
    of = span.attributes
    model = (
        of.get("gen_ai.response.model")
        or of.get("gen_ai.request.model")
        or of.get("llm.model_name")
    )
    model = model or of.get("langfuse.observation.model.name") or ""
    sampling = {name: of[key] for name, key in REQUEST.items() if key in of}
    invoked = parsed(
        first_of(of, ("llm.invocation_parameters", "langfuse.observation.model.parameters"))
    )
    sampling |= invoked if isinstance(invoked, dict) else {}
    request: dict[str, object] = {"messages": dialogue.messages} if dialogue else {}
    request |= {"tools": dialogue.tools} if dialogue and dialogue.tools else {}
    request |= {"model": of["gen_ai.request.model"]} if "gen_ai.request.model" in of else {}
    reasons = of.get("gen_ai.response.finish_reasons")
    finish = dialogue.finish_reason if dialogue else None
    finish = finish or (str(reasons[0]) if isinstance(reasons, list) and reasons else None)
    prompt_ids, output_ids = _ids(of)
    return Call(
        call_id=stable_id("span", episode_id, span.span_id),
        episode_id=episode_id,
        index=index,
        agent=_agent(span, parents),
        trainable="prompt_token_ids" in of and "response_token_ids" in of,
        model=str(model),
        request=request,
        response=_response(span, dialogue, finish),
        finish_reason=finish,
        started_at=_at(span.start),
        ended_at=_at(span.end),
        error=span.error,
        sampling=sampling,
        prompt_ids=prompt_ids,
        output_ids=output_ids,
    )


def _response(span: Span, dialogue: Dialogue | None, finish: str | None) -> dict[str, object]:
    details = parsed(span.attributes.get("langfuse.observation.usage_details"))
    of = {
        **span.attributes,
        **(flat({"langfuse.usage": details}) if isinstance(details, Mapping) else {}),
    }
    of["langfuse.cost"] = total_cost(parsed(of.get("langfuse.observation.cost_details")))
    response: dict[str, object] = {}
    if text_of(of.get("gen_ai.response.id")):
        response["id"] = of["gen_ai.response.id"]
    if dialogue and dialogue.reply is not None:
        choice = {"index": 0, "message": dialogue.reply}
        response["choices"] = [choice if finish is None else {**choice, "finish_reason": finish}]
    names = (
        (
            "prompt_tokens",
            "gen_ai.usage.input_tokens",
            "gen_ai.usage.prompt_tokens",
            "llm.token_count.prompt",
            "langfuse.usage.input",
        ),
        (
            "completion_tokens",
            "gen_ai.usage.output_tokens",
            "gen_ai.usage.completion_tokens",
            "llm.token_count.completion",
            "langfuse.usage.output",
        ),
        ("cost", "gen_ai.usage.cost", "llm.cost.total", "langfuse.cost"),
    )
    usage = {name: first_of(of, tuple(keys)) for name, *keys in names}
    if any(value is not None for value in usage.values()):
        response["usage"] = {name: value for name, value in usage.items() if value is not None}
    return response


def _ids(of: Mapping[str, object]) -> tuple[Ids | None, Ids | None]:
    """Return the token ids of prompt and output, as written by agent-lightning's engine."""
    prompt, output = parsed(of.get("prompt_token_ids")), parsed(of.get("response_token_ids"))
    if isinstance(output, list) and len(output) == 1 and isinstance(output[0], list):
        output = output[0]
    if not (isinstance(prompt, list) and isinstance(output, list)):
        return None, None
    return np.array(prompt, np.int32), np.array(output, np.int32)


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


def _task(top: Span, trace: str, calls: Sequence[Call], episode_id: str) -> Task:
    """Make a task of the input of the outermost span, or else of the first call."""
    kind = first_of(top.attributes, KINDS)
    asked = parsed(first_of(top.attributes, INPUTS)) if kind and not is_call_kind(kind) else None
    rollout = {"rollout": trace} if ":" in trace else {}
    if isinstance(asked, str):
        return Task(main_query=asked, metadata=rollout)
    if isinstance(asked, dict) and (
        question := next((v for v in asked.values() if isinstance(v, str)), None)
    ):
        return Task(main_query=question, metadata={**asked, **rollout})
    return task_of(calls[0].request.get("messages"), rollout, episode_id)


def _rewards(span: Span) -> Iterable[Reward]:
    """Yield scores: GenAI's evaluation events, agent-lightning's reward spans."""
    for name, of in span.events:
        value = of.get("gen_ai.evaluation.score.value")
        if name == "gen_ai.evaluation.result" and isinstance(value, int | float):
            named = str(of.get("gen_ai.evaluation.name") or "reward")
            yield Reward(
                name=named, value=value, reason=text_of(of.get("gen_ai.evaluation.explanation"))
            )
    of = span.attributes
    for i in range(64):
        value = of.get(f"agentlightning.reward.{i}.value")
        if value is None:
            break
        yield Reward(
            name=str(of.get(f"agentlightning.reward.{i}.name") or "reward"), value=float(str(value))
        )
    reward = of.get("reward")
    if span.name == "agentlightning.reward" and isinstance(reward, int | float):
        yield Reward(value=reward)


def _at(nanoseconds: int | None) -> datetime:
    return (
        UNKNOWN_TIME
        if nanoseconds is None
        else _EPOCH + timedelta(microseconds=nanoseconds // 1000)
    )


def read(
    rows: Iterable[Row],
    bad: BadRows,
    left_out: Counter[str],
    read_spans: Callable[[Mapping[str, object]], Iterator[Span]] = spans_of,
) -> Iterator[Parsed]:
    """Read an episode per trace with model calls."""
    with Spool() as spool:
        for row in rows:
            try:
                if not isinstance(row.value, Mapping):
                    raise TypeError("it is not an object")
                for span in list(read_spans(row.value)):
                    spool.add(span)
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
                bad.add(row.where, f"holds no spans: {error}")
        yield from _parse_traces(spool.traces(), bad, left_out)


def _parse_traces(
    traces: Iterable[tuple[str, list[Span]]], bad: BadRows, left_out: Counter[str]
) -> Iterator[Parsed]:
    for trace, spans in traces:
        try:
            result = episode_of(trace, spans)
        except (ValidationError, ValueError, TypeError, KeyError, AttributeError) as error:
            bad.add(f"trace {trace}", f"cannot be read as an episode: {str(error).splitlines()[0]}")
            continue
        if result is None or result.episode is None:
            left_out["traces without a model call"] += 1
        else:
            others = sum(
                {"ajet.episode", "ajet.call", "ajet.event"}.isdisjoint(span.attributes)
                for span in spans
            )
            if not any("ajet.call" in span.attributes for span in spans):
                ids = {span.span_id for span in spans}
                tops = (span for span in spans if span.parent_id not in ids and not _is_call(span))
                others -= (
                    len(result.episode.calls)
                    + len(result.episode.events)
                    + (next(tops, None) is not None)
                )
            if others > 0:
                left_out["spans that are no model calls, tools or retrievals"] += others
            yield result


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
            yield from _parse_traces(_studio_traces(file), bad, left_out)
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
