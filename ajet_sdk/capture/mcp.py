"""An agent's MCP tool calls as events of its episode: `ClientSession.call_tool` of the package `mcp`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ajet_sdk.agent.context import current_episode
from ajet_sdk.capture.patches import Patches
from ajet_sdk.capture.remote import in_this_process, never_raise
from ajet_sdk.capture.routing import Fallback
from ajet_sdk.types import Event, Json, JsonView, now

if TYPE_CHECKING:
    from mcp.types import CallToolResult


_LONGEST = 100_000
"""Characters of one text of a result that are recorded; images are sent as text too."""


def patch_mcp(module: ModuleType, patches: Patches, fallback: Fallback) -> None:
    """Wrap `call_tool`. Its results and exceptions don't change."""
    patches.replace(module.ClientSession, "call_tool", _call_tool(module.ClientSession.call_tool))


def _call_tool(original: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(original)
    async def call_tool(
        self: object, name: str, arguments: JsonView | None = None, *args: object, **kwargs: object
    ) -> Any:
        active = current_episode.get()
        if active is None:
            return await original(self, name, arguments, *args, **kwargs)
        active = in_this_process(active)
        recorder, started_at, span = active.recorder, now(), current_span()

        def record(result: object, error: str | None) -> None:
            sent = dict(arguments or {})
            trace_id, span_id = span
            recorder.happened(
                Event(
                    name=name, arguments=sent, result=result, error=error, started_at=started_at, trace_id=trace_id,
                    span_id=span_id,
                )
            )  # fmt: skip

        try:
            answer: Any = await original(self, name, arguments, *args, **kwargs)
        except BaseException as raised:  # a cancellation and a time-out too
            message = f"{type(raised).__name__}: {raised}"
            never_raise(lambda: record(None, message))
            raise
        never_raise(lambda: record(*_read(answer)))
        return answer

    return call_tool


def _read(answer: CallToolResult) -> tuple[Json, str | None]:
    """The result as JSON, and its error message."""
    result = cut(answer.model_dump(mode="json", by_alias=True, exclude_none=True))
    if not result.get("isError"):
        return result, None
    texts = [str(part.get("text", "")) for part in result.get("content", ())]
    return result, "\n".join(filter(None, texts)) or "the tool reported an error"


def cut(value: object) -> Any:
    """JSON with its long texts cut off."""
    if isinstance(value, str) and len(value) > _LONGEST:
        return f"{value[:_LONGEST]}… ({len(value):,} characters)"
    if isinstance(value, dict):
        return {key: cut(item) for key, item in value.items()}
    return [cut(item) for item in value] if isinstance(value, list) else value


def current_span() -> tuple[str | None, str | None]:
    """Trace id and span id of the active OpenTelemetry span, or None. It imports nothing."""
    api = sys.modules.get("opentelemetry.trace")
    context = None if api is None else api.get_current_span().get_span_context()
    if context is None or not context.is_valid:
        return None, None
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"
