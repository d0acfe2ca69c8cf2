"""A live trace: authenticated loopback routes of its owner, in `gateway.json`, return rows and take
feedback."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from ajet_sdk.errors import QueryError, TraceError
from ajet_sdk.trace.owner import ROWS_PATH, Owner
from ajet_sdk.trace.query import TIMEOUT
from ajet_sdk.trace.rows import RowsOf
from ajet_sdk.types import Feedback

if TYPE_CHECKING:
    import httpx
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from ajet_sdk.trace.writer import TraceWriter

FEEDBACK_PATH = "/trace/feedback"

COST_HEADER = "x-ajet-processor-seconds"
"""Response header with the CPU seconds that it took."""

_EXCHANGE = 0.002
"""CPU seconds to receive a request and send its response, without reading."""

_ARROW = "application/vnd.apache.arrow.stream"

_BODY_BYTES = 1 << 20

_DYING = 5.0
"""Seconds after a broken connection for a process to end, before it counts as alive but
unresponsive."""

_AT_ONCE = 2
"""Concurrent responses."""

_FEEDBACK = TypeAdapter(list[Feedback])


def post(owner: Owner, path: str, body: object) -> httpx.Response | None:
    """Send a request to a live owner; None if it has ended. Raises TraceError if it is alive but
    doesn't answer."""
    if not owner.url:
        raise ValueError(f"process {owner.pid} does not answer")
    import httpx  # a quarter of the start time of `ajet trace ls`, and only needed for live runs

    try:  # plain http on loopback: no proxy, and no certificates to load
        with httpx.Client(
            trust_env=False, verify=False, timeout=httpx.Timeout(5.0, read=TIMEOUT + 10)
        ) as client:
            headers = {"Authorization": f"Bearer {owner.token}"}
            return client.post(owner.url.rstrip("/") + path, json=body, headers=headers)
    except httpx.TransportError as error:
        broken = not isinstance(error, httpx.TimeoutException)
        until = time.monotonic() + _DYING
        while (
            broken and owner.stands and time.monotonic() < until
        ):  # a killed process loses its connections first
            time.sleep(0.01)
        if owner.stands:
            raise TraceError(
                f"the live run that writes {owner.trace} (pid {owner.pid}) did not answer: {error}"
            ) from error
        return None


def refusal(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"


_FLUSH_SECONDS = 5.0
_Answer = Callable[["TraceWriter", bytes], Awaitable["Response"]]


def live_routes(writer: TraceWriter, token: str) -> list[Route]:
    """The POST routes of a live trace, which answer 401 without `Bearer token`.

    ROWS_PATH takes a RowsOf as JSON and returns an Arrow stream, a few at a time, or 503 if the
    run ends meanwhile; FEEDBACK_PATH a list of Feedback.
    """
    from starlette.routing import Route

    turns = asyncio.Semaphore(_AT_ONCE)

    def guarded(answer: _Answer) -> Callable[[Request], Awaitable[Response]]:
        async def check(request: Request) -> Response:
            from starlette.responses import JSONResponse

            sent = request.headers.get("authorization", "")
            if not hmac.compare_digest(sent.encode(), f"Bearer {token}".encode()):
                return JSONResponse(
                    {"error": "the token is missing or wrong; it is in gateway.json"}, 401
                )
            raw = await request.body()
            if len(raw) > _BODY_BYTES:
                return JSONResponse({"error": "the request is longer than 1 MiB"}, 413)
            return await answer(writer, raw)

        return check

    return [
        Route(ROWS_PATH, guarded(partial(_rows, turns)), methods=["POST"]),
        Route(FEEDBACK_PATH, guarded(_feedback), methods=["POST"]),
    ]


async def _rows(turns: asyncio.Semaphore, writer: TraceWriter, raw: bytes) -> Response:
    import anyio.to_thread
    from starlette.responses import JSONResponse, Response

    try:
        wanted = RowsOf.model_validate_json(raw)
    except ValidationError as error:
        wrong = "; ".join(detail["msg"] for detail in error.errors())
        return JSONResponse(
            {"error": f"expected JSON with a `table` and its `columns`: {wrong}"}, 400
        )
    try:
        async with turns:
            data, seconds = await anyio.to_thread.run_sync(
                _stream, writer, wanted, abandon_on_cancel=True
            )
    except QueryError as error:
        return JSONResponse({"error": str(error)}, 400 if writer.is_open else 503)
    except asyncio.CancelledError:  # the server stops, and would send 500 otherwise
        return JSONResponse({"error": "the run is ending"}, 503)
    return Response(data, media_type=_ARROW, headers={COST_HEADER: f"{seconds + _EXCHANGE:.6f}"})


async def _feedback(writer: TraceWriter, raw: bytes) -> Response:
    """Store feedback; it is in the file when the response is sent."""
    import anyio.to_thread
    from starlette.responses import JSONResponse

    try:
        feedback = _FEEDBACK.validate_json(raw)
    except ValidationError as error:
        return JSONResponse({"error": f"expected a JSON list of feedback: {error}"}, 400)

    def write() -> bool:
        writer.put(*feedback)
        return writer.flush()

    try:
        if await anyio.to_thread.run_sync(write):
            return JSONResponse({"written": len(feedback)})
        return JSONResponse(
            {"error": "the file could not be written in time; see the run's log"}, 503
        )
    except TraceError as error:
        return JSONResponse({"error": str(error)}, 503)


def _stream(writer: TraceWriter, wanted: RowsOf) -> tuple[bytes, float]:
    """The response, with all earlier records, and its CPU seconds without waiting for a busy
    run."""
    import pyarrow as pa

    began = time.thread_time()
    with contextlib.suppress(TraceError):  # of the disk: return the rows in the file
        writer.flush(_FLUSH_SECONDS)
    table = wanted.read(writer.query)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue()), time.thread_time() - began
