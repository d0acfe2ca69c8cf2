"""`Endpoint`: posts JSON to an OpenAI-compatible endpoint and converts its errors."""

from __future__ import annotations

import asyncio
import errno
import functools
import inspect
import ipaddress
import os
import ssl
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass
from weakref import WeakKeyDictionary

from ajet_sdk.addresses import below
from ajet_sdk.dialects.json import json_bytes, json_value
from ajet_sdk.engines.pace import Pace
from ajet_sdk.errors import (
    ConfigError,
    ContextOverflow,
    EndpointMisconfigured,
    EngineError,
    EngineUnavailable,
    RequestRefused,
)

if TYPE_CHECKING:
    import aiohttp
    import httpx

_CONNECT_SECONDS = 10.0
IDLE_SECONDS = 5.0
"""Seconds to keep an idle connection; servers close theirs after about as long."""

_REMEDIES = {
    401: "check the API key: this endpoint does not accept {key}",
    402: "the account behind {key} has no credit left: add some, or set the key of another account",
    403: "check the API key: {key} has no access to the model {model!r} here",
    404: (
        "check the base URL {url} (most end in /v1) and the model's name {model!r}: one of them"
        " does not exist"
    ),
    **dict.fromkeys((405, 407, 410, 418, 451), "check the base URL {url}: no model answers there"),
}
"""Advice by the HTTP status of an endpoint that would refuse every request."""


def is_loopback(url: str) -> bool:
    """Whether `url` names this machine, so that no proxy is needed."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@functools.cache
def without_certificates() -> ssl.SSLContext:
    """An empty TLS context for plain HTTP, shared by all HTTP clients, as creating one takes
    milliseconds."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@functools.cache
def _with_certificates() -> ssl.SSLContext:
    """The TLS context of all endpoints; reading the certificates takes tens of milliseconds."""
    import httpx

    return httpx.create_ssl_context()


@dataclass(frozen=True, slots=True)
class _Response:
    url: str
    status: int
    reason: str
    headers: Mapping[str, str]
    content: bytes


def _no_response(url: str, reason: str, refused: bool = False) -> EngineUnavailable:
    """The error of a failed connection or a missing response; `refused`: no connection was made."""
    message = f"{url} could not be reached ({reason}); check the base URL and that the server runs"
    return EngineUnavailable(message, refused=refused)


_SHORTEST_KEY = 8
"""Shorter ones are placeholders."""

of_endpoint: ContextVar[bool] = ContextVar("ajet_of_endpoint", default=False)
"""Set while an `Endpoint` sends a request: outside of an episode it is a request of ajet, not of an
agent."""


class _Direct:
    """Sends requests by aiohttp, which takes a third of the processor time of httpx; without
    proxies.

    Only requests `of_agent` pass the hooks; an engine's request is part of a call that the gateway
    records.
    """

    def __init__(
        self, base_url: str, headers: Mapping[str, str], timeout: float, of_agent: bool
    ) -> None:
        self._ssl = _with_certificates() if base_url.startswith("https://") else False
        self._headers, self._timeout, self._of_agent = headers, timeout, of_agent
        self._session: aiohttp.ClientSession | None = None
        self._opened: AsyncGenerator[None, None] | None = None

    async def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_SECONDS, sock_read=self._timeout
            ),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS, ssl=self._ssl),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._opened = _close_with_loop(self._session)
        await anext(self._opened)
        return self._session

    async def send(self, method: str, url: str, content: bytes | None) -> _Response:
        import aiohttp

        try:
            session = self._session or await self._open()
            request = type(session)._request
            request = request if self._of_agent else inspect.unwrap(request)
            async with await request(
                session, method, url, data=content, allow_redirects=False
            ) as response:
                received = await response.read()
                return _Response(
                    str(response.url),
                    response.status,
                    response.reason or "",
                    response.headers,
                    received,
                )
        except aiohttp.ConnectionTimeoutError as error:
            raise _no_response(
                url, f"ConnectTimeout: no connection within {_CONNECT_SECONDS:g} s"
            ) from error
        except asyncio.TimeoutError as error:
            raise _no_response(url, f"ReadTimeout: no answer within {self._timeout:g} s") from error
        except aiohttp.ClientError as error:
            if not isinstance(error, aiohttp.ClientConnectorError):
                raise _no_response(url, f"{type(error).__name__}: {error}") from error
            number = error.errno or 0
            reason = (
                os.strerror(number) if number in errno.errorcode else error.strerror
            )  # a failed look-up has none
            raise _no_response(url, str(reason), True) from error

    async def aclose(self) -> None:
        if self._opened is not None:
            await self._opened.aclose()


async def _close_with_loop(session: aiohttp.ClientSession) -> AsyncGenerator[None, None]:
    """Closes the session when this generator ends, which an event loop does at its own end."""
    try:
        yield
    finally:
        await session.close()


class _Httpx:
    """Sends requests by httpx, for proxies, custom transports, and handles, whose requests are
    captured."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        timeout: float,
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        import httpx

        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=not is_loopback(base_url),
            transport=transport,
            verify=(
                without_certificates() if base_url.startswith("http://") else _with_certificates()
            ),
        )

    async def send(self, method: str, url: str, content: bytes | None) -> _Response:
        import httpx

        try:
            response = await self._client.request(method, url, content=content)
        except httpx.TransportError as error:
            refused = isinstance(error, httpx.ConnectError)
            raise _no_response(url, f"{type(error).__name__}: {error}", refused) from error
        at = str(response.url)
        return _Response(
            at, response.status_code, response.reason_phrase, response.headers, response.content
        )

    async def aclose(self) -> None:
        await self._client.aclose()


def check_url(base_url: str) -> None:
    """Raise ConfigError if an endpoint's address is no HTTP URL."""
    if urlsplit(base_url).scheme not in ("http", "https"):
        raise ConfigError(f"a base URL starts with http:// or https:// (got {base_url!r})")


def _has_proxy(url: str) -> bool:
    parts = urlsplit(url)
    if is_loopback(url) or proxy_bypass(parts.hostname or ""):
        return False
    return not {parts.scheme, "all"}.isdisjoint(getproxies())


class Endpoint:
    """A base URL with a key; each event loop that uses it has its own connections."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        timeout: float,
        retries: int = 4,
        transport: httpx.AsyncBaseTransport | None = None,
        of_agent: bool = True,
        key_source: str = "the API key",
    ) -> None:
        """`of_agent`: requests in an active episode are captured; `key_source`: where the key is
        set, for errors."""
        check_url(base_url)
        self.base_url = base_url.rstrip("/")
        self._key_source = key_source
        self._key = api_key
        self._is_handle = handle = is_loopback(base_url) and "/episodes/" in base_url
        remedy = "To send fewer requests at once, lower rollout.max_env_worker"
        self._pace = Pace(self.base_url, remedy, retries=0 if handle else retries)
        headers = {"content-type": "application/json"}
        if "@" not in urlsplit(base_url).netloc:  # else the client sends the URL's login
            headers["authorization"] = f"Bearer {api_key}"
        self._open: Callable[[], _Direct | _Httpx]
        if handle or transport is not None or _has_proxy(base_url):
            self._open = partial(_Httpx, base_url, headers, timeout, transport)
        else:
            self._open = partial(_Direct, base_url, headers, timeout, of_agent)
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, _Direct | _Httpx] = (
            WeakKeyDictionary()
        )

    def post(self, route: str, body: Mapping[str, object]) -> Coroutine[Any, Any, dict[str, Any]]:
        """Post JSON and return the answer. Raises RequestRefused, ContextOverflow,
        EngineUnavailable, EngineError.

        EndpointMisconfigured is an EngineError. An error with status 200 counts as one of the
        status in its code, else of 502.
        """
        return self._pace.send(
            partial(self._request, "POST", route, json_bytes(body), str(body.get("model") or ""))
        )

    def get(self, route: str) -> Coroutine[Any, Any, dict[str, Any]]:
        """Return the JSON at `route`, without retries. Raises the same errors as `post`."""
        return self._request("GET", route, None, "")

    async def _request(
        self, method: str, route: str, content: bytes | None, model: str
    ) -> dict[str, Any]:
        url, loop = below(self.base_url, route), asyncio.get_running_loop()
        client = self._clients.get(loop) or self._clients.setdefault(loop, self._open())
        token = of_endpoint.set(True)
        try:
            response = await client.send(method, url, content)
        finally:
            of_endpoint.reset(token)
        if response.status < 400:
            try:
                parsed = json_value(response.content)
            except (ValueError, RecursionError) as error:
                raise EngineUnavailable(
                    f"{url} answered {response.status}, but not with JSON: {error}"
                ) from error
            if not isinstance(parsed, dict):
                raise EngineUnavailable(
                    f"{url} answered JSON that is not an object: {str(parsed)[:200]}"
                )
            if not parsed.get("error") or parsed.get("choices"):
                return parsed
            fault = parsed["error"]  # with OpenRouter its code is the status
            code = str(fault.get("code")) if isinstance(fault, dict) else ""
            status = int(code) if code.isdecimal() and 400 <= int(code) < 600 else 502
            response = replace(response, status=status)
        raise self._error(response, model)

    def _error(self, response: _Response, model: str) -> EngineError:
        status, url = response.status, response.url
        again = response.headers.get("x-should-retry")
        try:
            body = json_value(response.content)
        except (ValueError, RecursionError):
            body = {}
        error = body.get("error", body) if isinstance(body, dict) else {}
        error = error if isinstance(error, dict) else {"message": str(error)}
        message = str(
            error.get("message")
            or response.content.decode(errors="replace")[:500]
            or response.reason
        )
        if len(self._key) >= _SHORTEST_KEY:
            message = message.replace(
                self._key, "***"
            )  # some servers repeat a key that they refuse
        where = f"{url} answered {status}: {message}"
        if again == "true":
            return EngineUnavailable(
                where, status=status, retry_after=response.headers.get("retry-after")
            )
        if error.get("code") == "context_length_exceeded" or (
            status == 400 and "maximum context length" in message
        ):
            return ContextOverflow(message)
        # OpenRouter answers 403 to requests that its moderation flagged.
        flagged = status == 403 and "flagged_input" in (error.get("metadata") or {})
        if status in (400, 413, 422) or flagged:
            return RequestRefused(message, error.get("param"))
        if status == 429 or status >= 500:
            retry_after = response.headers.get("retry-after")
            return EngineUnavailable(
                where, status=status, retry_after=retry_after, retryable=again != "false"
            )
        if status in _REMEDIES and not self._is_handle:
            remedy = _REMEDIES[status].format(
                key=self._key_source, url=self.base_url, model=model or "asked for"
            )
            return EndpointMisconfigured(f"{where}; {remedy}")
        return EngineError(where)

    async def aclose(self) -> None:
        """Close every connection, each in its own event loop."""
        for loop, client in list(self._clients.items()):
            if loop is asyncio.get_running_loop():
                await client.aclose()
            elif loop.is_running():
                asyncio.run_coroutine_threadsafe(client.aclose(), loop)
        self._clients.clear()
