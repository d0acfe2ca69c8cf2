"""The estimate of memory against what a step of training allocates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from ajet_sdk.learn.estimate import Estimate, activation_bytes, state_bytes
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.types import Sample, Span, Timeline
from tests.gpu.machine import peak_memory

ROWS, LENGTH = 4, 128


def sample(ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Sample:
    """The second half is trained."""
    mask, half = np.arange(len(ids)) >= len(ids) // 2, len(ids) // 2
    line = Timeline(
        agent="",
        token_ids=ids,
        loss_mask=mask,
        logprobs=np.zeros(len(ids)),
        call_ids=("c",),
        spans=(Span(call_id="c", start=half, end=len(ids)),),
    )
    return Sample(
        timeline=line, episode_id="", group_id="", reward=0.0, advantages=mask.astype(np.float32)
    )


@pytest.mark.slow
@pytest.mark.parametrize(  # any two settings meet in one of these
    ("dtype", "lora", "checkpointing", "vocabulary"),
    [
        (torch.float32, False, False, 3000),
        (torch.float32, True, True, 3000),
        (torch.bfloat16, False, True, 3000),
        (torch.bfloat16, True, False, 3000),
        (torch.float32, False, False, 49152),
        pytest.param(
            torch.bfloat16, True, True, 49152, marks=pytest.mark.long
        ),  # processors are slow at bfloat16
    ],
)
def test_a_step_takes_the_memory_that_was_estimated(
    dtype: torch.dtype, lora: bool, checkpointing: bool, vocabulary: int
) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).to(dtype)
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
    if checkpointing:
        (
            getattr(model, "activation_checkpointing_enable", None)
            or model.gradient_checkpointing_enable
        )()
        model.enable_input_require_grads()
    trainer = Trainer(model, TrainerSettings(lr=1e-4, micro_batch_tokens=ROWS * LENGTH))
    draw = np.random.default_rng(0)
    # Two passes: in the second one gradients are there.
    samples = [sample(draw.integers(0, vocabulary, LENGTH)) for _ in range(2 * ROWS)]
    trainer.step(samples)
    held = sum(p.numel() * p.element_size() for p in model.parameters()) + sum(
        8 * m.numel() for m in trainer.masters
    )
    held += sum(
        4 * m.numel()
        for m, p in zip(trainer.masters, trainer.parameters, strict=True)
        if m is not p
    )
    measured = held + peak_memory(trainer.device, lambda: trainer.step(samples))
    tokens = ROWS * LENGTH
    guess = state_bytes(trainer)
    guess += activation_bytes(model, tokens, trained=tokens // 2, checkpointing=checkpointing)
    assert 0.8 < guess / measured < 1.2, (
        f"{guess / 2**20:.1f} MiB estimated, {measured / 2**20:.1f} MiB measured"
    )


@pytest.mark.slow
def test_the_blocks_of_a_training_process_are_aligned_to_pages(tmp_path: Path) -> None:
    program = """
import ajet
from ajet_sdk.errors import AjetError
job = ajet.Config(backbone="local", model={"path": "./absent"})
try:
    ajet.train(job, workflow=lambda question: question, judge=lambda output: 1.0, tasks=[{"question": "a"}])
except AjetError as error:
    print(type(error).__name__)
import torch
print({torch.empty((2 << 20) + i * 64, dtype=torch.uint8).data_ptr() % 4096 for i in range(8)})
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("{0}\n") and done.stdout.count("Error") == 1, done


def test_no_time_is_guessed_before_it_is_measured() -> None:
    """A trial of the machine was wrong by a factor of six; the display reckons from the first step
    on."""
    assert (
        str(Estimate(2**30, 1200))
        == "1,200 episodes, about 1.0 GiB of memory; the time is estimated after the first step"
    )
