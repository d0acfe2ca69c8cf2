"""vLLM as the sampler of `local` and `debug`: a server process with exact ids and changing weights."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.vllm.sampler import VllmSampler
from ajet_sdk.engines.vllm.server import Settings
from ajet_sdk.errors import ConfigError
from ajet_sdk.tokens.huggingface import HFTokenizer

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

ALONE, SHARED = 0.85, 0.5
"""Share of a GPU's memory without and with a trainer on it."""


def samples_with_vllm(config: Config) -> bool:
    """Whether `rollout.name` means vLLM here. Raises ConfigError if it is required and not installed."""
    engine = config.rollout.name
    if engine == "transformers":
        return False
    installed = find_spec("vllm") is not None
    if engine == "vllm":
        if not installed:
            raise ConfigError(
                "rollout.name is vllm, but vLLM is not installed: run `ajet install vllm`, or set rollout.name: "
                "transformers"
            )
        return True
    if not installed or config.model.device == "cpu":
        return False
    import torch

    return bool(torch.cuda.is_available())


def gpus_for(wanted: int, count: int, trainer: int | None) -> tuple[int, ...]:
    """The GPUs of a server that wants so many of `count`: others than the trainer's where there are enough.

    Empty without a GPU. Raises ConfigError where there are not enough at all.
    """
    if not count:
        return ()
    if wanted > count:
        raise ConfigError(f"rollout.tensor_parallel_size is {wanted}, but there are {count} GPUs")
    free = [i for i in range(count) if i != trainer]
    return tuple(free[:wanted]) if len(free) >= wanted else tuple(range(wanted))


def settings_of(
    config: Config, model: str | Path, *, dtype: str, max_model_len: int, lora_rank: int | None, trained: bool
) -> Settings:
    """The settings of a server for this run. `trained`: its weights change, and a trainer runs beside it."""
    import torch

    rollout, debugging = config.rollout, config.backbone == "debug"
    count = torch.cuda.device_count()
    parallel = rollout.tensor_parallel_size
    if debugging:
        parallel = max(1, min(config.debug.debug_tensor_parallel_size, count))
    trainer = (torch.device(config.model.device).index or 0) if trained and config.model.device != "auto" else 0
    gpus = gpus_for(parallel, count, trainer if trained else None)
    share = rollout.gpu_memory_utilization or (SHARED if trained and trainer in gpus else ALONE)
    path = Path(model)
    return Settings(
        model=_base(path),
        tokenizer=str(path.resolve()) if path.exists() else str(model),
        name=config.model_name,
        log=config.directory / "logs" / "vllm.log",
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=_at_once(config),
        seed=config.trainer_common.seed,
        tensor_parallel_size=parallel,
        memory_share=share,
        gpus=gpus,
        prefix_cache=not rollout.deterministic,
        lora_rank=lora_rank,
        changing=trained,
        port=config.debug.debug_vllm_port if debugging else None,
    )


def _at_once(config: Config) -> int:
    rollout = config.rollout
    if rollout.deterministic:
        return 1
    return rollout.max_num_seqs if config.is_set("rollout.max_num_seqs") else rollout.max_env_worker


def _base(path: Path) -> str:
    """The base model, if `path` is a LoRA adapter."""
    adapter = path / "adapter_config.json"
    if adapter.is_file():
        return str(json.loads(adapter.read_text())["base_model_name_or_path"])
    return str(path.resolve()) if path.exists() else str(path)


def vllm_engine(config: Config) -> TokenEngine:
    """An engine over a server of the model of `config.model`, for sampling only.

    The server starts while this returns; `engines.ready` waits for it.
    """
    from transformers import AutoConfig

    spec = config.model
    if spec.path is None:
        raise ConfigError("model.path is not set: vLLM needs a local directory or a Hugging Face name")
    local = config.resolve(spec.path)
    path = str(local) if local.exists() else spec.path
    tokenizer = HFTokenizer(path)
    try:
        shape = AutoConfig.from_pretrained(_base(Path(path)), trust_remote_code=False).get_text_config()
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path} cannot be loaded: {error}") from error
    longest = getattr(shape, "max_position_embeddings", None) or config.rollout.max_model_len
    adapter = Path(path) / "adapter_config.json"
    settings = settings_of(
        config,
        path,
        dtype=spec.dtype,
        max_model_len=min(config.rollout.max_model_len, longest),
        lora_rank=json.loads(adapter.read_text())["r"] if adapter.is_file() else None,
        trained=False,
    )
    sampler = VllmSampler(
        settings,
        eos_ids=tokenizer.eos_ids,
        directory=config.directory,
        adapter=adapter.is_file(),
        first=Path(path).resolve() if adapter.is_file() else None,
        policy_version=None,
    )
    return TokenEngine(sampler, tokenizer, tool_call_parser=spec.tool_call_parser)
