"""Talking to the service: JSON or arrays there and back, from any event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import httpx
import numpy as np

from ajet_sdk.endpoint import is_loopback, without_certificates
from ajet_sdk.errors import ConfigError, ContextOverflow, EngineUnavailable, RequestRefused

__all__ = ["SERVICE", "ServiceConnection"]

Array = np.ndarray[Any, Any]
SERVICE = "ajet-trinity-service"
"""What /info says it is."""
TIMEOUT = httpx.Timeout(3600.0, connect=10.0)
"""Seconds. A step of a large batch takes long; a service that is gone refuses at once."""


class ServiceConnection:
    """One service, by its URL. Every method raises what the service says: RequestRefused, EngineUnavailable, …"""

    def __init__(self, url: str) -> None:
        if not is_loopback(url):
            raise ConfigError(f"{url!r} is not on this machine: the CPU learner of ajet is reached by loopback only")
        self.url = url.rstrip("/")
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()

    def info(self) -> dict[str, Any]:
        """What /info says. Raises ConfigError where something else answers there."""
        try:
            response = httpx.get(f"{self.url}/info", trust_env=False, verify=without_certificates(), timeout=30.0)
            said = response.json()
        except (httpx.TransportError, ValueError) as error:
            raise EngineUnavailable(f"no service of ajet answers at {self.url}: {error}") from error
        if not isinstance(said, dict) or said.get("service") != SERVICE:
            raise ConfigError(f"what answers at {self.url} is no service of ajet (TINKER_BASE_URL names it)")
        return said

    async def post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """JSON for JSON."""
        response = await self._send("POST", route, json.dumps(body).encode())
        answer: dict[str, Any] = response.json()
        return answer

    async def arrays(self, route: str, body: Mapping[str, Any] | None = None, **arrays: Array) -> dict[str, Array]:
        """Arrays for arrays, or for `body` as JSON; none where the service answers JSON."""
        import safetensors.numpy

        content = safetensors.numpy.save(arrays) if body is None else json.dumps(body).encode()
        response = await self._send("POST", route, content)
        if response.headers["content-type"].startswith("application/json"):
            return {}
        answer: dict[str, Array] = safetensors.numpy.load(response.content)
        return answer

    async def delete(self, route: str) -> None:
        await self._send("DELETE", route, b"")

    async def _send(self, method: str, route: str, content: bytes) -> httpx.Response:
        try:
            response = await self._client().request(method, f"{self.url}/{route}", content=content)
        except httpx.TransportError as error:
            raise EngineUnavailable(
                f"the service at {self.url} was lost ({type(error).__name__}: {error}); its log says why"
            ) from error
        if response.status_code >= 400:
            _raise(response)
        return response

    def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            client = self._clients[loop] = httpx.AsyncClient(
                timeout=TIMEOUT,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
                trust_env=False,
                verify=without_certificates(),
            )
        return client


def _raise(response: httpx.Response) -> None:
    try:
        error = response.json()["error"]
        message, code, parameter = str(error["message"]), error["code"], error["param"]
    except (ValueError, KeyError, TypeError):
        message, code, parameter = response.text[:500] or response.reason_phrase, None, None
    if code == "context_length_exceeded":
        raise ContextOverflow(message)
    if response.status_code < 500:
        raise RequestRefused(message, parameter)
    raise EngineUnavailable(message, status=response.status_code)
