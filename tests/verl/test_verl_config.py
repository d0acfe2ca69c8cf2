"""What we map is what verl knows: its own checks take it, and a misspelt key of `verl:` is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs verl, see CONTRIBUTING.md")
pytest.importorskip("ray", reason="needs Ray, see CONTRIBUTING.md")

from ajet_sdk.backbones.shared.mapping import merged
from ajet_sdk.backbones.verl.backbone import compose_config, validate_config
from ajet_sdk.errors import ConfigError

from .configs import config_of, mapping_of


@pytest.mark.parametrize(
    "more", [{}, {"use_kl_loss": True, "entropy_coef": 0.01}, {"ulysses_sequence_parallel_size": 2}]
)
def test_verls_own_checks_take_the_config(more: dict[str, Any], tmp_path: Path) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    config = validate_config(mapping_of(config_of(**more), tmp_path))
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == config.data.train_batch_size == 32
    assert need_reference_policy(config) is bool(more.get("use_kl_loss"))
    assert not need_critic(config)


def test_verls_workers_can_read_what_they_are_given(tmp_path: Path) -> None:
    """The dataclasses that verl's processes make of their parts of the config."""
    from verl.utils.config import omega_conf_to_dataclass

    config = compose_config(mapping_of(config_of(optim={"lr_scheduler_type": "cosine"}), tmp_path))
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert (
        actor.engine.strategy == "fsdp2" and actor.engine.mixed_precision["param_dtype"] == "bf16"
    )
    assert actor.optim.clip_grad == 1.0 and list(actor.optim.betas) == [0.9, 0.95]
    assert actor.optim.lr_scheduler_type == "cosine"
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.policy_loss.loss_mode) == (
        0.1,
        0.28,
        "vanilla",
    )
    assert "hf_model" in actor.checkpoint.save_contents
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert rollout.agent.agent_loop_manager_class == "ajet_sdk.backbones.verl.manager.AjetManager"
    assert rollout.calculate_log_probs and rollout.logprobs_mode == "processed_logprobs"
    assert rollout.max_model_len == rollout.prompt_length + rollout.response_length == 18000


def test_verl_finds_our_manager_and_our_slots(tmp_path: Path) -> None:
    from verl.trainer.main_ppo import create_rl_dataset, create_rl_sampler
    from verl.utils.import_utils import load_class_from_fqn

    config = compose_config(mapping_of(config_of(), tmp_path))
    manager = load_class_from_fqn(
        config.actor_rollout_ref.rollout.agent.agent_loop_manager_class, "AgentLoopManager"
    )
    assert callable(manager.create)
    train = create_rl_dataset(config.data.train_files, config.data, None, None)
    assert len(train) == 4 * 32 and list(create_rl_sampler(config.data, train)) == list(range(128))
    assert len(create_rl_dataset(config.data.val_files, config.data, None, None)) == 3


def test_a_key_that_verl_does_not_know_is_told(tmp_path: Path) -> None:
    mapping = merged(
        mapping_of(config_of(), tmp_path), {"actor_rollout_ref": {"actor": {"clip_ration": 1}}}
    )
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.actor\.clip_ration"):
        compose_config(mapping)
    added = {
        "actor_rollout_ref": {"rollout": {"engine_kwargs": {"vllm": {"swap_space": 1}}}},
        "+more": {"a": 1},
    }
    config = compose_config(merged(mapping_of(config_of(), tmp_path), added))
    assert (
        config.more.a == 1 and config.actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space == 1
    )


def test_what_verl_refuses_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="verl rejected the config: Invalid loss_agg_mode"):
        validate_config(
            merged(
                mapping_of(config_of(), tmp_path),
                {"actor_rollout_ref": {"actor": {"loss_agg_mode": "sum"}}},
            )
        )
