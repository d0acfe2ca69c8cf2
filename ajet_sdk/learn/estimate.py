"""What a run will take, as far as it can be known before it starts: its episodes, and memory from the model's size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ajet_sdk.learn.trainer import Trainer

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

__all__ = ["Estimate", "estimate", "memory_bytes"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run will take; its time is not guessed, but measured on the first step, which says how much is left."""

    memory: int
    """Bytes at the peak of a training step, above what the process takes anyway."""
    episodes: int

    def __str__(self) -> str:
        memory = f"about {self.memory / 2**30:.1f} GiB of memory"
        return f"{self.episodes:,} episodes, {memory}; the time is estimated after the first step"


def memory_bytes(trainer: Trainer, tokens: int, *, checkpointing: bool, trained: int | None = None) -> int:
    """Bytes of weights, gradients, AdamW's two moments, master weights, reference, and the activations of `tokens`.

    `trained` is how many of them the loss counts; None: all. What eager attention keeps of pairs of tokens is left out.
    """
    model = trainer.model
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    moved = sum(m.numel() for m in trainer.masters)
    copied = sum(m.numel() for m, p in zip(trainer.masters, trainer.parameters, strict=True) if m is not p)
    adapter = hasattr(model, "disable_adapter")
    reference = weights if trainer.settings.loss.has_reference and not adapter else 0
    shape, size = model.config.get_text_config(), model.dtype.itemsize
    hidden, layers = shape.hidden_size, shape.num_hidden_layers
    inner = getattr(shape, "intermediate_size", None) or 4 * hidden
    layer = size * (10 * hidden + 4 * inner)  # two norms, attention, gate and up with their product
    if adapter and size < 4:
        layer += 4 * (6 * hidden + inner)  # an adapter is of float32, and so is its copy of each input
    kept = layers * hidden * size + layer if checkpointing else layers * layer
    logits = shape.vocab_size * (12 if size == 4 else 16)  # with gradient and log-probabilities, in float32
    scored = tokens if trained is None else trained
    return int(weights + 12 * moved + 4 * copied + reference + tokens * kept + scored * logits)


def estimate(config: Config, trainer: Trainer, *, steps: int, val_episodes: int) -> Estimate:
    """What can be known before the first step: how many episodes there will be, and the memory of the largest step."""
    rollout = config.rollout
    stored = config.trainer_common.algorithm.stored
    per_step = config.data.train_batch_size * (1 if stored else rollout.num_repeat)
    tokens = min(config.trainer_common.micro_batch_tokens, per_step * rollout.max_model_len)
    memory = memory_bytes(trainer, tokens, checkpointing=config.model.gradient_checkpointing)
    if rollout.max_staleness:  # the sampler has trained weights of its own
        memory += sum(p.numel() * p.element_size() for p in trainer.parameters)
    return Estimate(memory, steps * per_step * (not stored) + val_episodes)
