"""The viewer in a browser: textual-serve on loopback, behind a token."""

from __future__ import annotations

import asyncio
import copy
import hmac
import math
import secrets
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable

from aiohttp import web
from textual_serve.server import Server

from ajet_sdk.errors import ConfigError
from ajet_sdk.gateway.http_server import foreign

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_HOST = "127.0.0.1"
_FONTS = "https://fonts.googleapis.com"
_IDLE_SECONDS = 25.0
"""A connection that brings no whole request for so long is closed: aiohttp waits for half of one without end."""
_CHECK_SECONDS = 5.0
_CLOSE_SECONDS = 1.0
_SCRIPT = """<script>
  const terminal = document.querySelector("#terminal"), open = window.open.bind(window);
  if (location.hash.length > 1) terminal.dataset.sessionWebsocketUrl += "/" + location.hash.slice(1);
  window.open = (url, ...more) => url.startsWith("#") ? history.replaceState(null, "", url) : open(url, ...more);
  window.addEventListener("hashchange", () => location.reload());
  new MutationObserver((_, observer) => {
    const keyboard = document.querySelector(".xterm-helper-textarea");
    if (keyboard && document.body.classList.contains("-first-byte")) {
      observer.disconnect();
      keyboard.focus();
    }
  }).observe(document.body, {attributes: true, childList: true, subtree: true});
</script>
"""
"""What stands behind `#` says which screen to begin with, and follows the viewer: it asks to open such addresses.
Keys go to the viewer as soon as it is there; textual-serve waits for a click."""
_REFUSED = "403: the token is missing or wrong. Open the whole URL that `ajet trace view --web` printed.\n"


def serve(arguments: list[str], port: int, announce: Callable[[str], None], *, until_eof: bool = False) -> None:
    """Serve `ajet ARGUMENTS` to browsers on loopback until Ctrl-C; each that connects gets a process of its own.

    `port` 0 takes a free one. `announce` gets the URL, which holds the token, once connections are accepted.
    `until_eof` also ends it when its standard input closes: so it ends with the process that started it, however that
    ends. Raises ConfigError where the port is taken.
    """
    listener = _listen(port)
    token = secrets.token_urlsafe(24)
    server = _GuardedServer(_command(arguments), _HOST, listener.getsockname()[1], "ajet")
    server.arguments = arguments
    asyncio.run(_serve(server, listener, token, announce, until_eof))


def _command(arguments: list[str]) -> str:
    return "exec " + shlex.join([sys.executable, "-m", "ajet", *arguments])


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((_HOST, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {_HOST}:{port} ({error.strerror}); choose another --port, or 0 for a free one"
        ) from error
    return listener


async def _serve(
    server: _GuardedServer, listener: socket.socket, token: str, announce: Callable[[str], None], until_eof: bool
) -> None:
    app = await server.guarded_app(token)
    runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=3.0)
    await runner.setup()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if until_eof:
        threading.Thread(target=_wait_for_eof, args=(loop, stop), daemon=True).start()
    closing = asyncio.create_task(_close_idle(runner))
    try:
        await web.SockSite(runner, listener).start()
        announce(f"http://{_HOST}:{server.port}/?token={token}")
        await stop.wait()
    finally:
        closing.cancel()
        await runner.cleanup()


async def _close_idle(runner: web.AppRunner) -> None:
    """Close connections that have had no request for long, those with half of one too."""
    idle_since = runner.app[_IDLE_SINCE]
    while runner.server is not None:
        await asyncio.sleep(_CHECK_SECONDS)
        now, there = asyncio.get_running_loop().time(), runner.server.connections
        for connection in idle_since.keys() - set(there):
            del idle_since[connection]
        for connection in there:
            if now - idle_since.setdefault(connection, now) >= _IDLE_SECONDS:
                connection.force_close()


def _wait_for_eof(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    sys.stdin.read()
    loop.call_soon_threadsafe(stop.set)


class _GuardedServer(Server):  # type: ignore[misc,unused-ignore]
    """textual-serve's server behind a token, that answers under whatever address it is reached by."""

    arguments: list[str]

    async def guarded_app(self, token: str) -> web.Application:
        app = await self._make_app()
        app.router.add_get("/ws/{at}", self.handle_websocket)
        app.middlewares.append(_guard(token, f"ajet_view_{self.port}"))
        app[_SOCKETS], app[_IDLE_SINCE] = set(), {}
        app.on_shutdown.append(_close_sockets)
        return app

    async def on_startup(self, app: web.Application) -> None:
        """Says nothing: the caller says the URL."""

    async def handle_index(self, request: web.Request) -> object:
        """The page names itself by the address it was asked under: a port forwarded through SSH works too."""
        self.public_url = f"http://{request.host}"
        page = await super().handle_index(request)
        page.text = page.text.replace(_FONTS, "about:blank#")  # nothing is fetched from elsewhere
        page.text = page.text.replace("</body>", f"{_SCRIPT}</body>")
        return page

    async def handle_websocket(self, request: web.Request) -> object:
        task = asyncio.current_task()
        request.app[_SOCKETS].add(task)
        server, at = copy.copy(self), request.match_info.get("at")
        if at is not None:
            server.command = _command([*self.arguments[:2], f"--at={at}", *self.arguments[2:]])
        try:
            return await Server.handle_websocket(server, request)
        finally:
            request.app[_SOCKETS].discard(task)


_SOCKETS: web.AppKey[set[object]] = web.AppKey("ajet_sockets", set)
_IDLE_SINCE: web.AppKey[dict[object, float]] = web.AppKey("ajet_idle_since", dict)
"""Connections -> the loop's time; infinite while a request is answered, as a viewer's websocket is."""


async def _close_sockets(app: web.Application) -> None:
    """Cancel each browser's viewer and wait for it; not for a browser that does not answer, as one that sleeps."""
    tasks = set(app[_SOCKETS])
    while tasks:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)


def _guard(token: str, cookie: str) -> object:
    """Lets through who has the token in the URL, which sets a cookie, or that cookie; answers 403 to all others,
    and to a page of another origin: the browser would send our cookie along from the same host."""

    @web.middleware  # type: ignore[untyped-decorator,unused-ignore]
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        idle_since = request.app[_IDLE_SINCE]
        idle_since[request.protocol] = math.inf
        try:
            return await answer(request, handler)
        finally:
            idle_since[request.protocol] = asyncio.get_running_loop().time()

    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        refused = foreign(request.host, request.headers.get("Origin"), None)
        if refused is not None:
            raise web.HTTPForbidden(text=f"403: {refused[1]}\n")
        if _equal(request.query.get("token", ""), token) and request.path == "/":
            query = {name: value for name, value in request.query.items() if name != "token"}
            redirect = web.HTTPFound(request.rel_url.with_query(query))
            redirect.set_cookie(cookie, token, httponly=True, samesite="Strict", path="/")
            raise redirect
        if not _equal(request.cookies.get(cookie, ""), token):
            raise web.HTTPForbidden(text=_REFUSED)
        return await handler(request)

    return guard


def _equal(candidate: str, token: str) -> bool:
    return hmac.compare_digest(candidate.encode(), token.encode())
