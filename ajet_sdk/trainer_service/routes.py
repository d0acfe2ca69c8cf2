"""The Tinker API's HTTP routes over a `Service`.

Bodies are JSON, except those of passes and samples, which are protobuf. Requests return a promise
at once; `retrieve_future` waits for the result.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ajet_sdk.dialects.json import Json
from ajet_sdk.errors import AjetError, RequestRefused
from ajet_sdk.trainer_service import fields
from ajet_sdk.trainer_service.data import pass_address
from ajet_sdk.trainer_service.policies import EXPORT, SAVE, SNAPSHOT, read_lora
from ajet_sdk.trainer_service.service import (
    CREATE,
    LOAD,
    PASS,
    STEP,
    Ended,
    Service,
    Unknown,
    sampler_path,
)
from ajet_sdk.types import new_id

_T = TypeVar("_T", bound=fields.Body)
_POLL = 30.0
"""Seconds that `retrieve_future` waits; the SDK waits for 45."""
_LINK = 24 * 3600
"""Seconds for which the SDK may take a link to be good."""
_MOST_BYTES = 64 * 2**20
"""Largest body of a request; the SDK sends the data of a pass in parts of about 5 MB."""
_KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


def application(service: Service, api_key: str | None = None, poll: float = _POLL) -> ASGIApp:
    """Builds the ASGI application; with `api_key` it answers only requests with this key."""
    app = _Routes(service, poll).app()
    return _keyed(app, api_key) if api_key else app


class TooLarge(RequestRefused):
    """A body above the limit."""


def _keyed(app: ASGIApp, api_key: str) -> ASGIApp:
    """Require the API key in the SDK's headers. Links to files have a secret of their own."""

    async def keyed(scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        bearer = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        key = headers.get(b"x-api-key") or bearer
        is_open = scope["type"] != "http" or scope["path"] == "/api/v1/healthz"
        if (
            is_open
            or scope["path"].startswith("/files/")
            or hmac.compare_digest(key, api_key.encode())
        ):
            await app(scope, receive, send)
        else:
            wrong = "the API key is missing or wrong; set TINKER_API_KEY to the server's key"
            await JSONResponse({"detail": wrong}, 401)(scope, receive, send)

    return keyed


class _Routes:
    def __init__(self, service: Service, poll: float) -> None:
        self.service = service
        self._poll = poll
        self._secret = secrets.token_urlsafe()

    def app(self) -> Starlette:
        posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "client/config": _constant(parallel_fwdbwd_chunks=True, use_pyqwest_transport=False),
            "client/dynamic_config": _constant(),
            "telemetry": _constant(status="accepted"),
            "session_heartbeat": self.heartbeat,
            "create_session": self.create_session,
            "sessions/{session}/finish": self.finish,
            "create_model": self.create_model,
            "load_weights": self.load_weights,
            "get_info": self.get_info,
            "forward_backward": self.forward_backward,
            **dict.fromkeys((STEP, SAVE, SNAPSHOT, EXPORT), self.numbered),
            "create_sampling_session": self.create_sampling_session,
            "asample": self.sample,
            "retrieve_future": self.retrieve_future,
            "weights_info": self.weights_info,
        }
        run = "training_runs/{run}"
        gets: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "healthz": _constant(status="ok"),
            "get_server_capabilities": self.capabilities,
            "samplers/{sampler}": self.sampler,
            "training_runs": self.runs,
            run: self.run,
            f"{run}/checkpoints": self.checkpoints,
            "checkpoints": self.checkpoints,
            f"{run}/checkpoints/{{checkpoint:path}}/external_weights_urls": self.file_links,
        }
        routes = [
            Route(f"/api/v1/{path}", answer, methods=["POST"]) for path, answer in posts.items()
        ]
        routes += [Route(f"/api/v1/{path}", answer) for path, answer in gets.items()]
        routes += [
            Route(
                f"/api/v1/{run}/checkpoints/{{checkpoint:path}}", self.delete, methods=["DELETE"]
            ),
            Route("/files/{secret}/{file:path}", self.file),
            Route("/{path:path}", _no_route, methods=["GET", "POST", "PUT", "DELETE"]),
        ]
        return Starlette(
            routes=routes,
            exception_handlers={AjetError: _refuse, ClientDisconnect: _refuse, Exception: _fail},
        )

    # Sessions and what the server has

    async def create_session(self, request: Request) -> Response:
        return JSONResponse({"type": "create_session", "session_id": new_id()})

    async def heartbeat(self, request: Request) -> Response:
        self.service.check_session((await _read(request, fields.OfSession)).session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        self.service.finish(request.path_params["session"])
        return Response(status_code=204)

    async def capabilities(self, request: Request) -> Response:
        longest = self.service.base.max_model_len
        model = {
            "model_name": self.service.name,
            "max_context_length": longest,
            "trainable": True,
            "sampleable": True,
        }
        return JSONResponse({"supported_models": [model]})

    async def get_info(self, request: Request) -> Response:
        body = await _read(request, fields.OfModel)
        return JSONResponse({"type": "get_info", **self.service.about(body.model_id)})

    # Requests to a policy

    async def create_model(self, request: Request) -> Response:
        return self._create(CREATE, await _read(request, fields.NewModel))

    async def load_weights(self, request: Request) -> Response:
        """Load weights into a policy, or create one from them."""
        body = await _body(request)
        if _parsed(body, fields.Body).json_object().get("model_id") is None:
            return self._create(LOAD, _parsed(body, fields.NewModel))
        return self._accept(LOAD, _parsed(body, fields.LoadWeights))

    async def numbered(self, request: Request) -> Response:
        kind = request.url.path.rpartition("/")[2]
        return self._accept(kind, await _read(request, fields.Numbered))

    def _create(self, kind: str, body: fields.NewModel) -> Response:
        session = body.session_id
        number = body.model_seq_id
        return _promise(self.service.create(kind, session, number, body.json_object()))

    def _accept(self, kind: str, body: fields.Numbered | fields.LoadWeights) -> Response:
        sent = json.dumps(body.json_object()).encode()
        return _promise(self.service.accept(kind, body.model_id, body.seq_id, sent))

    async def forward_backward(self, request: Request) -> Response:
        body = await _body(request)
        return _promise(self.service.accept(PASS, *pass_address(body), body))

    async def retrieve_future(self, request: Request) -> Response:
        """A result, or 408 if there is none yet, on which the SDK retries."""
        promise = (await _read(request, fields.Promise)).request_id
        try:
            reply = await self.service.reply(promise, self._poll)
        except Unknown as error:  # on 410 the SDK samples again; training must not be repeated
            return JSONResponse({"detail": str(error)}, 410 if ":sample:" in promise else 404)
        except (
            asyncio.CancelledError
        ):  # the server stops; the client repeats the request at the next one
            reply = None
        if reply is not None:
            return Response(reply.body, media_type=reply.media)
        waits = self.service.holds_up(promise)
        if waits:
            state = {"queue_state": "paused_capacity", "queue_state_reason": waits}
        else:
            state = {"queue_state": "active"}
        return JSONResponse({"type": "try_again", "request_id": promise, **state}, 408)

    # Sampling

    async def create_sampling_session(self, request: Request) -> Response:
        body = await _read(request, fields.NewSampler)
        sampler = self.service.open_sampler(
            body.session_id, body.sampling_session_seq_id, body.base_model, body.model_path
        )
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def sample(self, request: Request) -> Response:
        body = await _read(request, fields.Sample)
        promise = self.service.sample(body.sampling_session_id, body.seq_id, body.json_object())
        ids = [f"{promise}:{i}" for i in range(body.num_samples or 1)]
        return _promise(promise, sample_sequence_ids=ids)

    async def sampler(self, request: Request) -> Response:
        sampler = request.path_params["sampler"]
        path = sampler_path(sampler)
        return JSONResponse(
            {"sampler_id": sampler, "base_model": self.service.name, "model_path": path}
        )

    # Checkpoints

    async def runs(self, request: Request) -> Response:
        begin = _query_number(request, "offset", 0)
        limit = _query_number(request, "limit", 20)
        ids = self.service.policies()[::-1]
        runs = [self._run(id_) for id_ in ids[begin : begin + limit]]
        cursor = {"offset": begin, "limit": limit, "total_count": len(ids)}
        return JSONResponse({"training_runs": runs, "cursor": cursor})

    async def run(self, request: Request) -> Response:
        return JSONResponse(self._run(request.path_params["run"]))

    def _run(self, policy_id: str) -> Json:
        about = self.service.about(policy_id)
        names = ("is_lora", "lora_rank", "user_metadata")
        mine = {
            "training_run_id": policy_id,
            "base_model": self.service.name,
            "model_owner": "local",
        }
        return {
            **mine,
            **{name: about[name] for name in names},
            "last_request_time": _iso(time.time()),
        }

    async def checkpoints(self, request: Request) -> Response:
        named = self.service.checkpoints.named(
            self.service.policies(request.path_params.get("run"))
        )
        return JSONResponse(
            {"checkpoints": [_checkpoint(path, directory) for path, directory in named.items()]}
        )

    async def weights_info(self, request: Request) -> Response:
        body = await _read(request, fields.OfCheckpoint)
        lora = read_lora(self.service.checkpoints.find(body.tinker_path))
        kinds = {name: getattr(lora, name) for name in ("train_attn", "train_mlp", "train_unembed")}
        return JSONResponse(
            {"base_model": self.service.name, "is_lora": True, "lora_rank": lora.rank, **kinds}
        )

    def _checkpoint(self, request: Request) -> Path:
        return self.service.checkpoints.find(
            "tinker://{run}/{checkpoint}".format(**request.path_params)
        )

    async def delete(self, request: Request) -> Response:
        await asyncio.to_thread(shutil.rmtree, self._checkpoint(request))
        return Response(status_code=204)

    async def file_links(self, request: Request) -> Response:
        """A link for each file of the adapter, as loaded by peft and vLLM; the optimizer stays
        here.

        A link is fetched without the key, so that it has a secret in it, until the server ends.
        """
        checkpoint = self._checkpoint(request)
        place = quote(str(checkpoint.relative_to(self.service.checkpoints.state)))
        base = f"{request.base_url}files/{self._secret}/{place}"
        names = sorted(file.name for file in checkpoint.glob("adapter_*"))
        links = {name: f"{base}/{name}" for name in names}
        return JSONResponse({"urls": links, "expires": _iso(time.time() + _LINK)})

    async def file(self, request: Request) -> Response:
        """Serve a link."""
        secret = request.path_params["secret"]
        name = Path(request.path_params["file"])
        state = self.service.checkpoints.state.resolve()
        target = (state / name).resolve()
        is_adapter = name.name.startswith("adapter_") and target.is_relative_to(state)
        if not hmac.compare_digest(secret.encode(), self._secret.encode()):
            return JSONResponse({"detail": "the link is no longer good; ask for a new one"}, 403)
        if not is_adapter or not target.is_file():
            return JSONResponse({"detail": f"there is no file {name.name}"}, 404)
        return FileResponse(target)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()


def _checkpoint(path: str, directory: Path) -> Json:
    part, name = path.split("/")[-2:]
    about = json.loads((directory / "lora.json").read_text())
    return {
        "checkpoint_id": f"{part}/{name}",
        "checkpoint_type": _KINDS[part],
        "time": _iso(directory.stat().st_mtime),
        "tinker_path": path,
        "size_bytes": sum(file.stat().st_size for file in directory.iterdir()),
        "public": False,
        "user_metadata": about.get("user_metadata"),
    }


def _constant(**value: object) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return JSONResponse(value)

    return answer


def _query_number(request: Request, name: str, default: int) -> int:
    """A number in the query. Raises RequestRefused."""
    value = request.query_params.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,15}", value):
        raise RequestRefused(f"{name} must be a whole number (got {value!r:.100})", name)
    return int(value)


def _promise(promise: str, **more: object) -> Response:
    return JSONResponse({"request_id": promise, **more})


async def _body(request: Request) -> bytes:
    """The body of a request. Raises TooLarge without reading the rest."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BYTES:
            raise TooLarge(f"the request has over {_MOST_BYTES} bytes; send its data in parts")
    return bytes(body)


async def _read(request: Request, kind: type[_T]) -> _T:
    """The JSON object of a request. Raises RequestRefused for a wrong field."""
    return _parsed(await _body(request), kind)


def _parsed(body: bytes, kind: type[_T]) -> _T:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in detail["loc"])
        got = f" (got {detail['input']!r:.100})" if name else ""
        raise RequestRefused(f"{name or 'the request'}: {detail['msg']}{got}", name) from error


async def _no_route(request: Request) -> Response:
    about = (
        f"this server has no {request.method} {request.url.path}; docs/tinker-conformance.md has"
        " what works"
    )
    return JSONResponse({"detail": about}, 404)


async def _refuse(request: Request, error: Exception) -> Response:
    status = 400
    for kind, code in ((Ended, 410), (Unknown, 404), (TooLarge, 413)):
        if isinstance(error, kind):
            status = code
    return JSONResponse({"detail": str(error)}, status)


async def _fail(request: Request, error: Exception) -> Response:
    """Report any other error to the client; Starlette raises it again, so it is logged."""
    if isinstance(error, KeyError):
        return JSONResponse({"detail": f"the request lacks {error}"}, 400)
    return JSONResponse({"detail": f"{type(error).__name__}: {error}"}, 500)
