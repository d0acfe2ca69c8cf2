"""What a run will take, before it starts: memory from the model's size, time from a short trial of this machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ajet_sdk.learn.loss import collate, score
from ajet_sdk.learn.trainer import Trainer, policy_pass
from ajet_sdk.types import Sample, Span, Timeline

if TYPE_CHECKING:
    from ajet_sdk.config import Config

__all__ = ["Estimate", "estimate", "memory_bytes"]

_CALL_SECONDS = 0.008
"""What a call costs beside the model: the agent's client, the gateway, tokens and the trace."""
_TRIAL_TOKENS, _TRIAL_REPLY = 2048, 8


@dataclass(frozen=True, slots=True)
class Estimate:
    """A guess, given before the first step; the display corrects it from the second step on."""

    memory: int
    """Bytes at the peak of a training step, above what the process takes anyway."""
    seconds: float
    episodes: int

    def __str__(self) -> str:
        minutes = self.seconds / 60
        time_ = f"{minutes:.0f} min" if minutes >= 1.5 else f"{self.seconds:.0f} s"
        return f"{self.episodes:,} episodes, about {time_} on a quiet machine, {self.memory / 2**30:.1f} GiB of memory"


def memory_bytes(trainer: Trainer, tokens: int, *, checkpointing: bool, trained: int | None = None) -> int:
    """Bytes of weights, gradients, AdamW's two moments, master weights, reference, and the activations of `tokens`.

    `trained` is how many of them the loss counts; None: all. What eager attention keeps of pairs of tokens is left out.
    """
    model = trainer.model
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    moved = sum(m.numel() for m in trainer.masters)
    copied = sum(m.numel() for m, p in zip(trainer.masters, trainer.parameters, strict=True) if m is not p)
    adapter = hasattr(model, "disable_adapter")
    reference = weights if trainer.settings.loss.kl_coef and not adapter else 0
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
    """Time two passes over the model, and reckon with replies of full length and `multi_turn.expected_steps` turns."""
    training_rate, sampling_seconds = _trial(trainer)
    rollout = config.rollout
    per_step = config.data.train_batch_size * rollout.num_repeat
    episodes = steps * per_step + val_episodes
    calls = rollout.multi_turn.expected_steps
    reply = min(rollout.max_response_length_in_one_turn, rollout.max_model_len)
    rows = min(rollout.max_env_worker, per_step)
    sampling = episodes / rows * calls * reply * sampling_seconds
    training = steps * per_step * min(rollout.max_model_len, calls * 2 * reply) / training_rate
    tokens = min(config.trainer_common.micro_batch_tokens, per_step * rollout.max_model_len)
    memory = memory_bytes(trainer, tokens, checkpointing=config.model.gradient_checkpointing)
    if rollout.max_staleness:  # the sampler has trained weights of its own
        memory += sum(p.numel() * p.element_size() for p in trainer.parameters)
    return Estimate(memory, sampling + training + episodes * calls * _CALL_SECONDS, episodes)


def _trial(trainer: Trainer) -> tuple[float, float]:
    """Tokens a second through a forward and backward pass, and seconds for one token of a batch of replies."""
    model = trainer.model
    vocabulary, device = model.get_input_embeddings().num_embeddings, trainer.device
    draw = np.random.default_rng(0)
    rows, width = 16, _TRIAL_TOKENS // 16
    samples = [_random_sample(draw.integers(0, vocabulary, width)) for _ in range(rows)]
    started = _clock(device)
    with policy_pass(model):
        score(model, collate(samples, device=device), entropy=False).logprobs_N.sum().backward()
    trained = _clock(device) - started
    for parameter in trainer.parameters:
        parameter.grad = None
    ids_BT = torch.zeros(rows, 1, dtype=torch.long, device=device)
    with torch.inference_mode():
        model(input_ids=ids_BT)
        started = _clock(device)
        for _ in range(_TRIAL_REPLY):
            model(input_ids=ids_BT)
    return _TRIAL_TOKENS / trained, (_clock(device) - started) / _TRIAL_REPLY


def _clock(device: torch.device) -> float:
    """Seconds, once everything asked of the device is done: a GPU only queues what it is given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _random_sample(ids_T: np.ndarray[Any, Any]) -> Sample:
    mask_T = np.ones(len(ids_T), dtype=bool)
    mask_T[: len(ids_T) // 2] = False
    zeros_T = np.zeros(len(ids_T), dtype=np.float32)
    span = Span(call_id="trial", start=len(ids_T) // 2, end=len(ids_T))
    line = Timeline(agent="", token_ids=ids_T, loss_mask=mask_T, logprobs=zeros_T, call_ids=("trial",), spans=(span,))
    return Sample(timeline=line, episode_id="", group_id="", reward=0.0, advantages=zeros_T)
