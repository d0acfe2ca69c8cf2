"""Trainer time: merged timelines against one sample per call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from ajet_sdk.engines.local.loading import add_adapter
from ajet_sdk.engines.local.sampler import LocalSampler
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.protocols import Sampling
from ajet_sdk.types import Sample, Span, Timeline
from tests.bench import Figure

SAMPLES, LENGTH, TRAINED = 128, 108, 40
EPISODES, TURNS, FIRST, OBSERVATION, REPLY = 8, 20, 60, 30, 12


def main() -> list[Figure]:
    torch.set_num_threads(1)
    return [merged_against_calls(), *unrelated_samples(), update(), lora_sampling()]


def model(hidden: int = 64, layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=400,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.05,
    )
    return Qwen3ForCausalLM(config)


def sample(ids: np.ndarray[Any, Any], spans: Sequence[tuple[int, int]]) -> Sample:
    mask = np.zeros(len(ids), dtype=bool)
    for start, end in spans:
        mask[start:end] = True
    line = Timeline(
        agent="default",
        token_ids=ids,
        loss_mask=mask,
        logprobs=np.where(mask, -5.0, 0.0).astype(np.float32),
        call_ids=tuple(f"c{start}" for start, _ in spans),
        spans=tuple(Span(call_id=f"c{start}", start=start, end=end) for start, end in spans),
    )
    advantages = np.where(mask, 0.5, 0.0).astype(np.float32)
    return Sample(timeline=line, episode_id="e", group_id="g", reward=1.0, advantages=advantages)


def conversations() -> tuple[list[Sample], list[Sample]]:
    """Episodes of many turns: each as one timeline, and as one sample per call with the whole
    history before it."""
    draw = np.random.default_rng(0)
    merged, calls = [], []
    for _ in range(EPISODES):
        spans, at = [], FIRST
        for _ in range(TURNS):
            spans.append((at, at + REPLY))
            at += REPLY + OBSERVATION
        ids = draw.integers(0, 400, spans[-1][1]).astype(np.int32)
        merged.append(sample(ids, spans))
        calls += [sample(ids[:end], [(start, end)]) for start, end in spans]
    return merged, calls


def cpu_seconds(work: Callable[[], object], rounds: int = 3) -> float:
    """The least of some rounds: a busy machine only ever adds."""
    work()
    taken = []
    for _ in range(rounds):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return min(taken)


def merged_against_calls() -> Figure:
    merged, calls = conversations()
    trainer = Trainer(model(), TrainerSettings(lr=1e-4))
    ratio = cpu_seconds(lambda: trainer.step(calls), 1) / cpu_seconds(lambda: trainer.step(merged))
    return Figure(
        f"merged against one sample per call, {TURNS} turns",
        ratio,
        "× less",  # no goal: samples with a common beginning are computed once as well
    )


def unrelated_samples() -> list[Figure]:
    """A step on samples that have no more in common than some first tokens."""
    draw = np.random.default_rng(0)
    ids = draw.integers(0, 400, (SAMPLES, LENGTH)).astype(np.int32)
    samples = [sample(row, [(LENGTH - TRAINED, LENGTH)]) for row in ids]
    figures = []
    for name, budget in (("", None), (", in one pass", 10**6)):
        trainer = Trainer(model(), TrainerSettings(lr=1e-4, micro_batch_tokens=budget))
        seconds = cpu_seconds(partial(trainer.step, samples), 5)
        figures.append(
            Figure(
                f"step on {SAMPLES} unrelated samples of {LENGTH} tokens{name}",
                seconds,
                "processor s",
            )
        )
    return figures


def update() -> Figure:
    """An optimizer update of all weights, without the passes."""
    large = model(hidden=512, layers=8)
    trainer = Trainer(large, TrainerSettings(lr=1e-4))
    for parameter in trainer.parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    millions = sum(parameter.numel() for parameter in trainer.parameters) / 1e6
    return Figure(
        f"AdamW on {millions:.0f}M parameters",
        cpu_seconds(trainer.optimizer.step, 5),
        "processor s",
    )


def lora_sampling() -> Figure:
    """Sampled tokens with an adapter on a model of more than 20M parameters."""
    adapted = add_adapter(model(hidden=512, layers=8), 16, 32, "all-linear").eval()
    tokenizer = SimpleNamespace(
        eos_ids=frozenset[int](),
        is_special=lambda _: False,
        token_bytes=lambda _: b"x",
        pictures=None,
    )
    sampler = LocalSampler(adapted, cast("Any", tokenizer), model_name="m", max_model_len=512)
    prompt, replies, length = list(range(64)), 8, 64

    async def sample_all() -> None:
        await sampler.sample(prompt, Sampling(max_tokens=length, n=replies, ignore_eos=True), "one")

    async def measure() -> float:
        try:
            await sample_all()
            started = time.process_time()
            await sample_all()
            return time.process_time() - started
        finally:
            await sampler.aclose()

    seconds = asyncio.run(measure())
    return Figure(
        "tokens sampled with LoRA on 24M parameters", replies * length / seconds, "per processor s"
    )
