"""Estimates a run before it starts: its episodes and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ajet_sdk.engines.local.products import inner_model, products_of
from ajet_sdk.engines.local.sampler import kv_budget
from ajet_sdk.learn.batches import bytes_of_a_token
from ajet_sdk.memory import resident_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ajet_sdk.config.config import Config
    from ajet_sdk.learn.trainer import Trainer

_GAPS = 1.15
"""Overhead of the allocator, measured with glibc in runs of a 135M model."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Resources of a run, without its time, which the first step measures."""

    memory: int
    """Peak bytes of sampling and training; on a CPU including those of the process."""
    episodes: int
    longest: tuple[int, int] | None = None
    """Tokens of the longest conversation, and bytes to train on it, if it exceeds a pass."""

    def __str__(self) -> str:
        memory = f"about {self.memory / 2**30:.1f} GiB of memory"
        if self.longest is not None:
            memory += (
                f" ({self.longest[1] / 2**30:.1f} GiB for a conversation of {self.longest[0]:,}"
                " tokens)"
            )
        return f"{self.episodes:,} episodes, {memory}; the time is estimated after the first step"


def state_bytes(trainer: Trainer) -> int:
    """Bytes of weights, reference, gradients, AdamW's two moments and master weights."""
    moved = sum(int(m.numel()) for m in trainer.masters)
    copied = sum(
        int(m.numel())
        for m, p in zip(trainer.masters, trainer.parameters, strict=True)
        if m is not p
    )
    return _loaded_bytes(trainer) + 12 * moved + 4 * copied


def _loaded_bytes(trainer: Trainer) -> int:
    weights = [*trainer.model.parameters()]
    if trainer.reference is not None:
        weights += trainer.parameters  # the reference shares the others
    return sum(int(p.numel() * p.element_size()) for p in weights)


def activation_bytes(
    model: PreTrainedModel, tokens: int, *, checkpointing: bool, trained: int | None = None
) -> int:
    """Bytes of the activations of `tokens`, `trained` of which are in the loss (None: all).

    Attention matrices of eager attention are not included.
    """
    stored, once, logits = bytes_of_a_token(model, checkpointing=checkpointing)
    return tokens * (stored + once) + (tokens if trained is None else trained) * logits


def sampler_bytes(
    model: PreTrainedModel, rows: int, tokens: int, kv_limit: int | None = None
) -> int:
    """Bytes of the local sampler: keys and values of `rows` conversations of `tokens`, at most
    `kv_limit` (None: what the model's device allows), and its copy of the weights if it merges an
    adapter or has products of another type."""
    shape = model.config.get_text_config()
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    cached = rows * tokens * 2 * shape.num_hidden_layers * heads * size * model.dtype.itemsize
    products = products_of(model)
    # An adapter is merged into a copy of float32 weights; in 16 bits its changes would be lost.
    is_merged = hasattr(model, "disable_adapter") and model.dtype == torch.float32
    weights = 0
    if is_merged or products != model.dtype:
        weights = inner_model(model).num_parameters(exclude_embeddings=True) * products.itemsize
    if kv_limit is None:
        kv_limit = kv_budget(model.device)
    return int(min(cached, kv_limit) + weights)


def longest_conversation(config: Config, model: PreTrainedModel) -> int:
    """Tokens of the longest conversation: of the config, or the positions of the model."""
    shape = model.config.get_text_config()
    longest = config.rollout.max_model_len
    return min(longest, getattr(shape, "max_position_embeddings", None) or longest)


def memory_parts(
    config: Config,
    trainer: Trainer,
    *,
    tokens: int,
    rows: int,
    longest: int,
    sampled: bool = True,
    kv_limit: int | None = None,
) -> dict[str, float]:
    """Bytes of what stays, of sampling `rows` conversations at once, and of a training pass over
    `tokens`. Without `rollout.max_staleness` sampling and training take turns, and only the larger
    one is there."""
    model = trainer.model
    apart = config.rollout.max_staleness > 0
    state = state_bytes(trainer)
    if apart:  # the sampler has its own copy of trained weights
        state += sum(p.numel() * p.element_size() for p in trainer.parameters)
    sampling = sampler_bytes(model, rows, longest, kv_limit) if sampled else 0
    training = activation_bytes(model, tokens, checkpointing=config.model.gradient_checkpointing)
    parts = {"weights and optimizer": float(state)}
    if apart or sampling >= training:
        parts["sampling"] = _GAPS * sampling
    if apart or training > sampling:
        parts["training"] = _GAPS * training
    return parts


def conversations_at_once(config: Config, val_episodes: int = 0) -> int:
    """Conversations that the sampler holds at once."""
    rollout = config.rollout
    at_once = episodes_of_step(config) * (rollout.max_staleness - rollout.carry_over + 1)
    return min(rollout.max_env_worker, max(at_once, val_episodes))


def episodes_of_step(config: Config) -> int:
    """Episodes, or stored conversations, of a training step."""
    if config.trainer_common.algorithm.stored:
        return config.data.train_batch_size
    return config.data.train_batch_size * config.rollout.num_repeat


def estimate(
    config: Config, trainer: Trainer, *, steps: int, val_episodes: int, sampled: bool = True
) -> Estimate:
    """Estimate episodes and peak memory; with `sampled` false another process samples."""
    per_step = episodes_of_step(config)
    longest = longest_conversation(config, trainer.model)
    tokens = min(trainer.micro_batch_tokens, per_step * longest)
    process = 0
    if trainer.model.device.type == "cpu":
        process = max(resident_bytes() - _loaded_bytes(trainer), 0)
    rows = conversations_at_once(config, val_episodes)

    def peak(tokens: int) -> int:
        parts = memory_parts(
            config, trainer, tokens=tokens, rows=rows, longest=longest, sampled=sampled
        )
        return int(process + sum(parts.values()))

    episodes = val_episodes
    if not config.trainer_common.algorithm.stored:
        episodes += steps * per_step
    return Estimate(peak(tokens), episodes, (longest, peak(longest)) if longest > tokens else None)
