"""Serves the viewer to a browser of this machine: textual-serve on loopback, behind a token."""

from __future__ import annotations

import asyncio
import hmac
import os
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

_HOST = "127.0.0.1"
_FONTS = "https://fonts.googleapis.com"
_CLOSE_SECONDS = 1.0


def serve(
    arguments: list[str], port: int, announce: Callable[[str], None], *, until_eof: bool = False
) -> None:
    """Serve `ajet ARGUMENTS`, a process per connection, until Ctrl-C.

    Args:
        port: 0 for a free port.
        announce: called with the URL, including the token, when connections are accepted.
        until_eof: also stop at the end of standard input, so that the server ends with its parent process.

    Raises ConfigError if the port is taken.
    """
    try:
        listener = socket.create_server((_HOST, port))
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(
            f"cannot listen on {_HOST}:{port} ({reason}); choose another --port, or 0 for a"
            " free one"
        ) from error
    port = listener.getsockname()[1]
    command = shlex.join([sys.executable, "-m", "ajet", *arguments])
    token = secrets.token_urlsafe(24)
    server = _LocalServer(f"exec {command}", _HOST, port, "ajet trace view")

    async def run() -> None:
        app = await server._make_app()
        app.middlewares.append(_guard(token, f"ajet_view_{port}"))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_SECONDS)
        await runner.setup()
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        if until_eof:
            _at_eof(lambda: loop.call_soon_threadsafe(stop.set))
        try:
            await web.SockSite(runner, listener).start()
            announce(f"http://{_HOST}:{port}/?token={token}")
            await stop.wait()
        finally:
            await runner.cleanup()

    asyncio.run(run())


def _at_eof(act: Callable[[], object]) -> None:
    def wait() -> None:
        sys.stdin.read()
        act()

    threading.Thread(target=wait, daemon=True).start()


class _LocalServer(Server):  # type: ignore[misc,unused-ignore]
    async def on_startup(self, app: web.Application) -> None:
        """Print nothing; the caller announces the URL."""

    async def handle_index(self, request: web.Request) -> object:
        self.public_url = f"http://{request.host}"  # also through a port forwarded by ssh
        page = await super().handle_index(request)
        page.text = page.text.replace(_FONTS, "about:blank#")  # no external requests
        return page


def _guard(token: str, cookie: str) -> object:
    """Require the token in the URL, which sets a cookie, or that cookie.

    Requests of other origins are refused too, as browsers send cookies to all ports of a host.
    """

    @web.middleware  # type: ignore[untyped-decorator,unused-ignore]
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        refused = foreign(request.host, request.headers.get("Origin"), None, "")
        if refused is not None:
            raise web.HTTPForbidden(text=f"403: {refused[1]}\n")
        if request.path == "/" and _same(request.query.get("token", ""), token):
            redirect = web.HTTPFound(request.rel_url.without_query_params("token"))
            redirect.set_cookie(cookie, token, httponly=True, samesite="Strict", path="/")
            raise redirect
        if not _same(request.cookies.get(cookie, ""), token):
            raise web.HTTPForbidden(text="403: open the whole URL that the command printed\n")
        return await handler(request)

    return guard


def _same(candidate: str, token: str) -> bool:
    return hmac.compare_digest(candidate.encode(), token.encode())
