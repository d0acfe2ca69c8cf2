"""The parts of the policy's objective. That it equals TRL's and verl's is in tests/losses."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ajet
from ajet_sdk.config.trainer_schema import LOSS_TYPES
from ajet_sdk.errors import ConfigError
from ajet_sdk.learn.batches import collate
from ajet_sdk.learn.losses import score
from ajet_sdk.learn.objective import LossSettings, Scored, policy_loss, token_weights
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.types import Sample
from tests.sdk.learn.test_loss import sample, tiny


def samples_of(masks: list[list[int]], seed: int = 0) -> list[Sample]:
    draw = np.random.default_rng(seed)
    return [
        sample(
            draw.integers(0, 40, len(mask)).tolist(),
            mask,
            float(draw.normal()),
            float(-3.5 - 0.4 * draw.random()),
        ).model_copy(update={"episode_id": f"e{i // 2}"})
        for i, mask in enumerate(masks)
    ]


MASKS = [[0, 1, 1, 0, 1], [0, 0, 1, 1, 1, 1, 1], [0, 1], [0, 1, 1, 1, 0, 0, 1, 1, 0, 1]]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token", [1 / 15] * 15),
        ("sample", [1 / 12] * 3 + [1 / 20] * 5 + [1 / 4] + [1 / 24] * 6),
        # seven turns: 2 + 1, 5, 1, 3 + 2 + 1
        (
            "turn",
            [1 / 14] * 2 + [1 / 7] + [1 / 35] * 5 + [1 / 7] + [1 / 21] * 3 + [1 / 14] * 2 + [1 / 7],
        ),
        # two episodes of one agent: 8 tokens and 7
        ("agent", [1 / 16] * 8 + [1 / 14] * 7),
        ("constant", [1 / 40] * 15),
    ],
)
def test_the_weights_of_tokens(aggregation: str, expected: list[float]) -> None:
    weights = token_weights(
        samples_of(MASKS), LossSettings(loss_aggregation=aggregation, loss_length=10)
    )  # type: ignore[arg-type]
    np.testing.assert_allclose(np.concatenate(weights), expected, rtol=1e-6)


@given(
    st.lists(
        st.lists(st.integers(0, 1), min_size=2, max_size=9).filter(lambda mask: any(mask[1:])),
        min_size=1,
    ),
    st.sampled_from(["token", "sample", "turn", "agent"]),
)
def test_the_weights_of_an_update_add_up_to_one(masks: list[list[int]], aggregation: str) -> None:
    weights = token_weights(samples_of(masks), LossSettings(loss_aggregation=aggregation))  # type: ignore[arg-type]
    assert float(np.concatenate(weights).astype(np.float64).sum()) == pytest.approx(1.0, abs=1e-5)


def test_the_ratio_of_a_turn_is_the_geometric_mean_of_its_tokens() -> None:
    batch = collate(samples_of([[0, 1, 1, 0, 1]]))
    batch = replace(
        batch,
        sampler_N=torch.tensor([-1.0, -2.0, -3.0]),
        advantages_N=torch.tensor([1.0, -2.0, 0.5]),
    )
    new_N = torch.tensor([-1.1, -2.3, -3.05], requires_grad=True)
    loss_N, _ = policy_loss(
        Scored(new_N, None), batch, LossSettings(ratio_level="turn", clip_type="none")
    )
    turn, other = math.exp(-0.2), math.exp(-0.05)
    assert loss_N.tolist() == pytest.approx([-turn, 2 * turn, -0.5 * other], abs=1e-6)
    loss_N.sum().backward()
    assert new_N.grad is not None  # of each token by its own advantage
    assert new_N.grad.tolist() == pytest.approx([-turn, 2 * turn, -0.5 * other], abs=1e-6)


def test_a_correction_is_of_sampler_and_trainer_alone() -> None:
    """The ratio is of the trainer's own log-probabilities; the sampler's enter the weight,
    bounded."""
    batch = collate(samples_of([[0, 1, 1, 1]]))
    batch = replace(
        batch,
        sampler_N=torch.tensor([-1.0, -1.0, -3.0]),
        old_N=torch.tensor([-1.2, -1.0, -1.0]),
        advantages_N=torch.ones(3),
    )
    new = Scored(torch.tensor([-1.1, -1.0, -1.0]), None)
    ratio = math.exp(0.1)
    for kind, last in (("truncated", 2.0), ("masked", 0.0)):
        corrected = LossSettings(ratio_base="trainer", importance_weights=kind)  # type: ignore[arg-type]
        loss_N, seen = policy_loss(new, batch, corrected)
        assert loss_N.tolist() == pytest.approx([-ratio * math.exp(-0.2), -1.0, -last], abs=1e-6)
        assert seen["importance_share"].tolist() == [0, 0, 1]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batches_change_no_update_of_a_named_loss(loss_type: str) -> None:
    """In four updates a step, of which three see weights that have moved."""
    moved = []
    for budget in (1, 16, 1000):
        model = tiny()
        updates = {"ppo_epochs": 2, "mini_batch_num": 2, "micro_batch_tokens": budget}
        config = ajet.Config(
            trainer_common={"loss_type": loss_type, "use_kl_loss": False, **updates}
        )
        trainer = Trainer(model, replace(TrainerSettings.of(config, 1e-2, 1), warmup_steps=0))
        metrics = trainer.step(samples_of(MASKS))
        assert all(math.isfinite(value) for value in metrics.values()) and trainer.updates == 4
        moved.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    for other in moved[1:]:
        torch.testing.assert_close(other, moved[0], atol=1e-9, rtol=1e-7)
    assert not torch.equal(moved[0], torch.cat([p.detach().flatten() for p in tiny().parameters()]))


def test_the_trainers_own_log_probabilities_are_those_before_the_first_update() -> None:
    """Two updates by hand, the second against the weights as the step met them."""
    samples = samples_of(MASKS)
    loss = LossSettings(ratio_base="trainer")
    trainer = Trainer(tiny(), TrainerSettings(lr=1e-2, warmup_steps=0, loss=loss, ppo_epochs=2))
    trainer.step(samples)
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    batch = collate(samples)
    old_N = score(model, batch, entropy=False).logprobs_N.detach()
    for _ in range(2):
        optimizer.zero_grad()
        loss_N, _ = policy_loss(
            score(model, batch, entropy=False), replace(batch, old_N=old_N), loss
        )
        loss_N.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for ours, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-8, rtol=1e-6)


@settings(max_examples=30)
@given(st.sampled_from(sorted(LOSS_TYPES)), st.integers(0, 1000))
def test_without_an_advantage_no_named_loss_has_a_gradient(loss_type: str, seed: int) -> None:
    common = {"loss_type": loss_type, "use_kl_loss": False}
    named = TrainerSettings.of(ajet.Config(trainer_common=common), 1e-3, 1).loss
    batch = collate(samples_of(MASKS, seed))
    batch = replace(batch, advantages_N=torch.zeros_like(batch.advantages_N))
    new_N = (batch.sampler_N + 0.3 * torch.randn(len(batch.sampler_N))).requires_grad_()
    policy_loss(Scored(new_N, None), batch, named)[0].sum().backward()
    assert new_N.grad is not None and not new_N.grad.any()


def test_a_named_loss_sets_what_the_config_does_not() -> None:
    common = ajet.Config(
        trainer_common={"loss_type": "dr_grpo", "clip_ratio_high": 0.5}
    ).trainer_common
    assert (common.clip_ratio_low, common.clip_ratio_high) == (0.2, 0.5)
    assert (
        common.loss_aggregation == "constant"
        and not common.algorithm.normalize_std
        and not common.use_kl_loss
    )
    again = ajet.Config(trainer_common=common.model_dump())  # as a run's config.yaml is read
    assert again.trainer_common == common


@pytest.mark.parametrize(
    ("common", "message"),
    [
        ({"loss_type": "gropo"}, "loss_type.*grpo"),
        ({"importance_weights": "masked"}, "needs ratio_base: trainer"),
        ({"ratio_base": "trainer", "importance_bounds": [2, 1]}, "a lower and a higher number"),
        ({"clip_type": "soft", "soft_clip_temperatures": [1, 0]}, "greater than 0"),
        ({"clip_ratio_max": 0.5}, "clip_ratio_max must be more than 1"),
    ],
)
def test_a_wrong_objective_is_refused(common: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ajet.Config(trainer_common=common)
