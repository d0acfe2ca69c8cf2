"""`Endpoint`: posts JSON to an OpenAI-compatible endpoint and converts its errors."""

from __future__ import annotations

import asyncio
import functools
import inspect
import ipaddress
import ssl
from collections.abc import Coroutine, Mapping
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
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
    import httpx

_CONNECT_SECONDS = 10.0

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


_SHORTEST_KEY = 8
"""Shorter ones are placeholders."""

of_endpoint: ContextVar[bool] = ContextVar("ajet_of_endpoint", default=False)
"""Set while an `Endpoint` sends a request: outside of an episode it is a request of ajet, not of an
agent."""


def check_url(base_url: str) -> None:
    """Raise ConfigError if an endpoint's address is no HTTP URL."""
    if urlsplit(base_url).scheme not in ("http", "https"):
        raise ConfigError(f"a base URL starts with http:// or https:// (got {base_url!r})")


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
        self._is_handle = is_loopback(base_url) and "/episodes/" in base_url
        remedy = "To send fewer requests at once, lower rollout.max_env_worker"
        self._pace = Pace(self.base_url, remedy, retries=0 if self._is_handle else retries)
        self._timeout = timeout
        self._transport = transport
        self._of_agent = of_agent
        self._idle: WeakKeyDictionary[asyncio.AbstractEventLoop, list[httpx.AsyncClient]] = (
            WeakKeyDictionary()
        )
        """Clients with one connection each: a pool looks at all of its connections per request."""

    def _open(self) -> httpx.AsyncClient:
        import httpx

        headers = {"content-type": "application/json"}
        if "@" not in urlsplit(self.base_url).netloc:  # httpx sends a login in the URL itself
            headers["authorization"] = f"Bearer {self._key}"
        is_plain = self.base_url.startswith("http://")
        return httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(self._timeout, connect=_CONNECT_SECONDS),
            trust_env=not is_loopback(self.base_url),
            transport=self._transport,
            verify=without_certificates() if is_plain else _with_certificates(),
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
        response = await self._send(method, below(self.base_url, route), content)
        url = str(response.url)
        status = response.status_code
        if status < 400:
            try:
                parsed = json_value(response.content)
            except (ValueError, RecursionError) as error:
                raise EngineUnavailable(
                    f"{url} answered {status}, but not with JSON: {error}"
                ) from error
            if not isinstance(parsed, dict):
                raise EngineUnavailable(
                    f"{url} answered JSON that is not an object: {str(parsed)[:200]}"
                )
            if not parsed.get("error") or parsed.get("choices"):
                return parsed
            fault = parsed["error"]  # with OpenRouter its code is the status
            code = str(fault.get("code")) if isinstance(fault, dict) else ""
            if code.isdecimal() and 400 <= int(code) < 600:
                status = int(code)
            else:
                status = 502
        raise self._error(response, status, model)

    async def _send(self, method: str, url: str, content: bytes | None) -> httpx.Response:
        import httpx

        idle = self._idle.setdefault(asyncio.get_running_loop(), [])
        client = idle.pop() if idle else self._open()
        send = type(client).send
        if not self._of_agent:  # below the hooks: the gateway records the call that it is part of
            send = inspect.unwrap(send)
        token = of_endpoint.set(True)
        try:
            return await send(client, client.build_request(method, url, content=content))
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise EngineUnavailable(
                f"{url} could not be reached ({type(error).__name__}: {error}); check the base URL"
                " and that the server runs",
                refused=isinstance(error, httpx.ConnectError),
            ) from error
        finally:
            of_endpoint.reset(token)
            idle.append(client)

    def _error(self, response: httpx.Response, status: int, model: str) -> EngineError:
        url = str(response.url)
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
            or response.reason_phrase
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
        for loop, clients in list(self._idle.items()):
            for client in clients:
                if loop is asyncio.get_running_loop():
                    await client.aclose()
                elif loop.is_running():
                    asyncio.run_coroutine_threadsafe(client.aclose(), loop)
        self._idle.clear()
