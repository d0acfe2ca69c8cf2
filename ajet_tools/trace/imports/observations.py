"""LangSmith's runs and Langfuse's observations as spans, as their SDKs and APIs write them.

LangSmith: `Run.model_dump_json()` of what `Client.list_runs` returns. Langfuse: observations (pages of the API, and
traces that list theirs, too), in either spelling of their keys. What its SDK sends is OTLP and needs none of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ajet_sdk.capture.events import first_of
from ajet_tools.trace.imports.spans import Span, get, moment, objects, total_cost

LANGSMITH = ("run_type", "trace_id")
LANGFUSE = (("traceId", "startTime"), ("trace_id", "start_time", "project_id"), ("observations", "projectId"))
"""Keys by which a row is known."""


def spans_of(row: Mapping[str, object]) -> Iterator[Span]:
    """The spans of a row. Raises ValueError, TypeError or KeyError for one that is of neither."""
    if "run_type" in row:
        yield _run(row)
        for child in objects(row.get("child_runs"), "child_runs"):
            yield from spans_of(child)
    elif "data" in row:
        for observation in objects(row["data"], "data"):
            yield from spans_of(observation)
    elif "observations" in row:
        yield _observation({**row, "traceId": row["id"], "startTime": get(row, "timestamp"), "type": "TRACE"})
        for observation in objects(row["observations"], "observations"):
            yield _observation(observation, str(row["id"]))
    else:
        yield _observation(row)


def _run(run: Mapping[str, object]) -> Span:
    extra, asked, answered = (_mapping(run.get(name)) for name in ("extra", "inputs", "outputs"))
    about = _mapping(extra.get("metadata"))
    reply = _mapping(answered["output"]) if answered.keys() == {"output"} else answered
    usage = _mapping(reply.get("usage_metadata") or reply.get("usage"))
    cost = first_of({**usage, "of run": run.get("total_cost")}, ("of run", "total_cost", "cost"))
    settings = {name: value for name, value in asked.items() if name not in ("messages", "tools", "model")}
    settings |= _mapping(extra.get("invocation_params"))
    is_call = run["run_type"] == "llm"
    return Span(
        trace=_id(run["trace_id"]),
        span_id=_id(run["id"]),
        parent_id=_id(run.get("parent_run_id")) or None,
        name=str(run.get("name", "")),
        start=moment(run.get("start_time")),
        end=moment(run.get("end_time") or run.get("start_time")),
        error=str(run["error"]).strip() if run.get("error") else None,
        attributes=_present(
            {
                "openinference.span.kind": run["run_type"],
                "input.value": asked,
                "output.value": answered.get("output") if answered.keys() == {"output"} else answered,
                "gen_ai.request.model": asked.get("model") or about.get("ls_model_name") if is_call else None,
                "gen_ai.response.id": answered.get("id") if is_call else None,
                "llm.invocation_parameters": settings if is_call else None,
                "llm.token_count.prompt": first_of({**run, **usage}, ("input_tokens", "prompt_tokens")),
                "llm.token_count.completion": first_of({**run, **usage}, ("output_tokens", "completion_tokens")),
                "llm.cost.total": total_cost({"total": cost}),
            }
        ),
        events=[_score(name, _mapping(of).get("avg")) for name, of in _mapping(run.get("feedback_stats")).items()],
    )


def _observation(of: Mapping[str, object], parent: str | None = None) -> Span:
    usage = _mapping(get(of, "usageDetails") or of.get("usage"))
    costs = get(of, "totalCost"), get(of, "calculatedTotalCost"), get(usage, "totalCost")
    cost = next((cost for cost in costs if cost is not None), None)
    failed = of.get("level") == "ERROR"
    return Span(
        trace=_id(get(of, "traceId")),
        span_id=_id(of["id"]),
        parent_id=_id(get(of, "parentObservationId")) or parent,
        name=str(of.get("name") or ""),
        start=moment(get(of, "startTime")),
        end=moment(get(of, "endTime") or get(of, "startTime")),
        error=str(get(of, "statusMessage") or "error") if failed else None,
        attributes=_present(
            {
                "langfuse.observation.type": of["type"],
                "input.value": of.get("input"),
                "output.value": of.get("output"),
                "gen_ai.request.model": get(of, "model") or get(of, "providedModelName"),
                "llm.invocation_parameters": get(of, "modelParameters"),
                "llm.token_count.prompt": usage.get("input"),
                "llm.token_count.completion": usage.get("output"),
                "llm.cost.total": total_cost({"total": cost} if cost is not None else get(of, "costDetails")),
            }
        ),
        events=[_score(s["name"], s.get("value"), s.get("comment")) for s in objects(of.get("scores"), "scores")],
    )


def _score(name: object, value: object, comment: object = None) -> tuple[str, dict[str, object]]:
    of = {"name": name, "score.value": value, "explanation": comment}
    return "gen_ai.evaluation.result", {f"gen_ai.evaluation.{key}": item for key, item in of.items()}


def _id(value: object) -> str:
    return str(value or "").replace("-", "")


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _present(values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}
