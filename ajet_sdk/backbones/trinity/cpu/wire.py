"""Talking to the service: JSON or arrays there and back, from any event loop.

Bodies of the service's requests and responses: JSON, arrays, and errors in OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import httpx
import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ajet_sdk.dialects.json import Json
from ajet_sdk.dialects.openai_chat import error_body
from ajet_sdk.engines.http import is_loopback, without_certificates
from ajet_sdk.errors import CheckpointError, ConfigError, ContextOverflow, EngineUnavailable, RequestRefused

Array = npt.NDArray[np.generic]

SERVICE = "ajet-trinity-service"
"""What /info says it is."""

TIMEOUT = httpx.Timeout(3600.0, connect=10.0)
"""Seconds. A step of a large batch takes long; a service that is gone refuses at once."""


class ServiceConnection:
    """One service, by its URL. Every method raises what the service says: RequestRefused, EngineUnavailable, …"""

    def __init__(self, url: str) -> None:
        if not is_loopback(url):
            raise ConfigError(f"{url!r} is not on this machine; ajet's CPU learner listens on loopback only")
        self.url = url.rstrip("/")
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()

    def info(self) -> Json:
        """What /info says. Raises ConfigError where something else answers there."""
        try:
            response = httpx.get(f"{self.url}/info", trust_env=False, verify=without_certificates(), timeout=30.0)
            info = response.json()
        except (httpx.TransportError, ValueError) as error:
            raise EngineUnavailable(f"no ajet service answers at {self.url}: {error}") from error
        if not isinstance(info, dict) or info.get("service") != SERVICE:
            raise ConfigError(
                f"the server at {self.url} is not an ajet service (the address comes from TINKER_BASE_URL)"
            )
        return info

    async def post(self, route: str, body: Mapping[str, object]) -> Json:
        response = await self._send("POST", route, json.dumps(body).encode())
        answer: Json = response.json()
        return answer

    async def arrays(self, route: str, body: Mapping[str, object] | None = None, **arrays: Array) -> dict[str, Array]:
        """Arrays for arrays, or for `body` as JSON; none where the service answers JSON."""
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
                f"connection to the service at {self.url} lost ({type(error).__name__}: {error}); see its log"
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


_log = logging.getLogger("ajet.service")


def prompt_ids(value: object) -> list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if not isinstance(value, list) or not all(type(i) is int for i in value) or not value:
        raise RequestRefused("prompt must be a list of token ids", "prompt")
    return value


async def json_body(request: Request) -> Json:
    try:
        body = json.loads(await request.body())
    except ValueError as error:
        raise RequestRefused(f"the request is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestRefused("the request must be a JSON object")
    return body


def array_body(body: bytes, *names: str) -> dict[str, Array]:
    """The flat arrays of those names, and no others."""
    try:
        arrays: dict[str, Array] = safetensors.numpy.load(body)
    except SafetensorError as error:
        raise RequestRefused(f"the request is not in the safetensors format: {error}") from error
    if set(arrays) != set(names) or any(array.ndim != 1 for array in arrays.values()):
        raise RequestRefused(f"the request must hold the flat arrays {', '.join(names)} (got {sorted(arrays)})")
    return arrays


def array_response(**arrays: Array) -> Response:
    return Response(safetensors.numpy.save(arrays), media_type="application/octet-stream")


async def refuse(request: Request, error: Exception) -> Response:
    """400 for what the client asked wrongly, else 500, or 503 where another try may help."""
    if isinstance(error, ContextOverflow):
        return JSONResponse(error_body(str(error), "invalid_request_error", "context_length_exceeded", "prompt"), 400)
    if isinstance(error, (RequestRefused, ConfigError, CheckpointError)):
        parameter = getattr(error, "parameter", None)
        return JSONResponse(error_body(str(error), "invalid_request_error", None, parameter), 400)
    _log.error("%s: %s", request.url.path, error)
    status = 503 if isinstance(error, EngineUnavailable) else 500
    return JSONResponse(error_body(str(error), "server_error"), status)


async def fail(request: Request, error: Exception) -> Response:
    """Anything unforeseen: told to the client, and kept whole in the log (Starlette raises it again)."""
    return JSONResponse(error_body(f"{type(error).__name__}: {error}", "server_error"), 500)
