"""`serve_trainer()`: serves a base model for training and sampling over the network, until
Ctrl-C."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from pathlib import Path

from ajet_sdk.config.config import load_config
from ajet_sdk.config.model_source import check_source
from ajet_sdk.engines.fetch import with_fetched_model
from ajet_sdk.errors import ConfigError
from ajet_sdk.gateway.gateway import KEEP_ALIVE, listening_socket, serve_until_signal
from ajet_sdk.gateway.http_server import is_loopback, server_config
from ajet_sdk.learn.determinism import deterministic_torch
from ajet_sdk.reporting.output import echo
from ajet_sdk.rollout.event_loop import run_to_end
from ajet_sdk.trainer_service.policies import BaseModel
from ajet_sdk.trainer_service.routes import application
from ajet_sdk.trainer_service.sampling import Samplers
from ajet_sdk.trainer_service.service import Service

_PREFIX = "tml-"
"""Prefix of API keys that the SDK requires."""


def serve_trainer(
    model: str,
    host: str = "127.0.0.1",
    port: int = 8900,
    *,
    state: Path,
    name: str | None = None,
    api_key: str | None = None,
    max_model_len: int | None = None,
    deterministic: bool = False,
) -> None:
    """Serve the Tinker API over the base model at `model`: a directory, a short name of
    `ajet model list`, which is fetched if needed, or a Hugging Face name.

    Args:
        state: directory of adapters, optimizers and checkpoints, which later servers reuse.
        name: the model's name for clients, and the location of its tokenizer; None: `model`.
        api_key: answer only requests with this key.
        deterministic: sample each call separately, on one thread, so that equal requests give bit-equal results.

    Raises:
        ConfigError: the model cannot be loaded, another server uses `state`, the port is taken, or other machines could
            connect.
    """
    if api_key and not api_key.startswith(_PREFIX):
        raise ConfigError(
            f"AJET_TRAINER_KEY: the Tinker SDK sends only keys that begin with {_PREFIX}; for"
            f" example: export AJET_TRAINER_KEY={_PREFIX}$(openssl rand -hex 16)"
        )
    source = str(
        with_fetched_model(load_config(values={"ajet": {"model": {"path": model}}})).model.path
    )
    check_source(source)
    with _listener(host, port) as listener:
        url = f"http://{host}:{listener.getsockname()[1]}"
        run_to_end(
            serve(
                listener,
                source,
                state,
                name or model,
                api_key=api_key,
                max_model_len=max_model_len,
                deterministic=deterministic,
                own_name=host,
                greeting=(
                    f"Serving {name or model} at {url} (Ctrl-C stops). "
                    f"In the client: export TINKER_BASE_URL={url}"
                ),
            )
        )


async def serve(
    listener: socket.socket,
    model: str,
    state: Path,
    name: str | None = None,
    *,
    api_key: str | None = None,
    max_model_len: int | None = None,
    deterministic: bool = False,
    temperature: float = 1.0,
    device: str = "auto",
    seed: int = 0,
    own_name: str = "",
    greeting: str = "",
) -> None:
    """Serve the model at `model` on a listening socket until Ctrl-C or SIGTERM; prints `greeting`
    once it is loaded.

    Tokens of training data and prompts are scored at `temperature`, which is 1 in the API. Raises
    as `serve_trainer`.
    """
    load = partial(
        BaseModel, model, device=device, max_model_len=max_model_len, temperature=temperature
    )
    with deterministic_torch(deterministic):
        base = await asyncio.to_thread(load)
        samplers = Samplers(base, seed, deterministic=deterministic)
        service = Service(base, samplers, state, name or model)
        service.resume()
        settings = server_config(
            application(service, api_key),
            own_name=own_name,
            keyed=bool(api_key),
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=1,
        )
        if greeting:
            echo(greeting)
        try:
            await serve_until_signal(settings, listener)
        finally:
            await service.aclose()


def _listener(host: str, port: int) -> socket.socket:
    listener = listening_socket(host, port)
    if is_loopback(listener):
        return listener
    listener.close()
    raise ConfigError(
        f"other machines can connect to {host or 'an empty host'}, and could read and train what is"
        " yours: listen on 127.0.0.1 and reach it through an SSH tunnel (on the client: ssh -N -L"
        " 8900:127.0.0.1:8900 USER@SERVER), or through a reverse proxy with TLS, and give a key"
        " (AJET_TRAINER_KEY)"
    )
