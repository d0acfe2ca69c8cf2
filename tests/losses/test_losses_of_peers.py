"""Each named loss against TRL's and verl's own functions, on a stored batch: loss and gradients to
1e-5.

Needs both packages (CONTRIBUTING.md has the commands); where they are absent, this is skipped.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ajet
from ajet_sdk.config.trainer_schema import LOSS_TYPES
from ajet_sdk.learn.batches import MicroBatch, logit_rows
from ajet_sdk.learn.objective import LossSettings, Scored, less_kl, policy_loss, token_weights
from ajet_sdk.learn.trainer import TrainerSettings
from ajet_sdk.learn.trees import Rows
from ajet_sdk.samples.build import build
from ajet_sdk.types import Call, Episode, Reward, Sample, Span, Timeline

B, T = 6, 9
HORIZON = 32
"""What `constant` divides by."""


@dataclass(frozen=True)
class Stored:
    """A batch as matrices of shape (B, T), in 64 bits; `mask` is 1 where a token was sampled."""

    new: torch.Tensor
    old: torch.Tensor
    sampler: torch.Tensor
    reference: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor


def stored(seed: int = 3) -> Stored:
    """Ratios on both sides of the bounds, replies of several lengths, advantages of both signs."""
    draw = torch.Generator().manual_seed(seed)
    new = -torch.rand(B, T, generator=draw, dtype=torch.float64) * 3
    mask = (torch.arange(T)[None] < torch.tensor([9, 4, 1, 7, 5, 2])[:, None]).double()
    old, sampler, reference = (
        (new + torch.randn(B, T, generator=draw, dtype=torch.float64) * spread).clamp(max=0)
        for spread in (0.5, 0.6, 0.4)
    )
    advantages = torch.tensor([1.5, -0.7, 0.4, -1.1, 0.9, -0.2], dtype=torch.float64)
    return Stored(new, old, sampler, reference, advantages, mask)


def settings_of(loss_type: str, **more: Any) -> LossSettings:
    common = {"loss_type": loss_type, "kl_loss_coef": 0.05, "loss_length": HORIZON, **more}
    return TrainerSettings.of(ajet.Config(trainer_common=common), 1e-3, 1).loss


def ours(batch: Stored, settings: LossSettings) -> tuple[float, torch.Tensor]:
    """Our loss of the batch, and its gradient for each log-probability."""
    leaf = batch.new.clone().requires_grad_()
    rows, columns = batch.mask.nonzero(as_tuple=True)
    samples = []
    for row in range(B):
        n = int(batch.mask[row].sum())
        line = Timeline(
            agent="default",
            token_ids=[0] * (n + 1),
            loss_mask=np.arange(n + 1) > 0,
            logprobs=[0.0] * (n + 1),
            call_ids=(f"c{row}",),
            spans=(Span(call_id=f"c{row}", start=1, end=n + 1),),
        )
        samples.append(
            Sample(
                timeline=line,
                episode_id=f"e{row}",
                group_id="g",
                reward=0.0,
                advantages=[0.0] * (n + 1),
            )
        )
    micro = MicroBatch(
        rows=Rows(torch.zeros(B, T, dtype=torch.long)),
        samples_N=rows,
        logits=logit_rows((rows * T + columns).numpy(), np.ones(len(rows), np.float32)),
        targets_N=torch.zeros_like(rows),
        sampler_N=batch.sampler[rows, columns],
        advantages_N=batch.advantages[rows],
        old_N=batch.old[rows, columns],
    )
    if settings.ratio_base == "sampler":  # the denominator of the peers' ratio
        micro = MicroBatch(
            **{name: getattr(micro, name) for name in micro.__slots__} | {"sampler_N": micro.old_N}
        )
    weights_N = torch.from_numpy(np.concatenate(token_weights(samples, settings))).double()
    reference_N = batch.reference[rows, columns] if settings.kl_coef else None
    loss_N, _ = policy_loss(Scored(leaf[rows, columns], None), micro, settings, reference_N)
    loss = (loss_N * weights_N).sum()
    loss.backward()
    assert leaf.grad is not None
    return float(loss.detach()), leaf.grad


def check_same(batch: Stored, settings: LossSettings, theirs: Any) -> None:
    """Their loss as a function of the log-probabilities is ours, and so are its gradients, which
    are not nothing."""
    leaf = batch.new.clone().requires_grad_()
    value = theirs(leaf)
    value.backward()
    loss, gradient = ours(batch, settings)
    assert loss == pytest.approx(float(value.detach()), abs=1e-5)
    assert leaf.grad is not None and leaf.grad.abs().max() > 1e-3
    torch.testing.assert_close(gradient, leaf.grad, atol=1e-5, rtol=1e-5)


def trl_loss(batch: Stored, settings: LossSettings, loss_type: str, **more: Any) -> Any:
    """TRL's `GRPOTrainer._compute_loss`, with the log-probabilities that it is to take."""
    trainer_module = pytest.importorskip("trl.trainer.grpo_trainer", reason="needs trl")
    accelerator = SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        gather=lambda x: x,
        reduce=lambda x, reduction: x,
    )

    def compute(leaf: torch.Tensor) -> torch.Tensor:
        entropies = torch.zeros_like(leaf)
        trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, entropies, None),
            aux_loss_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            accelerator=accelerator,
            importance_sampling_level="token",
            beta=settings.kl_coef,
            loss_type=loss_type,
            use_vllm=False,
            vllm_importance_sampling_correction=False,
            _entropy_bonus_enabled=False,
            max_completion_length=HORIZON,
            epsilon_low=settings.clip_ratio_low,
            epsilon_high=settings.clip_ratio_high,
            model=SimpleNamespace(training=True),
            current_gradient_accumulation_steps=1,
            _metrics={"train": defaultdict(list)},
            args=SimpleNamespace(
                delta=settings.clip_ratio_max,
                use_bias_correction_kl=False,
                steps_per_generation=1,
                sapo_temperature_pos=1.0,
                sapo_temperature_neg=1.05,
            ),
        )
        vars(trainer).update(more)
        nothing = torch.zeros(B, 1, dtype=torch.long)
        inputs = {
            "prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": torch.zeros(B, T, dtype=torch.long),
            "completion_mask": batch.mask, "advantages": batch.advantages, "old_per_token_logps": batch.old,
            "ref_per_token_logps": batch.reference, "num_items_in_batch": batch.mask.sum(),
            "importance_sampling_ratio": more.get("importance_sampling_ratio"),
        }  # fmt: skip
        loss: torch.Tensor = trainer_module.GRPOTrainer._compute_loss(trainer, None, inputs)
        return loss

    return compute


@pytest.mark.parametrize(
    ("ours_named", "theirs_named", "more"),
    [
        ("grpo", "grpo", {}),
        ("dapo", "dapo", {}),
        ("dr_grpo", "dr_grpo", {}),
        ("sapo", "sapo", {}),
        ("gspo", "grpo", {"importance_sampling_level": "sequence"}),
        ("cispo", "cispo", {"epsilon_high": 5.0}),
    ],
)
def test_a_named_loss_is_that_of_trl(
    ours_named: str, theirs_named: str, more: dict[str, Any]
) -> None:
    settings, batch = settings_of(ours_named), stored()
    if ours_named == "gspo":  # bounds that some of these ratios are within
        settings = settings_of(ours_named, clip_ratio_low=0.2, clip_ratio_high=0.3)
    check_same(batch, settings, trl_loss(batch, settings, theirs_named, **more))


def test_the_bound_for_negative_advantages_is_that_of_trl() -> None:
    settings, batch = settings_of("grpo", clip_ratio_max=1.4), stored()
    check_same(batch, settings, trl_loss(batch, settings, "grpo"))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("named", "mode"), [("tis", "truncate"), ("icepop", "mask")])
def test_importance_weights_are_those_of_trl(named: str, mode: str, level: str) -> None:
    """TRL computes the weights while it generates; of that only the formula is repeated here."""
    settings = settings_of(
        named, importance_level=level, loss_aggregation="sample", use_kl_loss=False
    )
    batch = stored()
    apart = (batch.old - batch.sampler) * batch.mask
    ratio = (apart.sum(-1, keepdim=True) if level == "sequence" else apart).exp()
    low, high = settings.importance_bounds
    weights = (
        ratio.clamp(low, high)
        if mode == "truncate"
        else ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
    )
    theirs = trl_loss(
        batch,
        settings,
        "grpo",
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        importance_sampling_ratio=weights,
    )
    check_same(batch, settings, theirs)


@pytest.mark.parametrize(
    ("ours_named", "theirs_named", "aggregation"),
    [
        ("grpo", "vanilla", "seq-mean-token-mean"),
        ("dapo", "vanilla", "token-mean"),
        ("rloo", "vanilla", "token-mean"),
        ("opo", "vanilla", "token-mean"),
        ("reinforce++", "vanilla", "token-mean"),
        ("dr_grpo", "vanilla", "seq-mean-token-sum-norm"),
        ("gspo", "gspo", "seq-mean-token-mean"),
        ("sapo", "sapo", "seq-mean-token-mean"),
        ("cispo", "cispo", "token-mean"),
        ("tis", "vanilla", "token-mean"),
        ("icepop", "vanilla", "token-mean"),
    ],
)
def test_a_named_loss_is_that_of_verl(ours_named: str, theirs_named: str, aggregation: str) -> None:
    core = pytest.importorskip("verl.trainer.ppo.core_algos", reason="needs verl")
    config_module = pytest.importorskip("verl.workers.config", reason="needs verl")
    more = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3} if ours_named == "gspo" else {}
    settings, batch = (
        settings_of(ours_named, use_kl_loss=False, clip_ratio_max=1.5, **more),
        stored(),
    )
    config = config_module.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=settings.clip_ratio_low,
        clip_ratio_high=settings.clip_ratio_high,
        clip_ratio_c=1.5,
        use_dynamic_bsz=True,
    )
    config.global_batch_info["loss_scale_factor"] = HORIZON
    weights = None
    if settings.importance_weights != "none":
        ratio, (low, high) = (batch.old - batch.sampler).exp(), settings.importance_bounds
        weights = ratio.clamp(low, high)
        if settings.importance_weights == "masked":
            weights = ratio * ((ratio >= low) & (ratio <= high))

    def theirs(leaf: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = core.get_policy_loss_fn(theirs_named)(
            old_log_prob=batch.old, log_prob=leaf, advantages=batch.advantages[:, None].expand(B, T),
            response_mask=batch.mask, loss_agg_mode=aggregation, config=config, rollout_is_weights=weights,
        )[0]  # fmt: skip
        return loss

    check_same(batch, settings, theirs)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "opo"])
def test_advantages_are_those_of_verl(estimator: str) -> None:
    core = pytest.importorskip("verl.trainer.ppo.core_algos", reason="needs verl")
    lengths, rewards, groups = (
        [3, 9, 4, 1, 7, 2, 5, 5],
        [0.0, 1.0, 0.5, 1.0, 0.0, 0.0, 1.0, 0.25],
        [0, 0, 0, 0, 1, 1, 1, 1],
    )
    episodes = []
    for i, (length, reward, group) in enumerate(zip(lengths, rewards, groups, strict=True)):
        call = Call(
            call_id=f"c{i}",
            episode_id=f"e{i}",
            index=0,
            prompt_ids=[1, 2],
            output_ids=[3] * length,
            logprobs=[-1.0] * length,
            policy_version=0,
        )
        episodes.append(
            Episode(
                episode_id=f"e{i}",
                group_id=f"g{group}",
                attempt=i,
                calls=(call,),
                rewards=(Reward(value=reward),),
            )
        )
    algorithm = ajet.Config(trainer_common={"loss_type": estimator}).trainer_common.algorithm
    built = build(
        episodes, estimator=algorithm.adv_estimator, normalize_std=algorithm.normalize_std
    )
    mask = (torch.arange(9)[None] < torch.tensor(lengths)[:, None]).double()
    scores = torch.zeros_like(mask)
    scores[:, 0] = torch.tensor(rewards, dtype=torch.float64)
    arguments: dict[str, Any] = {
        "token_level_rewards": scores,
        "response_mask": mask,
        "index": np.array(groups),
    }
    if estimator in ("grpo", "dr_grpo"):
        arguments["norm_adv_by_std_in_grpo"] = estimator == "grpo"
    name = {"dr_grpo": "grpo"}.get(estimator, estimator)
    advantages, _ = core.get_adv_estimator_fn(name)(**arguments)
    for sample in built.samples:
        index = int(sample.episode_id[1:])
        assert sample.advantages[-1] == pytest.approx(float(advantages[index, 0]), abs=1e-5)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "opo"])
def test_a_divergence_in_the_reward_is_that_of_verl(estimator: str) -> None:
    """verl subtracts the estimate in a module that needs its whole trainer; of that only the
    difference is repeated."""
    core = pytest.importorskip("verl.trainer.ppo.core_algos", reason="needs verl")
    batch, coef, groups = stored(), 0.05, np.array([0, 0, 0, 1, 1, 1])
    rewards, lengths = [1.0, 0.0, 1.0, 1.0, 1.0, 1.0], [int(n) for n in batch.mask.sum(-1)]
    scores = torch.zeros_like(batch.mask)
    scores[:, 0] = torch.tensor(rewards, dtype=torch.float64)
    divergence = core.kl_penalty(batch.old, batch.reference, "kl") * batch.mask
    algorithm = ajet.Config(trainer_common={"loss_type": estimator}).trainer_common.algorithm
    arguments: dict[str, Any] = {
        "token_level_rewards": scores - coef * divergence, "response_mask": batch.mask, "index": groups,
    }  # fmt: skip
    if estimator in ("grpo", "dr_grpo"):
        arguments["norm_adv_by_std_in_grpo"] = estimator == "grpo"
    advantages, _ = core.get_adv_estimator_fn(algorithm.adv_estimator)(**arguments)
    episodes = []
    for i, (n, reward, group) in enumerate(zip(lengths, rewards, groups, strict=True)):
        call = Call(
            call_id=f"c{i}",
            episode_id=f"e{i}",
            index=0,
            prompt_ids=[1, 2],
            output_ids=[3] * n,
            logprobs=batch.old[i, :n].tolist(),
            policy_version=0,
        )
        episodes.append(
            Episode(
                episode_id=f"e{i}",
                group_id=f"g{group}",
                attempt=i,
                calls=(call,),
                rewards=(Reward(value=reward),),
            )
        )
    scored = build(episodes, estimator="opd").samples
    rows = [int(sample.episode_id[1:]) for sample in scored]
    rewarded, _ = less_kl(episodes, scored, [batch.reference[i, : lengths[i]] for i in rows], coef)
    built = build(
        rewarded, estimator=algorithm.adv_estimator, normalize_std=algorithm.normalize_std
    )
    assert len(built.samples) == B  # those of equal rewards too
    for sample in built.samples:
        assert sample.advantages[-1] == pytest.approx(
            float(advantages[int(sample.episode_id[1:]), 0]), abs=1e-5
        )


def test_every_named_loss_is_compared() -> None:
    compared = {
        "grpo",
        "dapo",
        "dr_grpo",
        "gspo",
        "cispo",
        "sapo",
        "rloo",
        "opo",
        "reinforce++",
        "tis",
        "icepop",
    }
    assert compared == LOSS_TYPES.keys()
