"""A live trace: `gateway.json` says who owns a file, and an authenticated loopback route answers queries on it."""

from __future__ import annotations

import hmac
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.errors import QueryError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from ajet_sdk.trace.writer import TraceWriter

__all__ = ["QUERY_PATH", "Owner", "announce", "live_routes", "owner_of", "owners", "process_started", "retract"]

QUERY_PATH = "/trace/query"
_ARROW = "application/vnd.apache.arrow.stream"
_BODY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Owner:
    """The live process that writes a trace file; `url` is None where it answers no queries."""

    trace: str
    pid: int
    started: str
    host: str
    writes: bool = False
    """Its TraceWriter has the file; a gateway alone has not."""
    url: str | None = None
    token: str | None = None
    source: Path | None = None
    """The gateway.json that says so."""

    @property
    def alive(self) -> bool:
        """Of another machine's process (a shared disk, a container since replaced) only the file's lock can tell."""
        return self.host == socket.gethostname() and process_started(self.pid) == self.started != ""


def process_started(pid: int) -> str:
    """When a process started, in the system's own terms; empty where there is no such process. Tells reused pids."""
    if sys.platform == "linux":
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return ""
        fields = stat.rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def announce(path: Path, url: str | None = None, token: str | None = None, *, writes: bool = False) -> None:
    """Say beside the trace file `path`, readable by this user only, that this process writes it or answers queries.

    Called by the writer and by the gateway, in either order; what the other said is kept. A file that another live
    process owns is left as it is.
    """
    path = path.resolve()
    before = owner_of(path)
    if before and before.pid != os.getpid():
        return
    content = {
        "trace": path.name,
        "pid": os.getpid(),
        "started": process_started(os.getpid()),
        "host": socket.gethostname(),
        "writes": writes or bool(before and before.writes),
        "url": url or (before.url if before else None),
        "token": token or (before.token if before else None),
    }
    _write(_place(path), content)


def retract(path: Path, *, writes: bool = False) -> None:
    """Take back what `announce` said: the url, or (`writes`) the ownership and with it everything."""
    owner = owner_of(path)
    if not owner or owner.pid != os.getpid() or not owner.source:
        return
    if owner.writes and not writes:
        names = ("trace", "pid", "started", "host", "writes")
        _write(owner.source, {name: getattr(owner, name) for name in names})
    else:
        owner.source.unlink(missing_ok=True)


def _write(home: Path, content: dict[str, Any]) -> None:
    draft = home.with_name(f".{home.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(content, file)
    draft.replace(home)


def owners(directory: Path) -> list[Owner]:
    """Everything announced in a directory, alive or not."""
    return [owner for source in sorted(directory.glob("*gateway.json")) if (owner := _read(source))]


def owner_of(path: Path) -> Owner | None:
    """The live owner of a trace file; None where nobody writes it."""
    return next((o for o in owners(path.resolve().parent) if o.trace == path.name and o.alive), None)


def _read(source: Path) -> Owner | None:
    try:
        raw = json.loads(source.read_text())
        names = ("trace", "pid", "started", "host", "writes", "url", "token")
        return Owner(**{name: raw[name] for name in names if name in raw}, source=source)
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def _place(path: Path) -> Path:
    """gateway.json, or a name of its own where another live process of this directory has that."""
    home = path.with_name("gateway.json")
    there = _read(home) if home.exists() else None
    taken = there is not None and there.trace != path.name and there.alive
    return path.with_name(f"{path.stem}.gateway.json") if taken else home


def pack(parameters: Sequence[Any]) -> list[Any]:
    """Query parameters as JSON."""
    return [{"$time": p.isoformat()} if isinstance(p, datetime | date) else p for p in parameters]


def unpack(parameters: Sequence[Any]) -> list[Any]:
    """The inverse of `pack`."""
    return [datetime.fromisoformat(p["$time"]) if isinstance(p, dict) and "$time" in p else p for p in parameters]


def live_routes(writer: TraceWriter, token: str) -> list[Route]:
    """The route POST /trace/query: JSON {sql, parameters} in, an Arrow stream out; 401 without `Bearer token`."""
    from starlette.routing import Route

    async def query(request: Request) -> Response:
        from starlette.responses import JSONResponse

        sent = request.headers.get("authorization", "")
        if not hmac.compare_digest(sent.encode(), f"Bearer {token}".encode()):
            return JSONResponse({"error": "the token is missing or wrong; it is in gateway.json"}, 401)
        return await _answer(writer, request)

    return [Route(QUERY_PATH, query, methods=["POST"])]


async def _answer(writer: TraceWriter, request: Request) -> Response:
    import anyio.to_thread
    from starlette.responses import JSONResponse, Response

    raw = await request.body()
    if len(raw) > _BODY_BYTES:
        return JSONResponse({"error": "the query is longer than 1 MiB"}, 413)
    try:
        body = json.loads(raw)
        sql, parameters = str(body["sql"]), unpack(body.get("parameters", []))
    except (ValueError, KeyError, TypeError, AttributeError):
        return JSONResponse({"error": "expected JSON with `sql` and, if need be, a list `parameters`"}, 400)
    try:
        data = await anyio.to_thread.run_sync(_stream, writer, sql, parameters, abandon_on_cancel=True)
    except QueryError as error:
        return JSONResponse({"error": str(error)}, 400)
    return Response(data, media_type=_ARROW)


def _stream(writer: TraceWriter, sql: str, parameters: list[Any]) -> bytes:
    import pyarrow as pa

    table = writer.query(sql, parameters)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())
