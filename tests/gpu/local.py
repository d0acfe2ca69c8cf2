"""The `local` engine and learner: each type of weights, full and LoRA, each attention; merged and
unmerged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ajet_sdk.config.config import Config, load_config
from ajet_sdk.engines.local.forward import distance
from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.learn import checkpoint
from ajet_sdk.learn.estimate import activation_bytes, state_bytes
from ajet_sdk.learn.learner import Learner, open_learner
from ajet_sdk.protocols import Sampled, Sampling
from ajet_sdk.types import Sample, Span, Timeline
from tests.bench.training import conversations
from tests.gpu import Figure, Setting, Skipped
from tests.gpu.machine import clock, free, matmul_rate, peak_memory, peak_rate
from tests.gpu.made_model import operations, save

_FULL_3B = 60_000_000_000
"""Bytes that full weights of a model of 3B take with their gradients and AdamW's states."""
_LARGEST_GAP = {"float32": 1e-4, "bfloat16": 0.05}
"""Mean difference of a token's log-probability between sampler and trainer that is taken for
rounding."""


def model_of(setting: Setting, size: str = "0.5B") -> Path:
    """The directory of a model of this size, made at its first use."""
    place = setting.folder / f"qwen-{size}"
    if not place.exists():
        save(place, "tiny" if setting.dry else size, setting.device)
        free(setting.device)
    return place


def config_of(
    setting: Setting, dtype: str, lora: bool, attention: str, sampler: str, size: str = "0.5B"
) -> Config:
    return load_config(
        values={
            "experiment_dir": str(setting.folder / "experiment"),
            "model": {
                "path": str(model_of(setting, size)),
                "dtype": dtype,
                "device": setting.device.type,
                "attn_implementation": attention,
                "lora": {"enabled": lora},
            },
            "rollout": {
                "name": sampler,
                "max_env_worker": 4 if setting.dry else 64,
                "max_model_len": 1024,
            },
            "trainer_common": {
                "micro_batch_tokens": 64 if setting.dry else 4096,
                "use_kl_loss": False,
                "optim": {"warmup_steps": 0},
            },
        }
    )


def local(setting: Setting) -> Iterator[Figure]:
    """Each type of weights, full and LoRA, on the model of 0.5B."""
    for dtype in ("bfloat16", "float32"):
        for lora in (False, True):
            yield from case(setting, dtype, lora, "sdpa")


def eager(setting: Setting) -> Iterator[Figure]:
    """The same with eager attention, whose kernels are others."""
    for dtype in ("bfloat16", "float32"):
        for lora in (False, True):
            yield from case(setting, dtype, lora, "eager")


def large(setting: Setting) -> Iterator[Figure]:
    """LoRA and full weights of a model of 3B, where it fits into the device's memory."""
    yield from case(setting, "bfloat16", True, "sdpa", size="3B")
    if setting.device.type == "cuda":
        memory = torch.cuda.get_device_properties(setting.device).total_memory
        if memory < _FULL_3B:
            yield Figure("3B full", "needs, GB", _FULL_3B / 1e9)
            return
    yield from case(setting, "bfloat16", False, "sdpa", size="3B")


def flash_attention(setting: Setting) -> Iterator[Figure]:
    """The same with flash attention in the trainer."""
    if find_spec("flash_attn") is None:
        raise Skipped("flash-attn is not installed")
    if setting.device.type != "cuda":
        raise Skipped("flash-attn takes a GPU")
    for lora in (False, True):
        yield from case(setting, "bfloat16", lora, "flash_attention_2")


def case(
    setting: Setting,
    dtype: str,
    lora: bool,
    attention: str,
    sampler: str = "transformers",
    size: str = "0.5B",
) -> list[Figure]:
    """One learner: sampled from, trained, sampled from again."""
    config = config_of(setting, dtype, lora, attention, sampler, size)
    name = f"{size} {dtype} {'LoRA' if lora else 'full'} {attention}"
    try:
        return asyncio.run(learn_and_sample(setting, config, name))
    finally:
        free(setting.device)


async def learn_and_sample(setting: Setting, config: Config, name: str) -> list[Figure]:
    learner = await open_learner(config, None, 100, lambda _: None)  # type: ignore[arg-type]  # no recipe, no probe
    try:
        return [f async for f in _figures(setting, config, learner, name)]
    finally:
        await learner.engine.aclose()


async def _figures(setting: Setting, config: Config, learner: Learner, case: str) -> Any:
    trainer, device, dtype = learner.trainer, setting.device, learner.trainer.model.dtype
    rows, prompt, reply = (4, 16, 8) if setting.dry else (64, 128, 128)
    prompts = _prompts(trainer.model, rows, prompt)
    await _replies(learner, prompts[:2], 4)  # the first use loads kernels
    begin = clock(device)
    replies = await _replies(learner, prompts, reply)
    seconds = clock(device) - begin
    count = sum(len(r.output_ids) for r in replies)
    yield Figure(case, "sampled tokens/s", count / seconds)
    inner = getattr(getattr(learner.sampler, "_batch", None), "_forward", None)
    yield Figure(
        case,
        "pass",
        type(inner).__name__.removesuffix("Forward") if inner else type(learner.sampler).__name__,
    )
    samples = _samples(prompts, replies)
    async with learner.sampler.exclusive():
        first = await asyncio.to_thread(trainer.step, samples)
        learner.sampler.policy_version = trainer.updates
    bound = _LARGEST_GAP[config.model.dtype]
    yield Figure(
        case, "gap", first["logprob_gap_mean"], f"≤ {bound:g}", first["logprob_gap_mean"] <= bound
    )
    yield Figure(case, "gap max", first["logprob_gap_max"])

    # Once more with the weights that the sampler got after the update.
    samples = _samples(prompts, await _replies(learner, prompts, reply))
    held = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    held += sum(8 * m.numel() for m in trainer.masters)
    held += sum(
        4 * m.numel()
        for m, p in zip(trainer.masters, trainer.parameters, strict=True)
        if m is not p
    )
    async with learner.sampler.exclusive():
        begin = clock(device)
        second = await asyncio.to_thread(trainer.step, samples)
        seconds = clock(device) - begin
        peak = peak_memory(device, lambda: trainer.step(samples))
        learner.sampler.policy_version = trainer.updates
    yield Figure(
        case,
        "gap after",
        second["logprob_gap_mean"],
        f"≤ {bound:g}",
        second["logprob_gap_mean"] <= bound,
    )
    yield Figure(
        case, "trained tokens/s", sum(len(s.timeline.token_ids) for s in samples) / seconds
    )
    rate = operations(trainer.model, samples, frozen=config.model.lora.enabled) / seconds
    best = matmul_rate(device, dtype, 128 if setting.dry else 8192)
    promised = (
        peak_rate(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
    )
    yield Figure(case, "share of matmul", rate / best)
    yield Figure(case, "share of peak", rate / promised if promised else "not known")
    share = reply / (prompt + reply)
    tokens = min(trainer.micro_batch_tokens, rows * (prompt + reply))
    guess = state_bytes(trainer) + activation_bytes(
        trainer.model, tokens, checkpointing=False, trained=int(tokens * share)
    )
    yield Figure(case, "estimated, MiB", guess / 2**20)
    near = None if setting.dry else 0.6 < guess / (held + peak) < 1.6
    yield Figure(case, "measured, MiB", (held + peak) / 2**20, "within 0.6 to 1.6", near)
    if config.model.lora.enabled:
        yield Figure(
            case, "merged, off by", await asyncio.to_thread(_exported, setting, learner, config)
        )


def _prompts(model: Any, rows: int, length: int) -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, model.config.vocab_size, length).tolist() for _ in range(rows)]


async def _replies(learner: Learner, prompts: Sequence[list[int]], tokens: int) -> list[Sampled]:
    how = Sampling(max_tokens=tokens, temperature=1.0)
    calls = [
        learner.sampler.sample(prompt, how, f"session {i}") for i, prompt in enumerate(prompts)
    ]
    return [reply for [reply] in await asyncio.gather(*calls)]


def _samples(prompts: Sequence[list[int]], replies: Sequence[Sampled]) -> list[Sample]:
    """Each reply as a sample, praised and blamed in turn."""
    samples = []
    for i, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        ids, name = np.array([*prompt, *reply.output_ids], np.int32), f"c{i}"
        mask = np.arange(len(ids)) >= len(prompt)
        line = Timeline(
            agent="default",
            token_ids=ids,
            loss_mask=mask,
            logprobs=np.concatenate([np.zeros(len(prompt)), reply.logprobs]),
            call_ids=(name,),
            spans=(Span(call_id=name, start=len(prompt), end=len(ids)),),
        )
        advantages = np.where(mask, 1.0 if i % 2 else -1.0, 0.0).astype(np.float32)
        samples.append(
            Sample(timeline=line, episode_id=name, group_id="g", reward=0.0, advantages=advantages)
        )
    return samples


def _exported(setting: Setting, learner: Learner, config: Config) -> float:
    """How far the logits of the exported model, its adapter merged, are from those of the model
    with the adapter."""
    place = checkpoint.export(
        setting.folder / "exported", learner.trainer.model, learner.tokenizer.hf
    )
    merged = load_model(place, dtype=config.model.dtype, device=config.model.device)
    ids = torch.tensor(_prompts(merged, 4, 16), device=setting.device)
    with torch.inference_mode():
        return distance(merged(input_ids=ids).logits, learner.trainer.model(input_ids=ids).logits)


def merged(setting: Setting) -> Iterator[Figure]:
    """Time of training on merged timelines against one sample for each call, twenty turns."""
    config = config_of(setting, "bfloat16", False, "sdpa", "transformers")
    whole, calls = (part[: 1 if setting.dry else 1000] for part in conversations())
    calls = calls[: 20 if setting.dry else 1000]

    async def steps() -> tuple[float, float]:
        learner = await open_learner(config, None, 100, lambda _: None)  # type: ignore[arg-type]  # no recipe, no probe
        try:
            async with learner.sampler.exclusive():
                learner.trainer.step(whole)
                return _seconds(setting, learner, whole), _seconds(setting, learner, calls)
        finally:
            await learner.engine.aclose()

    together, apart = asyncio.run(steps())
    free(setting.device)
    yield Figure("20 turns", "merged, s", together)
    yield Figure("20 turns", "one sample a call, s", apart)
    yield Figure(
        "20 turns",
        "times less",
        apart / together,
        "≥ 4",
        None if setting.dry else apart / together >= 4,
    )


def _seconds(setting: Setting, learner: Learner, samples: list[Sample]) -> float:
    begin = clock(setting.device)
    learner.trainer.step(samples)
    return clock(setting.device) - begin
