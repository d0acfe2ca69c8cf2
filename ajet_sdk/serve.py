"""`serve()`: a checkpoint as an OpenAI-compatible endpoint. Each request is recorded as an
episode."""

from __future__ import annotations

import hmac
import socket
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from starlette.types import Receive, Scope, Send

from ajet_sdk.agent.context import AgentIdentity
from ajet_sdk.config.config import load_config
from ajet_sdk.config.model_source import separate_targets
from ajet_sdk.engines.open import open_engine, ready
from ajet_sdk.environments.instances import InstanceLimits, Instances
from ajet_sdk.environments.server import service_app
from ajet_sdk.environments.spec import Spec
from ajet_sdk.errors import ConfigError, EngineUnavailable
from ajet_sdk.gateway.access import (
    ClientGone,
    HTTPError,
    Request,
    RequestTarget,
    count,
    is_of_models,
    locate,
    models,
    unknown_route,
)
from ajet_sdk.gateway.answer import answer
from ajet_sdk.gateway.episode import EpisodeSpec
from ajet_sdk.gateway.gateway import Gateway, listening_socket, serve_until_signal
from ajet_sdk.gateway.http_door import CONNECTION, read_json, respond, send_reply
from ajet_sdk.gateway.http_server import is_loopback, server_config
from ajet_sdk.protocols import Engine
from ajet_sdk.reporting import output
from ajet_sdk.rollout.event_loop import run_to_end
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, Run, Task, new_id, now

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config


def serve(
    checkpoint: str | Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    name: str | None = None,
    trace: Path | None = None,
    config: Config | None = None,
    api_key: str | None = None,
) -> None:
    """Serve a Hugging Face checkpoint at `http://HOST:PORT/v1` until Ctrl-C.

    Args:
        checkpoint: a directory in the format of transformers, or a name on the hub.
        host: the address to bind to.
        port: the port; 0 takes a free port, which is printed.
        name: the model's name in requests; None: the checkpoint's.
        trace: the file or directory to record every call; None: nothing is recorded.
        config: dtype, device and lengths.
        api_key: answer only requests with `Authorization: Bearer KEY`. Required if other machines can connect.

    Raises:
        ConfigError: the checkpoint cannot be loaded, a key is missing, or the port is taken.
    """
    if targets := separate_targets(Path(checkpoint)):
        raise ConfigError(
            f"{checkpoint} has a model for each of {', '.join(targets)}; serve one:"
            f" {Path(checkpoint) / targets[0]}"
        )
    config = config or load_config()
    model = config.model.model_copy(
        update={
            "path": str(checkpoint),
            "name": name or config.model.name,
            "base_url": None,
            "scripted": None,
        }
    )
    _listener(host, port, api_key).close()  # errors come before the model is loaded
    engine = open_engine(config.model_copy(update={"model": model}))
    serve_engine(engine, host, port, trace=trace, api_key=api_key)


def serve_engine(
    engine: Engine,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    trace: Path | None = None,
    api_key: str | None = None,
) -> None:
    """Serve an engine like `serve`, and close it at the end."""
    run_to_end(_serve(engine, host, port, trace, api_key))


def wait_for_server(host: str = "127.0.0.1", port: int = 8000, *, seconds: float = 600.0) -> None:
    """Wait until `serve` at this address has loaded its model. Raises EngineUnavailable."""
    address = f"http://{host}:{port}/health"
    end = time.monotonic() + seconds
    while True:
        with suppress(httpx.TransportError):
            reply = httpx.get(address, timeout=5.0, trust_env=False)
            if reply.is_success:
                return
            if reply.status_code == httpx.codes.NOT_FOUND:
                raise EngineUnavailable(
                    f"http://{host}:{port} is not answered by `ajet serve`; choose another --port"
                )
        if time.monotonic() > end:
            raise EngineUnavailable(
                f"nothing answers at http://{host}:{port} after {seconds:g} s; see the output of"
                " `ajet serve`"
            )
        time.sleep(0.2)


def serve_environment(
    spec: Spec,
    host: str = "127.0.0.1",
    port: int = 8080,
    *,
    name: str,
    limits: InstanceLimits,
    python: str = sys.executable,
    api_key: str | None = None,
) -> None:
    """Host an environment at `http://HOST:PORT` until Ctrl-C; jobs request it by `name`.

    Instances are processes of the interpreter `python`. With `api_key`, which is required if other
    machines can connect, only requests with it are answered (clients send AJET_ENV_KEY).

    Raises ConfigError if the environment cannot be loaded, a key is missing, or the port is taken.
    """
    run_to_end(_serve_environment(Instances(spec, limits, python), name, host, port, api_key))


async def _serve_environment(
    instances: Instances, name: str, host: str, port: int, api_key: str | None
) -> None:
    import uvicorn

    with _listener(host, port, api_key, "AJET_ENV_KEY") as listener:
        await instances.start()
        app = service_app(instances, name, api_key)
        settings = server_config(
            app,
            own_name=host,
            keyed=bool(api_key),
            lifespan="on",
            timeout_graceful_shutdown=5,
            timeout_keep_alive=300,
        )
        output.echo(f"Serving {name} at http://{host}:{listener.getsockname()[1]} (Ctrl-C stops)")
        await uvicorn.Server(settings).serve(sockets=[listener])


def _listener(
    host: str, port: int, api_key: str | None, variable: str = "AJET_SERVE_KEY"
) -> socket.socket:
    listener = listening_socket(host, port)
    if not api_key and not is_loopback(listener):
        listener.close()
        raise ConfigError(
            f"other machines can connect to {host or 'an empty host'}, and whoever does would be"
            f" answered: give a key (export {variable}=…), or listen on 127.0.0.1"
        )
    return listener


async def _serve(
    engine: Engine, host: str, port: int, trace: Path | None, api_key: str | None
) -> None:
    with ExitStack() as stack:
        try:
            listener = stack.enter_context(_listener(host, port, api_key))
            await ready(engine)
            writer, run = _record(trace, engine, stack)
            gateway = stack.enter_context(Gateway(writer))
            service = _Service(engine, gateway, writer, run.run_id, api_key)
            settings = server_config(
                service.app, own_name=host, keyed=bool(api_key), timeout_graceful_shutdown=5
            )
            url = f"http://{host}:{listener.getsockname()[1]}/v1"
            output.echo(f"Serving {engine.model} at {url} (Ctrl-C stops)")
            await serve_until_signal(settings, listener)
            if writer is not None:
                writer.put(run.model_copy(update={"status": "finished", "ended_at": now()}))
        finally:
            await engine.aclose()


def _record(trace: Path | None, engine: Engine, stack: ExitStack) -> tuple[TraceWriter | None, Run]:
    run = Run(name=f"serve {engine.model}", backbone="serve")
    if trace is None:
        return None, run
    trace.parent.mkdir(parents=True, exist_ok=True)
    writer = stack.enter_context(TraceWriter(trace, on_error="warn"))
    writer.put(run)
    return writer, run


@dataclass(eq=False)
class _Service:
    """The routes of all dialects, and /health."""

    engine: Engine
    gateway: Gateway
    writer: TraceWriter | None
    run_id: str
    api_key: str | None

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        method = scope["method"]
        path = scope["path"].rstrip("/")
        query = scope.get("query_string", b"").decode("latin-1")
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        place = locate(path, query, headers)
        route = place.endpoint.route
        try:
            if method == "GET" and path == "/health":
                await respond(send, 200, {"status": "ok"})
            elif self.api_key and not hmac.compare_digest(
                place.key.encode(), self.api_key.encode()
            ):
                raise HTTPError(
                    401,
                    "the key is missing or wrong; send it as `Authorization: Bearer KEY`",
                    "invalid_api_key",
                )
            elif method == "GET" and is_of_models(route):
                await respond(send, 200, models(route, [self.engine.model], place.speaks))
            elif method != "POST":
                raise HTTPError(405, f"{method} {path} is not answered; calls are POSTed", "method")
            elif place.endpoint.dialect is None:
                raise unknown_route(route)
            else:
                await self._answer(await read_json(receive, scope), place, scope, send)
        except HTTPError as refusal:
            await respond(send, refusal.status, refusal.body_in(place.speaks))
        except ClientGone:
            pass  # the client is gone; its call, if any, is recorded as undelivered

    async def _answer(
        self, body: dict[str, object], place: RequestTarget, scope: Scope, send: Send
    ) -> None:
        model = body.get("model") or getattr(place.endpoint.dialect, "name", None)
        if model and model != self.engine.model:
            message = (
                f"The model {model!r} does not exist; this server answers to {self.engine.model!r}."
            )
            raise HTTPError(404, message, "model_not_found", "model")
        opened = self.gateway.open(EpisodeSpec(episode_id=new_id(), engine=self.engine))
        started = now()
        connection = scope["state"][CONNECTION]
        endpoint = place.endpoint
        request = Request(
            endpoint.route, endpoint.dialect, body, AgentIdentity(), "rollout", connection
        )
        try:
            if endpoint.counter is not None:
                return await respond(send, 200, await count(opened, request, endpoint.counter))
            await send_reply(await answer(opened, request), scope, send)
            await connection.drain()  # the episode ends once the client has read its reply
        finally:
            calls = await opened.finish()
            if self.writer is not None and calls:
                error = next((call.error for call in calls if call.error), None)
                asked = calls[-1].request
                response = calls[-1].response
                messages = asked.get("messages")
                choice = (response.get("choices") or [{}])[0]
                if isinstance(messages, list) and messages:
                    last = messages[-1]
                else:
                    last = {}
                query = last.get("content") if isinstance(last, dict) else None
                self.writer.put(
                    Episode(
                        episode_id=opened.episode_id,
                        run_id=self.run_id,
                        task=Task(
                            main_query=(
                                query if isinstance(query, str) else str(asked.get("prompt") or "")
                            )
                        ),
                        output=choice.get("text") or (choice.get("message") or {}).get("content"),
                        calls=calls,
                        status="failed" if error else "succeeded",
                        error=error,
                        started_at=started,
                        ended_at=now(),
                    )
                )
