"""The gateway: an OpenAI-compatible endpoint for every open episode, on loopback, in its own thread
and event loop."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette

from ajet_sdk.agent.context import Recorder
from ajet_sdk.engines.frozen import FrozenModels
from ajet_sdk.errors import ConfigError, EngineUnavailable
from ajet_sdk.gateway.access import Access
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.http_door import HttpDoor
from ajet_sdk.gateway.http_server import server_config
from ajet_sdk.gateway.process_door import ProcessDoor
from ajet_sdk.trace.live import live_routes
from ajet_sdk.trace.owner import announce, retract

if TYPE_CHECKING:
    from ajet_sdk.trace.writer import TraceWriter


BACKLOG = 2048
KEEP_ALIVE = 120
"""Seconds that an idle connection stays open."""


class Gateway:
    """Serves open episodes. With a writer, complete calls go to the trace, which can be queried
    live."""

    def __init__(
        self, writer: TraceWriter | None = None, *, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.writer = writer
        self.frozen = FrozenModels()
        """Models besides the policy; closed with the gateway."""
        self._access = Access()
        self.host = host
        self.port = port
        self._loop: asyncio.AbstractEventLoop | None = None
        self._door: ProcessDoor | None = None
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
        """Bind, and serve from a daemon thread. Raises OSError if the port is taken."""
        if self._thread is not None:
            return self
        listener = listening_socket(self.host, self.port)
        self.port = listener.getsockname()[1]
        live = None
        if self.writer is not None:
            live = Starlette(routes=live_routes(self.writer, self.token))
        config = server_config(
            HttpDoor(self._access, live),
            own_name=self.host,
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
                self._run(episode._close(True)).result(timeout=10)
            self._run(self.frozen.aclose()).result(timeout=10)

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

    def _run(self, work: Coroutine[object, object, None]) -> Future[None]:
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
            spec, self.url, put, self._run, self._access.end_keys, self._door, amend
        )
        self._access.add(episode)
        return episode

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
    """Return a listening socket. Its protocol is given, as asyncio else keeps Nagle's algorithm on
    (40 ms a reply)."""
    listener = socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
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
