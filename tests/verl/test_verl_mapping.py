"""A config of ours as verl's: what each key becomes, what is refused, and who wins. Needs no
verl."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.backbones.shared.mapping import merged
from ajet_sdk.backbones.verl.mapping import VerlPlace, rows_of, to_verl
from ajet_sdk.config.config import load_config
from ajet_sdk.errors import ConfigError

BASE: dict[str, Any] = {
    "backbone": "verl",
    "experiment_name": "mapping",
    "model": {"path": "org/model"},
    "trainer_common": {"use_kl_loss": False, "optim": {"warmup_steps": 0}},
}


def mapped(
    config: dict[str, Any] | None = None, roots: dict[str, Any] | None = None, val_tasks: int = 3
) -> Any:
    loaded = load_config(values={"ajet": merged(BASE, config or {}), **(roots or {})})
    place = VerlPlace(
        run_id="r",
        model="org/model",
        steps=5,
        lr=1e-5,
        checkpoints=Path("/store"),
        val_tasks=val_tasks,
    )
    return to_verl(loaded, place)


def test_a_batch_has_a_row_for_each_timeline_and_fits_the_gpus() -> None:
    config = {
        "data": {"train_batch_size": 3},
        "rollout": {"num_repeat": 5, "multi_turn": {"expected_steps": 2}},
        "trainer_common": {"nnodes": 2, "n_gpus_per_node": 4},
    }
    assert rows_of(load_config(values=merged(BASE, config))) == 32  # 30, and 8 GPUs
    made = mapped(config)
    assert (
        made["data"]["train_batch_size"]
        == made["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"]
        == 32
    )
    assert made["data"]["train_files"] == 5 * 32 and made["actor_rollout_ref"]["rollout"]["n"] == 1


def test_one_update_a_step_with_the_local_loss() -> None:
    made = mapped(
        {
            "trainer_common": {
                "clip_ratio_low": 0.1,
                "entropy_coef": 0.02,
                "optim": {"grad_clip": 0.5},
            }
        }
    )
    actor = made["actor_rollout_ref"]["actor"]
    assert (actor["clip_ratio_low"], actor["clip_ratio_high"], actor["loss_agg_mode"]) == (
        0.1,
        0.28,
        "token-mean",
    )
    assert (
        actor["ppo_epochs"] == 1 and actor["clip_ratio_c"] > 1e6 and actor["entropy_coeff"] == 0.02
    )
    assert actor["grad_clip"] == actor["optim"]["clip_grad"] == 0.5 and actor["optim"]["lr"] == 1e-5
    assert made["algorithm"]["rollout_correction"]["bypass_mode"] is True
    assert made["actor_rollout_ref"]["rollout"]["calculate_log_probs"] is True


def test_it_validates_only_where_there_is_something_to_validate_on() -> None:
    config = {"trainer_common": {"val_before_train": True, "test_freq": 2}}
    with_tasks, without = mapped(config)["trainer"], mapped(config, val_tasks=0)["trainer"]
    assert (with_tasks["test_freq"], with_tasks["val_before_train"]) == (2, True)
    assert (without["test_freq"], without["val_before_train"]) == (-1, False)
    assert mapped({"trainer_common": {"test_freq": 0}})["trainer"]["test_freq"] == 5, (
        "at the end, as local"
    )


def test_precision_and_memory() -> None:
    made = mapped(
        {
            "model": {
                "dtype": "float32",
                "attn_implementation": "sdpa",
            },
            "trainer_common": {"fsdp_config": {"param_offload": True, "optimizer_offload": True}},
        }
    )["actor_rollout_ref"]
    assert made["actor"]["fsdp_config"]["mixed_precision"]["param_dtype"] == "fp32"
    assert (
        made["actor"]["fsdp_config"]["optimizer_offload"]
        and made["ref"]["fsdp_config"]["param_offload"]
    )
    assert made["model"]["override_config"] == {"attn_implementation": "sdpa"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"trainer_common": {"n_gpus_per_node": 0}}, "n_gpus_per_node: 0"),
    ({"rollout": {"sampling": "request"}}, "rollout.sampling"),
    ({"trainer_common": {"mini_batch_num": 2}}, "mini_batch_num"),
    ({"trainer_common": {"ppo_epochs": 2}}, "ppo_epochs"),
    ({"trainer_common": {"algorithm": {"use_kl_in_reward": True}}}, "use_kl_in_reward"),
    ({"trainer_common": {"optim": {"lr_scheduler_type": "linear"}}}, "linear"),
    ({"model": {"lora": {"enabled": True}}}, "model.lora.enabled: false"),
    (
        {"rollout": {"tensor_parallel_size": 3}},
        "tensor_parallel_size: 3 does not divide the run's 8 GPUs",
    ),
    (
        {"trainer_common": {"ulysses_sequence_parallel_size": 5}},
        "ulysses_sequence_parallel_size: 5",
    ),
]


@pytest.mark.parametrize(("config", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_what_would_give_another_result_is_an_error(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        mapped(config)


@pytest.mark.parametrize(
    "model", [{"lora_rank": 8}, {"lora": {"rank": 8}}, {"lora_adapter_path": "adapter"}]
)
def test_an_adapter_in_the_root_verl_is_an_error_too(model: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"verl\.actor_rollout_ref\.model\.lora"):
        mapped({}, {"verl": {"actor_rollout_ref": {"model": model}}})


def test_everything_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        mapped(merged(REFUSED[1][0], REFUSED[2][0]))
    assert "rollout.sampling" in str(raised.value) and "mini_batch_num" in str(raised.value)


def test_what_has_no_effect_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ajet"):
        mapped()
        assert not caplog.records
        mapped({"rollout": {"max_staleness": 1}, "trainer_common": {"optim": {"warmup_steps": 5}}})
    assert "rollout.max_staleness" in caplog.text and "warmup_steps" in caplog.text


def test_the_root_verl_wins() -> None:
    made = mapped(
        roots={
            "verl": {
                "trainer": {"save_freq": 3},
                "actor_rollout_ref": {"rollout": {"dtype": "half"}},
            }
        }
    )
    assert made["trainer"]["save_freq"] == 3 and made["trainer"]["project_name"] == "ajet"
    assert made["actor_rollout_ref"]["rollout"]["dtype"] == "half"
    with pytest.raises(ConfigError, match="must be a mapping"):
        mapped(roots={"verl": ["trainer"]})


def test_a_key_of_the_root_that_contradicts_ours_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"verl\.trainer\.nnodes: 3 contradicts trainer_common\.nnodes \(1\)"
    ):
        mapped(roots={"verl": {"trainer": {"nnodes": 3}}})
