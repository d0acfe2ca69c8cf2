"""Bodies of the service's requests and responses: JSON, arrays, and errors in OpenAI's shape."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ajet_sdk.dialect import error_body
from ajet_sdk.errors import CheckpointError, ConfigError, ContextOverflow, EngineUnavailable, RequestRefused

__all__ = ["array_body", "array_response", "fail", "json_body", "prompt_ids", "refuse"]

_log = logging.getLogger("ajet.service")


def prompt_ids(value: Any) -> list[int]:
    """One prompt of token ids."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if not isinstance(value, list) or not all(type(i) is int for i in value) or not value:
        raise RequestRefused("prompt must be a list of token ids", "prompt")
    return value


async def json_body(request: Request) -> dict[str, Any]:
    """The request's JSON object."""
    try:
        body = json.loads(await request.body())
    except ValueError as error:
        raise RequestRefused(f"the request is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestRefused("the request is JSON but no object")
    return body


def array_body(body: bytes, *names: str) -> dict[str, np.ndarray[Any, Any]]:
    """The flat arrays of those names, and no others."""
    try:
        arrays: dict[str, np.ndarray[Any, Any]] = safetensors.numpy.load(body)
    except SafetensorError as error:
        raise RequestRefused(f"the request is not in the safetensors format: {error}") from error
    if set(arrays) != set(names) or any(array.ndim != 1 for array in arrays.values()):
        raise RequestRefused(f"the request must hold the flat arrays {', '.join(names)} (got {sorted(arrays)})")
    return arrays


def array_response(**arrays: np.ndarray[Any, Any]) -> Response:
    """Arrays as safetensors."""
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
