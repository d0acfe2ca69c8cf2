"""The viewer in a browser: textual-serve on loopback, behind a token, or behind those of a team that only reads."""

from __future__ import annotations

import asyncio
import copy
import hmac
import json
import math
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
"""A connection that brings no whole request for so long is closed: aiohttp waits for half of one without end."""
_CHECK_SECONDS = 5.0
_CLOSE_SECONDS = 1.0
_MOST = 8
"""Viewers of one person at a time: each is a process."""
_LARGEST = 800
"""Columns or rows of a terminal: each cell takes memory."""
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
"""What stands behind `#` says which screen to begin with, and follows the viewer: it asks to open such addresses.
Keys go to the viewer as soon as it is there; textual-serve waits for a click."""
_REFUSED = "403: the token is missing or wrong. Open the whole URL that `ajet trace view --web` printed.\n"


def serve(
    arguments: list[str],
    port: int,
    announce: Callable[[str], None],
    *,
    until_eof: bool = False,
    tokens: Path | None = None,
    url: str | None = None,
) -> None:
    """Serve `ajet ARGUMENTS` to browsers on loopback until Ctrl-C; each that connects gets a process of its own.

    `port` 0 takes a free one. `announce` gets the URL, which holds the token, once connections are accepted.
    `until_eof` also ends it when its standard input closes: so it ends with the process that started it, however that
    ends. `tokens` is a file as `people_of` reads it, at each request anew: the people in it may only read, and who
    opens and leaves the viewer is printed. `url` is the address of a proxy in front. Raises ConfigError where the port
    is taken, or nobody could get in.
    """
    if tokens is not None and not people_of(tokens):
        raise ConfigError(f"{tokens} has no line `name token`: nobody could look")
    listener = _listen(port)
    token = secrets.token_urlsafe(24)
    server = _GuardedServer(_command(arguments), _HOST, listener.getsockname()[1], "ajet")
    server.arguments, server.url = arguments, url or ""
    server.read_people = partial(dict, {token: ""}) if tokens is None else partial(people_of, tokens)
    here = f"{url or f'http://{_HOST}:{server.port}'}/?token={token if tokens is None else 'TOKEN'}"
    asyncio.run(_serve(server, listener, partial(announce, here), until_eof))


def people_of(file: Path) -> dict[str, str]:
    """Token -> name, of a file with a line `name token` for each person; `#` begins a comment.

    Raises ConfigError where it cannot be read, others than its owner may read it, or a line is something else.
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
                    f"{file} line {number}: expected a name and a token of at least 16 letters and digits"
                )
            if person[2] in people:
                raise ConfigError(f"{file} line {number}: another line has the same token")
            people[person[2]] = person[1]
    return people


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
        threading.Thread(target=_wait_for_eof, args=(loop, stop), daemon=True).start()
    closing = asyncio.create_task(_close_idle(runner, server))
    try:
        await web.SockSite(runner, listener).start()
        announce()
        await stop.wait()
    finally:
        closing.cancel()
        await runner.cleanup()


async def _close_idle(runner: web.AppRunner, server: _GuardedServer) -> None:
    """Close connections without a request for long, those with half of one too, and viewers of who is locked out."""
    idle_since = runner.app[_IDLE_SINCE]
    while runner.server is not None:
        await asyncio.sleep(_CHECK_SECONDS)
        now, there = asyncio.get_running_loop().time(), runner.server.connections
        for connection in idle_since.keys() - set(there):
            del idle_since[connection]
        for connection in there:
            if now - idle_since.setdefault(connection, now) >= _IDLE_SECONDS:
                connection.force_close()
        people = server.people()
        for task, token in runner.app[_SOCKETS].items():
            if token not in people:
                task.cancel()


def _wait_for_eof(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    sys.stdin.read()
    loop.call_soon_threadsafe(stop.set)


class _GuardedServer(Server):  # type: ignore[misc,unused-ignore]
    """textual-serve's server behind a token, that answers under whatever address it is reached by."""

    arguments: list[str]
    url: str
    """Of a proxy in front; empty where there is none."""
    read_people: Callable[[], Mapping[str, str]]
    _wrong = ""
    _person = ""
    """Whose connection a copy of the server is for; empty for the person who started it."""
    _screen = ""

    async def guarded_app(self) -> web.Application:
        app = await self._make_app()
        app.router.add_get("/ws/{at}", self.handle_websocket)
        app.middlewares.append(_guard(self, f"ajet_view_{self.port}"))
        app[_SOCKETS], app[_IDLE_SINCE] = {}, {}
        app.on_shutdown.append(_close_sockets)
        return app

    def people(self) -> Mapping[str, str]:
        """Token -> name; nobody while the file of tokens is not as it must be."""
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
        """Says nothing: the caller says the URL."""

    async def handle_index(self, request: web.Request) -> object:
        """The page names itself by the address it was asked under: a port forwarded through SSH works too."""
        self.public_url = self.url if self.is_proxied(request) else f"http://{request.host}"
        page = await super().handle_index(request)
        page.text = page.text.replace(_FONTS, "about:blank#")  # nothing is fetched from elsewhere
        page.text = page.text.replace("</head>", f"{_HEAD}</head>").replace("</body>", f"{_SCRIPT}</body>")
        return page

    async def handle_websocket(self, request: web.Request) -> object:
        task, sockets = asyncio.current_task(), request.app[_SOCKETS]
        token, name = request["person"]
        at = request.match_info.get("at", "")
        if name and [*sockets.values()].count(token) >= _MOST:
            raise web.HTTPTooManyRequests(text=f"429: {name} has {_MOST} viewers open; close one\n")
        if "\0" in at or any(not _fits(to_int(request.query.get(side, "80"), 0)) for side in ("width", "height")):
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

    async def _process_messages(self, websocket: web.WebSocketResponse, app_service: AppService) -> None:
        app_service.set_terminal_size = partial(_resize, app_service.set_terminal_size)  # type: ignore[method-assign,unused-ignore]
        app_service.on_meta = partial(self._record_screen, app_service.on_meta)  # type: ignore[method-assign,unused-ignore]
        await super()._process_messages(websocket, app_service)

    async def _record_screen(self, forward: Callable[[bytes], Awaitable[None]], data: bytes) -> None:
        """Print the address that the viewer gives to the browser, without the token on which the cursor is."""
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
    """Print who looked; not the person who started the server."""
    if name:
        echo(f"{now():%Y-%m-%d %H:%M:%S} {name} {one_line(what, 200)}")


_SOCKETS: web.AppKey[dict[asyncio.Task[object], str]] = web.AppKey("ajet_sockets", dict)
"""The viewers that are open, and the token of each."""
_IDLE_SINCE: web.AppKey[dict[object, float]] = web.AppKey("ajet_idle_since", dict)
"""Connections -> the loop's time; infinite while a request is answered, as a viewer's websocket is."""


async def _close_sockets(app: web.Application) -> None:
    """Cancel each browser's viewer and wait for it; not for a browser that does not answer, as one that sleeps."""
    tasks = set(app[_SOCKETS])
    while tasks:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)


def _guard(server: _GuardedServer, cookie: str) -> object:
    """Lets through who has a token in the URL, which sets a cookie, or that cookie; answers 403 to all others,
    and to a page of another origin: the browser would send our cookie along from the same host."""
    own_name = urlsplit(server.url).hostname or ""

    @web.middleware  # type: ignore[untyped-decorator,unused-ignore]
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        idle_since = request.app[_IDLE_SINCE]
        idle_since[request.protocol] = math.inf
        try:
            return await answer(request, handler)
        finally:
            idle_since[request.protocol] = asyncio.get_running_loop().time()

    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        refused = foreign(request.host, request.headers.get("Origin"), None, own_name)
        if refused is not None:
            raise web.HTTPForbidden(text=f"403: {refused[1]}\n")
        people, token = server.people(), request.query.get("token", "")
        if request.path == "/" and _name(token, people) is not None:
            query = {name: value for name, value in request.query.items() if name != "token"}
            redirect = web.HTTPFound(request.rel_url.with_query(query))
            secure = server.is_proxied(request) and server.url.startswith("https:")
            redirect.set_cookie(cookie, token, httponly=True, samesite="Strict", path="/", secure=secure)
            raise redirect
        token = request.cookies.get(cookie, "")
        name = _name(token, people)
        if name is None:
            raise web.HTTPForbidden(text=_REFUSED)
        request["person"] = token, name
        return await handler(request)

    return guard


def _name(candidate: str, people: Mapping[str, str]) -> str | None:
    """Whose token it is; every one is compared, in a time that says nothing of it."""
    names = [name for token, name in people.items() if hmac.compare_digest(candidate.encode(), token.encode())]
    return names[0] if names else None
