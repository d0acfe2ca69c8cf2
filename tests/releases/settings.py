"""The settings and routes that ajet gives to Trinity-RFT, verl and vLLM, against a release's
source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from ajet_sdk.backbones.trinity.mapping import TrinityPlace, to_trinity
from ajet_sdk.backbones.verl.mapping import VerlPlace, to_verl
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.engines.vllm import token_prompts
from ajet_sdk.engines.vllm.completions import request_body, sampling_parameters
from ajet_sdk.engines.vllm.server import Settings, command
from ajet_sdk.protocols import Sampling
from tests.releases.packages import Definition, Package, fields

_TRINITYS = ("ajet_sdk/backbones/trinity/mapping.py", "trinity.common.config")
_VERLS = ("ajet_sdk/backbones/verl/mapping.py", "verl/trainer/config/_generated_ppo_trainer.yaml")
_OWN = {"ajet", "mixed_precision", "agent_loop_manager_class"}
"""Keys that verl's file leaves out: ours, those of a plug-in, and one of its classes."""
_SERVER = "ajet_sdk/engines/vllm/server.py"
_ROUTES = {
    "ajet_sdk/backbones/trinity/adapters.py": (
        "/v1/models",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    ),
    "ajet_sdk/engines/vllm/sampler.py": (
        "/v1/completions",
        "/pause",
        "/resume",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
    ),
    "ajet_sdk/engines/vllm/token_prompts.py": (f"/{token_prompts.ROUTE}",),
}
_ARGUMENTS = ("EngineArgs", "AsyncEngineArgs", "BaseFrontendArgs", "FrontendArgs")
_NEITHER = {"host", "port", "uds"}
"""Flags that some releases define elsewhere."""


def trinity_settings(package: Package) -> Iterator[tuple[str, str, str]]:
    """Keys of our mapping that Trinity's config doesn't have: our file, the key, what is wrong."""
    ours, module = _TRINITYS
    root = package.find(module, "Config")
    assert root is not None, f"{module} has no Config"
    place = TrinityPlace(
        run_id="run",
        model="org/model",
        steps=2,
        lr=1e-5,
        checkpoints=Path("/store"),
        tasks=Path("/store/tasks"),
        val_tasks=1,
    )
    for lora in (False, True):
        for gpus in (0, 8):
            mapping = to_trinity(_config("trinity", gpus, lora), place)
            for key, why in _unknown_fields(package, root, mapping, ""):
                yield ours, key, why


def _unknown_fields(
    package: Package, owner: Definition, values: Mapping[str, object], path: str
) -> Iterator[tuple[str, str]]:
    known = fields(package, owner)
    for name, value in values.items():
        here = f"{path}{name}"
        if name not in known:
            yield here, f"is no field of {_name(owner)}"
            continue
        below = _dataclass_of(package, owner, known[name].annotation)
        listed = value if isinstance(value, list) else [value]
        for item in listed:
            if below is not None and isinstance(item, Mapping):
                yield from _unknown_fields(package, below, item, f"{here}.")


def _dataclass_of(package: Package, owner: Definition, annotation: ast.expr) -> Definition | None:
    """The config class that an annotation names, such as `Optional[List[LoRAConfig]]`."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name) and node.id.endswith("Config"):
            return package.find(owner.module, node.id)
    return None


def _name(owner: Definition) -> str:
    assert isinstance(owner.node, ast.ClassDef)
    return f"{owner.module}.{owner.node.name}"


def verl_settings(package: Package) -> Iterator[tuple[str, str, str]]:
    """Keys of our mapping that verl's defaults don't have."""
    ours, file = _VERLS
    text = package.read(file)
    if text is None:
        yield ours, file, "is gone"
        return
    place = VerlPlace(
        run_id="run",
        model="org/model",
        steps=2,
        lr=1e-5,
        checkpoints=Path("/store"),
    )
    mapping = to_verl(_config("verl", 8, False), place)
    for key in _unknown_keys(mapping, yaml.safe_load(text), ""):
        yield ours, key, f"is no key of {file}"


def _unknown_keys(
    values: Mapping[str, object], known: Mapping[str, object], path: str
) -> Iterator[str]:
    for name, value in values.items():
        if name in _OWN:
            continue
        below = known.get(name)
        if name not in known:
            yield f"{path}{name}"
        elif isinstance(value, Mapping) and isinstance(below, Mapping) and below:
            yield from _unknown_keys(value, below, f"{path}{name}.")


def vllm_settings(package: Package) -> Iterator[tuple[str, str, str]]:
    """Flags, routes and fields of requests that vLLM's server doesn't have."""
    known: set[str] = set(_NEITHER)
    for name in _ARGUMENTS:
        for folder in ("vllm/engine", "vllm/entrypoints"):
            for owner in package.classes(name, folder):
                known |= set(fields(package, owner))
    for flag in _flags():
        name = flag.removeprefix("--").replace("-", "_")
        if name not in known and name.removeprefix("no_") not in known:
            yield _SERVER, flag, f"is no field of {', '.join(_ARGUMENTS)}"
    texts = [package.read(path) or "" for path in package.files if "/entrypoints/" in path]
    for ours, routes in _ROUTES.items():
        for route in routes:
            if not any(f'"{route}"' in text for text in texts):
                yield ours, route, "is no route in vllm/entrypoints"
    requests = list(package.classes("CompletionRequest", "vllm/entrypoints"))
    body = request_body([1], _parameters())
    for owner in requests:
        for name in sorted(set(body) - set(fields(package, owner))):
            yield "ajet_sdk/engines/vllm/completions.py", name, f"is no field of {_name(owner)}"
    if not requests:
        yield "ajet_sdk/engines/vllm/completions.py", "CompletionRequest", "is gone"


def _flags() -> set[str]:
    """The flags of our server's command, on a CPU and on GPUs, with an adapter and without."""
    flags = set()
    for gpus, lora_rank, token_route in (((), 8, False), ((0,), None, True)):
        settings = Settings(
            model="m",
            tokenizer="m",
            name="m",
            log=Path("log"),
            gpus=gpus,
            lora_rank=lora_rank,
            token_route=token_route,
        )
        words = command(settings, "m", Path("socket"))
        flags |= {word for word in words if word.startswith("--")}
    return flags


def _parameters() -> dict[str, object]:
    return sampling_parameters(
        [1], Sampling(), model="m", max_model_len=8, eos_ids=[0], drawn_from="r"
    )


def _config(backbone: str, gpus: int, lora: bool) -> Config:
    values = {
        "backbone": backbone,
        "model": {"path": "org/model", "lora": {"enabled": lora}},
        "trainer_common": {"n_gpus_per_node": gpus, "optim": {"warmup_steps": 0}},
    }
    return load_config(values=values)
