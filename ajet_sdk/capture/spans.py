"""Tools and retrievals that an agent's own OpenTelemetry spans tell of, as events of its episode."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from types import ModuleType
from typing import TYPE_CHECKING

from ajet_sdk.agent.context import current_episode
from ajet_sdk.capture.mcp import cut
from ajet_sdk.capture.patches import Patches
from ajet_sdk.capture.remote import in_this_process, never_raise
from ajet_sdk.capture.routing import Fallback
from ajet_sdk.types import Event

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Span

KINDS = ("openinference.span.kind", "gen_ai.span.kind", "traceloop.span.kind", "langfuse.observation.type")
"""Attributes in which the conventions name a span's kind."""
INPUTS = ("input.value", "langfuse.observation.input", "traceloop.entity.input", "agentscope.function.input")
OUTPUTS = ("output.value", "langfuse.observation.output", "traceloop.entity.output", "agentscope.function.output")
_NAMES = ("gen_ai.tool.name", "tool.name", "gen_ai.data_source.id", "traceloop.entity.name")
_ARGUMENTS = ("gen_ai.tool.call.arguments", "gen_ai.retrieval.query.text", *INPUTS, "tool.parameters")
_RESULTS = ("gen_ai.tool.call.result", "gen_ai.retrieval.documents", *OUTPUTS)
_DOCUMENT = "retrieval.documents.{}.document.content"


def event_of(
    name: str,
    attributes: Mapping[str, object],
    error: str | None,
    started_at: datetime,
    ended_at: datetime,
    ids: tuple[str, str],
) -> Event | None:
    """The tool call or retrieval of a span, by the GenAI, OpenInference, OpenLLMetry or Langfuse conventions.

    Attributes are flat; `ids` are those of the trace and the span. None: the span is of something else.
    """
    kind = f"{first_of(attributes, KINDS) or attributes.get('gen_ai.operation.name')}".lower()
    if kind not in ("tool", "execute_tool", "retriever", "retrieval"):
        return None
    asked = parsed(first_of(attributes, _ARGUMENTS))
    result = parsed(first_of(attributes, _RESULTS))
    if result is None:
        documents = (attributes.get(_DOCUMENT.format(i)) for i in range(64))
        result = [text for text in documents if text is not None] or None
    return Event(
        kind="tool" if "tool" in kind else "retrieval",
        name=str(first_of(attributes, _NAMES) or name),
        arguments=cut(asked if isinstance(asked, dict) else {} if asked is None else {"input": asked}),
        result=cut(result),
        error=error,
        started_at=started_at,
        ended_at=ended_at,
        trace_id=ids[0],
        span_id=ids[1],
    )


def first_of(attributes: Mapping[str, object], names: tuple[str, ...]) -> object:
    """The first of these attributes that there is."""
    return next((attributes[name] for name in names if attributes.get(name) is not None), None)


def parsed(value: object) -> object:
    """Parsed JSON if the value is the text of an object or a list, else the value."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def patch_spans(module: ModuleType, patches: Patches, fallback: Fallback) -> None:
    """Wrap `Span.end` of OpenTelemetry's SDK, whatever its provider exports to."""
    original: Callable[[Span, int | None], None] = module.Span.end

    @functools.wraps(original)
    def end(self: Span, end_time: int | None = None) -> None:
        ended = self.end_time is not None
        original(self, end_time)
        active = current_episode.get()
        if active is not None and not ended:
            never_raise(lambda: _record(self, in_this_process(active).recorder))

    patches.replace(module.Span, "end", end)


def _record(span: Span, recorder: object) -> None:
    context, status = span.get_span_context(), span.status
    ids = f"{context.trace_id:032x}", f"{context.span_id:016x}"
    if any(event.span_id == ids[1] for event in getattr(recorder, "events", ())):  # recorded at its MCP session
        return
    error = (status.description or "error") if status.status_code.name == "ERROR" else None
    times = [datetime.fromtimestamp((at or 0) / 1e9, timezone.utc) for at in (span.start_time, span.end_time)]
    event = event_of(span.name, span.attributes or {}, error, times[0], times[1], ids)
    if event is not None:
        recorder.happened(event)  # type: ignore[attr-defined]
