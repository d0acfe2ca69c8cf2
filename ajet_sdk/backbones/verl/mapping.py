"""`to_verl`: converts ajet's config to a verl config (0.8)."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ajet_sdk.backbones.shared.mapping import (
    DUAL_CLIP_OFF,
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
from ajet_sdk.config.trainer_schema import OBJECTIVE, TrainerCommon

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ajet_sdk.config.config import Config

log = logging.getLogger("ajet")

ESTIMATOR = "ajet_given"
"""The name of the advantage estimator registered in `manager`."""
_HERE = "ajet_sdk.backbones.verl"


@dataclass(frozen=True, kw_only=True)
class VerlPlace(Place):
    name: ClassVar[str] = "verl"

    @property
    def job(self) -> Path:
        """The file with the job: config, code by reference, tasks."""
        return self.directory / "job.json"


def rows_of(config: Config) -> int:
    """Rows of a training batch, whose number verl requires to be constant.

    One per expected timeline, `train_batch_size * num_repeat * expected_steps`, rounded up to a
    multiple of the GPUs. A step with fewer timelines is filled with blank rows, one with more is
    truncated.
    """
    gpus = max(1, config.trainer_common.nnodes * config.trainer_common.n_gpus_per_node)
    rollout = config.rollout
    expected = config.data.train_batch_size * rollout.num_repeat * rollout.multi_turn.expected_steps
    return math.ceil(expected / gpus) * gpus


def to_verl(config: Config, place: VerlPlace) -> dict[str, object]:
    """The changes to verl's defaults for a run of `config` at `place`; the root `verl:` of the file
    takes precedence.

    Raises ConfigError that lists all unsupported keys.
    """
    check(config)
    _warn(config)
    common = config.trainer_common
    rows = rows_of(config)
    computed: dict[str, object] = {
        "ajet": {"job": str(place.job)},
        "data": {
            # Positions instead of tasks, which follow from the step, as in `local`; see `batches`
            # and `manager`.
            "custom_cls": {"path": f"pkg://{_HERE}.batches", "name": "BatchPositions"},
            "train_files": place.steps * rows,
            "val_files": max(1, place.val_tasks),
            "train_batch_size": rows,
            "val_batch_size": None,
            **_lengths(config, "max_{}_length"),
            "shuffle": False,
            "validation_shuffle": False,
            "dataloader_num_workers": 0,
        },
        "actor_rollout_ref": {
            "model": _model(config, place),
            "actor": _actor(config, place, rows),
            "ref": {"fsdp_config": _engine(config)},
            "rollout": _rollout(config),
        },
        "algorithm": {
            "adv_estimator": ESTIMATOR,
            "use_kl_in_reward": False,
            # The ratio's denominator is the sampler's log-probability, as in `local`.
            "rollout_correction": {
                "bypass_mode": True, "loss_type": "ppo_clip", "rollout_is": None, "rollout_rs": None,
            },
        },
        "critic": {"enable": False},
        "reward": {"num_workers": 1},
        "trainer": {
            "project_name": "ajet",
            "experiment_name": place.run_id,
            "logger": ["file"],
            "total_epochs": 1,
            "total_training_steps": place.steps,
            "nnodes": common.nnodes,
            "n_gpus_per_node": common.n_gpus_per_node,
            "balance_batch": True,
            "save_freq": common.save_freq if common.save_freq > 0 else max(1, place.steps),
            # verl also validates after the last step
            "test_freq": (common.test_freq if common.test_freq > 0 else max(1, place.steps)) if place.val_tasks else -1,
            "val_before_train": common.val_before_train and place.val_tasks > 0,
            "max_actor_ckpt_to_keep": common.keep_checkpoints,
            "default_local_dir": str(place.directory),
            "resume_mode": "auto",  # the directory belongs to this run
        },
    }  # fmt: skip
    whole = merge_root(computed, config, "verl", _OURS)
    refuse("verl", _adapters_of(whole))
    return whole


def _adapters_of(mapping: Mapping[str, object]) -> list[str]:
    """An error for each of verl's keys of a LoRA adapter that is set."""
    wrong = []
    for name in ("lora_rank", "lora.rank", "lora_adapter_path"):
        path = f"actor_rollout_ref.model.{name}"
        if value_at(mapping, path):
            wrong.append(f"verl.{path}: {_NO_LORA}; leave it out, or use backbone local or trinity")
    return wrong


_NO_LORA = (
    "verl's engines answer with the base model while they have no adapter, and do not say so; and"
    " verl exports a model that transformers cannot load"
)

_OURS = {
    "ajet.job": "",
    "data.train_batch_size": "data.train_batch_size",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "data.train_batch_size",
    "actor_rollout_ref.rollout.n": "rollout.num_repeat",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.top_p": "rollout.top_p",
    "actor_rollout_ref.rollout.top_k": "rollout.top_k",
    "algorithm.adv_estimator": "trainer_common.algorithm.adv_estimator",
    "trainer.total_training_steps": "trainer_common.total_steps",
    "trainer.nnodes": "trainer_common.nnodes",
    "trainer.n_gpus_per_node": "trainer_common.n_gpus_per_node",
    "trainer.default_local_dir": "trainer_common.checkpoint_base_dir",
}
"""See `merge_root`. Driver and agents use these keys, too; all others may be overridden."""


def _model(config: Config, place: VerlPlace) -> dict[str, object]:
    model = config.model
    settings: dict[str, object] = {
        "path": place.model,
        "use_remove_padding": True,
        # verl's default is to recompute, unlike ajet's; large models need it, so only an explicit
        # value is passed on.
        "enable_gradient_checkpointing": (
            model.gradient_checkpointing if config.is_set("model.gradient_checkpointing") else True
        ),
    }
    if model.attn_implementation != "auto":
        settings["override_config"] = {"attn_implementation": model.attn_implementation}
    return settings


def _actor(config: Config, place: VerlPlace, rows: int) -> dict[str, object]:
    common = config.trainer_common
    optim = config.trainer_common.optim
    return {
        "strategy": "fsdp2",
        "ppo_mini_batch_size": rows,
        "ppo_epochs": 1,
        "shuffle": False,
        "data_loader_seed": common.seed,
        "use_dynamic_bsz": True,
        "ppo_max_token_len_per_gpu": max(
            math.ceil(config.rollout.max_model_len / common.ulysses_sequence_parallel_size),
            common.micro_batch_tokens or MICRO_BATCH_TOKENS,
        ),
        "ulysses_sequence_parallel_size": common.ulysses_sequence_parallel_size,
        "policy_loss": {"loss_mode": "vanilla"},
        "clip_ratio": common.clip_ratio_low,
        "clip_ratio_low": common.clip_ratio_low,
        "clip_ratio_high": common.clip_ratio_high,
        "clip_ratio_c": DUAL_CLIP_OFF,
        "loss_agg_mode": "token-mean",
        "entropy_coeff": common.entropy_coef,
        "use_kl_loss": common.use_kl_loss,
        "kl_loss_coef": common.kl_loss_coef,
        "kl_loss_type": common.kl_loss_type,
        "grad_clip": optim.grad_clip,
        "optim": optimizer(config, place),
        "fsdp_config": {
            **_engine(config),
            "optimizer_offload": common.fsdp_config.optimizer_offload,
        },
        "checkpoint": {
            "save_contents": ["model", "optimizer", "extra", "hf_model"],
            "load_contents": ["model", "optimizer", "extra"],
        },
    }


def _engine(config: Config) -> dict[str, object]:
    """Weights are in float32, passes in `model.dtype`."""
    return {
        "model_dtype": "fp32",
        "mixed_precision": mixed_precision(config),
        "param_offload": config.trainer_common.fsdp_config.param_offload,
        "seed": config.trainer_common.seed,
    }  # fmt: skip


def _rollout(config: Config) -> dict[str, object]:
    rollout = config.rollout
    return {
        "name": "vllm",
        "mode": "async",
        "n": 1,
        "dtype": dtype(config),
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        **_lengths(config, "{}_length"),
        "max_model_len": rollout.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": max(8192, rollout.max_model_len),
        "gpu_memory_utilization": rollout.gpu_memory_utilization or 0.5,
        "tensor_model_parallel_size": rollout.tensor_parallel_size,
        "enable_prefix_caching": True,
        "calculate_log_probs": True,
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": False,  # stop strings need a tokenizer
        "val_kwargs": {"n": 1, "do_sample": False},
        "agent": {"num_workers": 1, "agent_loop_manager_class": f"{_HERE}.manager.AjetManager"},
    }


def _lengths(config: Config, name: str) -> dict[str, int]:
    reply, prompt = reply_and_prompt(config)
    return {name.format("prompt"): prompt, name.format("response"): reply}


def check(config: Config) -> None:
    """Raise ConfigError that lists the keys that verl does not support."""
    common = config.trainer_common
    gpus = common.nnodes * common.n_gpus_per_node
    wrong = unsupported_keys(config, "verl")
    if config.model.lora.enabled:
        wrong.append(
            f"model.lora: {_NO_LORA}; set model.lora.enabled: false, or use backbone local or"
            " trinity"
        )
    for key in OBJECTIVE:
        value = getattr(common, key)
        if value != getattr(TrainerCommon(), key) and key not in (
            "clip_ratio_low",
            "clip_ratio_high",
        ):
            wrong.append(
                f"trainer_common.{key}: {value}; verl gets the clipped loss per token only; leave"
                " it out, or use backbone local or trinity"
            )
    if not gpus:
        wrong.append(
            "trainer_common.n_gpus_per_node: 0; verl trains on GPUs only; on a CPU use backbone"
            " local or trinity"
        )
    for key, share in (
        ("rollout.tensor_parallel_size", config.rollout.tensor_parallel_size),
        ("trainer_common.ulysses_sequence_parallel_size", common.ulysses_sequence_parallel_size),
    ):
        if gpus % share:
            wrong.append(f"{key}: {share} does not divide the run's {gpus} GPUs")
    if common.optim.lr_scheduler_type == "linear":
        wrong.append(
            "trainer_common.optim.lr_scheduler_type: linear; verl supports constant and cosine"
        )
    if common.mini_batch_num > 1 or common.ppo_epochs > 1:
        wrong.append(
            "trainer_common.mini_batch_num and ppo_epochs must be 1: verl pads batches with rows"
            " that would change the size of each update"
        )
    refuse("verl", wrong)


def _warn(config: Config) -> None:
    warn(config, "verl", _WITHOUT_EFFECT)
    if config.trainer_common.optim.warmup_steps:
        log.warning(
            "trainer_common.optim.warmup_steps: verl's learning rate starts at 0, one step behind"
            " that of local, so the first step changes no weights"
        )


_WITHOUT_EFFECT = {
    "model.vision_tower": "verl 0.8 trains all weights, those of the vision tower, too",
    "model.device": "verl places models by trainer_common.nnodes and n_gpus_per_node",
    "rollout.n_vllm_engine": "there is one engine for every rollout.tensor_parallel_size GPUs",
    "rollout.max_staleness": "sampling and training alternate, so no token is stale",
}
