"""Estimate of a run before it starts: its episodes, and its memory from the model's size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ajet_sdk.engines.local.products import products_of
from ajet_sdk.learn.activations import bytes_of_a_token

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config
    from ajet_sdk.learn.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Estimate:
    """Resources of a run. Its time is not estimated; the first step measures it."""

    memory: int
    """Peak bytes of a training step, without those of the process itself."""
    episodes: int
    longest: tuple[int, int] | None = None
    """Tokens of the longest conversation, and bytes to train on it, if it exceeds a pass."""

    def __str__(self) -> str:
        memory = f"about {self.memory / 2**30:.1f} GiB of memory"
        if self.longest is not None:
            memory += f" ({self.longest[1] / 2**30:.1f} GiB for a conversation of {self.longest[0]:,} tokens)"
        return f"{self.episodes:,} episodes, {memory}; the time is estimated after the first step"


def memory_bytes(trainer: Trainer, tokens: int, *, checkpointing: bool, trained: int | None = None) -> int:
    """Bytes of weights, gradients, AdamW's two moments, master weights, reference, and the activations of `tokens`.

    `trained` is the number of tokens in the loss; None: all. Attention matrices of eager attention are not included.
    """
    model = trainer.model
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    moved = sum(m.numel() for m in trainer.masters)
    copied = sum(m.numel() for m, p in zip(trainer.masters, trainer.parameters, strict=True) if m is not p)
    reference = 0 if trainer.reference is None else weights
    stored, once, logits = bytes_of_a_token(model, checkpointing=checkpointing)
    scored = tokens if trained is None else trained
    return int(weights + 12 * moved + 4 * copied + reference + tokens * (stored + once) + scored * logits)


def estimate(config: Config, trainer: Trainer, *, steps: int, val_episodes: int) -> Estimate:
    """The number of episodes, and the memory of the largest step."""
    rollout = config.rollout
    stored = config.trainer_common.algorithm.stored
    per_step = config.data.train_batch_size * (1 if stored else rollout.num_repeat)
    shape = trainer.model.config.get_text_config()
    longest = min(rollout.max_model_len, getattr(shape, "max_position_embeddings", None) or rollout.max_model_len)
    tokens = min(trainer.micro_batch_tokens, per_step * longest)
    checkpointing = config.model.gradient_checkpointing
    memory, most = (memory_bytes(trainer, n, checkpointing=checkpointing) for n in (tokens, longest))
    model = trainer.model
    if products_of(model) != model.dtype:  # the sampler multiplies by a copy of the weights
        copy = products_of(model).itemsize * model.num_parameters()
        memory, most = memory + copy, most + copy
    if rollout.max_staleness:  # the sampler has its own copy of trained weights
        copy = sum(p.numel() * p.element_size() for p in trainer.parameters)
        memory, most = memory + copy, most + copy
    episodes = steps * per_step * (not stored) + val_episodes
    return Estimate(memory, episodes, (longest, most) if longest > tokens else None)
