"""Decides whether to leave an outgoing HTTP request alone, reroute it, or record it.

A POST to a route of a dialect (`ajet_sdk/dialects/table.py`) is an LLM request if its JSON names a
model or has a conversation. In an episode, requests that the policy answers go to the gateway;
others pass through to their own endpoint and are recorded. Headers are never stored.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from ajet_sdk.agent.activity import activities
from ajet_sdk.agent.context import ActiveEpisode, AgentIdentity, ObservedExchange, current_episode
from ajet_sdk.capture.processes import in_this_process, never_raise
from ajet_sdk.capture.unattributed import Unattributed, outside_of_episodes, refuse_unattributed
from ajet_sdk.capture.uncaptured import TELEMETRY, is_local_inference, refuse_inference, unset_key
from ajet_sdk.config.api_keys import placeholder_in
from ajet_sdk.dialects.gemini import Gemini
from ajet_sdk.dialects.json import json_value
from ajet_sdk.dialects.observed import join_events, join_parts
from ajet_sdk.dialects.openai_chat import remove_secrets
from ajet_sdk.dialects.table import ApiRoute, endpoint
from ajet_sdk.engines.http import is_loopback
from ajet_sdk.gateway.access import RequestTarget, locate
from ajet_sdk.gateway.process_door import ProcessDoor
from ajet_sdk.secret_keys import without
from ajet_sdk.types import Json

SUBJECTS = frozenset(("model", "messages", "prompt", "input", "contents", "generateContentRequest"))
"""An LLM request has at least one of these fields."""
EPISODE_KEY = re.compile(r"ajet-[\w-]{32}")
"""The keys of `OpenEpisode`."""
MOST_BYTES = 64 * 2**20
SHORTEST_KEY = 8
KEY_HEADERS = ("authorization", "api-key", "x-api-key", "x-goog-api-key")
DROPPED_HEADERS = frozenset(("host", "cookie", "content-length", *KEY_HEADERS))


log = logging.getLogger("ajet")
Fallback = Callable[[], ActiveEpisode | None]
"""The episode of a process that is observed as a whole."""
Feed = Callable[[bytes], None]
"""Takes the bytes of a response as the agent reads them."""
Done = Callable[[bool], None]
"""Called at the end of a response; True if it was read whole."""


@dataclass(frozen=True, slots=True)
class Reroute:
    """Send the request to the gateway."""

    gateway_url: str
    place: RequestTarget
    door: ProcessDoor | None = None
    """The gateway in this process, for a library that needs no socket."""
    body: Json | None = None
    """The parsed JSON, if the body was bytes."""

    @property
    def url(self) -> str:
        """The gateway's URL, for a library that needs a socket."""
        to = self.place
        return (
            f"{self.gateway_url}/episodes/{to.episode}/{to.agent.segment()}/v1/{to.endpoint.route}"
        )

    def headers(self, sent: Mapping[str, str]) -> dict[str, str]:
        """The request's headers, with the episode's key in place of every other secret."""
        passed = {
            name: value for name, value in sent.items() if name.lower() not in DROPPED_HEADERS
        }
        return {"authorization": f"Bearer {self.place.key}", **passed}


@dataclass(frozen=True, slots=True)
class ToGateway:
    """Send the request as it is: its URL is the gateway's."""


class Discarded(Exception):
    """Drop the request and report success: telemetry to a vendor whose key is not set."""


class PassThrough:
    """A request that passes through; its response is collected and recorded once."""

    def __init__(
        self,
        active: ActiveEpisode,
        route: str,
        model: str,
        identity: AgentIdentity,
        body: Json,
        secrets: Collection[str] = (),
    ) -> None:
        """`secrets`: keys of the request, which its response may repeat."""
        began = time.time()
        agent = identity.agent
        tag = identity.target_tag
        self._recorder = active.recorder
        self._secrets = secrets
        self._exchange = ObservedExchange(
            route,
            model,
            agent,
            tag,
            active.phase,
            body,
            response={},
            started_at=began,
            ended_at=began,
        )
        self._parts: list[bytes] = []
        self._size = 0
        self._done = False

    def feed(self, data: bytes) -> None:
        """Collect bytes of the response's body."""
        self._size += len(data)
        if self._size <= MOST_BYTES:
            self._parts.append(bytes(data))

    def _end(
        self, status: int, content_type: str, whole: bool, decode: Callable[[bytes], bytes] | None
    ) -> None:
        if self._done:
            return
        self._done = True
        raw = b"".join(self._parts)
        try:
            data = decode(raw) if decode is not None else raw
        except Exception as error:  # noqa: BLE001  # any library's decoder; half a gzip stream, say
            log.debug("could not decode a response that was passed through: %s", error)
            data = b""
        response = _response(data, content_type)
        error_text = None if status < 400 else f"HTTP {status}"
        if error_text is None and not whole and not _is_complete(response):
            error_text = "undelivered"
        self._record(response, error_text)

    def ending(
        self, status: int, content_type: str, decode: Callable[[bytes], bytes] | None = None
    ) -> Done:
        """A callback for the end of the response, with whether it was read whole. It never
        raises."""
        return lambda whole: never_raise(lambda: self._end(status, content_type, whole, decode))

    def failed(self, error: BaseException) -> None:
        """Record a request without a response."""
        if not self._done:
            self._done = True
            never_raise(lambda: self._record({}, f"{type(error).__name__}: {error}"))

    def _record(self, response: dict[str, object], error: str | None) -> None:
        response = without(response, self._secrets)
        error = without(error, self._secrets)
        self._recorder.observed(
            replace(self._exchange, response=response, ended_at=time.time(), error=error)
        )


Plan = Reroute | PassThrough | ToGateway | None
"""What to do with a request; None: send it, and leave it alone."""


def decide(
    active: ActiveEpisode,
    method: str,
    url: str,
    headers: Mapping[str, str],
    read: Callable[[], object],
    *,
    in_process: bool = False,
) -> Plan:
    """Decide how to handle a request of an active episode; `read` returns its body (bytes, text or
    a parsed object).

    `in_process`: the library can call a gateway of this process without a socket, and handles
    Discarded. Raises UncapturedTraffic for a request to a model host that the policy does not
    answer, MissingResource if the host would get a placeholder as key, and UnattributedCall for an
    LLM request that belongs to no single episode; all fail the episode.
    """
    method = method.upper()
    parts = urlsplit(url)
    target = endpoint(parts.path, parts.query) if method == "POST" else None
    if _is_ours(url, headers, active):
        if target is None or target.dialect is None:
            return None
        if in_process:
            around_socket = _by_handle(active, url, headers)
        else:
            around_socket = None
        return around_socket or ToGateway()
    if active.pid != os.getpid():
        active = in_this_process(active)
    body = None
    plan = None
    if target is not None and (target.dialect is not None or is_local_inference(url)):
        raw = read()
        body = _parsed(raw)
        plan = _plan(active, target, url, headers, body, None if body is raw else body, in_process)
    if plan is not None and isinstance(active.recorder, Unattributed):
        refuse_unattributed(active, active.recorder, url)
        return None
    if plan is not None:
        for activity in activities():
            active.recorder.called_by(activity)
    if isinstance(plan, Reroute):
        return plan
    if plan is None:
        refuse_inference(active, method, url, headers, body)
    sent = (placeholder_in(headers.get(name) or "") for name in KEY_HEADERS)
    variable = next(filter(None, sent), placeholder_in(url))
    if variable is None:
        error = None
    else:
        error = unset_key(active, method, url, variable)
    if error is None:
        return plan
    if in_process and parts.path.endswith(TELEMETRY):
        raise Discarded
    active.recorder.fail(error)
    raise error


def _plan(
    active: ActiveEpisode,
    target: ApiRoute,
    url: str,
    headers: Mapping[str, str],
    body: object,
    parsed: Json | None,
    in_process: bool,
) -> Reroute | PassThrough | None:
    """The decision for a request to a route of a dialect; None if it is no LLM request."""
    if target.dialect is None or not isinstance(body, dict) or SUBJECTS.isdisjoint(body):
        return None
    agent = headers.get("x-ajet-agent") or "default"
    tag = headers.get("x-ajet-target")
    identity = AgentIdentity(agent, tag, child=active.child)
    if active.reroutes and active.recorder.answers(_model(body, url)) != "other":
        place = RequestTarget(active.episode_id, active.api_key, identity, target, target.dialect)
        return Reroute(active.gateway_url, place, door_of(active) if in_process else None, parsed)
    if target.counter is not None:
        return None
    secrets = _secrets(url, headers)
    active.recorder.hide(secrets)
    return PassThrough(
        active, target.route, _model(body, url), identity, remove_secrets(body), secrets
    )


def _secrets(url: str, headers: Mapping[str, str]) -> list[str]:
    """The keys of a request. Shorter values are placeholders, and parts of other texts."""
    values = [headers.get(name) or "" for name in KEY_HEADERS]
    keys = [value.rpartition(" ")[2] for value in values]  # behind `Bearer`
    keys += parse_qs(urlsplit(url).query).get("key", [])
    return [key for key in keys if len(key) >= SHORTEST_KEY]


def reads_body(method: str, url: str) -> bool:
    """Whether `decide` may read the body of a request."""
    parts = urlsplit(url)
    return method == "POST" and (
        endpoint(parts.path, parts.query).dialect is not None or is_local_inference(url)
    )


def _is_ours(url: str, headers: Mapping[str, str], active: ActiveEpisode) -> bool:
    """Whether the request's URL is a gateway's already: from a handle, or from the environment."""
    if active.gateway_url and url.startswith(active.gateway_url + "/"):
        return True
    if "/episodes/" not in url or not is_loopback(url):
        return False
    return EPISODE_KEY.fullmatch(_place(url, headers).key) is not None


def _by_handle(active: ActiveEpisode, url: str, headers: Mapping[str, str]) -> Reroute | None:
    """Reroute a handle's request around the socket, if the gateway is in this process."""
    door = door_of(active)
    place = _place(url, headers)
    if door is None or not place.key or not url.startswith(active.gateway_url + "/"):
        return None
    return Reroute(active.gateway_url, place, door)


def _place(url: str, headers: Mapping[str, str]) -> RequestTarget:
    parts = urlsplit(url)
    return locate(parts.path, parts.query, {name.lower(): value for name, value in headers.items()})


def door_of(active: ActiveEpisode) -> ProcessDoor | None:
    """The door of an episode whose recorder is in this process, not in the parent of a fork."""
    if active.pid == os.getpid():
        return getattr(active.recorder, "door", None)
    return None


def _parsed(body: object) -> Any:
    if isinstance(body, (bytes, bytearray, str)):
        try:
            return json_value(bytes(body) if isinstance(body, bytearray) else body)
        except (ValueError, RecursionError):
            return None
    return body


def _model(body: Mapping[str, object], url: str) -> str:
    if isinstance(body.get("model"), str):
        return str(body["model"])
    dialect = endpoint(urlsplit(url).path).dialect
    if isinstance(dialect, Gemini):
        return dialect.name
    _, marker, after = urlsplit(url).path.partition(
        "/deployments/"
    )  # Azure names the model in the path
    return unquote(after.split("/")[0]) if marker else ""


def _response(data: bytes, content_type: str) -> Json:
    text = data.decode("utf-8", "replace")
    if "event-stream" in content_type or text.startswith(("data:", "event:")):
        return join_events(text)
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return {"text": text[:10_000]} if text else {}
    if isinstance(parsed, list) and parsed and all(isinstance(part, dict) for part in parsed):
        return join_parts(parsed)  # Gemini's stream without `alt=sse`
    return parsed if isinstance(parsed, dict) else {"value": parsed}


def _is_complete(response: Json) -> bool:
    """Whether a response that the agent stopped reading has its end, so that only an end mark may
    be missing."""
    return bool(response) and not response.keys() & {"stream_error", "text"}


def tee(chunks: Iterable[bytes], feed: Feed, done: Done) -> Iterator[bytes]:
    """Yield the chunks of a response as the agent reads them; `done` is called even if the agent
    stops early."""
    whole = False
    try:
        for chunk in chunks:
            feed(chunk)
            yield chunk
        whole = True
    finally:
        done(whole)


async def atee(chunks: AsyncIterable[bytes], feed: Feed, done: Done) -> AsyncIterator[bytes]:
    """As `tee`."""
    whole = False
    try:
        async for chunk in chunks:
            feed(chunk)
            yield chunk
        whole = True
    finally:
        done(whole)


def active_episode(fallback: Fallback) -> ActiveEpisode | None:
    """The episode of the context, else of the observed process; None below a hooked client.

    A context without an episode of its own stands for all episodes that are open, see
    `outside_of_episodes`.
    """
    active = current_episode.get()
    if active is None or active.recorder.is_over(active.phase):
        if active is None or active.observed:
            active = outside_of_episodes(None) or fallback()
        else:
            active = outside_of_episodes(active)
    return None if active is not None and active.in_client else active


@contextmanager
def sending(active: ActiveEpisode, plan: Plan) -> Iterator[None]:
    """Send within a hooked client, so that hooks of the libraries and sockets below ignore the
    request.

    An exception is recorded as the failure of a request that passes through, or as a request that
    the gateway did not answer.
    """
    token = current_episode.set(replace(active, in_client=True))
    try:
        yield
    except BaseException as error:
        if isinstance(plan, PassThrough):
            plan.failed(error)
        elif plan is not None:
            active.recorder.unanswered(error)
        raise
    else:
        if plan is not None and not isinstance(plan, PassThrough):
            active.recorder.unanswered(None)
    finally:
        current_episode.reset(token)
