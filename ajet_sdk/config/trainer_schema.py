"""The section `trainer_common`: how weights are trained, validated, saved and logged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import model_validator

from ajet_sdk.config.schema import Section, key, section, wrong

__all__ = ["READ_BY", "Algorithm", "Estimator", "RewardEstimator", "TrainerCommon"]


RewardEstimator = Literal["grpo", "rloo", "reinforce_plus_plus"]
Estimator = Literal[RewardEstimator, "sft", "dpo", "opd"]

_OF_REWARDS = get_args(RewardEstimator)
READ_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("use_kl_loss", "kl_loss_coef", "kl_loss_type", "entropy_coef"), _OF_REWARDS),
    **dict.fromkeys(("clip_ratio_low", "clip_ratio_high"), (*_OF_REWARDS, "opd")),
    "algorithm.normalize_std": ("grpo",),
    **dict.fromkeys(("algorithm.data", "algorithm.per_task"), ("sft", "dpo")),
    "algorithm.min_reward": ("sft",),
    "algorithm.beta": ("dpo",),
    **dict.fromkeys(("algorithm.teacher", "algorithm.teacher_model", "algorithm.teacher_key_env"), ("opd",)),
}
"""Keys of `trainer_common` that some of the estimators read, and which do."""


class Algorithm(Section):
    adv_estimator: Estimator = key(
        "grpo",
        "What is learnt from. Rewards: grpo (arXiv:2402.03300), rloo (arXiv:2402.14740), reinforce_plus_plus "
        "(arXiv:2501.03262). Others, with backbone local: sft (replies as they stand), dpo (pairs of a better and a "
        "worse attempt, arXiv:2305.18290), opd (a teacher's log-probabilities of the model's own replies, "
        "arXiv:2306.13649). `algorithm: sft` is short for `algorithm: {adv_estimator: sft}`.",
    )
    normalize_std: bool = key(True, "grpo: divide by the group's standard deviation.")
    use_kl_in_reward: bool = key(False, "Take the KL penalty from the reward instead of adding it to the loss.")
    data: str | None = key(
        None,
        "sft, dpo: what is learnt from. A trace (a file or an experiment's directory): the best episodes of each task, "
        "or its best with its worst. Or a JSON-lines file: rows of `messages` (sft), or of `prompt`, `chosen` and "
        "`rejected` (dpo). null: sft takes the training tasks' own `messages`; dpo pairs the attempts of each step.",
    )
    per_task: int = key(1, "Of a trace: the most episodes (sft) or pairs (dpo) of one task, the best first.", ge=1)
    min_reward: float | None = key(
        None, "Of a trace, sft: the least reward of an episode; null: more than the trace's lowest, where they differ."
    )
    beta: float = key(0.1, "dpo: how strongly the policy is held near the first model.", gt=0)
    teacher: str | None = key(
        None,
        "opd: the model whose log-probabilities are learnt from, of the same tokenizer. A directory or a hub name, or "
        "the URL of an endpoint that returns `prompt_logprobs`, as vLLM's does (`http://HOST:PORT/v1`).",
    )
    teacher_model: str | None = key(None, "opd: the teacher's name at its endpoint; null: the one that it lists first.")
    teacher_key_env: str = key("OPENAI_API_KEY", "opd: the environment variable that holds the endpoint's key.")

    @property
    def stored(self) -> bool:
        """Whether a step learns from what was said before, instead of from attempts of its own."""
        return self.adv_estimator == "sft" or (self.adv_estimator == "dpo" and self.data is not None)

    @property
    def grouped(self) -> bool:
        """Whether attempts at one task are compared."""
        return self.adv_estimator in ("grpo", "rloo") or (self.adv_estimator == "dpo" and not self.stored)

    @property
    def by_reward(self) -> bool:
        """Whether rewards are what is learnt from."""
        return self.adv_estimator in get_args(RewardEstimator)

    @property
    def needs_reward(self) -> bool:
        """Whether an attempt without a reward is worth nothing."""
        return self.by_reward or self.adv_estimator == "dpo"

    @model_validator(mode="after")
    def _needs(self) -> Algorithm:
        if self.adv_estimator == "opd" and not self.teacher:
            raise wrong("teacher", "must be given for opd {got}: a directory, a hub name, or an endpoint's URL")
        return self


class FsdpConfig(Section):
    param_offload: bool = key(False, "Keep parameters in CPU memory (clusters).")
    optimizer_offload: bool = key(False, "Keep optimiser states in CPU memory (clusters).")


class Optim(Section):
    lr: float | None = key(None, "Learning rate; null: chosen by model size and printed.", gt=0)
    weight_decay: float = key(0.0, "Weight decay of AdamW.", ge=0)
    betas: tuple[float, float] = key((0.9, 0.95), "Momenta of AdamW.")
    warmup_steps: int = key(5, "Steps over which the learning rate rises to its value.", ge=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = key(
        "constant", "After the warm-up: stay, or fall to 0 over the run's steps."
    )
    grad_clip: float = key(1.0, "Largest norm of the gradient.", gt=0)

    @model_validator(mode="after")
    def _betas(self) -> Optim:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise wrong("betas", "must both be at least 0 and less than 1 {got}")
        return self


class TrainerCommon(Section):
    seed: int = key(0, "Every other seed is derived from it.", ge=0)
    total_epochs: int = key(50, "Passes over the training tasks.", ge=1)
    total_steps: int | None = key(None, "Training steps; null: the epochs decide.", ge=1)
    total_training_steps: int | None = key(
        None, "Most training steps: ends training before `total_epochs` or `total_steps` do.", ge=1
    )
    val_before_train: bool = key(False, "Validate before the first step.")
    val_pass_n: int = key(4, "Sampled attempts per validation task, for pass@k.", ge=1)
    val_tasks: int | None = key(None, "Validate on so many of the tasks; null: all.", ge=1)
    save_freq: int = key(20, "Steps between checkpoints; 0 or less: only at the end.")
    test_freq: int = key(20, "Steps between validations; 0 or less: only at the end.")
    keep_checkpoints: int = key(2, "Checkpoints kept beside the final model.", ge=1)
    nnodes: int = key(1, "Machines (clusters).", ge=1)
    n_gpus_per_node: int = key(8, "GPUs per machine (clusters).", ge=0)
    logger: list[Literal["console", "tensorboard", "wandb", "swanlab"]] = key(
        ["console", "tensorboard"], "Where metrics go beside the trace, one or a list of them."
    )
    algorithm: Algorithm = section(Algorithm, "What is learnt from.")
    mini_batch_num: int = key(1, "Optimiser steps per batch.", ge=1)
    ppo_epochs: int = key(1, "Passes over each batch.", ge=1)
    micro_batch_tokens: int = key(8192, "Tokens per forward pass; gradients of several are summed.", ge=1)
    clip_ratio_low: float = key(0.2, "The policy ratio is clipped at 1 - this.", ge=0, le=1)
    clip_ratio_high: float = key(0.28, "The policy ratio is clipped at 1 + this.", ge=0)
    entropy_coef: float = key(0.0, "Weight of the entropy bonus.", ge=0)
    fsdp_config: FsdpConfig = section(FsdpConfig, "Sharded training (clusters).")
    optim: Optim = section(Optim, "The optimiser.")
    use_kl_loss: bool = key(
        True, "Add the KL divergence from the first model to the loss, where rewards are learnt from."
    )
    kl_loss_coef: float = key(0.002, "Weight of that term.", ge=0)
    kl_loss_type: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"] = key(
        "low_var_kl", "Estimator of the divergence (joschu.net/blog/kl-approx.html)."
    )
    ulysses_sequence_parallel_size: int = key(1, "GPUs that share one sequence (clusters).", ge=1)
    checkpoint_base_dir: str | None = key(
        None, "Where checkpoints go; null: `checkpoint/` in the experiment's directory."
    )
    save_trajectory_as_json_file: bool = key(
        False, "Also write each episode as JSON, into trajectory/ beside the trace."
    )

    @model_validator(mode="before")
    @classmethod
    def _one_logger(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and isinstance(data.get("logger"), str):
            return {**data, "logger": [data["logger"]]}
        return data
