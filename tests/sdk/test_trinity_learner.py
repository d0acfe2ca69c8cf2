"""The CPU learner behind Trinity moves weights as `local`'s trainer does, KL, entropy and schedule included."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ajet_sdk.backbones.trinity.cpu.learner import Adam, Learner, Sequences
from ajet_sdk.learn.objective import LossSettings
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.protocols import Sampling
from ajet_sdk.types import Sample, Span, Timeline
from tests.sdk.test_trinity_service import write_model

TEMPERATURE = 0.8
SETTINGS = TrainerSettings(lr=0.01, warmup_steps=2, total_updates=6, lr_scheduler_type="linear", grad_clip=1.0)


def samples() -> list[Sample]:
    draw = np.random.default_rng(0)
    made = []
    for row, length in enumerate((9, 14, 23)):
        ids, mask = draw.integers(0, 256, length), np.zeros(length, np.bool_)
        mask[3 + row : 3 + row + 4] = mask[length - 2 :] = True
        line = Timeline(
            agent="a", token_ids=ids.astype(np.int32), loss_mask=mask, call_ids=(f"c{row}",),
            logprobs=np.where(mask, draw.normal(-5.0, 0.3, length), 0.0).astype(np.float32),
            spans=(Span(call_id=f"c{row}", start=0, end=length),),
        )  # fmt: skip
        advantages = np.where(mask, draw.normal(), 0.0).astype(np.float32)
        made.append(Sample(timeline=line, episode_id=f"e{row}", group_id="g", reward=0.0, advantages=advantages))
    return made


def surrogate_gradients(batch: list[Sample], logprobs: list[np.ndarray], loss: LossSettings) -> np.ndarray:
    """d(loss)/d(logprob) of the clipped surrogate alone, a mean over tokens, as whoever asks the learner has it."""
    tokens = sum(int(s.timeline.loss_mask.sum()) for s in batch)
    found = []
    for sample, values in zip(batch, logprobs, strict=True):
        line = sample.timeline
        leaf = torch.tensor(values, requires_grad=True)
        ratio = (leaf - torch.tensor(line.logprobs[1:])).exp()
        advantages = torch.tensor(sample.advantages[1:])
        bounded = ratio.clamp(1 - loss.clip_ratio_low, 1 + loss.clip_ratio_high)
        gain = torch.minimum(ratio * advantages, bounded * advantages)
        (-(gain * torch.tensor(line.loss_mask[1:])).sum() / tokens).backward()
        found.append(leaf.grad.numpy())
    return np.concatenate(found).astype(np.float32)


@pytest.mark.parametrize(
    "loss",
    [
        LossSettings(),
        LossSettings(entropy_coef=0.05),
        LossSettings(kl_coef=0.1),
        LossSettings(kl_coef=0.1, kl_type="k2", entropy_coef=0.02),
    ],
    ids=["plain", "entropy", "kl", "both"],
)
def test_the_learner_makes_the_steps_of_local(tmp_path: Path, loss: LossSettings) -> None:
    path = write_model(tmp_path / "model")
    settings, batch = replace(SETTINGS, loss=loss), samples()
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    trainer = Trainer(theirs, settings)
    learner = Learner(path, TEMPERATURE, settings)
    sequences = Sequences(
        lengths_B=np.array([len(s.timeline.token_ids) - 1 for s in batch]),
        ids_N=np.concatenate([s.timeline.token_ids[:-1] for s in batch]).astype(np.int64),
        targets_N=np.concatenate([s.timeline.token_ids[1:] for s in batch]).astype(np.int64),
        needed_N=np.concatenate([s.timeline.loss_mask[1:] for s in batch]),
    )
    cuts = np.cumsum(sequences.lengths_B)[:-1]
    for _ in range(3):
        trainer.step(batch, Sampling(TEMPERATURE))
        logprobs = np.split(learner.forward(sequences), cuts)
        learner.backward(surrogate_gradients(batch, logprobs, loss))
        learner.update(Adam(settings.lr, *settings.betas, weight_decay=0.0, grad_clip_norm=settings.grad_clip))
    for (name, mine), (_, other) in zip(learner.model.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=1e-3, msg=name)


def test_the_base_model_is_what_steps_started_from(tmp_path: Path) -> None:
    """Without this the test above could compare two models that never moved."""
    path = write_model(tmp_path / "model")
    before = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    trained = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    Trainer(trained, SETTINGS).step(samples(), Sampling(TEMPERATURE))
    pairs = zip(before.parameters(), trained.parameters(), strict=True)
    moved = max(float((one - other).detach().abs().max()) for one, other in pairs)
    assert moved > 1e-3
