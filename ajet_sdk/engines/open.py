"""Opens engines (scripted, remote, local, vLLM, Tinker) and imports only the packages that each
needs."""

from __future__ import annotations

import importlib
import logging
import os
from typing import TYPE_CHECKING

from ajet_sdk.config.api_keys import api_key
from ajet_sdk.config.model_source import check_source, is_cached, separate_targets
from ajet_sdk.config.objects import load_object
from ajet_sdk.engines.by_target import EngineByTarget
from ajet_sdk.engines.fetch import with_fetched_model
from ajet_sdk.engines.remote import RemoteEngine
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.engines.vllm.engine import samples_with_vllm, vllm_engine
from ajet_sdk.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config
    from ajet_sdk.protocols import Engine

log = logging.getLogger("ajet")

AT_SERVICE = "tinker://"
"""Prefix of paths of weights at a training service."""
LOCAL = "ajet_sdk.engines.local.loading"
"""Imported by name, as it loads torch."""


def at_endpoint(config: Config) -> Config:
    """The config with OPENAI_BASE_URL as the model's address, if it is set and `model.path` is not
    a local model.

    A local model is a path, or a name on the hub with weights in the hub's cache.
    """
    model = config.model
    url = os.environ.get("OPENAI_BASE_URL")
    named = (
        model.base_url or model.scripted or model.recipe or str(model.path).startswith(AT_SERVICE)
    )
    if not url or not model.path or named:
        return config
    here = config.resolve(model.path).exists() or model.path.startswith((".", "/", "~"))
    if here or (model.path.count("/") == 1 and is_cached(model.path)):
        return config
    name = model.name or model.path
    log.info(
        "%s is not a local directory; asking for this model at %s (OPENAI_BASE_URL)",
        model.path,
        url,
    )
    return config.model_copy(
        update={"model": model.model_copy(update={"base_url": url, "name": name, "path": None})}
    )


def open_engine(config: Config) -> Engine:
    """Open the engine of `config.model`: a script, an endpoint, or weights. Raises ConfigError
    without a model."""
    model = config.model
    if model.scripted:
        replies = load_object(
            model.scripted, relative_to=config.source.parent if config.source else None
        )
        if hasattr(replies, "answer"):
            return replies  # type: ignore[no-any-return]
        return ScriptedEngine(
            replies,
            model=model.name or "scripted",
            max_model_len=config.rollout.max_model_len,
            tool_call_parser=model.tool_call_parser,
        )
    if model.base_url:
        key = api_key(model.api_key_env)
        name = model.name or model.path
        if not name:
            raise ConfigError(
                f"model.base_url is {model.base_url}, but no model is named; set model.name"
                " (--model)"
            )
        source = f"{model.api_key_env} (model.api_key_env)" + ("" if key else ", which is not set")
        return RemoteEngine(model.base_url, key or "none", str(name), key_source=source)
    if str(model.path).startswith(AT_SERVICE):
        served: Engine = importlib.import_module("ajet_sdk.engines.tinker.sampler").tinker_engine(
            config
        )
        return served
    if not model.path:
        raise ConfigError(
            "no model given: set model.path (weights), model.base_url (an endpoint) or"
            " model.scripted"
        )
    if targets := separate_targets(config.resolve(model.path)):
        return EngineByTarget(
            config.model_name,
            {target: open_engine(_of_target(config, target)) for target in targets},
        )
    config = with_fetched_model(config)
    path = str(config.model.path)
    check_source(config.resolve(path) if config.resolve(path).exists() else path)
    try:
        if samples_with_vllm(config):
            return vllm_engine(config)
        engine: Engine = importlib.import_module(LOCAL).local_engine(config)
        return engine
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in (
            "torch",
            "transformers",
            "tokenizers",
            "safetensors",
        ):
            raise
        raise MissingExtra(str(error.name), "local") from error


def _of_target(config: Config, target: str) -> Config:
    """The config of a target's model, of a directory with several."""
    path = config.resolve(str(config.model.path)) / target
    update = {"path": str(path), "name": f"{config.model_name}/{target}"}
    return config.model_copy(update={"model": config.model.model_copy(update=update)})


async def ready(engine: Engine) -> None:
    """Wait until an engine's server, if ajet starts one, answers. Raises EngineError."""
    starting = getattr(getattr(engine, "sampler", None), "ready", None)
    if starting is not None:
        await starting()
