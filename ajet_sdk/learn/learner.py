"""The learner: one model, what samples from it, and what trains it, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.local import HFTokenizer, LocalSampler, load_model
from ajet_sdk.engines.vllm import VllmSampler, samples_with_vllm, settings_of
from ajet_sdk.errors import ConfigError
from ajet_sdk.learn.probe import Probe
from ajet_sdk.learn.recipe import build_recipe, wants_recipe
from ajet_sdk.learn.served import Served
from ajet_sdk.learn.trainer import Trainer, TrainerSettings, default_lr

if TYPE_CHECKING:
    from ajet_sdk.config import Config

__all__ = ["Learner", "open_learner"]


@dataclass(frozen=True)
class Learner:
    """The model with everything that samples from it and trains it."""

    engine: TokenEngine
    sampler: LocalSampler | VllmSampler
    trainer: Trainer
    tokenizer: HFTokenizer


async def open_learner(config: Config, probe: Probe, steps: int, say: Callable[[str], None]) -> Learner:
    """Load the model, or make it by its recipe, and put a sampler and a trainer around it, for a run of `steps` steps.

    `say` tells how it goes.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if config.model.base_url or config.model.scripted:
        raise ConfigError(
            "the local backbone trains weights: set model.path instead of model.base_url or model.scripted"
        )
    if not config.model.path:
        raise ConfigError("model.path is not set: the local backbone needs a directory or a hub name to train")
    if wants_recipe(config):
        path: Path | str = await build_recipe(config, probe, say)
    else:
        path = config.resolve(config.model.path) if config.resolve(config.model.path).exists() else config.model.path
    vllm = samples_with_vllm(config)
    learner = await asyncio.to_thread(_load, config, path, steps, vllm, say)
    if isinstance(learner.sampler, VllmSampler):
        say(f"vLLM samples: its server starts, which may take a minute; its log: {learner.sampler.settings.log}")
        try:
            await learner.sampler.ready()
        except BaseException:
            await learner.engine.aclose()
            raise
    return learner


def _load(config: Config, path: Path | str, steps: int, vllm: bool, say: Callable[[str], None]) -> Learner:
    import torch

    torch.manual_seed(config.trainer_common.seed)
    source = config.model
    tokenizer = HFTokenizer(str(path))
    model = load_model(
        path, dtype=source.dtype, attn_implementation=source.attn_implementation, device=source.device,
        lora=source.lora if source.lora.enabled else None,
    )  # fmt: skip
    if source.lora.enabled and source.lora.dropout:
        say("model.lora.dropout has no effect: the policy is trained as it was sampled from, without dropout")
    if source.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    parameters = sum(p.numel() for p in model.parameters())
    lr = config.trainer_common.optim.lr
    if lr is None:
        lr = default_lr(parameters, lora=source.lora.enabled)
        say(f"trainer_common.optim.lr is not given: {lr:g}, by the model's {parameters:,} parameters")
    trainer = Trainer(model, TrainerSettings.of(config, lr, steps))
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    max_model_len = min(config.rollout.max_model_len, longest or config.rollout.max_model_len)
    sampler: LocalSampler | VllmSampler
    if vllm:
        sampler = _vllm_sampler(config, path, model, tokenizer, max_model_len)
    else:
        sampler = LocalSampler(
            model,
            tokenizer,
            model_name=config.model_name,
            max_model_len=max_model_len,
            max_batch=config.rollout.max_env_worker,
            seed=config.trainer_common.seed,
            deterministic=config.rollout.deterministic,
            apart=config.rollout.max_staleness > 0,
        )
    engine = TokenEngine(sampler, tokenizer, tool_call_parser=source.tool_call_parser)
    return Learner(engine, sampler, trainer, tokenizer)


def _vllm_sampler(
    config: Config, path: Path | str, model: Any, tokenizer: HFTokenizer, max_model_len: int
) -> VllmSampler:
    """A sampler over a server that begins with the model's weights and gets them anew after each step."""
    served = Served(model, tokenizer.hf)
    settings = settings_of(
        config,
        path,
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=max_model_len,
        lora_rank=served.lora_rank,
        trained=True,
    )
    return VllmSampler(
        settings,
        eos_ids=tokenizer.eos_ids,
        directory=config.directory,
        write=served.write,
        adapter=served.lora_rank is not None,
        written=served.differs,
    )
