"""Opens the model that options name: an endpoint, a local checkpoint or a function in a file."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ajet_sdk.config.api_keys import api_key
from ajet_sdk.config.config import load_config
from ajet_sdk.config.objects import load_object
from ajet_sdk.engines.budget import Price
from ajet_sdk.engines.client import ModelClient
from ajet_sdk.engines.open import open_engine
from ajet_sdk.engines.scripted import InProcess, ScriptedEngine
from ajet_sdk.errors import AjetError, ConfigError, EngineError
from ajet_sdk.protocols import Engine
from ajet_tools.text.model_name import ModelName
from ajet_tools.text.settings import split_settings


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
        if not place:
            place = scripted
            function = "reply"
        file = Path(place)
        content = file.read_bytes() if file.is_file() else place.encode()
        url = f"scripted://{hashlib.blake2b(content, digest_size=8).hexdigest()}"
        engine: Engine = ScriptedEngine(load_object(f"{place}:{function}"))
        transport = _Scripted(engine, file)
        return ModelClient(url, f"scripted:{file.name}:{function}", transport=transport, **how)
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
            where = str(self._file)
            for frame in traceback.extract_tb(error.__traceback__):
                if frame.filename == self._path:
                    where = f"{self._file} line {frame.lineno}"
            raise EngineError(f"{where} raised {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class ModelSpec:
    """A model as an option names it, with the settings of its requests.

    `NAME@URL`, the directory of a checkpoint or `FILE.py:FUNCTION`, and after commas
    `price=IN/OUT` (of a million tokens), `key=VARIABLE` (the environment variable of the API key),
    `concurrency`, `rpm` (requests per minute) and `retries`. `NAME` alone is at a default URL.
    """

    text: str
    option: str
    named: ModelName
    price: Price | None = None
    key: str = "OPENAI_API_KEY"
    requests: Mapping[str, int | float] = field(default_factory=dict)
    """`concurrency`, `per_minute` and `retries`, where they are given."""

    @classmethod
    def parse(cls, text: str, option: str) -> ModelSpec:
        """Raises ConfigError; `option` is for its message."""
        place, settings = split_settings(text, ("price", "key", "concurrency", "rpm", "retries"))
        price = settings.pop("price", None)
        key = settings.pop("key", "OPENAI_API_KEY")
        requests: dict[str, int | float] = {}
        try:
            for name, value in settings.items():
                requests["per_minute" if name == "rpm" else name] = _NUMBERS[name](value)
        except ValueError as error:
            raise ConfigError(f"{option} {text}: {name}={value} is no number") from error
        if any(number < _LEAST.get(name, 0) for name, number in requests.items()):
            raise ConfigError(f"{option} {text}: a setting of the model is too small")
        parsed = Price.parse(price, f"{option} ...,price=IN/OUT") if price is not None else None
        return cls(text, option, ModelName.parse(place), parsed, key, requests)

    @property
    def is_scripted(self) -> bool:
        """Whether a function replies."""
        return self.named.scripted is not None

    def open(self, base_url: str = "", **how: Any) -> ModelClient:
        """Opens the model; `how` are options of `ModelClient`, which its settings replace.

        Raises ConfigError.
        """
        how |= self.requests
        name = self.named.name
        is_local = self.named.base_url is None and Path(name).is_dir()
        if self.is_scripted or is_local:
            return open_endpoint(None, name, scripted=self.named.scripted, **how)
        where = self.named.base_url or base_url
        if not where.startswith(("http://", "https://")):
            raise ConfigError(
                f"{self.option} {self.text}: add its endpoint, {name}@https://HOST/v1; a checkpoint"
                " is named by its directory, a function by FILE.py:NAME"
            )
        return open_endpoint(where, name, api_key(self.key), **how)


_NUMBERS: Mapping[str, type[int] | type[float]] = {
    "concurrency": int,
    "rpm": float,
    "retries": int,
}
_LEAST = {"concurrency": 1, "per_minute": 0.1}
