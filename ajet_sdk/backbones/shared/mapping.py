"""Shared parts of the mappings from ajet's config to those of Trinity and verl.

A key that a trainer does not support is an error if it would change the result, else a warning. The
config file's root named after the backbone takes precedence.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from ajet_sdk.config.trainer_schema import READ_BY, RewardEstimator
from ajet_sdk.errors import ConfigError

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

log = logging.getLogger("ajet")

MICRO_BATCH_TOKENS = 8192
"""Tokens per GPU and pass if the config sets no number."""
DUAL_CLIP_OFF = 1e9
"""Trinity and verl clip the loss of tokens with a negative advantage at this multiple; the local
loss does not."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The run's paths, model and sizes, which the mapping needs besides the config."""

    name: ClassVar[str]
    """The name of the job inside the run's checkpoint directory."""

    run_id: str
    model: str
    """A directory that every node can read, or a name on the hub."""
    steps: int
    """Training steps of the run."""
    lr: float | None
    """None if it depends on the model's size, which is not known yet."""
    checkpoints: Path
    """The checkpoint store, which every node can reach; the trainer's directory is
    `{checkpoints}/{run_id}/{name}`."""
    val_tasks: int = 0
    """Number of validation tasks."""

    @property
    def directory(self) -> Path:
        """The trainer's directory for this job: checkpoints, logs and files for its processes."""
        return self.checkpoints / self.run_id / self.name


def merged(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """Merge `over` into `base`, recursively for mappings; lists and other values are replaced."""
    result = dict(base)
    for name, value in over.items():
        below = result.get(name)
        result[name] = (
            merged(below, value)
            if isinstance(below, Mapping) and isinstance(value, Mapping)
            else value
        )
    return result


def merge_root(
    computed: Mapping[str, object], config: Config, name: str, ours: Mapping[str, str]
) -> dict[str, object]:
    """Merge the root `name:` of the config file over the computed mapping.

    `ours` lists trainer keys that ajet relies on, each with the ajet key it comes from ("" if ajet
    sets it itself). Raises ConfigError if the root is not a mapping or contradicts one of them.
    """
    root = config.roots.plain().get(name) or {}
    if not isinstance(root, Mapping):
        raise ConfigError(
            f"the top-level key {name}: must be a mapping (got {type(root).__name__})"
        )
    whole = merged(computed, root)
    wrong = []
    for path, key in ours.items():
        before = value_at(computed, path)
        after = value_at(whole, path)
        if before != after:
            wrong.append(
                f"{name}.{path}: {after} contradicts {key} ({before}), which ajet uses as well; set"
                f" {key} alone"
                if key
                else f"{name}.{path}: ajet sets this itself; leave it out"
            )
    refuse(name, wrong)
    return whole


def value_at(mapping: Mapping[str, object], path: str) -> Any:
    """The value at a dotted path, or None."""
    value: object = mapping
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def unsupported_keys(config: Config, trainer: str) -> list[str]:
    """Errors for keys that neither Trinity nor verl supports, for messages on `trainer`."""
    model = config.model
    wrong = []
    if config.trainer_common.algorithm.use_kl_in_reward:
        wrong.append(
            "trainer_common.algorithm.use_kl_in_reward: use use_kl_loss with kl_loss_coef, or"
            " backbone local"
        )
    if not config.trainer_common.algorithm.by_reward:
        name = config.trainer_common.algorithm.adv_estimator
        wrong.append(
            f"trainer_common.algorithm: {name}; {trainer} learns from sampled attempts and their"
            " advantages only, not from demonstrations, pairs or teachers; use backbone local"
        )
    if not config.validation_attempts:
        wrong.append(
            f"trainer_common.val_pass_n: 0; {trainer} samples validation tasks; set 1, or use"
            " backbone local"
        )
    if model.trust_remote_code:
        wrong.append(
            f"model.trust_remote_code: {trainer} runs no code of a checkpoint; leave it out"
        )
    if config.rollout.sampling == "request":
        wrong.append(
            f"rollout.sampling: request; {trainer} trains all calls at one temperature; set"
            " rollout.sampling: run"
        )
    if model.base_url or model.scripted:
        wrong.append(
            f"model.base_url and model.scripted: {trainer} trains model weights; set model.path"
        )
    return wrong


def refuse(backbone: str, wrong: list[str]) -> None:
    """Raise one ConfigError that lists everything in `wrong`."""
    if wrong:
        raise ConfigError(f"backbone {backbone} does not support:\n  " + "\n  ".join(wrong))


def warn(config: Config, backbone: str, without_effect: Mapping[str, str]) -> None:
    """Warn about keys that have no effect; `without_effect` maps paths to reasons."""
    of_rewards = get_args(RewardEstimator)
    conditional = {
        f"trainer_common.{name}": f"a key of {', '.join(read_by)}, which only backbone local has"
        for name, read_by in READ_BY.items()
        if not {*read_by} & {*of_rewards}
    }
    only_local = (
        "rollout.resample_groups",
        "trainer_common.stop_when",
        "trainer_common.algorithm.replay",
    )
    local = dict.fromkeys(only_local, "only backbone local has it")
    for path, why in {
        "rollout.name": "clusters sample with vllm",
        **local,
        **conditional,
        **without_effect,
    }.items():
        if config.is_set(path):
            log.warning("%s has no effect with backbone %s: %s", path, backbone, why)
    if config.rollout.top_p < 1 or config.rollout.top_k > 0:
        log.warning(
            "rollout.top_p and top_k restrict sampling, but backbone %s scores tokens under the"
            " unrestricted distribution: policy ratios are below 1, and tokens with negative"
            " advantage may be clipped and get no gradient. Set top_p: 1 and top_k: -1, or use"
            " backbone local, which scores them under the restricted one",
            backbone,
        )
    if config.is_set("rollout.deterministic") and config.rollout.deterministic:
        log.warning(
            "rollout.deterministic: the order of calls on a cluster is not fixed, so runs are not"
            " reproducible"
        )


def dtype(config: Config) -> str:
    return {"auto": "bfloat16"}.get(config.model.dtype, config.model.dtype)


def mixed_precision(config: Config) -> dict[str, str]:
    """Mixed precision of verl's workers: passes in `model.dtype`, weights and gradient sums in
    float32."""
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    return {"param_dtype": names[dtype(config)], "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def reply_and_prompt(config: Config) -> tuple[int, int]:
    """Maximum tokens of a reply and of its prompt; a timeline may be `max_model_len` long."""
    reply = min(config.rollout.max_response_length_in_one_turn, config.rollout.max_model_len - 1)
    return reply, config.rollout.max_model_len - reply


def optimizer(config: Config, place: Place) -> dict[str, object]:
    """Optimizer and learning rate schedule, under the names that Trinity and verl share."""
    optim = config.trainer_common.optim
    return {
        **({} if place.lr is None else {"lr": place.lr}),
        "lr_warmup_steps": optim.warmup_steps,
        "lr_scheduler_type": optim.lr_scheduler_type,
        "min_lr_ratio": 0.0,
        "betas": list(optim.betas),
        "weight_decay": optim.weight_decay,
        "clip_grad": optim.grad_clip,
    }
