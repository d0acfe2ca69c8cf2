"""What answers requests: `scripted`, `remote`, `local` and `vllm`. Each loads only what it needs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ajet_sdk.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from ajet_sdk.config import Config
    from ajet_sdk.protocols import Engine

__all__ = ["check_source", "open_engine", "ready"]

_HUB_SECONDS = 10.0


def open_engine(config: Config) -> Engine:
    """The engine that `config.model` names: a URL, a script, or weights. Raises ConfigError where it names none."""
    model = config.model
    if model.scripted:
        from ajet_sdk.config import load_object
        from ajet_sdk.engines.scripted import ScriptedEngine

        replies = load_object(model.scripted, relative_to=config.source.parent if config.source else None)
        if hasattr(replies, "answer"):
            return replies  # type: ignore[no-any-return]
        return ScriptedEngine(
            replies,
            model=model.name or "scripted",
            max_model_len=config.rollout.max_model_len,
            tool_call_parser=model.tool_call_parser,
        )
    if model.base_url:
        from ajet_sdk.engines.remote import RemoteEngine

        key, name = os.environ.get(model.api_key_env, ""), model.name or model.path
        if not name:
            raise ConfigError(
                f"model.base_url is {model.base_url}, but model.name (--model) does not say which model to ask for"
            )
        return RemoteEngine(model.base_url, key or "none", str(name))
    if not model.path:
        raise ConfigError("no model is named: set model.path (weights), model.base_url (an endpoint) or model.scripted")
    check_source(config.resolve(model.path) if config.resolve(model.path).exists() else model.path)
    try:
        from ajet_sdk.engines.vllm import samples_with_vllm, vllm_engine

        if samples_with_vllm(config):
            return vllm_engine(config)
        from ajet_sdk.engines.local import local_engine

        return local_engine(config)  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "transformers", "tokenizers", "safetensors"):
            raise
        raise MissingExtra(str(error.name), "local") from error


def check_source(path: str | Path) -> None:
    """Raise ConfigError where a model's path is no directory here and no name that the hub or its cache has.

    The hub is asked once, for ten seconds at most: transformers asks it six times, and a mistyped path takes a minute.
    """
    name = str(path)
    if Path(path).is_dir():
        return
    if Path(path).exists():
        raise ConfigError(f"model.path: {name} is a file; give the directory of a checkpoint")
    try:
        from huggingface_hub import HfApi, try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ModuleNotFoundError as error:
        raise MissingExtra("transformers", "local") from error
    what = f"model.path: there is no directory {name} here"
    hint = "a model behind an endpoint is named with its address (model.base_url, --base-url)"
    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
    except HFValidationError:
        raise ConfigError(f"{what}; {hint}") from None
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise ConfigError(f"{what}, and a model of the Hugging Face hub is named owner/name; {hint}")
    try:
        HfApi().model_info(name, timeout=_HUB_SECONDS)
    except Exception as error:  # which ones depends on the HTTP client that the hub's library has
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{what}, and the Hugging Face hub does not give it: {cause}; {hint}") from error


async def ready(engine: Engine) -> None:
    """Wait until an engine answers that ajet has to start first; all others do at once. Raises EngineError."""
    starting = getattr(getattr(engine, "sampler", None), "ready", None)
    if starting is not None:
        await starting()
