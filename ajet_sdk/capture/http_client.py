"""Hooks of http.client, which urllib and many small clients use, and of urllib3, which requests
uses."""

from __future__ import annotations

import gzip
import http.client
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ajet_sdk.capture.patches import OwnClient, Patches
from ajet_sdk.capture.routing import (
    Done,
    Fallback,
    Feed,
    PassThrough,
    Reroute,
    active_episode,
    decide,
    sending,
    tee,
)
from ajet_sdk.capture.uncaptured import refuse_unread

if TYPE_CHECKING:
    import urllib3

READS = ("read", "read1", "readline", "readinto")


def read_along(
    response: http.client.HTTPResponse | urllib3.HTTPResponse, feed: Feed, done: Done
) -> None:
    """Pass the bytes that any method of a response reads to `feed`."""
    inside = False

    def read_by(original: Callable[..., bytes | int]) -> Callable[..., bytes | int]:
        def read(*args: Any, **kwargs: object) -> bytes | int:
            nonlocal inside
            if inside:  # called by another of the methods
                return original(*args, **kwargs)
            inside = True
            try:
                got = original(*args, **kwargs)
            finally:
                inside = False
            if isinstance(got, int):
                data = bytes(memoryview(args[0])[:got])
            else:
                data = got
            feed(data)
            if not data or response.isclosed():
                done(True)
            return got

        return read

    def in_chunks(original: Callable[..., Iterable[bytes]]) -> Callable[..., Iterator[bytes]]:
        return lambda *args, **kwargs: tee(original(*args, **kwargs), feed, done)

    def ended_by(original: Callable[[], None]) -> Callable[[], None]:
        def end() -> None:
            if not inside:
                done(False)
            original()

        return end

    for names, wrap in (
        (READS, read_by),
        (("read_chunked",), in_chunks),
        (("close", "release_conn"), ended_by),
    ):
        for name in names:
            if hasattr(response, name):
                setattr(response, name, wrap(getattr(response, name)))  # type: ignore[operator]


def patch_http_client(module: ModuleType, patches: Patches, fallback: Fallback) -> None:
    connection: type[http.client.HTTPConnection] = module.HTTPConnection
    original = connection.__dict__["request"]
    response_of: Callable[[http.client.HTTPConnection], http.client.HTTPResponse] = (
        connection.__dict__["getresponse"]
    )
    put = connection.__dict__["putrequest"]
    underway: weakref.WeakKeyDictionary[
        http.client.HTTPConnection, http.client.HTTPConnection | PassThrough
    ] = weakref.WeakKeyDictionary()
    """The connection to the gateway, or the `PassThrough`, of each connection of the agent."""

    def request(
        self: http.client.HTTPConnection,
        method: str,
        url: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        *,
        encode_chunked: bool = False,
    ) -> None:
        headers = {} if headers is None else headers
        active = active_episode(fallback)
        if active is None:
            original(self, method, url, body, headers, encode_chunked=encode_chunked)
            return
        sent_headers = {str(name).lower(): str(value) for name, value in headers.items()}
        plan = decide(active, method, _url(self, url), sent_headers, lambda: body)
        with sending(active, plan):
            if isinstance(plan, Reroute):
                underway[self] = _to_gateway(plan, sent_headers, body, self.timeout)
                return
            original(self, method, url, body, headers, encode_chunked=encode_chunked)
        if isinstance(plan, PassThrough):
            underway[self] = plan

    def _to_gateway(
        plan: Reroute, headers: Mapping[str, str], body: object, timeout: float | None
    ) -> http.client.HTTPConnection:
        parts = urlsplit(plan.url)
        if parts.scheme == "https":
            kind = module.HTTPSConnection
        else:
            kind = connection
        gateway: http.client.HTTPConnection = kind(
            parts.hostname or "", parts.port, timeout=timeout
        )
        data = body.encode() if isinstance(body, str) else body
        original(
            gateway, "POST", parts.path, data, {**plan.headers(headers), "connection": "close"}
        )
        return gateway

    def putrequest(
        self: http.client.HTTPConnection, method: str, url: str, *args: object, **kwargs: object
    ) -> None:
        active = active_episode(fallback)
        if (
            active is not None
        ):  # not called by `request`: the body follows by `send`, too late to decide
            refuse_unread(active, method, _url(self, url))
        put(self, method, url, *args, **kwargs)

    def getresponse(self: http.client.HTTPConnection) -> http.client.HTTPResponse:
        step = underway.pop(self, None)
        if step is not None and not isinstance(step, PassThrough):
            return response_of(step)
        try:
            response = response_of(self)
        except BaseException as error:
            if step is not None:
                step.failed(error)
            raise
        if step is not None:
            _observe(step, response)
        return response

    patches.replace(connection, "request", request)
    patches.replace(connection, "putrequest", putrequest)
    patches.replace(connection, "getresponse", getresponse)


def _url(connection: http.client.HTTPConnection, url: str) -> str:
    """The full URL of a request, also through a proxy or a tunnel."""
    if "://" in url:
        return url
    scheme = "https" if connection.default_port == 443 else "http"
    host = getattr(connection, "_tunnel_host", None) or connection.host
    port = connection.port
    return f"{scheme}://{host}:{port}{url}"


def _observe(passing: PassThrough, response: http.client.HTTPResponse) -> None:
    kind = response.headers.get("content-type", "")
    if response.headers.get("content-encoding") == "gzip":
        decode = gzip.decompress
    else:
        decode = None
    read_along(response, passing.feed, passing.ending(response.status, kind, decode))


def patch_urllib3(module: Any, patches: Patches, fallback: Fallback) -> None:
    pool = module.connectionpool.HTTPConnectionPool
    original: Callable[..., urllib3.HTTPResponse] = pool.__dict__["urlopen"]

    class Pools(module.PoolManager):  # type: ignore[misc]
        close = module.PoolManager.clear

    client = OwnClient(lambda: Pools(num_pools=4, maxsize=256))

    def urlopen(
        self: urllib3.HTTPConnectionPool,
        method: str,
        url: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        *args: object,
        **kwargs: object,
    ) -> urllib3.HTTPResponse:
        active = active_episode(fallback)
        if active is None:
            return original(self, method, url, body, headers, *args, **kwargs)
        sent_headers = {
            str(name).lower(): str(value) for name, value in (headers or self.headers or {}).items()
        }
        if "://" in url:
            whole = url
        else:
            whole = f"{self.scheme}://{self.host}:{self.port or ''}{url}"
        plan = decide(active, method, whole, sent_headers, lambda: body)
        with sending(active, plan):
            if isinstance(plan, Reroute):
                gateway = client.get().connection_from_url(plan.url)
                path = urlsplit(plan.url).path
                return original(
                    gateway, "POST", path, body, plan.headers(sent_headers), *args, **kwargs
                )
            response = original(self, method, url, body, headers, *args, **kwargs)
        if isinstance(plan, PassThrough):
            _observe_urllib3(
                plan, response, response.data if kwargs.get("preload_content", True) else None
            )
        return response

    patches.replace(pool, "urlopen", urlopen)
    patches.at_end(client.close)


def _observe_urllib3(
    passing: PassThrough, response: urllib3.HTTPResponse, content: bytes | None
) -> None:
    """Record the body `content`, or if it is None, the body as it is read."""
    done = passing.ending(response.status, response.headers.get("content-type", ""))
    if content is None:
        read_along(response, passing.feed, done)
    else:
        passing.feed(content)
        done(True)
