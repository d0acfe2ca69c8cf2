"""Records tool calls and retrievals of an agent as events of its episode: from MCP sessions and
OpenTelemetry spans."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timezone
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ajet_sdk.agent.context import current_episode
from ajet_sdk.capture.patches import Patches
from ajet_sdk.capture.processes import in_this_process, never_raise
from ajet_sdk.capture.routing import Fallback
from ajet_sdk.dialects.message_parts import PICTURE_KEYS, picture_url
from ajet_sdk.errors import PictureError
from ajet_sdk.pictures import picture_at
from ajet_sdk.types import Event, Json, JsonView, now

if TYPE_CHECKING:
    from mcp.types import CallToolResult
    from opentelemetry.sdk.trace import Span

KINDS = (
    "openinference.span.kind",
    "gen_ai.span.kind",
    "traceloop.span.kind",
    "langfuse.observation.type",
    "langsmith.span.kind",
)
"""Attributes for a span's kind."""
INPUTS = (
    "input.value",
    "langfuse.observation.input",
    "traceloop.entity.input",
    "agentscope.function.input",
    "gen_ai.prompt",  # LangSmith's
)
OUTPUTS = (
    "output.value",
    "langfuse.observation.output",
    "traceloop.entity.output",
    "agentscope.function.output",
    "gen_ai.completion",
)
_NAMES = ("gen_ai.tool.name", "tool.name", "gen_ai.data_source.id", "traceloop.entity.name")
_ARGUMENTS = (
    "gen_ai.tool.call.arguments",
    "gen_ai.retrieval.query.text",
    *INPUTS,
    "tool.parameters",
)
_RESULTS = ("gen_ai.tool.call.result", "gen_ai.retrieval.documents", *OUTPUTS)
_DOCUMENT = "retrieval.documents.{}.document.content"
_LONGEST = 100_000
"""Recorded characters of each text of a result, but not of a picture, which would be broken."""


def patch_mcp(module: ModuleType, patches: Patches, fallback: Fallback) -> None:
    """Wrap `ClientSession.call_tool`. Its results and exceptions don't change."""
    original: Callable[..., Awaitable[object]] = module.ClientSession.call_tool

    @functools.wraps(original)
    async def call_tool(
        self: object, name: str, arguments: JsonView | None = None, *args: object, **kwargs: object
    ) -> Any:
        active = current_episode.get()
        if active is None:
            return await original(self, name, arguments, *args, **kwargs)
        active = in_this_process(active)
        recorder = active.recorder
        started_at = now()
        span = current_span()

        def record(result: object, error: str | None) -> None:
            sent = dict(arguments or {})
            event = Event(
                name=name, arguments=sent, result=result, error=error, started_at=started_at
            )
            recorder.happened(event.model_copy(update={"trace_id": span[0], "span_id": span[1]}))

        try:
            answer: Any = await original(self, name, arguments, *args, **kwargs)
        except BaseException as raised:  # also a cancellation or a time-out
            message = f"{type(raised).__name__}: {raised}"
            never_raise(lambda: record(None, message))
            raise
        never_raise(lambda: record(*_read(answer)))
        return answer

    patches.replace(module.ClientSession, "call_tool", call_tool)


def _read(answer: CallToolResult) -> tuple[Json, str | None]:
    """The result as JSON, and its error message."""
    result = cut(answer.model_dump(mode="json", by_alias=True, exclude_none=True))
    if not result.get("isError"):
        return result, None
    texts = [str(part.get("text", "")) for part in result.get("content", ())]
    return result, "\n".join(filter(None, texts)) or "the tool reported an error"


def cut(value: object) -> Any:
    """Truncate long texts in JSON, but not the data of pictures."""
    if isinstance(value, str):
        if len(value) <= _LONGEST or _is_picture(value):
            return value
        return f"{value[:_LONGEST]}… ({len(value):,} characters)"
    if isinstance(value, dict):
        url = picture_url(value)
        is_picture = url is not None and len(url) > _LONGEST and _is_picture(url)
        return {
            key: item if is_picture and key in PICTURE_KEYS else cut(item)
            for key, item in value.items()
        }
    return [cut(item) for item in value] if isinstance(value, list) else value


def _is_picture(url: str) -> bool:
    try:
        picture_at(url)
    except PictureError:
        return False
    return True


def current_span() -> tuple[str | None, str | None]:
    """Trace id and span id of the active OpenTelemetry span, or None. Does not import
    OpenTelemetry."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        context = None
    else:
        context = api.get_current_span().get_span_context()
    if context is None or not context.is_valid:
        return None, None
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


def event_of(
    name: str,
    attributes: Mapping[str, object],
    error: str | None,
    started_at: datetime,
    ended_at: datetime,
    ids: tuple[str, str],
) -> Event | None:
    """Convert a span to a tool call or retrieval, by the GenAI, OpenInference, OpenLLMetry or
    Langfuse conventions.

    `attributes` are flat; `ids` are those of trace and span. Returns None for spans of other kinds.
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
        arguments=cut(
            asked if isinstance(asked, dict) else {} if asked is None else {"input": asked}
        ),
        result=cut(result),
        error=error,
        started_at=started_at,
        ended_at=ended_at,
        trace_id=ids[0],
        span_id=ids[1],
    )


def first_of(attributes: Mapping[str, object], names: tuple[str, ...]) -> object:
    """The value of the first attribute that is present."""
    return next((attributes[name] for name in names if attributes.get(name) is not None), None)


def parsed(value: object) -> object:
    """Parse the JSON text of an object or a list; return other values unchanged."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def patch_spans(module: ModuleType, patches: Patches, fallback: Fallback) -> None:
    """Wrap `Span.end` of OpenTelemetry's SDK, which works with any exporter."""
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
    context = span.get_span_context()
    status = span.status
    ids = f"{context.trace_id:032x}", f"{context.span_id:016x}"
    if any(
        event.span_id == ids[1] for event in getattr(recorder, "events", ())
    ):  # recorded at its MCP session
        return
    if status.status_code.name == "ERROR":
        error = status.description or "error"
    else:
        error = None
    times = [
        datetime.fromtimestamp((at or 0) / 1e9, timezone.utc)
        for at in (span.start_time, span.end_time)
    ]
    event = event_of(span.name, span.attributes or {}, error, times[0], times[1], ids)
    if event is not None:
        recorder.happened(event)  # type: ignore[attr-defined]
