"""An OpenAI-compatible endpoint for every open episode, on loopback, in a thread and an event loop of its own.

Who asks is in the path (`/episodes/{episode_id}/{agent}/v1/…`), else in the key (`/v1/…` with an episode's key), else
in the header `x-ajet-episode` beside the gateway's own token; under `/v1` the header `x-ajet-agent` names the agent.
Engines are asked without streaming; streams are spelt out here. Each request becomes one `Call` per choice.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ajet_sdk.dialect import DONE, error_body, event, stream
from ajet_sdk.endpoint import json_bytes
from ajet_sdk.errors import AjetError, ConfigError, ContextOverflow, EngineUnavailable, ModelAmbiguous, RequestRefused
from ajet_sdk.model import Exchange, Identity
from ajet_sdk.protocols import Answer, Ask, Route
from ajet_sdk.recorder import UNDELIVERED, EpisodeSpec, OpenEpisode, Pending
from ajet_sdk.sampling import SamplingOverride
from ajet_sdk.types import Phase

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from ajet_sdk.trace.writer import TraceWriter

__all__ = ["EpisodeSpec", "Gateway", "OpenEpisode", "SamplingOverride", "listening_socket"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BACKLOG = 2048
KEEP_ALIVE = 120
"""Seconds that an idle connection stays open."""
HEARTBEAT = 10.0
"""Seconds of waiting between two comments on a stream."""
LARGEST_BODY = 64 * 2**20
"""Bytes of a request."""
REMEMBERED_KEYS = 200_000
"""Keys of finished episodes that are still told apart from foreign ones."""

log = logging.getLogger("ajet")


class Refusal(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return error_body(str(self), kind, self.code, self.param)


class ClientGone(Exception):
    """The client closed the connection before the last byte."""


@dataclass(frozen=True, slots=True)
class Access:
    """What a key opens."""

    episode: OpenEpisode
    phase: Phase
    captured: bool


class Gateway:
    """Serves open episodes. With a writer, each call is put to it once complete, and the trace can be queried live."""

    def __init__(self, writer: TraceWriter | None = None, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.writer = writer
        self.token = secrets.token_urlsafe(32)
        """Opens the trace, and any episode named by header. Never written but to gateway.json."""
        self.host = host
        self.port = port
        self._access: dict[str, Access] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._episodes: dict[str, OpenEpisode] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._server: Any = None
        self._live: Starlette | None = None

    # Its life

    @property
    def url(self) -> str:
        """http://HOST:PORT, once started."""
        return f"http://{self.host}:{self.port}"

    def start(self) -> Gateway:
        """Bind, and serve from a daemon thread. Raises OSError where the port is taken."""
        import uvicorn

        if self._thread is not None:
            return self
        listener = listening_socket(self.host, self.port)
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=1,
            lifespan="off",
            log_config=None,
            access_log=False,
            ws="none",
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )
        self._server = uvicorn.Server(config)
        if self.writer is not None:
            from starlette.applications import Starlette

            from ajet_sdk.trace.live import announce, live_routes

            self._live = Starlette(routes=live_routes(self.writer, self.token))
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(listener, started), name="ajet-gateway", daemon=True)
        self._thread.start()
        started.wait()
        if self.writer is not None:
            announce(self.writer.path, self.url, self.token)
        return self

    def _serve(self, listener: socket.socket, started: threading.Event) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._loop.call_soon(started.set)
            await self._server.serve(sockets=[listener])

        asyncio.run(serve())

    def close(self) -> None:
        """Stop serving. Open episodes lose what is in flight."""
        if self._thread is None or self._loop is None:
            return
        if self.writer is not None:
            from ajet_sdk.trace.live import retract

            retract(self.writer.path)
        for episode in list(self._episodes.values()):
            self._run(episode._close(True)).result(timeout=10)
        self._server.should_exit = True
        self._thread.join(timeout=10)
        self._thread = None

    def __enter__(self) -> Gateway:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        if self._loop is None or self._loop.is_closed():
            work.close()
            raise EngineUnavailable("the gateway is not running; call start() first")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # Episodes

    def open(self, spec: EpisodeSpec) -> OpenEpisode:
        """Open an episode: from now on its calls are answered. Raises ConfigError where its id is open already."""
        if self._thread is None:
            raise EngineUnavailable("the gateway is not running; call start() first")
        if spec.episode_id in self._episodes:
            raise ConfigError(f"episode {spec.episode_id} is open already; every attempt needs an id of its own")
        put = self.writer.put if self.writer is not None else None
        episode = OpenEpisode(spec, self.url, put, self._run, self._end_keys)
        self._episodes[spec.episode_id] = episode
        self._access[episode.handle_key] = Access(episode, "rollout", False)
        self._access[episode.captured_key] = Access(episode, "rollout", True)
        self._access[episode.judge_key] = Access(episode, "judge", False)
        return episode

    def _end_keys(self, episode: OpenEpisode, final: bool) -> None:
        keys = [episode.handle_key, episode.captured_key, *([episode.judge_key] if final else [])]
        for key in keys:
            if self._access.pop(key, None) is not None:
                self._ended[key] = episode.episode_id
        while len(self._ended) > REMEMBERED_KEYS:
            self._ended.popitem(last=False)
        if final and self._episodes.pop(episode.episode_id, None) is not None:
            episode.spec.engine.forget(episode.episode_id)

    def _identify(self, path: str, headers: dict[str, str]) -> tuple[Access, Identity, str]:
        """The episode, the agent and the route (`chat/completions`). Raises Refusal 401, 404, 410."""
        pieces = path.strip("/").split("/")
        agent = Identity(headers.get("x-ajet-agent") or "default", headers.get("x-ajet-target"))
        named: str | None = None
        if len(pieces) > 4 and pieces[0] == "episodes" and pieces[3] == "v1":
            named, agent, pieces = unquote(pieces[1]), Identity.parse(pieces[2]), pieces[3:]
        if len(pieces) < 2 or pieces[0] != "v1":
            raise Refusal(404, f"there is no route {path}", "unknown_route")
        return self._opened(named, headers), agent, "/".join(pieces[1:])

    def _opened(self, named: str | None, headers: dict[str, str]) -> Access:
        bearer = headers.get("authorization", "")
        key = bearer[7:].strip() if bearer[:7].lower() == "bearer " else ""
        key = key or headers.get("x-api-key") or headers.get("api-key") or ""
        if secrets.compare_digest(key.encode(), self.token.encode()):
            wanted = named or headers.get("x-ajet-episode", "")
            episode = self._episodes.get(wanted)
            if episode is None:
                raise Refusal(410, f"no episode {wanted!r} is open", "episode_finished")
            return Access(episode, "judge" if episode.judged else "rollout", False)
        access = self._access.get(key)
        if access is not None and named in (None, access.episode.episode_id):
            return access
        ended = self._ended.get(key)
        if ended is not None and named in (None, ended):
            raise Refusal(410, f"episode {ended} is over; its key answers nothing any more", "episode_finished")
        raise Refusal(401, "the API key is not this episode's" if named else "unknown API key", "invalid_api_key")

    # Requests

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
        if self._live is not None and not path.startswith(("/episodes/", "/v1/")):
            await self._live(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        pending: Pending | None = None
        try:
            access, identity, route = self._identify(path, headers)
            if scope["method"] == "GET" and route == "models":
                await respond(send, 200, _models(access.episode))
                return
            if scope["method"] != "POST":
                raise Refusal(405, f"{scope['method']} {path} is not answered; completions are POSTed", "method")
            body = await read_json(receive)
            if route == "observed" and access.captured:
                access.episode.observed(Exchange(**body))
                await respond(send, 200, {})
                return
            pending = Pending(access.episode, identity, access.phase, body)
            access.episode.pending.add(pending)
            await Reply(pending, access, route, receive, send).give()
        except Refusal as refusal:
            await respond(send, refusal.status, refusal.body)
        except ClientGone:
            pass  # nobody is left to be told; the call, if there is one, is recorded as undelivered
        finally:
            if pending is not None:
                pending.record(UNDELIVERED)
                pending.episode.pending.discard(pending)


class Reply:
    """One request of an episode, from its JSON to its last byte."""

    def __init__(self, pending: Pending, access: Access, route: str, receive: Receive, send: Send) -> None:
        self.pending = pending
        self.access = access
        self.route = route
        self.receive = receive
        self.send = send
        self.streaming = bool(pending.body.get("stream"))
        self.headers_sent = False

    async def give(self) -> None:
        """Ask, answer, record. Raises Refusal for what is answered with an error before any byte was sent."""
        gone = asyncio.ensure_future(_disconnect(self.receive))
        try:
            try:
                answer = await self._ask(gone)
            except Refusal as refusal:
                self.pending.record(str(refusal))
                if not self.headers_sent:
                    raise
                await self._chunk(event(refusal.body), gone)
                await self.send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            response = self.pending.answered(answer)
            await (self._stream(response, gone) if self.streaming else self._whole(response, gone))
        finally:
            gone.cancel()

    async def _ask(self, gone: asyncio.Future[None]) -> Answer:
        pending, episode = self.pending, self.pending.episode
        try:
            ask = self._prepared()
            return await self._wait(asyncio.ensure_future(pending.engine.answer(ask)), gone)
        except (Refusal, ClientGone):
            raise
        except ContextOverflow as error:
            episode.fail(error)
            raise Refusal(400, str(error), "context_length_exceeded", "messages") from error
        except RequestRefused as error:
            raise Refusal(400, str(error), "unsupported_parameter", error.parameter) from error
        except ModelAmbiguous as error:
            episode.fail(error)
            raise Refusal(400, str(error), "model_ambiguous", "model") from error
        except ConfigError as error:
            episode.fail(error)
            raise Refusal(400, str(error), "not_configured") from error
        except AjetError as error:
            episode.fail(error)
            raise Refusal(503 if error.infrastructure else 502, str(error), "engine_failed") from error
        except Exception as error:  # the boundary: the engine's fault is the call's error
            log.exception("the engine failed in episode %s", episode.episode_id)
            fault = EngineUnavailable(f"the engine failed: {type(error).__name__}: {error}")
            episode.fail(fault)
            raise Refusal(500, str(fault), "engine_failed") from error

    def _prepared(self) -> Ask:
        pending, body = self.pending, self.pending.body
        if self.route not in ("chat/completions", "completions"):
            raise Refusal(404, f"the policy does not answer the route {self.route} (chat/completions and completions)")
        if self.access.captured and pending.episode.verdict(str(body.get("model", ""))) == "other":
            raise Refusal(
                400,
                f"model {body.get('model')!r} is not the policy, and a process that was only given OPENAI_BASE_URL has "
                "no other endpoint to pass it to; add it to rollout.policy_models or ask it with a base URL of its own",
                "not_the_policy",
                "model",
            )
        needed, kinds = ("messages", list) if self.route == "chat/completions" else ("prompt", (str, list))
        if not isinstance(body.get(needed), kinds) or not body[needed]:
            raise RequestRefused(f"{self.route} needs {needed}", needed)
        sampling = pending.prepare()
        route: Route = "chat/completions" if self.route == "chat/completions" else "completions"
        return Ask(route, body, sampling, pending.episode.episode_id, pending.identity.agent)

    async def _wait(self, work: asyncio.Future[Answer], gone: asyncio.Future[None]) -> Answer:
        """The answer, while the client is there and the episode is open; a comment now and then where streaming."""
        pending = self.pending
        over = pending.abandoned
        limit = asyncio.get_running_loop().time() + pending.episode.spec.call_timeout
        try:
            while True:
                left = limit - asyncio.get_running_loop().time()
                pause = min(left, HEARTBEAT) if self.streaming else left
                waited: set[asyncio.Future[Any]] = {work, gone, over}
                await asyncio.wait(waited, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                if over.done():
                    raise Refusal(410, f"episode {pending.episode.episode_id} is over", "episode_finished")
                if gone.done():
                    raise ClientGone
                if work.done():
                    return work.result()
                if asyncio.get_running_loop().time() >= limit:
                    seconds = pending.episode.spec.call_timeout
                    raise EngineUnavailable(f"the engine did not answer within {seconds:g} s (call_timeout)")
                await self._chunk(b": waiting\n\n", gone)
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait({work}, timeout=1)

    async def _whole(self, response: dict[str, Any], gone: asyncio.Future[None]) -> None:
        if gone.done():
            raise ClientGone
        await respond(self.send, 200, response)
        self.pending.record()

    async def _stream(self, response: dict[str, Any], gone: asyncio.Future[None]) -> None:
        for chunk in stream(response, self.pending.body):
            await self._chunk(chunk, gone)
        self.pending.record()  # whole, whether or not the client stays for the end mark
        await self.send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _chunk(self, chunk: bytes, gone: asyncio.Future[None]) -> None:
        if gone.done():
            raise ClientGone
        if not self.headers_sent:
            self.headers_sent = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.send({"type": "http.response.body", "body": chunk, "more_body": True})


def listening_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Its protocol is named, or asyncio leaves Nagle on and every reply waits 40 ms for an ACK."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


async def respond(send: Send, status: int, value: dict[str, Any]) -> None:
    """Send a whole JSON response."""
    body = json_bytes(value)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status >= 400:
        headers.append((b"x-should-retry", b"false"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def read_json(receive: Receive) -> dict[str, Any]:
    """The request's JSON object. Raises Refusal 400, 413, and ClientGone."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > LARGEST_BODY:
            raise Refusal(413, f"the request is larger than {LARGEST_BODY} bytes", "request_too_large")
        if not message.get("more_body"):
            break
    try:
        body = json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the request is not JSON: {error}", "invalid_json") from error
    if not isinstance(body, dict):
        raise Refusal(400, f"the request is JSON but no object: {str(body)[:100]}", "invalid_json")
    return body


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def _models(episode: OpenEpisode) -> dict[str, Any]:
    names = [episode.spec.engine.model, *sorted(episode.spec.policy_models - {episode.spec.engine.model})]
    return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "ajet"} for name in names]}
