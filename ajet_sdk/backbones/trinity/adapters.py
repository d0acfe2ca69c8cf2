"""LoRA adapters at Trinity's engines: their names, files, and the routes that load them.

Trinity gives its engines the adapter of a step by a call of its own; the engines' HTTP server does
not learn of it and answers with the base model alone. Here the server itself loads each adapter by
vLLM's route, under a name with the policy version. So a request says which version answers it, a
running reply keeps its version while a newer one is loaded, and versions share no cached prefixes
(vLLM's cache has the adapter's name in its keys).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.errors import EngineError

if TYPE_CHECKING:
    from trinity.common.config import Config as TrinityConfig
    from trinity.common.models.model import ModelWrapper

ADAPTER = "lora_adapter"
"""Trinity's name for the directory of an adapter."""
_NAME = re.compile(r"ajet-adapter-(\d+)$")
_LOADING = 600.0
"""Seconds for an engine to read an adapter from a shared file system."""


def adapter_name(version: int) -> str:
    """The name by which an engine answers with the adapter after `version` updates."""
    return f"ajet-adapter-{version}"


def adapter_versions(models: Mapping[str, Any]) -> list[int]:
    """The versions of the adapters in an engine's list of models (`/v1/models`), oldest first."""
    versions = []
    for model in models.get("data", []):
        match = _NAME.match(str(model.get("id")))
        if match is not None:
            versions.append(int(match[1]))
    return sorted(versions)


def handed_over(job: Path, version: int) -> Path:
    """Where the trainer of the Trinity job in directory `job` puts an adapter for the engines."""
    return job / "adapters" / f"step_{version}" / ADAPTER


def checkpoint_adapter(job: Path, step: int) -> Path:
    """The adapter in the checkpoint of a step."""
    return job / f"global_step_{step}" / "actor" / ADAPTER


def versions_in_use(config: TrinityConfig) -> int:
    """Adapters that replies of one moment may have: the newest one, and those of calls that started
    up to `max_staleness` updates ago, while the next one is loaded."""
    return int(config.algorithm.sample_strategy_args["max_staleness"]) + 2


async def load_adapter(engine: ModelWrapper, directory: Path, version: int, kept: int) -> list[int]:
    """Load an adapter into an engine, and unload all but the newest `kept` versions. Returns the
    unloaded ones.

    Raises EngineError if the engine refuses it.
    """
    if version not in await _versions(engine):
        body = {"lora_name": adapter_name(version), "lora_path": str(directory)}
        await _post(engine, "load_lora_adapter", body)
    present = await _versions(engine)
    if version not in present:
        raise EngineError(
            f"the engine at {engine.api_address} does not list {adapter_name(version)} after"
            f" loading it from {directory}, so its replies would not be the policy's"
        )
    old = [other for other in present if other <= version - kept]
    for other in old:
        await _post(engine, "unload_lora_adapter", {"lora_name": adapter_name(other)})
    return old


async def _versions(engine: ModelWrapper) -> list[int]:
    import httpx

    async with httpx.AsyncClient(timeout=_LOADING, trust_env=False) as client:
        response = await client.get(f"{engine.api_address}/v1/models", headers=_headers(engine))
    response.raise_for_status()
    return adapter_versions(response.json())


async def _post(engine: ModelWrapper, route: str, body: Mapping[str, str]) -> None:
    """Post to a route of vLLM that answers with a plain text."""
    import httpx

    url = f"{engine.api_address}/v1/{route}"
    async with httpx.AsyncClient(timeout=_LOADING, trust_env=False) as client:
        response = await client.post(url, json=body, headers=_headers(engine))
    if response.is_error:
        raise EngineError(
            f"{url} refused {body['lora_name']} with status {response.status_code}:"
            f" {response.text[:500]}"
        )


def _headers(engine: ModelWrapper) -> dict[str, str]:
    return {"authorization": f"Bearer {engine.api_key}"}
