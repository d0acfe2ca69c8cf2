"""Imitation and preferences: against hand computation, against TRL, and the laws that batches and
merging keep."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ajet_sdk.learn.batches import collate, micro_batches, trained_inputs
from ajet_sdk.learn.losses import loss_of, score, units
from ajet_sdk.learn.objective import LossSettings
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.types import Sample, Timeline
from tests.sdk.learn.test_loss import tiny
from tests.tiny_models import save_tiny

IMITATION, PREFERENCE = (
    LossSettings(objective="imitation"),
    LossSettings(objective="preference", beta=0.3),
)

Row = list[tuple[int, bool]]
"""Token ids, and whether each is learnt."""


def sample(row: Row, group: str = "g", side: float = 1.0) -> Sample:
    mask = np.array([learnt for _, learnt in row])
    line = Timeline(
        agent="default",
        token_ids=[i for i, _ in row],
        loss_mask=mask,
        logprobs=np.full(len(row), np.nan),
        call_ids=(),
    )
    return Sample(
        timeline=line,
        episode_id="e",
        group_id=group,
        reward=side,
        advantages=np.where(mask, side, 0.0),
    )


def policy_sample() -> Sample:
    """An attempt whose sampler's log-probabilities are known."""
    bare = sample([(4, False), (6, True), (2, True)], side=0.7)
    return bare.model_copy(
        update={"timeline": bare.timeline.model_copy(update={"logprobs": np.full(3, -3.5)})}
    )


def logprob(model: Any, row: Row) -> torch.Tensor:
    """The sum over the learnt tokens, position by position."""
    ids = torch.tensor([[i for i, _ in row]])
    all_TV = torch.log_softmax(model(input_ids=ids).logits[0], -1)
    return sum(
        (all_TV[t - 1, i] for t, (i, learnt) in enumerate(row) if learnt and t),
        torch.zeros(()).double(),
    )


CHOSEN: Row = [(3, False), (5, False), (7, True), (9, True), (4, False), (8, True)]
REJECTED: Row = [(3, False), (5, False), (6, True), (2, True)]


def test_imitation_is_the_mean_negative_log_likelihood_of_the_learnt_tokens() -> None:
    model = tiny()
    batch = collate([sample(CHOSEN), sample(REJECTED)])
    loss_N, _ = loss_of(score(model, batch, entropy=False), batch, IMITATION)
    expected = -(logprob(model, CHOSEN) + logprob(model, REJECTED)) / 5
    assert loss_N.mean().item() == pytest.approx(expected.item())


def test_a_preference_is_as_in_its_paper() -> None:
    model, first = tiny(1), tiny(0)
    batch = collate([sample(REJECTED, side=-1.0), sample(CHOSEN)])
    reference_N = score(first, batch, entropy=False).logprobs_N
    loss_P, seen = loss_of(score(model, batch, entropy=False), batch, PREFERENCE, reference_N)
    gain = (
        logprob(model, CHOSEN)
        - logprob(first, CHOSEN)
        - logprob(model, REJECTED)
        + logprob(first, REJECTED)
    )
    assert loss_P.tolist() == pytest.approx([math.log1p(math.exp(-0.3 * gain.item()))])
    assert seen["dpo_margin"].tolist() == pytest.approx([0.3 * gain.item()])
    assert seen["dpo_accuracy"].tolist() == [float(gain > 0)]


def test_a_preference_begins_at_the_logarithm_of_two() -> None:
    metrics = Trainer(tiny(), TrainerSettings(lr=1e-3, loss=PREFERENCE)).step(
        [sample(CHOSEN), sample(REJECTED, side=-1)]
    )
    assert metrics["loss"] == pytest.approx(math.log(2))
    assert metrics["dpo_margin"] == 0 and "logprob_gap_mean" not in metrics


def test_what_both_sides_were_given_cancels_out() -> None:
    """A turn that both attempts share changes nothing, whether it is learnt or not."""
    model, first = tiny(1), tiny(0)
    losses = []
    for shared in (True, False):
        rows = [[(3, False), (5, shared), *rest] for rest in ([(7, True), (9, True)], [(6, True)])]
        batch = collate([sample(rows[0]), sample(rows[1], side=-1.0)])
        reference_N = score(first, batch, entropy=False).logprobs_N
        losses.append(
            loss_of(score(model, batch, entropy=False), batch, PREFERENCE, reference_N)[0].item()
        )
    assert losses[0] == pytest.approx(losses[1])


token = st.integers(0, 39)
row = st.lists(st.tuples(token, st.booleans()), min_size=2, max_size=12).filter(
    lambda r: any(on for _, on in r[1:])
)
pairs = st.lists(st.tuples(row, row), min_size=1, max_size=4)


def both_sides(found: list[tuple[Row, Row]]) -> list[Sample]:
    signed = [
        (str(i), row, sign)
        for i, pair in enumerate(found)
        for row, sign in zip(pair, (1, -1), strict=True)
    ]
    return [sample(row, group, sign) for group, row, sign in signed]


@given(pairs, st.integers(1, 64))
def test_a_pair_is_never_parted(found: list[tuple[Row, Row]], budget: int) -> None:
    samples = both_sides(found)
    inputs = [trained_inputs(s) for s in samples]
    groups = [
        group.members
        for group in micro_batches(inputs, budget, units(samples, PREFERENCE), share=True)
    ]
    assert sorted(i for group in groups for i in group) == list(range(len(samples)))
    for group in groups:
        assert sorted(i ^ 1 for i in group) == sorted(group)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(pairs, st.integers(1, 64), st.sampled_from([IMITATION, PREFERENCE]))
def test_micro_batches_change_no_update(
    found: list[tuple[Row, Row]], budget: int, loss: LossSettings
) -> None:
    samples = both_sides(found)
    after = []
    for tokens in (10**6, budget):
        trainer = Trainer(
            tiny(), TrainerSettings(lr=1e-2, warmup_steps=0, loss=loss, micro_batch_tokens=tokens)
        )
        trainer.step(samples)
        after.append(torch.cat([p.detach().flatten() for p in trainer.parameters]))
    assert torch.allclose(after[0], after[1], atol=1e-9)


def test_replay_adds_the_weighted_gradient_of_imitation() -> None:
    """The gradient of a step that replays is the policy's plus `replay_coef` times that of
    imitation alone."""

    def gradient(samples: list[Sample], loss: LossSettings, replay: list[Sample]) -> torch.Tensor:
        trainer = Trainer(
            tiny(), TrainerSettings(lr=1e-2, loss=loss, grad_clip=1e9, micro_batch_tokens=8)
        )
        taken: list[torch.Tensor] = []
        trainer.optimizer.register_step_pre_hook(lambda *_: taken.append(flat(trainer)))
        metrics = trainer.step(samples, replay=replay)
        assert ("replay_loss" in metrics) == bool(replay)
        return taken[0]

    def flat(trainer: Trainer) -> torch.Tensor:
        return torch.cat([p.grad.flatten() for p in trainer.parameters if p.grad is not None])

    attempt, told = policy_sample(), [sample(CHOSEN), sample(REJECTED)]
    both = gradient([attempt], LossSettings(replay_coef=0.3), told)
    alone = gradient([attempt], LossSettings(), []) + 0.3 * gradient(told, IMITATION, [])
    assert torch.allclose(both, alone, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_loss_and_gradient_are_trls(kind: str, tmp_path: Path) -> None:
    """The same model and ids: what TRL's own trainer says of them, and where it would move the
    weights."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = save_tiny(tmp_path / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(place)
    theirs, ours, reference = (
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32) for _ in range(3)
    )
    with torch.no_grad():  # a reference that the policy has moved away from
        for parameter in reference.parameters():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    draw = np.random.default_rng(0)
    texts = [[draw.integers(0, len(tokenizer), n).tolist() for n in (4, 6, 3)] for _ in range(3)]
    chosen = [
        [(i, False) for i in prompt] + [(i, True) for i in reply] for prompt, reply, _ in texts
    ]
    rejected = [
        [(i, False) for i in prompt] + [(i, True) for i in reply] for prompt, _, reply in texts
    ]
    common = {
        "output_dir": str(tmp_path),
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "max_length": None,
    }
    reference_N = None
    if kind == "sft":
        rows = [
            {"input_ids": prompt + reply, "labels": [-100] * len(prompt) + reply}
            for prompt, reply, _ in texts
        ]
        config = trl.SFTConfig(**common, dataset_kwargs={"skip_prepare_dataset": True})
        trainer = trl.SFTTrainer(
            theirs, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
        )
        batch, loss = collate([sample(row, str(i)) for i, row in enumerate(chosen)]), IMITATION
    else:
        rows = [
            {"prompt_ids": prompt, "chosen_ids": a, "rejected_ids": b} for prompt, a, b in texts
        ]
        config, any_row = (
            trl.DPOConfig(**common, beta=0.3),
            {"prompt": "a", "chosen": "b", "rejected": "c"},
        )
        trainer = trl.DPOTrainer(
            theirs,
            reference,
            config,
            train_dataset=Dataset.from_list([any_row]),
            processing_class=tokenizer,
        )
        batch, loss = collate(both_sides(list(zip(chosen, rejected, strict=True)))), PREFERENCE
        reference_N = score(reference.eval(), batch, entropy=False).logprobs_N.detach()
    said = trainer.compute_loss(
        trainer.model.eval(), trainer._prepare_inputs(trainer.data_collator(rows))
    )
    said.backward()
    value = loss_of(score(ours.eval(), batch, entropy=False), batch, loss, reference_N)[0].mean()
    value.backward()
    assert value.item() == pytest.approx(said.item(), rel=1e-5)
    gradients = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], atol=1e-6), name
