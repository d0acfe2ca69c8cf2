"""Estimates a run before it starts: its episodes and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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


def sampler_bytes(model: PreTrainedModel, rows: int, tokens: int) -> int:
    """Bytes of the local sampler: keys and values of `rows` conversations of `tokens`, and its copy
    of the weights if the model has an adapter (merged) or products of another type."""
    shape = model.config.get_text_config()
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    cached = rows * tokens * 2 * shape.num_hidden_layers * heads * size * model.dtype.itemsize
    products = products_of(model)
    copied = products != model.dtype or hasattr(model, "disable_adapter")
    weights = (
        inner_model(model).num_parameters(exclude_embeddings=True) * products.itemsize * copied
    )
    return int(min(cached, kv_budget(model.device)) + weights)


def estimate(
    config: Config, trainer: Trainer, *, steps: int, val_episodes: int, sampled: bool = True
) -> Estimate:
    """Estimate episodes and peak memory; with `sampled` false another process samples."""
    rollout = config.rollout
    stored = config.trainer_common.algorithm.stored
    per_step = config.data.train_batch_size * (1 if stored else rollout.num_repeat)
    shape = trainer.model.config.get_text_config()
    longest = min(
        rollout.max_model_len,
        getattr(shape, "max_position_embeddings", None) or rollout.max_model_len,
    )
    tokens = min(trainer.micro_batch_tokens, per_step * longest)
    model = trainer.model
    apart = rollout.max_staleness > 0
    state = state_bytes(trainer)
    if model.device.type == "cpu":
        state += max(resident_bytes() - _loaded_bytes(trainer), 0)
    if apart:  # the sampler has its own copy of trained weights
        state += sum(p.numel() * p.element_size() for p in trainer.parameters)
    at_once = per_step * (rollout.max_staleness - rollout.carry_over + 1)
    rows = min(rollout.max_env_worker, max(at_once, val_episodes))
    sampler = sampler_bytes(model, rows, longest) if sampled else 0

    def peak(tokens: int) -> int:
        trained = activation_bytes(model, tokens, checkpointing=config.model.gradient_checkpointing)
        return int(state + _GAPS * (sampler + trained if apart else max(sampler, trained)))

    episodes = steps * per_step * (not stored) + val_episodes
    return Estimate(peak(tokens), episodes, (longest, peak(longest)) if longest > tokens else None)
