"""The gateway: an OpenAI-compatible endpoint for every open episode, on loopback, in its own thread
and event loop."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn
from starlette.applications import Starlette

from ajet_sdk.agent.context import Recorder
from ajet_sdk.engines.frozen import FrozenModels
from ajet_sdk.errors import ConfigError, EngineUnavailable
from ajet_sdk.gateway.access import Access
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.http_door import HttpDoor
from ajet_sdk.gateway.http_server import is_loopback, server_config
from ajet_sdk.gateway.process_door import ProcessDoor
from ajet_sdk.trace.live import live_routes
from ajet_sdk.trace.owner import announce, retract

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from ajet_sdk.trace.writer import TraceWriter

T = TypeVar("T")

BACKLOG = 2048
KEEP_ALIVE = 120
"""Seconds that an idle connection stays open."""


class Gateway:
    """Serves open episodes. With a writer, complete calls go to the trace, which can be queried
    live."""

    def __init__(
        self,
        writer: TraceWriter | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        routes: Sequence[BaseRoute] = (),
    ) -> None:
        """`routes` are served besides those of the episodes, at paths outside of `/v1` and
        `/episodes`."""
        self.writer = writer
        self._routes = tuple(routes)
        self.frozen = FrozenModels()
        """Models besides the policy; closed with the gateway."""
        self._access = Access()
        self.host = host
        self.port = port
        self._loop: asyncio.AbstractEventLoop | None = None
        self._door: ProcessDoor | None = None
        self._pages = HttpDoor(self._access)
        self._thread: threading.Thread | None = None
        self._server: Any = None

    # Start and end

    @property
    def token(self) -> str:
        """The key to the trace, and to any episode named by a header. Only gateway.json has it."""
        return self._access.token

    @property
    def url(self) -> str:
        """http://HOST:PORT, once started."""
        return f"http://{self.host}:{self.port}"

    def start(self) -> Gateway:
        """Bind, and serve from a daemon thread. Raises ConfigError if the port is taken."""
        if self._thread is not None:
            return self
        listener = listening_socket(self.host, self.port)
        self.port = listener.getsockname()[1]
        self._serve_trace()
        config = server_config(
            self._pages,
            own_name=self.host,
            keyed=not is_loopback(listener),
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=1,
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )
        self._server = _Server(config)
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, args=(listener, started), name="ajet-gateway", daemon=True
        )
        contextvars.Context().run(self._thread.start)  # outside of any episode
        started.wait()
        if self.writer is not None:
            announce(self.writer.path, self.url, self.token)
        return self

    def _serve_trace(self) -> None:
        """Serve the routes of the trace, if there is one, and those that were given."""
        live = () if self.writer is None else live_routes(self.writer, self.token)
        routes = [*live, *self._routes]
        self._pages.live = Starlette(routes=routes) if routes else None

    @contextmanager
    def recording(self, writer: TraceWriter) -> Iterator[Gateway]:
        """Within the block, record to a trace, which can be queried live. Episodes end with it."""
        self.writer = writer
        self._serve_trace()
        announce(writer.path, self.url, self.token)
        try:
            yield self
        finally:
            for episode in list(self._access.episodes.values()):
                self.submit(episode._close(True)).result(timeout=10)
            self.writer = None
            self._serve_trace()
            retract(writer.path)

    def _serve(self, listener: socket.socket, started: threading.Event) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._door = ProcessDoor(self._access, self._loop)
            self._loop.call_soon(started.set)
            await self._server.serve(sockets=[listener])

        try:
            asyncio.run(serve())
        finally:
            if self._door is not None:
                self._door.close()
            started.set()

    def close(self) -> None:
        """Stop serving. Calls in flight are cancelled."""
        if self._thread is None or self._loop is None:
            return
        with (
            ExitStack() as last
        ):  # stops the server even if a step fails, for example on a full disk
            last.callback(self._stop, self._thread)
            if self.writer is not None:
                last.callback(retract, self.writer.path)
            for episode in list(self._access.episodes.values()):
                self.submit(episode._close(True)).result(timeout=10)
            self.submit(self.frozen.aclose()).result(timeout=10)

    def _stop(self, thread: threading.Thread) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._server.ended.set)
        thread.join(timeout=10)
        self._thread = None

    def __enter__(self) -> Gateway:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, work: Coroutine[object, object, T]) -> Future[T]:
        """Run a coroutine in the gateway's event loop, from any thread. Raises EngineUnavailable if
        it does not run."""
        if self._loop is None or self._loop.is_closed():
            work.close()
            raise EngineUnavailable("the gateway is not running; call start() first")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # Episodes

    def open(self, spec: EpisodeSpec) -> OpenEpisode:
        """Open an episode, whose calls are answered from now on. Raises ConfigError if its id is
        already open."""
        if self._thread is None:
            raise EngineUnavailable("the gateway is not running; call start() first")
        if spec.episode_id in self._access.episodes:
            raise ConfigError(
                f"episode {spec.episode_id} is already open; every attempt needs its own id"
            )
        put, amend = (
            (self.writer.put, self.writer.undelivered) if self.writer is not None else (None, None)
        )
        episode = OpenEpisode(
            spec, self.url, put, self.submit, self._access.end_keys, self._door, amend
        )
        self._access.add(episode)
        return episode

    def recognize(self, find: Callable[[str], str | None] | None) -> None:
        """Tell keys of earlier episodes, which `find` returns by key, from unknown ones."""
        self._access.issued = find

    def observe(self, find: Callable[[str], Recorder]) -> None:
        """Take reports of other processes for episodes of `ajet.trace`, which `find` returns by
        their ids."""
        self._access.observed = find


class _Server(uvicorn.Server):
    """Sleeps until `ended` is set, while uvicorn's server wakes up ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ended = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)  # sets the headers of every response
        await self.ended.wait()


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ConfigError if the port is taken, or the address is not of
    this machine.

    Its protocol is given, as asyncio else keeps Nagle's algorithm on (40 ms a reply).
    """
    listener = socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}; choose another --port"
        ) from error
    return listener


async def serve_until_signal(settings: uvicorn.Config, listener: socket.socket) -> None:
    """Serve until Ctrl-C or SIGTERM, then shut down."""
    server = uvicorn.Server(settings)
    server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]  # would raise them again at the end
    main = (
        threading.current_thread() is threading.main_thread()
    )  # else, in a notebook, an interrupt cancels
    for number in (signal.SIGINT, signal.SIGTERM) if main else ():
        asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
    await server.serve(sockets=[listener])
