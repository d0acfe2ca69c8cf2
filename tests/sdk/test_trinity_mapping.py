"""`to_trinity`: every key of ours reaches Trinity, is read by our own code, or is refused or warned
of by name."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from ajet_sdk.backbones.shared.mapping import merged
from ajet_sdk.backbones.shared.steps import total_steps
from ajet_sdk.backbones.trinity.mapping import TrinityPlace, to_trinity
from ajet_sdk.config.config import Config, is_idle, keys, load_config
from ajet_sdk.errors import ConfigError

READ_BY_US = {
    "the driver": {
        "project_name", "experiment_name", "experiment_dir", "backbone", "model.path", "model.recipe",
        "task_reader.", "task_judge.",
        "rollout.user_workflow", "rollout.min_sound_share", "trainer_common.logger", "trainer_common.val_tasks",
        "trainer_common.val_by",
    },
    "our workflow on the nodes": {
        "model.name", "model.tool_call_parser", "rollout.force_disable_toolcalls", "rollout.val_kwargs.",
        "rollout.opponent", "rollout.debug_models", "rollout.trained_seats",
        "rollout.policy_models", "rollout.failure_reward", "rollout.multi_turn.max_steps",
        "rollout.multi_turn.max_sample_per_task", "rollout.gamma", "rollout.trainable_targets",
        "rollout.auxiliary_models", "rollout.on_uncaptured", "rollout.llm_hosts", "rollout.allowed_urls",
        "rollout.picture_hosts",
        "rollout.compute_madness_checklist", "rollout.agent_madness_termination", "rollout.agent_madness_reward",
        "rollout.overlong_buffer", "rollout.overlong_penalty", "rollout.overlong_filtering",
        "data.max_prompt_length", "data.max_response_length", "context_tracker.",
        "trainer_common.algorithm.adv_estimator", "trainer_common.algorithm.normalize_std",
        "trainer_common.save_trajectory_as_json_file",
    },
    "other backbones": {"debug.", "model.api_key_env", "tinker.", "swarm."},
}  # fmt: skip
"""Keys and sections that Trinity need not know of, by who reads them. Everything else is the
mapping's."""

BASE: dict[str, Any] = {
    "experiment_name": "job",
    "backbone": "trinity",
    "model": {"path": "org/model"},
    "trainer_common": {"total_epochs": 3},
}
CPU: dict[str, Any] = {"trainer_common": {"n_gpus_per_node": 0, "use_kl_loss": False}}

TRAIN, VAL = 64, 5
"""Tasks of the job."""

CHANGED: dict[str, Any] = {
    "backbone": "local",
    "data.train_batch_size": 16,
    "model.base_url": "http://127.0.0.1:1/v1",
    "rollout.max_env_worker": 8,
    "rollout.max_response_length_in_one_turn": 100,
    "rollout.max_model_len": 9000,
    "rollout.val_kwargs.num_repeat": 2,
    "task_judge.judge_type": "exact",
    "trainer_common.micro_batch_tokens": 40_000,
    "trainer_common.optim.betas": [0.8, 0.9],
    "trainer_common.algorithm.adv_estimator": "rloo",
    "trainer_common.clip_ratio_low": 0.1,
}
"""Values for keys of which not every other value matters, or is allowed."""

BESIDE: dict[str, dict[str, Any]] = {
    "model.lora.r": {"model": {"lora": {"enabled": True}}},
    "model.lora.alpha": {"model": {"lora": {"enabled": True}}},
    "model.lora.target_modules": {"model": {"lora": {"enabled": True}}},
    "rollout.val_kwargs.num_repeat": {
        "rollout": {"val_kwargs": {"do_sample": True, "temperature": 1.0}}
    },
    "trainer_common.total_steps": {"trainer_common": {"total_epochs": 3}},
}


def place_of(config: Config) -> TrinityPlace:
    """As the driver makes it of a config."""
    common = config.trainer_common
    return TrinityPlace(
        run_id="r1",
        model=config.model.path or "",
        steps=total_steps(config, TRAIN),
        lr=common.optim.lr,
        checkpoints=Path(common.checkpoint_base_dir or "/store"),
        tasks=Path("/store/r1/tasks"),
        val_tasks=VAL if common.val_tasks is None else min(VAL, common.val_tasks),
    )


def mapped(*parts: Mapping[str, Any], **roots: Any) -> dict[str, Any]:
    ours: dict[str, Any] = {}
    for part in (BASE, *parts):
        ours = merged(ours, part)
    config = load_config(values={"ajet": ours, **roots})
    return to_trinity(config, place_of(config))


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def at(mapping: Any, path: str) -> Any:
    for name in path.split("."):
        mapping = mapping[int(name)] if name.isdecimal() else mapping[name]
    return mapping


def leaves() -> list[str]:
    every = list(keys())
    return [path for path in every if not any(other.startswith(f"{path}.") for other in every)]


def another(path: str) -> Any:
    """A valid value that is not the one of BASE."""
    if path in CHANGED:
        return CHANGED[path]
    config: Any = load_config(values=BASE)
    model: type[BaseModel] = Config
    *sections, name = path.split(".")
    for section in sections:
        config, model = getattr(config, section), model.model_fields[section].annotation  # type: ignore[assignment]
    value, kind = getattr(config, name), model.model_fields[name].annotation
    options = [one for one in (kind, *get_args(kind)) if get_origin(one) is Literal]
    if options:
        return next(one for one in get_args(options[0]) if one != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int) or (value is None and int in get_args(kind)):
        return (value or 1) + 1
    if isinstance(value, float) or (value is None and float in get_args(kind)):
        return 0.5 if value != 0.5 else 0.25
    if isinstance(value, list):
        return [*value, *_item(kind)]
    return {"x": "y"} if isinstance(value, dict) else "another"


def _item(kind: Any) -> list[Any]:
    listed = (
        kind
        if get_origin(kind) is list
        else next(one for one in get_args(kind) if get_origin(one) is list)
    )
    (item,) = get_args(listed)
    return (
        [get_args(item)[-1]]
        if get_origin(item) is Literal
        else [{}]
        if item is not str
        else ["another"]
    )


def who_reads(path: str) -> list[str]:
    return [
        who
        for who, known in READ_BY_US.items()
        if any(path == one or (one.endswith(".") and path.startswith(one)) for one in known)
    ]


@pytest.mark.parametrize("path", leaves())
def test_every_key_is_mapped_refused_warned_of_or_read_by_us(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    beside = BESIDE.get(path, {})
    before = mapped(beside)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        try:
            after = mapped(beside, nested(path, another(path)))
        except ConfigError as error:
            assert path.rpartition(".")[2] in str(error)
            return
    said = [record.getMessage() for record in caplog.records if path in record.getMessage()]
    ours = who_reads(path)
    assert after != before or said or ours, (
        f"{path} is lost: Trinity gets the same, and nobody says so"
    )
    if is_idle(path):
        assert said, f"{path} has no effect, and nobody says so"


def test_the_list_of_what_we_read_ourselves_has_nothing_that_is_gone() -> None:
    known = leaves()
    for one in (one for listed in READ_BY_US.values() for one in listed):
        assert any(path == one or (one.endswith(".") and path.startswith(one)) for path in known), (
            one
        )


def test_the_table_of_the_documented_system() -> None:
    """docs of that system: each key and where it goes; expected steps 3, batches of 12 tasks, 5
    attempts, 8 GPUs."""
    made = mapped(
        {
            "data": {"train_batch_size": 12},
            "rollout": {
                "num_repeat": 5,
                "multi_turn": {"expected_steps": 3},
                "n_vllm_engine": 4,
                "max_env_worker": 40,
                "tensor_parallel_size": 2,
                "max_model_len": 900,
                "max_response_length_in_one_turn": 250,
            },
            "trainer_common": {
                "nnodes": 3,
                "n_gpus_per_node": 8,
                "total_epochs": 4,
                "test_freq": 11,
                "save_freq": 13,
                "optim": {"lr": 3e-5},
            },
        }
    )
    table = {
        "cluster.node_num": 3,
        "cluster.gpu_per_node": 8,
        "explorer.eval_interval": 11,
        "trainer.save_interval": 13,
        "algorithm.optimizer.lr": 3e-5,
        "explorer.rollout_model.engine_num": 4,
        "explorer.rollout_model.tensor_parallel_size": 2,
        "model.max_response_tokens": 250,
        "algorithm.repeat_times": 5,
        "model.max_model_len": 900,
        "buffer.batch_size": 12,
        "buffer.train_batch_size": 12 * 5 * 3,
        "buffer.total_steps": 4 * TRAIN // 12,
        "trainer.total_steps": 4 * TRAIN // 12,
    }
    assert {path: at(made, path) for path in table} == table
    # Runners there are episodes, here groups of attempts: as many episodes at once.
    assert (
        at(made, "explorer.runner_per_model") * 5
        <= 40 // 4
        < (at(made, "explorer.runner_per_model") + 1) * 5
    )
    # Metrics go through the driver to every logger of ours, so that Trinity's own is always the way
    # there.
    assert at(made, "monitor.monitor_type").endswith("DriverMonitor")


def test_what_the_other_system_left_out_is_there() -> None:
    common = {"kl_loss_coef": 0.03, "kl_loss_type": "mse", "clip_ratio_low": 0.1, "clip_ratio_high": 0.4,
              "entropy_coef": 0.02, "fsdp_config": {"param_offload": True, "optimizer_offload": True},
              "optim": {"grad_clip": 0.7, "weight_decay": 0.1, "warmup_steps": 2, "betas": [0.8, 0.9]}}  # fmt: skip
    made = mapped({"trainer_common": common})
    algorithm = made["algorithm"]
    assert algorithm["entropy_loss_fn"].endswith("BatchEntropy")
    assert algorithm["entropy_loss_fn_args"] == {"entropy_coef": 0.02}
    loss = algorithm["policy_loss_fn_args"]["settings"]
    assert algorithm["policy_loss_fn"].endswith("BatchLossWithKL")
    assert (loss["kl_coef"], loss["kl_type"]) == (0.03, "mse")
    assert (loss["clip_ratio_low"], loss["clip_ratio_high"]) == (0.1, 0.4)
    assert made["trainer"]["param_offload"] and made["trainer"]["optimizer_offload"]
    assert made["trainer"]["grad_clip"] == algorithm["optimizer"]["clip_grad"] == 0.7
    names = [one["name"] for one in made["buffer"]["explorer_input"]["eval_tasksets"]]
    assert names == ["val", "greedy"]
    without = mapped({"trainer_common": {"use_kl_loss": False}})["algorithm"]
    assert without["policy_loss_fn"].endswith("BatchLoss") and without["algorithm_type"].endswith(
        "WithoutReference"
    )


def test_the_root_trinity_is_merged_last_and_wins() -> None:
    own = {
        "mode": "explore",
        "buffer": {"train_batch_size": 99},
        "algorithm": {"optimizer": {"betas": [0.5, 0.6]}},
    }
    made, without = mapped({}, trinity=own), mapped({})
    assert (made["mode"], made["buffer"]["train_batch_size"]) == ("explore", 99)
    assert made["algorithm"]["optimizer"]["betas"] == [0.5, 0.6]
    expected = copy.deepcopy(without)
    expected["mode"], expected["buffer"]["train_batch_size"] = "explore", 99
    expected["algorithm"]["optimizer"]["betas"] = [0.5, 0.6]
    assert made == expected, "what it does not name stays as it is"
    with pytest.raises(ConfigError, match="trinity"):
        mapped({}, trinity=["mode", "explore"])


@pytest.mark.parametrize(
    ("own", "ours"),
    [
        ({"buffer": {"batch_size": 99}}, "data.train_batch_size"),
        ({"algorithm": {"repeat_times": 99}}, "rollout.num_repeat"),
        ({"trainer": {"total_steps": 99}}, "trainer_common.total_steps"),
        ({"model": {"temperature": 0.5}}, "rollout.temperature"),
        ({"model": {"model_path": "org/other"}}, "model.path"),
        ({"algorithm": {"sample_strategy_args": {"max_staleness": 9}}}, "rollout.max_staleness"),
        ({"algorithm": {"advantage_fn_args": {"multiple_of": 9}}}, "ajet sets this itself"),
        ({"checkpoint_root_dir": "/elsewhere"}, "trainer_common.checkpoint_base_dir"),
        ({"algorithm": {"advantage_fn": "grpo"}}, "trainer_common.algorithm.adv_estimator"),
        ({"algorithm": {"sample_strategy": "staleness_control"}}, "ajet sets this itself"),
        ({"explorer": {"max_repeat_times_per_runner": 2}}, "ajet sets this itself"),
        (
            {
                "buffer": {
                    "trainer_input": {"experience_buffer": {"replay_buffer": {"enable": True}}}
                }
            },
            "ajet sets this itself",
        ),
    ],
)
def test_a_key_of_the_root_that_contradicts_one_that_ajet_goes_by_is_refused(
    own: dict[str, Any], ours: str
) -> None:
    [(section, value)] = own.items()
    path = section
    while isinstance(value, dict):
        [(name, value)] = value.items()
        path = f"{path}.{name}"
    with pytest.raises(ConfigError, match=rf"(?s)trinity\.{path}: .*{ours}"):
        mapped(trinity=own)
    before = mapped()
    mapped(trinity={"buffer": {"batch_size": before["buffer"]["batch_size"]}})  # no contradiction


def synchronizer(own: dict[str, Any], rollout: dict[str, Any] | None = None) -> tuple[int, int]:
    """The steps that the explorer is ahead, and the age from which tokens are left out."""
    made = mapped({"rollout": rollout or {}}, trinity={"synchronizer": own})
    return (
        made["synchronizer"]["sync_offset"],
        made["algorithm"]["sample_strategy_args"]["max_staleness"],
    )


@pytest.mark.parametrize(
    ("own", "rollout", "expected"),
    [
        ({}, {}, (0, 0)),
        ({}, {"max_staleness": 2}, (0, 2)),
        ({"sync_style": "fixed"}, {"max_staleness": 2}, (2, 2)),
        ({"sync_interval": 2}, {}, (0, 1)),  # the guide's example
        ({"sync_interval": 3}, {"max_staleness": 3}, (1, 3)),
        (
            {"sync_offset": 1, "sync_method": "nccl"},
            {},
            (1, 1),
        ),  # AgentJet's config of the math tutorial
        ({"sync_offset": 1}, {"max_staleness": 4}, (1, 4)),
        ({"sync_style": "fully_async"}, {"max_staleness": 4}, (0, 4)),
    ],
)
def test_tokens_may_be_as_old_as_the_intervals_of_the_root_make_them(
    own: dict[str, Any], rollout: dict[str, Any], expected: tuple[int, int]
) -> None:
    assert synchronizer(own, rollout) == expected


@pytest.mark.parametrize(
    ("own", "staleness", "style", "in_flight"),
    [
        ({}, 0, "fixed", 2),
        ({}, 1, "fully_async", 3),
        ({}, 4, "fully_async", 6),
        ({"sync_offset": 1}, 1, "fixed", 3),
        ({"sync_interval": 2}, 1, "fixed", 3),
        ({"sync_style": "fixed"}, 1, "fixed", 3),
    ],
)
def test_a_run_with_staleness_is_asynchronous(
    own: dict[str, Any], staleness: int, style: str, in_flight: int
) -> None:
    made = mapped({"rollout": {"max_staleness": staleness}}, trinity={"synchronizer": own})
    assert made["synchronizer"]["sync_style"] == style
    assert made["explorer"]["max_inflight_batches"] == in_flight


@pytest.mark.parametrize(
    ("own", "rollout", "named"),
    [
        (
            {"sync_interval": 2},
            {"max_staleness": 0},
            "sync_interval: 2 .*rollout.max_staleness: 0.*max_staleness: 1",
        ),
        (
            {"sync_offset": 2},
            {"max_staleness": 1},
            ".*sync_offset: 2 contradicts rollout.max_staleness: 1",
        ),
        ({"sync_style": "fully_async"}, {}, "sync_style: fully_async .*rollout.max_staleness"),
        (
            {"sync_style": "fully_async", "sync_interval": 4},
            {"max_staleness": 2},
            "sync_interval: 4.*rollout.max_staleness: 3",
        ),
        (
            {"explorer_sync_interval": 4},
            {},
            "explorer_sync_interval: 4 contradicts trainer_sync_interval: 1",
        ),
    ],
)
def test_tokens_that_would_be_sampled_to_be_left_out_are_refused(
    own: dict[str, Any], rollout: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=rf"trinity\.synchronizer\.{named}"):
        synchronizer(own, rollout)


def test_the_route_without_gpus_trains_an_adapter_with_the_same_loss() -> None:
    common = {"use_kl_loss": True, "optim": {"warmup_steps": 3, "lr_scheduler_type": "cosine"}}
    made = mapped(CPU, {"trainer_common": common, "model": {"lora": {"enabled": True, "r": 4}}})
    assert (
        made["trainer"]["trainer_type"]
        == made["explorer"]["rollout_model"]["engine_type"]
        == "tinker"
    )
    assert made["model"]["tinker"]["enable"] and made["model"]["tinker"]["rank"] == 4
    algorithm, on_gpus = made["algorithm"], mapped({"trainer_common": common})["algorithm"]
    assert algorithm == on_gpus and algorithm["policy_loss_fn"].endswith("BatchLossWithKL")
    assert made["trainer"]["fix_actor_microbatch_loss_scale"], (
        "else Trinity takes a mean over sequences"
    )


@pytest.mark.parametrize(
    ("ours", "named"),
    [
        ({"trainer_common": {"entropy_coef": 0.1}}, r"trainer_common\.entropy_coef: .*set it to 0"),
        ({"rollout": {"temperature": 0.0}}, r"rollout\.temperature: 0; .*set it above 0"),
        (
            {"trainer_common": {"optim": {"lr_scheduler_type": "linear"}}},
            r"lr_scheduler_type: linear",
        ),
    ],
)
def test_what_the_tinker_api_cannot_do_is_refused_without_gpus(
    ours: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        mapped(CPU, ours)


def test_an_adapter_of_gpus_has_the_settings_of_the_config() -> None:
    lora = {"enabled": True, "r": 24, "alpha": 48, "target_modules": ["q_proj", "mlp.up_proj"]}
    made = mapped({"model": {"lora": lora, "dtype": "bfloat16"}})
    (adapter,) = made["model"]["lora_configs"]
    assert (adapter["lora_rank"], adapter["lora_alpha"]) == (24, 48)
    names = {
        "model.layers.0.self_attn.q_proj": True,
        "q_proj": True,
        "model.layers.0.mlp.up_proj": True,
        "model.layers.0.self_attn.kq_proj": False,
        "model.layers.0.experts.up_proj": False,
        "model.layers.0.mlpxup_proj": False,
    }
    pattern = adapter["target_modules"]
    assert {name: bool(re.fullmatch(pattern, name)) for name in names} == names
    assert made["synchronizer"]["sync_method"] == "memory"
    assert made["trainer"]["save_hf_checkpoint"] == "never"
    assert made["explorer"]["rollout_model"]["enable_runtime_lora_updating"] is True
    actor = made["trainer"]["trainer_config"]["actor_rollout_ref"]["actor"]
    assert actor["fsdp_config"]["model_dtype"] == "bf16"


def test_all_linear_layers_stay_a_word_of_peft() -> None:
    made = mapped({"model": {"lora": {"enabled": True}}})
    assert made["model"]["lora_configs"][0]["target_modules"] == "all-linear"


@pytest.mark.parametrize(
    ("trinity", "named"),
    [
        ({"model": {"lora_configs": [{"lora_rank": 8}]}}, "model.lora_configs"),
        ({"synchronizer": {"sync_method": "nccl"}}, "synchronizer.sync_method"),
        ({"synchronizer": {"sync_method": "checkpoint"}}, "synchronizer.sync_method"),
        ({"trainer": {"trainer_strategy": "megatron"}}, "trainer.trainer_strategy"),
        (
            {"explorer": {"rollout_model": {"enable_runtime_lora_updating": False}}},
            "explorer.rollout_model.enable_runtime_lora_updating",
        ),
        ({"explorer": {"rollout_model": {"engine_type": "sglang"}}}, "engine_type"),
    ],
)
def test_what_would_sample_or_hand_over_another_adapter_is_refused(
    trinity: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=rf"trinity\.(.*\.)?{re.escape(named)}: "):
        mapped({"model": {"lora": {"enabled": True}}}, trinity=trinity)


def test_an_adapter_under_trinity_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trinity\.model\.lora_configs: .*model\.lora"):
        mapped(trinity={"model": {"lora_configs": [{"lora_rank": 8}]}})


def test_a_rank_that_vllm_cannot_serve_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.lora\.r: 513"):
        mapped({"model": {"lora": {"enabled": True, "r": 513}}})


def test_everything_that_cant_be_honoured_is_told_at_once() -> None:
    wrong = {
        "rollout": {"sampling": "request", "n_vllm_engine": 8},
        "trainer_common": {"optim": {"lr_scheduler_type": "linear"}, "mini_batch_num": 2,
                           "algorithm": {"adv_estimator": "reinforce_plus_plus", "use_kl_in_reward": True}},
    }  # fmt: skip
    with pytest.raises(ConfigError) as told:
        mapped(wrong)
    for named in ("rollout.sampling", "n_vllm_engine", "lr_scheduler_type", "mini_batch_num", "reinforce_plus_plus",
                  "use_kl_in_reward"):  # fmt: skip
        assert named in str(told.value)


@pytest.mark.parametrize(
    ("machines", "engines", "named"),
    [
        (
            (4, 8),
            {"n_vllm_engine": 10, "tensor_parallel_size": 2},
            "remaining 12 .* to 4, 8, 12, 13, 14, 15, or null",
        ),
        ((2, 8), {"n_vllm_engine": 1}, "the remaining 15 are not whole machines; set it to 8, 9, "),
        (
            (2, 8),
            {"n_vllm_engine": 16},
            "16 × 1 of 2 × 8 GPUs sample, and no GPU is left for training",
        ),
        ((2, 8), {"tensor_parallel_size": 3}, "tensor_parallel_size: 3 of 2 × 8 GPUs"),
        ((1, 1), {}, "with one GPU use backbone local or verl"),
    ],
)
def test_engines_that_leave_no_whole_machine_are_refused_with_those_that_do(
    machines: tuple[int, int], engines: dict[str, Any], named: str
) -> None:
    nodes, gpus = machines
    with pytest.raises(ConfigError, match=named):
        mapped({"rollout": engines, "trainer_common": {"nnodes": nodes, "n_gpus_per_node": gpus}})


def test_the_config_is_the_same_wherever_it_is_made() -> None:
    assert mapped({}) == mapped({})
