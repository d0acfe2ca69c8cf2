"""What a run will take, as far as it can be known before it starts: its episodes, and memory from the model's size.

How many tokens a training pass may have.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config
    from ajet_sdk.learn.trainer import Trainer

__all__ = ["Estimate", "estimate", "memory_bytes", "tokens_of_a_pass"]

_FEWEST, _MOST = 512, 8192
"""Tokens of a pass: fewer lose speed, more gain none."""
_CPU_BYTES = 2 << 30
_SHARE = 0.25
"""Of the device's memory, for what a pass keeps."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run will take; its time is not guessed, but measured on the first step, which says how much is left."""

    memory: int
    """Bytes at the peak of a training step, above what the process takes anyway."""
    episodes: int
    longest: tuple[int, int] | None = None
    """Tokens of the longest conversation, and the bytes that training on it takes, where it exceeds a pass."""

    def __str__(self) -> str:
        memory = f"about {self.memory / 2**30:.1f} GiB of memory"
        if self.longest is not None:
            memory += f" ({self.longest[1] / 2**30:.1f} GiB for a conversation of {self.longest[0]:,} tokens)"
        return f"{self.episodes:,} episodes, {memory}; the time is estimated after the first step"


def tokens_of_a_pass(model: Any, *, checkpointing: bool) -> int:
    """How many tokens a training pass has where the config names no number: what a pass keeps of them takes at most a
    quarter of the device's memory, and on a CPU at most 2 GiB."""
    if model.device.type == "cuda":
        limit = torch.cuda.mem_get_info(model.device)[1] * _SHARE
    else:
        limit = min(_CPU_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _SHARE)
    kept, once, scored = _bytes_of_a_token(model, checkpointing=checkpointing)
    return max(_FEWEST, min(_MOST, int(limit / (kept + once + scored)) // 64 * 64))


def _bytes_of_a_token(model: Any, *, checkpointing: bool) -> tuple[int, int, int]:
    """What a pass keeps of a token in all layers, what it needs once, and what it keeps of a trained token's logits."""
    shape, size = model.config.get_text_config(), model.dtype.itemsize
    hidden, layers = shape.hidden_size, shape.num_hidden_layers
    inner = getattr(shape, "intermediate_size", None) or 4 * hidden
    layer = size * (10 * hidden + 4 * inner)  # two norms, attention, gate and up with their product
    if hasattr(model, "disable_adapter") and size < 4:
        layer += 4 * (6 * hidden + inner)  # an adapter is of float32, and so is its copy of each input
    logits = shape.vocab_size * (12 if size == 4 else 16)  # with gradient and log-probabilities, in float32
    return (layers * hidden * size, layer, logits) if checkpointing else (layers * layer, 0, logits)


def memory_bytes(trainer: Trainer, tokens: int, *, checkpointing: bool, trained: int | None = None) -> int:
    """Bytes of weights, gradients, AdamW's two moments, master weights, reference, and the activations of `tokens`.

    `trained` is how many of them the loss counts; None: all. What eager attention keeps of pairs of tokens is left out.
    """
    model = trainer.model
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    moved = sum(m.numel() for m in trainer.masters)
    copied = sum(m.numel() for m, p in zip(trainer.masters, trainer.parameters, strict=True) if m is not p)
    reference = weights if trainer.settings.loss.has_reference and not hasattr(model, "disable_adapter") else 0
    kept, once, logits = _bytes_of_a_token(model, checkpointing=checkpointing)
    scored = tokens if trained is None else trained
    return int(weights + 12 * moved + 4 * copied + reference + tokens * (kept + once) + scored * logits)


def estimate(config: Config, trainer: Trainer, *, steps: int, val_episodes: int) -> Estimate:
    """What can be known before the first step: how many episodes there will be, and the memory of the largest step."""
    rollout = config.rollout
    stored = config.trainer_common.algorithm.stored
    per_step = config.data.train_batch_size * (1 if stored else rollout.num_repeat)
    shape = trainer.model.config.get_text_config()
    longest = min(rollout.max_model_len, getattr(shape, "max_position_embeddings", None) or rollout.max_model_len)
    tokens = min(trainer.micro_batch_tokens, per_step * longest)
    checkpointing = config.model.gradient_checkpointing
    memory, most = (memory_bytes(trainer, n, checkpointing=checkpointing) for n in (tokens, longest))
    if rollout.max_staleness:  # the sampler has trained weights of its own
        copy = sum(p.numel() * p.element_size() for p in trainer.parameters)
        memory, most = memory + copy, most + copy
    episodes = steps * per_step * (not stored) + val_episodes
    return Estimate(memory, episodes, (longest, most) if longest > tokens else None)
