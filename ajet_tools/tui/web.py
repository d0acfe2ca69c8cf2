"""Serves the viewer to browsers: textual-serve on loopback, protected by a token or a file of
read-only tokens."""

from __future__ import annotations

import asyncio
import copy
import hmac
import json
import math
import os
import re
import secrets
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from aiohttp import web
from textual_serve.app_service import AppService
from textual_serve.server import Server, to_int

from ajet_sdk.errors import ConfigError
from ajet_sdk.gateway.http_server import foreign
from ajet_sdk.reporting.output import echo
from ajet_sdk.types import now
from ajet_tools.text.clean import one_line

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_HOST = "127.0.0.1"
_FONTS = "https://fonts.googleapis.com"
_IDLE_SECONDS = 25.0
"""Idle connections are closed: aiohttp waits for incomplete requests forever."""
_CHECK_SECONDS = 5.0
_CLOSE_SECONDS = 1.0
_MOST = 8
"""Maximum number of viewers per person, as each is a process."""
_LARGEST = 800
"""Maximum columns and rows of a terminal, as each cell takes memory."""
_PERSON = re.compile(r"([\w.@+-]+)[ \t]+([0-9A-Za-z_-]{16,})")
_TOKEN = re.compile(r"(#\w+\.\d+)\.\d+")
_HEAD = """<title>ajet trace view</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
"""
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
"""Passes the URL fragment to the viewer as address of the first screen, and updates it from the
viewer. Focuses the terminal when ready; textual-serve waits for a click."""
_REFUSED = (
    "403: the token is missing or wrong. Open the whole URL that `ajet trace view --web` printed.\n"
)


def serve(
    arguments: list[str],
    port: int,
    announce: Callable[[str], None],
    *,
    until_eof: bool = False,
    tokens: Path | None = None,
    url: str | None = None,
) -> None:
    """Serve `ajet ARGUMENTS` to browsers on loopback until Ctrl-C, with a process per connection.

    Args:
        port: 0 for a free port.
        announce: called with the URL, including the token, when connections are accepted.
        until_eof: also stop at the end of standard input, so that the server ends with its parent process.
        tokens: a file for `people_of`, read at each request. These people have read-only access, which is logged.
        url: address of a reverse proxy.

    Raises ConfigError if the port is taken, or if `tokens` is empty.
    """
    if tokens is not None and not people_of(tokens):
        raise ConfigError(f"{tokens} has no line `name token`: nobody could look")
    listener = _listen(port)
    token = secrets.token_urlsafe(24)
    server = _GuardedServer(_command(arguments), _HOST, listener.getsockname()[1], "ajet")
    server.arguments, server.url = arguments, url or ""
    server.read_people = (
        partial(dict, {token: ""}) if tokens is None else partial(people_of, tokens)
    )
    here = f"{url or f'http://{_HOST}:{server.port}'}/?token={token if tokens is None else 'TOKEN'}"
    asyncio.run(_serve(server, listener, partial(announce, here), until_eof))


def people_of(file: Path) -> dict[str, str]:
    """Read names by token from a file with lines `name token`; `#` begins a comment.

    Raises ConfigError for an unreadable file, an invalid line, or permissions for others than the
    owner.
    """
    try:
        if file.stat().st_mode & 0o077:
            raise ConfigError(f"others may read {file}, which holds tokens; run `chmod 600 {file}`")
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot read the tokens in {file}: {error}") from error
    people: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if text := line.partition("#")[0].strip():
            person = _PERSON.fullmatch(text)
            if person is None:
                raise ConfigError(
                    f"{file} line {number}: expected a name and a token of at least 16 letters and"
                    " digits"
                )
            if person[2] in people:
                raise ConfigError(f"{file} line {number}: another line has the same token")
            people[person[2]] = person[1]
    return people


def _command(arguments: list[str]) -> str:
    return "exec " + shlex.join([sys.executable, "-m", "ajet", *arguments])


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server((_HOST, port))
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(
            f"cannot listen on {_HOST}:{port} ({reason}); choose another --port, or 0 for a"
            " free one"
        ) from error


async def _serve(
    server: _GuardedServer, listener: socket.socket, announce: Callable[[], None], until_eof: bool
) -> None:
    app = await server.guarded_app()
    runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=3.0)
    await runner.setup()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if until_eof:

        def wait_for_eof() -> None:
            sys.stdin.read()
            loop.call_soon_threadsafe(stop.set)

        threading.Thread(target=wait_for_eof, daemon=True).start()
    closing = asyncio.create_task(_close_idle(runner, server))
    try:
        await web.SockSite(runner, listener).start()
        announce()
        await stop.wait()
    finally:
        closing.cancel()
        await runner.cleanup()


async def _close_idle(runner: web.AppRunner, server: _GuardedServer) -> None:
    """Close idle connections, and viewers whose token was removed."""
    idle_since = runner.app[_IDLE_SINCE]
    while runner.server is not None:
        await asyncio.sleep(_CHECK_SECONDS)
        now, connections = asyncio.get_running_loop().time(), runner.server.connections
        for connection in idle_since.keys() - set(connections):
            del idle_since[connection]
        for connection in connections:
            if now - idle_since.setdefault(connection, now) >= _IDLE_SECONDS:
                connection.force_close()
        people = server.people()
        for task, token in runner.app[_SOCKETS].items():
            if token not in people:
                task.cancel()


class _GuardedServer(Server):  # type: ignore[misc,unused-ignore]
    """textual-serve's server, with tokens, for any address by which it is reached."""

    arguments: list[str]
    url: str
    """Address of a reverse proxy, or empty."""
    read_people: Callable[[], Mapping[str, str]]
    _wrong = ""
    _person = ""
    """Name of the person connected to this copy of the server; empty for its owner."""
    _screen = ""

    async def guarded_app(self) -> web.Application:
        app = await self._make_app()
        app.router.add_get("/ws/{at}", self.handle_websocket)
        app.middlewares.append(_guard(self, f"ajet_view_{self.port}"))
        app[_SOCKETS], app[_IDLE_SINCE] = {}, {}
        app.on_shutdown.append(_close_sockets)
        return app

    def people(self) -> Mapping[str, str]:
        """Return names by token; empty while the file of tokens is invalid."""
        try:
            people, wrong = self.read_people(), ""
        except ConfigError as error:
            people, wrong = {}, f"{error}; nobody is let in"
        if wrong and wrong != self._wrong:
            echo(wrong, err=True)
        self._wrong = wrong
        return people

    def is_proxied(self, request: web.Request) -> bool:
        return bool(self.url) and request.host == urlsplit(self.url).netloc

    async def on_startup(self, app: web.Application) -> None:
        """Print nothing; the caller announces the URL."""

    async def handle_index(self, request: web.Request) -> object:
        """Serve the page with URLs of the requested host, which also works through SSH port
        forwarding."""
        self.public_url = self.url if self.is_proxied(request) else f"http://{request.host}"
        page = await super().handle_index(request)
        page.text = page.text.replace(_FONTS, "about:blank#")  # no external requests
        page.text = page.text.replace("</head>", f"{_HEAD}</head>").replace(
            "</body>", f"{_SCRIPT}</body>"
        )
        return page

    async def handle_websocket(self, request: web.Request) -> object:
        task, sockets = asyncio.current_task(), request.app[_SOCKETS]
        token, name = request["person"]
        at = request.match_info.get("at", "")
        if name and [*sockets.values()].count(token) >= _MOST:
            raise web.HTTPTooManyRequests(text=f"429: {name} has {_MOST} viewers open; close one\n")
        if "\0" in at or any(
            not _fits(to_int(request.query.get(side, "80"), 0)) for side in ("width", "height")
        ):
            raise web.HTTPBadRequest(text="400: there is no such address or size\n")
        options = [*(["--read-only"] if name else []), *([f"--at={at}"] if at else [])]
        server = copy.copy(self)
        server.command = _command([*self.arguments[:2], *options, *self.arguments[2:]])
        server._person, server._screen = name, f"#{at}"
        assert task is not None
        sockets[task] = token
        _record(name, f"opened #{at}")
        try:
            return await Server.handle_websocket(server, request)
        finally:
            del sockets[task]
            _record(name, f"left #{at}")

    async def _process_messages(
        self, websocket: web.WebSocketResponse, app_service: AppService
    ) -> None:
        app_service.set_terminal_size = partial(_resize, app_service.set_terminal_size)  # type: ignore[method-assign,unused-ignore]
        app_service.on_meta = partial(self._record_screen, app_service.on_meta)  # type: ignore[method-assign,unused-ignore]
        await super()._process_messages(websocket, app_service)

    async def _record_screen(
        self, forward: Callable[[bytes], Awaitable[None]], data: bytes
    ) -> None:
        """Log the address of the screen, without the position of the token cursor."""
        meta = json.loads(data)
        address = unquote(meta.get("url", self._screen))
        token = _TOKEN.fullmatch(address)
        screen = token[1] if token else address
        if screen != self._screen:
            self._screen = screen
            _record(self._person, f"opened {screen}")
        await forward(data)


async def _resize(resize: Callable[[int, int], Awaitable[None]], width: int, height: int) -> None:
    if _fits(width) and _fits(height):
        await resize(width, height)


def _fits(side: object) -> bool:
    return isinstance(side, int) and 0 < side <= _LARGEST


def _record(name: str, what: str) -> None:
    """Log an access, except by the owner of the server."""
    if name:
        echo(f"{now():%Y-%m-%d %H:%M:%S} {name} {one_line(what, 200)}")


_SOCKETS: web.AppKey[dict[asyncio.Task[object], str]] = web.AppKey("ajet_sockets", dict)
"""Open viewers with their tokens."""
_IDLE_SINCE: web.AppKey[dict[object, float]] = web.AppKey("ajet_idle_since", dict)
"""Times of the last request by connection; infinite during a request, such as the websocket of a
viewer."""


async def _close_sockets(app: web.Application) -> None:
    """Cancel all viewers and wait for them, again after a second if a browser does not answer."""
    tasks = set(app[_SOCKETS])
    while tasks:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)


def _guard(server: _GuardedServer, cookie: str) -> object:
    """Return a middleware that requires a token in the URL, which sets a cookie, or that cookie.

    Requests of other origins get a 403 too, as browsers send cookies to all ports of a host.
    """
    proxy_name = urlsplit(server.url).hostname or ""

    @web.middleware  # type: ignore[untyped-decorator,unused-ignore]
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        idle_since = request.app[_IDLE_SINCE]
        idle_since[request.protocol] = math.inf
        try:
            return await answer(request, handler)
        finally:
            idle_since[request.protocol] = asyncio.get_running_loop().time()

    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        refused = foreign(request.host, request.headers.get("Origin"), None, proxy_name)
        if refused is not None:
            raise web.HTTPForbidden(text=f"403: {refused[1]}\n")
        people, token = server.people(), request.query.get("token", "")
        if request.path == "/" and _name(token, people) is not None:
            query = {name: value for name, value in request.query.items() if name != "token"}
            redirect = web.HTTPFound(request.rel_url.with_query(query))
            secure = server.is_proxied(request) and server.url.startswith("https:")
            redirect.set_cookie(
                cookie, token, httponly=True, samesite="Strict", path="/", secure=secure
            )
            raise redirect
        token = request.cookies.get(cookie, "")
        name = _name(token, people)
        if name is None:
            raise web.HTTPForbidden(text=_REFUSED)
        request["person"] = token, name
        return await handler(request)

    return guard


def _name(candidate: str, people: Mapping[str, str]) -> str | None:
    """Return the name of a token, by comparing all tokens in constant time."""
    names = [
        name
        for token, name in people.items()
        if hmac.compare_digest(candidate.encode(), token.encode())
    ]
    return names[0] if names else None
