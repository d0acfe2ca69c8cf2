"""`to_trinity`: converts ajet's config to a Trinity-RFT config (0.6), with a function per section.

`is_on_cpu` chooses between Trinity's trainers: `tinker`, served by `ajet trainer serve` on a CPU,
and verl with vLLM.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ajet_sdk.backbones.shared.mapping import (
    MICRO_BATCH_TOKENS,
    Place,
    dtype,
    merge_root,
    mixed_precision,
    optimizer,
    refuse,
    reply_and_prompt,
    unsupported_keys,
    value_at,
    warn,
)
from ajet_sdk.backbones.trinity.placement import engines, misplaced
from ajet_sdk.backbones.trinity.reports import reports_of
from ajet_sdk.cluster.mailbox import namespace_of
from ajet_sdk.config.objective import objective_of
from ajet_sdk.engines.vllm.server import LARGEST_RANK
from ajet_sdk.errors import ConfigError

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

ALTERNATING = "rehearsal"
"""The root of a config that replaces the judge's rewards by 0 and 1 in turn, so that there is
something to learn."""
_HERE = "ajet_sdk.backbones.trinity"
_NEVER = 1_000_000_000
_RUNNERS_WITHOUT_GPU = 2
"""Each is a process that takes seconds to start, and all wait for one learner."""


@dataclass(frozen=True, kw_only=True)
class TrinityPlace(Place):
    name: ClassVar[str] = "trinity"

    tasks: Path
    """The directory with `train.jsonl` and `val.jsonl`."""
    ray_address: str = "auto"
    workflow_args: Mapping[str, object] | None = None
    """Arguments of the workflow on every node."""
    flash_attention: bool = False
    """Whether flash-attn is installed; without it verl uses sdpa with padding."""
    is_given: bool = False
    """Whether the driver collects the episodes, from the clients of a swarm, in place of runners
    that make them."""


def is_on_cpu(config: Config) -> bool:
    return config.trainer_common.n_gpus_per_node == 0


def trains_adapter(config: Config) -> bool:
    """Whether verl trains a LoRA adapter. Without GPUs, ajet's learner always trains one."""
    return config.model.lora.enabled and not is_on_cpu(config)


def to_trinity(config: Config, place: TrinityPlace) -> dict[str, object]:
    """The Trinity config of a run of `config` at `place`; the root `trinity:` of the file takes
    precedence.

    Raises ConfigError that lists all unsupported keys.
    """
    check(config)
    warn(config, "trinity", _WITHOUT_EFFECT)
    common = config.trainer_common
    computed = {
        "mode": "both",
        "project": place.run_id,
        "name": place.name,
        "checkpoint_root_dir": str(place.checkpoints),
        "ray_namespace": namespace_of(place.run_id),
        "continue_from_checkpoint": True,  # the directory belongs to this run
        "ignore_validator_suggestions": True,  # one of Trinity's validators would wait for input
        "algorithm": _algorithm(config, place),
        "model": _model(config, place),
        "cluster": {
            "ray_address": place.ray_address,
            "node_num": common.nnodes,
            "gpu_per_node": common.n_gpus_per_node,
        },
        "buffer": _buffer(config, place),
        "data_processor": {"experience_pipeline": {"save_input": False}},
        "explorer": _explorer(config, place),
        "trainer": _trainer(config, place),
        "synchronizer": {
            "sync_method": "memory" if is_on_cpu(config) or trains_adapter(config) else "nccl",
            "sync_style": _sync_style(config),
            "sync_interval": 1,
            "sync_timeout": 3600,
        },
        "monitor": {
            "monitor_type": f"{_HERE}.plugins.DriverMonitor",
            "monitor_args": {"run_id": place.run_id},
        },
    }
    ours = _OURS | _OURS_OF_ADAPTER if trains_adapter(config) else _OURS
    whole = merge_root(computed, config, "trinity", ours)
    _bound_staleness(whole, config)
    return whole


_OURS = {
    "project": "",
    "name": "",
    "ray_namespace": "",
    "continue_from_checkpoint": "",
    "checkpoint_root_dir": "trainer_common.checkpoint_base_dir",
    "model.model_path": "model.path",
    "model.lora_configs": "model.lora",
    "model.temperature": "rollout.temperature",
    "model.top_p": "rollout.top_p",
    "model.top_k": "rollout.top_k",
    "algorithm.repeat_times": "rollout.num_repeat",
    # What replaces these would train other advantages, or steps that are not whole.
    "algorithm.advantage_fn": "trainer_common.algorithm.adv_estimator",
    "algorithm.sample_strategy": "",
    "buffer.trainer_input.experience_buffer.replay_buffer.enable": "",
    "explorer.max_repeat_times_per_runner": "",
    "algorithm.sample_strategy_args.run_id": "",
    "algorithm.sample_strategy_args.ranks": "",
    "algorithm.sample_strategy_args.max_staleness": "rollout.max_staleness",
    "algorithm.sample_strategy_args.carry_over": "rollout.carry_over",
    "algorithm.sample_strategy_args.reports": "",
    "algorithm.advantage_fn_args.multiple_of": "",
    "buffer.batch_size": "data.train_batch_size",
    "buffer.total_steps": "trainer_common.total_steps",
    "trainer.total_steps": "trainer_common.total_steps",
}
"""See `merge_root`. Driver and agents use these keys, too; all others may be overridden."""

_OURS_OF_ADAPTER = {
    "synchronizer.sync_method": "",
    "trainer.trainer_type": "",
    "trainer.trainer_strategy": "",
    "trainer.save_hf_checkpoint": "",
    "explorer.rollout_model.enable_lora": "",
    "explorer.rollout_model.enable_runtime_lora_updating": "",
    "explorer.rollout_model.lora_modules": "",
    "explorer.rollout_model.lora_kwargs": "",
    "explorer.rollout_model.engine_type": "",
}
"""Further ones if an adapter is trained: `adapters` and `adapter_trainer` work with these alone."""


_ASYNC = "fully_async"
_OF_FIXED = ("sync_offset", "sync_interval", "explorer_sync_interval", "trainer_sync_interval")


def _sync_style(config: Config) -> str:
    """Asynchronous if `rollout.max_staleness` is above 0, unless `trinity:` says how far explorer
    and trainer are apart."""
    own = value_at(config.roots.plain(), "trinity.synchronizer")
    is_set = isinstance(own, Mapping) and any(name in own for name in _OF_FIXED)
    return _ASYNC if config.rollout.max_staleness and not is_set else "fixed"


def _bound_staleness(whole: dict[str, Any], config: Config) -> None:
    """Limit the explorer's lead by `rollout.max_staleness`, or derive the limit from `trinity:`.

    If weights are synchronized every I steps and the explorer is K steps ahead, a token is at most
    K + I - 1 updates old. In the asynchronous style our explorer paces itself by the limit
    (`actors.SteadyExplorer`). Raises ConfigError if both are set and tokens would be too old for
    training, or the pace could not be kept.
    """
    synchronizer = whole["synchronizer"]
    rollout = config.rollout
    if not isinstance(synchronizer, dict):
        return  # Trinity's types refuse it later
    interval = synchronizer["sync_interval"]
    style = str(synchronizer["sync_style"])
    intervals = [
        synchronizer.get(f"{who}_sync_interval") or interval for who in ("explorer", "trainer")
    ]
    offset = value_at(config.roots.plain(), "trinity.synchronizer.sync_offset")
    if config.is_set("rollout.max_staleness"):
        bound = rollout.max_staleness
    else:
        bound = None
    if not all(isinstance(number, int) for number in (*intervals, offset or 0)):
        return
    if style != _ASYNC and rollout.carry_over:
        raise ConfigError(
            f"trinity.synchronizer.sync_style: {style}: rollout.carry_over works in the style"
            f" {_ASYNC}; remove what `trinity: {{synchronizer: …}}` sets"
        )
    if style != "fixed":
        if bound is None:
            raise ConfigError(
                f"trinity.synchronizer.sync_style: {style} does not bound how old tokens are; set "
                "rollout.max_staleness, the maximum age of a trained token in updates"
            )
        least = intervals[1] - 1 + rollout.carry_over
        if style == _ASYNC and least > bound:
            raise ConfigError(
                f"trinity.synchronizer.sync_interval: {intervals[1]}: weights travel every"
                f" {intervals[1]} updates, so tokens are up to {least} updates old when"
                f" they are trained, and rollout.max_staleness: {bound} could not be kept; set"
                f" rollout.max_staleness: {least} or more"
            )
        age = bound
    elif intervals[0] != intervals[1]:
        raise ConfigError(
            f"trinity.synchronizer.explorer_sync_interval: {intervals[0]} contradicts"
            f" trainer_sync_interval: {intervals[1]}; with sync_style fixed explorer and trainer"
            " wait for each other: set sync_interval alone"
        )
    else:
        ahead = intervals[0] - 1
        if offset is None:
            offset = max(0, (bound or 0) - ahead)
        age = offset + ahead
        if bound is not None and age > bound:
            raise ConfigError(
                f"trinity.synchronizer.sync_interval: {intervals[0]} with sync_offset: {offset}"
                f" contradicts rollout.max_staleness: {bound}: tokens are up to {age} updates old,"
                f" and those older than {bound} are not trained; set rollout.max_staleness: {age},"
                " or leave it out"
            )
    synchronizer["sync_offset"] = offset or 0
    whole["algorithm"]["sample_strategy_args"]["max_staleness"] = age if bound is None else bound


def _algorithm(config: Config, place: TrinityPlace) -> dict[str, object]:
    """Unchanged advantages, whole steps, and the loss. `launch.validate_config` adds the number of
    ranks."""
    # The trainer without GPUs always reads the reference's log-probabilities.
    reference = config.trainer_common.use_kl_loss or is_on_cpu(config)
    return {
        "algorithm_type": (
            f"{_HERE}.batches.WithReference" if reference else f"{_HERE}.batches.WithoutReference"
        ),
        "repeat_times": config.rollout.num_repeat,
        "advantage_fn": f"{_HERE}.batches.GivenAdvantages",
        "sample_strategy": f"{_HERE}.batches.WholeSteps",
        "sample_strategy_args": {
            "run_id": place.run_id,
            "loss_aggregation": config.trainer_common.loss_aggregation,
            "loss_length": objective_of(config)["loss_length"],
            "carry_over": config.rollout.carry_over,
            "reports": str(reports_of(place.directory)),
        },
        **_loss(config),
        "loss_agg_mode": "token-mean",
        "kl_penalty_fn": "none",
        "optimizer": optimizer(config, place),
    }


def _loss(config: Config) -> dict[str, object]:
    """The objective, the KL term and the entropy bonus of `plugins`."""
    common = config.trainer_common
    kl = common.use_kl_loss
    entropy = common.entropy_coef
    if kl:
        ours = f"{_HERE}.plugins.BatchLossWithKL"
    else:
        ours = f"{_HERE}.plugins.BatchLoss"
    return {
        "policy_loss_fn": ours,
        "policy_loss_fn_args": {"settings": objective_of(config)},
        "kl_loss_fn": "none",
        "kl_loss_fn_args": {},
        "entropy_loss_fn": f"{_HERE}.plugins.BatchEntropy" if entropy else "none",
        "entropy_loss_fn_args": {"entropy_coef": entropy},
    }


def _model(config: Config, place: TrinityPlace) -> dict[str, object]:
    rollout = config.rollout
    reply, prompt = reply_and_prompt(config)
    # Without the output layer, whose adapter could not be merged if it is tied to the embeddings.
    adapter = {
        "enable": True,
        "rank": config.model.lora.r,
        "seed": config.trainer_common.seed,
        "train_unembed": False,
    }
    return {
        "model_path": place.model,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "max_model_len": rollout.max_model_len,
        "max_response_tokens": reply,
        "max_prompt_tokens": prompt,
        "enable_prompt_truncation": False,
        **({"tinker": adapter} if is_on_cpu(config) else {}),
        **({"lora_configs": [_adapter(config, place)]} if trains_adapter(config) else {}),
    }


def _adapter(config: Config, place: TrinityPlace) -> dict[str, object]:
    """The adapter of verl's trainer."""
    lora = config.model.lora
    targets = lora.target_modules
    if not isinstance(targets, str):
        # Trinity takes a pattern of whole names; peft reads a list as ends of names.
        targets = rf"(.*\.)?({'|'.join(re.escape(name) for name in targets)})"
    return {
        "name": "adapter",
        "lora_rank": lora.r,
        "lora_alpha": lora.alpha,
        "target_modules": targets,
        # Without a path Trinity would make a model with random weights here, to save its adapter.
        # A dummy has a path that nobody reads, as verl makes the first adapter.
        "path": str(place.directory / "adapters"),
        "is_dummy": True,
    }


def _buffer(config: Config, place: TrinityPlace) -> dict[str, object]:
    size = config.data.train_batch_size
    rollout = config.rollout
    return {
        "batch_size": size,
        "train_batch_size": size * rollout.num_repeat * rollout.multi_turn.expected_steps,
        "total_steps": place.steps,
        "explorer_input": _tasks(config, place),
        "trainer_input": {
            "experience_buffer": {
                "name": f"ajet-{place.run_id}",
                "storage_type": "queue",
                "path": f"sqlite:///{place.directory / 'buffer' / 'experiences.db'}",
                "max_read_timeout": _NEVER,
            }
        },
    }


def _tasks(config: Config, place: TrinityPlace) -> dict[str, object]:
    common = config.trainer_common
    workflow = f"{_HERE}.workflow.AjetWorkflow"
    arguments = dict(place.workflow_args or {})
    if place.is_given:
        workflow = f"{_HERE}.workflow.GivenWorkflow"
        arguments = {"run_id": place.run_id, "positions": config.data.train_batch_size}

    def taskset(name: str, part: str, **more: object) -> dict[str, object]:
        return {
            "name": name,
            "storage_type": "file",
            "path": str(place.tasks / part),
            "default_workflow_type": workflow,
            **more,
        }

    evaluation = []
    if place.val_tasks:
        evaluation = [
            taskset(
                "val",
                "val",
                repeat_times=max(1, config.validation_attempts),
                workflow_args=arguments,
            ),
            taskset("greedy", "val", repeat_times=1, workflow_args={**arguments, "greedy": True}),
        ]
    order = {"selector_type": f"{_HERE}.batches.OrderOfLocal", "seed": common.seed}
    return {
        "tasksets": [taskset("train", "train", data_selector=order, workflow_args=arguments)],
        "eval_tasksets": evaluation,
        "default_workflow_type": workflow,
    }


def _explorer(config: Config, place: TrinityPlace) -> dict[str, object]:
    common = config.trainer_common
    rollout = config.rollout
    runners = _runners(config)
    longest = (rollout.timeout + rollout.judge_timeout) * (rollout.max_retries + 1)
    return {
        "runner_per_model": min(runners, _RUNNERS_WITHOUT_GPU) if is_on_cpu(config) else runners,
        # how long clients take is for `swarm.step_timeout` to say
        "max_timeout": _NEVER if place.is_given else math.ceil(longest),
        "max_retry_times": 1,
        "eval_interval": common.test_freq if common.test_freq > 0 else place.steps + 1,
        "eval_on_startup": common.val_before_train and place.val_tasks > 0,
        # one more than the explorer's own pace allows
        "max_inflight_batches": rollout.max_staleness + 2,
        "rollout_model": {
            "engine_type": "tinker" if is_on_cpu(config) else "vllm",
            "engine_num": engines(config),
            "tensor_parallel_size": rollout.tensor_parallel_size,
            "enable_openai_api": True,
            "enable_history": False,
            "enable_prefix_caching": True,
            "gpu_memory_utilization": rollout.gpu_memory_utilization or 0.85,
            "dtype": dtype(config),
            "seed": common.seed,
            # Trinity sets `processed_logprobs`: log-probabilities of the distribution sampled from.
            "extra_engine_args": {"max_num_seqs": rollout.max_num_seqs},
            **({"enable_runtime_lora_updating": True} if trains_adapter(config) else {}),
        },
    }


def _runners(config: Config) -> int:
    """Runner processes per engine; each runs the attempts at a task concurrently."""
    at_once = config.rollout.max_env_worker // (engines(config) * config.rollout.num_repeat)
    return max(1, min(at_once, math.ceil(config.data.train_batch_size / engines(config))))


def _trainer(config: Config, place: TrinityPlace) -> dict[str, object]:
    common = config.trainer_common
    return {
        "trainer_type": "tinker" if is_on_cpu(config) else "verl",
        "total_steps": place.steps,
        "save_interval": common.save_freq if common.save_freq > 0 else place.steps,
        # verl's model with an adapter has names that transformers doesn't know.
        "save_hf_checkpoint": "never" if trains_adapter(config) else "last",
        "grad_clip": common.optim.grad_clip,
        "max_checkpoints_to_keep": common.keep_checkpoints,
        "max_token_len_per_gpu": max(
            config.rollout.max_model_len, common.micro_batch_tokens or MICRO_BATCH_TOKENS
        ),
        "ulysses_sequence_parallel_size": common.ulysses_sequence_parallel_size,
        "param_offload": common.fsdp_config.param_offload,
        "optimizer_offload": common.fsdp_config.optimizer_offload,
        # The losses are scaled to the batch; Trinity's trainer without GPUs would average over
        # sequences.
        **(
            {"fix_actor_microbatch_loss_scale": True} if is_on_cpu(config) else _verl(config, place)
        ),
    }


def _verl(config: Config, place: TrinityPlace) -> dict[str, object]:
    wanted = config.model.attn_implementation
    if wanted == "auto":
        wanted = "flash_attention_2" if place.flash_attention else "sdpa"
    precision = mixed_precision(config)
    fsdp: dict[str, object] = {"mixed_precision": precision}
    if trains_adapter(config):
        # The base model is frozen, so it has the type of the sampler's.
        fsdp["model_dtype"] = precision["param_dtype"]
    engine = {"fsdp_config": fsdp}
    model = {"override_config": {"attn_implementation": wanted}}
    return {
        "trainer_strategy": "fsdp2",
        "use_remove_padding": wanted.startswith("flash"),
        "trainer_config": {"actor_rollout_ref": {"model": model, "actor": engine, "ref": engine}},
    }


def check(config: Config) -> None:
    """Raise ConfigError that lists the keys that Trinity does not support."""
    common = config.trainer_common
    cpu = is_on_cpu(config)
    wrong = unsupported_keys(config, "Trinity")
    if trains_adapter(config) and config.model.lora.r > LARGEST_RANK:
        wrong.append(
            f"model.lora.r: {config.model.lora.r}; vLLM serves adapters of a rank up to"
            f" {LARGEST_RANK}"
        )
    if common.algorithm.adv_estimator == "reinforce_plus_plus":
        wrong.append(
            "trainer_common.algorithm.adv_estimator: reinforce_plus_plus normalizes over the whole"
            " batch, whose groups are on different nodes with Trinity; use grpo or rloo"
        )
    schedule = value_at(config.roots.plain(), "trinity.algorithm.optimizer.lr_scheduler_type")
    if common.optim.lr_scheduler_type == "linear" and schedule is None:
        wrong.append(
            "trainer_common.optim.lr_scheduler_type: linear; Trinity supports constant and cosine,"
            " or set trinity.algorithm.optimizer.lr_scheduler_type, which takes precedence"
        )
    if common.mini_batch_num > 1 or common.ppo_epochs > 1:
        wrong.append(
            "trainer_common.mini_batch_num and ppo_epochs must be 1: a Trinity step is a single"
            " update with the whole batch"
        )
    if cpu and common.entropy_coef:
        wrong.append(
            "trainer_common.entropy_coef: without GPUs Trinity's trainer sees no distribution; set"
            " it to 0"
        )
    if cpu and not config.rollout.temperature:
        wrong.append(
            "rollout.temperature: 0; tokens are scored at the temperature that they are sampled at;"
            " set it above 0"
        )
    if not cpu and (trouble := misplaced(config)) is not None:
        wrong.append(trouble)
    refuse("trinity", wrong)


_WITHOUT_EFFECT = {
    "model.gradient_checkpointing": "verl always recomputes activations",
    "model.vision_tower": "pictures are taken without GPUs alone, where a LoRA adapter leaves the"
    " vision tower as it is",
    "model.device": "Trinity places models by trainer_common.nnodes and n_gpus_per_node",
}
