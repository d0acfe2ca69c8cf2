"""Trainer time: merged timelines against one sample per call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.types import Sample, Span, Timeline
from tests.bench import Figure

EPISODES, TURNS, FIRST, OBSERVATION, REPLY = 8, 20, 60, 30, 12


def main() -> list[Figure]:
    torch.set_num_threads(1)
    return [merged_against_calls()]


def model(hidden: int = 64, layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=400, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=hidden // 4, max_position_embeddings=4096,
        tie_word_embeddings=True, initializer_range=0.05,
    )  # fmt: skip
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
    """Episodes of many turns: each as one timeline, and as one sample per call with the whole history before it."""
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
    return Figure(f"merged against one sample per call, {TURNS} turns", ratio, "× less", "at least 8", ratio >= 8)
