"""The environment service: a web application over the instances of one environment.

Every endpoint is a POST of `{env_type, task_id, instance_id, messages, params}` and answers
`{"success": true, "data": ...}`, or an HTTP status with `{"detail": ...}`: 404 for unknown tasks
and instances, 410 for an ended instance, 503 if all instances are in use, 500 for an error in the
environment.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ajet_sdk.environments.instances import Instances, Refused
from ajet_sdk.types import Json, new_id

log = logging.getLogger("ajet.environments")

_UNNAMED = "default"
"""The name that AgentJet's client sends once an instance is created."""

_LOOKS = 30
"""Checks for idle instances per idle limit."""


class _RequestBody(BaseModel):
    env_type: str | None = None
    task_id: str | None = None
    instance_id: str | None = None
    messages: Json = Field(default_factory=dict)
    params: Json = Field(default_factory=dict)


def service_app(instances: Instances, env_type: str, api_key: str | None = None) -> Starlette:
    """Return the application; its instances are ended when it shuts down.

    `env_type` is the environment's name; requests for another name are refused, requests without a
    name are not. With `api_key`, requests must send it (`Authorization: Bearer KEY`).
    """

    async def ask(what: str, body: _RequestBody) -> object:
        return await instances.ask(_id_of(body), {"what": what, "params": body.params})

    async def create(body: _RequestBody) -> object:
        if not body.task_id:
            raise Refused(400, "task_id is missing")
        return await instances.create(body.instance_id or new_id(), body.task_id, body.params)

    async def step(body: _RequestBody) -> object:
        if not body.messages:
            raise Refused(
                400,
                'messages is missing: the agent\'s message, {"role": "assistant", "content": ...}',
            )
        return await instances.ask(_id_of(body), {"what": "step", "messages": body.messages})

    def keyed(request: Request) -> bool:
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        return api_key is None or hmac.compare_digest(sent.encode(), api_key.encode())

    def endpoint(
        answer: Callable[[_RequestBody], Awaitable[object]],
    ) -> Callable[[Request], Awaitable[JSONResponse]]:
        async def handle(request: Request) -> JSONResponse:
            if not keyed(request):
                return _refusal(
                    401, "the key is missing or wrong; set AJET_ENV_KEY where the job runs"
                )
            try:
                body = _RequestBody.model_validate_json(await request.body())
                if body.env_type and body.env_type not in (env_type, _UNNAMED):
                    raise Refused(404, f"this service hosts {env_type!r}, not {body.env_type!r}")
                return JSONResponse({"success": True, "data": await answer(body)})
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                return _refusal(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
            except Refused as refused:
                return _refusal(refused.status, str(refused))

        return handle

    async def health(request: Request) -> JSONResponse:
        return JSONResponse(
            {
                "status": "ok",
                "env_type": env_type,
                "running": len(instances.listed()),
                "limit": instances.limits.instances,
                "created": instances.created,
                "lost": len(instances.lost),
            }
        )

    async def listed(request: Request) -> JSONResponse:
        if keyed(request):
            return JSONResponse(instances.listed())
        return _refusal(401, "the key is missing or wrong")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        watch = asyncio.create_task(_end_idle(instances))
        try:
            yield
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
            await instances.close()

    answers: dict[str, Callable[[_RequestBody], Awaitable[object]]] = {
        "get_env_profile": lambda body: instances.tasks(str(body.params.get("split", "train"))),
        "create": create,
        "step": step,
        "evaluate": partial(ask, "evaluate"),
        "get_info": partial(ask, "info"),
        "release": lambda body: instances.release(_id_of(body)),
    }
    routes = [
        Route(f"/{name}", endpoint(answer), methods=["POST"]) for name, answer in answers.items()
    ]
    routes += [Route("/healthz", health), Route("/instances", listed)]
    return Starlette(routes=routes, lifespan=lifespan)


def _id_of(body: _RequestBody) -> str:
    if not body.instance_id:
        raise Refused(400, "instance_id is missing")
    return body.instance_id


def _refusal(status: int, message: str) -> JSONResponse:
    if status >= 500 or status == 410:
        log.warning("%d: %s", status, message)
    return JSONResponse({"detail": message}, status)


async def _end_idle(instances: Instances) -> None:
    while True:
        await asyncio.sleep(instances.limits.idle / _LOOKS)
        for name in instances.end_idle():
            log.warning("%s", instances.lost[name])
