"""Opens the model that options name: an endpoint, a local checkpoint or a function in a file."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ajet_sdk.config.api_keys import api_key
from ajet_sdk.config.config import load_config
from ajet_sdk.config.objects import load_object
from ajet_sdk.engines.client import ModelClient
from ajet_sdk.engines.open import open_engine
from ajet_sdk.engines.scripted import InProcess, ScriptedEngine
from ajet_sdk.errors import AjetError, ConfigError, EngineError
from ajet_sdk.protocols import Engine


def local_url(checkpoint: Path) -> str:
    """Identifies a checkpoint by the sizes and times of its files, since reading them would take
    too long."""
    files = sorted(file for file in checkpoint.iterdir() if file.is_file())
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return f"local://{hashlib.blake2b(repr(stats).encode(), digest_size=8).hexdigest()}"


def open_endpoint(
    base_url: str | None,
    model: str | None,
    api_key: str | None = None,
    *,
    scripted: str | None = None,
    **how: Any,
) -> ModelClient:
    """Opens a model: the function that `scripted` names, an endpoint, or a local checkpoint.

    Args:
        base_url: an OpenAI-compatible endpoint.
        model: its name there; without an endpoint, the directory of a Hugging Face checkpoint.
        scripted: `replies.py:function`, which takes an `Ask` and returns text; the default function is `reply`.
        how: options of `ModelClient`, such as concurrency, cache and budget.

    Raises ConfigError if no model is named or it cannot be loaded.
    """
    if scripted is not None:
        place, _, function = scripted.rpartition(":")
        place, function = (place, function) if place else (scripted, "reply")
        content = Path(place).read_bytes() if Path(place).is_file() else place.encode()
        base_url = f"scripted://{hashlib.blake2b(content, digest_size=8).hexdigest()}"
        model = f"scripted:{Path(place).name}:{function}"
        engine: Engine = ScriptedEngine(load_object(f"{place}:{function}"))
        return ModelClient(base_url, model, transport=_Scripted(engine, Path(place)), **how)
    if model is not None and Path(model).is_dir() and not base_url:
        checkpoint = Path(model)
        engine = open_engine(load_config(None, [], {"model": {"path": str(checkpoint.resolve())}}))
        return ModelClient(
            local_url(checkpoint), checkpoint.name, transport=InProcess(engine, limited=True), **how
        )
    if not base_url:
        raise ConfigError(
            "no model: pass --base-url URL (or set OPENAI_BASE_URL), or --scripted replies.py"
        )
    if not model:
        raise ConfigError(f"no model named at {base_url}: pass --model NAME (or set OPENAI_MODEL)")
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url must start with http:// or https:// (got {base_url!r})")
    return ModelClient(base_url, model, api_key, **how)


class _Scripted(InProcess):
    """A user's function; its errors are reported with their line. Its tokens are bytes, so no limit
    applies."""

    def __init__(self, engine: Engine, file: Path) -> None:
        super().__init__(engine, limited=False)
        self._file, self._path = file, str(file.resolve())

    async def post(self, route: str, body: Mapping[str, object]) -> dict[str, object]:
        try:
            return await super().post(route, body)
        except (AjetError, OSError):
            raise
        except Exception as error:
            lines = [
                f.lineno
                for f in traceback.extract_tb(error.__traceback__)
                if f.filename == self._path
            ]
            where = f"{self._file} line {lines[-1]}" if lines else str(self._file)
            raise EngineError(f"{where} raised {type(error).__name__}: {error}") from error


def open_named(
    spec: str,
    *,
    option: str,
    base_url: str = "",
    key_env: str | None = None,
    like: ModelClient | None = None,
    **how: Any,
) -> ModelClient:
    """Opens a model by a spec: `NAME@URL`, `NAME` at `base_url`, a checkpoint,
    `scripted:FILE.py:FUNCTION`.

    Args:
        option: the option with the spec, for messages.
        key_env: environment variable of the API key. Default: OPENAI_API_KEY.
        like: client whose concurrency, retries and cache are the defaults.
        how: as in `open_endpoint`.

    Raises ConfigError.
    """
    if like is not None:
        how = {"concurrency": like.concurrency, "retries": like.retries, "cache": like.cache, **how}
    if spec.startswith("scripted:"):
        return open_endpoint(None, None, scripted=spec.removeprefix("scripted:"), **how)
    name, at, url = spec.partition("@http")
    place = f"http{url}" if at else "" if Path(name).is_dir() else base_url
    if not place.startswith(("http://", "https://")) and not Path(name).is_dir():
        raise ConfigError(f"{option} {spec}: add its endpoint: {name}@https://HOST/v1")
    return open_endpoint(place or None, name, api_key(key_env or "OPENAI_API_KEY"), **how)
