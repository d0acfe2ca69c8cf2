"""`to_trinity`: a config of ours as a Trinity-RFT config (0.6), key by key.

A key that Trinity can't honour is an error where the result would differ, and a warning where it would not. The root
`trinity:` of the same file is merged last and wins.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.errors import ConfigError

if TYPE_CHECKING:
    from ajet_sdk.config import Config

__all__ = ["ALTERNATING", "NAME", "Place", "merged", "schedule_is_trinitys", "to_trinity"]

log = logging.getLogger("ajet")

ALTERNATING = "rehearsal"
"""The root of a config under which rewards of 0 and 1 in turn stand in for the judge's, so that something is learnt."""
NAME = "trinity"
"""The name of the job inside the run's checkpoint directory."""
_HERE = "ajet_sdk.backbones.trinity"
_DUAL_CLIP_OFF = 1e9
"""Trinity clips the loss of tokens with a negative advantage at this multiple; the local loss does not."""
_NEVER = 1_000_000_000
_RUNNERS_WITHOUT_GPU = 2
"""Each is a process that takes seconds to start, and they all wait for one learner."""


@dataclass(frozen=True)
class Place:
    """Where a run is, and what it needs besides the config: the same config gives the same Trinity config anywhere."""

    run_id: str
    model: str
    """A directory that every node can read, or a hub name."""
    steps: int
    """Training steps of the run."""
    lr: float | None
    """None where it is decided by the model's size, which is not known yet."""
    checkpoints: Path
    """The checkpoint store, which every node can reach; Trinity's job lies in `{checkpoints}/{run_id}/trinity`."""
    tasks: Path
    """The directory with `train.jsonl` and `val.jsonl`."""
    val_tasks: int = 0
    """How many tasks there are for validation."""
    ray_address: str = "auto"
    workflow_args: Mapping[str, Any] | None = None
    """What our workflow is given on every node."""
    flash_attention: bool = False
    """Whether flash-attn is installed; without it verl attends with sdpa and keeps its padding."""

    @property
    def directory(self) -> Path:
        """Where Trinity keeps this job's checkpoints, buffers and logs."""
        return self.checkpoints / self.run_id / NAME


def to_trinity(config: Config, place: Place) -> dict[str, Any]:
    """The Trinity config for a run of `config` at `place`.

    Without GPUs (`trainer_common.n_gpus_per_node: 0`) the config is for Trinity's `tinker` route, behind which ajet's
    own CPU learner stands; else for verl and vLLM. Raises ConfigError with everything that can't be honoured.
    """
    common, rollout, optim = config.trainer_common, config.rollout, config.trainer_common.optim
    cpu = common.n_gpus_per_node == 0
    _refuse(config, cpu)
    episodes = config.data.train_batch_size * rollout.num_repeat
    made = {
        "mode": "both",
        "project": place.run_id,
        "name": NAME,
        "checkpoint_root_dir": str(place.checkpoints),
        "ray_namespace": f"ajet/{place.run_id}",
        "continue_from_checkpoint": True,  # the directory is this run's own
        "ignore_validator_suggestions": True,  # a validator of Trinity's asks on the terminal and waits
        "algorithm": {
            # The trainer without GPUs reads the reference's log-probabilities whether they are needed or not.
            "algorithm_type": f"{_HERE}.batches.{'WithReference' if common.use_kl_loss or cpu else 'WithoutReference'}",
            "repeat_times": rollout.num_repeat,
            "advantage_fn": f"{_HERE}.batches.GivenAdvantages",
            "advantage_fn_args": {
                "multiple_of": 1 if cpu else _ranks(config),
            },
            "sample_strategy": f"{_HERE}.batches.WholeSteps",
            "sample_strategy_args": {
                "max_staleness": rollout.max_staleness,
                "run_id": place.run_id,
                "by_sequence": cpu,
                "ranks": 1 if cpu else _ranks(config),
            },
            **_loss(config, cpu),
            "loss_agg_mode": "token-mean",
            "kl_penalty_fn": "none",
            "optimizer": {
                **({} if place.lr is None else {"lr": place.lr}),
                **_schedule(config, cpu),
                "min_lr_ratio": 0.0,
                "betas": list(optim.betas),
                "weight_decay": optim.weight_decay,
                "clip_grad": optim.grad_clip,
            },
        },
        "model": {
            "model_path": place.model,
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "max_model_len": rollout.max_model_len,
            **_lengths(config),
            "enable_prompt_truncation": False,
            **({"tinker": {"enable": True}} if cpu else {}),
            **_lora(config),
        },
        "cluster": {
            "ray_address": place.ray_address,
            "node_num": common.nnodes,
            "gpu_per_node": common.n_gpus_per_node,
        },
        "buffer": {
            "batch_size": config.data.train_batch_size,
            "train_batch_size": episodes * rollout.multi_turn.expected_steps,
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
        },
        "data_processor": {"experience_pipeline": {"save_input": False}},
        "explorer": {
            "runner_per_model": min(_runners(config), _RUNNERS_WITHOUT_GPU) if cpu else _runners(config),
            "max_timeout": math.ceil((rollout.timeout + rollout.judge_timeout) * (rollout.max_retries + 1)),
            "max_retry_times": 1,
            "eval_interval": common.test_freq if common.test_freq > 0 else place.steps + 1,
            "eval_on_startup": common.val_before_train and place.val_tasks > 0,
            "rollout_model": {
                "engine_type": "tinker" if cpu else "vllm",
                "engine_num": rollout.n_vllm_engine,
                "tensor_parallel_size": rollout.tensor_parallel_size,
                "enable_openai_api": True,
                "enable_history": False,
                "enable_prefix_caching": True,
                "gpu_memory_utilization": rollout.gpu_memory_utilization or (0.5 if _shared(config) else 0.85),
                "dtype": {"auto": "bfloat16"}.get(config.model.dtype, config.model.dtype),
                "seed": common.seed,
                "extra_engine_args": {"max_num_seqs": rollout.max_num_seqs, "logprobs_mode": "processed_logprobs"},
            },
        },
        "trainer": {
            "trainer_type": "tinker" if cpu else "verl",
            "total_steps": place.steps,
            "save_interval": common.save_freq if common.save_freq > 0 else place.steps,
            "save_hf_checkpoint": "last",
            "grad_clip": optim.grad_clip,
            "max_checkpoints_to_keep": common.keep_checkpoints,
            "max_token_len_per_gpu": max(rollout.max_model_len, common.micro_batch_tokens),
            "ulysses_sequence_parallel_size": common.ulysses_sequence_parallel_size,
            "param_offload": common.fsdp_config.param_offload,
            "optimizer_offload": common.fsdp_config.optimizer_offload,
            **({} if cpu else _attention(config, place)),
        },
        "synchronizer": {
            "sync_method": "memory" if cpu else "nccl",
            "sync_style": "fixed",
            "sync_interval": 1,
            "sync_offset": rollout.max_staleness,
            "sync_timeout": 3600,
        },
        "monitor": {
            "monitor_type": f"{_HERE}.monitor.ToTheDriver",
            "monitor_args": {"run_id": place.run_id},
        },
    }
    own = config.roots.plain().get("trinity") or {}
    if not isinstance(own, Mapping):
        raise ConfigError(f"the root trinity: must be a mapping of Trinity's keys (got {type(own).__name__})")
    return merged(made, own)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, mapping by mapping; lists and plain values are replaced whole."""
    result = dict(base)
    for name, value in over.items():
        below = result.get(name)
        result[name] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def _refuse(config: Config, cpu: bool) -> None:
    """Raise ConfigError with each key that would give another result; warn of those that have no effect."""
    common, rollout = config.trainer_common, config.rollout
    wrong = []
    if common.algorithm.adv_estimator == "reinforce_plus_plus":
        wrong.append(
            "trainer_common.algorithm.adv_estimator: reinforce_plus_plus normalises over a whole batch, whose groups "
            "lie on different nodes here; use grpo or rloo"
        )
    if common.algorithm.use_kl_in_reward:
        wrong.append("trainer_common.algorithm.use_kl_in_reward: use trainer_common.use_kl_loss with kl_loss_coef")
    if rollout.sampling == "request":
        wrong.append(
            "rollout.sampling: request; Trinity trains at one temperature for all calls: set rollout.sampling: run"
        )
    if common.optim.lr_scheduler_type == "linear" and not cpu and not schedule_is_trinitys(config):
        wrong.append(
            "trainer_common.optim.lr_scheduler_type: linear; Trinity knows constant and cosine: set "
            "trinity.algorithm.optimizer.lr_scheduler_type, which wins there"
        )
    if common.mini_batch_num > 1 or common.ppo_epochs > 1:
        wrong.append(
            "trainer_common.mini_batch_num and ppo_epochs must be 1: a Trinity step is one update of the whole batch"
        )
    if config.model.base_url or config.model.scripted:
        wrong.append("model.base_url and model.scripted: Trinity trains weights; set model.path")
    if cpu and config.model.lora.enabled:
        wrong.append("model.lora: the route without GPUs trains all weights; set model.lora.enabled: false")
    if config.model.lora.enabled and config.model.lora.dropout:
        wrong.append("model.lora.dropout: Trinity's adapters have none; set it to 0")
    if not cpu and _trainer_gpus(config) < 1:
        wrong.append(
            f"no GPU is left to train on: {common.nnodes} × {common.n_gpus_per_node} GPUs, and "
            f"{rollout.n_vllm_engine} × {rollout.tensor_parallel_size} for sampling; lower rollout.n_vllm_engine"
        )
    if wrong:
        raise ConfigError("backbone trinity can't honour:\n  " + "\n  ".join(wrong))
    for path, why in _WITHOUT_EFFECT.items():
        if config.is_set(path):
            log.warning("%s has no effect under backbone trinity: %s", path, why)
    if config.is_set("rollout.deterministic") and rollout.deterministic:
        log.warning("rollout.deterministic: the order of calls on a cluster is not fixed, so a run does not repeat")


_WITHOUT_EFFECT = {
    "model.gradient_checkpointing": "verl always recomputes activations",
    "model.device": "Trinity places models by trainer_common.nnodes and n_gpus_per_node",
    "rollout.name": "clusters sample with vllm",
    "rollout.runner": "Trinity's own runners are processes over the cluster already",
}


def _shared(config: Config) -> bool:
    """Whether the sampler and the trainer take turns on one GPU."""
    return config.trainer_common.nnodes * config.trainer_common.n_gpus_per_node == 1


def _loss(config: Config, cpu: bool) -> dict[str, Any]:
    """The clipped loss, the KL term and the entropy bonus.

    Over verl they are ours, means over the batch's tokens. Without GPUs our learner adds the terms itself: Trinity's
    trainer sees no distribution there.
    """
    common = config.trainer_common
    kl, entropy = common.use_kl_loss and not cpu, 0.0 if cpu else common.entropy_coef
    ours = f"{_HERE}.losses.{'BatchLossWithKL' if kl else 'BatchLoss'}"
    return {
        "policy_loss_fn": "ppo" if cpu else ours,
        "policy_loss_fn_args": {
            "clip_range_low": common.clip_ratio_low,
            "clip_range_high": common.clip_ratio_high,
            "clip_ratio_c": _DUAL_CLIP_OFF,
            "loss_agg_mode": "token-mean",
            **({"kl_coef": common.kl_loss_coef, "kl_type": common.kl_loss_type} if kl else {}),
        },
        "kl_loss_fn": "none",
        "kl_loss_fn_args": {},
        "entropy_loss_fn": f"{_HERE}.losses.BatchEntropy" if entropy else "none",
        "entropy_loss_fn_args": {"entropy_coef": entropy},
    }


def schedule_is_trinitys(config: Config) -> bool:
    """Whether the root `trinity:` says how the learning rate falls."""
    own: Any = config.roots.plain().get("trinity")
    for name in ("algorithm", "optimizer", "lr_scheduler_type"):
        own = own.get(name) if isinstance(own, Mapping) else None
    return own is not None


def _attention(config: Config, place: Place) -> dict[str, Any]:
    wanted = config.model.attn_implementation
    if wanted == "auto":
        wanted = "flash_attention_2" if place.flash_attention else "sdpa"
    model = {"override_config": {"attn_implementation": wanted}}
    return {
        "trainer_strategy": "fsdp2",
        "use_remove_padding": wanted.startswith("flash"),
        "trainer_config": {"actor_rollout_ref": {"model": model}},
    }


def _schedule(config: Config, cpu: bool) -> dict[str, Any]:
    """The learning rate's course. Without GPUs our learner keeps it as `local` does, unless `trinity:` says one."""
    optim = config.trainer_common.optim
    if cpu and not schedule_is_trinitys(config):
        return {"lr_warmup_steps": 0, "lr_scheduler_type": "constant"}
    return {"lr_warmup_steps": optim.warmup_steps, "lr_scheduler_type": optim.lr_scheduler_type}


def _ranks(config: Config) -> int:
    """Over how many GPUs, or groups of them that share a sequence, a batch is split."""
    return max(1, _trainer_gpus(config) // config.trainer_common.ulysses_sequence_parallel_size)


def _trainer_gpus(config: Config) -> int:
    common, rollout = config.trainer_common, config.rollout
    if _shared(config):
        return 1
    return common.nnodes * common.n_gpus_per_node - rollout.n_vllm_engine * rollout.tensor_parallel_size


def _lengths(config: Config) -> dict[str, int]:
    reply = min(config.rollout.max_response_length_in_one_turn, config.rollout.max_model_len - 1)
    return {"max_response_tokens": reply, "max_prompt_tokens": config.rollout.max_model_len - reply}


def _lora(config: Config) -> dict[str, Any]:
    lora = config.model.lora
    if not lora.enabled:
        return {}
    modules = lora.target_modules
    return {
        "lora_configs": [
            {
                "lora_rank": lora.r,
                "lora_alpha": lora.alpha,
                "target_modules": modules if isinstance(modules, str) else ",".join(modules),
            }
        ]
    }


def _runners(config: Config) -> int:
    """Runner processes per engine: each runs the attempts of one task at once."""
    rollout = config.rollout
    at_once = rollout.max_env_worker // (rollout.n_vllm_engine * rollout.num_repeat)
    return max(1, min(at_once, math.ceil(config.data.train_batch_size / rollout.n_vllm_engine)))


def _tasks(config: Config, place: Place) -> dict[str, Any]:
    workflow, given = f"{_HERE}.workflow.AjetWorkflow", dict(place.workflow_args or {})
    common = config.trainer_common

    def taskset(name: str, part: str, **more: Any) -> dict[str, Any]:
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
            taskset("val", "val", repeat_times=max(1, common.val_pass_n), workflow_args=given),
            taskset("greedy", "val", repeat_times=1, workflow_args={**given, "greedy": True}),
        ]
    order = {"selector_type": f"{_HERE}.batches.OrderOfLocal", "seed": common.seed}
    return {
        "tasksets": [taskset("train", "train", data_selector=order, workflow_args=given)],
        "eval_tasksets": evaluation,
        "default_workflow_type": workflow,
    }
